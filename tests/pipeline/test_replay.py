"""The job `replay`: selection, writes and the record, also if the job is killed and resumed."""

import dataclasses
import json
import socket
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from pyspark.errors import PythonException

import outbox
from outbox.admin import changes, operations, selections
from outbox.base.values import shown
from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.table.ddl import OPERATIONS
from outbox.table.states import NEVER
from outbox_pipeline.jobs import replay as job
from outbox_pipeline.jobs.replay import ARCHIVED_COLUMNS, REPLAY_ROWS, Replayed, replay_chunk
from outbox_pipeline.spanner import Table, open_table
from tests.support.fakes import serialized
from tests.support.operations import PAST, Watch, delete, insert, insert_cancelled, opened, row, rows_of, update
from tests.support.pipeline import DAY, NEXT_DAY, Case, fail_after_writes, fail_half_way, meddle, sent
from tests.support.pubsub import PubSub, Subscription
from tests.support.relays import first_deliveries, worker
from tests.support.spanner import query

HOUR, MICROSECOND = timedelta(hours=1), timedelta(microseconds=1)


def counts(done: Replayed) -> tuple[int, int, int, int, int, int]:
    return (done.selected, done.replayed, done.registered, done.unsent, done.resent, done.missing)


def send(emulators: Emulators, database: Database) -> None:
    with worker(emulators, database, command="drain") as process:
        assert process.wait(60) == 0


def test_a_selection_gives_the_same_tasks_from_table_and_archive(case: Case):
    tasks = {
        "first": sent("first", DAY, Data=serialized(b'{"cents": 7}', attributes={"kind": "paid", "none": ""})),
        "second": sent("second", DAY + HOUR, Topic="invoices", Priority=9),
        "third": sent("third", DAY + 2 * HOUR, Data=serialized(b'{"cents": 9}', attributes={"kind": "a=b"})),
        "odd": sent("odd", DAY + 3 * HOUR, Data=b"\xff no message"),
    }
    case.insert([*tasks.values(), row("ready"), row("dead", AvailableAt=NEVER)])
    case.archive(late=True)
    before = case.rows()
    hour, three = shown(DAY + HOUR), shown(DAY + 3 * HOUR)
    table: dict[str, str] = {}
    files = {"archive": str(case.folder)}
    expected: list[tuple[dict[str, str], dict[str, str], set[str]]] = [
        (table, {"until": "0s"}, set(tasks)),
        (files, {"until": "0s"}, set(tasks)),
        (table, {"since": hour, "until": three}, {"second", "third"}),
        (files, {"since": shown(DAY + HOUR + MICROSECOND), "until": three}, {"third"}),
        (files, {"until": hour, "topic": "orders"}, {"first"}),
        (table, {"topic": "orders", "where": "map_contains_key(Attributes, 'kind')"}, {"first", "third"}),
        (files, {"where": "Payload IS NULL", "topic": "orders", "until": shown(NEXT_DAY)}, {"odd"}),
        (table, {"where": "State = 'sent' AND Attributes['kind'] = 'paid' OR Priority = 9"}, {"first", "second"}),
        (files, {"where": "get_json_object(cast(Payload AS string), '$.cents') > 7"}, {"third"}),
    ]
    for source, flags, ids in expected:
        done = case.replay(**flags, **source, dry_run=True)
        assert done.sample is not None
        assert {each["id"] for each in done.sample} == ids, (flags, source)
        assert done.selected == len(ids)
        assert all(each["sent_at"] == tasks[each["id"]]["SentAt"] for each in done.sample)
        topics = [tasks[id]["Topic"] for id in ids]
        assert done.topics == {name: topics.count(name) for name in topics}
        assert counts(done)[1:] == (0, 0, 0, 0, 0)
        assert done.replay_id is None
    assert case.rows() == before
    assert case.operations() == []


