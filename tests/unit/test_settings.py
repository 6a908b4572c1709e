"""Settings from flags, environment and defaults, and the sentence for a wrong value."""

import argparse
import enum

import pytest

from outbox.console.command import ConsoleSettings
from outbox.errors import SettingError
from outbox.program.settings import NAMES, fields_of, unknown_variables
from outbox_pipeline import job_settings as pipeline
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
        "a Google Cloud project ID",
        ("", "-p", "a/b", "p" * 101),
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
        WorkerSettings, ConsoleSettings, pipeline.RegisterSettings, pipeline.ArchiveSettings, pipeline.AuditSettings,
        pipeline.ReplaySettings,
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
