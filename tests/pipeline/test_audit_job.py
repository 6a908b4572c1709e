"""The job `audit` from end to end: the table, an archive, files of subscriptions, and the report."""

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.base.values import shown
from outbox.errors import OutboxError, SettingError
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.table.states import NEVER
from outbox_pipeline.jobs.audit_transforms import EFFECTS
from outbox_pipeline.spanner import open_table
from outbox_pipeline.spark.spark_tasks import read_partitions
from outbox_pipeline.spark.stack_traces import spark_errors
from publishworker.telemetry import clients
from tests.support.avro import SCHEMA, avro_message, write_avro
from tests.support.fakes import serialized
from tests.support.operations import insert_cancelled, row, update
from tests.support.pipeline import DAY, NEXT_DAY, Case, received, remove, sent, write_lines

HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
AT = DAY + HOUR  # in the middle of the window


def job(case: Case, output: str, *words: str, **given: Any) -> int:
    """Run the command on the received messages. Return its exit code."""
    given = {"received": f"{case.folder}/received.jsonl", "output": f"{case.folder}/{output}"} | given
    return case.job("audit", *words, **given)


def receive(case: Case, messages: Sequence[dict[str, Any]]) -> None:
    write_lines(case.folder / "received.jsonl", messages)


def summary_of(report: Path) -> dict[str, Any]:
    return dict(json.loads((report / "summary.json").read_text(encoding="utf-8")))


def test_tasks_of_table_and_archive_are_compared_with_files(case: Case):
    tasks_here_and_there(case)
    # One sent task has no message, another one has other data, and some messages have no task.
    messages = [
        *(received(id, AT + 2 * SECOND) for id in ("purged", "again", "cancelled")),
        received("again", AT + 2 * HOUR - SECOND),
        received("in the table", AT + 2 * SECOND, b"tada"),
        received("yesterday", AT - SECOND),
        received("nobody's", AT),
        received("foreign", AT) | {"attributes": '{"x": "y"}'},
        received("broken", AT) | {"attributes": "{"},
    ]
    receive(case, messages)
    with (case.folder / "received.jsonl").open("a") as file:  # not two messages
        file.write(json.dumps(messages[0]) * 2)
    given = {"archive": str(case.folder / "archive")}
    found = case.audit(**given)
    counts = {"tasks": 9, "delivered": 4, "lost": 1, "pending": 2, "dead": 1, "cancelled": 1, "messages": 5}
    assert {name: found[name] for name in counts} == counts
    assert (found["unknown"], found["foreign"], found["unreadable"], found["mismatched"]) == (1, 1, 2, 1)
    assert found["cancelled_after_publish"] == 1
    assert not any(found[name] for name in ("republished", "redelivered", "late", "arriving", "out_of_order"))
    shows_what_is_lost(case.folder / "report")
    with pytest.raises(OutboxError, match=r"exists\. Each audit needs a new folder"):
        case.audit(**given)


@pytest.mark.usefixtures("spark")
def test_the_table_is_divided_for_the_executors_that_there_are_or_will_be():
    """Executors register while the first jobs run. With dynamic allocation, they start when Spark tasks wait."""
    context = mock.Mock(master="local[2]", defaultParallelism=2)
    conf = {"spark.sql.shuffle.partitions": "200"}
    assert read_partitions(mock.Mock(conf=conf, sparkContext=context)) == 8
    cluster = mock.Mock(conf=conf, sparkContext=mock.Mock(master="spark://host:7077"))
    cluster.range.return_value.select.return_value.distinct.return_value.count.side_effect = [2, 6, 16, 16]
    assert read_partitions(cluster) == 64
    dynamic = conf | {"spark.dynamicAllocation.enabled": "true"}
    assert read_partitions(mock.Mock(conf=dynamic, sparkContext=context)) == 200


