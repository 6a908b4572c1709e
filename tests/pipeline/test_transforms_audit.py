"""What the audit finds of seeded defects: each of them, and no other; without files and without Spanner."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.errors import SettingError
from outbox.message import TASK_ID_ATTRIBUTE, RawPubsubMessage
from outbox.states import NEVER
from outbox_pipeline import schemas
from outbox_pipeline.transforms import audit
from outbox_pipeline.transforms.digests import digest
from outbox_pipeline.transforms.messages import decoded
from outbox_pipeline.transforms.received import LINES, received

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
RULES = audit.Rules(
    since=NOON - HOUR, until=NOON, horizon=NOON + HOUR, known_until=NOON + HOUR - SECOND, grace=10 * MINUTE, skew=SECOND
)
IN_TIME = NOON - 30 * MINUTE

TASKS = "Id STRING, Topic STRING, Data BINARY, OrderingKey STRING, Sequence LONG, CreatedAt TIMESTAMP, AvailableAt TIMESTAMP, SentAt TIMESTAMP"  # noqa: E501 - columns
MESSAGES = "message_id STRING, publish_time TIMESTAMP, attributes MAP<STRING, STRING>, data BINARY"
JSON_MESSAGES = "message_id STRING, publish_time TIMESTAMP, attributes STRING, data BINARY"


def data_of(text: str) -> bytes:
    """Return a task's Data."""
    return bytes(RawPubsubMessage(data=text.encode(), attributes={"order": text}).SerializeToString())


def task(id: str, created: datetime, sent: datetime | None, **others: Any) -> tuple[Any, ...]:
    """Return a task as it is read, whose data is its id."""
    data = data_of(others.get("text", id))
    return (
        id, others.get("topic", "orders"), data, others.get("key"), others.get("sequence"), created,
        others.get("available"), sent,
    )  # fmt: skip


def message(id: str, at: datetime, message_id: str = "", **others: Any) -> tuple[Any, ...]:
    """Return a message as it was received, whose data is the id of its task."""
    text = others.get("text", id)
    attributes = {TASK_ID_ATTRIBUTE: id, "order": text, **others.get("attributes", {})}
    return (message_id or f"of {id} at {at}", at, attributes, text.encode())


def judged(
    spark: SparkSession,
    tasks: Sequence[tuple[Any, ...]],
    messages: Sequence[tuple[Any, ...]],
    rules: audit.Rules = RULES,
) -> DataFrame:
    """Return what comes of them."""
    deliveries = received(spark.createDataFrame(messages, MESSAGES), base64=False)
    return audit.judged(audit.sends(spark.createDataFrame(tasks, TASKS), bodies=True), deliveries, rules)


def told(rows: DataFrame) -> Counter[tuple[str, str]]:
    """Return each class and id that is found, and how often."""
    found = audit.findings(rows, audit.out_of_order(rows))
    assert found.schema.simpleString() == schemas.FOUND.simpleString()
    return Counter((row["class"], row.task_id) for row in found.collect())


def test_each_defect_is_found_and_no_other(spark: SparkSession) -> None:
    """One task of each kind beside two that are as they should be."""
    at, sent = IN_TIME, IN_TIME + 2 * SECOND
    tasks = [
        task("good", at, sent),
        task("lost", at, sent),
        task("late", at, NOON + 20 * MINUTE + SECOND),
        task("pending", at, None),
        task("dead", at, None, available=NEVER),
        task("arriving", at, RULES.horizon - 5 * MINUTE),
        task("twice", at, sent),
        task("again", at, sent),
        task("changed", at, sent),
        task("unmarked", at, None),
        task("first", at, sent, key="k", sequence=1),
        task("second", at, sent, key="k", sequence=2),
        task("other key", at, sent, key="l", sequence=3),
        task("young", NOON, None),
        task("old", NOON - 2 * HOUR, None),
    ]
    messages = [
        message("good", at + SECOND),
        message("late", NOON + 20 * MINUTE),
        message("twice", at + SECOND, "one"),
        message("twice", at + SECOND * 2, "two"),
        message("again", at + SECOND, "the same"),
        message("again", at + SECOND, "the same"),
        message("changed", at + SECOND, text="changed on the way"),
        message("unmarked", at + SECOND),
        message("first", at + 2 * SECOND),
        message("second", at + SECOND),
        message("other key", at),
        message("stranger", at + SECOND),
        (*message("foreign", at)[:2], {"some": "attribute"}, b""),
        (None, at, {TASK_ID_ATTRIBUTE: "unreadable"}, b""),
    ]
    assert told(judged(spark, tasks, messages)) == Counter(
        {
            ("lost", "lost"): 1,
            ("late", "late"): 1,
            ("pending", "pending"): 1,
            ("pending", "unmarked"): 1,
            ("dead", "dead"): 1,
            ("arriving", "arriving"): 1,
            ("republished", "twice"): 1,
            ("redelivered", "again"): 1,
            ("mismatched", "changed"): 1,
            ("out_of_order", "second"): 1,
            ("unknown", "stranger"): 1,
        }
    )


