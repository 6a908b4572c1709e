"""Settings from flags, environment and defaults; durations and times; and the sentence for a wrong value."""

import argparse
import enum
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.base.values import shown, spoken
from outbox.errors import SettingError
from outbox.program.settings import MOMENT, NAMES, SECONDS, fields_of, resolved, unknown_variables
from outbox_admin.web.console_settings import ConsoleSettings
from outbox_pipeline import job_settings
from publishworker.process.worker_settings import WorkerSettings, add_deadline

NEEDED = {"project": "shop", "instance": "main", "database": "orders"}


def read(environment: dict[str, str] | None = None, **flags: str) -> WorkerSettings:
    return WorkerSettings.read({**NEEDED, **flags}, environment or {})


def test_a_flag_overrides_its_variable_which_overrides_the_default() -> None:
    assert read({"OUTBOX_BATCH_SIZE": "7"}).batch_size == 7
    assert read({"OUTBOX_BATCH_SIZE": "7"}, batch_size="8").batch_size == 8
    needed = {"instance": "main", "database": "orders"}
    assert WorkerSettings.read(needed, {"GOOGLE_CLOUD_PROJECT": "g"}).project == "g"
    assert WorkerSettings.read(needed, {"GOOGLE_CLOUD_PROJECT": "g", "OUTBOX_PROJECT": "o"}).project == "o"
    assert {field.name for field in fields_of(WorkerSettings) if field.fallback_variable} == {"project"}


def test_all_settings_that_are_missing_are_named_at_once() -> None:
    with pytest.raises(SettingError, match=r"^Pass --instance and --database, or set OUTBOX_INSTANCE and OUTBOX_DATAB"):
        WorkerSettings.read({"project": "my-project"}, {})


def test_a_member_of_an_enumeration_becomes_plain_text() -> None:
    """Its format is that of its name."""
    name = enum.Enum("Name", {"DATABASE": "orders"}, type=str).DATABASE
    assert type(read(database=name.value).database) is type(read(database=name).database) is str  # type: ignore[arg-type]  # on purpose


#: By the flag: the allowed values, values beyond them, and the boundaries inside.
VALUES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "batch_size": ("a whole number from 1 to 1,000", ("0", "1001", "ten", "\uff11", "1_0", "+1", " 1"), ("1", "1000")),
    "concurrency": ("a whole number from 1 to 100", ("-1",), ("1", "100")),
    "poll_interval": ("seconds from 0.05 to 30", ("31", "inf", "nan", "\uff15", "+1", "1e1", ".1"), ("0.05", "30")),
    "log_format": ("auto, json or text", ("xml",), ()),
    # A worker with a project that topics do not allow would make all of its tasks dead.
    "project": (
        "a Google Cloud project ID, in lower case",
        ("", "-p", "a/b", "My-project", "p" * 101),
        ("p", "p2", "7", "my_project", "example.com:shop", "123456789012"),
    ),
    "database": ("2 to 30 characters of a-z", ("Orders!", "d" * 31), ()),
    "instance": ("2 to 64 characters of a-z", ("a",), ()),
    "heartbeat_file": ("a path", ("",), ()),
    # It is no address of a page, and has no path.
    "pubsub_endpoint": (
        "a host, or HOST:PORT",
        (
            "https://pubsub.example", "pubsub.example/", "two words", "host:port", ":443", "host:0", "host:65536",
            "::1", "::1:443", "[::1", "[host]:1",
        ),
        (),
    ),
    "allowed_topics": (
        "comma-separated patterns of topics, in which * is any text",
        (
            "", ",", "a,", ",a", "a,,b", "a b", "a, b", " a", "a\n", "projects/x", "projects/x/topics/",
            "projects//topics/x", "x/topics/y", "/x", "x/", "a|b", "[a]", "a?", "ümlaut", "a,projects/x",
            "projects/x/topics/y/z", "projects/x/y/z",
        ),
        ("*", "orders,in*,projects/my-shop.1:x_y/topics/*", "projects/*/topics/a%20b~c+d._-"),
    ),
    "backoff_initial": ("seconds from 0.05 to 3,600", ("0.049", "3601", "0", "-1", "nan"), ("0.05", "3600")),
    "backoff_max": ("seconds from 0.05 to 604,800", ("0.049", "604801", "inf", "1h", ""), ("1", "604800")),
    "max_attempts": ("a whole number from 1 to 1,000,000", ("0", "1000001", "-1", "1.5"), ("1", "1000000")),
    "commit_delay": ("seconds from 0 to 0.5", ("0.51", "-1", "50ms"), ("0", "0.5")),
    "dead_after": ("seconds from 0 to 31,536,000", ("-0.1", "31536001", "nan", "never"), ("0", "31536000")),
}  # fmt: skip


