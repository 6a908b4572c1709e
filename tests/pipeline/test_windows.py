"""The windows of an archive: bounds, the log and reads, without Spanner."""

import dataclasses
import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from outbox.base.values import shown
from outbox.devtools import child_process
from outbox.errors import OutboxError, SettingError
from outbox_pipeline import read_archive, schemas
from outbox_pipeline.jobs.archive_files import Archive, archivable, checksum_columns, rebalanced
from outbox_pipeline.jobs.archive_log import Log
from outbox_pipeline.jobs.archive_windows import ArchivedWindow, bounds, floor
from tests.support.pipeline import DAY, MICROSECOND, NEXT_DAY, Files, Published, remove, sent_of

HOUR = timedelta(hours=1)
TIMES = st.datetimes(datetime(1950, 1, 1), datetime(2150, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - given there
LENGTHS = st.one_of(st.sampled_from([1.0, 900.0, 3_600.0, 86_400.0, 31 * 86_400.0]), st.floats(1, 31 * 86_400))

WINDOW = ArchivedWindow(
    database="projects/p/instances/i/databases/d",
    since=DAY,
    until=NEXT_DAY,
    read_timestamp=NEXT_DAY + timedelta(minutes=1),
    rows=0,
    checksum=None,
    data="",
    files={},
)


def windows(folder: str) -> list[ArchivedWindow]:
    return Log(folder).windows()


def frame(spark: SparkSession, tasks: list[Published]) -> DataFrame:
    same = {
        "Topic": "007", "Data": b"\0 data", "Bytes": 6, "Priority": 50, "Shard": 3, "AtMostOnce": False, "Attempts": 0,
        "TimesSent": 1,
    }  # fmt: skip
    rows = [{**same, "Id": id, "CreatedAt": at - HOUR, "SentAt": at} for id, at in tasks]
    columns = StructType([each for each in schemas.ARCHIVED if each.name != "SentDate"])
    return spark.createDataFrame([[row.get(name) for name in columns.names] for row in rows], columns)


def write(spark: SparkSession, folder: Path, tasks: list[Published], *without: str) -> None:
    made = archivable(frame(spark, tasks)).drop(*without)
    made.write.partitionBy("SentDate").parquet(str(folder))


def finish(
    spark: SparkSession, to: Path, since: datetime, until: datetime, tasks: list[Published], *without: str
) -> ArchivedWindow:
    archive = Archive(spark, str(to))
    data = archive.new_folder(since, until)
    window = dataclasses.replace(WINDOW, since=since, until=until, data=data)
    if tasks:
        write(spark, to / data, tasks, *without)
        [(rows, checksum)] = archivable(frame(spark, tasks)).select(*checksum_columns()).collect()
        window = dataclasses.replace(window, rows=rows, checksum=checksum)
    return archive.finish(window)


def in_delta(folder: Path) -> list[dict[str, Any]]:
    """Return the tasks as another engine reads them."""
    archive = deltalake.DeltaTable(folder).to_pyarrow_dataset()  # noqa: F841 - the query names it
    return duckdb.sql("SELECT * FROM archive ORDER BY Id").to_arrow_table().to_pylist()


@given(TIMES, LENGTHS, st.floats(0, 20))
def test_windows_are_contiguous_and_end_at_multiples(begin: datetime, seconds: float, number: float):
    length = timedelta(seconds=seconds)
    end = begin + length * number
    found = list(bounds(begin, end, seconds))
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    for since, until in found:
        assert timedelta(0) < until - since <= length
        assert (until - epoch) % length == timedelta(0)
        assert until <= end
    assert [until for _, until in found[:-1]] == [since for since, _ in found[1:]]
    last = found[-1][1] if found else begin
    assert not found or found[0][0] == begin
    assert end - last < length * 2
    assert floor(end, length) <= last


def test_an_invalid_commit_is_an_error_with_its_path(tmp_path: Path):
    """For any kind of damage. A window of another version can have other fields and is not damaged."""
    assert Log(str(tmp_path)).append(dataclasses.replace(WINDOW, data="window=x/run=0"), [])
    [window] = Files(tmp_path).windows()
    file, whole = window.file, window.file.read_text()
    for changes in ({"rows": None, "lines": 2}, {"until": 1}, {"until": "soon"}, {"until": None}):
        window.edit(**changes)
        with pytest.raises(OutboxError, match=rf"^{file} is not the commit of a window: .* Restore it"):
            windows(str(tmp_path))
        file.write_text(whole)
    for more in ({}, {"zone": "eu"}):
        window.edit(format=2, **more)
        with pytest.raises(OutboxError, match=rf"^{file} has format 2, but this package reads 1\. Upgrade"):
            windows(str(tmp_path))
        file.write_text(whole)
    for text in ("", "{", "[]", "null", whole[: len(whole) // 2]):
        file.write_text(text)
        with pytest.raises(OutboxError, match=rf"{tmp_path}.*estore"):
            windows(str(tmp_path))
    file.unlink()
    assert windows(str(tmp_path)) == []


def test_the_log_proves_each_window_and_keeps_it(spark: SparkSession, tmp_path: Path):
    """Also if another program makes a checkpoint, deletes expired commits, and deletes files that the log lacks."""
    finished = finish(spark, tmp_path, DAY, NEXT_DAY, [("a", DAY), ("b", DAY + HOUR)])
    left = tmp_path / Archive.new_folder(DAY, NEXT_DAY)
    write(spark, left, [("left", DAY)])
    [window] = windows(str(tmp_path))
    assert window == dataclasses.replace(finished, version=1)
    assert window.files == {
        str(file.relative_to(tmp_path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (tmp_path / window.data).rglob("*.parquet")
    }
    commit = hashlib.sha256((tmp_path / window.commit).read_bytes()).hexdigest()
    assert Log(str(tmp_path)).sha256(window.commit) == commit
    table = deltalake.DeltaTable(tmp_path)
    table.create_checkpoint()
    table.cleanup_metadata()
    assert table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert list(left.rglob("*.parquet")) == []
    assert windows(str(tmp_path)) == [window]
    assert Files(tmp_path).tasks(spark) == [("a", DAY), ("b", DAY + HOUR)]


def test_other_engines_read_the_finished_windows(spark: SparkSession, tmp_path: Path):
    """A task with every column, whatever the name of the folder and of the topic. A window can lack later columns."""
    folder = tmp_path / "für alle"
    with pytest.MonkeyPatch.context() as patch:
        fields = [field for field in schemas.ARCHIVED if field.name != "BlockedBy"]
        patch.setattr(schemas, "ARCHIVED", StructType(fields))
        Log(str(folder))._create()
    finish(spark, folder, DAY, DAY + HOUR, [("a", DAY)], "BlockedBy")
    finish(spark, folder, DAY + HOUR, NEXT_DAY, [("b", NEXT_DAY - MICROSECOND)])
    write(spark, folder / Archive.new_folder(NEXT_DAY, NEXT_DAY + HOUR), [("c", NEXT_DAY)])
    rows = read_archive(spark, str(folder)).orderBy("Id").toArrow().to_pylist()
    assert (in_delta(folder), [each["Id"] for each in rows]) == (rows, ["a", "b"])
    table = deltalake.DeltaTable(folder).to_pyarrow_dataset()
    for column, value in rows[1].items():
        found = table.to_table(filter=pc.field(column) == pa.scalar(value, table.schema.field(column).type))
        assert value is None or "b" in found.column("Id").to_pylist(), (
            f"a filter of {column} skips the file of the task"
        )


def test_another_program_that_changes_the_table_is_noticed(spark: SparkSession, tmp_path: Path):
    finish(spark, tmp_path, DAY, NEXT_DAY, [("a", DAY)])
    table = deltalake.DeltaTable(tmp_path)
    with pytest.raises(deltalake.exceptions.DeltaError, match="append"):
        table.delete()
    deltalake.write_deltalake(table, table.to_pyarrow_table(), mode="append")
    with pytest.raises(
        OutboxError, match=r"Another program changed the Delta table .*\.parquet\. Only the archive job"
    ):
        read_archive(spark, str(tmp_path))


def test_the_folder_of_an_archive_must_not_need_an_escape(spark: SparkSession, tmp_path: Path):
    for name in ("a#b", "100%"):
        with pytest.raises(
            SettingError, match=rf"{name}: the folder of an archive must not contain {name.strip('0a1b')}"
        ):
            read_archive(spark, str(tmp_path / name))


def test_read_archive_selects_by_time(spark: SparkSession, tmp_path: Path):
    """`since` is inclusive and `until` exclusive, to the microsecond. Windows can be empty."""
    tasks = [(f"{number}", DAY + HOUR * (number + 0.5)) for number in range(4)]
    at = tasks[2][1]
    for hour in range(4):
        finish(spark, tmp_path, DAY + HOUR * hour, DAY + HOUR * (hour + 1), tasks[hour : hour + 1] if hour != 1 else [])
    archive = Archive(spark, str(tmp_path))
    found = archive.log.windows()
    assert [window.since for window in found] == [DAY + HOUR * hour for hour in range(4)]

    def read(**bounds: datetime) -> list[str]:
        return [id for id, _ in sent_of(read_archive(spark, str(tmp_path), **bounds))]

    assert read() == ["0", "2", "3"]
    assert read_archive(spark, str(tmp_path)).where("Topic = '007'").count() == 3, "a topic stays a text"
    assert read(since=at) == ["2", "3"]
    assert read(since=at + MICROSECOND) == ["3"]
    assert read(until=at) == ["0"]
    assert read(until=at + MICROSECOND) == ["0", "2"]
    assert read(since=DAY + HOUR, until=DAY + HOUR * 2) == []
    assert read(since=DAY - HOUR, until=DAY) == []
    # Files of other windows may be missing.
    for window in found:
        if window.rows and window.since != DAY + HOUR * 2:
            (tmp_path / window.data).rename(tmp_path / f"elsewhere {window.version}")
    assert read(since=DAY + HOUR * 2, until=DAY + HOUR * 3) == ["2"]


def test_a_window_with_fewer_tasks_than_the_log_says_fails_each_read(spark: SparkSession, tmp_path: Path):
    """Spark ignores a file that is gone, and one of 0 bytes."""
    finish(spark, tmp_path, DAY, NEXT_DAY, [("a", DAY), ("b", DAY)])
    for files in ([], ["removed"]):
        for file in tmp_path.rglob("*.parquet"):
            remove(file)
            if not files:
                file.touch()
        with pytest.raises(OutboxError, match=r"contains 0 tasks, but its window has 2\. Restore its files"):
            read_archive(spark, str(tmp_path))


def test_overlapping_and_missing_windows_are_errors(spark: SparkSession, tmp_path: Path):
    """A task would be in two overlapping windows, and the tasks of a missing window would be lost without an error."""
    for hour in range(3):
        finish(spark, tmp_path, DAY + HOUR * hour, DAY + HOUR * (hour + 1), [])
    assert len(Archive(spark, str(tmp_path)).log.windows()) == 3
    # Another job has windows of another length.
    for since in (2.5, 4):
        with pytest.raises(OutboxError, match="Another run finished the window"):
            finish(spark, tmp_path, DAY + HOUR * since, DAY + HOUR * 5, [])
    middle, last = Files(tmp_path).windows()[1:]
    last.edit(since=shown(DAY + HOUR * 1.5))
    with pytest.raises(
        OutboxError, match=r"0003\.json is a window from \S+T01:30\S+, but the one before .* at \S+T02:00"
    ):
        read_archive(spark, str(tmp_path))
    middle.file.unlink()
    with pytest.raises(OutboxError, match=r"_delta_log of the archive \S+ cannot be read.* gap"):
        read_archive(spark, str(tmp_path))


def test_two_runs_commit_one_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The slower one commits on top of the version that it has checked."""
    mine, other = (dataclasses.replace(WINDOW, data=f"window=x/run={n}") for n in range(2))
    commit = Log._commit

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(Log, "_commit", commit)
        assert Log(str(tmp_path)).append(other, [])
        commit(*arguments)

    monkeypatch.setattr(Log, "_commit", overtaken)
    assert not Log(str(tmp_path)).append(mine, [])
    assert [each.data for each in windows(str(tmp_path))] == [other.data]

    def twice(*arguments: Any) -> None:
        """Commit as if the answer of the object store was lost and the request repeated."""
        commit(*arguments)
        commit(*arguments)

    monkeypatch.setattr(Log, "_commit", twice)
    later = dataclasses.replace(mine, since=NEXT_DAY, until=NEXT_DAY + HOUR)
    assert Log(str(tmp_path)).append(later, [])
    assert len(windows(str(tmp_path))) == 2


def test_of_several_runs_one_commits_a_window_to_cloud_storage(monkeypatch: pytest.MonkeyPatch):
    """Its conditional requests decide. If an answer is lost, the repeated request finds the commit of its own run."""
    command = [sys.executable, "-m", "tests.support.bucket", "{port}"]
    with child_process.running("bucket", command) as bucket, ThreadPoolExecutor(4) as pool:
        key = {"gcs_base_url": f"http://{bucket.host}", "disable_oauth": True}
        key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        url = "gs://shop/outbox/archive"
        for hour in range(3):
            window = dataclasses.replace(WINDOW, since=DAY + HOUR * hour, until=DAY + HOUR * (hour + 1))
            logs = [Log(url) for _ in range(4)]
            for log in logs:
                log.windows()
            runs = [dataclasses.replace(window, data=f"window={hour}/run={n}") for n in range(4)]
            won = list(pool.map(lambda log, run: log.append(run, []), logs, runs))
            assert won.count(True) == 1
            found = windows(url)
            assert (len(found), found[-1].data) == (hour + 1, runs[won.index(True)].data)


def test_the_notes_of_a_purge_are_those_of_the_first(tmp_path: Path):
    one, other = Log(str(tmp_path)), Log(str(tmp_path))
    one.append(WINDOW, [])
    [window] = one.windows()
    other.windows()
    assert (window.operation, window.purged) == (None, False)
    assert [log.note_purging(window, id) for log, id in ((one, "1"), (other, "2"))] == ["1", "1"]
    deltalake.DeltaTable(tmp_path).alter.add_columns(
        deltalake.Schema.from_arrow(pa.schema({"New": pa.string()})).fields
    )
    with pytest.raises(OutboxError, match=r"^Another run changed the Delta log of \S+: .*Metadata changed.* again"):
        other.note_purged(window, {})
    one.windows()
    other.windows()
    one.note_purged(window, {"deleted": 3, "resent": 2, "missing": 1})
    other.note_purged(window, {"deleted": 0, "resent": 0, "missing": 0})
    [window] = one.windows()
    assert (window.operation, window.purged) == ("1", True)
    [note] = Files(tmp_path).purges()
    assert note is not None
    assert (note["deleted"], note["resent"], note["missing"]) == (3, 2, 1)


def test_the_checksum_differs_for_different_tasks(spark: SparkSession):
    """It depends on each column and on repeated rows, but not on the order or the partitions."""
    one, two = frame(spark, [("a", DAY)]), frame(spark, [("b", DAY)])
    same = {
        "both": archivable(one.union(two)),
        "in another order": archivable(two.union(one)),
        "in one partition": rebalanced(archivable(one.union(two))),
        "in more partitions": archivable(one.union(two)).repartition(3),
    }
    others = {column.name: archivable(one.withColumn(column.name, _other(column.name))) for column in schemas.STORED}
    others |= {"one": archivable(one), "twice": archivable(one.union(one)), "two": archivable(two)}
    others["twice the other"] = archivable(two.union(two))
    tagged = [tasks.withColumn("case", f.lit(case)) for case, tasks in (same | others).items()]
    rows = reduce(DataFrame.union, tagged).groupBy("case").agg(*checksum_columns()).collect()
    found = {case: (rows, checksum) for case, rows, checksum in rows}
    assert {found[case] for case in same} == {(2, found["both"][1])}
    assert found["twice"][0] == 2
    assert len(set(found.values())) == 1 + len(others), "each of all cases but the same ones"
    assert [tuple(row) for row in archivable(one.limit(0)).select(*checksum_columns()).collect()] == [(0, None)]


def _other(name: str) -> Column:
    values = {
        "string": f.lit(f"other {name}"),
        "long": f.lit(77 + len(name)).cast("long"),
        "boolean": f.lit(True),
        "timestamp": f.timestamp_micros(f.lit(1_000_000 + len(name)).cast("long")),
        "binary": f.lit(b"other"),
    }
    return values[schemas.STORED[name].dataType.typeName()]