def test_edges(spark: SparkSession) -> None:
    """The window is of CreatedAt; the grace is behind its end, and before the horizon."""
    cases = [
        (RULES.since, NOON, NOON, "delivered"),
        (NOON - HOUR - SECOND, NOON, NOON, None),
        (NOON - SECOND, NOON, NOON, "delivered"),
        (NOON, NOON + SECOND, NOON + SECOND, None),
        (IN_TIME, NOON + 10 * MINUTE, NOON + 10 * MINUTE - SECOND, "delivered"),
        (IN_TIME, NOON + 10 * MINUTE, NOON + 10 * MINUTE, "late"),
        (IN_TIME, NOON + 50 * MINUTE - SECOND, None, "lost"),
        (IN_TIME, NOON + 50 * MINUTE, None, "arriving"),
        # Pub/Sub's clock is ahead of Spanner's, or behind it.
        (IN_TIME, IN_TIME + SECOND, IN_TIME + 3 * SECOND, "delivered"),
        (IN_TIME, IN_TIME + SECOND, IN_TIME - 3 * SECOND, "delivered"),
    ]
    tasks = [task(str(place), created, sent) for place, (created, sent, _, _) in enumerate(cases)]
    messages = [message(str(place), at) for place, (_, _, at, _) in enumerate(cases) if at]
    found = {row.task_id: row.state for row in judged(spark, tasks, messages).collect()}
    assert found == {str(place): state for place, (*_, state) in enumerate(cases)}


def test_a_message_is_unknown_only_if_its_task_must_have_been_read(spark: SparkSession) -> None:
    """Near the bounds its task may be one that was not read."""
    cases = {
        "too late": RULES.known_until, "late enough": RULES.known_until - SECOND,
        "too early": NOON - HOUR, "early enough": NOON - HOUR + SECOND,
    }  # fmt: skip
    rows = judged(spark, [task("other", IN_TIME, None)], [message(id, at) for id, at in cases.items()])
    assert {id for name, id in told(rows) if name == "unknown"} == {"late enough", "early enough"}


def test_each_sending_of_an_id_has_its_own_messages(spark: SparkSession) -> None:
    """What was sent again, and archived both times, is no duplicate; what is missing of one sending is lost."""
    first, second = IN_TIME, IN_TIME + 5 * MINUTE
    tasks = [task(id, first, at) for id in ("both", "one", "none", "skewed", "quick") for at in (first, second)]
    tasks = [each for each in tasks if each[0] != "quick"]
    tasks += [task("quick", first, first), task("quick", first, first + SECOND / 2), task("waits", first, first)]
    tasks += [task("waits", first, None)]
    rows = judged(
        spark,
        tasks,
        [
            message("both", first - SECOND),
            message("both", second - SECOND),
            message("one", first - SECOND, "a"),
            message("one", first - 2 * SECOND, "b"),
            message("skewed", first + SECOND / 2),  # a clock that is ahead
            message("skewed", second + SECOND / 2),
            message("quick", first - SECOND / 10),
            message("quick", first + SECOND * 0.4),
            message("waits", first - SECOND),
        ],
    )
    assert told(rows) == Counter(
        {("lost", "one"): 1, ("republished", "one"): 1, ("lost", "none"): 2, ("pending", "waits"): 1}
    )


