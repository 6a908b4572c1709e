"""From tasks of ordering keys to runs: the leading tasks of a key that may go, as one candidate.

The poll gives keys, not tasks: what stands at the front of each is read in a snapshot of its own, and only that may go
(docs/guide/ordering.md). A later commit has a later CreatedAt than any snapshot, so nothing slips in before a run.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from random import Random
from typing import TypeVar

from outbox.shared.throttled_log import ThrottledLog
from publishworker.batching import Limits
from publishworker.poller import Found
from publishworker.spanner.store import Store
from publishworker.types import Batch, Candidate, Key, QueuedTask

#: Rows of one look at the key_heads of keys, about: where very many keys have much to send, their runs become shorter.
MAX_KEY_HEAD_ROWS = 5_000
#: Rows of a further look, behind expired tasks: each takes four kilobytes of memory while it is read.
MAX_PASSED_OVER = 20_000

_T = TypeVar("_T", Candidate, QueuedTask)


@dataclass(frozen=True, slots=True)
class ResolvedKeys:
    """What may be taken, tasks to put off behind heads that are not due, whether keys in flight have more to send."""

    candidates: Sequence[Candidate]
    held: Sequence[Batch] = ()
    busy: bool = False


class Ordering:
    """Looks at the key_heads of keys. It belongs to the thread of the relay."""

    def __init__(self, store: Store, limits: Limits, random: Random, *, skip_dead: bool) -> None:
        """Cut runs to the `limits` of a batch; `skip_dead` is whether a dead task holds back no other."""
        self._store = store
        self._limits = limits
        self._random = random
        self._skip_dead = skip_dead
        self._throttled_log = ThrottledLog()

    def key_heads(self, found: Found, in_flight: frozenset[Key], in_doubt: frozenset[str]) -> ResolvedKeys:
        """Return the candidates with the run of each key in place of its tasks, but for the keys in flight.

        What is `in_doubt` is left out: it has been marked since the poll, and is in no front. Raises StoreError.
        """
        loose = [each for each in found.candidates if each.ordering_key is None and each.id not in in_doubt]
        seen: dict[Key, list[Candidate]] = {}
        for each in found.candidates:
            if each.ordering_key is not None:
                seen.setdefault(Key(each.topic, each.ordering_key), []).append(each)
        keys = {key: tasks for key, tasks in seen.items() if key not in in_flight}
        busy = len(keys) < len(seen)
        if not keys:
            return ResolvedKeys(loose, busy=busy)
        waiting = self._look(keys)
        runs: list[Candidate] = []
        held: list[Batch] = []
        for key, tasks in keys.items():
            front = waiting.get(key, ())
            sendable = [*takewhile(lambda each: each.sendable, front)]
            run = next(cut(sendable, self._limits), [])
            if run:
                following = next(iter(sendable[len(run) :]), None)
                runs.append(_candidate(tasks, run, following))
            elif front:
                held += _held(key, front[0].id, tasks, self._limits)
        return ResolvedKeys(loose + runs, held, busy)

    def _look(self, keys: Collection[Key]) -> dict[Key, list[QueuedTask]]:
        """Return the key_heads of keys without what is passed over, which may be all that a first look shows.

        There may be more of that than a worker can read: such a key waits, and somebody is told.
        """
        # One row more than a run may have shows whether a deferred one follows, of which the poll saw nothing.
        wanted = rows = 1 + max(1, min(self._limits.batch_size, MAX_KEY_HEAD_ROWS // len(keys)))
        key_heads: dict[Key, list[QueuedTask]] = {}
        while keys:
            found = self._store.key_heads(keys, rows, skip_dead=self._skip_dead)
            key_heads |= {key: [each for each in tasks if not each.expired_early] for key, tasks in found.items()}
            further = [key for key, tasks in found.items() if len(tasks) == rows and len(key_heads[key]) < wanted]
            rows += max((len(found[key]) - len(key_heads[key]) for key in further), default=0)
            # The others have their turn in another poll, but for a key of its own that nobody could read.
            keys = self._random.sample(further, min(len(further), MAX_PASSED_OVER // rows))
            for key in further:
                if rows > MAX_PASSED_OVER and not key_heads[key]:
                    self._complain(key.topic, [each.id for each in found[key]])
        return key_heads

    def _complain(self, topic: str, ids: Sequence[str]) -> None:
        sentence = (
            f"at least {len(ids)} expired tasks stand in front of an ordering key of topic {topic}, beginning with "
            f"{ids[0]}: the key waits until they are deleted, by outbox discard"
        )
        self._throttled_log.say("crowded_key", topic, sentence)


def cut(tasks: Sequence[_T], limits: Limits) -> Iterator[list[_T]]:
    """Cut tasks into pieces of at most a batch's tasks and bytes; one that is too large makes a piece of its own."""
    piece: list[_T] = []
    size = 0
    for task in tasks:
        if piece and (len(piece) == limits.batch_size or size + task.bytes > limits.batch_bytes):
            yield piece
            piece, size = [], 0
        piece.append(task)
        size += task.bytes
    if piece:
        yield piece


def _candidate(tasks: Sequence[Candidate], run: Sequence[QueuedTask], following: QueuedTask | None) -> Candidate:
    """Return a run as a candidate: a key is as urgent as the most urgent of its tasks that the poll saw."""
    most_urgent = min(tasks, key=lambda each: (-each.priority, each.available_at or each.created_at))
    first, *behind = (each.id for each in run)
    releases = following.id if following is not None and following.deferred else None
    return replace(
        most_urgent, id=first, bytes=sum(each.bytes for each in run), behind=tuple(behind), releases=releases
    )


def _held(key: Key, head: str, tasks: Sequence[Candidate], limits: Limits) -> Iterator[Batch]:
    """Return batches of the tasks that the poll saw, each with the head that holds them."""
    for piece in cut([each for each in tasks if each.id != head], limits):
        ids = (head, *(each.id for each in piece))
        yield Batch(key.topic, ids, keys=(key.ordering_key,) * len(ids), defers=True)
