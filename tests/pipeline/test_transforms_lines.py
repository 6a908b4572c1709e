"""Files become rows: lines of JSON, CSV, Parquet; what cannot be read is kept, with why."""

import gzip
import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from outbox.errors import SettingError
from outbox_pipeline.jobs.register import read
from outbox_pipeline.transforms.tasks import prepared

NO_OBJECT = "the line is no JSON object, or has a name twice"
BAD_CSV = "the line has more or fewer columns than the head, or bad quotes"
BROKEN = (
    '{"data":"a"', '{"data":"a"} junk', '{"data":"a"}{"data":"b"}', '{"data":"a"},{"data":"b"}', '{"data":"a"}]',
    '{"data":"a"},', '[{"data":"a"}]', "[", "5", "null", '"text"', "text", '{"data":"a","data":"b"}', "{data}",
)  # fmt: skip


def test_lines_of_json_become_rows(spark: SparkSession, tmp_path: Path):
    """Values of other types than texts are taken as their JSON; empty lines are nothing."""
    path = tmp_path / "rows.jsonl"
    lines = [
        {
            "data": "é\x00😀",
            "topic": "orders",
            "priority": 5,
            "at_most_once": True,
            "attributes": {"a": "b", "c": 1},
            "n": 1,
        },
        {"data": {"x": [1, None]}, "ordering_key": "k", "sequence": "7", "n": "key"},
        {"data_base64": "/w==", "reason": "refused before", "line": "x", "topic": None, "n": ""},
    ]
    path.write_text("\n \n".join(map(json.dumps, lines)) + "\r\n\t\n", "utf-8")
    rows = prepared(read(spark, str(path), "auto", ["n"]), topic="usual", key=["n"])
    rows = rows.drop("task_id")
    found = [{name: value for name, value in row.asDict().items() if value is not None} for row in rows.collect()]
    found = [{name: bytes(value) if name == "data" else value for name, value in row.items()} for row in found]
    assert found == [
        {
            "topic": "orders", "data": "é\x00😀".encode(), "priority": 5, "at_most_once": True,
            "attributes": {"a": "b", "c": "1"},
        },
        {"topic": "usual", "data": b'{"x":[1,null]}', "ordering_key": "k", "sequence": 7},
        {"topic": "usual", "data": b"\xff"},
    ]  # fmt: skip


def test_lines_that_are_no_rows_are_kept(spark: SparkSession, tmp_path: Path):
    """Of a line with two objects none is taken: the other one would be lost without a word."""
    path = tmp_path / "rows.json"
    unknown = '{"data":"a","dat":"b","Topic":"c","topic":"orders"}'
    lines = [line.encode() for line in (*BROKEN, unknown)] + [b'{"data":"\xff"}', b'{"data":"fine"}']
    path.write_bytes(b"\n".join(lines))
    rows = prepared(read(spark, str(path), "json"), topic="usual").select("data", "topic", "reason", "line")
    # A worker could not read it else; what is collected here looks the same.
    rows = rows.where("line IS NULL OR is_valid_utf8(line)")
    assert [tuple(each) for each in rows.collect()] == [
        *((None, None, NO_OBJECT, line) for line in BROKEN),
        (None, None, "the line has names that are no columns: dat, Topic", unknown),
        (None, None, "the line is not valid UTF-8", '{"data":"\ufffd"}'),
        (b"fine", "usual", None, None),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_is_read_as_rfc_4180_says(spark: SparkSession, tmp_path: Path, end: str):
    """Quotes, commas and ends of lines in quotes stay as they are; nothing is NULL, and quotes of nothing are empty."""
    path = tmp_path / "rows.csv"
    lines = [
        "data,topic,a.b", '"a ""q"", b",orders,1', '"two\r\nlines\nthree",orders,2', ",orders,3", '"",orders,4',
        '" é😀 ", sp ,5', 'x,"",6', "x,,7", '"""",orders,8', "'x',orders,9", "a\\,orders,10", '"\\""n",orders,11',
        "#x,orders,12",
    ]  # fmt: skip
    path.write_bytes((end.join(lines) + end).encode())
    found = prepared(read(spark, str(path), "auto"), topic="usual", key=["a.b"]).collect()
    assert [(each.data and bytes(each.data).decode(), each.topic, each.reason) for each in found] == [
        ('a "q", b', "orders", None), ("two\r\nlines\nthree", "orders", None), (None, "orders", None),
        (b"", "orders", None), (" é😀 ", " sp ", None), ("x", "", None), ("x", "usual", None), ('"', "orders", None),
        ("'x'", "orders", None), ("a\\", "orders", None), ('\\"n', "orders", None), ("#x", "orders", None),
    ]  # fmt: skip


def test_lines_of_csv_that_are_no_rows_are_kept(spark: SparkSession, tmp_path: Path):
    """Too few columns, too many, quotes without an end; also where a column is there that nobody needs."""
    path = tmp_path / "rows.csv"
    path.write_text(
        'data,topic,reason\nfine,orders,\nfew,orders\nmany,orders,,\nx,orders,y\n"open,orders,z\nw,orders,\n'
    )
    found = prepared(read(spark, str(path), "csv")).select("data", "topic", "reason", "line").collect()
    assert [tuple(each) for each in found] == [
        (b"fine", "orders", None, None),
        (None, None, BAD_CSV, "few,orders"),
        (None, None, BAD_CSV, "many,orders,,"),
        (b"x", "orders", None, None),
        (None, None, BAD_CSV, '"open,orders,z\nw,orders,'),
    ]


def test_formats_go_by_the_ending(spark: SparkSession, tmp_path: Path):
    """Of files, folders and globs, compressed or not; what has no ending must be named."""
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
        with pytest.raises(SettingError, match="the ending names no format: give --input-format parquet, json, csv"):
            read(spark, f"{tmp_path}/{path}", "auto")


def test_a_file_of_nothing_but_its_head_has_no_rows(spark: SparkSession, tmp_path: Path):
    """And one without a head has no columns, which is said."""
    (tmp_path / "head.csv").write_text("data,topic\n")
    (tmp_path / "nothing.csv").write_text("")
    (tmp_path / "nothing.jsonl").write_text("")
    assert prepared(read(spark, f"{tmp_path}/head.csv", "auto")).collect() == []
    assert prepared(read(spark, f"{tmp_path}/nothing.jsonl", "auto")).collect() == []
    with pytest.raises(SettingError, match="column data is missing"):
        prepared(read(spark, f"{tmp_path}/nothing.csv", "auto"))
