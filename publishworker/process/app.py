"""Wires the relay of one process together, verifies the table, and runs the worker until it is stopped.

Its caller, a command or a Spark task, handles signals, configures logs and names the process.
"""

import os
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from google.api_core.exceptions import DeadlineExceeded

from outbox.base.schedules import TURN
from outbox.base.values import counted
from outbox.errors import NotReached
from outbox.program.channels import create_topic_command, open_pubsub
from outbox.rows.task_table import TaskTable
from outbox.table import schema
from outbox.table.connection import LimitedDatabase, open_database, uses_emulator
from outbox.table.ddl import Layout
from publishworker import process
from publishworker.delivery.delivery import Tools
from publishworker.delivery.marking import SharedMarking
from publishworker.delivery.rules import RetryPolicy
from publishworker.host import Host
from publishworker.log import log
from publishworker.process.gauges import BacklogSampler, WorkerGauges, send_ages, send_backlog, worker_info
from publishworker.process.healthcheck import MAX_AGE
from publishworker.process.worker_settings import RelaySettings
from publishworker.pubsub.publisher import PubSubPublisher, topic_filter
from publishworker.spanner.change_stream import ChangeStream
from publishworker.spanner.emulator import EmulatorStore
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import SpannerStore, any_to_send
from publishworker.spanner.write_errors import DatabaseMissing, StoreError, lasting_reason
from publishworker.telemetry import metrics as m
from publishworker.telemetry.history import WorkerHistory
from publishworker.telemetry.metrics import Metrics
from publishworker.telemetry.reporter import Reporter
from publishworker.turn.in_flight import Limits, StuckBatch
from publishworker.turn.membership import Membership
from publishworker.turn.relay import Relay
from publishworker.turn.worker import MAX_USELESS_SECONDS, Worker
from publishworker.types import Turn

#: Max bytes of messages in a batch.
BATCH_BYTES = 8_000_000
#: Part of the batches for lower priorities while tasks of higher ones keep arriving.
FAIR_SHARE = 0.1
#: Seconds between checks of the thread of the worker.
_CHECK_SECONDS = 0.2
#: Seconds from the end of marking to the end of the shutdown timeout: for a last lock query and commit without answer.
_LAST_TRY_SECONDS = 15.0


