"""What the commands write: no value makes a line of its own, controls a terminal, or breaks the stream's encoding."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.cli import main as outbox
from outbox.program.logs import JsonFormatter, TextFormatter
from outbox.program.terminal import as_json, complain, prepare_streams, say
from outbox_pipeline.cli import main as outbox_pipeline
from publishworker.process.cli import main as publishworker
from tests.support.processes import ROOT

FAKED = "orders\nok          topic invoices\r\x1b[2J\x9b2J\u202e\u2028\x85ok"
TEXT = st.text(st.characters(exclude_categories=()), max_size=30)


def written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(stream.encoding)


@settings(max_examples=30)
@given(TEXT)
def test_a_line_with_any_value_is_one_printable_line(value: str) -> None:
    stream = io.StringIO()
    say(f"ok  topic {value}", stream=stream)
    assert stream.getvalue().startswith("ok  topic ")
    assert stream.getvalue().removesuffix("\n").isprintable()


def test_no_line_of_a_message_looks_like_another_message(capsys: pytest.CaptureFixture[str]) -> None:
    complain("outbox", f"it failed:\n  the first\nthe second\t\x1b[2J{FAKED}")
    first, *others = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert first == "outbox: it failed:"
    assert others[:2] == ["  the first", r"  the second\t\x1b[2Jorders"]
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_a_stack_trace_in_a_text_log_is_indented_and_escaped() -> None:
    try:
        int(FAKED)
    except ValueError:
        record = logging.LogRecord("publishworker", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    _, *trace = TextFormatter().format(record).split("\n")
    assert trace[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") and line.isprintable() for line in trace)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_shows_what_its_encoding_does_not_have(
    encoding: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of JSON stay JSON with every character, also those of the log."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(f"sys.{name}", stream)
    prepare_streams()
    values = {"key": "Grüße 東京 🎉 \ud800"}
    record = logging.LogRecord("publishworker", logging.INFO, "", 0, values["key"], (), None)
    say(values["key"], as_json(values), stream=stream)
    print(JsonFormatter().format(record), file=stream)
    text, line, log = written(stream).splitlines()
    assert text.endswith(r"\ud800")
    assert json.loads(line) == values
    assert json.loads(log)["message"] == values["key"]


@pytest.mark.parametrize(("stdout", "why"), [("/dev/full", "No space left on device"), (None, "Bad file descriptor")])
@pytest.mark.parametrize(
    ("program", "main"), [("outbox", outbox), ("publishworker", publishworker), ("outbox-pipeline", outbox_pipeline)]
)
def test_an_output_that_cannot_be_written_is_one_sentence(  # noqa: PLR0917 - parameters and fixtures
    program: str, main: Callable[[list[str]], int], stdout: str | None, why: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The exit code is not 1, by which `outbox status` says that a limit is exceeded. None: stdout is closed."""
    monkeypatch.setattr(sys, "stdout", stdout and Path(stdout).open("w"))  # noqa: SIM115 - below
    code = main(["--version"])
    assert (code, capfd.readouterr().err) == (3, f"{program}: cannot write the output: {why}\n")
    sys.stdout.close()  # nothing is left that fails again at exit


@pytest.mark.parametrize("main", [outbox, publishworker, outbox_pipeline])
def test_a_reader_that_has_enough_causes_no_message(
    main: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is `head`, for example."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["--version"]) == 1
    assert capfd.readouterr().err == ""


def test_a_full_disk_for_all_output_has_the_same_exit_code() -> None:
    line = f"{sys.executable} -m outbox --help > /dev/full 2>&1"
    assert subprocess.run(["bash", "-c", line], cwd=ROOT, check=False, timeout=60).returncode == 3


@pytest.mark.parametrize(
    ("main", "command", "closed"),
    [(outbox, "status", "stdin"), (publishworker, "run", "stdout"), (outbox_pipeline, "drain", "stderr")],
)
def test_a_command_runs_without_one_of_its_streams(
    main: Callable[[list[str]], int], command: str, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a service manager may start it. Python has None in its place."""
    monkeypatch.setattr(sys, closed, None)
    assert main([command]) == 2
