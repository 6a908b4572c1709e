"""The arithmetic of docs/operations/scaling.md: what a number of tasks costs in rows, requests and bytes."""

from dataclasses import dataclass

#: Row writes of one task, in the table and in its index entries: (without, with) an ordering key.
#: A mark moves an index entry: one deletion and one insertion.
INSERT, MARK, TTL_DELETE = (2, 3), (3, 5), (2, 3)
#: Pub/Sub bills at least this many bytes for each publish request. https://cloud.google.com/pubsub/pricing
MIN_REQUEST_BYTES = 1000


@dataclass(frozen=True)
class Cost:
    """Counts for all tasks of a workload. Polls, heartbeats and backlog counts depend on time and are not in it."""

    rows: int
    mutations: int
    row_writes: int
    index_writes: int
    lock_requests: int
    commits: int
    publish_requests: int
    publish_bytes: int


def cost(tasks: int, *, batch_size: int = 200, message_bytes: int = 300, tasks_per_key: int = 0) -> Cost:
    """Return the cost of `tasks` that are registered, sent in full batches and deleted by the row deletion policy.

    `message_bytes` are the billed bytes of a message. `tasks_per_key` is the number of tasks of one ordering key in a
    batch, and 0 without ordering keys.
    """
    ordered = tasks_per_key > 0
    row_writes = tasks * (INSERT[ordered] + MARK[ordered] + TTL_DELETE[ordered])
    batches = -(-tasks // batch_size)
    per_request = min(tasks_per_key or batch_size, batch_size)
    requests = -(-tasks // per_request)
    return Cost(
        rows=tasks,
        mutations=2 * tasks,
        row_writes=row_writes,
        index_writes=row_writes - 3 * tasks,
        lock_requests=batches,
        commits=batches,
        publish_requests=requests,
        publish_bytes=requests * max(MIN_REQUEST_BYTES, per_request * message_bytes),
    )
