"""The windows of an archive: bounds, manifests and reads, without Spanner."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from outbox.base.times import shown
from outbox.errors import OutboxError
from outbox_pipeline import read_archive, schemas
from outbox_pipeline.jobs.archive.windows import (
    Archive,
    Manifest,
    archivable,
    bounds,
    checksum_columns,
    floor,
    parsed,
    rebalanced,
)
from tests.support.archives import (
    DAY,
    MICROSECOND,
    NEXT_DAY,
    Published,
    archived,
    ids,
    purges,
    rewrite,
    sent_of,
    window_folders,
)  # fmt: skip

HOUR = timedelta(hours=1)
TIMES = st.datetimes(datetime(1950, 1, 1), datetime(2150, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - given there
LENGTHS = st.one_of(st.sampled_from([1.0, 900.0, 3_600.0, 86_400.0, 31 * 86_400.0]), st.floats(1, 31 * 86_400))

MANIFEST = Manifest(
    database="projects/p/instances/i/databases/d",
    since=DAY,
    until=NEXT_DAY,
    read_timestamp=NEXT_DAY + timedelta(minutes=1),
    rows=2,
    checksum="-12",
    data="run=0123",
    written_at=NEXT_DAY + HOUR,
)


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
    made.write.partitionBy(*schemas.ARCHIVE_PARTITIONS).parquet(str(folder))


def finish(
    spark: SparkSession, to: Path, since: datetime, until: datetime, tasks: list[Published], *without: str
) -> None:
    archive = Archive(spark, str(to))
    data = archive.new_run()
    folder = archive.folder_of(since, until)
    if tasks:
        write(spark, Path(str(folder / data)), tasks, *without)
    manifest = dataclasses.replace(
        MANIFEST, since=since, until=until, rows=len(tasks), data=data, written_at=datetime.now(UTC)
    )
    archive.finish(folder, manifest)


def test_files_with_fewer_or_more_columns_are_readable(spark: SparkSession, tmp_path: Path):
    """From before a column was added, and from after another one was added."""
    finish(spark, tmp_path, DAY, NEXT_DAY, [("a", DAY)], "BlockedBy", "TimesSent", "CancelledAt")
    tasks = read_archive(spark, str(tmp_path))
    found = [(task.Id, task.BlockedBy, task.TimesSent, task.CancelledAt) for task in tasks.collect()]
    assert found == [("a", None, None, None)]
    [data] = tmp_path.glob("window=*/run=*")
    later = archivable(frame(spark, [("b", DAY)])).withColumn("Added", f.lit(1))
    later.write.partitionBy(*schemas.ARCHIVE_PARTITIONS).mode("append").parquet(str(data))
    file = data.parent / "_manifest.json"
    rewrite(file, file.read_text().replace('"rows": 1', '"rows": 2'))
    both = read_archive(spark, str(tmp_path))
    assert (both.columns, sent_of(both)) == (schemas.ARCHIVED.fieldNames(), [("a", DAY), ("b", DAY)])
    # Spark's hash skips NULL, so the checksum of an old manifest still proves its files.
    before = [each for each in tasks.columns if each not in ("BlockedBy", "TimesSent", "CancelledAt")]
    checksum = f.sum(f.xxhash64(*before).cast("decimal(20,0)")).cast("string")
    assert tasks.select(checksum_columns()[1]).collect()[0][0] == tasks.select(checksum).collect()[0][0]


@given(TIMES, LENGTHS, st.floats(0, 20))
def test_windows_are_contiguous_and_end_at_multiples(begin: datetime, seconds: float, windows: float):
    length = timedelta(seconds=seconds)
    end = begin + length * windows
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


def test_an_invalid_manifest_is_an_error_with_its_path():
    """For any kind of damage. A manifest of another version can have other fields and is not damaged."""
    for text in ("", "{", "[]", "null", "{}", '{"since": 1}', MANIFEST.text().replace("rows", "lines"), "\udcff"):
        with pytest.raises(OutboxError, match=r"^gs://shop/window=x/_manifest\.json is not a manifest: "):
            parsed(text, "gs://shop/window=x")
    for more in ({}, {"zone": "eu"}):
        text = json.dumps({**json.loads(MANIFEST.text()), "version": 2, **more})
        with pytest.raises(
            OutboxError, match=r"^here/_manifest\.json has version 2, but this package reads 1\. Upgrade"
        ):
            parsed(text, "here")


def test_a_window_is_finished_when_its_manifest_exists(spark: SparkSession, tmp_path: Path):
    """Readers ignore data folders that no manifest names, and finishing the window deletes them. Other files stay."""
    archive = Archive(spark, str(tmp_path))
    folder = archive.folder_of(DAY, NEXT_DAY)
    assert folder.name == "window=20261020T000000Z_20261021T000000Z"
    assert archive.folder_of(datetime.fromisoformat("2026-10-20T02:00:00+02:00"), NEXT_DAY).name == folder.name
    assert len({archive.folder_of(DAY + MICROSECOND * number, NEXT_DAY).name for number in range(3)}) == 3
    path = tmp_path / folder.name
    write(spark, path / "run=left", [("left", DAY)])
    (path / "notes").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "_manifest.json").write_text("of somebody else")
    assert archive.windows() == []
    assert archived(spark, tmp_path) == []

    tasks = ids("ab", DAY)
    write(spark, path / "run=0123", tasks)
    archive.finish(folder, MANIFEST)
    assert archived(spark, tmp_path) == tasks
    assert sorted(each.name for each in path.iterdir() if each.is_dir()) == ["notes", "run=0123"]


def test_read_archive_selects_by_time_and_sorts_windows(spark: SparkSession, tmp_path: Path):
    """`since` is inclusive and `until` exclusive, to the microsecond. Windows can be empty."""
    tasks = [(f"{number}", DAY + HOUR * (number + 0.5)) for number in range(4)]
    at = tasks[2][1]
    # Written in another order than by time.
    for hour in (2, 0, 3, 1):
        finish(spark, tmp_path, DAY + HOUR * hour, DAY + HOUR * (hour + 1), tasks[hour : hour + 1] if hour != 1 else [])
    archive = Archive(spark, str(tmp_path))
    windows = archive.windows()
    assert [window.manifest.since for window in windows] == [DAY + HOUR * hour for hour in range(4)]

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
    for window in windows:
        if window.manifest.rows and window.manifest.since != DAY + HOUR * 2:
            folder = tmp_path / archive.folder_of(window.manifest.since, window.manifest.until).name
            folder.joinpath(window.manifest.data).rename(folder / "elsewhere")
    assert read(since=DAY + HOUR * 2, until=DAY + HOUR * 3) == ["2"]


def test_a_damaged_manifest_fails_the_read_with_its_path(spark: SparkSession, tmp_path: Path):
    finish(spark, tmp_path, DAY, NEXT_DAY, [])
    [folder] = window_folders(tmp_path)
    file = folder / "_manifest.json"
    file.write_text(file.read_text().replace('"rows": 0', '"rows": 1'))
    with pytest.raises(OutboxError, match=r"Checksum error: \S+/_manifest\.json .*is damaged"):
        read_archive(spark, str(tmp_path))
    rewrite(file, "{")
    with pytest.raises(OutboxError, match=r"_manifest\.json is not a manifest"):
        read_archive(spark, str(tmp_path))


def test_a_window_with_fewer_tasks_than_its_manifest_fails_each_read(spark: SparkSession, tmp_path: Path):
    """Spark ignores a file that is gone, and one of 0 bytes."""
    finish(spark, tmp_path, DAY, NEXT_DAY, [("a", DAY), ("b", DAY)])
    for files in ("", "rm"):
        for file in tmp_path.rglob("*.parquet"):
            rewrite(file, "")
            if files:
                file.unlink()
        with pytest.raises(OutboxError, match=r"contains 0 tasks, but its manifest has 2\. Restore its files"):
            read_archive(spark, str(tmp_path))


def test_overlapping_and_missing_windows_are_errors(spark: SparkSession, tmp_path: Path):
    """A task would be in two overlapping windows, and the tasks of a missing window would be lost without an error."""
    for hour in range(3):
        finish(spark, tmp_path, DAY + HOUR * hour, DAY + HOUR * (hour + 1), [])
    assert len(Archive(spark, str(tmp_path)).windows()) == 3
    # Two jobs with windows of different lengths.
    finish(spark, tmp_path, DAY + HOUR * 2.5, DAY + HOUR * 3, [])
    with pytest.raises(OutboxError, match=r"window=20261020T02\w+ and \S+window=20261020T0230\w+ overlap"):
        read_archive(spark, str(tmp_path))
    _, middle, _, last = window_folders(tmp_path)
    (last / "_manifest.json").unlink()
    (middle / "_manifest.json").unlink()
    with pytest.raises(OutboxError, match=r"A window between \S+T01\w+ and \S+T02"):
        Archive(spark, str(tmp_path)).windows()


def test_the_files_of_a_purge_are_written_once(spark: SparkSession, tmp_path: Path):
    finish(spark, tmp_path, DAY, NEXT_DAY, [])
    [window] = Archive(spark, str(tmp_path)).windows()
    assert not window.purged
    window.note_purged({"deleted": 3, "resent": 2, "missing": 1}, NEXT_DAY)
    window.note_purged({"deleted": 0, "resent": 0, "missing": 0}, NEXT_DAY + HOUR)
    assert window.purged
    assert purges(tmp_path) == [{"deleted": 3, "resent": 2, "missing": 1, "purged_at": shown(NEXT_DAY)}]


def test_the_checksum_differs_for_different_tasks(spark: SparkSession):
    """It depends on each column and on repeated rows, but not on the order or the partitions."""
    one, two = frame(spark, [("a", DAY)]), frame(spark, [("b", DAY)])
    same = {
        "both": archivable(one.union(two)),
        "in another order": archivable(two.union(one)),
        "in one partition": rebalanced(archivable(one.union(two))),
        "in more partitions": archivable(one.union(two)).repartition(3),
    }
    others = {column.name: archivable(one.withColumn(column.name, _other(column.name))) for column in schemas.TABLE}
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
    return values[schemas.TABLE[name].dataType.typeName()]
