"""The time limit of a read or query."""

import pytest
from google.api_core.exceptions import DeadlineExceeded

from outbox.table.connection import Deadline


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