def tasks_here_and_there(case: Case) -> None:
    """Archive and purge three tasks, and two cancelled ones. Insert others into the table.

    One of them was sent again since, and one was restored before the purge.
    """

    def task(id: str, **columns: Any) -> dict[str, Any]:
        return row(id, Data=b"\x0a\x04data", CreatedAt=AT, **columns)

    case.insert([task(id, SentAt=AT + 5 * SECOND) for id in ("purged", "lost <b>", "again")])
    insert_cancelled(case.database, [task("cancelled"), task("restored")], AT + 5 * SECOND)
    assert case.archive(to=case.folder / "archive", late=True)["written"] == 5
    update(case.database, "restored", SentAt=None, CancelledBy=None)
    assert case.archive(to=case.folder / "archive", purge=True)["deleted"] == 4
    case.insert([
        task("again", SentAt=AT + 2 * HOUR), task("in the table", SentAt=AT + 5 * SECOND),
        task("waits"), task("dead", AvailableAt=NEVER, LastError="too large"),
        row("yesterday", Data=b"\x0a\x04data", CreatedAt=DAY - HOUR, SentAt=AT),
    ])  # fmt: skip


def shows_what_is_lost(report: Path) -> None:
    summary = summary_of(report)
    assert summary["lost"] == 1
    times = {"created_at": shown(AT), "sent_at": shown(AT + 5 * SECOND)}
    assert summary["samples"]["lost"] == [{"task_id": "lost <b>", "topic": "orders", **times, "messages": 0}]
    assert [each["task_id"] for each in summary["samples"]["unknown"]] == ["nobody's"]
    [of_topic] = summary["by_topic"]
    assert (of_topic["topic"], of_topic["tasks"]) == ("orders", 9)
    [file] = (report / "findings" / "class=lost").glob("*.json")
    assert json.loads(file.read_text(encoding="utf-8"))["task_id"] == "lost <b>"
    assert not (report / "findings" / "class=pending").exists()
    page = (report / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "lost <b>" not in page
    assert "lost &lt;b&gt;" in page


def test_the_exit_code_is_1_if_a_task_is_lost(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    client = mock.Mock()
    monkeypatch.setattr(clients, "_datadog", lambda: client)
    file = str(case.folder / "received.parquet")
    columns = "message_id STRING, publish_time TIMESTAMP, attributes MAP<STRING, STRING>"
    messages = [("1", AT, {TASK_ID_ATTRIBUTE: "one"}), ("2", AT, {TASK_ID_ATTRIBUTE: "one"})]
    case.spark.createDataFrame(messages, columns).write.parquet(file)

    run = partial(job, case, received=file)
    assert run("empty", "--json") == 1
    assert run("none", "--json", "--allow-empty") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["unknown"] == 1, "other findings"
    case.insert([row("one", CreatedAt=AT, SentAt=AT), row("two", CreatedAt=AT, SentAt=AT)])
    assert run("one", "--json") == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["republished"], summary["lost"]) == (1, 1)
    assert "1 task is lost: sent, but not received within --grace" in caplog.text
    assert job(case, "t", "--json", received="", received_table=f"parquet.`{file}`") == 1
    of_table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name for name in summary if of_table[name] != summary[name]} == {"until", "report", "seconds"}
    assert run("young", until="5m") == 2
    assert "a task is audited only after --grace, 600 s" in capsys.readouterr().err
    runs = [call.kwargs["tags"] for call in client.increment.call_args_list if "run_count" in call.args[0]]
    assert runs == [["job:audit", f"result:{each}"] for each in ("empty", "done", "lost", "lost", "failed")]


