"""Commands that change many tasks, with how to continue, and commands that follow, through an outage of Spanner."""

import argparse
import os
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import pytest

from outbox.admin import history
from outbox.admin.changes import Outcome
from outbox.cli import bulk, status_command, task_commands
from outbox.errors import NotReached, OutboxError, PositionExpired
from outbox.reading import Page, Position, SentTasks

MANY = "0123456789a"
GO_ON = "outbox retry --state dead --until 2026-11-21T13:00:00.000000Z --yes"


def outcomes(*changed: int, then: Any = None) -> Iterator[Outcome]:
    for number, size in enumerate(changed):
        yield Outcome(tuple(f"{number}-{place}" for place in range(size)), {}, ())
        if isinstance(then, Exception):
            raise then
        if then and number == 0:
            then()


@pytest.mark.parametrize(
    ("outcome", "code", "output"),
    [
        (Outcome(("x",), {}, ()), 0, ""),
        (Outcome((), {"a": "pending"}, ()), 0, "1 task not changed, because pending tasks need no retry: a"),
        (Outcome((), {"b": "sent"}, ()), 1, "1 task not changed, because of the flags or the state, which is sent: b"),
        (Outcome((), {}, ("c\x1b",)), 1, "1 task not changed, not in the table: c\\x1b"),
        (
            Outcome((), {}, (*"0123456789ab",)),
            1,
            "12 tasks not changed, not in the table: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...",
        ),
    ],
)
def test_tasks_that_were_not_changed_are_explained(
    outcome: Outcome, code: int, output: str, capsys: pytest.CaptureFixture[str]
):
    """A missing task or a wrong state is a failure. A task that needs no change is not."""
    report = bulk.carry_out(iter([outcome]), GO_ON)
    numbers = Counter(report.unchanged.values())
    assert bulk.explain(argparse.Namespace(), "retry", numbers, report.unchanged) == code
    assert report.changed == len(outcome.changed)
    assert capsys.readouterr().err == (output and f"outbox: {output}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_between_two_chunks(number: signal.Signals, capfd: pytest.CaptureFixture[str]):
    """The error says how many tasks were changed and how to continue. A second signal has its usual effect."""
    before = signal.getsignal(number)
    taken, stops = outcomes(500, 500, 500, then=lambda: os.kill(os.getpid(), number)), list[int]()
    with pytest.raises(OutboxError) as raised:
        bulk.carry_out(taken, GO_ON, lambda: stops.append(1))
    assert stops == [1], "the record says that it was stopped"
    # The signal came while the second chunk was on its way.
    assert str(raised.value) == f"stopped by {number.name}. 1,000 tasks changed so far. To continue, run: {GO_ON}"
    assert "stopping after the current transaction; repeat to stop at once" in capfd.readouterr().err
    assert signal.getsignal(number) == before
    assert len(list(taken)) == 1


def test_the_progress_of_a_long_command_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(bulk, "PROGRESS_SECONDS", 0.0)
    assert bulk.carry_out(outcomes(500, 500), GO_ON).changed == 1_000
    assert capsys.readouterr().err == "outbox: 500 tasks changed so far\noutbox: 1,000 tasks changed so far\n"


def test_an_error_reports_the_progress_and_how_to_continue():
    """The error keeps its type, so that the exit code stays the same."""
    with pytest.raises(NotReached) as raised:
        bulk.carry_out(outcomes(500, 500, then=NotReached("Spanner did not answer")), GO_ON)
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
    monkeypatch.setattr("outbox.cli.status_command.time.sleep", lambda _seconds: None)
    monkeypatch.setattr(status_command, "_rendered", lambda _tasks, found, *_more: found)
    monkeypatch.setattr(history, "read", mock.Mock())
    monkeypatch.setattr(status_command, "_read", mock.Mock(side_effect=["first", AWAY, AWAY, "later", Stop]))
    with pytest.raises(Stop):
        status_command._watch(mock.Mock(), OPTIONS)
    printed = capsys.readouterr()
    assert printed.out == "first\nlater\n"
    assert printed.err.count("Spanner did not answer. Retrying") == 2
    monkeypatch.setattr(status_command, "_read", mock.Mock(side_effect=AWAY))
    with pytest.raises(NotReached):
        status_command._watch(mock.Mock(), OPTIONS)


def test_tail_retries_until_spanner_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins each page where the last one ended. A gap is no outage."""
    after = Position(NOON, NOON, 1, "a")
    answers = iter(
        [Page([], NOON, Position(NOON), more=False), AWAY, AWAY, Page([{"Id": "a"}], NOON, after, more=True)]
    )
    positions = []

    def page(sent: SentTasks) -> Page:
        positions.append(sent.position)
        answer = next(answers, PositionExpired("deleted"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("outbox.cli.task_commands.time.sleep", lambda _seconds: None)
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