def test_the_order_of_a_key_is_that_of_its_first_messages(spark: SparkSession) -> None:
    """By CreatedAt, Sequence, Id, of one topic; repeats, and tasks from before the window, may come at any time."""
    at = IN_TIME

    def row(id: str, created: int, sequence: int | None, key: str = "k", topic: str = "orders") -> tuple[Any, ...]:
        return task(id, at + created * SECOND, NOON, sequence=sequence, key=key, topic=topic)

    tasks = [
        row("a", 0, None), row("b", 0, 1), row("c", 0, 2), row("d", 1, 0), row("e", 1, 0),
        row("f", 2, 0, "other"), row("g", 2, 0, topic="invoices"),
        task("before", NOON - 2 * HOUR, NOON, key="k"),
    ]  # fmt: skip
    seconds = {"a": 10, "b": 11, "c": 9, "d": 12, "e": 12, "f": 1, "g": 1, "before": 30}
    messages = [message(id, at + after * SECOND) for id, after in seconds.items()]
    messages += [message("a", at + 40 * SECOND, "a repeat")]
    found = told(judged(spark, tasks, messages))
    assert [id for name, id in found if name == "out_of_order"] == ["c"]


def test_a_hundred_thousand_tasks_with_seeded_defects(spark: SparkSession) -> None:
    """Numbers of each class, by topic and hour, and the samples."""
    count = 100_000
    n = f.col("id")
    data = f.encode(f.concat(f.lit("order "), f.lpad(n.cast("string"), 10, "0")), "UTF-8")
    created = f.timestamp_seconds(f.lit(int(RULES.since.timestamp())) + f.floor(n * 3600 / count))
    tasks = spark.range(count).select(
        f.concat(f.lit("task "), n).alias("Id"),
        f.element_at(f.array(f.lit("orders"), f.lit("invoices")), (n % 2 + 1).cast("int")).alias("Topic"),
        # A PubsubMessage with data alone: its tag, its length, itself.
        f.concat(f.unhex(f.lit("0A10")), data).alias("Data"),
        f.when(n % 4 == 0, f.concat(f.lit("key "), n % 400)).alias("OrderingKey"),
        n.alias("Sequence"),
        created.alias("CreatedAt"),
        f.lit(None).cast("timestamp").alias("AvailableAt"),
        f.when(n % 1000 != 1, created + f.expr("INTERVAL 3 SECONDS")).alias("SentAt"),
    )
    copies = f.when(n % 1000 < 3, 0).when(n % 1000 == 3, 2).otherwise(1)
    sent = spark.range(count).withColumn("copies", copies).where("copies > 0")
    sent = sent.withColumn("copy", f.explode(f.sequence(f.lit(1), "copies")))
    # The next task of the key is 14 s younger.
    late = f.when(n % 1000 == 6, 3600 * 1.5 + 1).when(n % 1000 == 8, 21.0).otherwise(1.0)
    messages = sent.select(
        f.concat_ws("-", n.cast("string"), f.when(n % 2000 == 3, f.lit("1")).otherwise(f.col("copy"))).alias(
            "message_id"
        ),
        f.timestamp_micros(f.unix_micros(created) + (late * 1_000_000).cast("long")).alias("publish_time"),
        f.create_map(f.lit(TASK_ID_ATTRIBUTE), f.concat(f.lit("task "), n)).alias("attributes"),
        f.when(n % 1000 == 5, f.encode(f.lit("other"), "UTF-8")).otherwise(data).alias("data"),
    )
    strangers = spark.range(7).select(
        f.concat(f.lit("s"), n).alias("message_id"),
        f.lit(IN_TIME).alias("publish_time"),
        f.create_map(f.lit(TASK_ID_ATTRIBUTE), f.concat(f.lit("stranger "), n)).alias("attributes"),
        f.lit(b"").alias("data"),
    )
    deliveries = received(messages.unionByName(strangers), base64=False)
    rows = audit.judged(audit.sends(tasks, bodies=True), deliveries, RULES).persist()
    each = count // 1000
    counts = audit.counted(rows)
    [total] = audit.numbers(counts).collect()
    wanted = {
        "tasks": count, "delivered": count - 4 * each, "lost": 2 * each, "pending": each, "late": each, "dead": 0,
        "arriving": 0, "republished": each // 2, "redelivered": each // 2, "mismatched": each,
        "messages": count - 3 * each + each // 2,
    }  # fmt: skip
    assert {name: total[name] for name in wanted} == wanted
    assert (total["p50"], total["p95"], total["max"]) == (1.0, 1.0, 5401.0)
    lines = audit.numbers(counts, "hour", "topic").select(f.date_format("hour", "HH").alias("hour"), "topic", "tasks")
    assert sorted(map(tuple, lines.collect())) == [("11", "invoices", count // 2), ("11", "orders", count // 2)]
    found = audit.findings(rows, audit.out_of_order(rows)).persist()
    classes = {row["class"]: row["count"] for row in found.groupBy("class").count().collect()}
    assert classes == {
        "lost": 2 * each, "pending": each, "late": each, "republished": each // 2, "redelivered": each // 2,
        "mismatched": each, "out_of_order": each, "unknown": 7,
    }  # fmt: skip
    shown = audit.samples(found, 5).collect()
    assert Counter(row["class"] for row in shown) == dict.fromkeys(classes, 5)
    rows.unpersist()
    found.unpersist()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.binary(max_size=8), st.dictionaries(TEXTS, TEXTS, max_size=3)), min_size=20))
