"""The argument parser of all commands, and commands that change many tasks or follow them through an outage."""

import argparse
import importlib.util
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import outbox_admin as admin
from outbox.errors import NotReached, OutboxError, PositionExpired, SettingError
from outbox.program.settings import DatabaseSettings
from outbox.program.terminal import as_json
from outbox.reading import Position, SentPage, SentTasks
from outbox_admin import cli
from outbox_admin.changes import operation_commands
from outbox_admin.changes.execution import Outcome
from outbox_admin.status import last_hour, status_commands
from outbox_admin.tasks import task_commands
from outbox_admin.tasks.task_flags import full_ids, ids, selection
from outbox_pipeline import cli as pipeline
from publishworker.process import cli as publishworker
from tests.support.commands import here

NOW = datetime(2026, 11, 21, 13, tzinfo=UTC)
DATABASE = {"OUTBOX_PROJECT": "my-project", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop"}
PLACE = ["--project", "my-project", "--instance", "main", "--database", "shop"]
BURST = "a whole number from 1 to 1,000,000,000"
RATE = "a finite number of tasks a second, 1e-09 or more"

PARSER = cli._parser()


def parsed(*words: str) -> argparse.Namespace:
    return PARSER.parse_args(words)


@pytest.fixture(params=["file", "-"])
def ids_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    def read(data: bytes, *words: str) -> tuple[str, ...] | None:
        file = tmp_path / "ids"
        file.write_bytes(data)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return ids(parsed("retry", "--ids-file", "-" if request.param == "-" else str(file), *words))

    return read


def test_a_line_is_an_id_or_json(ids_of: Any):
    for data, found in {
        b"a\nb\n": ("a", "b"),
        b"a\nb": ("a", "b"),
        b"\n\n  a  \r\n\t\nb\r\n": ("a", "b"),
        b"b\na\nb\na\n": ("b", "a"),
        b"two words\n": ("two words",),
        b'"a"\n{"id": "b", "state": "dead"}\nc\n': ("a", "b", "c"),
        b'" a "\n': (" a ",),
        b'{"id": "a"}\na\n': ("a",),
        rb'"\u00fc\n"': ("ü\n",),
        "ü\n🎉\n".encode(): ("ü", "🎉"),
        "🎉".encode() * 64: ("🎉" * 64,),
        '{"id": "a", "last_error": "b\u2028c\x85d"}'.encode(): ("a",),
        "a\u2028b\n".encode(): ("a\u2028b",),
        b"-x\n--\n": ("-x", "--"),
        b"[1]\nnull\n": ("[1]", "null"),
    }.items():
        assert ids_of(data) == found
    # Ids of the command line come first.
    assert ids_of(b"c\nb\n", "a", "b", "a") == ("a", "b", "c")
    assert ids_of(b"\n", "a") == ("a",)


def test_a_line_that_is_not_an_id_is_refused(ids_of: Any):
    """The error names the line, and no ID is used: half of a list would be a surprise."""
    for data, sentence in {
        b"a\n" + b"x" * 65: f"line 2: '{'x' * 65}' is not a task ID. It must be 1 to 64 characters of valid Unicode",
        b"a\n\n" + b"x" * 1_000: "line 3: '" + "x" * 80 + "' is not a task ID",
        b'""': "line 1: '\"\"' is not a task ID",
        b'{"id": ""}': 'line 1: \'{"id": ""}\' is not a task ID',
        b'{"id": null}': "line 1: '{\"id\": null}' is not a task ID",
        b'{"id": 5}': "line 1: '{\"id\": 5}' is not a task ID",
        b'{"id": ["a"]}': "is not a task ID",
        b'{"id": "a", "id": "b"}': "is not a task ID",
        b'{"Id": "a"}': "is not a task ID",
        rb'"\ud800"': "is not a task ID",
        b'{"id": "a"': "It must be 1 to 64 characters of valid Unicode, or JSON with a task ID",
        b'"a': "is not a task ID",
        b'{"a": ' * 100_000: "is not a task ID",
        b"ok\n\xff\n": "is not UTF-8: invalid start byte at byte 3",
        "a\n".encode("utf-16"): "is not UTF-8: invalid start byte at byte 0",
        b"a\n\xc3": "is not UTF-8: unexpected end of data at byte 2",
    }.items():
        with pytest.raises(SettingError) as raised:
            ids_of(data, "b")
        assert sentence in str(raised.value)
        assert len(str(raised.value)) < 400


def test_ids_are_none_if_not_given_and_refused_if_invalid():
    assert ids(parsed("retry")) is None
    assert ids(parsed("retry", "b", "a", "b")) == ("b", "a")
    for wrong in ("", "x" * 65, "\udcff"):
        with pytest.raises(SettingError, match=r"ID: .* is not allowed. It must be 1 to 64 characters of valid Un"):
            parsed("retry", wrong)


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=64), min_size=1, max_size=5))
@example(["a\nb", "\x85", "\u2028", " ", "\ufeff", '"', "{", "\x00"])
def test_ids_printed_by_list_can_be_read_back(names: list[str]):
    """`outbox list --json` is an `--ids-file` of exactly its tasks, whatever characters the ids have."""
    data = "".join(as_json({"id": name, "state": "dead"}) + "\n" for name in names).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert ids(parsed("retry", "--ids-file", "-")) == tuple(dict.fromkeys(names))


