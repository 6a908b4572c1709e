"""The settings of the jobs. Flags, environment variables, help and docs/reference/settings.md derive from them."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.errors import SettingError
from outbox.shared.settings import DatabaseSettings, SettingType, matching, one_of, setting, whole_number
from outbox.shared.times import MOMENT, SECONDS
from publishworker.settings import RelaySettings

FORMATS = ("parquet", "json", "csv")

_PATH = matching(r"\S(?:.*\S)?", "a path or URL that Spark can use, such as gs://bucket/folder")
#: Where Spark would take the letters of a pattern for one.
_NO_PATTERN = r"[^\s*?\[\]{}](?:[^*?\[\]{}]*[^\s*?\[\]{}])?"
_FOLDER = matching(_NO_PATTERN, "a path or URL, without any of *?[]{}")
_ANY_FOLDER = matching(f"(?:{_NO_PATTERN})?", f"{_FOLDER.allowed}; or nothing")


def _or_nothing(kind: SettingType) -> SettingType:
    return SettingType(lambda text: kind.parse(text) if text else None, f"{kind.allowed}; or nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings(DatabaseSettings):
    """Settings of every job. A drain has those of RelaySettings."""

    log_format: str = setting(
        "auto", one_of("auto", "json", "text"), "How to log; auto is text on a terminal, else json."
    )
    log_level: str = setting("info", one_of("debug", "info", "warning", "error"), "What to log at least.")

    @property
    def database_settings(self) -> DatabaseSettings:
        """Return the settings that executors need."""
        return DatabaseSettings(
            project=self.project, instance=self.instance, database=self.database, database_role=self.database_role
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterSettings(JobSettings):
    """Settings of `register`."""

    input: str = setting(None, _PATH, "Files to read: a path, a folder or a glob.")
    input_format: str = setting(
        "auto", one_of("auto", *FORMATS), "Format of the files; auto goes by the ending, json is a JSON object a line."
    )
    rejects: str = setting(None, _PATH, "Folder for the rows that were refused, each with the reason, as JSON lines.")
    topic: str = setting("", matching(r"\S*", "a topic, or nothing"), "Topic of the rows that name none.")
    key: str = setting(
        "",
        matching(r"(?:[^,\s][^,]*(?:,[^,\s][^,]*)*)?", "names of columns, separated by commas, or nothing"),
        "Columns whose values make the task's id; nothing: the whole row does, or the column task_id.",
    )
    max_rows_per_second: int = setting(
        "0", whole_number(0, 10_000_000), "Register at most so many rows a second; 0 is no limit."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings(JobSettings):
    """Settings of `archive`."""

    archive: str = setting(None, _FOLDER, "Folder of the archive.")
    window: float = setting(
        "1d",
        SettingType(lambda text: _window(SECONDS.parse(text)), "a duration from 1s to 31d, such as 15m, 1h or 1d"),
        "Length of a window; its bounds are multiples of it in UTC.",
    )
    since: timedelta | datetime | None = setting(
        "",
        _or_nothing(MOMENT),
        "Where to begin while nothing is archived; nothing: at the task that was sent first.",
    )
    until: timedelta | datetime = setting(
        "1m",
        MOMENT,
        "Archive windows that end by then; at least a minute ago.",
    )


_DURATION = SettingType(SECONDS.parse, SECONDS.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings(JobSettings):
    """Settings of `audit`."""

    received: str = setting(None, _PATH, "Files of messages that subscribers received: a path, a folder or a glob.")
    received_format: str = setting(
        "auto", one_of("auto", "parquet", "json"), "Format of the files; auto goes by the ending, json is one a line."
    )
    received_data: str = setting(
        "base64", one_of("base64", "text"), "What a text in the column data is; bytes are taken as they are."
    )
    received_until: timedelta | datetime = setting(
        "0s", MOMENT, "Until when the files hold what was received: the time of the export."
    )
    tasks: str = setting("table", one_of("table", "archive", "both"), "Where the tasks are read.")
    archive: str = setting(
        "",
        _ANY_FOLDER,
        "Folder of the archive, for archive and both.",
    )
    since: timedelta | datetime | None = setting(
        "",
        _or_nothing(MOMENT),
        "Judge tasks that were created from then on; nothing: all.",
    )
    until: timedelta | datetime = setting("15m", MOMENT, "Judge tasks that were created before; at least a grace ago.")
    grace: float = setting("10m", _DURATION, "How long a message may be on its way before it is lost.")
    clock_skew: float = setting("1s", _DURATION, "How far the clocks of Spanner and Pub/Sub may be apart.")
    output: str = setting(None, _FOLDER, "Folder for the report; it must not be there yet.")
    samples: int = setting("20", whole_number(0, 1000), "Examples of each class in the report.")

    def __post_init__(self) -> None:
        """Check settings that depend on each other. Raises SettingError."""
        if (self.tasks == "table") == bool(self.archive):
            raise SettingError(
                f"--archive: {self.archive or 'nothing'!r} is not allowed with --tasks {self.tasks}: an archive is "
                "given for archive and both, and for nothing else"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSettings(RelaySettings):
    """Settings of `drain`: those of the relay, and the number of workers."""

    workers: int = setting(
        "0",
        whole_number(0, 1000),
        "Tasks of Spark that relay, never more than the table has shards; 0 is as many as Spark runs at once.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings(JobSettings):
    """Settings of `replay`."""

    archive: str = setting(
        "",
        _ANY_FOLDER,
        "Folder of the archive to replay from; nothing: from the table.",
    )
    topic: str = setting("", matching(r"\S*", "a topic, or nothing"), "Only of this topic, as rows have it.")
    since: timedelta | datetime | None = setting("", _or_nothing(MOMENT), "Only what was sent from then on.")
    until: timedelta | datetime | None = setting("", _or_nothing(MOMENT), "Only what was sent before then.")
    attribute: str = setting(
        "",
        matching(r"(?:[^=]+(?:=.*)?)?", "KEY=VALUE, or KEY for any value, or nothing"),
        "Only messages that have this attribute.",
    )
    where: str = setting(
        "",
        SettingType(str, "an expression of Spark's SQL, or nothing"),
        "Only tasks that meet a predicate over their columns.",
    )
    max_rows_per_second: int = setting(
        "0", whole_number(0, 10_000_000), "Replay at most so many tasks a second; 0 is no limit."
    )


def _window(seconds: float) -> float:
    if not 1 <= seconds <= 31 * 86_400:
        raise ValueError(seconds)
    return seconds
