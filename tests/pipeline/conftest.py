"""One Spark for all tests of the pipeline, in one process: a session with the settings of jobs, and one of users.

Its master allows three attempts of a Spark task.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.sql import SparkSession

from outbox.devtools.emulators import Emulators
from outbox.program.settings import DatabaseSettings
from outbox_pipeline.spark import session as jobs_session
from tests.support import quick, spanner
from tests.support.cluster import QUICK_JAVA
from tests.support.pipeline import Case

os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK_JAVA)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep these tests in one process of pytest-xdist, because each process would start its own Spark.

    Those of the cluster, which has processes of its own, may run beside them in another one.
    """
    for item in items:
        if "tests/pipeline/" in item.nodeid:
            item.add_marker(pytest.mark.xdist_group("cluster" if "/test_cluster" in item.nodeid else "spark"))
            name = getattr(item, "originalname", item.name)
            if "spark" in getattr(item, "fixturenames", ()) and name not in quick.SPARK:
                item.add_marker(pytest.mark.extended)
    # First, because it takes long: otherwise the other processes would wait for it at the end.
    items.sort(key=lambda item: "/test_cluster" not in item.nodeid)


@pytest.fixture(scope="session")
def jobs_spark(emulators: Emulators) -> Iterator[SparkSession]:  # noqa: ARG001 - whose environment the workers inherit
    with mock.patch.dict(jobs_session._ALWAYS, {"spark.python.daemon.module": "tests.support.spark_daemon"}):
        made = jobs_session.session("tests", "local[2,3]")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def spark(jobs_spark: SparkSession, request: pytest.FixtureRequest) -> SparkSession:
    """Return the session of commands or, for what users call, Spark's defaults. Reading a stream has no shuffle."""
    if request.module.__name__.rpartition(".")[2] not in ("test_register", "test_source"):
        return jobs_spark
    made = jobs_spark.newSession()
    for name in ("spark.sql.shuffle.partitions", *jobs_session._ALWAYS):
        if name.startswith("spark.sql."):
            made.conf.unset(name)
    made.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    return made


@pytest.fixture
def in_process(jobs_spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands in this process use the Spark session of the tests, and do not configure logging."""
    monkeypatch.setattr(jobs_session, "session", lambda _name: jobs_spark)
    monkeypatch.setattr("outbox.program.logs.configure", lambda *_arguments: None)


@pytest.fixture
def target(database: Database) -> DatabaseSettings:
    return spanner.place(str(database.database_id))


@pytest.fixture
def case(in_process: None, spark: SparkSession, database: Database, tmp_path: Path) -> Case:  # noqa: ARG001 - for `job`
    return Case(spark, database, tmp_path)
