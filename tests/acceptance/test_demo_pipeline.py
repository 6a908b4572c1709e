"""`make demo-pipeline` as a newcomer runs it: all jobs on Spark, with few payments; its output."""

import json
import re
from pathlib import Path

import pytest

from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT, run

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "docs" / "examples")}
PAYMENTS = 300
#: Of ten payments four are of the topic that is replayed.
REPLAYED = PAYMENTS * 4 // 10


@pytest.mark.long("it waits for most of three minutes, and the tests of each job are in tests/pipeline")
@pytest.mark.timeout(400)
def test_all_jobs_one_after_the_other(emulators: Emulators, tmp_path: Path) -> None:
    """No task is lost or altered. A replayed task was sent twice, with a message for each."""
    done = run(
        "payments.demo", "--tasks", str(PAYMENTS), "--output", str(tmp_path / "out"),
        environment=ENVIRONMENT | emulators.environment(), seconds=380,
    )  # fmt: skip
    assert done.code == 0, done.stdout + done.stderr
    assert done.stdout.endswith("Nothing is lost.\n")
    both = re.findall(r"^  ([a-z ]+?)  +([\d,]+) +([\d,]+)(?:  \S|$)", done.stdout, re.MULTILINE)
    numbers = {name: (int(first.replace(",", "")), int(second.replace(",", ""))) for name, first, second in both}
    assert numbers["sendings"] == (PAYMENTS, PAYMENTS + REPLAYED)
    for name in ("lost", "still to be sent", "late", "altered", "out of order", "unknown"):
        assert numbers[name] == (0, 0), name
    assert numbers["messages"][1] >= numbers["sendings"][1]
    [sent] = re.findall(r"sent (\d+) by Spark, and (\d+) by 2 workers", done.stdout)
    assert sum(map(int, sent)) >= PAYMENTS
    for name in ("first", "second"):
        assert (tmp_path / "out" / f"{name}-audit" / "report.html").exists()
        summary = json.loads((tmp_path / "out" / f"{name}-audit" / "summary.json").read_text(encoding="utf-8"))
        assert summary["data_compared"] is True
    assert "Traceback" not in done.stderr
