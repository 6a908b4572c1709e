"""Preparation of users' rows: values, reasons, IDs, and invalid columns."""

import enum
import json
import random
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid5

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

import outbox
from outbox.testing import RecordingTransaction
from outbox_pipeline import schemas
from outbox_pipeline.jobs.register import prepared
from outbox_pipeline.rows.register_rows import COLUMNS, Writer, check, complete
from outbox_pipeline.rows.texts import CONVERT, derived, task_id, whole_row_id
from tests.support.pipeline import ROWS, FakeTable, row, rows

TIME = datetime(2026, 11, 21, 13, 0, 0, 123456, UTC)
LATER = datetime(2026, 11, 21, 14, 0, 0, 1, UTC)
FULL = row(
    task_id="id-1", topic="orders", data=b"\x00\xff", attributes={"b": "2", "a": "é"}, priority=-7, ordering_key="k",
    available_at=TIME, expires_at=LATER, at_most_once=False, sequence=3,
)  # fmt: skip


def texts(spark: SparkSession, given: list[dict[str, str]], *names: str) -> DataFrame:
    columns = sorted({*names}.union(*given))
    schema = ", ".join(f"`{name}` string" for name in columns)
    return spark.createDataFrame([tuple(each.get(name) for name in columns) for each in given], schema)


def test_narrow_types_are_widened():
    """And whole numbers of pandas, which are floats if one of the column is missing."""
    attributes = t.MapType(t.StringType(), t.IntegerType())
    names = ("data", "topic", "priority", "sequence", "attributes")
    for whole in (t.ByteType(), t.ShortType(), t.IntegerType(), t.FloatType(), t.DoubleType()):
        types = (t.BinaryType(), t.StringType(), whole, whole, attributes)
        schema = t.StructType([t.StructField(*each) for each in zip(names, types, strict=True)])
        check(schema, "", ())
        given = [dict(zip(names, (b"a", "orders", 5, None, [("a", 1)]), strict=True))]
        [[made]] = complete(names, "", (), iter([pa.RecordBatch.from_pylist(given, schemas.arrow(schema))]))
        assert made | {"task_id": "one"} == row(data=b"a", priority=5, attributes={"a": "1"})


MOMENT = datetime(2026, 11, 21, 13, tzinfo=UTC)
TIMES: dict[str, object] = {
    "2026-11-21T14:00:00.123456+01:00": TIME, "2026-11-21 14:00:00.000001Z": LATER, "2026-11-21 14:00+01:00": MOMENT,
    "2026-11-21T13:00:00.000000000+0000": MOMENT, "2090-01-01T00:00:00Z": datetime(2090, 1, 1, tzinfo=UTC),
}  # fmt: skip
#: The value that a text of each column means.
FORMS: dict[str, dict[str, object]] = {
    "topic": {each: each for each in ("orders", "projects/my-project/topics/orders", "goog", "")},
    "data": {"é😀\x00": "é😀\x00".encode(), "5": b"5", "": b""},
    "data_base64": {"AP8=": b"\x00\xff", "eHh4\r\neHh4": b"xxxxxx"},
    "attributes": {
        '{"b":"2", "a":"é"}': {"b": "2", "a": "é"}, "{}": {}, '{"googx":""}': {"googx": ""},
        '{"n":1,"none":null,"o":{"p":[true]}}': {"n": "1", "none": None, "o": '{"p":[true]}'},
    },
    "priority": {"-7": -7, "50.0": 50, str(2**63 - 1): 2**63 - 1},
    "sequence": {"3": 3, "1.5e3": 1500, str(-(2**63)): -(2**63)},
    "ordering_key": {"k": "k", "": None},
    "at_most_once": {"false": False, "no": False, "True": True},
    "available_at": TIMES,
    "expires_at": TIMES,
}  # fmt: skip
#: Columns of a task in the table that have the given values.
STORED = ("Id", "Topic", "Data", "Priority", "OrderingKey", "AvailableAt", "ExpiresAt", "AtMostOnce")


