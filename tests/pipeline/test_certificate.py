"""Certificates from end to end: issued by the audit, verified offline, and proofs of single tasks."""

import json
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.sql import SparkSession

from outbox.program.settings import DatabaseSettings
from outbox_pipeline import cli
from tests.support.certificates import DAYS, Place, audit, payload, prepare

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def place(spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path) -> Place:
    (tmp_path / "evidence").mkdir()
    made = Place(tmp_path / "evidence")
    prepare(spark, target, database, made)
    return made


def test_days_are_certified_verified_offline_and_prove_their_tasks(
    target: DatabaseSettings, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, second = (place.path(f"certificate-{day:%Y-%m-%d}.json") for day in DAYS[:2])
    assert cli.main(audit(target, place, DAYS[0], "one")) == 0
    assert capsys.readouterr().out.startswith("COMPLETE: 5 tasks delivered\n")
    assert first.read_text().startswith('{"summary": "COMPLETE: 5 tasks delivered",\n')
    assert cli.main(audit(target, place, DAYS[1], "two", previous=str(place.path("certificate-%Y-%m-%d.json")))) == 0
    predicate = payload(second)["predicate"]
    assert predicate["counts"]["registered"] == 5
    assert {topic: counts["delivered"] for topic, counts in predicate["topics"].items()} == {"bills": 3, "orders": 2}
    capsys.readouterr()
    code = cli.main(place.verify(*place.inputs()))
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    assert "Verified 2 certificates. The first one begins the chain" in printed.out
    key = str(place.path("key.pub"))
    prove = ["--certificate", str(first), "--public-key", key, "--archive", str(place.path("archive"))]
    assert cli.main(["certificate", "prove", "20-4", *prove]) == 0
    proof = tmp_path / "proof.json"
    proof.write_text(capsys.readouterr().out)
    assert len(json.loads(proof.read_text())["path"]) in {1, 2, 3}
    assert cli.main(place.verify("--proof", str(proof), files=[first])) == 0
    assert "contains task '20-4'" in capsys.readouterr().out
    assert cli.main(["certificate", "prove", "21-4", *prove]) == 1
    assert "Task '21-4' is not in" in capsys.readouterr().err
