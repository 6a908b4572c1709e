"""The command `outbox-pipeline`: exit codes, output, metrics, and the database role of its jobs."""

import gzip
import json
import re
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.cloud.spanner_v1 import RequestOptions
from google.cloud.spanner_v1.database import Database
from py4j.clientserver import ClientServerConnection
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.program.settings import DatabaseSettings
from outbox_admin import operations
from outbox_pipeline import cli
from outbox_pipeline.jobs import audit_inputs as effects
from outbox_pipeline.jobs.archive import purge_chunk
from outbox_pipeline.jobs.replay import ARCHIVED_COLUMNS, replay_chunk
from outbox_pipeline.rows.register_rows import Writer
from outbox_pipeline.source.parts import KeyPart
from outbox_pipeline.spanner import open_table
from outbox_pipeline.spark import session
from outbox_pipeline.spark.stack_traces import _ON_EXECUTOR, _PACKED, error_from, spark_errors
from publishworker.telemetry import clients
from pyspark_outbox import OutboxDataSource
from tests.support.operations import insert, row, rows_of
from tests.support.pipeline import Case, options, write_lines
from tests.support.pipeline import row as given_row
from tests.support.processes import Finished, run
from tests.support.roles import Heard, grants, refused
from tests.support.spanner import PROJECT


def register(case: Case, name: str) -> int:
    """Register a file of the test's folder. Return the exit code of the command."""
    return case.job("register", input=case.folder / name, rejects=case.folder / "no", topic="orders")


def as_process(target: DatabaseSettings, emulators: Emulators, *arguments: str, **environment: str) -> Finished:
    settings = {"OUTBOX_PROJECT": PROJECT, "OUTBOX_INSTANCE": target.instance, "OUTBOX_DATABASE": target.database}
    return run("outbox_pipeline", *arguments, environment=emulators.environment() | settings | environment, seconds=90)


#: A row that is registered, and one that is rejected.
TWO = [{"topic": "orders", "data": "one"}, {"topic": "goog", "data": "two"}]


@pytest.mark.long("the cluster runs it, too")
def test_register_as_a_user_runs_it(target: DatabaseSettings, emulators: Emulators, database: Database, tmp_path: Path):
    """Also in a locale in which Java finds no file whose name is not ASCII."""
    file = write_lines(tmp_path / "été.jsonl", TWO)
    flags = "--input", str(file), "--rejects", str(tmp_path / "no"), "--json"
    done = as_process(target, emulators, "register", *flags, OUTBOX_REJECTED="no", LC_ALL="C")
    assert done.code == 1, done.stderr
    summary = json.loads(done.stdout)
    assert {name: summary[name] for name in ("job", "read", "registered", "existing", "repeated", "rejected")} == {
        "job": "register", "read": 2, "registered": 1, "existing": 0, "repeated": 0, "rejected": 1,
    }  # fmt: skip
    assert next(Path(summary["rejects"]).glob("*.json")).is_file()
    said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING: Using incubator")]
    assert [json.loads(line)["action"] for line in said if line] == ["unknown_variable", "rejected"]
    assert "OUTBOX_REJECTED is set, but no setting has this name. Did you mean OUTBOX_REJECTS?" in said[0]
    assert "to a new file, correct them there, and register that file" in said[1]
    assert [row["Topic"] for row in rows_of(database).values()] == ["orders"]


@pytest.mark.parametrize("arguments", ["register --input folder --rejects r", "replay"])
def test_invalid_flags_are_refused_before_spark_starts(target: DatabaseSettings, emulators: Emulators, arguments: str):
    done = as_process(target, emulators, *arguments.split(), JAVA_HOME="/nowhere")
    assert (done.code, done.stdout) == (2, "")
    assert "Java" not in done.stderr