A_TIME = "a time with its offset and at most 6 decimals, such as 2026-11-21T13:00:00Z"
NO_MOMENTS = (
    "", "soon", "2026-11-21", "2026-11-21T13:00:00", "2026-11-21T25:00:00Z", "2026-02-30T13:00:00Z", "13:00Z",
    "T13:00:00Z", "2026-11-21T13:00:00.0000001Z", "2026-11-21T13:00:00.Z",
    "2026Z", "2026-11-21Z", "2026-11-21+0100", "+10000-01-01T00:00:00Z", "1732194000",
)  # fmt: skip
NO_OBJECTS = (
    "", "x", "5", "null", "[]", '["a"]', '{"a":"1"', '{"a":"1"} and more', '{"a":"1"}{"b":"2"}', '{"a":"1"},{"b":"2"}',
    '{"a":"1"}]', '{"a":"1","a":"2"}', '[{"a":"1"}]', '{"a":"1"},', "]", "]]", '{"a":"\\ud800"}',
)  # fmt: skip
UNREADABLE = {
    "priority": (
        ("", "x", "1.5", "1.25e1", "1e-30", "0.0000000000000000001", "1e30", "9223372036854775808"),
        "a whole number",
    ),
    "sequence": (("", "0x1"), "a whole number"),
    "at_most_once": (("", "on", "2"), "true or false"),
    "available_at": (NO_MOMENTS, A_TIME),
    "expires_at": (NO_MOMENTS[:4], A_TIME),
    "attributes": (NO_OBJECTS, "a JSON object of strings"),
    "data_base64": (("!", "a", "_-8="), "base64"),
}


def drawn(random: random.Random) -> Iterator[dict[str, str]]:
    """Yield rows of texts: each text of each column, and many together."""
    yield from ({name: each} for name, given in FORMS.items() for each in given)
    yield from ({name: each} for name, (given, _) in UNREADABLE.items() for each in given)
    yield {"priority": "9" * 1000}
    for _ in range(200):
        names = random.sample(sorted(FORMS), random.randrange(len(FORMS)))
        yield {name: random.choice([*FORMS[name]]) for name in names}


def test_a_row_registers_exactly_what_register_would_or_has_the_reason() -> None:
    """Texts and typed values alike.

    Only the whole line of a row that cannot be parsed is kept, so that no incomplete row is registered. The reason
    shows 100 characters.
    """
    given = [{"task_id": f"{n:03}"} | each for n, each in enumerate(drawn(random.Random(1)))]
    given = [each if {"data", "data_base64"} & each.keys() else each | {"data": "d"} for each in given]
    given = [each for each in given if not {"data", "data_base64"} <= each.keys()]
    texts = pa.RecordBatch.from_pylist(given, pa.schema([(name, pa.string()) for name in COLUMNS]))
    [made] = complete(COLUMNS, "usual", (), iter([texts]))
    valid = []
    for source, found in zip(given, made, strict=True):
        wrong = [name for name, value in source.items() if name != "task_id" and value not in FORMS[name]]
        wrong = [name for name in wrong if (name, source[name]) != ("data", "d")]
        if wrong:
            assert found["reason"] == f"{wrong[0]} {source[wrong[0]][:100]} is not {UNREADABLE[wrong[0]][1]}"
            assert json.loads(found["line"]) == source
            assert {value for column, value in found.items() if column not in ("line", "reason")} == {None}
        else:
            values = {name: FORMS[name].get(text, b"d") for name, text in source.items() if name != "task_id"}
            values["data"] = values.pop("data_base64", None) or values["data"]
            valid.append(row(**{"topic": "usual", "task_id": source["task_id"]} | values))
    [typed] = complete(ROWS.fieldNames(), "", (), iter([pa.RecordBatch.from_pylist(valid, schemas.arrow(ROWS))]))
    assert [each for each in made if each["reason"] is None] == typed == valid
    for each in valid:
        table, rejected = FakeTable(), list[dict[str, Any]]()
        writer = Writer(table, table.now(), rejected.append)
        writer.add(each)
        writer.flush()
        stored = [{name: one[name] for name in STORED} for one in table.rows.values()]
        assert [*stored, *(one["reason"] for one in rejected)] == [registered(each)]


