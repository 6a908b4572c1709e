"""What the Spark jobs and the sink check of rows and files before any Spark task starts."""

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql.types import DoubleType, MapType, StringType, StructType

from outbox.errors import SettingError
from outbox_pipeline.rows.text_files import TextFiles, header
from outbox_pipeline.rows.texts import CONVERT
from pyspark_outbox import OutboxDataSource


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
    assert record.why == f"the line is not valid UTF-8. {CONVERT}"


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
