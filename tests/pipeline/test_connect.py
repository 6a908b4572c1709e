"""The source, the sink, `register` and `read_archive` with Spark Connect, whose client has no JVM."""

import json
import os
import subprocess
import sys

import pyspark
import pytest
from pyspark.sql import SparkSession

from outbox.devtools.emulators import Emulators
from tests.support.pipeline import DAY, Case, options, sent
from tests.support.processes import ROOT


@pytest.fixture(scope="module")
def server(spark: SparkSession) -> str:
    """Let the JVM of the tests, which another would cost a minute, serve clients. Return its address."""
    service = getattr(getattr(spark._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
    context = spark.sparkContext._jsc.sc()
    context.conf().set("spark.connect.grpc.binding.port", "0").set("spark.connect.grpc.binding.address", "127.0.0.1")
    service.start(context)
    return f"sc://127.0.0.1:{service.server().getPort()}"


@pytest.mark.timeout(300)
def test_source_sink_register_and_archive_need_no_jvm(case: Case, server: str, emulators: Emulators):
    case.insert([sent("purged", DAY)])
    case.archive(to=case.folder / "archive", purge=True, late=True)
    case.insert([sent("sent", DAY)])
    client = [sys.executable, "-m", "tests.support.connect_client", server, str(case.folder)]
    done = subprocess.run(
        [*client, *(f"{name}={value}" for name, value in options(case.target).items())],
        check=False, cwd=ROOT, env=os.environ | emulators.environment(), capture_output=True, text=True,
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
    assert case.rows().keys() == {*ids, "sent", *written}