def registered(given: dict[str, Any]) -> Any:
    """Return the columns that `outbox.register` writes for a row, or why it refuses the row."""
    transaction = RecordingTransaction()
    names = ("attributes", "priority", "ordering_key", "available_at", "expires_at", "at_most_once")
    options = {name: given[name] for name in names if given[name] is not None}
    try:
        outbox.register(transaction, given["topic"], given["data"], task_id=given["task_id"], **options)
    except (outbox.InvalidMessage, TypeError) as error:
        return str(error)
    [(_, columns, [values])] = transaction.inserts
    stored = {"OrderingKey": None, "AvailableAt": None, "ExpiresAt": None, "AtMostOnce": False}
    stored |= dict(zip(columns, values, strict=True))
    return {name: stored[name] for name in STORED}


def test_other_invalid_rows_are_rejected(spark: SparkSession):
    given = spark.sql(
        "SELECT *, n AS k FROM VALUES "
        "(1, 'fine', NULL, NULL, NULL, NULL), "
        "(2, 'd', 'ZA==', NULL, NULL, NULL), "
        "(3, CAST(X'ff' AS STRING), NULL, NULL, NULL, NULL), "
        "(4, 'd', NULL, map('a', CAST(X'ff' AS STRING)), NULL, NULL), "
        "(5, 'd', NULL, map(CAST(X'ff' AS STRING), 'b'), NULL, NULL), "
        "(6, 'd', NULL, NULL, timestamp_micros(253402300800000000), NULL), "
        "(7, 'd', NULL, NULL, NULL, timestamp_micros(-62135596800000001)), "
        "(8, 'd', NULL, map('a', 'b'), timestamp_micros(-62135596800000000), timestamp_micros(253402300799999999)), "
        "(NULL, 'd', NULL, NULL, NULL, NULL), "
        "(10, '', '', NULL, NULL, NULL), "
        "(11, 'd', NULL, from_json('{\"a\":1,\"a\":2}', 'map<string,string>'), NULL, NULL) "
        "AS t(n, data, data_base64, attributes, available_at, expires_at)"
    ).drop("n")
    made = prepared(given, topic="orders", key=["k"]).select("reason", "task_id", "line")
    found = [(each.reason, each.task_id, each.line) for each in made.collect()]
    years = "is outside of the years 1 to 9999 in UTC"
    numbers = [line and (re.findall(r'"k":(\d+)', line) or [None])[0] for _, _, line in found]
    replaced = [(line or "").startswith("(invalid UTF-8 was replaced) {") for _, _, line in found]
    assert replaced == [number in ("3", "4", "5") for number in numbers]
    assert [(reason, id, number) for (reason, id, _), number in zip(found, numbers, strict=True)] == [
        (None, task_id("orders", "1"), None),
        ("both data and data_base64", None, "2"),
        (f"data is not valid UTF-8. {CONVERT}", None, "3"),
        (f"attributes is not valid UTF-8. {CONVERT}", None, "4"),
        (f"attributes is not valid UTF-8. {CONVERT}", None, "5"),
        (f"available_at {years}", None, "6"),
        (f"expires_at {years}", None, "7"),
        (None, task_id("orders", "8"), None),
        ("key column k is NULL", None, None),
        ("both data and data_base64", None, "10"),
        ("attributes has a name twice", None, "11"),
    ]


def test_without_a_key_every_column_changes_the_id():
    """So does the same value in another column, or NULL instead of ""."""
    base = row(topic="orders", data=b"d", attributes={"a": "1", "b": "2"})
    others: list[dict[str, Any]] = [
        {}, {"topic": "other"}, {"data": b"e"}, {"data": b""}, {"attributes": {"a": "2", "b": "1"}},
        {"attributes": {"a": "1"}}, {"attributes": None}, {"attributes": {}}, {"attributes": {"a": "1", "b": None}},
        {"priority": 0}, {"priority": 1}, {"sequence": 1}, {"sequence": 0}, {"ordering_key": "1"},
        {"at_most_once": True}, {"at_most_once": False}, {"available_at": TIME}, {"expires_at": TIME},
        {"available_at": LATER}, {"available_at": TIME.replace(microsecond=123457)}, {"priority": 1, "sequence": 1},
    ]  # fmt: skip
    assert len({whole_row_id(base | each) for each in others}) == len(others)


