"""A gRPC server that forwards every call to another one, and counts requests and answers.

with Counting(emulators.spanner_host) as proxy:
    worker = start(SPANNER_EMULATOR_HOST=proxy.address)
    assert proxy.counts["ExecuteStreamingSql", "outbox-poll"] <= 70
"""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from google.cloud.spanner_v1 import (
    BeginTransactionRequest,
    CommitRequest,
    ExecuteSqlRequest,
    PartialResultSet,
    ReadRequest,
)

from tests.support.rpc import Forwarding

#: Method and tag: that of the request, else that of its transaction, else nothing.
Key = tuple[str, str]

_TAGGED = {
    "BeginTransaction": BeginTransactionRequest,
    "Commit": CommitRequest,
    "ExecuteSql": ExecuteSqlRequest,
    "ExecuteStreamingSql": ExecuteSqlRequest,
    "Read": ReadRequest,
    "StreamingRead": ReadRequest,
}
_WITH_ROWS = ("ExecuteStreamingSql", "StreamingRead")


class Counting(Forwarding):
    """Counts what it forwards.

    `counts` are the calls, `bytes` the serialized sizes of their answers, `rows` the rows in these.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._lock = threading.Lock()
        self.counts: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()
        self.rows: Counter[Key] = Counter()

    def clear(self) -> None:
        with self._lock:
            for counter in (self.counts, self.bytes, self.rows):
                counter.clear()

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        key = key_of(method, request)
        self._add(self.counts, key, 1)
        counter = _Rows() if key[0] in _WITH_ROWS else None
        for answer in super().forward(method, request, context):
            self._add(self.bytes, key, len(answer))
            if counter:
                self._add(self.rows, key, counter.more(answer))
            yield answer

    def _add(self, counter: Counter[Key], key: Key, number: int) -> None:
        with self._lock:
            counter[key] += number


def key_of(method: str, request: bytes) -> Key:
    name = method.rpartition("/")[2]
    if name not in _TAGGED:
        return name, ""
    message: Any = _TAGGED[name].pb().FromString(request)
    return name, message.request_options.request_tag or message.request_options.transaction_tag


class _Rows:
    """Counts the rows of one stream; values come in a row's order, and one may be cut over several answers."""

    def __init__(self) -> None:
        self._columns = 1
        self._values = self._rows = 0

    def more(self, answer: bytes) -> int:
        part: Any = PartialResultSet.pb().FromString(answer)
        self._columns = len(part.metadata.row_type.fields) or self._columns
        self._values += len(part.values) - part.chunked_value
        before, self._rows = self._rows, self._values // self._columns
        return self._rows - before
