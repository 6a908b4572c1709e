"""The time limit of a read or query, and sessions that are replaced."""

import threading
from unittest import mock

import pytest
from google.api_core.exceptions import DeadlineExceeded

from outbox.table.connection import Deadline, LimitedDatabase


def test_a_deadline_includes_all_restarts_of_a_stream() -> None:
    """The client restarts a broken stream with the full timeout; the deadline passes only the time that remains."""
    now, seen = [0.0], []
    deadline = Deadline(10, lambda: now[0])

    def note(timeout: float) -> None:
        seen.append(timeout)

    call = deadline(note)
    call()
    now[0] = 9.999
    call()
    now[0] = 10.0
    with pytest.raises(DeadlineExceeded):
        call()
    with pytest.raises(DeadlineExceeded):
        deadline(note)()
    assert seen == [10.0, pytest.approx(0.001)]


def test_the_thread_of_a_lost_session_ends() -> None:
    """The client's thread would keep the database and its sessions in memory, one for each lost session."""
    database = LimitedDatabase("database", mock.Mock(), mock.Mock())
    ended = database._sessions_manager._multiplexed_session_terminate_event = threading.Event()
    assert database.renewed() is not database
    assert ended.is_set()
