"""What the Spark jobs and the sink check of rows and files before any Spark task starts."""

import enum
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from unittest import mock
from uuid import UUID, uuid5

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import types as t
from pyspark.sql.types import DoubleType, MapType, StringType, StructType

import outbox
from outbox.errors import SettingError
from outbox.testing import RecordingTransaction
from outbox_pipeline import schemas
from outbox_pipeline.rows.register_rows import INPUT_COLUMNS, Writer, check, complete
from outbox_pipeline.rows.text_files import TextFiles, header
from outbox_pipeline.rows.texts import derived, task_id, whole_row_id
from pyspark_outbox import OutboxDataSource
from tests.support.pipeline import ROWS, row

TIME = datetime(2026, 11, 21, 13, 0, 0, 123456, UTC)
LATER = datetime(2026, 11, 21, 14, 0, 0, 1, UTC)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("data;topic\na;orders\n", "has no comma, but ';'. Separate the values by commas"),
        ("data\ttopic\n", r"has no comma, but '\\t'"),
        ("data,topic\ra,orders\r", "contains a carriage return. End each line with LF or CR LF"),
        ("data,topic,data\n", "has the column 'data' twice"),
        ("data,topic,\n", "has a column without a name. Is there a comma too many"),
        ('data,"topic\n', "has bad quotes: unexpected end of data"),
        (" \n\n", "is empty. It must have the names of the columns"),
    ],
)
def test_the_error_of_a_header_says_what_is_wrong(head: str, said: str):
    line = head.strip(" \n").partition("\n")[0]
    with pytest.raises(SettingError, match=rf"--input file:/my a\.csv: the header .* {said}"):
        header("file:/my%20a.csv", line.encode() or None)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_refused_with_a_remedy(encoding: str):
    with pytest.raises(SettingError, match=r"a\.csv: the header .* is not valid UTF-8\. Convert the file to UTF-8"):
        header("a.csv", "data,topic\né,orders\n".encode(encoding).partition(b"\n")[0])
    columns = {"value": '{"data":"a"}\n'.encode(encoding).split(b"\n")[:1], "file": ["a.jsonl"], "begin": [0]}
    [record] = TextFiles().records([pa.RecordBatch.from_pydict(columns)])
    assert str(record.why).startswith("the line has the control character '\\x00'. The file is in UTF-16, or its end")


#: The names and types of columns, options, and how the error begins.
REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("topic string", {}, "Column data or data_base64 is missing. The rows have topic"),
    ("data string", {}, "Column topic is missing. Add it or pass a topic. The rows have data"),
    ("data string, topic string, colour integer", {}, "Unknown column 'colour'. Drop it or add it"),
    ("data string, topic string, Topic string", {}, "Column 'topic' is there twice"),
    ("Data string, Topic string", {}, "Column Data is string, but must be a serialized PubsubMessage, as the source"),
    ("data string, topic integer", {}, "Column topic is int, but must be a text. If it has no value, drop the column"),
    ("data integer, topic string", {}, "Column data is int, but must be a text"),
    ("data_base64 binary, topic string", {}, "Column data_base64 is binary, but must be base64"),
    ("data string, topic string, task_id long", {}, "Column task_id is bigint, but must be a text"),
    ("data string, topic string, priority date", {}, "Column priority is date, but must be a whole number"),
    ("data string, topic string, at_most_once integer", {}, "Column at_most_once is int, but must be true or false"),
    ("data string, topic string, available_at date", {}, "Column available_at is date, but must be a time with"),
    ("data string, topic string, attributes map", {}, "Column attributes is map<string,double>, but"),
    ("data string, topic string", {"key": "n"}, "Key column 'n' is missing. The rows have data, topic"),
    ("data string, topic string, n double", {"key": "n"}, "Key column n is double. Cast it to a string"),
    ("data string, topic string", {"state": "sent"}, "Unknown option state. Known options: topic, key, max"),
    ("data string, topic string", {"maxRowsPerSecond": "-1"}, "Option maxRowsPerSecond: '-1' is not allowed"),
]


@pytest.mark.parametrize(("schema", "more", "said"), REFUSED)
def test_columns_and_options_are_checked_before_spark_tasks_start(schema: str, more: dict[str, str], said: str):
    source = OutboxDataSource({"project": "shop", "instance": "main", "database": "orders", **more})
    columns = StructType()  # not of a DDL, which Spark would parse
    for each in schema.split(", "):
        name, type_ = each.split()
        columns.add(name, MapType(StringType(), DoubleType()) if type_ == "map" else type_)
    for writer in (source.writer, source.streamWriter)[: 1 + (pyspark.__version__ >= "4.1")]:
        with pytest.raises(SettingError) as raised:
            writer(columns, overwrite=False)
        assert str(raised.value).startswith(said)
    with pytest.raises(SettingError, match="can only be appended to"):
        source.writer(columns, overwrite=True)


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
    texts = pa.RecordBatch.from_pylist(given, pa.schema([(name, pa.string()) for name in INPUT_COLUMNS]))
    [made] = complete(INPUT_COLUMNS, "usual", (), iter([texts]))
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
        table, rejected = mock.Mock(**{"read_ids.return_value": []}), list[dict[str, Any]]()
        writer = Writer(table, table.now(), rejected.append)
        writer.add(each)
        writer.flush()
        stored = [
            dict(zip(names, one, strict=True)) for names, [one], _ in (c.args for c in table.insert.call_args_list)
        ]
        stored = [{name: one[name] for name in STORED} for one in stored]
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


def test_without_a_key_every_column_changes_the_id():
    """So does the same value in another column, or NULL instead of "". A new column does, too, if it has a value."""
    base = row(topic="orders", data=b"d", attributes={"a": "1", "b": "2"})
    others: list[dict[str, Any]] = [
        {}, {"topic": "other"}, {"data": b"e"}, {"data": b""}, {"attributes": {"a": "2", "b": "1"}},
        {"attributes": {"a": "1"}}, {"attributes": None}, {"attributes": {}}, {"attributes": {"a": "1", "b": None}},
        {"priority": 0}, {"priority": 1}, {"sequence": 1}, {"sequence": 0}, {"ordering_key": "1"},
        {"at_most_once": True}, {"at_most_once": False}, {"available_at": TIME}, {"expires_at": TIME},
        {"available_at": LATER}, {"available_at": TIME.replace(microsecond=123457)}, {"priority": 1, "sequence": 1},
    ]  # fmt: skip
    names = [name for name in INPUT_COLUMNS if name not in ("task_id", "data_base64")]
    assert {name for each in others for name in each} == {*names}
    rows = [{name: (base | each)[name] for name in names} for each in others]
    rows += [rows[0] | {"a new column": value} for value in (None, "", "1", 1.5, "another new one")]
    rows += [rows[0] | {"another new one": "1"}]
    assert len({whole_row_id(each) for each in rows}) == len(rows) - 1
    assert whole_row_id(rows[0] | {"a new column": None}) == whole_row_id(rows[0])


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
