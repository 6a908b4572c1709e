"""Parsing of input files, rejected lines, and the write order of rows."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.errors import OutboxError, SettingError
from outbox_pipeline import schemas
from outbox_pipeline.jobs.register import in_order, prepared, read, selected
from outbox_pipeline.rows.texts import task_id
from tests.support.pipeline import row

NO_OBJECT = "the line is not a JSON object: "
BAD_CSV = "the line has more or fewer columns than the header, or bad quotes"
BROKEN = (
    '{"data":"a"', '{"data":"a"} junk', '{"data":"a"}{"data":"b"}', '{"data":"a"},{"data":"b"}', '{"data":"a"}]',
    '{"data":"a"},', '[{"data":"a"}]', "[", "]", "]]", "}", "5", "null", '"text"', "text", "{data}", "{'data':'a'}",
    '{"data":NaN}', '{"data":01}', '{5:"a"}', '{"data":"a\tb"}', '{"data":' + "[" * 100_000, '{"data":"a",}',
)  # fmt: skip


def test_json_lines_are_parsed_to_rows(spark: SparkSession, tmp_path: Path):
    """Values that are not texts keep their JSON, byte by byte. Empty lines are ignored."""
    path = tmp_path / "rows.jsonl"
    full = {"data": "é\x00😀", "topic": "orders", "priority": 5, "at_most_once": True, "attributes": {"a": "b", "c": 1}}
    lines = [
        {**full, "n": 1},
        {"data": {"x": [1, None]}, "ordering_key": "k", "sequence": "7", "n": "key"},
        {"data_base64": "/w==", "reason": "refused before", "line": "x", "topic": None, "n": ""},
    ]
    kept = '{"n": 12345678901234567890.1234567890, "n":1.10 ,"t":"\\u00e9\\/","e":1E400}'
    path.write_text("\n \n".join([*map(json.dumps, lines), f' {{"n":"x","data": {kept} }}']) + "\r\n\t\n", "utf-8")
    rows = prepared(read(spark, str(path), "auto", ["n"]), topic="usual", key=["n"])
    rows = rows.drop("task_id")
    found = [{name: value for name, value in row.asDict().items() if value is not None} for row in rows.collect()]
    found = [{name: bytes(value) if name == "data" else value for name, value in row.items()} for row in found]
    assert found == [
        {**full, "data": "é\x00😀".encode(), "attributes": {"a": "b", "c": "1"}},
        {"topic": "usual", "data": b'{"x": [1, null]}', "ordering_key": "k", "sequence": 7},
        {"topic": "usual", "data": b"\xff"},
        {"topic": "usual", "data": kept.encode()},
    ]  # fmt: skip


def test_invalid_json_lines_are_kept(spark: SparkSession, tmp_path: Path):
    """A line with two objects is rejected. Otherwise the second one would be lost without an error."""
    path = tmp_path / "rows.json"
    others = {
        '{"data":"a","dat":"b","Topic":"c","topic":"orders"}': "the line has unknown columns: dat, Topic",
        '{"data":"a","data":"b"}': "the line has the name data twice",
        '{"data":"\\ud800"}': "the line has half a surrogate pair in data",
    }
    path.write_text("\n".join((*BROKEN, *others, '{"data":"fine"}')))
    rows = prepared(read(spark, str(path), "json"), topic="usual").select("data", "topic", "reason", "line")
    found = [tuple(each) for each in rows.collect()]
    assert found[len(BROKEN) :] == [
        *((None, None, reason, line) for line, reason in others.items()),
        (b"fine", "usual", None, None),
    ]
    for (data, topic, reason, kept), line in zip(found, BROKEN, strict=False):
        assert (data, topic, kept) == (None, None, line)
        assert reason.startswith((NO_OBJECT, "the line is not a JSON object that can be parsed: it is nested")), line


WINDOWS = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
CONVERT = "Convert the file to UTF-8, for example with iconv -f WINDOWS-1252 -t UTF-8, and register it again"


@pytest.mark.parametrize(
    ("name", "line", "column"),
    [
        ("a.jsonl", '{{"data":"{}"}}', "the line is not valid UTF-8 in data"),
        ("a.jsonl", '{{"data":"x","attributes":{{"k":"{}"}}}}', "the line is not valid UTF-8 in attributes"),
        ("a.jsonl", '{{"data":"x"}}{}', "the line is not valid UTF-8"),
        ("a.csv", "{},orders,k", "data is not valid UTF-8"),
        ("a.csv", '"x",orders,"k ""{}"""', "n is not valid UTF-8"),
    ],
)
def test_invalid_utf_8_is_rejected_and_not_replaced(
    spark: SparkSession, tmp_path: Path, name: str, line: str, column: str
):
    """The line of a reject cannot be registered by accident. A replacement character that is in the file is valid."""
    path = tmp_path / name
    head = b"\xef\xbb\xbfdata,topic,n\n" if name.endswith("csv") else b""
    path.write_bytes(head + line.format(WINDOWS).encode("cp1252") + b"\n" + line.format("\ufffd").encode() + b"\n")
    key = ["n"] if name.endswith("csv") else []
    bad, good = prepared(read(spark, str(path), "auto", key), topic="orders", key=key).collect()
    assert (bad.data, bad.reason) == (None, f"{column}. {CONVERT}")
    assert bad.line.startswith("(invalid UTF-8 was replaced) ")
    assert (good.reason is None) == (" in " in column or "csv" in name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_refused_with_a_remedy(spark: SparkSession, tmp_path: Path, encoding: str):
    (tmp_path / "a.csv").write_text("data,topic\né,orders\n", encoding)
    with pytest.raises(SettingError, match=r"a\.csv: the header .* is not valid UTF-8\. Convert the file to UTF-8"):
        read(spark, f"{tmp_path}/a.csv", "auto")
    (tmp_path / "a.jsonl").write_text('{"data":"a"}\n', encoding)
    first, *_ = prepared(read(spark, f"{tmp_path}/a.jsonl", "auto"), topic="orders").collect()
    assert first.reason == f"the line is not valid UTF-8. {CONVERT}"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_follows_rfc_4180(spark: SparkSession, tmp_path: Path, end: str):
    """Quotes, commas and line breaks inside quotes do not change. A missing value is NULL, "" is an empty text."""
    path = tmp_path / "rows.csv"
    lines = [
        "data,topic,a.b", '"a ""q"", b",orders,1', '"two\r\nlines\nthree",orders,2', ",orders,3", '"",orders,4',
        '" é😀 ", sp ,5', 'x,"",6', "x,,7", '"""",orders,8', "'x',orders,9", "a\\,orders,10", '"\\""n",orders,11',
        "#x,orders,12",
    ]  # fmt: skip
    path.write_bytes((end.join(lines) + end).encode())
    found = prepared(read(spark, str(path), "auto", multi_line=True), topic="usual", key=["a.b"]).collect()
    assert [(each.data and bytes(each.data).decode(), each.topic, each.reason) for each in found] == [
        ('a "q", b', "orders", None), ("two\r\nlines\nthree", "orders", None), (None, "orders", None),
        (b"", "orders", None), (" é😀 ", " sp ", None), ("x", "", None), ("x", "usual", None), ('"', "orders", None),
        ("'x'", "orders", None), ("a\\", "orders", None), ('\\"n', "orders", None), ("#x", "orders", None),
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_can_be_divided_anywhere(spark: SparkSession, tmp_path: Path, end: str):
    """Otherwise one Spark task would read a whole file."""
    path = tmp_path / "rows.csv"
    lines = [f'"{n}, ""q"" é",orders,{n}' if n % 3 else f"{n},,{n}" for n in range(40)]
    path.write_bytes(end.join(["data,topic,n", *lines, ""]).encode())
    whole = sorted(map(tuple, read(spark, str(path), "auto", multi_line=True).collect()))
    assert len(whole) == 40
    size = spark.conf.get("spark.sql.files.maxPartitionBytes")
    for bytes in (41, 100, 333):
        spark.conf.set("spark.sql.files.maxPartitionBytes", str(bytes))
        rows = read(spark, str(path), "auto")
        assert rows.rdd.getNumPartitions() > 1
        assert sorted(map(tuple, rows.collect())) == whole
    spark.conf.set("spark.sql.files.maxPartitionBytes", str(size))


@pytest.mark.parametrize(
    ("line", "end", "is_broken"),
    [
        ('"x,",orders', "\n", False),
        ('5" pipe,orders', "\n", False),
        ('"a,"",b",orders', "\n", False),
        ('""', "\n", False),
        ('orders,"x\ny"', "\n", True),
        ('"""\n",orders', "\n", True),
        ('orders,"{\n ""a"": 1,\n ""b"": 2}"', "\n", True),
        ('"x\r\ny",orders', "\r\n", True),
        ('"x\ny",orders', "\r\n", True),
        ('"' + '""' * 100_000 + '\n",orders', "\n", True),
        ('"' + '""' * 100_000 + '",orders', "\n", False),
    ],
)
def test_a_line_break_in_a_value_of_csv_is_refused(
    spark: SparkSession, tmp_path: Path, line: str, end: str, is_broken: bool
):
    path = tmp_path / "rows.csv"
    path.write_bytes(end.join(["data,topic", "fine,orders", line, ""]).encode())
    if not is_broken:
        assert len(read(spark, str(path), "csv").collect()) == 2
        return
    with pytest.raises(OutboxError, match="a value has a line break, or quotes that are not closed"):
        read(spark, str(path), "csv")


def test_invalid_csv_lines_are_kept(spark: SparkSession, tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text(
        'data,topic,reason\nfine,orders,\nfew,orders\nmany,orders,,\nx,orders,y\n"open,orders,z\nw,orders,\n'
    )
    with pytest.raises(OutboxError, match=r"rows\.csv: a value has .* in the line '\"open,orders,z'\. .* --multi-line"):
        read(spark, str(path), "csv")
    found = prepared(read(spark, str(path), "csv", multi_line=True)).select("data", "topic", "reason", "line").collect()
    assert [tuple(each) for each in found] == [
        (b"fine", "orders", None, None),
        (None, None, BAD_CSV, "few,orders"),
        (None, None, BAD_CSV, "many,orders,,"),
        (b"x", "orders", None, None),
        (None, None, BAD_CSV, '"open,orders,z\nw,orders,'),
    ]
    path.write_text("data,topic\nfine,orders\n" + "," * 30_000 + "\nfine,orders\n")
    found = prepared(read(spark, str(path), "csv")).select("reason").collect()
    assert [each.reason for each in found] == [None, BAD_CSV, None]
    path.write_bytes(b"topic,data\norders,a\r\norders,b\n")
    found = prepared(read(spark, str(path), "csv")).select("reason").collect()
    assert [each.reason for each in found] == ["the line ends with CR LF, but the header with LF", None]


def test_the_format_follows_the_file_extension(spark: SparkSession, tmp_path: Path):
    rows = spark.createDataFrame([("d", "orders")], "data string, topic string")
    rows.write.parquet(str(tmp_path / "rows.parquet"))
    line = b'{"data":"d","topic":"orders"}\n'
    (tmp_path / "rows.ndjson.gz").write_bytes(gzip.compress(line))
    (tmp_path / "rows.JSONL").write_bytes(line)
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"data,topic\nd,orders\n"))
    (tmp_path / "rows").write_bytes(line)
    for path in ("rows.parquet", "rows.parquet/", "rows.parquet/*.parquet", "rows.ndjson.gz", "rows.JSONL", "*.csv.gz"):
        [found] = prepared(read(spark, f"{tmp_path}/{path}", "auto")).collect()
        assert (found.data, found.topic) == (b"d", "orders"), path
    [found] = prepared(read(spark, f"{tmp_path}/rows", "json")).collect()
    assert found.data == b"d"
    for path in ("rows", "rows.txt", "rows.gz", "csv.d/rows"):
        with pytest.raises(SettingError, match=r"unknown extension\. Pass --input-format: parquet, json, csv"):
            read(spark, f"{tmp_path}/{path}", "auto")


def test_no_column_of_a_parquet_file_is_lost(spark: SparkSession, tmp_path: Path):
    """Spark would read the columns of one file, so the tasks of another would lose their ordering key."""
    files = {"month=01/a": {"data": ["a"]}, "month=01/b": {"data": ["b"], "ordering_key": ["k"]}}
    (tmp_path / "month=01").mkdir()
    for name, columns in files.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    found = prepared(read(spark, str(tmp_path), "parquet"), topic="orders", key=["month", "data"]).orderBy("data")
    ids = [task_id("orders", "01", data) for data in ("a", "b")]
    rows = [tuple(each) for each in found.select("task_id", "ordering_key").collect()]
    assert rows == [(ids[0], None), (ids[1], "k")]
    for keys, said in (
        ([7], r"bigint in .*/c\.parquet\. Write all"),
        (pa.nulls(1), r"int in .*/c\.parquet\..* If it has no"),
    ):
        pq.write_table(pa.table({"data": ["c"], "ordering_key": keys}), tmp_path / "month=01/c.parquet")
        with pytest.raises(OutboxError, match=rf"Column ordering_key is string in .*/b\.parquet, but {said}"):
            read(spark, str(tmp_path), "parquet")


def test_a_file_with_only_a_header_has_no_rows(spark: SparkSession, tmp_path: Path):
    (tmp_path / "head.csv").write_text("data,topic\n")
    (tmp_path / "nothing.csv").write_text("")
    (tmp_path / "nothing.jsonl").write_text("")
    assert prepared(read(spark, f"{tmp_path}/head.csv", "auto")).collect() == []
    assert prepared(read(spark, f"{tmp_path}/nothing.jsonl", "auto")).collect() == []
    with pytest.raises(OutboxError, match=r"nothing\.csv is empty"):
        read(spark, f"{tmp_path}/nothing.csv", "auto")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_spark_sql_makes_the_columns_of_tasks(spark: SparkSession, tmp_path: Path, kind: str):
    """A line that cannot be parsed is rejected as without the SQL. A decimal is a key, and a date a time."""
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        spark.sql("SELECT 7 AS customer, 'é' AS name, 1.50 AS cents").write.parquet(str(path))
    elif kind == "csv":
        path.write_text('customer,name,cents\n7,é,1.50\n7,"é\n')
    else:
        path.write_text('{"customer":7,"name":"é","cents":1.5}\n{"customer":\n')
    select = (
        "to_json(struct(*)) AS data, 'c-' || customer AS ordering_key,\n CAST(cents AS DECIMAL(9, 2)) AS cents, "
        "CAST(DATE'2090-01-01' AS TIMESTAMP) AS available_at -- a comment"
    )
    rows = selected(read(spark, str(path), "auto", any_columns=True, multi_line=True), select)
    first, *bad = prepared(rows, topic="orders", key=["cents"]).collect()
    typed, texts = {"customer": 7, "name": "é", "cents": 1.5}, {"customer": "7", "name": "é", "cents": "1.50"}
    assert json.loads(first.data) == (texts if kind == "csv" else typed)
    assert (first.ordering_key, first.task_id) == ("c-7", task_id("orders", "1.50"))
    assert [each.line for each in bad] == {"jsonl": ['{"customer":'], "csv": ['7,"é'], "parquet": []}[kind]
    assert all(each.reason.startswith("the line ") for each in bad)


def test_an_error_of_the_sql_has_its_position(spark: SparkSession, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"customer":7}')
    for select, said in (
        ("customer AS data,\n colour AS topic", r"--select: \[UNRESOLVED_COLUMN.* `colour` .*customer.* line 2 pos 1"),
        ("customer AS AS data", r"--select: \[PARSE_SYNTAX_ERROR\] Syntax error at or near 'data'.*line 1, pos 15"),
        ("nothing(customer) AS data", r"--select: \[UNRESOLVED_ROUTINE\].*`nothing`.*line 1 pos 0"),
    ):
        with pytest.raises(SettingError, match=said) as raised:
            selected(read(spark, str(tmp_path), "json", any_columns=True), select)
        assert "\n" not in str(raised.value)


LEAST = -(2**63)


def tasks(spark: SparkSession, *given: dict[str, Any]) -> DataFrame:
    made = [row(**each) for each in given]
    random.Random(7).shuffle(made)
    names = schemas.INPUT.fieldNames()
    values = [tuple(each[name] for name in names) for each in made]
    return spark.createDataFrame(spark.sparkContext.parallelize(values, 3), schemas.INPUT)


def parts(ordered: DataFrame) -> list[list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for each in ordered.withColumn("part", f.spark_partition_id()).collect():
        found.setdefault(each.part, []).append(each.asDict(recursive=True))
    return [found[part] for part in sorted(found)]


def test_tasks_are_in_write_order_however_the_input_is_spread(spark: SparkSession):
    """Those of a key are in one partition, sorted by sequence, NULL first, then by ID; others are sorted by ID.

    Rows of one ID are adjacent, at their first sequence, and in one order. So a second run, and a retried Spark task,
    reject the same rows.
    """
    dice = random.Random(7)
    given: list[dict[str, Any]] = [
        {
            "task_id": f"{dice.randrange(90):02}",
            "ordering_key": dice.choice([None, *"kkklmno"]),
            "sequence": dice.choice([None, *range(-9, 9)]),
            "data": dice.choice([b"a", b"b"]),
            "attributes": dice.choice([None, {"a": "1"}, {"a": "2"}]),
            "priority": dice.randrange(2),
            "topic": dice.choice(["orders", "other"]),
        }
        for _ in range(400)
    ]
    # Rejected rows have neither an ID nor a key, and must not all be in one partition.
    lost = [{"task_id": None, "topic": None, "data": None, "reason": "x", "line": str(number)} for number in range(40)]
    ordered = in_order(tasks(spark, *given, *lost), 4)
    assert (ordered.columns, ordered.rdd.getNumPartitions()) == (schemas.INPUT.fieldNames(), 4)
    found = parts(ordered)
    assert sum(map(len, found)) == 440
    assert sum(any(each["reason"] for each in part) for part in found) > 1
    found = [[each for each in part if not each["reason"]] for part in found]
    again = parts(in_order(tasks(spark, *lost, *given[::-1]), 4))
    assert found == [[each for each in part if not each["reason"]] for part in again]
    homes = [{each["ordering_key"] or each["task_id"] for each in part} for part in found]
    assert sum(map(len, homes)) == len(set().union(*homes)), "a key or an ID is in two partitions"
    for part in found:
        of_id: dict[tuple[Any, Any], list[int]] = {}
        for each in part:
            sequences = of_id.setdefault((each["ordering_key"], each["task_id"]), [])
            sequences += [] if each["sequence"] is None else [each["sequence"]]
        places = [
            (each["ordering_key"] or "", min(of_id[each["ordering_key"], each["task_id"]], default=LEAST),
             each["task_id"], LEAST if each["sequence"] is None else each["sequence"])
            for each in part
        ]  # fmt: skip
        assert places == sorted(places)