def test_a_selection_uses_the_databases_time():
    """An age counts from it; a flag that is not given narrows nothing; an empty range of times is a wrong value."""
    options = parsed("retry", "--state", "dead", "--topic", "orders", "--since", "2h", "--until", "15m", "--error", "X")
    chosen = selection(options, NOW, ("a",))
    assert (chosen.state, chosen.ids, chosen.topic, chosen.error) == ("dead", ("a",), "orders", "X")
    assert (chosen.since, chosen.until) == (NOW - timedelta(hours=2), NOW - timedelta(minutes=15))
    empty = selection(parsed("list"), NOW)
    assert (empty.state, empty.ids, empty.values) == (None, None, {})
    # The end is exclusive, so it must be behind the beginning.
    for since, until in (("15m", "2h"), ("2h", "2h"), ("2h", "120m"), ("0s", "2026-11-21T13:00:00Z"), ("-", "-")):
        with pytest.raises(SettingError, match=r"no task can match|is not allowed"):
            selection(parsed("list", "--since", since, "--until", until), NOW)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("retry --state pending", "--state: 'pending' is not allowed. It must be dead, sent, retrying or scheduled"),
        ("retry --state ded", "or scheduled. Did you mean 'dead'?"),
        ("cancel --state sent", "It must be pending, retrying, scheduled, blocked or dead\n"),
        ("list --state ded", "sent or cancelled. Did you mean 'dead'?"),
        ("list --topic=", "--topic: '' is not allowed. It must be 1 to 400 characters of valid Unicode"),
        ("list --error \udc80", "is not allowed"),
        (f"list --since {'9' * 15}d", "--since: '999999999999999d' is not allowed. It must be how long ago"),
        ("list --limit 0", "--limit: '0' is not allowed. It must be a whole number from 1 to 100,000"),
        *(
            (f"topics set orders --rate={rate} --burst 1", f"--rate: '{rate}' is not allowed. It must be {RATE}")
            for rate in ("0", "-1", "nan", "inf", "-inf", "1e999", "ten", "\uff11")
        ),
        ("topics set orders --rate 1 --burst 0", f"--burst: '0' is not allowed. It must be {BURST}"),
        ("topics set orders --rate 1 --burst 1.5", f"--burst: '1.5' is not allowed. It must be {BURST}"),
        ("topics set orders --max-in-flight 0", f"--max-in-flight: '0' is not allowed. It must be {BURST}"),
        ("topics set orders --route x", "--route: 'x' is not allowed. It must be a topic ID or projects/"),
        ("topics set orders", "no value given. Pass --rate or --burst or "),
        ("topics unset orders brust", "FIELD: 'brust' is not allowed. It must be rate, burst, max-in-flight, "),
        ("emulators --pubsub-port=65536", "--pubsub-port: '65536' is not allowed. It must be a whole number"),
        ("emulators --create p/main", "--create: 'p/main' is not allowed. It must be PROJECT/INSTANCE/DATABASE"),
        ("emulators --topic goog1", "--topic: 'goog1' is not allowed. It must be an ID that Pub/Sub allows"),
        ("emulators --topic orders", "--empty and --worker need --create PROJECT/INSTANCE"),
        ("emulators --create p/main/shop --subscription abc --topic abc", "a --topic before it"),
        ("emulators --create p/main/shop --ddl-file /gone", "--ddl-file: '/gone' cannot be read: No such file"),
        ("schema print --shards 0", "--shards: '0' is not allowed. It must be a whole number from 1 to"),
        ("schema apply --retention 0", "--retention: '0' is not allowed. It must be none, or days"),
        ("show ''", "1 to 64 characters"),
        ("retry", "no tasks given. Pass IDs"),
        ("cancel --reason x", "no tasks given. Pass IDs"),
        ("cancel --state dead --yes", "--reason is missing. It is required with --state"),
        ("purge --state sent", "--until is missing. Without it, all sent tasks would be deleted"),
        ("purge --until 30", "90s, 15m, 2h or 7d"),
        ("status --max-age -1h", "outbox: --max-age: '-1h' is not allowed. It must be seconds, or a duration"),
        ("topics set orders --backoff-max -1s", "--backoff-max: '-1s' is not allowed. It must be seconds, or a"),
        ("status --max-pending many", "a whole number"),
        ("status --watch --max-age 1h", "--watch has no exit code"),
        ("retry --ids-file /gone", "'/gone' cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_value_is_refused_before_any_request(words: str, sentence: str):
    """In one sentence, behind the usage if a flag is unknown to argparse or its value is refused there."""
    done = here(*shlex.split(words), environment=DATABASE)
    assert (done.code, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert done.stderr.startswith(f"usage: outbox {words.split(maxsplit=1)[0]}") or re.fullmatch(
        "outbox: .*\n", done.stderr
    )


def test_a_file_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outbox_admin.flags.MAX_FILE_BYTES", 1_000)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"y\n" * 501)))
    done = here("retry", "--ids-file", "-", environment=DATABASE)
    assert (done.code, done.stderr) == (2, "outbox: --ids-file: stdin has more than 1,000 bytes. Split it\n")


def test_an_empty_file_of_ids_changes_nothing():
    done = here("retry", "--ids-file", "/dev/null", environment=DATABASE)
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr == "outbox: /dev/null contains no task IDs. Nothing was changed\n"


MAINS = {"outbox": cli.main, "publishworker": publishworker.main, "outbox-pipeline": pipeline.main}


def test_a_misspelled_command_or_flag_is_refused_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OUTBOX_LOG_FORMAT", "text")
    for line, error in {
        "publishworker rnu": "unknown command 'rnu'. Did you mean 'run'? `publishworker --help` lists",
        "outbox reshard": "unknown command 'reshard'. Did you mean 'schema reshard'?",
        "outbox topics pause": "unknown action 'pause'. `outbox topics --help` lists the actions",
        "publishworker run --poll-intervall 2": "unknown flag '--poll-intervall'. Did you mean '--poll-interval'? ",
        "publishworker run --poll-int=2": "unknown flag '--poll-int'. Did you mean '--poll-interval'?",
        "publishworker drain now": "unexpected argument 'now'. See `publishworker drain --help`",
        "outbox status --projct x": "unknown flag '--projct'. Did you mean '--project'? `outbox s",
        "outbox --projct x status": "unknown flag '--projct'. Did you mean '--project'? `outbox --help`",
        "outbox retry --zzz": "unknown flag '--zzz'. `outbox retry --help` lists the flags",
        "outbox-pipeline archvie": "unknown job 'archvie'. Did you mean 'archive'?",
    }.items():
        program, *words = line.split()
        assert MAINS[program](words) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"{program}: {error}")


def test_the_health_check_accepts_no_abbreviation(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        publishworker.main(["healthcheck", "--max", "60"])
    assert "unrecognized arguments: --max" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "title"), [("", "usage: outbox "), ("schema", "usage: outbox schema ")])
