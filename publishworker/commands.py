"""What `run` and `drain` do: put the parts together, verify the table, start the loop."""

import argparse
import gc
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from random import Random

from outbox import logs, schema
from outbox.errors import NotReached
from outbox.operations.table import TaskTable
from publishworker import exits
from publishworker.check import check
from publishworker.connection import LimitedDatabase, open_database, open_pubsub
from publishworker.heartbeat import Heartbeat
from publishworker.pubsub.messages import topic_filter
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.reporting import Counts, Lookout, Reporter, oldest_age
from publishworker.settings import WorkerSettings
from publishworker.spanner.store import SpannerStore, Unsent
from publishworker.stopping import run_on_thread, stop_on_signals
from publishworker.task import Turn
from publishworker.telemetry import datadog
from publishworker.telemetry import metrics as m
from publishworker.turn.delivery import Delivery
from publishworker.turn.fleet import Fleet
from publishworker.turn.flights import StuckGroup
from publishworker.turn.relay import Relay
from publishworker.turn.retries import Retries
from publishworker.turn.sampling import Limits
from publishworker.worker import Loop

__all__ = ["check", "drain", "run"]

_log = logging.getLogger("publishworker")

#: Seconds that a free place waits for others before the next poll, so that one poll serves several groups.
PATIENCE_SECONDS = 0.1


def run(options: argparse.Namespace) -> int:
    """Relay until a signal; return the exit code."""
    settings = WorkerSettings.read(vars(options))
    with stop_on_signals() as stop:
        return Worker(settings).until_stopped(stop, lambda _turn: False, late=exits.FAILED)


def drain(options: argparse.Namespace) -> int:
    """Relay until a strong read finds nothing to send outside of paused topics; print what stays."""
    settings = WorkerSettings.read(vars(options))
    with stop_on_signals() as stop:
        worker = Worker(settings)
        if options.deadline is not None:
            timer = threading.Timer(options.deadline, stop.set)
            timer.daemon = True
            timer.start()

        counted_at = float("-inf")

        def drained(turn: Turn) -> bool:
            nonlocal counted_at
            if turn.made_progress or turn.in_flight or time.monotonic() - counted_at < settings.poll_interval:
                return False
            counted_at = time.monotonic()  # the count reads the whole backlog, and turns may be frequent
            return not any(map(_is_work, worker.store.unsent()))

        if (code := worker.until_stopped(stop, drained, late=exits.WORK_LEFT)) != exits.DONE:
            return code
    left = worker.store.unsent()
    for each in left:
        print(f"{each.count} {each.state} of {each.topic}")
    if any(map(_is_work, left)):
        print("not drained: stopped with work left")
        return exits.WORK_LEFT
    print("drained")
    return exits.DONE


def _is_work(unsent: Unsent) -> bool:
    return unsent.state in ("pending", "retrying")


class Worker:
    """The parts of one process."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Connect and verify the table. Raises NotReached."""
        logs.configure(settings.log_format, settings.log_level)
        emulator = bool(os.environ.get("SPANNER_EMULATOR_HOST"))
        if emulator:
            # Emulators before 1.5.38 end a session's transaction when another begins, so threads must not share one.
            os.environ.setdefault("GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW", "false")
        self._settings = settings
        self._metrics = datadog.from_environment()
        database = open_database(settings.project, settings.instance, settings.database, settings.database_role)
        self.store = SpannerStore(database, verified_shards(database), emulator=emulator)
        random = Random()
        fleet = Fleet(self.store, worker_id(), self.store.shards, shared=settings.assignment == "shared")
        heartbeat = Heartbeat(Path(settings.heartbeat_file))
        allowed = topic_filter(settings.allowed_topics, settings.project)
        pass_dead = settings.on_ordering_failure == "skip"
        publisher = PubSubPublisher(open_pubsub(settings.pubsub_endpoint), settings.project, allowed)
        retries = Retries(
            initial=settings.backoff_initial,
            longest=settings.backoff_max,
            max_attempts=settings.max_attempts,
            dead_after=settings.dead_after,
            random=random,
        )
        self.relay = Relay(
            self.store,
            Delivery(self.store, publisher, retries, settings.publish_timeout, pass_dead=pass_dead),
            self._metrics,
            fleet,
            limits=Limits(settings.group_size, settings.group_bytes, settings.concurrency),
            look_further_seconds=min(settings.poll_interval / 2, 1.0),  # each idle poll does, whatever its jitter
            random=random,
            fair_share=settings.fair_share,
            pass_dead=pass_dead,
            stragglers=settings.concurrency // 4,
            patience=PATIENCE_SECONDS,
            beat=heartbeat,
        )
        self._loop = Loop(
            self.relay,
            fleet,
            poll_interval=settings.poll_interval,
            beat=heartbeat,
            report=Reporter(self._metrics, fleet, self.relay),
            random=random,
        )
        counts = Counts(self._metrics, lambda: self.relay.topics)
        looks = (oldest_age(self._metrics), counts) if self._metrics.wanted else ()
        self._lookouts = [Lookout(look, lambda: TaskTable(self.store.database), fleet) for look in looks]
        # What the imports have made lives as long as the process: no collection need look at it again, which took 30 ms
        # of CPU every few thousand tasks.
        gc.freeze()

    def until_stopped(self, stop: threading.Event, until: Callable[[Turn], bool], *, late: int) -> int:
        """Run the loop until `stop` is set or `until` says so of a turn; return the exit code.

        It is `late` if what is in flight after `stop` does not end within --drain-timeout.
        """
        where = (self._settings.project, self._settings.instance, self._settings.database)
        _log.info("relaying %s/%s/%s, %d shards", *where, len(self.store.shards), extra={"action": "start"})
        for lookout in self._lookouts:
            lookout.start()
        try:
            in_time = run_on_thread(lambda: self._loop.run(stop, until), stop, self._settings.drain_timeout)
        except StuckGroup as error:
            for group in error.groups:
                self._metrics.count(m.STUCK, 1, topic=group.topic)
            _log.critical(
                "%s, which no time limit explains; the worker ends, so that another one takes its tasks", error,
                extra={"action": "stuck"},
            )  # fmt: skip
            return exits.FAILED
        except Exception:
            _log.critical("the loop died; this is a defect", exc_info=True, extra={"action": "died"})
            return exits.FAILED
        else:
            if in_time:
                _log.info("stopped", extra={"action": "stopped"})
                return exits.DONE
            self._metrics.count(m.DRAIN_TIMEOUT, 1)
            _log.error(
                "stopped with tasks in flight after --drain-timeout; they stay unsent for other workers, or may be "
                "published twice", extra={"action": "drain_timeout"},
            )  # fmt: skip
            return late
        finally:
            for lookout in self._lookouts:
                lookout.stop()
            self._metrics.stop()


def worker_id() -> str:
    """Return an id that no other process has, now or later: the host's name for people, and a random part."""
    return f"{socket.gethostname()[:46]}-{uuid.uuid4().hex[:12]}"


def verified_shards(database: LimitedDatabase) -> int:
    """Return the table's shard count. Raises NotReached if the table is missing or has another shape."""
    wrong = schema.differences(database, schema.statements())
    if wrong:
        raise NotReached(f"database {database.name}: " + "; ".join(wrong) + ". See `outbox schema apply`.")
    return schema.shard_count(database)
