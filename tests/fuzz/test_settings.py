"""Command lines: run, or refused in a sentence."""

import contextlib
import functools
import io
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import cli
from outbox.errors import NotReached
from outbox_pipeline import cli as pipeline
from publishworker.process import cli as worker
from tests.fuzz.conftest import Check

numbers = (
    st.integers().map(str) | st.floats().map(str) | st.integers(0, 10**6).map(str)
    | st.sampled_from(["1e3", "1_000", "٣", " 5 ", "0x10", "9" * 5000, "-0", "1.", "nan", "inf"])
)  # fmt: skip
texts = (
    numbers | st.text(max_size=20) | st.from_regex(r"[a-z][a-z0-9-]{0,40}", fullmatch=True)
    | st.sampled_from(["", "\n", "a\n", "shop\n", "*", "a,b", ",", "debug", "json", "skip", "/tmp/x", "x" * 300])
)  # fmt: skip


words = st.sampled_from(
    [
        "run", "drain", "check", "schema", "print", "apply", "status", "list", "show", "tail", "retry", "purge",
        "cancel", "topics", "pause", "resume", "set", "unset", "emulators", "register", "archive", "audit", "replay",
        "--project", "my-project", "--instance", "main", "--database", "shop", "--state", "dead", "--topic", "orders",
        "--since", "1h", "--until", "2026-01-01T00:00:00Z", "--limit", "5", "--json", "--ids-file", "--reason", "--yes",
        "--rate", "--route", "--in-flight", "--deadline", "--batch-size", "--version", "-h", "--help", "--", "-",
        "--where", "true", "--received", "--archive", "--window", "1d", "--purge", "--dry-run",
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
def test_a_command_line_is_run_or_refused_in_a_sentence(check: Check) -> None:
    """Of all three commands; never a stack trace."""
    check(_called, 100, 6_000)