@pytest.mark.parametrize("flag", VALUES)
def test_a_wrong_value_names_the_flag_and_the_allowed_values(flag: str) -> None:
    allowed, wrong, right = VALUES[flag]
    name, variable = "--" + flag.replace("_", "-"), f"OUTBOX_{flag.upper()}"
    needed = {key: text for key, text in NEEDED.items() if key != flag}
    for value in wrong:
        with pytest.raises(SettingError) as from_flag:
            read(**{flag: value})
        assert str(from_flag.value).startswith(f"{name}: {value!r} is not allowed. It must be {allowed}")
        with pytest.raises(SettingError) as from_environment:
            WorkerSettings.read(needed, {variable: value})
        assert str(from_environment.value).startswith(f"{variable}: {value!r} is not allowed")
    for value in right:
        expected = value if flag in ("allowed_topics", "project") else float(value)
        assert getattr(read(**{flag: value}), flag) == expected
        assert getattr(WorkerSettings.read(needed, {variable: value}), flag) == expected


def test_a_variable_that_no_setting_knows_is_reported_with_the_nearest_name() -> None:
    unknown = ("OUTBOX_CONCURENCY", "OUTBOX_ZZZ", "OUTBOX_batch_size")
    # Kubernetes sets the last four for Services called `outbox` and `outbox-worker`.
    known = (
        "OUTBOX_BATCH_SIZE", "OUTBOX_ROLES", "CONCURENCY", "OUTBOX_PORT", "OUTBOX_WORKER_SERVICE_HOST",
        "OUTBOX_SERVICE_PORT_HTTP", "OUTBOX_PORT_443_TCP_ADDR",
    )  # fmt: skip
    assert unknown_variables(dict.fromkeys((*unknown, *known), "1")) == [
        "OUTBOX_CONCURENCY is set, but no setting has this name. Did you mean OUTBOX_CONCURRENCY?",
        "OUTBOX_ZZZ is set, but no setting has this name.",
        "OUTBOX_batch_size is set, but no setting has this name. Did you mean OUTBOX_BATCH_SIZE?",
    ]


def test_the_known_variables_are_those_of_all_settings() -> None:
    classes = (
        WorkerSettings, ConsoleSettings, job_settings.RegisterSettings, job_settings.ArchiveSettings,
        job_settings.AuditSettings, job_settings.ReplaySettings,
    )  # fmt: skip
    assert {field.name.upper() for each in classes for field in fields_of(each)} == NAMES


def test_the_deadline_is_a_flag_but_not_a_setting() -> None:
    parser = argparse.ArgumentParser()
    add_deadline(parser)
    texts = ("0", "0.5", "1000000000")
    assert [parser.parse_args(["--deadline", text]).deadline for text in texts] == [0, 0.5, 1e9]
    assert parser.parse_args([]).deadline is None
    for text in ("-1", "1000000001", "nan", "soon"):
        with pytest.raises(SettingError) as caught:
            parser.parse_args(["--deadline", text])
        allowed = "seconds from 0 to 1,000,000,000"
        assert str(caught.value) == f"--deadline: {text!r} is not allowed. It must be {allowed}"
    help_text = " ".join(parser.format_help().split())
    assert "--deadline SECONDS Stop after this time with exit code 4 (default: never)." in help_text


def test_an_initial_backoff_above_the_max_is_refused() -> None:
    with pytest.raises(SettingError, match=r"--backoff-initial is 10\. .* --backoff-max, which is 5\. Pass both"):
        read(backoff_initial="10", backoff_max="5")
    with pytest.raises(SettingError, match=r"--backoff-initial is 1\. .* --backoff-max, which is 0\.5\. Pass both"):
        read(backoff_max="0.5")  # the default of the other one is too large
    assert read(backoff_initial="5", backoff_max="5").backoff_max == 5


