"""The change stream, by which workers poll early, freezes, while all other requests to Spanner work."""

import threading
from collections.abc import Iterator
from unittest import mock

import grpc
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.table import ddl
from tests.support.outages import lasting, log_count
from tests.support.rpc import Forwarding
from tests.support.spanner import ADMIN_SECONDS
from tests.support.trial import Trial
from tests.support.waiting import eventually

WAKE = ("--wake", "change-stream")


class Gate(Forwarding):
    """Forwards every request to Spanner. It can freeze those that read the change stream."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._open = threading.Event()
        #: Records of the stream that were forwarded.
        self.records = 0
        self.forward_all()

    def forward_all(self) -> None:
        self._open.set()

    def freeze(self) -> None:
        self._open.clear()

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        is_stream = b"outbox-change-stream" in request
        for answer in super().forward(method, request, context):
            while is_stream and context.is_active() and not self._open.wait(0.1):
                pass
            self.records += is_stream
            yield answer


@pytest.fixture
def database(own_database: Database) -> Database:
    """One with the change stream."""
    own_database.update_ddl(ddl.statements(change_stream=True)[-1:]).result(ADMIN_SECONDS)
    return own_database


@pytest.mark.extended
def test_stream_frozen(trial: Trial, fault_seconds: float) -> None:
    """Under load, the requests that read the change stream hang.

    Promised: No task is lost or published twice. The workers notice it and read the stream again.
    """
    with (
        Gate(trial.emulators.spanner_host) as gate,
        mock.patch.object(trial, "spanner_host", gate.address),
        trial.workers(2, *WAKE) as workers,
    ):
        eventually(lambda: gate.records > 0, seconds=30, message="a worker reads the stream")
        with trial.load(per_second=2):
            gate.freeze()
            eventually(
                lambda: all(log_count(each, "change_stream_failed") for each in workers),
                seconds=60,
                message="each worker logs that its stream fails",
            )
            lasting(fault_seconds)
            gate.forward_all()
            eventually(
                lambda: all(log_count(each, "change_stream_works") for each in workers),
                seconds=90,
                message="each worker reads its stream again",
            )
        trial.settle()
    assert trial.audit(duplicates=0).kept()
