"""One list of fields feeds flags, environment variables, help texts and the reference page.

A settings class is a frozen dataclass whose fields are declared with `setting`. A flag overrides its environment
variable (`OUTBOX_` and the flag's name in capitals), and the variable overrides the default. A wrong value is a
SettingError that names the flag or variable, the value, and what is allowed. Standard library only.
"""

import argparse
import dataclasses
import difflib
import ipaddress
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self

from outbox.base.values import DATABASE, INSTANCE, PROJECT, plain
from outbox.errors import SettingError
from outbox.program import terminal
from outbox.program.terminal import write

PREFIX = "OUTBOX_"
#: The variable names of all settings of all commands, without PREFIX. Each command reports a misspelled one.
NAMES = frozenset(
    """ALLOWED_HOSTS ALLOWED_TOPICS ALLOW_ACTIONS ARCHIVE BACKOFF_INITIAL BACKOFF_MAX BATCH_SIZE BIND CERTIFICATE
    COMMIT_DELAY CONCURRENCY DATABASE DATABASE_ROLE DEAD_AFTER DOCS_URL GRACE HEARTBEAT_FILE
    IAP_AUDIENCE IDENTITY_HEADER INBOX INBOX_DATABASE INPUT INPUT_FORMAT INPUT_TABLE INSTANCE KEY KEY_FILE KMS_KEY
    LOG_FORMAT LOG_LEVEL MAX_ATTEMPTS MAX_ROWS_PER_SECOND METRICS MULTI_LINE ON_ORDERING_FAILURE OUTPUT PATH_PREFIX
    POLL_INTERVAL PREVIOUS PRODUCTION PROJECT PUBSUB_ENDPOINT RECEIVED RECEIVED_DATA RECEIVED_FORMAT RECEIVED_TABLE
    RECEIVED_UNTIL REJECTS REQUEST_PRIORITY ROLES SELECT SHOW_DATA SHUTDOWN_TIMEOUT SINCE SPANNER_ENDPOINT TOPIC
    TRUSTED_PROXY UNTIL WAKE WHERE WINDOW""".split()  # noqa: SIM905 - a list would have a line for each
)
#: Kubernetes sets these in every container for a Service whose name begins with `outbox`.
_OF_KUBERNETES = re.compile(r"OUTBOX_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


@dataclasses.dataclass(frozen=True, slots=True)
class SettingType:
    """How a text becomes a value. `parse` raises ValueError, and `allowed` says in an error what is allowed.

    `pattern` is for the JSON Schema of the settings: `parse` may refuse more, for example a number out of its range.
    """

    parse: Callable[[str], Any]
    allowed: str
    choices: tuple[str, ...] = ()
    pattern: str = ""
    bounds: "Bounds | None" = None

    def value(self, text: str, source: str) -> Any:
        """Return the parsed `text`. Raises SettingError, which begins with `source`, a flag or a variable."""
        try:
            return self.parse(plain(text))
        except ValueError:
            near = did_you_mean(text, self.choices)
            raise SettingError(
                f"{source}: {text!r} is not allowed. It must be {self.allowed}{near and '.' + near}"
            ) from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'NAME'?` with the nearest known name, or an empty string.

    `topics pause` is not near `topics unset`, which would take the limits away.
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f" Did you mean {near[0]!r}?" if near else ""


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable that begins with PREFIX and is no setting of any command."""
    found = []
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and name not in NAMES and not _OF_KUBERNETES.fullmatch(variable):
            # Compared without the prefix, because the prefix alone would make short names similar.
            near = difflib.get_close_matches(name.upper(), sorted(NAMES), n=1)
            hint = f" Did you mean {PREFIX + near[0]}?" if near else ""
            found.append(f"{variable} is set, but no setting has this name.{hint}")
    return found


_WHOLE, _DECIMAL = r"[0-9]+", r"[0-9]+(\.[0-9]+)?"


def number(text: str, kind: Callable[[str], float] = float) -> float:
    """Return the number of a text. Raises ValueError, also for what only Python reads, such as 1_000."""
    if not re.fullmatch(_WHOLE if kind is int else _DECIMAL, text):
        raise ValueError(text)
    return kind(text)


class Bounds(NamedTuple):
    """Whole numbers (`int`) or numbers (`float`) from `low` to `high`."""

    kind: type
    low: float
    high: float

    def __str__(self) -> str:
        if self.kind is int:
            return f"a whole number from {self.low:,} to {self.high:,}"
        return f"a number from {self.low:,.12g} to {self.high:,.12g}"

    def contain(self, value: object) -> bool:
        """Tell whether a value is allowed. In Python, True is a number."""
        kinds = int if self.kind is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high


def bounded(bounds: Bounds, parse: Callable[[str], float], allowed: str, pattern: str = "") -> SettingType:
    """Return the type of texts that `parse` turns into a number within bounds."""

    def checked(text: str) -> float:
        if not bounds.contain(value := parse(text)):
            raise ValueError(text)
        return value

    return SettingType(checked, allowed, pattern=pattern, bounds=bounds)


def whole_number(low: int, high: int) -> SettingType:
    """Return the type of integers from `low` to `high`."""
    bounds = Bounds(int, low, high)
    return bounded(bounds, partial(number, kind=int), str(bounds), _WHOLE)


def seconds(low: float, high: float) -> SettingType:
    """Return the type of durations in seconds from `low` to `high`."""
    return bounded(Bounds(float, low, high), number, f"seconds from {low:,.12g} to {high:,.12g}", _DECIMAL)


def one_of(*choices: str) -> SettingType:
    """Return the type of texts that are one of `choices`."""
    allowed = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
    return SettingType(lambda text: choices[choices.index(text)], allowed, choices)


def matching(pattern: str, allowed: str) -> SettingType:
    """Return the type of texts that match all of `pattern`."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return SettingType(parse, allowed, pattern=pattern)


_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
#: A hundred years in seconds: no table is older, and no time before it can be out of range.
_LONGEST = 36_500 * 86_400


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([smhd])", text)
    if not match or (seconds := float(match[1]) * _UNITS[match[2]]) > _LONGEST:
        raise ValueError(text)
    return timedelta(seconds=seconds)


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) else _duration(text).total_seconds()


def _moment(text: str) -> timedelta | datetime:
    if not re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T", text):
        return _duration(text)
    value = datetime.fromisoformat(text)
    # The years at both ends have times that are none in UTC.
    if value.tzinfo is None or not 1 < value.year < 9999:
        raise ValueError(text)
    return value.astimezone(UTC)


#: 90 or 90s, 15m, 2h, 7d: becomes seconds.
SECONDS = SettingType(_seconds, "seconds, or a duration such as 90s, 15m, 2h or 7d")
#: A time, or how long ago it is.
MOMENT = SettingType(
    _moment, "how long ago, such as 90s, 15m, 2h or 7d, or a time with its offset: 2026-11-21T13:00:00Z"
)


def resolved(moment: timedelta | datetime, now: datetime) -> datetime:
    """Return the time that a value of MOMENT means at `now`."""
    return now - moment if isinstance(moment, timedelta) else moment


def setting(default: str | None, kind: SettingType, help: str, *, fallback_variable: str = "") -> Any:
    """Declare one field. `default` is written as a user would write it; None means that a value is required.

    `fallback_variable` names an environment variable that is not ours. It is read if the setting's own is not set.
    """
    return dataclasses.field(
        metadata={"default": default, "kind": kind, "help": help, "fallback_variable": fallback_variable}
    )


def argparse_type(name: str, kind: SettingType) -> Callable[[str], Any]:
    """Return argparse's `type` for a flag that is no setting, with the same sentence for a wrong value."""
    return lambda text: kind.value(text, name)


#: A switch is a flag without a value. Its variable is true or false.
SWITCH = SettingType(lambda text: ("false", "true").index(text) == 1, "true or false", pattern="true|false")
_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[^]]*)\]|(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?))(?::(?P<port>[1-9][0-9]{0,4}))?"
)


def host_and_port(address: str) -> tuple[str, int | None]:
    """Return the parts of HOST, HOST:PORT, [IPV6] or [IPV6]:PORT, without brackets. Raises ValueError."""
    match = _ADDRESS.fullmatch(address)
    if not match or int(match["port"] or 0) > 65_535:
        raise ValueError(address)
    if match["ipv6"] is not None:
        ipaddress.IPv6Address(match["ipv6"])  # raises ValueError
    return match["ipv6"] or match["name"], int(match["port"]) if match["port"] else None


def host_name(address: str) -> str:
    """Return the host of HOST or HOST:PORT as one text, whatever its case and notation. Raises ValueError."""
    host = address if address.count(":") > 1 and address[0] != "[" else host_and_port(address)[0].lower()
    return str(ipaddress.ip_address(host)) if ":" in host else host


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _endpoint(text: str) -> str:
    if text:
        host_and_port(text.removeprefix(PLAINTEXT))
    return text


def _emulator(text: str) -> str:
    if host_and_port(text)[1] is None:
        raise ValueError(text)
    return text


ENDPOINT = SettingType(
    _endpoint, "a host, or HOST:PORT, or [IPV6]:PORT, or http:// before one of these, or empty for the global endpoint"
)
#: The beginning of an endpoint that is reached without TLS and credentials.
PLAINTEXT = "http://"
_EMULATOR = SettingType(_emulator, "HOST:PORT or [IPV6]:PORT, such as 127.0.0.1:9010, without http://")


def emulator_address(variable: str) -> str | None:
    """Return the address in the variable of an emulator, or None if it is not set. Raises SettingError."""
    text = os.environ.get(variable)
    return _EMULATOR.value(text, variable) if text else None


def address_of(endpoint: str, emulator_variable: str) -> tuple[str, str | None]:
    """Return the host of an endpoint, and the host to connect to without TLS and credentials, if there is one.

    Without an endpoint, that is the emulator of the variable. Raises SettingError.
    """
    host = endpoint.removeprefix(PLAINTEXT)
    if endpoint:
        return host, host if endpoint.startswith(PLAINTEXT) else None
    return "", emulator_address(emulator_variable)


PROJECT_ID = matching(PROJECT, "a Google Cloud project ID, in lower case")
INSTANCE_ID = matching(INSTANCE, "2 to 64 characters of a-z, 0-9 and -, beginning with a letter")
DATABASE_ID = matching(DATABASE, "2 to 30 characters of a-z, 0-9, - and _, beginning with a letter")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The base class of all settings classes."""

    @classmethod
    def add_flags(cls, parser: argparse._ActionsContainer) -> None:
        """Give `parser` one flag per field."""
        for field in fields_of(cls):
            variables = f"env {field.variable}" + (f" or {field.fallback_variable}" if field.fallback_variable else "")
            default = "required" if field.default is None else f"default {field.default or 'empty'}"
            # A percent sign in a help text is argparse's own format.
            text = f"{field.help} Allowed: {field.kind.allowed} ({variables}; {default}).".replace("%", "%%")
            form: dict[str, Any] = {"metavar": field.name.split("_")[-1].upper()}
            if field.kind is SWITCH:
                form = {"action": "store_const", "const": "true"}
            parser.add_argument(field.flag, dest=field.name, help=text, **form)

    @classmethod
    def read(cls, flags: Mapping[str, str | None], environment: Mapping[str, str] = os.environ) -> Self:
        """Return the settings from `flags` (None: not passed) and `environment`. Raises SettingError."""
        given = {field: field.given(flags.get(field.name), environment) for field in fields_of(cls)}
        texts = ((field, source, text) for field, (source, text) in given.items() if text is not None)
        values = {field.name: field.kind.value(text, source) for field, source, text in texts}
        if missing := [field for field in given if field.name not in values]:
            names = " and ".join(field.flag for field in missing)
            variables = " and ".join(field.variable for field in missing)
            raise SettingError(f"Pass {names}, or set {variables}")
        try:
            return cls(**values)
        except SettingError as error:  # it names flags, but some values are of variables
            sources = {field.flag: source for field, (source, _) in given.items() if " " not in source}
            text = re.sub(r"--[a-z][a-z-]*", lambda found: sources.get(found[0], found[0]), str(error))
            raise SettingError(text) from None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSettings(Settings):
    """Which database; every command that reads the table has these."""

    project: str = setting(
        None,
        PROJECT_ID,
        "Project of the database, and of topics that name no project.",
        fallback_variable="GOOGLE_CLOUD_PROJECT",
    )
    instance: str = setting(None, INSTANCE_ID, "Spanner instance.")
    database: str = setting(None, DATABASE_ID, "Spanner database.")
    database_role: str = setting(
        "",
        matching(r"(?:[A-Za-z][A-Za-z0-9_]{0,127})?", "a database role, or nothing"),
        "Database role (fine-grained access control) to use; see schema/roles.sql.",
    )
    spanner_endpoint: str = setting(
        "",
        ENDPOINT,
        "Spanner's endpoint, for example a private one. It overrides SPANNER_EMULATOR_HOST. http:// means without TLS "
        "and credentials, for example for Spanner Omni.",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PubSubSettings(DatabaseSettings):
    """Which database, and where Pub/Sub is."""

    pubsub_endpoint: str = setting(
        "",
        ENDPOINT,
        "Pub/Sub's endpoint, such as europe-west1-pubsub.googleapis.com. Ordering keys need an endpoint of one region.",
    )


def metrics_setting() -> Any:
    """Declare the field `metrics` of a process that sends metrics."""
    return setting(
        "datadog",
        one_of("datadog", "opentelemetry", "none"),
        "Where metrics go: to a DogStatsD agent if DD_AGENT_HOST is set, to OTEL_EXPORTER_OTLP_ENDPOINT, or nowhere.",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting as users see it."""

    name: str
    default: str | None
    kind: SettingType
    help: str
    fallback_variable: str

    @property
    def flag(self) -> str:
        """Return `--batch-size` for `batch_size`."""
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        """Return `OUTBOX_BATCH_SIZE` for `batch_size`."""
        return PREFIX + self.name.upper()

    def given(self, flag: str | None, environment: Mapping[str, str]) -> tuple[str, str | None]:
        """Return the source and the text of the value: the flag, a variable, or the default, which can be None."""
        variables = filter(None, (self.variable, self.fallback_variable))
        for name, text in ((self.flag, flag), *((each, environment.get(each)) for each in variables)):
            if text is not None:
                return name, text
        return f"the default of {self.flag}", self.default


def fields_of(settings: type) -> Iterator[Field]:
    """Yield the settings of a settings class in their order."""
    for field in dataclasses.fields(settings):
        yield Field(field.name, **field.metadata)


def flag_of(name: str) -> str:
    """Return `--batch-size` for `batch_size`."""
    return f"--{name.replace('_', '-')}"


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Fits the paragraphs of a description into the width."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Return a description. An example is indented, and keeps its lines."""
        paragraphs = (
            each if each.startswith(" ") else textwrap.fill(each, width, break_on_hyphens=False)
            for each in text.split("\n\n")
        )
        return super()._fill_text("\n\n".join(paragraphs), width, indent)


class Parser(argparse.ArgumentParser):
    """Accepts only whole flags, and suggests the nearest name for a misspelled one or a command (SettingError)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, "formatter_class": Formatter, **options})
        # Like -5, -5m is a value and no flag. So the flag before it says what is allowed.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as ArgumentParser does, but refuse unknown arguments here, where the flags of the command are known."""
        self._words = list(sys.argv[1:] if args is None else args)
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise SettingError(self._unknown(unknown))
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Write the usage and a message, and exit. If messages are log lines, raise SettingError instead."""
        if terminal.as_log_line:
            raise SettingError(f"{message}. See `{self.prog} --help`")
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse drops the error of a stream that cannot be written.
        write(message, file or sys.stderr)

    def _unknown(self, arguments: Sequence[str]) -> str:
        flag = next((each.partition("=")[0] for each in arguments if each.startswith("-")), None)
        if flag is None:
            return f"unexpected argument {arguments[0]!r}. See `{self.prog} --help`"
        near = did_you_mean(flag, self._option_string_actions)
        return f"unknown flag {flag!r}.{near} `{self.prog} --help` lists the flags"

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Before Python 3.13, argparse takes the value of --flag=-- for the end of the flags.
        if action.option_strings and arg_strings == ["--"]:
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # From Python 3.14, argparse can suggest names itself (`suggest_on_error`).
        if isinstance(action.choices, dict) and value not in action.choices:
            # A flag that is unknown to argparse has no value, so its value is taken for the command.
            before = [each for each in self._words[: self._words.index(value)] if each.startswith("-")]
            if unknown := [flag for flag in before if flag.partition("=")[0] not in self._option_string_actions]:
                raise SettingError(self._unknown(unknown))
            inner = {
                f"{name} {value}"
                for name, parser in action.choices.items()
                for each in parser._actions  # noqa: SLF001 - argparse has no public list
                if isinstance(each.choices, dict) and value in each.choices
            }
            near = f" Did you mean {inner.pop()!r}?" if inner else did_you_mean(value, action.choices)
            noun = str(action.metavar).lower()
            raise SettingError(f"unknown {noun} {value!r}.{near} `{self.prog} --help` lists the {noun}s")
        super()._check_value(action, value)