NOW = datetime(2026, 11, 21, 13, tzinfo=UTC)
#: In seconds. SECONDS and MOMENT read these alike.
DURATIONS = {
    "90s": 90, "15m": 900, "2h": 7_200, "7d": 604_800, "0s": 0, "0d": 0, "007m": 420, "0.5m": 30, "1.25d": 108_000,
    "0.000001s": 0.000001, "36500d": 3_153_600_000, "876000h": 3_153_600_000,
}  # fmt: skip
#: SECONDS and MOMENT refuse these alike.
NO_DURATIONS = (
    "", " ", "s", "m", "5S", "5 s", " 5s", "5s ", "5s\n", "-5s", "+5s", "1e3s", ".5s", "5.s", "5,5s", "1m1s", "5w",
    "five", "nan", "inf", "infs", "0x10s", "1_000s", "36501d", "36500.1d", "876001h", "3153600001s", "9" * 15 + "d",
    "9" * 15 + "s", "9" * 16 + "s", "9" * 5_000 + "s", "0.1234567891s", "5s5", "\ud8005s", "5\x00s",
    "\uff11h", "\u0669\u0660s",
)  # fmt: skip
#: MOMENT reads these, to the microsecond: more digits are cut.
TIMES = {
    "2026-11-21T13:00:00Z": NOW,
    "2026-11-21T13:00:00.000000Z": NOW,
    "2026-11-21T14:00:00+01:00": NOW,
    "2026-11-21T02:30:00-10:30": NOW,
    "2026-11-21T13:00:00-00:00": NOW,
    "2026-11-21T13:00Z": NOW,
    "2026-11-21T13:00:00.123456Z": NOW + timedelta(microseconds=123_456),
    "2026-11-21T13:00:00.123456999Z": NOW + timedelta(microseconds=123_456),
    "0002-01-01T00:00:00+23:59": datetime(1, 12, 31, 0, 1, tzinfo=UTC),
    "9998-12-31T23:59:59-23:59": datetime(9999, 1, 1, 23, 58, 59, tzinfo=UTC),
}
#: Without an offset, in another form, or at times that are outside of the years 1 to 9999 in UTC.
NO_TIMES = (
    "2026-11-21T13:00:00", "2026-11-21", "2026-11-21 13:00:00Z", "2026-11-21T", "2026-11-21T13:00:00z",
    "2026-11-21T13:00:00Z\n", " 2026-11-21T13:00:00Z", "2026-11-21T13:00:00+24:00", "2026-11-21T24:00:01Z",
    "2026-02-30T00:00:00Z", "2026-13-01T00:00:00Z", "0000-01-01T00:00:00Z", "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+23:59", "9999-12-31T00:00:00Z", "9999-12-31T23:59:59-23:59", "10000-01-01T00:00:00Z",
    "-2026-11-21T13:00:00Z", "2026-11-21T13:00:00Z tomorrow", "\u0662\u0660\u0662\u0666-11-21T13:00:00Z", "now",
)  # fmt: skip
SPOKEN = {
    -5: "0.0s", 0: "0.0s", 0.04: "0.0s", 0.44: "0.4s", 9.94: "9.9s", 10: "10s", 59.4: "59s", 59.6: "1m", 60: "1m",
    904: "15m 4s", 3_599.6: "1h", 3_600: "1h", 3_605: "1h", 3_660: "1h 1m", 36_000: "10h", 86_399: "23h 59m",
    86_399.6: "1d", 2 * 86_400 + 3 * 3_600 + 59: "2d 3h", 2 * 86_400 + 59: "2d", 100 * 86_400: "100d",
    36_500 * 86_400: "36500d",
}  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), DURATIONS.items())
def test_a_duration_has_one_unit(text: str, seconds: float):
    assert MOMENT.parse(text) == timedelta(seconds=seconds)
    assert SECONDS.parse(text) == seconds


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("0", 0.0), ("1.5", 1.5), ("999999999", 999_999_999.0)])
def test_seconds_need_no_unit(text: str, seconds: float):
    """A number alone is seconds. A time ago needs a unit, because it would be too easy to forget."""
    assert SECONDS.parse(text) == seconds
    with pytest.raises(ValueError, match=text):
        MOMENT.parse(text)


@pytest.mark.parametrize(("text", "time"), TIMES.items())
def test_a_time_has_an_offset(text: str, time: datetime):
    value = MOMENT.parse(text)
    assert value == time
    assert value.tzinfo is UTC


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((kind, text) for kind in (MOMENT, SECONDS) for text in NO_DURATIONS),
        *((SECONDS, text) for text in ("9999999999", "-1", "+1", "1e5", "1.", ".5", "1 ", "1\n", *TIMES)),
        *((MOMENT, text) for text in NO_TIMES),
    ],
)
def test_an_invalid_duration_or_time_is_a_value_error(kind: type, text: str):
    """Nothing else is raised, so the user gets the sentence of a wrong value."""
    with pytest.raises(ValueError):  # noqa: PT011 - the sentence is that of the kind
        kind.parse(text)


@given(
    st.datetimes(datetime(2, 1, 2), datetime(9998, 12, 30)),  # noqa: DTZ001 - the offset is drawn
    st.integers(-14 * 60, 14 * 60),
)
def test_a_printed_time_can_be_read_back(naive: datetime, minutes: int):
    """`--until` of the printed command is the same time: to the microsecond, from any offset, with a Z."""
    time = naive.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    text = shown(time)
    assert text.endswith("Z")
    assert len(text) == len("2026-11-21T13:00:00.000000Z")
    assert resolved(MOMENT.parse(text), NOW) == MOMENT.parse(text) == time


@pytest.mark.parametrize(("seconds", "text"), SPOKEN.items())
def test_a_duration_is_printed_in_its_two_largest_units(seconds: float, text: str):
    assert spoken(seconds) == text
