"""Sent tasks for tests of archives, and the files of an archive on a local disk."""

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.base.times import shown
from outbox.program.settings import DatabaseSettings
from outbox_pipeline.job_settings import ArchiveSettings
from outbox_pipeline.jobs.archive.windows import read_archive
from tests.support.operations import row
from tests.support.pipeline import options

#: The day of most tests. It is older than Spanner's versions, so that its windows are read late.
DAY = datetime(2026, 10, 20, tzinfo=UTC)
NEXT_DAY = DAY + timedelta(days=1)
MICROSECOND = timedelta(microseconds=1)

#: A Spark task, by its identity in an archive.
Published = tuple[str, datetime]


def sent(id: str, at: datetime, **columns: Any) -> dict[str, Any]:
    return row(id, SentAt=at, **columns)


def settings_of(target: DatabaseSettings, archive: Path | str, **given: str) -> ArchiveSettings:
    return ArchiveSettings.read(options(target, archive=str(archive), until=shown(NEXT_DAY)) | given, {})


def sent_of(tasks: DataFrame) -> list[Published]:
    rows = tasks.where("SentAt IS NOT NULL").select("Id", f.unix_micros("SentAt")).collect()
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return sorted((id, epoch + timedelta(microseconds=micros)) for id, micros in rows)


def archived(spark: SparkSession, archive: Path) -> list[Published]:
    return sent_of(read_archive(spark, str(archive)))


def window_folders(archive: Path) -> list[Path]:
    return sorted(archive.glob("window=*"))


def data_folders(archive: Path) -> list[Path]:
    return sorted(archive.glob("window=*/run=*"))


def commits(archive: Path) -> list[dict[str, Any]]:
    """Return the details of each commit that has some, with the path of its file."""
    found = []
    for file in sorted(archive.glob("_delta_log/*.json")):
        details = json.loads(file.read_text().splitlines()[0])["commitInfo"].get("outbox")
        found += [details | {"file": file}] if details else []
    return found


def windows_of(archive: Path) -> list[dict[str, Any]]:
    return [each for each in commits(archive) if "since" in each]


def purges(archive: Path) -> list[dict[str, Any] | None]:
    """Return the first note that the purge of a window ended, if there is one, for each window."""
    notes = {each["purged"]: each for each in reversed(commits(archive)) if "purged" in each}
    return [notes.get(each["since"]) for each in windows_of(archive)]


def edit(window: dict[str, Any], **changes: Any) -> None:
    """Change the details of a window in its commit."""
    first, *others = window["file"].read_text().splitlines(keepends=True)
    commit = json.loads(first)
    commit["commitInfo"]["outbox"] |= changes
    window["file"].write_text("".join([json.dumps(commit) + "\n", *others]))


def rewrite(file: Path, text: str) -> None:
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    file.write_text(text)


def remove(file: Path) -> None:
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    file.unlink()


def first_try_fails(batches: Iterator[Any], note: Path) -> Iterator[Any]:
    """Hand on a batch, and in the first task of a stage note that and fail; its next try hands on all."""
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        yield batch
        if context.partitionId() == 0 and context.attemptNumber() == 0:
            note.touch()
            raise RuntimeError("the first try of a task fails")


def ids(letters: Iterable[Any], at: datetime) -> list[Published]:
    return sorted((str(each), at) for each in letters)
