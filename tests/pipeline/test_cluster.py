"""The jobs on a standalone cluster, by spark-submit, with executors that have nothing but what is shipped to them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support import cluster, spanner
from tests.support.cluster import Cluster
from tests.support.operations import rows_of


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster.running(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def test_register_on_a_cluster(spark_cluster: Cluster, database: Database, emulators: Emulators, tmp_path: Path):
    file = tmp_path / "in.jsonl"
    file.write_text("".join(f'{{"topic": "orders", "data": "{n}", "task_id": "{n}"}}\n' for n in range(1000)))
    variables = emulators.environment() | spanner.variables(str(database.database_id))
    import time

    t = time.time()
    done = spark_cluster.submit(
        "register", "--input", str(file), "--rejects", str(tmp_path / "rejects"), "--json", variables=variables
    )
    print(time.time() - t, done.stderr[-6000:])
    assert json.loads(done.stdout)["registered"] == 1000
    assert len(rows_of(database)) == 1000