def test_the_inbox_of_a_subscriber_is_compared(case: Case, own_database: Database, capsys: Any):
    """Each task has one case in its name; the records are in a database of the subscriber."""
    tasks = ("applied", "late", "not applied", "not received", "sent twice")
    case.insert([row(id, Data=b"\x0a\x04data", CreatedAt=AT, SentAt=AT + SECOND) for id in tasks])
    case.insert([row("outside", Data=b"\x0a\x04data", CreatedAt=DAY - HOUR, SentAt=AT)])
    case.insert([row("slow", CreatedAt=DAY - HOUR, SentAt=DAY - HOUR)])
    ids = ("applied", "late", "not applied", "sent twice", "sent twice", "no task", "no task, no record")
    receive(case, [received(id, AT + n * SECOND / 10) for n, id in enumerate(ids)])
    records = {
        "applied": AT + SECOND, "late": AT + HOUR, "sent twice": AT + SECOND, "no task": AT, "no message": AT,
        "outside": AT, "slow": AT, "of an earlier task": DAY, "0badcafe-message-4711": AT,
    }  # fmt: skip
    with own_database.batch() as batch:
        rows = [(consumer, id, at) for id, at in records.items() for consumer in ("billing", "stock")]
        batch.insert("ProcessedTasks", ("Consumer", "TaskId", "ProcessedAt"), [*rows, ("stock", "not applied", AT)])

    given = {"since": DAY, "until": NEXT_DAY, "inbox": "billing", "inbox_database": own_database.name}
    assert job(case, "effects", **given) == 1
    summary = summary_of(case.folder / "effects")
    classes = {name: [each["task_id"] for each in summary["samples"].get(name, [])] for name in EFFECTS}
    assert classes == {
        "applied": [], "not_applied": ["not applied"], "applied_late": ["late"],
        "unregistered": ["no message", "no task"],
    }  # fmt: skip
    assert [summary[name] for name in EFFECTS] == [2, 1, 1, 2]
    assert 'id="not_applied"' in (case.folder / "effects/report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    for more, sentence in (
        ({"inbox": "biling"}, "Consumer 'biling' has no record"),
        ({"inbox_database": case.target.database}, "Consumer 'billing' has no record"),
        ({"inbox": ""}, "--inbox-database needs --inbox"),
    ):
        assert job(case, "wrong", **given | more) in {1, 2}
        assert sentence in capsys.readouterr().err


def test_an_invalid_audit_is_refused(case: Case):
    receive(case, [])
    with pytest.raises(SettingError, match=r"--since .* is not before the end of the window"):
        case.audit(until=DAY)
    foreign = case.folder / "foreign.jsonl"
    foreign.write_text('{"id": 1}\n' * 3)
    with pytest.raises(OutboxError, match=r"None of the 3 rows or lines of .*foreign\.jsonl is a received message"):
        case.audit(received=str(foreign), received_format="json")
    with pytest.raises(OutboxError, match="not there has no finished window"):
        case.audit(archive=str(case.folder / "not there"))
    early = shown(datetime.now(UTC) - 2 * HOUR)
    with pytest.raises(SettingError, match="the tasks and messages are known until"):
        case.audit(received_until=early, until="15m", since="")


def test_an_audit_without_tasks_fails_unless_it_is_allowed(case: Case, capsys: pytest.CaptureFixture[str]):
    """A task that is younger than the grace period is not in the window of an audit without --until."""
    receive(case, [])
    at = open_table(case.target).now()
    case.insert([row("young", CreatedAt=at - 30 * SECOND, SentAt=at - 20 * SECOND)])

    assert job(case, "fails", grace="2m") == 1
    assert capsys.readouterr().out.startswith("Nothing was audited: no task was created before ")
    assert job(case, "judged", grace="10s") == 1
    assert "Nothing was audited" not in capsys.readouterr().out


