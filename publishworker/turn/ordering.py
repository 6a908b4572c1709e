"""Find the sendable prefix of each ordering key: the leading tasks that may be sent, as one candidate.

For tasks with ordering keys, the poll only shows which keys have tasks. A later snapshot reads the first unsent tasks
of each key, and only these may be sent (docs/guide/ordering.md). A task that commits after the snapshot has a later
CreatedAt, so it comes after the prefix.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from outbox.base.values import chunked
from publishworker.delivery.rules import RetryPolicy
from publishworker.host import Host
from publishworker.log import ThrottledLog
from publishworker.spanner.store import SpannerStore
from publishworker.turn.in_flight import InFlight, Limits
from publishworker.turn.poller import ReadSize
from publishworker.types import Candidate, Claim, ClaimedTask, Kind, QueuedTask, TopicKey

#: Max rows, roughly, of one read of key heads. If very many keys have many tasks, their prefixes become shorter.
MAX_KEY_HEAD_ROWS = 5_000
#: Max rows of a further read, if the first one returned expired tasks. Each row takes 4 kB of memory while it is read.
MAX_EXPIRED_ROWS = 20_000

#: Max keys of one read, each with its head and the task behind it.
MAX_KEYS = MAX_KEY_HEAD_ROWS // 2

_T = TypeVar("_T", Candidate, QueuedTask)


@dataclass(frozen=True, slots=True)
class ResolvedKeys:
    """The candidates that may be sent, and deferrals behind blocked heads.

    `left_out`: some keys were skipped, because they have tasks in flight or are too many for one read.
    """

    candidates: Sequence[Candidate]
    deferrals: Sequence[Claim] = ()
    left_out: bool = False


class Ordering:
    """Reads the heads of ordering keys. It belongs to the relay's thread."""

    def __init__(self, store: SpannerStore, in_flight: InFlight, policy: RetryPolicy, host: Host) -> None:
        self._store = store
        self._in_flight, self._limits = in_flight, in_flight.limits
        self._random = host.random
        self._skip_dead = policy.skip_dead
        self._throttled_log = ThrottledLog(host.clock)
        self._read_size = ReadSize(MAX_KEYS)

    def resolve(self, candidates: Sequence[Candidate]) -> ResolvedKeys:
        """Replace the tasks of each ordering key by its sendable prefix, and keep tasks without a key.

        Keys with tasks in flight are skipped. Raises StoreError.
        """
        unordered = [each for each in candidates if each.ordering_key is None]
        by_key: dict[TopicKey, list[Candidate]] = {}
        for each in candidates:
            if each.ordering_key is not None:
                by_key.setdefault(TopicKey(each.topic, each.ordering_key), []).append(each)
        busy = self._in_flight.busy_keys() if by_key else ()
        keys = {key: tasks for key, tasks in by_key.items() if key not in busy}
        # A later poll reads the keys that are not chosen.
        if len(keys) > self._read_size.limit:
            keys = {key: keys[key] for key in self._random.sample([*keys], self._read_size.limit)}
        left_out = len(keys) < len(by_key)
        if not keys:
            return ResolvedKeys(unordered, left_out=left_out)
        max_prefix = max(1, min(self._limits.batch_size, MAX_KEY_HEAD_ROWS // len(keys)))
        # One row more than the longest prefix: if this row is deferred, the commit of the prefix must release it.
        heads = self._read({key: tasks[0].shard for key, tasks in keys.items()}, max_prefix + 1)
        prefixes: list[Candidate] = []
        deferrals: list[Claim] = []
        for key, tasks in keys.items():
            queue = heads.get(key, ())
            sendable = [*takewhile(lambda each: each.sendable, queue)]  # OUT-ORDER-1
            prefix = next(parts(sendable[:max_prefix], self._limits), [])
            if prefix:
                following = next(iter(sendable[len(prefix) :]), None)
                prefixes.append(_candidate(tasks, prefix, following))
            elif queue:
                deferrals += _deferrals(key, queue, tasks, self._limits)
        return ResolvedKeys(unordered + prefixes, deferrals, left_out)

    def _read(self, keys: Mapping[TopicKey, int], wanted: int) -> dict[TopicKey, list[QueuedTask]]:
        """Return at least the first `wanted` unsent tasks of each key, without tasks that expired before they were due.

        A key that begins with more expired tasks than a worker can read is logged and stays blocked.
        """
        rows = wanted
        heads: dict[TopicKey, list[QueuedTask]] = {}
        while keys:
            with self._read_size.reading(len(keys)):
                found = self._store.key_heads(keys, rows, skip_dead=self._skip_dead)
            heads |= {key: [each for each in tasks if not each.expired_before_due] for key, tasks in found.items()}
            short = [key for key, tasks in found.items() if len(tasks) == rows and len(heads[key]) < wanted]
            rows += max((len(found[key]) - len(heads[key]) for key in short), default=0)
            # Keys that are not chosen wait for a later turn. One with more expired tasks than MAX_EXPIRED_ROWS is
            # logged.
            chosen = self._random.sample(short, min(len(short), MAX_EXPIRED_ROWS // rows))
            keys = {key: keys[key] for key in chosen}
            for key in short:
                if rows > MAX_EXPIRED_ROWS and not heads[key]:
                    self._log_crowded_key(key.topic, [each.id for each in found[key]])
        return heads

    def _log_crowded_key(self, topic: str, ids: Sequence[str]) -> None:
        sentence = (
            f"An ordering key of topic {topic} begins with at least {len(ids)} tasks that expired before they were "
            f"due, more than a worker reads. Its later tasks are not sent. The first one is {ids[0]}. Find the dead "
            f"ones with `outbox list --state dead --topic {topic}`, and delete them with `outbox cancel`."
        )
        self._throttled_log.log("crowded_key", topic, sentence)


def parts(tasks: Sequence[_T], limits: Limits) -> Iterator[list[_T]]:
    """Yield the tasks in parts that fit into a batch. A larger task is a part by itself."""
    return chunked(tasks, limits.batch_size, limits.batch_bytes, lambda task: task.bytes)


def _candidate(tasks: Sequence[Candidate], prefix: Sequence[QueuedTask], following: QueuedTask | None) -> Candidate:
    """Return a prefix as a candidate. A key is as urgent as the most urgent of its tasks that the poll read."""
    most_urgent = min(tasks, key=lambda each: (-each.priority, each.available_at or each.created_at))
    first, *behind = (each.id for each in prefix)
    releases = following.id if following is not None and following.deferred else None
    size = sum(each.bytes for each in prefix)
    return most_urgent._replace(id=first, bytes=size, behind=tuple(behind), releases=releases)


def _deferrals(
    key: TopicKey, queue: Sequence[QueuedTask], tasks: Sequence[Candidate], limits: Limits
) -> Iterator[Claim]:
    """Return claims that defer the tasks behind the head of a key, as far as the poll has read them.

    Each claim begins with the head, and then the first and the last task behind it that was read. The deferrals of
    these two are short: a poll then finds the key even if an operator deletes the head and some tasks behind it.
    """
    head = queue[0].id
    behind = [each.id for each in queue[1:] if each.sendable]
    for part in parts(tasks, limits):
        ids = dict.fromkeys([head, *behind[:1], *behind[-1:], *(each.id for each in part)])
        yield Claim(key.topic, tuple(ClaimedTask(id, key.ordering_key, tasks[0].shard) for id in ids), Kind.DEFER)
