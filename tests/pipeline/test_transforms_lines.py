"""Lines of input files, with and without `--select`; rejected lines; and the write order of rows."""

import gzip
import itertools
import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.errors import OutboxError, SettingError
from outbox_pipeline import schemas
from outbox_pipeline.jobs.register import in_order, read
from outbox_pipeline.rows.texts import task_id
from tests.support.pipeline import read_rows, row

NO_OBJECT = "the line is not a JSON object: "
BROKEN = (
    '{"data":"a"', '{"data":"a"} junk', '{"data":"a"}{"data":"b"}', '{"data":"a"},{"data":"b"}', '{"data":"a"}]',
    '{"data":"a"},', '[{"data":"a"}]', "[", "]", "]]", "}", "5", "null", '"text"', "text", "{data}", "{'data':'a'}",
    '{"data":NaN}', '{"data":01}', '{5:"a"}', '{"data":"a\tb"}', '{"data":' + "[" * 100_000, '{"data":"a",}',
)  # fmt: skip
CREATED = datetime(2026, 11, 21, 13)  # noqa: DTZ001 - in the time zone of the session, which is UTC
WINDOWS = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
CONVERT = "Convert the file to UTF-8, for example with iconv -f WINDOWS-1252 -t UTF-8, and register it again"


def test_json_lines_are_parsed_to_rows(spark: SparkSession, tmp_path: Path):
    """Values that are not texts keep their JSON, byte by byte. Empty lines are ignored."""
    path = tmp_path / "rows.jsonl"
    full = {"data": "é\x00😀", "topic": "orders", "priority": 5, "at_most_once": True, "attributes": {"a": "b", "c": 1}}
    lines = [
        {**full, "n": 1},
        {"data": {"x": [1, None]}, "ordering_key": "k", "sequence": "7", "n": "key", "CreatedAt": "2026-11-21 13:00Z"},
        {"data_base64": "/w==", "reason": "refused before", "line": "x", "file": "y", "topic": None, "n": ""},
    ]
    kept = '{"n": 12345678901234567890.1234567890, "n":1.10 ,"t":"\\u00e9\\/","e":1E400,"b":9007199254740993}'
    text = "\n \n".join([*map(json.dumps, lines), f' {{"n":"x","data": {kept} }}']) + "\r\n\t\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = read(spark, str(path), "auto", topic="usual", key=["n"])
    again = read(spark, str(path), "auto", topic="usual", key=["n"], select="* EXCEPT (reason, line, file)")
    assert sorted(map(repr, again.collect())) == sorted(map(repr, rows.collect()))
    rows = rows.drop("task_id", "file")
    found = [{name: value for name, value in row.asDict().items() if value is not None} for row in rows.collect()]
    found = [{name: bytes(value) if name == "data" else value for name, value in row.items()} for row in found]
    assert found == [
        {**full, "data": "é\x00😀".encode(), "attributes": {"a": "b", "c": "1"}},
        {"topic": "usual", "data": b'{"x": [1, null]}', "ordering_key": "k", "sequence": 7, "created_at": CREATED},
        {"topic": "usual", "data": b"\xff"},
        {"topic": "usual", "data": kept.encode()},
    ]  # fmt: skip