#: Arguments, the exit code, and what the sentence says; `r` and `in.` are in a folder of the test.
WRONG = (
    ("nothing", 2, "unknown job 'nothing'"),
    ("register --rejects r", 2, "Pass --input for files, or --input-table for a table"),
    ("register --input in.csv --input-table t --rejects r", 2, "for a table, but not both"),
    ("register --input-table no.table --rejects r", 2, "--input-table no.table: [TABLE_OR_VIEW_NOT_FOUND]"),
    ("register --input-table text.`in.csv` --rejects r", 2, "Unknown column 'value'"),
    ("register --input in.txt --rejects r", 2, "unknown extension"),
    ("register --input nowhere.jsonl --rejects r", 1, "nowhere.jsonl contains no file. Check the path"),
    ("register --input in.csv --rejects r", 2, "Unknown column 'dat'"),
    ("register --input in.jsonl --rejects r --max-rows-per-second -1", 2, "--max-rows-per-second"),
    ("register --input in.jsonl --rejects r --database not-there", 3, "not-there"),
    ("drain --deadline soon", 2, "--deadline: 'soon' is not allowed"),
    ("drain --concurrency 101", 2, "--concurrency: '101' is not allowed"),
    ("drain --database not-there", 3, "not-there"),
    ("archive --archive a --window 40d", 2, "--window: '40d' is not allowed"),
    ("archive --archive a --until 5s", 2, "less than a minute ago"),
    ("audit --output b", 2, "Pass --received for files, or --received-table"),
    ("audit --received-table t --received-format json --output b", 2, "--received-format is for files"),
    ("audit --received-table a..b --output b", 2, "--received-table a..b: [PARSE_SYNTAX_ERROR]"),
    ("audit --received-table text.`in.csv` --output b", 2, "have no column message_id"),
    ("replay --archive none", 2, "No tasks are selected"),
    ("replay --where true", 2, "--archive"),
)


def test_an_expected_error_is_one_sentence(case: Case, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "JOB" in capsys.readouterr().err
    write_lines(case.folder / "in.jsonl", TWO[:1])
    (case.folder / "in.csv").write_text("topic,dat\norders,x\n")
    for arguments, code, sentence in WRONG:
        words = arguments.replace(" r ", f" {case.folder}/r ").replace("in.", f"{case.folder}/in.").split()
        assert case.job(*words) == code, arguments
        out, err = capsys.readouterr()
        assert out == "", arguments
        assert sentence in err, arguments
        assert "Traceback" not in err, arguments


def test_metrics_are_sent_at_the_end(case: Case, monkeypatch: pytest.MonkeyPatch):
    client = mock.Mock()
    monkeypatch.setattr(clients, "_datadog", lambda: client)
    write_lines(case.folder / "in.jsonl", [*TWO, {"dat": "three"}])
    assert register(case, "in.jsonl") == 1
    assert client.increment.call_args_list == [
        mock.call("outbox.pipeline_run_count", 1, tags=["job:register", "result:rejected"]),
        mock.call("outbox.pipeline_row_count", 1, tags=["job:register", "outcome:registered"]),
        mock.call("outbox.pipeline_row_count", 2, tags=["job:register", "outcome:rejected"]),
    ]
    client.stop.assert_called_once()
    client.reset_mock()
    assert case.job("archive", archive=case.folder / "a", until="5s") == 2
    client.increment.assert_called_once_with("outbox.pipeline_run_count", 1, tags=["job:archive", "result:failed"])
    client.distribution.assert_not_called()


SAME_PYTHON = "Set PYSPARK_PYTHON to a Python 3.11 that all executors have"
WRITE_FAILED = "[TASK_WRITE_FAILED] Task failed while writing rows to"
NO_SPACE = "No space left on device"
DISK_FULL = f"""An error occurred while calling o2.json.
: org.apache.spark.SparkException: {WRITE_FAILED} file:/a/_temporary/0/_temporary/attempt_1/part-0.json. SQLSTATE: 58030
\tat org.apache
\tSuppressed: java.io.IOException: other
\tCaused by: java.io.IOException: other
Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: {NO_SPACE}
\tat org.apache
Caused by: java.io.IOException: {NO_SPACE}
\tat java.base"""


def test_a_stack_trace_of_spark_becomes_one_sentence():
    """For errors of executors, of the planner and of Spark itself. A bug of this package keeps its stack trace."""
    cases = (
        ("Traceback ...\noutbox.errors.NotReached: db is not there\n\tat java.lang", NotReached, "db is not there"),
        ("a\n  outbox.errors.OutboxError: first\nb\noutbox.errors.SettingError: last", SettingError, "last"),
        ("[PATH_NOT_FOUND] Path: x\nmore", OutboxError, "Spark: [PATH_NOT_FOUND] Path: x"),
        ("An error\nTraceback\n  File x\nValueError: 3\nDriver stacktrace:", OutboxError, "Spark: ValueError: 3"),
        (
            "An error occurred while calling o59.x.\n: java.io.IOException$A: No FileSystem\n\tat org.apache",
            OutboxError,
            "Spark: java.io.IOException$A: No FileSystem",
        ),
        (
            DISK_FULL,
            OutboxError,
            f"Spark: {WRITE_FAILED} file:/a. Cause: {NO_SPACE}. Free space, and run the job again",
        ),
        ("", OutboxError, "Spark: no reason is given"),
        (
            'java.io.IOException: Cannot run program "/no/python3": error=2',
            NotReached,
            "Python /no/python3 does not start on an executor. Set PYSPARK_PYTHON to the Python of the executors",
        ),
        (
            "Traceback\n  File x\nModuleNotFoundError: No module named 'outbox_pipeline'",
            NotReached,
            f"Package outbox_pipeline is missing on an executor. {_PACKED}",
        ),
        (
            "Python in worker has different version: 3.12 than that in driver: 3.11, PySpark cannot run",
            NotReached,
            f"An executor has Python 3.12, but the driver has Python 3.11. {SAME_PYTHON}",
        ),
    )
    for text, kind, sentence in cases:
        made = error_from(text)
        assert (type(made), str(made)) == (kind, sentence)
    with mock.patch.object(SparkContext, "_active_spark_context", mock.Mock(master="spark://host:7077")):
        assert str(error_from("outbox.errors.NotReached: db is not there")) == f"db is not there. {_ON_EXECUTOR}"
    with pytest.raises(ZeroDivisionError), spark_errors():
        raise ZeroDivisionError
    with pytest.raises(OutboxError, match=r"^Spark: of Spark$"), spark_errors():
        raise PySparkException("of Spark")
    cancelled = PySparkException("SPARK_JOB_CANCELLED")  # as PySpark ends an action after Ctrl-C
    cancelled.__context__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), spark_errors():
        raise cancelled


