"""Faults of Spanner for integration tests on the emulator. They act on all clients of this process except AsyncClients.

with faults.abort_next_commit():
    place_order(database, "order-1")  # its transaction function runs twice
"""

import inspect
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, ParamSpec
from unittest import mock
from weakref import finalize

from google.api_core.exceptions import Aborted
from google.cloud.spanner_v1 import SpannerClient
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo

#: What Spanner sends with ABORTED: the client waits so long before it runs the transaction again.
_RETRY_INFO = RetryInfo(retry_delay=Duration(nanos=1_000_000)).SerializeToString()


P = ParamSpec("P")


def block(function: Callable[P, Iterator[None]]) -> "Callable[P, AbstractContextManager[None, None]]":
    """Return a function for `with`, which warns at the line of a call without it."""
    begin = contextmanager(function)

    def ended(generator: Generator[None]) -> None:
        if inspect.getgeneratorstate(generator) == inspect.GEN_CREATED:
            text = f"{function.__name__} was called without `with`, so it has no effect"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> Any:
        block = begin(*given, **named)
        finalize(block, ended, block.gen).atexit = False
        return block

    return call


@block
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


@block
def delay_commits(seconds: float) -> Iterator[None]:
    """Delay each commit in the block by `seconds`, and keep the locks of its transaction meanwhile."""
    real = SpannerClient.commit

    def commit(client: SpannerClient, request: Any = None, **options: Any) -> Any:
        time.sleep(seconds)
        return real(client, request=request, **options)

    with mock.patch.object(SpannerClient, "commit", commit):
        yield