def test_invalid_json_lines_are_kept(spark: SparkSession, tmp_path: Path):
    """A line with two objects is rejected. Otherwise the second one would be lost without an error."""
    path = tmp_path / "rows.json"
    others = {
        '{"data":"a","data":"b"}': "the line has the name data twice",
        '{"data":"\\ud800"}': "the line has half a surrogate pair in data",
    }
    path.write_text("\n".join((*BROKEN, *others, '{"data":"fine"}')))
    found = [(each.data, each.reason, each.line) for each in read_rows(spark, path, "json", topic="usual")]
    assert found[len(BROKEN) :] == [*((None, reason, line) for line, reason in others.items()), (b"fine", None, None)]
    for (data, reason, kept), line in zip(found, BROKEN, strict=False):
        assert (data, kept) == (None, line)
        assert reason.startswith((NO_OBJECT, "the line is not a JSON object that can be parsed: it is nested")), line
    said = "but must be binary, as the source has it. Name a text data, and base64 data_base64"
    for line, reason, error in (
        ('{"data":"a","dat":"b","topic":"t","c":""}', "the line has unknown columns: dat, c", "Unknown column 'dat'"),
        ('{"Payload":"YQ==","Topic":"t"}', f"Column Payload is a text, {said}", f"Column Payload is string, {said}"),
    ):
        path.write_text(line)
        assert [each.reason for each in read(spark, str(path), "json").collect()] == [reason]
        with pytest.raises(SettingError, match=error):
            read(spark, str(path), "json", select="*")


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
    bad, good = read_rows(spark, path, topic="orders", key=["n"] if name.endswith("csv") else [])
    assert (bad.data, bad.reason) == (None, f"{column}. {CONVERT}")
    assert bad.line.startswith("(invalid UTF-8 was replaced) ")
    assert (good.reason is None) == (" in " in column or "csv" in name)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_follows_rfc_4180(spark: SparkSession, tmp_path: Path, end: str):
    """Quotes, commas and line breaks inside quotes do not change. A missing value is NULL, "" is an empty text."""
    path = tmp_path / "rows.csv"
    lines = [
        "data,topic,a.b", '"a ""q"", b",orders,1', '"two\r\nlines\nthree",orders,2', ",orders,3", '"",orders,4',
        '" é😀 ", sp ,5', 'x,"",6', "x,,7", '"""",orders,8', "'x',orders,9", "a\\,orders,10", '"\\""n",orders,11', "",
        '"NULL","NA",12', "#x,orders,13",
    ]  # fmt: skip
    path.write_bytes((end.join(lines) + end).encode())
    found = read_rows(spark, path, topic="usual", key=["a.b"], multi_line=True)
    assert [(each.data and bytes(each.data).decode(), each.topic, each.reason) for each in found] == [
        ('a "q", b', "orders", None), ("two\r\nlines\nthree", "orders", None), (None, "orders", None),
        (b"", "orders", None), (" é😀 ", " sp ", None), ("x", "", None), ("x", "usual", None), ('"', "orders", None),
        ("'x'", "orders", None), ("a\\", "orders", None), ('\\"n', "orders", None), ("NULL", "NA", None),
        ("#x", "orders", None),
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_can_be_divided_anywhere(spark: SparkSession, tmp_path: Path, end: str):
    """Otherwise one Spark task would read a whole file. With values of several lines, it does."""
    path = tmp_path / "rows.csv"
    lines = [f'"{n}, ""q"" é",orders,{n}' if n % 3 else f"{n},,{n}" for n in range(40)]
    path.write_bytes(end.join(["data,topic,n", *lines, ""]).encode())
    found, other = [], spark.newSession()
    for bytes in (41, 100, 333):
        other.conf.set("spark.sql.files.maxPartitionBytes", str(bytes))
        for multi_line in (False, True):
            rows = read(other, str(path), "auto", topic="usual", key=["n"], multi_line=multi_line)
            assert (rows.rdd.getNumPartitions() > 1) != multi_line
            found.append(sorted(map(repr, rows.collect())))
    assert len(found[0]) == 40
    assert found.count(found[0]) == 6


#: Lines of CSV with the columns data and topic, and why they are rejected, or None if they are rows.
CSV: dict[str, str | None] = {
    '"x,",orders': None, '5" pipe,orders': None, '"a,"",b",orders': None, '"' + '""' * 50_000 + '",orders': None,
    '""': "the line has 1 values, but the header has 2 columns",
    "many,orders,,": "the line has 4 values, but the header has 2 columns",
    "," * 30_000: "the line has 30001 values, but the header has 2 columns",
    '"say \\"hi\\"",orders': "the line has bad quotes: ',' expected after '\"'. Double the quotes inside of quotes",
    '"a" b,orders': "the line has bad quotes: ',' expected after '\"'",
    **{f"x,{text}": "topic is a text for NULL. Write nothing for NULL, or the text in quotes"
       for text in ("NULL", "\\N", "<NA>", "null", "NA", "N/A", "#N/A", "nil", "nan", "None")},
    "\0\0\0": "the line has the control character '\\x00'. The file is in UTF-16, or its end was lost",
    "x,orders\0": "the line has the control character '\\x00'", "\x1a": "the line has the control character '\\x1a'",
    "NULL,orders": "data is a text for NULL", "\\N,orders": "data is a text for NULL",
    "null,orders": None, "nan,orders": None,
}  # fmt: skip


def test_invalid_csv_lines_are_kept(spark: SparkSession, tmp_path: Path):
    """Files may have other line ends and another order of columns. A text for NULL is allowed in unused columns."""
    for ends in itertools.product(("\n", "\r\n"), repeat=2):
        (tmp_path / "a.csv").write_bytes(f"data,topic{ends[0]}{''.join(f'{line}{ends[0]}' for line in CSV)}".encode())
        (tmp_path / "b.csv").write_bytes(f" \t{ends[1]}reason,topic,data{ends[1]}NULL,orders,fine".encode())
        found = read_rows(spark, tmp_path, "csv")
        assert [bytes(each.data) for each in found if each.file.endswith("b.csv")] == [b"fine"]
        of_lines = [each for each in found if each.file.endswith("a.csv")]
        for (line, reason), each in zip(CSV.items(), of_lines, strict=True):
            assert (each.line, each.data is None) == ((line, True) if reason else (None, False)), line[:80]
            assert (each.reason or "").startswith(reason or ""), line[:80]
    given = read(spark, str(tmp_path), "csv", select="data, 'a' AS topic, data || '!' AS ordering_key")
    assert (
        sum(each.reason is None for each in given.collect())
        == sum(not reason or "topic is" in reason for reason in CSV.values()) + 1
    )


@pytest.mark.parametrize(
    "broken",
    ['orders,"x\ny"', '"""\n",orders', 'orders,"{\n ""a"": 1}"', '"x\r\ny",orders', '"' + '""' * 100_000 + '\n",orders',
     '"a\\"",orders', '"open,orders'],
    ids=lambda broken: broken[:9],  # a variable of the environment has the whole ID
)  # fmt: skip
def test_a_line_break_in_a_value_of_csv_is_refused(spark: SparkSession, tmp_path: Path, broken: str):
    """With --multi-line, quotes that are not closed lose no row without a reject."""
    path = tmp_path / "rows.csv"
    for end in ("\n", "\r\n"):
        path.write_bytes(end.join(["data,topic", "fine,orders", broken, *["more,orders"] * 500, ""]).encode())
        with pytest.raises(OutboxError, match=r"rows\.csv: a value has a line break, or quotes .* --multi-line"):
            read(spark, str(path), "csv")
    found = read_rows(spark, path, "csv", multi_line=True)
    lost = [each for each in found if each.reason]
    is_open = broken.startswith(('"open', '"a\\"'))
    assert len(lost) == is_open
    assert len(found) - len(lost) + sum(each.line.count("more,orders") for each in lost) == 502 - is_open


def test_the_format_follows_the_file_extension(spark: SparkSession, tmp_path: Path):
    rows = spark.createDataFrame([("d", "orders")], "data string, topic string")
    rows.write.parquet(str(tmp_path / "rows.parquet"))
    line = b'{"data":"d","topic":"orders"}\n'
    (tmp_path / "rows.ndjson.gz").write_bytes(gzip.compress(line))
    for name in ("rows.JSONL", "rows", "rows[1].jsonl", "rows\\1.jsonl"):
        (tmp_path / name).write_bytes(line)
    (tmp_path / "rows1.jsonl").write_bytes(b'{"data":"another file","topic":"orders"}\n')
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"data,topic\nd,orders\n"))
    names = "parquet parquet/ parquet/*.parquet ndjson.gz JSONL csv.gz"
    for path in (*(f"rows.{each}" for each in names.split()), "*.csv.gz", "rows[1].jsonl", "rows\\1.jsonl"):
        [found] = read_rows(spark, f"{tmp_path}/{path}")
        assert (found.data, found.topic) == (b"d", "orders"), path
    [found] = read_rows(spark, f"{tmp_path}/rows", "json")
    assert found.data == b"d"
    for path in ("rows", "rows.txt", "rows.gz", "csv.d/rows"):
        with pytest.raises(SettingError, match=r"unknown extension\. Pass --input-format: parquet, json, csv"):
            read(spark, f"{tmp_path}/{path}", "auto")


