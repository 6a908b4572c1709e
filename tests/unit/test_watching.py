"""Commands that go on until they are stopped: an outage of Spanner is one line, and they continue."""

import argparse
from datetime import UTC, datetime
from unittest import mock

import pytest

from outbox.admin import history
from outbox.cli import status_command, task_commands
from outbox.errors import NotReached, PositionExpired
from outbox.reading import Page, Position, SentTasks

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