def test_without_a_key_the_id_does_not_depend_on_the_input_format(spark: SparkSession):
    typed = FULL | {"task_id": None, "data": b"x" * 200}
    turned = typed | {"attributes": dict(reversed(typed["attributes"].items()))}
    text = {
        "data": "x" * 200, "attributes": '{"a":"é","b":"2"}', "priority": "-7", "ordering_key": "k", "sequence": "3",
        "available_at": "2026-11-21T13:00:00.123456Z", "expires_at": "2026-11-21T15:00:00.000001+0100",
        "at_most_once": "no",
    }  # fmt: skip
    # Spark does not keep the order of a Python dict, but it keeps the order of a JSON object.
    swapped = text | {"attributes": '{"b":"2","a":"é"}'}
    minimal = [{"topic": "orders", "data": "d"}, {"topic": "orders", "data": "", "attributes": "{}"}]
    other = spark.newSession()
    other.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    other.conf.set("spark.sql.chunkBase64String.enabled", "false")
    found = [
        each.task_id
        for given, topic in (
            (rows(spark, [typed, turned]), "x"),
            (texts(spark, [text, swapped, *minimal]), "orders"),
            (texts(other, [text]), "orders"),
            (rows(other, [typed]), "x"),
        )
        for each in prepared(given, topic=topic).select("task_id").collect()
    ]
    # The ID of the first version. If it changed, registering the same rows again would add tasks.
    same = "0e2f3ba6-f3ee-51c8-89c2-26c3e13f68ae"
    others = ["005c636f-392b-5d50-be60-b2f3879bfcbb", "6a5ebb71-aa6a-5492-93b5-0e7dd36b7465"]
    assert found == [*[same] * 4, *others, same, same]


def test_a_key_column_can_be_a_column_of_the_task():
    """For example the ordering key or the data. A task_id takes precedence over the key."""
    names = ("data", "ordering_key", "task_id")
    given = [("d", "k", None), ("d", "k", "own"), ("d", None, "own too"), ("d", "k", "")]  # "" is refused later
    batch = pa.RecordBatch.from_pylist([dict(zip(names, each, strict=True)) for each in given])
    [made] = complete(names, "orders", ("ordering_key", "data"), iter([batch]))
    assert [(each["task_id"], each["reason"]) for each in made] == [
        (id, None) for id in (task_id("orders", "k", "d"), "own", "own too", "")
    ]


def test_the_id_of_a_key_never_changes():
    """A newer version of this package derives the same IDs, also for a member of an enumeration with another format."""
    assert task_id("orders", "4711") == str(uuid5(UUID("3b0c7e0e-9b50-5d3c-8f43-6d6e2a6d1c55"), "6:orders4:4711"))
    assert task_id("orders", "4711") == "46618fde-581f-5fd8-ad68-d583d85b0fd5"
    assert task_id(*enum.Enum("Values", {"TOPIC": "orders", "KEY": "4711"}, type=str)) == task_id("orders", "4711")  # type: ignore[arg-type]  # members


def test_similar_keys_have_different_ids():
    """The name contains the boundaries and the order of the values, and NULL differs from every text."""
    keys = [("a", "bc"), ("ab", "c"), ("abc",), ("abc", ""), ("", "abc"), ("c", "ab"), ("1:a", "bc"), ("a", "b", "c")]
    keys += [("e\u0301",), ("\u00e9",), ("a:bc",), ("-",), (), ("",), ("-", "abc"), (None, "abc"), ("abc", None)]
    assert len({derived(["orders", *key]) for key in keys} | {task_id("other", "a", "bc")}) == len(keys) + 1


def test_the_id_of_a_row_derives_from_its_key(spark: SparkSession):
    given = spark.sql(
        "SELECT 'x' AS data, topic, `a.b`, `c``d`, _topic, whole, day, yes, cents FROM VALUES "
        "('orders', 'é', 'q', 't', 7, DATE'2026-11-21', true, 1.50BD), "
        "(NULL, '', '\\n', 'u', -7L, DATE'0001-01-01', false, 0.0000001BD) "
        "AS t(topic, `a.b`, `c``d`, _topic, whole, day, yes, cents)"
    )
    key = ["a.b", "c`d", "_topic", "whole", "day", "yes", "cents"]
    found = prepared(given, topic="usual", key=key).select("topic", "task_id").collect()
    assert {tuple(each) for each in found} == {
        ("orders", task_id("orders", "é", "q", "t", "7", "2026-11-21", "true", "1.5000000")),
        ("usual", task_id("usual", "", "\n", "u", "-7", "0001-01-01", "false", "0.0000001")),
    }