def test_help_is_printed_without_a_command(words: str, title: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(words.split()) == 0
    captured = capsys.readouterr()
    assert (captured.out.startswith(title), captured.err) == (True, "")
    usage, others = captured.out.split("\n\n", 1)
    assert ("--project" in usage, "--project" in others) == (False, True)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


def test_each_help_fits_a_terminal_and_only_one_describes_the_global_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    helps = {parser.prog: parser.format_help() for parser in parsers(cli._parser())}
    assert len(helps) > 25
    assert {name: long for name, text in helps.items() if (long := [e for e in text.splitlines() if len(e) > 80])} == {}
    assert [name for name, text in helps.items() if "OUTBOX_PROJECT" in text] == ["outbox"]
    assert all("--project" in text for text in helps.values())


def test_global_flags_may_precede_or_follow_the_command():
    others = {"OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop", "OUTBOX_PROJECT": "environment"}
    for command in ("status", "show an-id", "schema apply"):
        for words, project in {
            f"--project one {command}": "one",
            f"{command} --project two": "two",
            f"--project one {command} --project two": "two",
            f"--project one --instance main --database shop {command}": "one",
            command: "environment",
        }.items():
            assert DatabaseSettings.read(vars(parsed(*words.split())), others).project == project, words


def test_an_unknown_variable_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("OUTBOX_CONCURENCY", "8")
    assert cli.main(["schema", "print"]) == 0
    question = "Did you mean OUTBOX_CONCURRENCY?"
    assert capsys.readouterr().err == f"outbox: OUTBOX_CONCURENCY is set, but no setting has this name. {question}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_reads_the_completion_script(shell: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert {"retry", "ids-file", "scheduled"} <= set(re.findall(r"[\w-]+(?<!-)", script.replace("--", " ")))
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [(["completion", "bash"], "shtab", "operators"), (["console", *PLACE], "uvicorn", "console")],
)
def test_a_command_without_its_extra_says_what_to_install(
    words: list[str], package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("OUTBOX_LOG_FORMAT", "text")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert cli.main(words) == 1
    assert capsys.readouterr().err.endswith(
        f"needs {package}. Install it: pip install 'spanner-outbox[{extra}]' "
        f"(before the first release: '/path/to/the/clone[{extra}]')\n"
    )


def test_prefixes_become_full_ids(monkeypatch: pytest.MonkeyPatch):
    full = {"0e3c": ["0e3c-1"], "7f21": ["7f21-2"], "exact-id": ["exact-id", "exact-id-3"]}
    monkeypatch.setattr(admin.lookup, "beginning_with", lambda _table, prefixes, _limit: {p: full[p] for p in prefixes})
    table = cast("Any", None)
    options = parsed("cancel", "--reason", "7f21", "0e3c", "7f21", "exact-id")
    assert full_ids(table, options, [*options.ids, "in file"]) == ("0e3c-1", "7f21-2", "exact-id", "in file")
    assert full_ids(table, parsed("cancel", "--yes", "exact-id"), ["exact-id"]) == ("exact-id",)
    with pytest.raises(SettingError, match=r"'0e3c' is only a prefix of task 0e3c-1. With --yes, pass full IDs"):
        full_ids(table, parsed("cancel", "--yes", "0e3c"), ["0e3c"])


GO_ON = "outbox retry --state dead --until 2026-11-21T13:00:00.000000Z --yes"


def outcomes(*changed: int, then: Any = None) -> Iterator[Outcome]:
    for number, size in enumerate(changed):
        yield Outcome(tuple(f"{number}-{place}" for place in range(size)), {})
        if isinstance(then, Exception):
            raise then
        if then and number == 0:
            then()


def test_tasks_that_were_not_changed_are_explained(capsys: pytest.CaptureFixture[str]):
    """A missing task or a wrong state is a failure. A task that needs no change is not."""
    twelve, first_ten = dict.fromkeys("0123456789ab", "missing"), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    for unchanged, code, output in (
        ({}, 0, ""),
        ({"a": "pending"}, 0, "1 task not changed, because pending tasks need no retry: a"),
        ({"b": "sent"}, 1, "1 task not changed, because of a filter or the state, which is sent: b"),
        ({"c\x1b": "missing"}, 1, "1 task not changed, not in the table: c\\x1b"),
        (twelve, 1, f"12 tasks not changed, not in the table: {first_ten}, ..."),
    ):
        report = operation_commands.carry_out(iter([Outcome(() if unchanged else ("x",), unchanged)]), GO_ON)
        numbers = Counter(report.unchanged.values())
        assert operation_commands.explain(argparse.Namespace(), "retry", numbers, report.unchanged) == code
        assert report.changed == (not unchanged)
        assert capsys.readouterr().err == (output and f"outbox: {output}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_between_two_chunks(number: signal.Signals, capfd: pytest.CaptureFixture[str]):
    """The error says how many tasks were changed and how to continue. A second signal has its usual effect."""
    before = signal.getsignal(number)
    taken, stops = outcomes(500, 500, 500, then=lambda: os.kill(os.getpid(), number)), list[int]()
    with pytest.raises(OutboxError) as raised:
        operation_commands.carry_out(taken, GO_ON, lambda: stops.append(1))
    assert stops == [1], "the record says that it was stopped"
    # The signal came while the second chunk was on its way.
    assert str(raised.value) == f"stopped by {number.name}. 1,000 tasks changed so far. To continue, run: {GO_ON}"
    assert "stopping after the current transaction; repeat to stop at once" in capfd.readouterr().err
    assert signal.getsignal(number) == before
    assert len(list(taken)) == 1


def test_the_progress_of_a_long_command_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(operation_commands, "PROGRESS_SECONDS", 0.0)
    assert operation_commands.carry_out(outcomes(500, 500), GO_ON).changed == 1_000
    assert capsys.readouterr().err == "outbox: 500 tasks changed so far\noutbox: 1,000 tasks changed so far\n"


def test_an_error_reports_the_progress_and_how_to_continue():
    """The error keeps its type, so that the exit code stays the same."""
    with pytest.raises(NotReached) as raised:
        operation_commands.carry_out(outcomes(500, 500, then=NotReached("Spanner did not answer")), GO_ON)
    assert str(raised.value) == (
        "Spanner did not answer. 500 tasks changed so far. The transaction in progress changed all of its tasks or "
        f"none. To continue, run: {GO_ON}"
    )


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
AWAY = NotReached("Spanner did not answer")
OPTIONS = argparse.Namespace(json=False, exact=False, max_age=None, max_pending=5, max_dead=None)


class Stop(Exception):
    """Ends a loop without end."""


def test_status_goes_on_after_an_outage_but_not_after_a_failed_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outbox_admin.status.status_commands.time.sleep", lambda _seconds: None)
    monkeypatch.setattr(status_commands, "_rendered", lambda _tasks, found, *_more: found)
    monkeypatch.setattr(last_hour, "read", mock.Mock())
    answers = ["first", AWAY, AWAY, NotReached("Other"), "later", Stop]
    monkeypatch.setattr(status_commands, "_read", mock.Mock(side_effect=answers))
    with pytest.raises(Stop):
        status_commands._watch(mock.Mock(), OPTIONS)
    printed = capsys.readouterr()
    assert printed.out == "first\nlater\n"
    assert re.findall(r"(\w+)\. Retrying", printed.err) == ["answer", "Other"]  # each error once
    monkeypatch.setattr(status_commands, "_read", mock.Mock(side_effect=AWAY))
    with pytest.raises(NotReached):
        status_commands._watch(mock.Mock(), OPTIONS)


def test_tail_retries_until_spanner_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins each page where the last one ended. A gap is no outage."""
    after = Position(NOON, NOON, 1, "a")
    answers = iter(
        [SentPage([], NOON, Position(NOON), more=False), AWAY, AWAY, SentPage([{"Id": "a"}], NOON, after, more=True)]
    )
    positions = []

    def page(sent: SentTasks) -> SentPage:
        positions.append(sent.position)
        answer = next(answers, PositionExpired("deleted"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("outbox_admin.tasks.task_commands.time.sleep", lambda _seconds: None)
    monkeypatch.setattr(task_commands, "_sent_line", lambda found, _options: found["Id"])
    monkeypatch.setattr(SentTasks, "page", page)
    database = mock.Mock(now=lambda: NOON)
    with pytest.raises(PositionExpired):
        task_commands._follow(database, argparse.Namespace(since=None, topic=None))
    printed = capsys.readouterr()
    assert printed.out == "a\n"
    assert printed.err.count("no task will be missed") == 1
    assert positions[-2:] == [Position(NOON), after]
    answers = iter([AWAY])
    with pytest.raises(NotReached):
        task_commands._follow(database, argparse.Namespace(since=None, topic=None))