class App:
    """The parts of one process, connected, with a verified table. The constructor raises NotReached.

    `id` is unique to this process, at most 64 characters. `touch_file` is called at each turn, for liveness probes, and
    `on_stall` before the log line about a worker that hangs. The caller stops `metrics`.
    """

    def __init__(
        self,
        settings: RelaySettings,
        *,
        id: str,
        metrics: Metrics,
        touch_file: Callable[[], None] = lambda: None,
        on_stall: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._touch_file, self._on_stall = touch_file, on_stall
        #: How often the thread of the worker has called `_progress`.
        self._steps = 0
        self.store = open_store(settings, self._progress)
        self.membership = Membership(self.store, id)
        publisher = PubSubPublisher(
            open_pubsub(settings),
            settings.project,
            topic_filter(settings.allowed_topics, settings.project),
            create_command=partial(create_topic_command, settings),
        )
        host = Host(progress=self._progress)
        history = WorkerHistory()
        self.relay = relay_of(
            settings, self.store, publisher, self.membership, metrics=metrics, host=host, history=history
        )
        self.membership.info = partial(worker_info, settings, self.relay, history)
        self._stream = (
            ChangeStream(
                self.store.database.on_own_connection(), self.relay.wake, follows=lambda: self.membership.follows_stream
            )
            if settings.wake == "change-stream"
            else None
        )
        self._worker = Worker(
            self.relay,
            self.membership,
            poll_interval=settings.poll_interval,
            idle_interval=self._idle_interval if self._stream else None,
            touch_file=self._progress,
            report=WorkerGauges(metrics, self.membership, self.relay),
            random=host.random,
        )
        samples: tuple[Callable[[TaskTable], None], ...] = (
            partial(send_ages, metrics, history),
            lambda table: send_backlog(metrics, history, self.relay.discoverer.active_topics, table),
        )
        self._background: list[BacklogSampler | ChangeStream] = [
            BacklogSampler(sample, lambda: TaskTable(self.store.database), self.membership) for sample in samples
        ]
        if self._stream:
            self._background.append(self._stream)

    @property
    def failure(self) -> StoreError | None:
        """Return why the last turn failed, or None if it did not."""
        return self._worker.failure

    def _progress(self) -> None:
        """Note that the thread of the worker goes on. The liveness probe must fail if that is of no use."""
        self._steps += 1
        if not self._worker.is_useless:
            self._touch_file()

    def _idle_interval(self) -> float:
        """Return the max seconds between polls: the longer interval only while the change stream works."""
        interval = self._settings.poll_interval
        return max(interval, TURN.most) if self._stream and self._stream.works else interval

    def until_stopped(self, stop: threading.Event, until: Callable[[Turn], bool], *, timeout_exit_code: int) -> int:
        """Run the worker until `stop` or `until(turn)`. Return the exit code; with batches left, the given one."""
        where = (self._settings.project, self._settings.instance, self._settings.database)
        log.info(
            "relaying %s/%s/%s, %s", *where, counted(self.store.layouts[0].shards, "shard"), extra={"action": "start"}
        )
        try:
            for each in self._background:
                each.start()
            in_time = run_on_thread(
                lambda: self._worker.run(stop, until), stop, self._settings.shutdown_timeout, self.relay.stop,
                steps=lambda: self._steps,
            )  # fmt: skip
        except StuckBatch as error:
            self._metrics.count(m.FORCED_STOP, 1, reason=m.STUCK)
            log.critical(
                "%s. This exceeds all time limits, so the worker exits and another one takes over its tasks.", error,
                extra={"action": "stuck"},
            )  # fmt: skip
            return process.FAILED
        except StoreError as error:
            extra = {"action": "missing"} if isinstance(error, DatabaseMissing) else {"action": "no_access"}
            sentence = "The worker exits, because for %g s %s: %s"
            log.critical(sentence, MAX_USELESS_SECONDS, lasting_reason(error), error, extra=extra)
            return process.NOT_REACHED
        except Stalled as error:
            self._on_stall()  # the log may be what blocks
            self._metrics.count(m.FORCED_STOP, 1, reason=m.STUCK)
            fields = {"error.stack": str(error)}
            log.critical(
                "The worker has done nothing for %g s, so it exits.", MAX_AGE,
                extra={"action": "stalled", "fields": fields},
            )  # fmt: skip
            return process.FAILED
        except Exception as error:
            sentence = "The worker failed with an unexpected error. Please report it."
            if isinstance(error, RuntimeError) and "new thread" in str(error):
                sentence = "No thread can be started, so the worker exits. Raise its limit of processes."
            log.critical("%s", sentence, exc_info=True, extra={"action": "died"})
            return process.FAILED
        else:
            if in_time or not self.relay.in_flight:  # without batches, only a read of the last turn has no answer
                log.info("stopped", extra={"action": "stopped"})
                return process.DONE
            self._metrics.count(m.FORCED_STOP, 1, reason=m.SHUTDOWN_TIMEOUT)
            log.error(
                "Stopped after --shutdown-timeout with in-flight batches. Tasks without a SentAt may be published "
                "again; at-most-once tasks may be lost.", extra={"action": "shutdown_timeout"},
            )  # fmt: skip
            return timeout_exit_code
        finally:
            self.relay.in_flight.report_in_doubt()
            for each in self._background:
                each.stop()


def worker_id() -> str:
    """Return an ID for a worker of this process: unique for all time, and people recognize the host name."""
    return f"{socket.gethostname()[:46]}-{uuid.uuid4().hex[:12]}"


class Stalled(Exception):
    """The thread of the worker has made no step for MAX_AGE. The text is its stack."""


def run_on_thread(
    work: Callable[[], None],
    stop: threading.Event,
    shutdown_timeout: float,
    on_stop: Callable[[], None],
    steps: Callable[[], int],
) -> bool:
    """Call `work` on a thread. Return whether it ended in time after `stop`. Raise its exception here, or Stalled.

    `steps` returns a number that changes while the thread makes progress.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="worker", daemon=True)
    thread.start()
    seen, checks = steps(), 0
    while thread.is_alive() and not stop.is_set():
        thread.join(_CHECK_SECONDS)
        # Checks are counted, and not the time, because the process may have been suspended.
        checks = checks + 1 if steps() == seen else 0
        seen = steps()
        if checks * _CHECK_SECONDS > MAX_AGE:
            raise Stalled("".join(traceback.format_stack(sys._current_frames().get(thread.ident or 0))))  # noqa: SLF001 - documented
    on_stop()
    thread.join(shutdown_timeout)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def relay_of(
    settings: RelaySettings,
    store: SpannerStore,
    publisher: PubSubPublisher,
    membership: Membership,
    *,
    metrics: Metrics,
    host: Host,
    history: WorkerHistory | None = None,
) -> Relay:
    """Return a relay from `store` to `publisher` with the limits and times of the settings."""
    places = settings.concurrency
    marking_seconds = max(settings.shutdown_timeout - _LAST_TRY_SECONDS, settings.shutdown_timeout / 2)
    policy = RetryPolicy(
        initial=settings.backoff_initial,
        longest=settings.backoff_max,
        max_attempts=settings.max_attempts,
        dead_after=settings.dead_after,
        random=host.random,
        skip_dead=settings.on_ordering_failure == "skip",
    )
    return Relay(
        Tools(
            store=store,
            publisher=publisher,
            policy=policy,
            marking=SharedMarking(host, marking_seconds),
            host=host,
        ),
        Limits(settings.batch_size, BATCH_BYTES, places, fair_share=FAIR_SHARE),
        membership,
        Reporter(metrics, host.clock, history),
        # At most half of the poll interval, so that jitter never makes an idle turn skip its discovery.
        discovery_seconds=min(settings.poll_interval / 2, 1.0),
    )


def open_store(settings: RelaySettings, before_read: Callable[[], None] = lambda: None) -> SpannerStore:
    """Connect, and verify the table and the permission to write to it. Raises NotReached."""
    emulator = uses_emulator(settings)
    if emulator:
        # Emulators before 1.5.38 end a session's transaction when another begins, so threads must not share a session.
        os.environ.setdefault("GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW", "false")
    database = open_database(settings)
    layout = verified_layout(database)
    verify_grants(database)
    store = EmulatorStore if emulator else SpannerStore
    # Batches may use all that a server allows for a connection, if they are slow. Heartbeats must not wait for them.
    heartbeat_database, delay = database.on_own_connection(), settings.commit_delay
    return store(database, layout, settings.request_priority, heartbeat_database, before_read, commit_delay=delay)


def verified_layout(database: LimitedDatabase) -> Layout:
    """Return a layout of the table. Raises NotReached if the table is missing or has another shape."""
    layout, wrong = schema.layout(database), []
    try:
        wrong = schema.problems(database, layout, relay_only=True)
    except NotReached as error:
        if not isinstance(error.__cause__, DeadlineExceeded):
            raise
        # Start anyway. In a database with very many objects, the comparison may never end in time.
        log.warning("The schema was not compared with the DDL: %s", error, extra={"action": "schema_not_compared"})
    if wrong:
        raise NotReached(f"database {database.name}: " + "; ".join(wrong) + ". See `outbox schema apply`.")
    return layout


def until_drained(store: SpannerStore, shards: Callable[[], Sequence[int]], interval: float) -> Callable[[Turn], bool]:
    """Return a function that tells, after a turn, whether `shards` are drained.

    A drained shard has no pending or retrying task that workers may send. The function reads the table only after a
    turn that made no progress and left no batch in flight, and at most once every `interval` seconds.
    """
    read_at = float("-inf")

    def drained(turn: Turn) -> bool:
        nonlocal read_at
        if turn.made_progress or turn.in_flight or time.monotonic() - read_at < interval:
            return False
        read_at = time.monotonic()
        return not any_to_send(store, shards())

    return drained