def test_a_dry_run_counts_all_tasks_and_shows_some(case: Case):
    topics = [f"topic-{number:02d}" for number in range(job.TOPICS + 5)]
    case.insert([sent(f"{t}-{n}", DAY, Topic=t) for place, t in enumerate(topics) for n in range(1 + place % 3)])
    done = case.replay(where="true", dry_run=True)
    assert done.selected == sum(1 + place % 3 for place in range(len(topics)))
    assert done.topics is not None
    by_number = sorted(((t, 1 + place % 3) for place, t in enumerate(topics)), key=lambda each: (-each[1], each[0]))
    assert list(done.topics.items()) == by_number[: job.TOPICS]
    assert done.sample is not None
    assert len({each["id"] for each in done.sample}) == job.SAMPLE


def test_replayed_tasks_are_as_after_retry_and_are_sent_once(
    case: Case, emulators: Emulators, pubsub: PubSub, caplog: pytest.LogCaptureFixture
):
    """Every column is as `outbox retry` writes it, keys keep the order of their commits, and there is a record."""
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic, ordered=True)
    odd = {"Attempts": 4, "ExpiresAt": PAST, "AvailableAt": PAST, "Sequence": 7, "Priority": -1, "AtMostOnce": True}
    twins = [sent(f"{by}{number}", DAY, **odd) for by in ("retry", "replay") for number in (1, 2)]
    of_key = [
        sent(f"{9_999 - n}", DAY, Topic=topic, OrderingKey="k", CreatedAt=DAY + n // 3 * MICROSECOND, Sequence=n)
        for n in range(3 * REPLAY_ROWS)
    ]
    stay = [row("ready"), row("dead", AvailableAt=NEVER), sent("other", DAY, Topic="others")]
    case.insert([*twins, *of_key, *stay])
    before = case.rows()
    watch = Watch(case.database)
    [_] = changes.change(watch.table, "retry", selections.TaskSelection(ids=("retry1", "retry2")))
    caplog.set_level("INFO", "outbox_pipeline")
    where = f"Id LIKE 'replay%' OR Topic = '{topic}'"
    done = case.replay(where=where, until="0s", reason="the report lost a day")
    assert counts(done) == (2 + len(of_key), 2 + len(of_key), 0, 0, 0, 0)
    after = case.rows()
    changed = ("SentAt", "ExpiresAt", "Attempts")
    for number in (1, 2):
        ours, theirs = after[f"replay{number}"], after[f"retry{number}"]
        assert ours["AvailableAt"] > theirs["AvailableAt"] > PAST
        same = {**ours, "Id": theirs["Id"], "AvailableAt": theirs["AvailableAt"]}
        assert same == theirs
        assert [ours[name] for name in changed] == [None, None, 0]
    for each in stay:
        assert after[each["Id"]] == before[each["Id"]]

    [note] = [each for each in case.operations() if each["Operation"] == "replay"]
    assert (note["OperationId"], note["Reason"]) == (done.replay_id, "the report lost a day")
    assert note["Tasks"] == 2 + len(of_key)
    assert note["StartedAt"] < after["replay1"]["AvailableAt"] < note["FinishedAt"]
    assert {**json.loads(note["Selection"]), "until": ""} == {"where": where, "until": ""}
    notes = [line for line in caplog.messages if line.startswith("Replay ")]
    assert len(notes) == 2
    assert f"continue it with --resume {done.replay_id}" in notes[0]
    assert f"Replay {done.replay_id} finished" in notes[1]

    delete(case.database, *(each["Id"] for each in (*twins, *stay)))
    send(emulators, case.database)
    messages = subscription.drain(0.5)
    assert first_deliveries(messages) == {"k": [each["Id"] for each in of_key]}
    assert len(messages) == len(of_key), "nothing twice"
    # Tasks that the replay has sent are not selected again, because they were sent after it began.
    assert counts(case.replay(topic=topic, until=note["StartedAt"])) == (0,) * 6


@pytest.mark.parametrize("source", ["table", "archive"])
def test_a_replay_to_another_topic_publishes_in_order_and_changes_no_task(case: Case, pubsub: PubSub, source: str):
    """Also purged tasks of an archive. It is recorded, and a resumed one publishes all tasks again."""
    to = pubsub.new_subscription(pubsub.new_topic(), ordered=True)
    keyed = {"OrderingKey": "k", "CreatedAt": DAY}
    case.insert([sent(f"{99 - n}", DAY + (n % 7) * MICROSECOND, Sequence=n, **keyed) for n in range(50)])
    case.insert([sent("broken", DAY, Data=b"\xff"), sent("other", DAY, Topic="others"), row("ready")])
    flags = {}
    if source == "archive":
        case.archive(late=True)
        delete(case.database, "98", "99")
        flags = {"archive": str(case.folder)}
    before, replay = case.rows(), partial(case.replay, topic="orders", **flags)
    for wrong, sentence in (("orders", "is the topic of the tasks"), ("nowhere", "nowhere does not exist")):
        with pytest.raises(OutboxError, match=sentence):
            replay(to=wrong)
    with pytest.raises(SettingError, match="--to needs --topic"):
        case.replay(where="true", to=to.topic)
    assert case.operations() == []
    done = replay(to=to.topic, reason="ticket 4711")
    assert (done.selected, done.published, done.refused, done.replayed) == (51, 50, 1, 0)
    in_order = {"k": [f"{99 - n}" for n in range(50)]}
    assert first_deliveries(to.drain()) == in_order
    [note] = case.operations()
    assert (note["Tasks"], json.loads(note["Selection"])["to"]) == (50, to.topic)
    with case.database.batch() as batch:
        batch.update(OPERATIONS, ("OperationId", "FinishedAt"), [(done.replay_id, None)])
    assert case.replay(resume=done.replay_id or "").published == 50
    assert first_deliveries(to.drain()) == in_order
    assert case.rows() == before


def test_purged_tasks_are_restored_from_the_archive(case: Case):
    full = {
        "OrderingKey": "k", "Sequence": -(2**63), "Priority": 2**63 - 1, "AtMostOnce": True,
        "CreatedAt": DAY - MICROSECOND, "Data": bytes(range(256)),
    }  # fmt: skip
    gone = [sent("full", DAY, **full, Attempts=3, LastError="x", ExpiresAt=PAST), sent("plain", DAY, Data=b"")]
    large = [sent(f"large {number}", DAY, Data=bytes([number]) * 3_000_000) for number in range(3)]
    there = [sent(id, DAY, Topic="there") for id in ("same", "unsent", "dead")]
    case.insert([*gone, *large, *there])
    case.archive(late=True, purge=False)
    archived = case.rows()
    # Tasks that were sent again are in two windows, one of them with another ordering key.
    update(case.database, "plain", SentAt=NEXT_DAY, Topic="again", OrderingKey="other")
    case.archive(until=NEXT_DAY + 24 * HOUR, late=True)
    delete(case.database, *(each["Id"] for each in (*gone, *large)))
    update(case.database, "unsent", SentAt=None)
    update(case.database, "dead", SentAt=None, AvailableAt=NEVER)
    left = {id: each for id, each in case.rows().items() if id != "same"}

    case.spark.conf.set("spark.sql.session.timeZone", "Pacific/Kiritimati")
    try:
        done = case.replay(archive=str(case.folder), where="true")
    finally:
        case.spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert counts(done) == (8, 1, 5, 2, 0, 0)
    stored = case.rows()
    assert stored.items() >= left.items()
    [note] = case.operations()
    assert (json.loads(note["Selection"])["archive"], note["Tasks"]) == (str(case.folder), 8)
    now = {stored[each["Id"]].pop("AvailableAt") for each in (*gone, *large)}
    assert all(note["StartedAt"] < each < note["FinishedAt"] for each in now)
    clean: dict[str, Any] = {"SentAt": None, "ExpiresAt": None, "Attempts": 0, "LastError": None}
    for each in (*gone, *large):
        was = archived[each["Id"]]
        del was["AvailableAt"]
        if each["Id"] == "plain":
            was |= {"Topic": "again", "OrderingKey": "other"}
        assert stored[each["Id"]] == was | clean
    again = case.replay(archive=str(case.folder), topic="orders")
    assert counts(again) == (4, 0, 0, 4, 0, 0), "all of them are to be sent"
    # The last row of a task decides: it was sent again after this time, to another topic.
    assert case.replay(archive=str(case.folder), topic="orders", until=NEXT_DAY, dry_run=True).selected == 4


def test_a_replay_from_the_archive_restores_no_task_that_was_cancelled(database: Database):
    """By an operator, also before it began, or by the application since. And none that it has handled before.

    It does not change another task with the ID of an archived one either.
    """
    table = Table(opened(database))
    of_archive = {"Data": b"", "TimesSent": 1}
    archived = [{name: row(id).get(name) for name in ARCHIVED_COLUMNS} | of_archive for id in "abcd"]
    insert_cancelled(database, [row("a")], DAY)
    insert(database, [row("b"), sent("c", DAY), sent("d", DAY)])
    began = table.now()
    delete(database, "b", "c")
    assert replay_chunk(table, archived, began) == {
        "replayed": 1, "registered": 1, "unsent": 0, "resent": 0, "missing": 2,
    }  # fmt: skip
    stored = rows_of(database)
    assert stored.keys() == {"c", "d"}
    delete(database, "c", "d")
    insert(database, [sent("d", DAY, CreatedAt=stored["d"]["CreatedAt"] + MICROSECOND)])
    other = rows_of(database)
    for later in (began, table.now()):  # a worker can remember the task that was inserted as published
        assert replay_chunk(table, archived, later)["missing"] == 4
    assert rows_of(database) == other


def test_each_chunk_is_checked_under_its_locks(database: Database, monkeypatch: pytest.MonkeyPatch):
    """A task that was sent, deleted or reset since is not changed. Requests have LOW priority and a tag."""
    began = DAY + HOUR
    insert(database, [sent(id, DAY) for id in ("sent", "unsent", "gone", "again", "other")])
    insert(database, [sent("at once", began), sent("just before", began - MICROSECOND)])
    watch = Watch(database)
    table = Table(watch.database)

    def change() -> None:
        update(database, "unsent", SentAt=None)
        update(database, "again", SentAt=COMMIT_TIMESTAMP)
        delete(database, "gone")

    meddle(monkeypatch, table, change)
    watch.requests.clear()
    rows = [{"Id": id} for id in ("sent", "unsent", "gone", "again", "at once", "just before")]
    found = replay_chunk(table, rows, began)
    assert found == {"replayed": 2, "registered": 0, "unsent": 1, "resent": 2, "missing": 1}
    stored = rows_of(database)
    assert {id for id, each in stored.items() if each["SentAt"] is None} == {"sent", "unsent", "just before"}
    assert stored["unsent"]["AvailableAt"] is None
    for name, request in watch.requests:
        options = request.request_options
        assert (options.priority, options.transaction_tag) == (1, "outbox-pipeline-replay"), (name, request)
        assert name == "commit" or options.request_tag == "outbox-pipeline-replay"


def test_an_invalid_replay_is_refused_before_its_record_is_written(case: Case):
    case.insert([sent("a", DAY)])
    before = case.rows()
    refused: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({}, {}, "No tasks are selected.* --where true selects all sent tasks"),
        ({"archive": "a"}, {}, "No tasks are selected"),
        ({"where": "Priority >"}, {}, r"^--where Priority >: \[PARSE_SYNTAX_ERROR\]"),
        ({"where": "Color = 1"}, {}, r"^--where Color = 1: \[UNRESOLVED_COLUMN.*`Color`"),
        ({"where": "Priority"}, {}, "^--where Priority: .*FILTER_NOT_BOOLEAN"),
        ({"where": "rand() < 0.5"}, {}, "is not deterministic"),
        ({"since": "1h", "until": "2h"}, {}, "^--since .*Z is not before --until .*Z$"),
        ({"since": "2090-01-01T00:00:00Z"}, {}, "^--since 2090-01-01.* is not before now, "),
        ({"topic": "orders"}, {"resume": "x"}, "Remove --topic and OUTBOX_TOPIC"),
        ({}, {"resume": "x", "dry_run": True}, "Remove --dry-run$"),
        ({}, {"resume": "x", "reason": "y"}, "^--resume continues the interrupted replay as it began. Remove --reason"),
        ({}, {"resume": "x"}, "^--resume x: AsynchronousTaskOperations of .* has no replay with this ID"),
    ]
    for flags, how, sentence in refused:
        with pytest.raises(SettingError, match=sentence):
            case.replay(**flags, **how)
    for dry_run in (True, False):
        with pytest.raises(OutboxError, match="has no finished window"):
            case.replay(archive=str(case.folder / "no"), where="true", dry_run=dry_run)
    assert query(case.database, "SELECT COUNT(*) FROM AsynchronousTaskOperations") == [[0]]
    case.archive(late=True)
    [window] = case.files.windows()
    window.edit(database=window["database"].replace(case.target.database, "another"))
    with pytest.raises(OutboxError, match=r"is the archive of .*another, not of "):
        case.replay(archive=str(case.folder), where="true", dry_run=True)
    assert case.operations() == []

    done = case.replay(topic="nothing")
    with pytest.raises(SettingError, match=r"this replay finished at .*Z\. Start a new one"):
        case.replay(resume=str(done.replay_id))
    assert case.rows() == before


