"""What commands write: no value of a row or a log line harms a terminal, a program, or the stream's encoding."""

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outbox.program.logs import JsonFormatter, TextFormatter
from outbox.program.terminal import as_json, cell, complain, prepare_streams, say, table
from outbox_admin.cli import main as outbox
from outbox_admin.tasks import message_text, task_commands
from outbox_pipeline.cli import main as outbox_pipeline
from publishworker.process.cli import main as publishworker

TIME = datetime(2026, 11, 21, 13, 0, 0, 5, tzinfo=UTC)
#: Control codes of both sets, format characters, separators, unassigned and lone surrogates among all others.
TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
CONTROLS = "\x00\x07\x08\n\r\t\x1b[31m\x7f\x80\x85\x9b31m\xad\u200b\u200d\u200e\u202e\u2028\u2029\u2066\ufeff\U000e0001"


def harmless(text: str) -> bool:
    """Whether a terminal shows each character of `text` and obeys none: no control, format or separator character."""
    return all(each == " " or unicodedata.category(each)[0] not in "CZ" for each in text)


def columns(text: str) -> int:
    """Return how many columns of a terminal `text` takes."""
    return sum(
        0 if unicodedata.category(each) in {"Mn", "Me"} else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        for each in text
    )


def test_a_cell_is_readable():
    """NULL is empty, numbers have thousands separators, times are in UTC, unprintable text is escaped as in Python."""
    cells = {
        None: "", 0: "0", -1_234_567: "-1,234,567", 2**63 - 1: "9,223,372,036,854,775,807", True: "True", 1.5: "1.5",
        TIME: "2026-11-21T13:00:00.000005Z", "\x1b": r"\x1b", "\\": "\\", "Grüße, 東京 🎉": "Grüße, 東京 🎉",
        "a\nb\r\tc": r"a\nb\r\tc", "\x1b[2J": r"\x1b[2J", "": "", "\x9b2J": r"\x9b2J", "a\xa0b": r"a\xa0b",
        "txt\u202egpj": r"txt\u202egpj", "\U000e0001": r"\U000e0001", "\ud800": r"\ud800",
    }  # fmt: skip
    assert {value: cell(value) for value in cells} == cells
    assert cell(TIME.astimezone(timezone(timedelta(hours=2)))) == cells[TIME]