def test_both_sides_have_one_digest(spark: SparkSession, pairs: list[tuple[bytes, dict[str, str]]]) -> None:
    """Of what is in the table and of what was received, as a map or as JSON, for any bytes and texts."""
    pairs = [(data, {name: text for name, text in each.items() if name != TASK_ID_ATTRIBUTE}) for data, each in pairs]
    tasks = [
        (str(place), bytes(RawPubsubMessage(data=data, attributes=each).SerializeToString()))
        for place, (data, each) in enumerate(pairs)
    ]
    maps = [(str(place), NOON, each, data) for place, (data, each) in enumerate(pairs)]
    texts = [(id, at, json.dumps(each), data) for id, at, each, data in maps]
    ours = decoded(spark.createDataFrame(tasks, "Id STRING, Data BINARY"))
    for bodies in (True, False):
        registered = digest(f.col("Attributes"), f.col("Payload") if bodies else f.lit(None))
        expected = {row.Id: row.digest for row in ours.select("Id", registered.alias("digest")).collect()}
        for messages in (spark.createDataFrame(maps, MESSAGES), spark.createDataFrame(texts, JSON_MESSAGES)):
            theirs = received(messages if bodies else messages.drop("data"), base64=False).collect()
            assert {row.message_id: row.digest for row in theirs} == expected


@pytest.mark.parametrize("attributes", ["{", "[]", "3", "null", '["a"]', "a", "[" * 100_000, "\u0000"])
def test_attributes_that_no_message_has_are_unreadable(spark: SparkSession, attributes: str) -> None:
    """Of a message they are texts by name."""
    [row] = received(spark.createDataFrame([("1", NOON, attributes, b"")], JSON_MESSAGES), base64=False).collect()
    assert (row.readable, row.task_id, row.digest) == (False, None, None)


def test_what_others_add_to_a_message_changes_no_digest(spark: SparkSession) -> None:
    """The id, what Pub/Sub and tracing add, an ordering key among the attributes; anything else does."""
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


def test_texts_are_read_as_bigquery_writes_them(spark: SparkSession) -> None:
    """Attributes as JSON, times with a zone, data as base64 or as it is; what cannot be read is counted as such."""
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


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("message_id STRING, publish_time TIMESTAMP", "column attributes is missing .* does the subscription write"),
        ("message_id STRING, publish_time LONG, attributes STRING", "publish_time is bigint, it must be a time"),
        ("message_id STRING, publish_time TIMESTAMP, attributes INT", "attributes is int, it must be a map or a text"),
        ("message_id STRING, publish_time STRING, attributes STRING, data INT", "data is int, it must be bytes or a"),
    ],
)
def test_columns_that_cannot_be_read_are_named(spark: SparkSession, columns: str, said: str) -> None:
    """Before anything is read."""
    with pytest.raises(SettingError, match=said):
        received(spark.createDataFrame([], columns), base64=True)


def test_latencies_are_those_of_the_tasks_that_were_received(spark: SparkSession) -> None:
    """What is lost or waits has none, nor has a topic of which nothing came; no clock makes one less than 0."""
    tasks = [task(f"{name} {topic}", IN_TIME, IN_TIME, topic=topic) for name in "ab" for topic in ("orders", "silent")]
    tasks += [task("c", IN_TIME, IN_TIME), task("d", IN_TIME, None), task("ahead", IN_TIME, IN_TIME, topic="ahead")]
    messages = [message("a orders", IN_TIME + 4 * SECOND), message("ahead", IN_TIME - SECOND / 2)]
    lines = audit.numbers(audit.counted(judged(spark, tasks, messages)), "topic").orderBy("topic")
    assert [(line.topic, line.p50, line.p99, line.max) for line in lines.collect()] == [
        ("ahead", 0.0, 0.0, 0.0), ("orders", 4.0, 4.0, 4.0), ("silent", None, None, None),
    ]  # fmt: skip
