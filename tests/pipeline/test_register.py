"""`register`, on Spark and the emulator: what becomes of rows, also when Spark tasks fail or the job is killed."""

import base64
import dataclasses
import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.sql import SparkSession

from outbox.errors import SettingError
from outbox.message import RawPubsubMessage
from outbox.program.settings import DatabaseSettings
from outbox_pipeline.job_settings import RegisterSettings
from outbox_pipeline.jobs.register import job
from outbox_pipeline.jobs.register.ids import task_id
from tests.support.operations import rows_of
from tests.support.pipeline import counts, fail_after_writes, registered, rows
from tests.support.spanner import INSTANCE, PROJECT


def settings(input: str, rejects: str, database: str, **others: Any) -> RegisterSettings:
    given = {"project": PROJECT, "instance": INSTANCE, "database": database, "input": input, "rejects": rejects}
    return RegisterSettings.read(given | others, {})


def refused(folder: object) -> list[dict[str, Any]]:
    lines = [line for file in sorted(Path(str(folder)).glob("*.json")) for line in file.read_text("utf-8").splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda each: str(each["reason"]))


def message_of(stored: dict[str, Any]) -> Any:
    return RawPubsubMessage.FromString(base64.b64decode(stored["Data"]))


def test_a_table_of_the_catalog_is_an_input(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    """A column of its folders keeps the type that the table declares."""
    where = f"USING parquet PARTITIONED BY (month) LOCATION '{tmp_path}/invoices'"
    spark.sql(f"CREATE TABLE invoices (data STRING, topic STRING, month DATE) {where}")
    spark.sql("INSERT INTO invoices VALUES ('a', 'orders', DATE '2026-11-01'), ('b', NULL, DATE '2026-12-01')")
    try:
        given = settings("", f"{tmp_path}/no", target.database, input_table="invoices", topic="usual", key="month")
        others = {"key": "", "select": "upper(data) AS data, topic"}
        done = [job.run(spark, each) for each in (given, given, dataclasses.replace(given, **others))]
    finally:
        spark.sql("DROP TABLE invoices")
    assert [counts(each) for each in done] == [(2, 2, 0, 0, 0), (2, 0, 2, 0, 0), (2, 2, 0, 0, 0)]
    assert sorted(message_of(each).data for each in rows_of(database).values()) == [b"A", b"B", b"a", b"b"]
    topics = {id: each["Topic"] for id, each in rows_of(database).items() if message_of(each).data.islower()}
    assert topics == {task_id("orders", "2026-11-01"): "orders", task_id("usual", "2026-12-01"): "usual"}


def test_rejected_rows_can_be_corrected_and_registered(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    """A rejected row has all its columns if it could be parsed, otherwise its line. Times are exact."""
    path = tmp_path / "rows.jsonl"
    bad = {
        "topic": "goog", "data_base64": base64.b64encode(b"\xff" * 100).decode(), "attributes": {"a": "é\n"},
        "priority": -3, "ordering_key": "", "available_at": "2090-01-01T01:00:00.000001+01:00", "at_most_once": True,
        "expires_at": "2090-01-01T00:00:00.000002Z", "n": "7",
    }  # fmt: skip
    lines = [bad, {"data": "x", "n": "8"}, {"data": "y", "n": "9", "priority": "high"}, {"data": "z"}]
    path.write_bytes("\n".join(map(json.dumps, lines)).encode() + b'\n{"data":"\xff"}\n{"data":"a"} {"data":"b"}\n')
    given = settings(str(path), str(tmp_path / "no"), target.database, topic="usual", key="n ")
    done = job.run(spark, given)
    assert counts(done) == (6, 1, 0, 0, 5)
    found = refused(done.rejects)
    [by_name] = [each for each in found if "goog" in each["reason"]]
    assert by_name["task_id"] == task_id("goog", "7")
    assert by_name["available_at"] == "2090-01-01T00:00:00.000001Z"
    assert [(each["reason"].partition(" ")[0], each.get("line")) for each in found if each is not by_name] == [
        ("key", '{"data":"z"}'),
        ("priority", '{"data":"y","n":"9","priority":"high"}'),
        ("the", '{"data":"a"} {"data":"b"}'),
        ("the", '(invalid UTF-8 was replaced) {"data":"\ufffd"}'),
    ]
    # Uncorrected, they are rejected again.
    again = job.run(spark, settings(f"{done.rejects}/*.json", str(tmp_path / "no"), target.database, topic="usual"))
    assert counts(again) == (5, 0, 0, 0, 5)
    # Corrected, they are registered.
    corrected = [by_name | {"topic": "orders"}, json.loads(found[1]["line"]) | {"priority": 1}]
    path.write_text("\n".join(map(json.dumps, corrected)))
    assert counts(job.run(spark, given)) == (2, 2, 0, 0, 0)
    stored = rows_of(database)
    assert set(stored) == {task_id("usual", "8"), task_id("usual", "9"), task_id("goog", "7")}
    one = stored[task_id("goog", "7")]
    assert (one["Topic"], one["Priority"], one["OrderingKey"], one["AtMostOnce"]) == ("orders", -3, None, True)
    assert message_of(one).data == b"\xff" * 100
    assert message_of(one).attributes["a"] == "é\n"
    assert one["AvailableAt"] == datetime(2090, 1, 1, 0, 0, 0, 1, UTC)
    assert one["ExpiresAt"] == datetime(2090, 1, 1, 0, 0, 0, 2, UTC)


def test_empty_input_and_a_single_row(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    unknown = spark.createDataFrame([("d", "orders", 1)], "data string, topic string, colour int")
    with pytest.raises(SettingError, match="Unknown column 'colour'"):
        registered(unknown, target, tmp_path)
    one = spark.createDataFrame([("d", "orders")], "data string, topic string")
    for given, count in ((one.limit(0), 0), (one.where("false"), 0), (one, 1)):
        assert counts(registered(given, target, tmp_path)) == (count, count, 0, 0, 0)
        assert len(rows_of(database)) == count
    assert list(tmp_path.iterdir()) == []


def test_a_rate_applies_to_all_spark_tasks_together(spark: SparkSession, target: DatabaseSettings, tmp_path: Path):
    """Each Spark task that can run at once gets an equal share of the rate. Without a rate there is no limit."""
    given = spark.createDataFrame([("d", "orders")], "data string, topic string")
    with (
        mock.patch.object(job, "map_rows", wraps=job.map_rows) as mapped,
        mock.patch.object(job, "in_order", wraps=job.in_order) as ordered,
    ):
        assert registered(given, target, tmp_path, max_rows_per_second=1000).registered == 1
        assert registered(given, target, tmp_path).existing == 1
    tasks = spark.sparkContext.defaultParallelism
    assert [call.args[-2] for call in mapped.call_args_list] == [1000 / tasks, 0.0]
    assert [call.args[1] for call in ordered.call_args_list] == [tasks, 0]


@pytest.mark.usefixtures("many_partitions")
def test_a_retried_spark_task_registers_no_task_twice(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every Spark task fails twice, after writing a part and after writing all rows. Each row is counted once."""
    there = [{"data": f"there {number}".encode()} for number in range(150)]
    assert registered(rows(spark, there), target, tmp_path, topic="orders").registered == 150
    keyed = [
        {"data": str(number).encode(), "ordering_key": f"k{number % 3}", "sequence": number} for number in range(450)
    ]
    plain = [{"data": f"plain {number}".encode()} for number in range(300)]
    bad = [{"data": b"bad", "topic": "goog"}, {"data": b"bad", "at_most_once": True, "ordering_key": "k1"}]
    given = [*keyed, *plain, *there, *bad, *plain[:20], *keyed[:10], *there[:5]]
    monkeypatch.setattr(job, "register_rows", partial(fail_after_writes, job.register_rows))
    done = registered(rows(spark, given, 3), target, tmp_path, topic="orders")
    assert counts(done) == (len(given), 750, 150, 35, 2)
    stored = rows_of(database)
    assert len(stored) == 900
    for key in ("k0", "k1", "k2"):
        of_key = [each for each in stored.values() if each["OrderingKey"] == key]
        assert len(of_key) == 150
    assert len(list(Path(str(done.rejects)).glob("*.json"))) >= 1
    monkeypatch.undo()
    assert counts(registered(rows(spark, given), target, tmp_path, topic="orders"))[1:3] == (0, 900)
