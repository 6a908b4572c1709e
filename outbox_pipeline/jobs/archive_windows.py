"""The windows of an archive, and their bounds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox_pipeline.rows.texts import EPOCH

#: The version of `ArchivedWindow` in commits.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ArchivedWindow:
    """An archived window, which contains the tasks sent or cancelled from `since` on and before `until`.

    `data` is its folder, and `files` has the SHA-256 of each file. `version` is that of the log. `operation` is the ID
    of its purge, if one has begun: from then on, the files can be the only copy of the tasks.
    """

    database: str
    since: datetime
    until: datetime
    read_timestamp: datetime
    rows: int
    checksum: str | None
    data: str
    files: Mapping[str, str]
    format: int = FORMAT
    version: int = -1
    operation: str | None = None
    purged: bool = False

    @property
    def commit(self) -> str:
        return commit_name(self.version)


def commit_name(version: int) -> str:
    """Return the path of a commit in the archive."""
    return f"_delta_log/{version:020}.json"


def bounds(begin: datetime, end: datetime, seconds: float) -> Iterator[tuple[datetime, datetime]]:
    """Yield the windows from `begin` that end by `end`. Each window ends at a multiple of `seconds`."""
    length = timedelta(seconds=seconds)
    since = begin
    while (until := floor(since, length) + length) <= end:
        yield since, until
        since = until


def floor(time: datetime, length: timedelta) -> datetime:
    """Return the last multiple of `length`, counted in UTC from 1970, that is not after `time`."""
    return time - (time - EPOCH) % length
