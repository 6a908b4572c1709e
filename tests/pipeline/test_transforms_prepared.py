"""Preparation of users' rows: values, reasons, IDs, and invalid columns."""

import re
from datetime import UTC, datetime

from pyspark.sql import DataFrame, SparkSession

from outbox_pipeline.jobs.register import prepared
from outbox_pipeline.rows.texts import CONVERT, task_id
from tests.support.pipeline import row, rows

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


def test_a_rejected_row_has_the_data_of_its_serialized_message(spark: SparkSession):
    given = spark.createDataFrame(
        [("x", bytearray(b"\n\1a")), ("50", bytearray(b"\xff"))], "Priority string, Data binary"
    )
    assert [(each.reason, each.line) for each in prepared(given, topic="orders").collect()] == [
        ("priority x is not a whole number", '{"Priority":"x","data_base64":"YQ==","attributes":{}}'),
        ("Data is no serialized PubsubMessage", '{"Priority":"50","Data":"/w=="}'),
    ]


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
    # If this ID changed after a release, registering the same rows again would add tasks.
    same = "dc76c812-c54d-5c16-b6ae-bdf0468dee26"
    others = ["fddbf70c-445c-5fb8-add3-cebdd8e2e904", "4c4489bc-4f18-5bc2-aba0-b3b6858315e9"]
    assert found == [*[same] * 4, *others, same, same]


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
