"""Settings and command lines: a value that is kept, or a sentence that names the culprit."""

import contextlib
import functools
import io
import math
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import cli
from outbox.errors import NotReached, SettingError
from outbox.program.settings import Field, fields_of
from outbox_pipeline import cli as pipeline
from publishworker.process import cli as worker
from publishworker.process.settings import WorkerSettings
from tests.fuzz.conftest import Fuzz

FIELDS = {field.name: field for field in fields_of(WorkerSettings)}
GOOD = {"project": "my-project", "instance": "main", "database": "shop"}
numbers = (
    st.integers().map(str) | st.floats().map(str) | st.integers(0, 10**6).map(str)
    | st.sampled_from(["1e3", "1_000", "٣", " 5 ", "0x10", "9" * 5000, "-0", "1.", "nan", "inf"])
)  # fmt: skip
texts = (
    numbers | st.text(max_size=20) | st.from_regex(r"[a-z][a-z0-9-]{0,40}", fullmatch=True)
    | st.sampled_from(["", "\n", "a\n", "shop\n", "*", "a,b", ",", "debug", "json", "skip", "/tmp/x", "x" * 300])
)  # fmt: skip


@given(name=st.sampled_from(sorted(FIELDS)), text=texts, by_flag=st.booleans())
def _read(name: str, text: str, by_flag: bool) -> None:
    field: Field = FIELDS[name]
    others = {flag: value for flag, value in GOOD.items() if flag != name}
    try:
        if by_flag:
            settings = WorkerSettings.read({**others, name: text}, {})
        else:
            settings = WorkerSettings.read(others, {field.variable: text})
    except SettingError as error:
        named = str(error)
        assert named.startswith((field.flag, field.variable, "--backoff-initial", "--backoff-max"))
        assert "not allowed. It must" in named
        return
    value = getattr(settings, name)
    assert value == type(value)(text)
    assert isinstance(value, str) or math.isfinite(value)


def test_a_setting_has_the_given_value_or_is_refused_by_name(fuzz: Fuzz) -> None:
    fuzz(_read, 250, 30_000)


words = st.sampled_from(
    [
        "run", "drain", "check", "schema", "print", "apply", "status", "list", "show", "tail", "retry", "purge",
        "cancel", "topics", "pause", "resume", "limit", "emulators", "register", "archive", "audit", "replay",
        "--project", "my-project", "--instance", "main", "--database", "shop", "--state", "dead", "--topic", "orders",
        "--since", "1h", "--until", "2026-01-01T00:00:00Z", "--limit", "5", "--json", "--ids-file", "--reason", "--yes",
        "--rate", "--in-flight", "--deadline", "--batch-size", "--version", "-h", "--help", "--", "-",
        "--where", "true", "--attribute", "a=b", "--received", "--archive", "--window", "1d", "--purge", "--dry-run",
        "--resume", "--key",
    ]
) | texts  # fmt: skip


@given(arguments=st.lists(words.filter(lambda word: "\x00" not in word), max_size=7))
def _called(arguments: list[str]) -> None:
    for main, name in ((cli.main, "outbox"), (worker.main, "publishworker"), (pipeline.main, "outbox-pipeline")):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("sys.stdin", io.StringIO()):
            try:
                code: Any = main(arguments)
            except SystemExit as end:  # argparse
                code = end.code
        assert code in {0, 1, 2, 3, 4, None}, arguments
        assert "Traceback" not in err.getvalue()
        if code:
            assert name in err.getvalue()


@pytest.fixture
def _nothing_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No command reaches a database, starts an emulator or Spark, or finds a file."""
    monkeypatch.chdir(tmp_path)
    for place in (
        "google.cloud.spanner.Client", "outbox.devtools.emulators.running",
        "outbox_pipeline.spark.session.check_packages",
    ):  # fmt: skip
        monkeypatch.setattr(place, mock.Mock(side_effect=NotReached("nothing is there")))
    for main in (cli, worker, pipeline):  # creating parsers would take most of the time
        monkeypatch.setattr(main, "_parser", functools.cache(main._parser))


@pytest.mark.usefixtures("_nothing_is_there")
def test_a_command_line_is_run_or_refused_in_a_sentence(fuzz: Fuzz) -> None:
    """Of all three commands; never a stack trace."""
    fuzz(_called, 100, 6_000)