def test_no_column_of_a_parquet_file_is_lost(spark: SparkSession, tmp_path: Path):
    """Spark would read the columns of one file, so the tasks of another would lose their ordering key."""
    folder = "m.`=01"
    files = {f"{folder}/a": {"data": ["a"]}, f"{folder}/b": {"data": ["b"], "ordering_key": ["k"]}}
    (tmp_path / folder).mkdir()
    for name, columns in files.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    found = read_rows(spark, tmp_path, "parquet", topic="orders", key=["m.`", "data"])
    ids = [task_id("orders", "01", data) for data in ("a", "b")]
    assert {(each.task_id, each.ordering_key) for each in found} == {(ids[0], None), (ids[1], "k")}
    for keys, said in (
        ([7], r"bigint in .*/c\.parquet\. Write all"),
        (pa.nulls(1), r"int in .*/c\.parquet\..* If it has no"),
    ):
        pq.write_table(pa.table({"data": ["c"], "ordering_key": keys}), tmp_path / folder / "c.parquet")
        with pytest.raises(OutboxError, match=rf"Column ordering_key is string in .*/b\.parquet, but {said}"):
            read(spark, str(tmp_path), "parquet")


def test_a_file_with_only_a_header_has_no_rows(spark: SparkSession, tmp_path: Path):
    (tmp_path / "head.csv").write_text("data,topic\n")
    (tmp_path / "nothing.csv").write_text("")
    (tmp_path / "nothing.jsonl").write_text("")
    assert read_rows(spark, f"{tmp_path}/head.csv") == []
    assert read(spark, f"{tmp_path}/nothing.jsonl", "auto").collect() == []
    with pytest.raises(OutboxError, match=r"nothing\.csv is empty"):
        read(spark, f"{tmp_path}/nothing.csv", "auto")


