"""The job `replay`: selection, writes and the record, also if Spark tasks are repeated."""

import dataclasses
import json
import socket
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from pyspark.errors import PythonException

import outbox
from outbox.base.values import shown
from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.table.ddl import OPERATIONS
from outbox.table.states import NEVER
from outbox_admin import operations
from outbox_admin.changes import execution
from outbox_admin.tasks import selections
from outbox_pipeline.jobs import replay as job
from outbox_pipeline.jobs.replay import ARCHIVED_COLUMNS, REPLAY_ROWS, replay_chunk
from outbox_pipeline.spanner import Table
from publishworker.spanner import relay_sql
from publishworker.types import LockedRow, Version
from tests.support.fakes import serialized
from tests.support.operations import PAST, Watch, delete, insert, insert_cancelled, opened, row, rows_of, update
from tests.support.pipeline import DAY, NEXT_DAY, Case, fail_after_writes, fail_half_way, meddle, sent
from tests.support.pubsub import PubSub, Subscription
from tests.support.relays import first_deliveries, worker
from tests.support.spanner import query

HOUR, MICROSECOND = timedelta(hours=1), timedelta(microseconds=1)


def counts(done: dict[str, Any]) -> tuple[int, ...]:
    names = ("selected", "replayed", "registered", "unsent", "resent", "cancelled", "replaced")
    return tuple(done[name] for name in names)


def archived(id: str, **columns: Any) -> dict[str, Any]:
    """Return a row as the archive has it, of a task that was sent once."""
    return {name: row(id, **columns).get(name) for name in ARCHIVED_COLUMNS} | {"Data": b"", "TimesSent": 1}


def send(emulators: Emulators, database: Database) -> None:
    with worker(emulators, database, command="drain") as process:
        assert process.wait(60) == 0


def test_flags_select_archived_tasks(case: Case):
    """Of each task, its last row decides. A task that was cancelled last is not selected."""
    tasks = {
        "first": sent("first", DAY, Data=serialized(b'{"cents": 7}', attributes={"kind": "paid", "none": ""})),
        "second": sent("second", DAY + HOUR, Topic="invoices", Priority=9),
        "third": sent("third", DAY + 2 * HOUR, Data=serialized(b'{"cents": 9}', attributes={"kind": "a=b"})),
        "odd": sent("odd", DAY + 3 * HOUR, Data=b"\xff no message"),
    }
    case.insert([*tasks.values(), row("ready"), row("dead", AvailableAt=NEVER)])
    case.insert([sent("retried, then cancelled", DAY)])
    insert_cancelled(case.database, [row("cancelled")], DAY)
    case.archive(late=True)
    update(case.database, "retried, then cancelled", SentAt=NEXT_DAY, CancelledBy="an operation")
    case.archive(until=NEXT_DAY + 24 * HOUR, late=True)
    before = case.rows()
    hour, three = shown(DAY + HOUR), shown(DAY + 3 * HOUR)
    expected: list[tuple[dict[str, str], set[str]]] = [
        ({"until": "0s"}, set(tasks)),
        ({"since": hour, "until": three}, {"second", "third"}),
        ({"since": shown(DAY + HOUR + MICROSECOND), "until": three}, {"third"}),
        ({"until": hour, "topic": "orders"}, {"first"}),
        ({"topic": "orders", "where": "map_contains_key(Attributes, 'kind')"}, {"first", "third"}),
        ({"where": "Payload IS NULL", "topic": "orders", "until": shown(NEXT_DAY)}, {"odd"}),
        ({"where": "State = 'sent' AND Attributes['kind'] = 'paid' OR Priority = 9"}, {"first", "second"}),
        ({"where": "get_json_object(cast(Payload AS string), '$.cents') > 7"}, {"third"}),
    ]
    for flags, ids in expected:
        done = case.replay(**flags, dry_run=True)
        assert {each["id"] for each in done["sample"]} == ids, flags
        assert done["selected"] == len(ids)
        assert all(each["sent_at"] == tasks[each["id"]]["SentAt"] for each in done["sample"])
        topics = [tasks[id]["Topic"] for id in ids]
        assert done["topics"] == {name: topics.count(name) for name in topics}
        assert done.keys() == {"selected", "topics", "sample"}
    assert case.rows() == before
    assert case.operations() == []


def test_a_dry_run_counts_all_tasks_and_shows_some(case: Case):
    topics = [f"topic-{number:02d}" for number in range(job.TOPICS + 5)]
    case.insert([sent(f"{t}-{n}", DAY, Topic=t) for place, t in enumerate(topics) for n in range(1 + place % 3)])
    case.archive(late=True)
    done = case.replay(where="true", dry_run=True)
    assert done["selected"] == sum(1 + place % 3 for place in range(len(topics)))
    by_number = sorted(((t, 1 + place % 3) for place, t in enumerate(topics)), key=lambda each: (-each[1], each[0]))
    assert list(done["topics"].items()) == by_number[: job.TOPICS]
    assert len({each["id"] for each in done["sample"]}) == job.SAMPLE


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
    case.archive(late=True)
    before = case.rows()
    watch = Watch(case.database)
    [_] = execution.change(watch.table, "retry", selections.TaskSelection(ids=("retry1", "retry2")))
    caplog.set_level("INFO", "outbox_pipeline")
    where = f"Id LIKE 'replay%' OR Topic = '{topic}'"
    done = case.replay(where=where, until="0s", reason="the report lost a day")
    assert counts(done) == (2 + len(of_key), 2 + len(of_key), 0, 0, 0, 0, 0)
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
    assert (note["OperationId"], note["Reason"]) == (done["replay_id"], "the report lost a day")
    assert note["Tasks"] == 2 + len(of_key)
    assert note["StartedAt"] < after["replay1"]["AvailableAt"] < note["FinishedAt"]
    selection = {"archive": str(case.folder), "where": where, "until": ""}
    assert {**json.loads(note["Selection"]), "until": ""} == selection
    assert f"Replay {done['replay_id']} finished" in caplog.text

    delete(case.database, *(each["Id"] for each in (*twins, *stay)))
    send(emulators, case.database)
    messages = subscription.drain(0.5)
    assert first_deliveries(messages) == {"k": [each["Id"] for each in of_key]}
    assert len(messages) == len(of_key), "nothing twice"


def test_a_replay_to_another_topic_publishes_in_order_and_changes_no_task(case: Case, pubsub: PubSub):
    """Also purged tasks, but none that was cancelled since it was archived. It is recorded."""
    to = pubsub.new_subscription(pubsub.new_topic(), ordered=True)
    keyed = {"OrderingKey": "k", "CreatedAt": DAY}
    case.insert([sent(f"{99 - n}", DAY + (n % 7) * MICROSECOND, Sequence=n, **keyed) for n in range(50)])
    case.insert([sent(id, DAY, Data=b"\xff") for id in ("broken", "cancelled")])
    case.insert([sent("other", DAY, Topic="others"), row("ready")])
    case.archive(late=True)
    delete(case.database, "98", "99")
    update(case.database, "cancelled", SentAt=NEXT_DAY, CancelledBy="application")
    before, replay = case.rows(), partial(case.replay, topic="orders")
    for wrong, sentence in (("orders", "is the topic of the tasks"), ("nowhere", "nowhere does not exist")):
        with pytest.raises(OutboxError, match=sentence):
            replay(to=wrong)
    with pytest.raises(SettingError, match="--to needs --topic"):
        case.replay(where="true", to=to.topic)
    assert case.operations() == []
    done = replay(to=to.topic, reason="ticket 4711")
    del done["replay_id"]
    assert done == {"selected": 52, "published": 50, "refused": 1, "cancelled": 1}
    in_order = {"k": [f"{99 - n}" for n in range(50)]}
    assert first_deliveries(to.drain()) == in_order
    [note] = case.operations()
    assert (note["Tasks"], json.loads(note["Selection"])["to"]) == (50, to.topic)
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
    before = case.rows()
    # Tasks that were sent again are in two windows, one of them with another ordering key.
    update(case.database, "plain", SentAt=NEXT_DAY, Topic="again", OrderingKey="other")
    case.archive(until=NEXT_DAY + 24 * HOUR, late=True)
    delete(case.database, *(each["Id"] for each in (*gone, *large)))
    update(case.database, "unsent", SentAt=None)
    update(case.database, "dead", SentAt=None, AvailableAt=NEVER)
    left = {id: each for id, each in case.rows().items() if id != "same"}

    case.spark.conf.set("spark.sql.session.timeZone", "Pacific/Kiritimati")
    try:
        done = case.replay(where="true")
    finally:
        case.spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert counts(done) == (8, 1, 5, 2, 0, 0, 0)
    stored = case.rows()
    assert stored.items() >= left.items()
    [note] = case.operations()
    assert (json.loads(note["Selection"])["archive"], note["Tasks"]) == (str(case.folder), 8)
    now = {stored[each["Id"]].pop(name) for each in (*gone, *large) for name in ("AvailableAt", "DueAt")}
    assert all(note["StartedAt"] < each < note["FinishedAt"] for each in now)
    clean: dict[str, Any] = {"SentAt": None, "ExpiresAt": None, "Attempts": 0, "LastError": None}
    for each in (*gone, *large):
        was = before[each["Id"]]
        del was["AvailableAt"], was["DueAt"]
        if each["Id"] == "plain":
            was |= {"Topic": "again", "OrderingKey": "other"}
        assert stored[each["Id"]] == was | clean
    again = case.replay(topic="orders")
    assert counts(again) == (4, 0, 0, 4, 0, 0, 0), "all of them are to be sent"
    # The last row of a task decides: it was sent again after this time, to another topic.
    assert case.replay(topic="orders", until=NEXT_DAY, dry_run=True)["selected"] == 4


def locked(database: Database, id: str) -> LockedRow:
    [found], _ = database.run_in_transaction(relay_sql.lock, [id], {})
    return found


def test_a_replay_after_a_purge_inserts_a_row_that_no_worker_takes_for_an_earlier_one(database: Database):
    """A worker that is in doubt about the row of the first replay must publish that of the second one."""
    table = Table(opened(database))
    rows = [archived("a"), archived("keyed", OrderingKey="k")]
    found: list[list[LockedRow]] = []
    for _ in range(2):
        assert replay_chunk(table, rows, table.now())["registered"] == 2
        found.append([locked(database, each["Id"]) for each in rows])
        delete(database, "a", "keyed")
    for first, second in zip(*found, strict=True):
        assert Version.of(first).is_of_task(second)
        assert first.times_sent == second.times_sent
        assert not Version.of(first).has_message_of(second)


def test_each_task_is_checked_under_its_lock(database: Database, monkeypatch: pytest.MonkeyPatch):
    """Only a sent task and one that is gone are changed, whatever happened since. A cancelled one never is.

    Requests have LOW priority and a tag.
    """
    began = DAY + HOUR
    ids = ("sent", "unsent", "gone", "again", "cancelled", "replaced", "other")
    insert(database, [sent(id, DAY) for id in ids])
    insert(database, [sent("at once", began), sent("just before", began - MICROSECOND)])
    insert(database, [row("cancelled, made unsent", CancelledBy="an operation")])
    watch = Watch(database)
    table = Table(watch.database)

    def change() -> None:
        update(database, "unsent", SentAt=None)
        update(database, "again", SentAt=COMMIT_TIMESTAMP)
        update(database, "cancelled", CancelledBy="application")
        update(database, "replaced", CreatedAt=DAY)
        delete(database, "gone")

    meddle(monkeypatch, table, change)
    watch.requests.clear()
    before = rows_of(database)
    rows = [archived(id) for id in (*ids[:-1], "at once", "just before", "cancelled, made unsent")]
    expected = {"replayed": 2, "registered": 1, "unsent": 1, "resent": 2, "cancelled": 2, "replaced": 1}
    assert replay_chunk(table, rows, began) == expected
    stored = rows_of(database)
    assert {id for id, each in stored.items() if each["AvailableAt"]} == {"sent", "just before", "gone"}
    assert stored["cancelled"] == before["cancelled"] | {"CancelledBy": "application"}
    for name, request in watch.requests:
        options = request.request_options
        assert (options.priority, options.transaction_tag) == (1, "outbox-pipeline-replay"), (name, request)
        assert name == "commit" or options.request_tag == "outbox-pipeline-replay"


def test_an_invalid_replay_is_refused_before_its_record_is_written(case: Case):
    case.insert([sent("a", DAY)])
    before = case.rows()
    with pytest.raises(OutboxError, match="has no finished window"):
        case.replay(where="true")
    case.archive(late=True)
    refused: list[tuple[Mapping[str, str], str]] = [
        ({}, "No tasks are selected.* --where true selects all"),
        ({"where": "Priority >"}, r"^--where Priority >: \[PARSE_SYNTAX_ERROR\]"),
        ({"where": "Color = 1"}, r"^--where Color = 1: \[UNRESOLVED_COLUMN.*`Color`"),
        ({"where": "Priority"}, "^--where Priority: .*FILTER_NOT_BOOLEAN"),
        ({"where": "rand() < 0.5"}, "is not deterministic"),
        ({"since": "1h", "until": "2h"}, "^--since .*Z is not before --until .*Z$"),
        ({"since": "2090-01-01T00:00:00Z"}, "^--since 2090-01-01.* is not before now, "),
    ]
    for flags, sentence in refused:
        with pytest.raises(SettingError, match=sentence):
            case.replay(**flags)
    [window] = case.files.windows()
    window.edit(database=window["database"].replace(case.target.database, "another"))
    for dry_run in (True, False):
        with pytest.raises(OutboxError, match=r"is the archive of .*another, not of "):
            case.replay(where="true", dry_run=dry_run)
    assert case.operations() == []
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
    case.archive(late=True)
    own_database.update_ddl([f"DROP TABLE {OPERATIONS}"]).result()
    with pytest.raises(NotReached, match=r"table AsynchronousTaskOperations is missing"):
        case.replay(where="true")
    assert case.replay(where="true", dry_run=True)["selected"] == 1


def test_repeated_spark_tasks_replay_each_task_once(
    case: Case, emulators: Emulators, subscription: Subscription, monkeypatch: pytest.MonkeyPatch
):
    """Half of the tasks were purged. First, every attempt of a Spark task fails, and the replay is started again."""
    ids, topic = [f"{number:03d}" for number in range(300)], subscription.topic
    case.insert([sent(id, DAY, Topic=topic) for id in ids])
    case.archive(late=True)
    delete(case.database, *ids[::2])
    with monkeypatch.context() as patch:
        patch.setattr(job, "replay_rows", partial(fail_half_way, job.replay_rows))
        with pytest.raises(PythonException, match="when it has written half of its rows"):
            case.replay(topic=topic)
    [note] = case.operations()
    assert (note["FinishedAt"], note["Tasks"]) == (None, None)

    monkeypatch.setattr(job, "replay_rows", partial(fail_after_writes, job.replay_rows))
    done = case.replay(topic=topic)
    assert (done["selected"], done["unsent"]) == (len(ids), len(ids)), "by earlier attempts"
    send(emulators, case.database)
    assert sorted(each.attributes[outbox.TASK_ID_ATTRIBUTE] for each in subscription.drain(0.5)) == ids
    assert [each["Tasks"] for each in case.operations()] == [None, len(ids)]
