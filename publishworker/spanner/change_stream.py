"""Reads the change stream of registrations, so that a worker polls soon after a commit.

Polling remains the source of truth: records are only a reason to poll now. Nothing is stored, so a reader that starts
again, or misses records, costs at most one poll interval.

A server limits the concurrent requests of a connection. So the reader has a connection of its own, and reads at most
MAX_PARTITIONS partitions, each on a thread. A stream with more belongs to a load under which workers are never idle.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any

from outbox.base.schedules import ROUND, Backoff
from outbox.table.connection import STREAM_RETRY, Deadline
from outbox.table.shared_sql import NOW, parameters
from publishworker.log import log
from publishworker.spanner import relay_sql
from publishworker.spanner.write_errors import is_lost_session

#: If a partition, which sends a record each second, is silent for this long, the worker polls at --poll-interval.
MAX_SILENCE_SECONDS = 3.0
#: If it is silent for this long, the stream is read again from now on. After this time without a failure, the stream
#: counts as readable again.
RESTART_SECONDS = 10.0
#: Seconds of one request, so that none is open for long. The emulator ends each partition sooner.
REQUEST_SECONDS = 60.0
#: Max partitions that are read. A stream with more counts as a failure, so the worker polls at --poll-interval.
MAX_PARTITIONS = 64


@dataclass(slots=True)
class _Attempt:
    """What the threads of one attempt to read the stream share."""

    #: Set at the end of the attempt. The threads end then.
    given_up: bool = False
    #: The error of a partition that has failed, or None for one that has ended.
    answers: queue.SimpleQueue[Exception | None] = field(default_factory=queue.SimpleQueue)


class ChangeStream:
    """Calls a function after each commit that inserts tasks."""

    def __init__(
        self,
        database: Any,
        inserted: Callable[[], None],
        follows: Callable[[], bool] = lambda: True,
    ) -> None:
        """Read from a LimitedDatabase. Call `inserted` on any thread: after commits and failures, and at each start.

        While `follows` returns False, read nothing.
        """
        self._database = database
        self._inserted = inserted
        self._follows = follows
        self._stopped = threading.Event()
        self._heard: dict[str, float] = {}  # by partition: when its last record came
        self._failed = False
        self._retry = Backoff(ROUND, Random())  # noqa: S311 - it spreads load

    @property
    def works(self) -> bool:
        """Tell whether each partition has sent a record, or was first read, in the last 3 s."""
        oldest = min(list(self._heard.values()), default=float("-inf"))
        return time.monotonic() - oldest <= MAX_SILENCE_SECONDS

    def start(self) -> None:
        """Begin to read, on threads that do not keep the process alive."""
        threading.Thread(target=self._run, name="change-stream", daemon=True).start()

    def stop(self) -> None:
        """End. Each thread ends with its next record, after about a second, or with its request if it hangs."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if not self._follows():
                self._stopped.wait(MAX_SILENCE_SECONDS)
                continue
            attempt, pause = _Attempt(), 0.0
            try:
                self._follow(attempt)
            except Exception as error:
                pause = self._retry.next()
                if is_lost_session(error):  # only then: each new database starts a thread of the client
                    self._database = self._database.renewed()
                if not (self._failed or self._stopped.is_set()):
                    self._failed = True
                    log.warning(
                        "The change stream cannot be read; polling at --poll-interval until it can: %s", error,
                        extra={"action": "change_stream_failed"},
                    )  # fmt: skip
            attempt.given_up, self._heard = True, {}
            self._inserted()
            self._stopped.wait(pause)

    def _follow(self, attempt: _Attempt) -> None:
        """Find the partitions, and read each on a thread, until one fails or ends. Raises its error.

        Spanner ends a partition when it divides or moves it. The next attempt finds those that follow.
        """
        partitions = self._first_partitions(attempt)
        if len(partitions) > MAX_PARTITIONS:
            raise OverflowError(f"it has {len(partitions)} partitions, more than {MAX_PARTITIONS}")
        self._inserted()  # for commits after the last poll and before the time from which this attempt reads
        began = time.monotonic()
        self._heard = dict.fromkeys(partitions, began)
        for partition in partitions.items():
            arguments = attempt, *partition
            threading.Thread(target=self._read_all, args=arguments, name="change-stream", daemon=True).start()
        while not self._stopped.is_set() and self._follows():
            self._raise_if_silent()
            if self.works and time.monotonic() - began > RESTART_SECONDS:
                self._note_success()
            try:
                error = attempt.answers.get(timeout=MAX_SILENCE_SECONDS)
            except queue.Empty:
                continue
            if error is not None:
                raise error
            return

    def _first_partitions(self, attempt: _Attempt) -> dict[str, datetime]:
        """Return the tokens of the partitions, each with the time from which it is read."""
        [[now]] = self._query(NOW, {}, RESTART_SECONDS)
        self._began = now, time.monotonic()
        return self._read(attempt, "", now, None)

    def _raise_if_silent(self) -> None:
        silence = time.monotonic() - min(self._heard.values(), default=float("-inf"))
        if silence > RESTART_SECONDS:
            raise TimeoutError(f"no record for {silence:.0f} s, although there should be one each second")

    def _note_success(self) -> None:
        self._retry.reset()
        if self._failed:
            self._failed = False
            log.info("The change stream can be read again", extra={"action": "change_stream_works"})

    def _read_all(self, attempt: _Attempt, token: str, start: datetime) -> None:
        """Read a partition until it ends, one request after the other."""
        has_ended = False
        try:
            while not (has_ended or attempt.given_up or self._stopped.is_set()):
                self._hear(token)
                now = self._began[0] + timedelta(seconds=time.monotonic() - self._began[1])
                end = max(start, now) + timedelta(seconds=REQUEST_SECONDS)
                has_ended, start = bool(self._read(attempt, token, start, end)), end
            attempt.answers.put(None)
        except Exception as error:
            attempt.answers.put(error)

    def _read(self, attempt: _Attempt, token: str, start: datetime, end: datetime | None) -> dict[str, datetime]:
        """Send one request, for a partition or for the first ones; return the partitions that follow."""
        found: dict[str, datetime] = {}
        values = {"start": start, "end": end, "token": token or None}
        for [records] in self._query(relay_sql.CHANGES, values, REQUEST_SECONDS + RESTART_SECONDS):
            if attempt.given_up or self._stopped.is_set():
                break
            self._hear(token)
            for changes, _heartbeats, following in records:
                if changes:
                    self._inserted()
                for begins, _sequence, tokens in following:
                    found |= {each: begins for each, _parents in tokens}
        return found

    def _hear(self, token: str) -> None:
        if token in self._heard:  # not in that of a later attempt
            self._heard[token] = time.monotonic()

    def _query(self, statement: str, values: Mapping[str, Any], seconds: float) -> Iterator[Any]:
        with self._database.snapshot() as snapshot:
            yield from snapshot.execute_sql(
                statement, **parameters(values), request_options={"request_tag": "outbox-change-stream"},
                retry=STREAM_RETRY, timeout=Deadline(seconds),
            )  # fmt: skip