def test_a_footer_of_psql_is_no_row(spark: SparkSession, tmp_path: Path):
    """In a file of more columns, it has too few values. A row may have such a text anywhere else."""
    path = tmp_path / "rows.csv"
    for text in ("(0 rows)", "a\n(1 row)", "a\r\n(2 rows)\r\n(2 rows)\r\n"):
        path.write_bytes(f"data\n{text}".encode())
        for select in ("", "*"):
            with pytest.raises(OutboxError, match=r"rows\.csv: the last line '\(\d rows?\).*' is a footer of psql"):
                read(spark, str(path), "csv", topic="orders", select=select)
    for rows in (["(1 row)"], ["(2 rows)", "b"], ["a", "(2 rows)"], ["a", '"(1 row)"'], ["a", "x (1 row)"]):
        path.write_text("\n".join(["data", *rows]))
        found = [bytes(each.data).decode() for each in read_rows(spark, path, topic="orders")]
        assert found == [each.strip('"') for each in rows]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_spark_sql_makes_the_columns_of_tasks(spark: SparkSession, tmp_path: Path, kind: str):
    """A row that it cannot make is rejected alone. A decimal is a key, and a date a time."""
    path = tmp_path / f"rows.{kind}"
    values = "(7, 'é', '1.50'), (8, 'f', 'x')"
    if kind == "parquet":
        spark.sql(f"SELECT * FROM VALUES {values} AS t(customer, name, cents)").coalesce(1).write.parquet(str(path))
    elif kind == "csv":
        path.write_text('customer,name,cents,not used\n7,é,1.50,NULL\n7,"é,\n8,f,x,\n')
    else:
        path.write_text('{"customer":7,"name":"é","cents":1.50}\n{"customer":\n{"customer":8,"name":"f","cents":"x"}\n')
    select = (
        "to_json(struct(customer, name, cents)) AS data, 'c-' || customer AS ordering_key,\n"
        "CAST(cents AS DECIMAL(9, 2)) AS cents, CAST(CAST(cents AS DECIMAL(9, 2)) AS INT) AS priority, "
        "CAST(DATE'2090-01-01' AS TIMESTAMP) AS available_at -- a comment"
    )
    first, *bad = read(
        spark, str(path), "auto", select=select, topic="orders", key=["cents"], multi_line=True
    ).collect()
    customer = 7 if kind == "parquet" else "7"
    assert json.loads(first.data) == {"customer": customer, "name": "é", "cents": "1.50"}
    assert (first.ordering_key, first.task_id, first.priority) == ("c-7", task_id("orders", "1.50"), 1)
    lines = {
        "jsonl": ['{"customer":', '{"customer":8,"name":"f","cents":"x"}'],
        "csv": ['7,"é,\n8,f,x,'],
        "parquet": ['{"customer":8,"name":"f","cents":"x"}'],
    }
    assert [each.line for each in bad] == lines[kind]
    assert all(f"{path}" in each.file for each in bad)
    if kind != "csv":
        assert bad[-1].reason == "--select cannot compute the column cents of this row"


