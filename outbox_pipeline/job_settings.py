"""The settings of the jobs. Flags, environment variables, help and docs/reference/settings.md derive from them."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.base.values import DATABASE, INSTANCE, PROJECT
from outbox.errors import SettingError
from outbox.program.settings import (
    MOMENT,
    SECONDS,
    SWITCH,
    DatabaseSettings,
    SettingType,
    matching,
    metrics_setting,
    one_of,
    setting,
    whole_number,
)
from outbox_pipeline.file_names import FORMATS, format_of

_PATH = matching(r"\S(?:.*\S)?", "a path or URL that Spark can use, such as gs://bucket/folder")
#: Without the characters of a glob, because Spark would expand them.
_NO_PATTERN = r"[^\s*?\[\]{}](?:[^*?\[\]{}]*[^\s*?\[\]{}])?"
_FOLDER = matching(_NO_PATTERN, "a path or URL, without any of *?[]{}")
REJECTS = _FOLDER
_ANY_FOLDER = matching(f"(?:{_NO_PATTERN})?", f"{_FOLDER.allowed}; or nothing")
_ANY_PATH, _ANY_TABLE, _ANY_NAME = (
    matching(r"(?:\S(?:.*\S)?)?", f"{allowed}; or nothing")
    for allowed in (_PATH.allowed, "a table of Spark's catalog, such as sales.invoices", "a name")
)
_ANY_TOPIC = matching(r"\S*", "a topic, or nothing")
_ANY_MOMENT = SettingType(lambda text: MOMENT.parse(text) if text else None, f"{MOMENT.allowed}; or nothing")
RATE = whole_number(0, 10_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings(DatabaseSettings):
    """Settings of every job except `drain`, which has the RelaySettings of a worker."""

    log_format: str = setting(
        "auto", one_of("auto", "json", "text"), "Log format. auto is text on a terminal and json otherwise."
    )
    log_level: str = setting("info", one_of("debug", "info", "warning", "error"), "Min level of log lines.")
    metrics: str = metrics_setting()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterSettings(JobSettings):
    input: str = setting("", _ANY_PATH, "Input files: a path, a folder or a glob.")
    input_table: str = setting("", _ANY_TABLE, "Input table or view of Spark's catalog, instead of --input.")
    input_format: str = setting(
        "auto", one_of("auto", *FORMATS), "Input format. auto uses the file extension, json is JSON lines."
    )
    select: str = setting(
        "",
        SettingType(str, "expressions of Spark's SQL with names, separated by commas; or nothing"),
        "Spark SQL that makes the columns of the tasks from those of the input, such as customer AS ordering_key.",
    )
    multi_line: bool = setting(
        "false",
        SWITCH,
        "Values of CSV files have line breaks. One Spark task then reads a whole file, instead of a part of it.",
    )
    rejects: str = setting(None, REJECTS, "Folder for rejected rows with their reasons, as JSON lines.")
    topic: str = setting("", _ANY_TOPIC, "Topic of rows without a topic.")
    key: str = setting(
        "",
        matching(r"(?:[^,\s][^,]*(?:,[^,\s][^,]*)*)?", "names of columns, separated by commas, or nothing"),
        "Columns from which the task ID derives. If empty, the ID is the column task_id or derives from all columns.",
    )
    max_rows_per_second: int = setting("0", RATE, "Max rows per second of the whole job. 0 is no limit.")

    def __post_init__(self) -> None:
        """Check that there is one input, and its format. Raises SettingError."""
        _check_one("input", self.input, self.input_table, self.input_format)
        if self.input:
            format_of_input(self.input, self.input_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings(JobSettings):
    archive: str = setting(None, _FOLDER, "Folder of the archive.")
    window: float = setting(
        "1d",
        SettingType(lambda text: _window(SECONDS.parse(text)), "a duration from 1s to 31d, such as 15m, 1h or 1d"),
        "Length of a window. Windows start and end at multiples of this length in UTC.",
    )
    since: timedelta | datetime | None = setting(
        "", _ANY_MOMENT, "Time that the first window of a new archive contains. If empty, the SentAt of the first task."
    )
    until: timedelta | datetime = setting(
        "1m", MOMENT, "Archive the windows that end by this time, which must be at least 1 minute ago."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings(JobSettings):
    received: str = setting("", _ANY_PATH, "Files of received messages: a path, a folder or a glob.")
    received_table: str = setting(
        "", _ANY_TABLE, "Table or view of Spark's catalog with received messages, instead of --received."
    )
    received_format: str = setting(
        "auto",
        one_of("auto", "avro", "parquet", "json"),
        "Format of the files. auto uses the extension, json is JSON lines.",
    )
    received_data: str = setting(
        "base64",
        one_of("base64", "text"),
        "Encoding of the column `data`, if it contains text. Binary data needs no encoding.",
    )
    received_until: timedelta | datetime = setting(
        "0s", MOMENT, "Time of the export. The files contain the messages received until then."
    )
    archive: str = setting("", _ANY_FOLDER, "Folder of the archive, which is then read in addition to the table.")
    since: timedelta | datetime | None = setting(
        "", _ANY_MOMENT, "Start of the window, by CreatedAt. If empty, all earlier tasks are in the window."
    )
    until: timedelta | datetime | None = setting(
        "",
        _ANY_MOMENT,
        "End of the window, by CreatedAt. If empty, the latest time at which every task can be audited: --grace ago.",
    )
    grace: float = setting("10m", SECONDS, "Time that a message may take. After it, an unreceived task counts as lost.")
    inbox: str = setting("", _ANY_NAME, "Consumer whose records in ProcessedTasks are compared. If empty, none are.")
    inbox_database: str = setting(
        "",
        matching(
            rf"(?:(?:projects/{PROJECT}/instances/{INSTANCE}/databases/)?{DATABASE})?",
            "a database ID, or projects/P/instances/I/databases/D, or nothing",
        ),
        "The subscriber's database. If empty, --database.",
    )
    output: str = setting(None, _FOLDER, "Folder for the report. It must not exist.")
    certificate: str = setting(
        "", _ANY_FOLDER, "File for a certificate. In the paths of files, %Y-%m-%d is then the day of the window."
    )
    previous: str = setting("", _ANY_FOLDER, "Certificate of the window before. If empty, a new chain begins.")
    key_file: str = setting("", _ANY_FOLDER, "Local file with the Ed25519 key that signs the certificate.")
    kms_key: str = setting(
        "",
        matching(
            r"(?:projects/[^/\s]+/locations/[^/\s]+/keyRings/[^/\s]+/cryptoKeys/[^/\s]+/cryptoKeyVersions/\d+)?",
            "projects/P/locations/L/keyRings/R/cryptoKeys/K/cryptoKeyVersions/N, or nothing",
        ),
        "Version of the key in Cloud KMS that signs the certificate.",
    )

    def __post_init__(self) -> None:
        """Check settings that depend on each other. Raises SettingError."""
        _check_one("received", self.received, self.received_table, self.received_format)
        if self.inbox_database and not self.inbox:
            raise SettingError("--inbox-database needs --inbox. Pass both, or neither")
        if not self.certificate and (self.previous or self.key_file or self.kms_key):
            raise SettingError("--previous, --key-file and --kms-key need --certificate")
        if self.certificate and not (self.archive and self.received and bool(self.key_file) != bool(self.kms_key)):
            raise SettingError("--certificate needs --archive, --received, and either --key-file or --kms-key")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings(JobSettings):
    archive: str = setting(None, _FOLDER, "Folder of the archive.")
    topic: str = setting("", _ANY_TOPIC, "Only tasks with this value of Topic.")
    since: timedelta | datetime | None = setting("", _ANY_MOMENT, "Only tasks sent at or after this time.")
    until: timedelta | datetime | None = setting("", _ANY_MOMENT, "Only tasks sent before this time.")
    where: str = setting(
        "",
        SettingType(str, "an expression of Spark's SQL, or nothing"),
        "Only tasks for which this Spark SQL predicate is true.",
    )
    max_rows_per_second: int = setting("0", RATE, "Max tasks per second of the whole job. 0 is no limit.")

    def __post_init__(self) -> None:
        """Check that tasks are selected. Raises SettingError."""
        if not (self.topic or self.where) and self.since is None and self.until is None:
            raise SettingError(
                "No tasks are selected. Pass --topic, --since, --until or --where. --where true selects all tasks"
            )


def _check_one(name: str, files: str, table: str, format: str) -> None:
    """Check that either files or a table were given, and a format only for files. Raises SettingError."""
    if bool(files) == bool(table):
        raise SettingError(f"Pass --{name} for files, or --{name}-table for a table{', but not both' if files else ''}")
    if table and format != "auto":
        raise SettingError(f"--{name}-format is for files. Remove it, or pass --{name} instead of --{name}-table")


def _window(seconds: float) -> float:
    if not 1 <= seconds <= 31 * 86_400:
        raise ValueError(seconds)
    return seconds


def format_of_input(path: str, format: str) -> str:
    """Return the format of the input of `register`. Raises SettingError if it is auto and the extension is unknown."""
    found = format_of(path) if format == "auto" else format
    if found not in FORMATS:
        raise SettingError(f"--input {path}: unknown extension. Pass --input-format: {', '.join(FORMATS)}")
    return str(found)