def test_the_record_has_the_account_of_the_credentials(database: Database, monkeypatch: pytest.MonkeyPatch):
    """A service account or a user. `default` is the account of a VM before its first token."""
    monkeypatch.setenv("LOGNAME", "jane")
    local = f"jane on {socket.gethostname()}"
    table = Table(opened(database))
    for credentials, principal in (
        ({"service_account_email": "job@shop"}, "job@shop"),
        ({"service_account_email": "default", "signer_email": "default"}, local),
        ({"service_account_email": None, "account": "me@shop"}, "me@shop"),
        ({"account": ""}, local),
    ):
        monkeypatch.setattr(type(table.database._instance._client), "credentials", SimpleNamespace(**credentials))
        begun = operations.begin(table, "replay", {})
        noted = f"SELECT Principal, StartedAt FROM {OPERATIONS} WHERE OperationId = '{begun.id}'"
        assert query(database, noted) == [[principal, begun.started_at]]


def test_a_replay_needs_the_table_of_operations(case: Case, own_database: Database):
    case = dataclasses.replace(case, database=own_database)
    case.insert([sent("a", DAY)])
    own_database.update_ddl([f"DROP TABLE {OPERATIONS}"]).result()
    with pytest.raises(NotReached, match=r"table AsynchronousTaskOperations is missing"):
        case.replay(where="true")
    assert case.replay(where="true", dry_run=True).selected == 1


