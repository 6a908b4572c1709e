"""The source, the sink, `register` and `read_archive` with Spark Connect, whose client has no JVM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.sql import SparkSession

from outbox.devtools import child_process
from outbox.devtools.emulators import Emulators
from outbox.program.settings import DatabaseSettings
from outbox_pipeline.jobs.archive import job as archive
from tests.support.archives import DAY, sent, settings_of
from tests.support.cluster import QUICK_JAVA
from tests.support.operations import insert, rows_of
from tests.support.pipeline import options
from tests.support.processes import ROOT

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


def test_source_sink_register_and_archive_need_no_jvm(
    spark: SparkSession, target: DatabaseSettings, database: Database, emulators: Emulators, tmp_path: Path
):
    insert(database, [sent("purged", DAY)])
    archive.run(spark, settings_of(target, tmp_path / "archive"), purge=True, late=True)
    insert(database, [sent("sent", DAY)])
    variables = os.environ | emulators.environment() | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    submit = Path(pyspark.__file__).parent / "bin/spark-submit"
    words = [
        *map(
            str,
            (
                "/usr/bin/env",
                f"PYTHONPATH={ROOT}",
                f"PYSPARK_PYTHON={sys.executable}",
                f"SPARK_SUBMIT_OPTS={QUICK_JAVA} -Dspark.python.daemon.module=tests.support.spark_daemon",
                submit,
            ),
        )
    ]
    words += ["--master", "local[2,3]", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    words += ["--conf", "spark.connect.grpc.binding.port={port}", "--conf", "spark.ui.enabled=false", "spark-internal"]
    client = [sys.executable, "-m", "tests.support.connect_client"]
    with child_process.running("Spark Connect", words) as server:
        given = [f"{name}={value}" for name, value in options(target).items()]
        done = subprocess.run(
            [*client, f"sc://{server.host}", str(tmp_path), *given],
            check=False, cwd=ROOT, env=variables, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ids = sorted(str(number) for number in range(20) if number != 7)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "registered": 19,
        "rejected": ["data is NULL. For a message without data, pass an empty string"],
        "read": ids,
        "streamed": ["sent"],
        "archived": ["purged"],
    }
    written = {*(f"{number} written" for number in range(20)), *["of a stream"][: pyspark.__version__ >= "4.1"]}
    assert rows_of(database).keys() == {*ids, "sent", *written}
