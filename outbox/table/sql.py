"""What SQL and transactions of more than one package share."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from google.cloud.spanner_v1 import TransactionOptions

T = TypeVar("T")

#: The index for polls: (Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt).
TO_SEND = "AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksToSend}"
#: The whole key of that index. A statement that orders by it needs no sort, whatever the optimizer infers.
TO_SEND_ORDER = "Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt"
#: The index for ordering keys: the unsent tasks of a topic and key in order.
IN_ORDER = "AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksInOrder}"
IN_ORDER_ORDER = "Shard, OrderingKey, Topic, SentAt, CreatedAt, Sequence, Id"
#: The table by primary key: one seek for each ID of a joined list, so that a transaction locks nothing else.
BY_ID = "AsynchronousTasks@{FORCE_INDEX=_BASE_TABLE}"
#: A join that seeks once for each row on its left.
SEEK = "JOIN@{FORCE_JOIN_ORDER=TRUE, JOIN_METHOD=APPLY_JOIN}"

#: A worker's row may be deleted this many seconds after the worker's last heartbeat.
FORGET_WORKER_SECONDS = 3600
#: For how many seconds a heartbeat makes its worker live. Any program may write the column, so it is bounded: without a
#: bound, arithmetic overflows, and nobody would poll the shards of a worker that is live for ever.
LIVE_SECONDS = f"GREATEST(0, LEAST(LivenessTimeoutSeconds, {FORGET_WORKER_SECONDS}))"

#: For `run_in_transaction`: serializable and pessimistic, whatever the client's defaults are. Otherwise the hint
#: LOCK_SCANNED_RANGES=exclusive locks nothing.
PESSIMISTIC: Mapping[str, Any] = {
    "isolation_level": TransactionOptions.IsolationLevel.SERIALIZABLE,
    "read_lock_mode": TransactionOptions.ReadWrite.ReadLockMode.PESSIMISTIC,
}


def chunked(
    values: Iterable[T], size: int, max_bytes: float = math.inf, bytes_of: Callable[[T], int] = lambda _: 0
) -> Iterator[list[T]]:
    """Yield `values` in lists of at most `size` and `max_bytes`, by `bytes_of`.

    Requests and commits have such limits. A value that is larger than `max_bytes` is alone.
    """
    chunk: list[T] = []
    total = 0
    for value in values:
        added = bytes_of(value)
        if chunk and total + added > max_bytes:
            yield chunk
            chunk, total = [], 0
        chunk.append(value)
        total += added
        if len(chunk) >= size:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk
