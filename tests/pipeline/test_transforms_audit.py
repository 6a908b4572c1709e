"""The audit finds each seeded defect and no other. These tests need neither files nor Spanner."""

import dataclasses
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from outbox.errors import SettingError
from outbox.message import TASK_ID_ATTRIBUTE, RawPubsubMessage
from outbox.table.states import NEVER
from outbox_pipeline import schemas
from outbox_pipeline.jobs import audit_transforms as audit
from outbox_pipeline.jobs.audit_inputs import LINES, digest, received
from outbox_pipeline.source.datasource import decoded

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
RULES = audit.Rules(
    since=NOON - HOUR, until=NOON, horizon=NOON + HOUR, known_until=NOON + HOUR - SECOND, grace=10 * MINUTE
)
IN_TIME = NOON - 30 * MINUTE
SENT, AGAIN, LATER = IN_TIME + 2 * SECOND, IN_TIME + 5 * MINUTE, IN_TIME + 15 * MINUTE
#: When a task was created and sent, when its message was published, and its state.
EDGES = (
    (RULES.since, NOON, NOON, "delivered"),
    (NOON - HOUR - SECOND, NOON, NOON, None),
    (NOON - SECOND, NOON, NOON, "delivered"),
    (NOON, NOON + SECOND, NOON + SECOND, None),
    (IN_TIME, NOON + 10 * MINUTE, NOON + 10 * MINUTE - SECOND, "delivered"),
    (IN_TIME, NOON + 10 * MINUTE, NOON + 10 * MINUTE, "late"),
    (IN_TIME, NOON + 50 * MINUTE - SECOND, None, "lost"),
    (IN_TIME, NOON + 50 * MINUTE, None, "arriving"),
    # Pub/Sub's clock is ahead of or behind Spanner's clock.
    (IN_TIME, IN_TIME + SECOND, IN_TIME + 3 * SECOND, "delivered"),
    (IN_TIME, IN_TIME + SECOND, IN_TIME - 3 * SECOND, "delivered"),
)

TASKS = "Id STRING, Topic STRING, Data BINARY, OrderingKey STRING, Sequence LONG, CreatedAt TIMESTAMP, AvailableAt TIMESTAMP, AtMostOnce BOOLEAN, TimesSent LONG, SentAt TIMESTAMP, CancelledBy STRING"  # noqa: E501 - columns
MESSAGES = "message_id STRING, publish_time TIMESTAMP, attributes MAP<STRING, STRING>, data BINARY"
JSON_MESSAGES = "message_id STRING, publish_time TIMESTAMP, attributes STRING, data BINARY"


def data_of(text: str) -> bytes:
    return bytes(RawPubsubMessage(data=text.encode(), attributes={"order": text}).SerializeToString())


def task(id: str, created: datetime, sent: datetime | None, **others: Any) -> tuple[Any, ...]:
    data, cancelled = data_of(others.get("text", id)), others.get("cancelled")
    return (
        id, others.get("topic", "orders"), data, others.get("key"), others.get("sequence"), created,
        others.get("available"), others.get("at_most_once"), others.get("times_sent"), cancelled or sent,
        cancelled and "an operation",
    )  # fmt: skip


def message(id: str, at: datetime, message_id: str = "", **others: Any) -> tuple[Any, ...]:
    text = others.get("text", id)
    attributes = {TASK_ID_ATTRIBUTE: id, "order": text, **others.get("attributes", {})}
    return (message_id or f"of {id} at {at}", at, attributes, text.encode())


def _keyed(id: str, created: int, sequence: int | None, key: str = "k", topic: str = "orders") -> tuple[Any, ...]:
    return task(id, IN_TIME + created * SECOND, NOON, sequence=sequence, key=key, topic=topic)


#: What is judged in each case: tasks as they are read, messages as they were received.
CASES: dict[str, tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]] = {
    "each defect": (
        [
            *(task(id, IN_TIME, SENT) for id in ("good", "lost", "twice", "again", "changed")),
            task("late", IN_TIME, NOON + 20 * MINUTE + SECOND),
            task("pending", IN_TIME, None),
            task("unmarked", IN_TIME, None),
            task("dead", IN_TIME, None, available=NEVER),
            task("arriving", IN_TIME, RULES.horizon - 5 * MINUTE),
            task("first", IN_TIME, SENT, key="k", sequence=1),
            task("second", IN_TIME, SENT, key="k", sequence=2),
            task("other key", IN_TIME, SENT, key="l", sequence=3),
            task("young", NOON, None),
            task("old", NOON - 2 * HOUR, None),
        ],
        [
            *(message(id, IN_TIME + SECOND) for id in ("good", "unmarked", "second", "stranger")),
            message("late", NOON + 20 * MINUTE),
            message("twice", IN_TIME + SECOND, "one"),
            message("twice", IN_TIME + SECOND * 2, "two"),
            message("again", IN_TIME + SECOND, "the same"),
            message("again", IN_TIME + SECOND, "the same"),
            message("changed", IN_TIME + SECOND, text="changed on the way"),
            message("first", IN_TIME + 2 * SECOND),
            message("other key", IN_TIME),
            (*message("foreign", IN_TIME)[:2], {"some": "attribute"}, b""),
            (None, IN_TIME, {TASK_ID_ATTRIBUTE: "unreadable"}, b""),
        ],
    ),
    "edges": (
        [task(str(place), created, sent) for place, (created, sent, _, _) in enumerate(EDGES)],
        [message(str(place), at) for place, (_, _, at, _) in enumerate(EDGES) if at],
    ),
    "unknown": (
        [task("other", IN_TIME, None)],
        [
            message("too late", RULES.known_until), message("late enough", RULES.known_until - SECOND),
            message("too early", NOON - HOUR + MINUTE), message("early enough", NOON - HOUR + MINUTE + SECOND),
        ],
    ),
    "sent again": (
        [
            *(task(id, IN_TIME, at) for id in ("both", "one", "none", "skewed") for at in (IN_TIME, AGAIN)),
            *(task("quick", IN_TIME, at) for at in (IN_TIME, IN_TIME + SECOND / 2)),
            *(task("waits", IN_TIME, at) for at in (IN_TIME, None)),
            *(task("marked first", IN_TIME, at, at_most_once=True) for at in (IN_TIME, AGAIN)),
        ],
        [
            message("both", IN_TIME - SECOND),
            message("both", AGAIN - SECOND),
            message("one", IN_TIME - SECOND, "a"),
            message("one", IN_TIME - 2 * SECOND, "b"),
            message("skewed", IN_TIME + SECOND / 2),  # a clock that is ahead
            message("skewed", AGAIN + SECOND / 2),
            message("quick", IN_TIME - SECOND / 10),
            message("quick", IN_TIME + SECOND * 0.4),
            message("waits", IN_TIME - SECOND),
            message("marked first", IN_TIME + 30 * SECOND),
            message("marked first", AGAIN + 30 * SECOND),
        ],
    ),
    "cancelled": (
        [
            *(task(id, IN_TIME, None, cancelled=AGAIN) for id in ("cancelled", "received", "archived", "archived")),
            task("dead", IN_TIME, None, cancelled=AGAIN, available=NEVER),
            task("outside", NOON - 2 * HOUR, None, cancelled=AGAIN),
            *(task("restored", IN_TIME, sent, cancelled=at) for sent, at in ((None, AGAIN), (LATER, None))),
            *(task("waits", IN_TIME, None, cancelled=at) for at in (SENT, AGAIN, None)),
            *(task("twice", IN_TIME, None, cancelled=at) for at in (SENT, AGAIN)),
            # Another task has the ID since.
            task("registered", IN_TIME, None, cancelled=AGAIN),
            task("registered", AGAIN + 2 * MINUTE, LATER),
            # Sent, retried and cancelled. The archive has the sending, or not.
            task("retried", IN_TIME, SENT), task("retried", IN_TIME, None, times_sent=1, cancelled=AGAIN),
            task("retried, received", IN_TIME, SENT),
            task("retried, received", IN_TIME, None, times_sent=1, cancelled=AGAIN),
            task("retried, no archive", IN_TIME, None, times_sent=1, cancelled=AGAIN),
        ],
        [
            message("received", AGAIN + 30 * SECOND), message("restored", LATER - SECOND),
            message("registered", LATER - SECOND), message("registered", LATER + SECOND, "again"),
            message("retried", IN_TIME + SECOND), message("retried, no archive", IN_TIME + SECOND),
            message("retried, received", IN_TIME + SECOND), message("retried, received", AGAIN),
            message("outside", AGAIN),
        ],
    ),
    "order": (
        [
            _keyed("a", 0, None), _keyed("b", 0, 1), _keyed("c", 0, 2), _keyed("d", 1, 0), _keyed("e", 1, 0),
            _keyed("f", 2, 0, "other"), _keyed("g", 2, 0, topic="invoices"),
            task("before", NOON - 2 * HOUR, NOON, key="k"),
        ],
        [
            *(message(id, IN_TIME + n * SECOND) for id, n in zip("abcdefg", (10, 11, 9, 12, 12, 1, 1), strict=True)),
            message("before", IN_TIME + 30 * SECOND),
            message("a", IN_TIME + 40 * SECOND, "a repeat"),
        ],
    ),
    "latency": (
        [
            *(task(f"{id} {topic}", IN_TIME, IN_TIME, topic=topic) for id in "ab" for topic in ("orders", "silent")),
            task("c", IN_TIME, IN_TIME), task("d", IN_TIME, None), task("ahead", IN_TIME, IN_TIME, topic="ahead"),
            *(task(f"n{n}", IN_TIME, IN_TIME, topic="many") for n in range(1, 21)),
        ],
        [
            message("a orders", IN_TIME + 4 * SECOND), message("ahead", IN_TIME - SECOND / 2),
            *(message(f"n{n}", IN_TIME + n * SECOND) for n in range(1, 21)),
        ],
    ),
}  # fmt: skip


@dataclasses.dataclass
class Judged:
    #: Each class and task ID that is found, and how often, by case.
    findings: dict[str, Counter[tuple[str, str]]]
    #: The state of each task, by case and task ID.
    states: dict[tuple[str, str], str | None]
    #: What the report says of each topic, by case and topic.
    numbers: dict[tuple[str, str], dict[str, Any]]
    #: How many findings of a class are shown, if two of a class may be.
    shown: Counter[str]


@pytest.fixture(scope="module")
def judged(spark: SparkSession) -> Judged:
    tasks, messages = [], []
    for case, (of_case, received_in_case) in CASES.items():
        tasks += [
            (f"{case}/{id}", f"{case}/{topic}", data, key and f"{case}/{key}", *rest)
            for id, topic, data, key, *rest in of_case
        ]
        for message_id, at, attributes, data in received_in_case:
            named = {name: f"{case}/{text}" if name == TASK_ID_ATTRIBUTE else text for name, text in attributes.items()}
            messages.append((message_id and f"{case}/{message_id}", at, named, data))
    deliveries = received(spark.createDataFrame(messages, MESSAGES), base64=False)
    sends = audit.sends(decoded(spark.createDataFrame(tasks, TASKS)), bodies=True)
    rows = audit.judged(audit.once(sends), deliveries, RULES).persist()
    found = audit.findings(rows, audit.out_of_order(rows)).persist()
    assert found.schema.simpleString() == schemas.FOUND.simpleString()
    findings: dict[str, Counter[tuple[str, str]]] = {case: Counter() for case in CASES}
    for row in found.collect():
        case, _, id = row.task_id.partition("/")
        findings[case][row["class"], id] += 1
    states = {tuple(row.task_id.split("/")): row.state for row in rows.collect() if row.task_id}
    lines = audit.numbers(audit.counted(rows)).where("NOT is_total")
    numbers = {tuple(line.topic.split("/")): line.asDict() for line in lines.collect()}
    shown = Counter(row["class"] for row in audit.samples(found, 2).collect())
    rows.unpersist()
    found.unpersist()
    return Judged(findings, states, numbers, shown)


def test_each_defect_is_found_and_no_other(judged: Judged):
    found = [(name, name) for name in ("lost", "late", "pending", "dead", "arriving")]
    found += [("pending", "unmarked"), ("republished", "twice"), ("redelivered", "again"), ("mismatched", "changed")]
    assert judged.findings["each defect"] == Counter([*found, ("out_of_order", "second"), ("unknown", "stranger")])
    wanted = dict.fromkeys(("late", "dead", "arriving", "republished", "redelivered", "mismatched"), 1)
    wanted |= {"tasks": 13, "delivered": 7, "lost": 1, "pending": 2, "messages": 10}
    numbers = judged.numbers["each defect", "orders"]
    assert {name: numbers[name] for name in wanted} == wanted
    assert {place for place in judged.numbers if place[0] == "each defect"} == {("each defect", "orders")}
    found_of = Counter(name for case in judged.findings.values() for name, _ in case.elements())
    assert judged.shown == {name: min(number, 2) for name, number in found_of.items()}
    assert found_of["lost"] > 2


def test_the_bounds_of_window_and_grace(judged: Judged):
    """The window selects by CreatedAt. The grace period follows its end and precedes the horizon."""
    states = {id: state for (case, id), state in judged.states.items() if case == "edges"}
    assert states == {str(place): state for place, (*_, state) in enumerate(EDGES)}


def test_a_message_is_unknown_only_if_its_task_must_have_been_read(judged: Judged):
    found = {id for name, id in judged.findings["unknown"] if name == "unknown"}
    assert found == {"late enough", "early enough"}


def test_each_sending_of_an_id_has_its_own_messages(judged: Judged):
    """A task that was sent again and archived twice is not republished. A sending without its own message is lost."""
    assert judged.findings["sent again"] == Counter(
        {("lost", "one"): 1, ("republished", "one"): 1, ("lost", "none"): 2, ("pending", "waits"): 1}
    )


def test_a_cancelled_task_is_counted_once_and_named_if_it_was_received(judged: Judged):
    """A restored task counts as what it is now. A message can be of an earlier sending of a task that was retried."""
    cancelled = ("cancelled", "received", "archived", "dead", "twice", "registered")
    retried = ("retried", "retried, received", "retried, no archive")
    expected = Counter({("cancelled", id): 1 for id in (*cancelled, *retried)})
    expected |= Counter({("cancelled_after_publish", id): 1 for id in ("received", "retried, received")})
    assert judged.findings["cancelled"] == expected + Counter(
        {("pending", "waits"): 1, ("republished", "registered"): 1}
    )
    numbers = judged.numbers["cancelled", "orders"]
    wanted = {"tasks": 14, "cancelled": 9, "delivered": 4, "pending": 1, "lost": 0, "cancelled_after_publish": 2}
    assert {name: numbers[name] for name in wanted} == wanted


def test_out_of_order_compares_first_messages(judged: Judged):
    """The order is CreatedAt, Sequence, Id in one topic. Republished messages and older tasks do not count."""
    assert [id for name, id in judged.findings["order"].elements() if name == "out_of_order"] == ["c"]


def test_latencies_are_measured_for_received_tasks(judged: Judged):
    """Lost and pending tasks, and topics without messages, have no latency. Clock skew makes no latency negative."""
    wanted = {"ahead": (0.0,) * 4, "orders": (4.0,) * 4, "silent": (None,) * 4, "many": (10.5, 19.05, 19.81, 20.0)}
    for topic, latencies in wanted.items():
        numbers = judged.numbers["latency", topic]
        assert tuple(numbers[name] for name in ("p50", "p95", "p99", "max")) == latencies, topic


def test_task_and_message_have_the_same_digest(spark: SparkSession):
    random = Random(5)
    alphabet = [*map(chr, range(128)), "é", "ß", "\u2028", "\ufeff", "\uffff", "😀", "\U0010ffff"]

    def text() -> str:
        return "".join(random.choices(alphabet, k=random.randrange(9)))

    pairs = [(random.randbytes(random.randrange(9)), {text(): text() for _ in range(n % 4)}) for n in range(200)]
    tasks = [
        (str(place), bytes(RawPubsubMessage(data=data, attributes=each).SerializeToString()))
        for place, (data, each) in enumerate(pairs)
    ]
    maps = [(str(place), NOON, each, data) for place, (data, each) in enumerate(pairs)]
    texts = [(id, at, json.dumps(each), data) for id, at, each, data in maps]
    ours = decoded(spark.createDataFrame(tasks, "Id STRING, Data BINARY"))
    digests = [digest(f.col("Attributes"), payload) for payload in (f.col("Payload"), f.lit(None))]
    expected = ours.select("Id", *digests).collect()
    for place, bodies in ((1, True), (2, False)):
        for messages in (spark.createDataFrame(maps, MESSAGES), spark.createDataFrame(texts, JSON_MESSAGES)):
            theirs = received(messages if bodies else messages.drop("data"), base64=False).collect()
            assert {row.message_id: row.digest for row in theirs} == {row[0]: row[place] for row in expected}


def test_added_attributes_do_not_change_the_digest(spark: SparkSession):
    added = (TASK_ID_ATTRIBUTE, "ordering_key", "googclient_schemaencoding", "CloudPubSubDeadLetterSourceTopic")
    same = [(b"data", {"a": "b"} | dict.fromkeys(names, "x")) for names in ((), *((name,) for name in added), added)]
    others = [
        (b"data", {"a": "b", "c": ""}), (b"dat", {"a": "b"}), (b"data", {"ab": ""}), (b"data", {"a": None}),
        (None, {"a": "b"}), (b"", {"a": "b"}), (b"", {}), (None, {}), (b"data", {"b": "a"}), (b"", {"": "data"}),
        (b"data", {"a": "b", "Google": ""}), (b"data", {"a": "b", "x-goog": ""}),
    ]  # fmt: skip
    rows = [(place, data, each) for place, (data, each) in enumerate(same + others)]
    made = spark.createDataFrame(rows, "place INT, data BINARY, attributes MAP<STRING, STRING>")
    found = made.orderBy("place").select(digest(f.col("attributes"), f.col("data")).alias("digest")).collect()
    digests = [row.digest for row in found]
    assert len(set(digests[: len(same)])) == 1
    assert len(set(digests)) == 1 + len(others)


def test_texts_are_parsed_as_bigquery_writes_them(spark: SparkSession):
    at = "2026-11-20 11:30:00.123456 UTC"
    rows = [
        ("1", at, '{"asynchronous_task_id": "a", "x": "ü"}', "aGk="),
        ("2", "2026-11-20T12:30:00.123456789+01:00", ' {"asynchronous_task_id": "b"} ', None),
        ("3", at, None, ""),
        ("4", at, "no JSON", ""),
        ("5", "yesterday", "{}", ""),
        (None, at, "{}", ""),
    ]
    found = received(spark.createDataFrame(rows, LINES), base64=True).collect()
    assert [(row.message_id, row.task_id) for row in found if row.readable] == [("1", "a"), ("2", "b"), ("3", None)]
    assert [row.message_id for row in found if not row.readable] == ["4", "5", None]
    assert [row.publish_time.microsecond for row in found[:2]] == [123456] * 2
    assert found[0].publish_time == found[1].publish_time
    contents = [(b"hi", {"x": "ü"}), (b"", {}), (b"aGk=", {"x": "ü"})]
    made = spark.createDataFrame(contents, "data BINARY, attributes MAP<STRING, STRING>")
    hi, none, undecoded = (row[0] for row in made.select(digest(f.col("attributes"), f.col("data"))).collect())
    assert [row.digest for row in found[:2]] == [hi, none]
    [text] = received(spark.createDataFrame(rows[:1], LINES), base64=False).collect()
    assert text.digest == undecoded


GOOD = json.dumps({TASK_ID_ATTRIBUTE: "a", "x": "🎉"})
#: Texts of attributes that have a task ID, though other values may be no texts, and texts that have none.
WITH_ID = (GOOD, f" {GOOD} ", *(f'{{"n": {value}, {GOOD[1:]}' for value in ("1", "null", "[1]", '{"b": {}}', "1.5")))
WITHOUT_ID = (
    GOOD[:20], f"[{GOOD}]", f"\ufeff{GOOD}", '{"a": "1", "a": "2"}', '{"a": ' * 5, '{"a": ' * 2000, None, "", "\x00",
    "null", "{}", "[]", "1e999", "NaN", "x" * 5000, '"', "\\", "\u2028",
)  # fmt: skip
TIMES = {
    "2026-11-20T12:00:00Z": NOON, "2026-11-20T12:00:00+14:00": NOON - 14 * HOUR,
    **dict.fromkeys((
        "9999-12-31T23:59:59.999999999Z", "0001-01-01T00:00:00Z", "2026-02-30T00:00:00Z", "yesterday", "-1", "1e9", "",
        "+294247-01-10T04:00:54.775807Z", None,
    )),
}  # fmt: skip


def test_every_odd_text_is_read_or_counted_as_unreadable(spark: SparkSession):
    """None of them ends the job. A time outside of 1970 to 9000 is unreadable."""
    at, expected = "2026-11-20T12:00:00Z", dict.fromkeys(WITH_ID, "a") | dict.fromkeys(WITHOUT_ID)
    rows = [(f"{number}", at, text, "no base64!") for number, text in enumerate(expected)]
    found = received(spark.createDataFrame(rows, LINES), base64=True).collect()
    assert {row.message_id: row.task_id for row in found} == {
        f"{number}": id for number, id in enumerate(expected.values())
    }
    rows = [(f"{number}", time, GOOD, None) for number, time in enumerate(TIMES)]
    found = received(spark.createDataFrame(rows, LINES), base64=True)
    times = found.select("message_id", "readable", f.unix_micros("publish_time")).collect()
    assert [row.readable for row in times] == [time is not None for time in TIMES.values()]
    assert [row[2] for row in times if row.readable] == [
        time.timestamp() * 1_000_000 for time in TIMES.values() if time
    ]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("message_id STRING, publish_time TIMESTAMP", "have no column attributes\\. .* Set write_metadata"),
        ("message_id STRING, publish_time LONG, attributes STRING", "publish_time is bigint, but must be a time"),
        ("message_id STRING, publish_time TIMESTAMP, attributes INT", "attributes is int, but must be a map or a JSON"),
        ("message_id STRING, publish_time STRING, attributes STRING, data INT", "data is int, but must be binary or a"),
    ],
)
def test_unreadable_columns_are_named(spark: SparkSession, columns: str, said: str):
    with pytest.raises(SettingError, match=said):
        received(spark.createDataFrame([], columns), base64=True)
