"""The change stream, by which workers poll early, freezes or breaks, while all other requests to Spanner work."""

import contextlib
import threading
import time
from collections.abc import Iterator
from unittest import mock

import grpc
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.table import ddl
from tests.support.container import altered
from tests.support.outages import lasting, log_count
from tests.support.pubsub import PubSub
from tests.support.relays import register
from tests.support.rpc import Forwarding
from tests.support.spanner import ADMIN_SECONDS, variables
from tests.support.trial import Figures, Trial
from tests.support.waiting import eventually

WAKE = ("--wake", "change-stream")
#: Seconds between polls without the stream, and with it.
POLL = 0.5
#: Makes the pauses of an idle worker longer, so that the end of one does not hide a fault.
LONG_PAUSES = "from publishworker.process import app; app.TURN = app.TURN._replace(most=300.0)"
#: Seconds after the last poll at which the next one is certainly more than MAX_WAIT away: the pauses between polls
#: double from 0.05 s on, so this pause is at least 50 s.
LONG_PAUSE = 26.0
#: The promise is one poll interval plus 3 s; the rest is for a busy machine.
MAX_WAIT = POLL + 3 + 6


class Gate(Forwarding):
    """Forwards every request to Spanner. It can freeze or cut those that read the change stream."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._open = threading.Event()
        self._cuts = False
        #: Records of the stream that were forwarded.
        self.records = 0
        self.polled_at = time.monotonic()
        self.forward_all()

    def forward_all(self) -> None:
        self._cuts = False
        self._open.set()

    def freeze(self) -> None:
        self._open.clear()

    def cut(self) -> None:
        self._cuts = True

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        is_stream = b"outbox-change-stream" in request
        if b"outbox-discover" in request:
            self.polled_at = time.monotonic()
        for answer in super().forward(method, request, context):
            while is_stream and context.is_active() and not self._open.wait(0.1):
                pass
            if is_stream and self._cuts:
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            self.records += is_stream
            yield answer


@pytest.fixture
def database(own_database: Database) -> Database:
    """One with the change stream."""
    own_database.update_ddl(ddl.statements(change_stream=True)[-1:]).result(ADMIN_SECONDS)
    return own_database


@contextlib.contextmanager
def gate_before(trial: Trial) -> Iterator[Gate]:
    with Gate(trial.emulators.spanner_host) as gate, mock.patch.object(trial, "spanner_host", gate.address):
        yield gate


def _audit_with_harm(trial: Trial, seconds: float, how: str) -> Figures:
    """Run two workers under load while their streams do not work, and afterwards."""
    with gate_before(trial) as gate, trial.workers(2, *WAKE) as workers:
        eventually(lambda: gate.records > 0, seconds=30, message="a worker reads the stream")
        with trial.load(per_second=2):
            getattr(gate, how)()
            eventually(
                lambda: all(log_count(each, "change_stream_failed") for each in workers),
                seconds=60,
                message="each worker logs that its stream fails",
            )
            lasting(seconds)
            gate.forward_all()
            eventually(
                lambda: all(log_count(each, "change_stream_works") for each in workers),
                seconds=90,
                message="each worker reads its stream again",
            )
        trial.settle()
    return trial.audit(duplicates=0)


@pytest.mark.extended
def test_stream_frozen(trial: Trial, fault_seconds: float) -> None:
    """Under load, the requests that read the change stream hang.

    Promised: No task is lost or published twice. The workers notice it and read the stream again.
    """
    assert _audit_with_harm(trial, fault_seconds, "freeze").kept()


@pytest.mark.long("histories cut the stream")
def test_stream_cut(trial: Trial, fault_seconds: float) -> None:
    """Under load, all requests that read the change stream fail, and so do their retries.

    Promised: No task is lost or published twice. The workers notice it and read the stream again.
    """
    assert _audit_with_harm(trial, fault_seconds, "cut").kept()


@pytest.mark.long("histories have long pauses")
def test_a_task_waits_for_the_poll_interval_if_the_stream_fails(
    trial: Trial, pubsub: PubSub, database: Database
) -> None:
    """And not for the rest of a long pause: at most one poll interval plus 3 s."""
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    flags = (*WAKE, "--poll-interval", f"{POLL}")
    environment = variables(database.database_id, trial.emulators)
    with (
        gate_before(trial) as gate,
        altered(LONG_PAUSES, environment | {"SPANNER_EMULATOR_HOST": gate.address}, *flags),
    ):
        eventually(lambda: gate.records > 0, seconds=30, message="the worker reads the stream")
        eventually(
            lambda: time.monotonic() - gate.polled_at > LONG_PAUSE, seconds=150, message="a long pause between polls"
        )
        gate.freeze()
        for _ in range(2):
            register(database, topic, 1)
            assert subscription.pull_until(1, seconds=MAX_WAIT)