def test_without_data_the_message_is_the_line(spark: SparkSession, tmp_path: Path):
    line = b'{"z": 9007199254740993, "a":1.50,"n":null,"o":{}}'
    (tmp_path / "rows.jsonl").write_bytes(b" " + line + b"\r\n")
    [made] = read(spark, str(tmp_path), "json", select="a AS ordering_key, n AS topic", topic="orders").collect()
    assert (made.data, made.ordering_key, made.topic) == (line, "1.50", "orders")


@pytest.mark.parametrize(
    ("select", "said"),
    [
        ("customer AS data,\n colour AS topic", r"\[UNRESOLVED_COLUMN.* `colour` .*\[`customer`\].* line 2 pos 1"),
        ("customer AS AS data", r"\[PARSE_SYNTAX_ERROR\] Syntax error at or near 'data'.*line 1, pos 15"),
        ("nothing(customer) AS data", r"\[UNRESOLVED_ROUTINE\].*`nothing`.*line 1 pos 0"),
        ("explode(array(customer)) AS data", r"\[UNSUPPORTED_GENERATOR"),
        ("count(*) AS data", "an expression can use one row only"),
        ("row_number() OVER (ORDER BY customer) AS data", "an expression can use one row only"),
        *((f"{name} AS data", "has another value at each attempt, which would register other tasks")
          for name in ("uuid()", "rand()", "now()", "current_timestamp()", "CAST(current_date() AS STRING)",
                       "unix_timestamp()", "monotonically_increasing_id()")),
    ],
)  # fmt: skip
def test_an_error_of_the_sql_has_its_position(spark: SparkSession, tmp_path: Path, select: str, said: str):
    (tmp_path / "rows.jsonl").write_text('{"customer":7}')
    with pytest.raises(SettingError, match=f"--select: .*{said}") as raised:
        read(spark, str(tmp_path), "json", select=select)
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