def test_a_replay_that_failed_is_resumed_and_each_task_is_sent_once(
    case: Case,
    emulators: Emulators,
    subscription: Subscription,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Even if a worker has sent some of them before the replay is resumed, and other tasks were sent meanwhile.

    First, every attempt of a Spark task fails. In the resumed replay only two do, and each task is counted once.
    """
    ids, topic = [f"{number:03d}" for number in range(300)], subscription.topic
    case.insert([sent(id, DAY, Topic=topic) for id in ids])
    caplog.set_level("INFO", "outbox_pipeline")
    with monkeypatch.context() as patch:
        patch.setattr(job, "replay_rows", partial(fail_half_way, job.replay_rows))
        with pytest.raises(PythonException, match="when it has written half of its rows"):
            case.replay(topic=topic)
    [note] = case.operations()
    assert (note["FinishedAt"], note["Tasks"]) == (None, None)
    assert f"continue it with --resume {note['OperationId']}" in caplog.text
    send(emulators, case.database)
    case.insert([sent("new", open_table(case.target).now(), Topic=topic)])

    monkeypatch.setattr(job, "replay_rows", partial(fail_after_writes, job.replay_rows))
    done = case.replay(resume=note["OperationId"])
    assert (done.replay_id, done.selected, sum(counts(done)[1:])) == (note["OperationId"], len(ids), len(ids))
    assert (done.unsent > 0, done.missing) == (True, 0), "the writes of attempts that failed"
    assert 0 < done.resent < len(ids), "the failure was to come in the middle"
    send(emulators, case.database)
    assert sorted(each.attributes[outbox.TASK_ID_ATTRIBUTE] for each in subscription.drain(0.5)) == ids
    [ended] = case.operations()
    assert ended == note | {"FinishedAt": ended["FinishedAt"], "Tasks": len(ids)}
    assert ended["FinishedAt"] is not None