def test_an_interrupted_call_logs_no_stack_trace(spark: SparkSession, caplog: pytest.LogCaptureFixture):
    """Py4J would log Ctrl-C, and that the JVM was first to close. The command answers with its exit code only.

    On a thread of its own, whose connection to the JVM no other test uses.
    """
    send = ClientServerConnection.send_command

    def interrupt(connection: ClientServerConnection, *arguments: str) -> str:
        if threading.current_thread().name.startswith("interrupted"):
            raise KeyboardInterrupt
        return str(send(connection, *arguments))

    interrupted = mock.patch.object(ClientServerConnection, "send_command", interrupt)
    closed = mock.patch.object(ClientServerConnection, "close", side_effect=BrokenPipeError)
    with ThreadPoolExecutor(1, "interrupted") as pool, interrupted, closed, pytest.raises(KeyboardInterrupt):
        pool.submit(spark.sparkContext._jsc.sc).result()
    assert caplog.messages == []


DAMAGES = {
    "a.jsonl.gz": (gzip.compress(b'{"data":"x"}\n' * 9999)[:-100], "Unexpected end of input stream"),
    "b.jsonl.gz": (b'{"data":"x"}\n', "not a gzip file"),
    "c.parquet": (b"PAR2" * 10, "is not a Parquet file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_with_its_cause(case: Case, name: str, capsys: pytest.CaptureFixture[str]):
    content, cause = DAMAGES[name]
    (case.folder / name).write_bytes(content)
    assert register(case, name) == 1
    error = capsys.readouterr().err
    assert re.search(rf"{name}.*Cause: .*({cause}).*\. The file is damaged or is no file of this format", error), error
    assert list((case.folder / "no").glob("*")) == [], "the folder of the run is left"


def test_a_parquet_type_that_spark_cannot_read_has_a_remedy(case: Case, capsys: pytest.CaptureFixture[str]):
    """As are the times that pandas writes by default."""
    for type_ in (pa.timestamp("ns"), pa.time32("ms")):
        columns = {"data": pa.string(), "topic": pa.string(), "expires_at": type_}
        pq.write_table(pa.schema(columns).empty_table(), case.folder / "in.parquet")
        assert register(case, "in.parquet") == 1
        error = capsys.readouterr().err
        assert re.search(r"Illegal Parquet type: INT\d\d \(TIME.*\. Drop the column or convert it", error), error


def java_that(home: Path, script: str) -> None:
    java = home / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    java.chmod(java.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_java_that_does_not_start_is_one_sentence(
    is_there: bool, target: DatabaseSettings, emulators: Emulators, tmp_path: Path
):
    """After the message of Java, or of Spark's script if there is no Java."""
    if is_there:
        java_that(tmp_path, "echo 'no room for a heap' >&2\nexit 1")
    arguments = ("register", "--input", "in.jsonl", "--rejects", "no")
    done = as_process(target, emulators, *arguments, JAVA_HOME=str(tmp_path))
    assert (done.code, done.stdout) == (3, "")
    assert ("no room for a heap\n" if is_there else "No such file") in done.stderr
    last = json.loads(done.stderr.splitlines()[-1])["message"]
    assert last.startswith("Java did not start Spark. The messages above say why. Spark needs Java 17")
    assert "Traceback" not in done.stderr


def test_the_packages_of_the_extra_are_checked(monkeypatch: pytest.MonkeyPatch):
    """Before Spark starts, because a Python worker of Spark only reports that it exited unexpectedly."""
    session.check_packages()
    with monkeypatch.context() as patch:
        patch.setattr("pyspark.__version__", "3.5.1")
        with pytest.raises(
            NotReached, match=r"pyspark 3\.5\.1 is installed, but pyspark 4 is required\. Run: pip install"
        ):
            session.check_packages()
    monkeypatch.setattr(session, "find_spec", lambda name: None if name == "pyarrow" else object())
    with pytest.raises(
        NotReached, match=r"Package pyarrow is not installed. Run: pip install 'spanner-outbox\[spark\]'"
    ):
        session.check_packages()


def test_the_package_can_be_imported_without_spark():
    """So the command can report that PySpark is missing. The public names can still be imported."""
    code = (
        "import sys, outbox_pipeline, outbox_pipeline.cli; assert 'pyspark' not in sys.modules; "
        "from outbox_pipeline import *; print(register.__name__, read_archive.__name__, task_id('a', 'b'))"
    )

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("register read_archive ")


SENT = datetime(2026, 6, 1, tzinfo=UTC)


def test_the_jobs_stay_within_their_role(target: DatabaseSettings, database: Database):
    insert(database, [row("sent", SentAt=SENT), *(row(f"unsent{number}") for number in range(9))])
    settings = replace(target, database_role="outbox_pipeline")
    table = open_table(settings)
    heard = Heard(table.database)
    assert table.first_ended() == SENT
    table.retention()
    for more in ({}, {"state": "sent", "since": "3650d"}):
        source = OutboxDataSource(options(target, databaseRole="outbox_pipeline", **more))
        reader = source.reader(source.schema())
        assert sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)) in (1, 10)
    writer = Writer(table, table.now(), lambda *_: None)
    for id in ("new", "sent"):
        writer.add(given_row(task_id=id))
    writer.flush()
    purging = operations.begin(table, "purge", {}, Tasks=0)
    assert purge_chunk(table, {"sent": (SENT, None)}, purging.id)["deleted"] == 1
    insert(database, [row("replayed", SentAt=SENT)])
    begun = operations.begin(table, "replay", {})
    names = ARCHIVED_COLUMNS
    both = [{**row(id), "Data": b"", "TimesSent": 1} for id in ("replayed", "back")]
    done = replay_chunk(table, [{name: each[name] for name in names} for each in both], begun.started_at)
    assert (done["replayed"], done["registered"]) == (1, 1)
    operations.end(table, begun.id, Tasks=2)
    snapshot = mock.MagicMock()
    with mock.patch.object(effects, "open_database", return_value=mock.MagicMock(snapshot=lambda: snapshot)):
        assert list(effects.inbox_rows(settings, "billing", KeyPart("", ""), limit=1)) == []
    [read] = snapshot.__enter__().read.call_args_list
    assert read.kwargs["request_options"]["priority"] == RequestOptions.Priority.PRIORITY_LOW
    assert {key: columns for key, columns in grants("outbox_pipeline").items() if key[1] == "ProcessedTasks"} == {
        ("SELECT", "ProcessedTasks"): {"Consumer", "TaskId", "ProcessedAt"}
    }
    assert rows_of(database).keys() == {"new", "replayed", "back", *(f"unsent{number}" for number in range(9))}
    allowed, of_relays = grants("outbox_pipeline"), grants("publishworker")
    assert list(refused(allowed, heard.commits)) == []
    assert {("SELECT", name) for name in heard.tables} <= allowed.keys()
    assert heard.roles <= {"outbox_pipeline"}
    for privilege in ("INSERT", "UPDATE"):
        writes = [getattr(each, privilege.lower()) for commit in heard.commits for each in commit.mutations]
        written = {column for write in writes if write.table == "AsynchronousTasks" for column in write.columns}
        # tests/integration/test_roles.py checks the writes of `drain`.
        written |= of_relays.get((privilege, "AsynchronousTasks"), set())
        assert written == allowed[privilege, "AsynchronousTasks"], "a grant that nothing needs"
