"""Write the marks of a batch again after its commit failed, without publishing again."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from outbox.base.schedules import MARKING, MARKING_ASIDE, MARKING_AT_EXIT, Backoff
from publishworker.host import Host
from publishworker.spanner.write_errors import StoreError, WriteRefused
from publishworker.types import Cancelled, CancelledTask, Claim, MarkState, Unmarked

#: Max seconds that marking is tried. Then published tasks are published again, because a duplicate is better than a
#: loss. At-most-once tasks stay marked, and may be lost.
MAX_MARKING_SECONDS = 900.0
#: After this many refused rows without a commit in between, the cause is probably not a row. Marking again then stops
#: at the first failure, and no batch divides what is refused.
MAX_REFUSED = 10


class SharedMarking:
    """State that the batches of a worker share: whether transactions commit now, and how long to mark at exit."""

    def __init__(self, host: Host, shutdown_seconds: float = 0.0) -> None:
        """After `shut_down`, batches mark for at most `shutdown_seconds` more."""
        self.random, self.clock = host.random, host.clock
        self._shutdown_seconds = shutdown_seconds
        #: Commits that have written rows. If two threads count at once, one count is lost. It matters only whether the
        #: number changes.
        self.commits = 0
        #: The number of rows that Spanner has refused to write since the last commit.
        self.refused_rows = 0
        self._threads = host.threads
        self._shutting_down = host.threads.event()
        self._shutdown_until = float("inf")

    def committed(self) -> None:
        """Count a commit that has written rows. It shows that Spanner accepts writes."""
        self.commits += 1
        self.refused_rows = 0

    def wait(self, seconds: float) -> None:
        """Let a batch wait. At exit the wait ends at once, and later ones are short."""
        if self.is_shutting_down:
            self._threads.sleep(min(seconds, MARKING_AT_EXIT.most))
        else:
            self._shutting_down.wait(seconds)

    def shut_down(self) -> None:
        """Let each batch try once more, and then until the shutdown time is over. Callable on any thread."""
        if not self.is_shutting_down:
            self._shutdown_until = self.clock() + self._shutdown_seconds
            self._shutting_down.set()

    @property
    def is_shutting_down(self) -> bool:
        """Tell whether the worker exits, so that batches have little time left."""
        return self._shutting_down.is_set()

    def is_over(self, since: float) -> bool:
        """Tell whether a batch that began to mark again at `since` must give up."""
        return self.clock() - since >= MAX_MARKING_SECONDS or (
            self.is_shutting_down and self.clock() >= self._shutdown_until
        )


class Marked(Protocol):
    """A batch as its marks need it."""

    def write_again(self, claim: Claim) -> Mapping[str, CancelledTask]:
        """Write the marks of a part in one transaction that publishes nothing. Raises StoreError."""


class MarkRetry:
    """Writes the marks of a batch again. It divides what is refused, or fails while others commit, into single rows."""

    def __init__(
        self,
        batch: Marked,
        parts: Sequence[Claim],
        marking: SharedMarking,
        *,
        state: MarkState,
        of: Collection[str],
        refused: Mapping[Claim, StoreError] = MappingProxyType({}),
    ) -> None:
        """Write these parts. `refused` has those that Spanner has refused already, with the errors.

        The tasks `of` this `state` are published or marked, and the others are neither.
        """
        self._batch = batch
        self._states = dict.fromkeys(of, state)
        self._marking = marking
        #: Whether Spanner refuses all remaining parts while other batches commit. The cause is then in these rows, so
        #: the batch takes no place (see InFlight).
        self.aside = False
        #: The last error.
        self._error = StoreError()
        self._since, self._commits = marking.clock(), marking.commits
        #: Parts that cannot be written while others can.
        self._refused = set(refused if marking.refused_rows <= MAX_REFUSED else ())
        self._reported = set(refused)
        self._set_parts([part for part in parts if part.locks])
        self._to_report: list[Unmarked | Cancelled] = [
            each for part, error in refused.items() for each in self._unmarked(part, error)
        ]

    def run(self) -> Iterator[Unmarked | Cancelled]:
        """Mark again after growing pauses.

        Yield an Unmarked for each row that cannot be written although others can, and for tasks that are given up.
        Yield a Cancelled after each commit that has found tasks cancelled, whatever other rows wait for.
        """
        backoff = Backoff(MARKING, self._marking.random)
        while self._parts:
            yield from self._to_report
            self._to_report.clear()
            self._marking.wait(backoff.next(MARKING_ASIDE.most if self.aside else None))
            self.try_once()
            if self._marking.is_over(self._since):
                self._to_report += self.give_up()
        yield from self._to_report

    def give_up(self) -> list[Unmarked]:
        """Try no more. Return what is not written."""
        given_up = [each for part in self._parts for each in self._unmarked(part, self._error, given_up=True)]
        self._set_parts(())
        return given_up

    def try_once(self) -> None:
        """Try each part once. Divide a part if Spanner refuses it, or if it fails while other transactions commit.

        While nothing commits, stop at the first failure, because the next part would fail, too. A refused part does not
        stop the round until Spanner has refused MAX_REFUSED rows.
        """
        untried, left, goes_on = deque(self._parts), list[Claim](), True
        while untried and goes_on:
            part = untried.popleft()
            if (error := self._mark(part)) is not None:
                is_refused, something_commits = isinstance(error, WriteRefused), self._marking.commits != self._commits
                goes_on = something_commits or (is_refused and self._marking.refused_rows < MAX_REFUSED)
                singles = part.single_claims() if goes_on else ()
                if is_refused:
                    untried.extendleft(reversed(singles))
                else:
                    left += singles
                if not singles:
                    left.append(part)
                    if goes_on:
                        self._note_refused(part, error)
            self._set_parts([*untried, *left])
            goes_on = goes_on and not self._marking.is_over(self._since)
        self._commits = self._marking.commits
        self.aside = bool(self._parts) and all(part in self._refused for part in self._parts)

    def _mark(self, part: Claim) -> StoreError | None:
        try:
            if cancelled := self._batch.write_again(part):
                self._to_report.append(Cancelled(part, cancelled))
        except StoreError as error:
            self._error = error
            return error
        return None

    def _note_refused(self, part: Claim, error: StoreError) -> None:
        """Note a part that cannot be written, and report it once."""
        if part not in self._refused:
            self._refused.add(part)
            self._marking.refused_rows += isinstance(error, WriteRefused)
        if part not in self._reported:
            self._reported.add(part)
            self._to_report += self._unmarked(part, error)

    def _set_parts(self, parts: Sequence[Claim]) -> None:
        self._parts = parts
        #: The tasks whose rows are still to be written. The relay's thread reads it.
        self.unmarked = frozenset(id for part in parts for id in part.ids)

    def _unmarked(self, part: Claim, error: StoreError, *, given_up: bool = False) -> list[Unmarked]:
        """Return an Unmarked for each state of the tasks of a part."""
        ids: dict[MarkState, list[str]] = {}
        for id in part.ids:
            ids.setdefault(self._states.get(id, "unpublished"), []).append(id)
        return [Unmarked(part.part(of_state), str(error), state, given_up) for state, of_state in ids.items()]
