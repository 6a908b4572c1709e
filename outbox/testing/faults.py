"""Faults of Spanner for integration tests on the emulator. They act on all clients of this process except AsyncClients.

with faults.abort_next_commit():
    place_order(database, "order-1")  # its transaction function runs twice
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from google.api_core.exceptions import Aborted
from google.cloud.spanner_v1 import SpannerClient
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo

#: What Spanner sends with ABORTED: the client waits so long before it runs the transaction again.
_RETRY_INFO = RetryInfo(retry_delay=Duration(nanos=1_000_000)).SerializeToString()


@contextmanager
def abort_next_commit(times: int = 1) -> Iterator[None]:
    """Answer the next `times` commits in the block with ABORTED. Their transactions are rolled back and run again.

    Raises:
        AssertionError: the block ended before as many commits.
    """
    left, real = times, SpannerClient.commit

    def commit(client: SpannerClient, request: Any = None, **options: Any) -> Any:
        nonlocal left
        if left == 0:
            return real(client, request=request, **options)
        left -= 1
        if request.transaction_id:
            client.rollback(session=request.session, transaction_id=request.transaction_id)
        answer = SimpleNamespace(trailing_metadata=lambda: [("google.rpc.retryinfo-bin", _RETRY_INFO)])
        raise Aborted("the test aborts this transaction", errors=[answer])

    with mock.patch.object(SpannerClient, "commit", commit):
        yield
    if left:
        raise AssertionError(f"{times - left} of {times} transactions were committed in the block")


@contextmanager
def delay_commits(seconds: float) -> Iterator[None]:
    """Delay each commit in the block by `seconds`, and keep the locks of its transaction meanwhile."""
    real = SpannerClient.commit

    def commit(client: SpannerClient, request: Any = None, **options: Any) -> Any:
        time.sleep(seconds)
        return real(client, request=request, **options)

    with mock.patch.object(SpannerClient, "commit", commit):
        yield