@pytest.mark.parametrize(
    ("terminal", "variables", "colored"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_dead_and_retrying_tasks_are_colored(
    terminal: bool, variables: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
):
    """Only on a terminal without NO_COLOR; the columns are as wide as without colors."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    heads, rows = ("STATE", "DEAD", "TOPIC"), [("dead", 7, "x"), ("retrying", 0, "dead")]
    plain = table(heads, rows)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    text = table(heads, rows)
    header = table(("N", "LONG"), [(1, "a longer text")]).split("\n")[0]
    assert re.sub(r"\x1b\[\d+m", "", text) == plain
    assert (text != plain) == colored
    if colored:
        assert header == "\x1b[1mN\x1b[0m  \x1b[1mLONG\x1b[0m"
        assert text.split("\n")[1:] == [
            "\x1b[31mdead    \x1b[0m  \x1b[31m   7\x1b[0m  x",
            "\x1b[33mretrying\x1b[0m     0  dead",
        ]


@given(st.lists(st.tuples(TEXT, st.integers(), st.one_of(st.none(), st.integers(), TEXT)), max_size=5))
@example([(CONTROLS, 1, None)])
@example([("\u302a", 1, None)])
def test_a_table_has_a_line_for_each_row_and_straight_columns(rows: list[tuple[Any, ...]]):
    lines = table(("TEXT", "NUMBER", "ANY"), rows).split("\n")
    assert len(lines) == 1 + len(rows)
    assert all(harmless(line) for line in lines)
    width = max([4, *(columns(cell(text)) for text, _, _ in rows)])
    rest = 2 + max([6, *(len(cell(number)) for _, number, _ in rows)])
    for line, (text, number, _) in zip(lines[1:], rows, strict=True):
        assert line.startswith(cell(text) + " " * (width - columns(cell(text))) + cell(number).rjust(rest))


@pytest.mark.parametrize(
    ("data", "kind", "shown"),
    [
        (b'{"b": [1, "x"], "a": null}', "JSON", '{\n  "b": [\n    1,\n    "x"\n  ],\n  "a": null\n}'),
        (b"7", "JSON", "7"), (b' "a"\n', "JSON", '"a"'), ('"Grüße"'.encode(), "JSON", '"Grüße"'),
        (rb'"\u001b[2J\u009b"', "JSON", r'"\u001b[2J\x9b"'), (rb'"\ud800"', "JSON", r'"\ud800"'),
        (b"9" * 5_000, "text", "9" * 5_000), (b'{"a":1.10,"a": -1E+400}', "JSON", '{\n  "a": 1.10,\n  "a": -1E+400\n}'),
        (rb'[{ }, [], "\u00fc\"{,"]', "JSON", '[\n  {},\n  [],\n  "ü\\"{,"\n]'),
        (b"{not JSON}", "text", "{not JSON}"), (b"a\r\nb\n\n\tc", "text", "a\nb\n\n        c"),
        ("Grüße 🎉".encode(), "text", "Grüße 🎉"), ("👨\u200d👩".encode(), "text", r"👨\u200d👩"),
        ("a\xa0b\u202ec".encode(), "text", r"a\xa0b\u202ec"), (b"[" * 60_000, "text", "[" * 60_000),
        (b"a\x00b", "hex", "61 00 62"), (b"\x1b[2J", "hex", "1b 5b 32 4a"), ("\x9b2J".encode(), "hex", "c2 9b 32 4a"),
        (b"\xff\xfe", "hex", "ff fe"), (b"a\xc3", "hex", "61 c3"), (b"\xed\xa0\x80", "hex", "ed a0 80"),
        (bytes(33), "hex", " ".join(["00"] * 32) + "\n00"),
    ],
)  # fmt: skip
def test_data_is_shown_as_json_text_or_hex(data: bytes, kind: str, shown: str):
    """JSON is indented with its numbers as written, and other text keeps its lines.

    Bytes that are no text or hold control codes are hex.
    """
    assert message_text.readable(data) == (kind, shown.split("\n"), 0)


@pytest.mark.parametrize(
    "text",
    ["[" * 900 + "1," * 31_000 + "1" + "]" * 900, '{"a":' * 900 + "[" + "[],{}," * 9_000 + "1]" + "}" * 900],
    ids=["lists", "objects"],
)
def test_of_json_that_is_nested_deeply_only_the_first_levels_are_indented(text: str):
    """65 kB with 900 levels would be lines of 58 MB."""
    kind, lines, _ = message_text.readable(text.encode())
    assert kind == "JSON"
    assert "".join(lines).replace(" ", "") == text
    assert max(len(line) - len(line.lstrip()) for line in lines) == 2 * message_text.MAX_LEVELS


@given(st.binary(max_size=80) | TEXT.map(lambda text: text.encode(errors="surrogatepass")))
def test_no_control_code_of_data_reaches_the_terminal(data: bytes):
    """Whatever was published."""
    kind, lines, _ = message_text.readable(data)
    assert kind in ("JSON", "text", "hex")
    assert all(harmless(line) for line in lines)


@pytest.mark.parametrize("before", range(4))
def test_text_that_is_cut_inside_a_character_stays_text(before: int, monkeypatch: pytest.MonkeyPatch):
    """The limit is in bytes, and a character may have four: its remaining part is left out. Other bytes make it hex."""
    monkeypatch.setattr(message_text, "SHOWN_BYTES", 8)
    data = ("a" * (5 + before) + "🎉" + "b" * 20).encode()
    assert list(task_commands._data_lines(data)) == [
        f"Data         {len(data)} bytes, text",
        "  " + ("a" * (5 + before))[:8],
        f"  ... {len(data) - 8} more bytes: --raw writes all",
    ]
    assert list(task_commands._data_lines(b"ab\xffd" * 3))[:2] == [
        "Data         12 bytes, hex",
        "  61 62 ff 64 61 62 ff 64",
    ]
    # A message of the limit is shown whole; JSON that is cut is text, and a message without data has no lines.
    monkeypatch.setattr(message_text, "SHOWN_BYTES", 4)
    assert list(task_commands._data_lines(b"[12]")) == ["Data         4 bytes, JSON", "  [", "    12", "  ]"]
    cut = ["Data         5 bytes, text", "  [12 ", "  ... 1 more byte: --raw writes all"]
    assert list(task_commands._data_lines(b"[12 ]")) == cut
    assert list(task_commands._data_lines(b"")) == ["Data         0 bytes"]


def test_times_in_json_are_rfc_3339() -> None:
    assert as_json({"sent_at": TIME}) == '{"sent_at": "2026-11-21T13:00:00.000005Z"}'
    with pytest.raises(TypeError, match="object"):
        as_json(object())


@pytest.mark.parametrize(("columns", "is_cards"), [("40", True), ("80", False)])
def test_a_row_is_a_card_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, columns: str, is_cards: bool) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [["orders", 12, "x" * 30], ["invoices", 1_000, None]]
    assert table(["TOPIC", "TASKS", "ERROR"], rows) == ALIGNED, "no terminal"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert table(["TOPIC", "TASKS", "ERROR"], rows) == (CARDS if is_cards else ALIGNED)


ALIGNED = f"""\
TOPIC     TASKS  ERROR
orders       12  {"x" * 30}
invoices  1,000"""
CARDS = f"""\
TOPIC  orders
TASKS  12
ERROR  {"x" * 30}

TOPIC  invoices
TASKS  1,000"""


FAKED = "orders\nok          topic invoices\r\x1b[2J\x9b2J\u202e\u2028\x85ok"


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


@pytest.mark.parametrize("buffering", [0, 8_192])
def test_a_slow_pipe_that_does_not_block_gets_all_lines(buffering: int) -> None:
    """With PYTHONUNBUFFERED, Python's own streams drop the part that such a pipe does not take, without an error."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    lines = [f"{n:0200}" for n in range(2_000)]
    with (
        ThreadPoolExecutor(1) as other,
        os.fdopen(read_end, encoding="utf-8") as reader,
        io.TextIOWrapper(os.fdopen(write_end, "wb", buffering), write_through=not buffering) as stream,
    ):
        said = other.submit(lambda: [say(line, stream=stream) for line in lines] and stream.close())
        time.sleep(0.1)  # until the pipe is full
        assert reader.read().splitlines() == lines
        said.result()


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


@pytest.mark.parametrize("wrong", ["--project=!", "--project", "--nope"])
@pytest.mark.parametrize(
    ("main", "words", "flag", "variable", "is_json"),
    [
        (publishworker, "run", "", "", True),
        (publishworker, "run", "--log-format=text", "", False),
        (publishworker, "drain", "", "text", False),
        (publishworker, "drain", "--log-format=json", "text", True),
        (publishworker, "check", "", "", False),
        (outbox, "status", "", "", False),
        (outbox, "status", "", "json", True),
        (outbox_pipeline, "audit", "", "", True),
    ],
)
def test_why_a_program_does_not_start_is_a_line_of_its_log(  # noqa: PLR0917 - parameters and fixtures
    main: Callable[[list[str]], int], words: str, flag: str, variable: str, is_json: bool, wrong: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Otherwise a collector of JSON lines does not know its severity. Sentences are for people."""
    monkeypatch.setenv("OUTBOX_LOG_FORMAT", variable)
    with contextlib.suppress(SystemExit):
        assert main([words, *filter(None, [flag]), wrong]) == 2
    error = capfd.readouterr().err
    if is_json:
        assert (line := json.loads(error))["severity"] == "ERROR"
        assert wrong.partition("=")[0] in line["message"]
    else:
        assert not error.startswith("{")


FAILS = """
import sys, threading
from outbox.program import logs
logs.configure("json")
thread = threading.Thread(target=lambda: 1 / 0, name="sender")
thread.start(), thread.join()
type("Client", (), {"__del__": lambda self: 1 / 0})()
raise KeyError("no")
"""


def test_an_uncaught_exception_is_a_line_of_the_log() -> None:
    """Of the program, of a thread and of a callback, which are those of packages."""
    lines = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, check=False).stderr
    found = [json.loads(line) for line in lines.splitlines()]
    assert [each["error.kind"] for each in found] == ["ZeroDivisionError", "ZeroDivisionError", "KeyError"]
    assert {(each["action"], each["severity"]) for each in found} == {("uncaught", "CRITICAL")}
    assert found[0]["message"] == "Thread sender ended with an unexpected error: division by zero"


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