def test_avro_files_of_a_subscription_are_read_and_damaged_ones_are_named(case: Case):
    ids = [str(number) for number in range(2_005)]  # more than one Arrow batch
    data = b"\x0a\x04data"
    case.insert([row(id, Data=data, CreatedAt=AT, SentAt=AT + SECOND) for id in [*ids, "lost", "other", "keyed"]])
    folder = case.folder / "received"
    folder.mkdir()
    messages = [avro_message(id, AT + SECOND / 2, {TASK_ID_ATTRIBUTE: id}, b"data") for id in ids]
    write_avro(folder / "1.avro", messages)
    keyed = avro_message("keyed", AT, {TASK_ID_ATTRIBUTE: "keyed", "ordering_key": "k"}, b"data")
    more = [messages[0], keyed, avro_message("other", AT, {TASK_ID_ATTRIBUTE: "other"}, b"tada")]
    write_avro(folder / "2.avro", [*more, avro_message("foreign", AT, {})])
    given = {"received": f"{folder}/*.avro"}
    found = case.audit(**given)
    assert (found["tasks"], found["delivered"], found["lost"]) == (2_008, 2_007, 1)
    assert (found["redelivered"], found["mismatched"], found["foreign"], found["unreadable"]) == (1, 1, 1, 0)
    assert summary_of(case.folder / "report")["latency"]["p50"] == 0.5

    damaged = folder / "3.avro"
    damaged.write_bytes((folder / "1.avro").read_bytes()[:-20])
    given["output"] = f"{case.folder}/none"
    with pytest.raises(OutboxError, match=r"3\.avro is not a complete Avro file"), spark_errors():
        case.audit(**given)
    write_avro(damaged, [{"data": b""}], {**SCHEMA, "fields": SCHEMA["fields"][-1:]})
    with pytest.raises(SettingError, match=r"3\.avro has no field message_id\. Set write_metadata"), spark_errors():
        case.audit(**given)


#: Later columns than those without which there is no task. In the table, some have a default and others may be NULL.
LATER = ("AtMostOnce", "BlockedBy", "TimesSent", "CancelledBy")


def of_another_version(case: Case, *, purge: bool) -> None:
    """Archive two tasks, of which one was received."""
    case.insert([sent(id, AT, CreatedAt=AT, Data=serialized(b"data"), OrderingKey="k") for id in ("received", "lost")])
    assert case.archive(late=True, purge=purge)["written"] == 2


def change(folder: Path, *dropped: str, adds: bool = False) -> None:
    """Write the files of an archive with a column more or less than the table."""
    for file in folder.rglob("*.parquet"):
        rows = pq.read_table(file, partitioning=None).drop_columns(list(dropped))
        remove(file)
        pq.write_table(rows.append_column("Added", pa.array([7] * len(rows))) if adds else rows, file)


def test_an_archive_of_another_version_is_audited_and_replayed(case: Case, tmp_path_factory: pytest.TempPathFactory):
    """Its files have a column more or less than the table."""
    of_another_version(case, purge=True)
    change(case.folder, *LATER, adds=True)
    file = write_lines(tmp_path_factory.mktemp("received") / "1.jsonl", [received("received", AT)])
    found = case.audit(tasks="archive", archive=str(case.folder), received=str(file), until=DAY + 20 * HOUR)
    assert (found["tasks"], found["delivered"], found["lost"]) == (2, 1, 1)
    assert case.replay(where="true")["registered"] == 2
    same = {"Topic": "orders", "Data": base64.b64encode(serialized(b"data")), "OrderingKey": "k", "CreatedAt": AT}
    same |= {"Sequence": None, "Priority": 50, "AtMostOnce": False, "BlockedBy": None}
    assert {id: {name: each[name] for name in same} for id, each in case.rows().items()} == dict.fromkeys(
        ("received", "lost"), same
    )


def test_an_archive_of_another_version_is_purged_or_one_sentence_says_why_not(case: Case):
    """This version cannot prove a column that it does not know, so it deletes nothing."""
    of_another_version(case, purge=False)
    [window] = case.files.windows()
    change(case.folder, adds=True)
    window.edit(checksum="7")
    with pytest.raises(OutboxError, match=r"not purged.* If a later version of the package wrote them, upgrade this"):
        case.archive(purge=True)
    assert len(case.rows()) == 2
    window.edit(checksum=window["checksum"])
    change(case.folder, "Added", "BlockedBy", "CancelledBy")
    assert case.archive(purge=True)["deleted"] == 2
