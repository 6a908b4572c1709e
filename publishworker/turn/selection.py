"""Which batches start now: deferrals, then a fair share for lower priorities, then the most urgent tasks."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import NamedTuple

from publishworker.delivery.claim import Claim
from publishworker.topics.availability import Topics
from publishworker.turn.batching import Limits, choose_batches, fitting
from publishworker.turn.in_flight import InFlight
from publishworker.turn.ordering import ResolvedKeys
from publishworker.types import Candidate


class Selection(NamedTuple):
    """The batches to start."""

    claims: Sequence[Claim] = ()
    #: More tasks, polled or not, could start if more batches or bytes were allowed.
    left_tasks: bool = False
    #: Batches are held back because too many bytes are in flight.
    is_byte_limited: bool = False


class FairShare:
    """Counts the batches owed to lower priorities, which take turns from the second highest to the lowest."""

    def __init__(self, share: float) -> None:
        self._share = share  # 0 to 1, the part of the batches for lower priorities; 0 is strict priority
        self._owed = 0.0
        self._highest: int | None = None
        self._last_chosen: int | None = None

    @property
    def batches(self) -> int:
        """Return the number of batches owed."""
        return int(self._owed)

    @property
    def below_priority(self) -> int | None:
        """Return the priority below which the next poll has to read ready tasks as well, or None."""
        if not self.batches or self._highest is None:
            return None
        return self._highest if self._last_chosen is None else self._last_chosen

    def choose(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the tasks of the priority that is next, or none if nothing is owed."""
        below_priority = self.below_priority
        if below_priority is None:
            return []
        lower = [each for each in candidates if each.priority < below_priority]  # OUT-ORDER-3
        if not lower:
            if self._last_chosen is None:
                self._owed = 0.0  # no lower task waits; try again when the next share is due
            self._last_chosen = None
            return []
        self._last_chosen = max(each.priority for each in lower)
        return [each for each in lower if each.priority == self._last_chosen]

    def count(self, batches: int, given: int, top: int | None) -> None:
        """Note that `batches` batches start, `given` of them for lower priorities. `top` is the highest priority.

        `top` is None if no task is left, because then no priority waits. What is owed is bounded, so that a long time
        without tasks of lower priority does not add up. The bound is high enough for one poll that finds none of them.
        """
        earned = self._share * batches
        self._owed = min(self._owed + earned - given, 1 + 3 * earned)
        self._highest = top


class Selector:
    """Chooses batches from the candidates of a poll. It belongs to the relay's thread."""

    def __init__(self, limits: Limits, topics: Topics, random: Random, fair_share: float) -> None:
        self._limits = limits
        self._topics = topics
        self._random = random
        self._fair_share = FairShare(fair_share)
        self._leaves_place = fair_share > 0

    @property
    def below_priority(self) -> int | None:
        """Return the priority below which the next poll also reads ready tasks, for the fair share, or None."""
        return self._fair_share.below_priority

    def select(self, resolved: ResolvedKeys, in_flight: InFlight, cut_off: Collection[str]) -> Selection:
        """Choose the batches to start in addition to those in flight.

        `cut_off` are the topics that have more tasks than the poll has read. Batches that defer blocked tasks get at
        most a quarter of the places, or half if no task can be sent. Without deferrals, each poll would return the same
        blocked tasks.
        """
        deferrals = list(resolved.blocked[: self._places_to_defer(in_flight, nothing_else=not resolved.candidates)])
        candidates, allowed = self._topics.admit(resolved.candidates, in_flight.tasks_by_topic(), cut_off)
        lower = self._batches(self._fair_share.choose(candidates), in_flight, deferrals, allowed)
        lower = lower[: self._fair_share.batches]
        for claim in lower:
            if claim.topic in allowed:
                allowed[claim.topic] -= len(claim.tasks)
        chosen = {id for claim in lower for id in claim.ids}
        others = [each for each in candidates if each.id not in chosen]
        wanted = lower + self._batches(others, in_flight, deferrals + lower, allowed)
        claims = fitting(wanted, self._limits.bytes - in_flight.bytes(), alone=not in_flight.bytes())
        # Topics in `allowed` do not count: their tasks wait for a rate limit or a circuit.
        started = sum(len(claim.tasks) for claim in claims if claim.topic not in allowed)
        startable = sum(each.task_count for each in candidates if each.topic not in allowed)
        left_tasks = bool(set(cut_off) - allowed.keys()) or started < startable
        highest = max((each.priority for each in candidates), default=None)
        given = sum(any(claim is each for each in claims) for claim in lower)
        self._fair_share.count(len(claims), given, highest if left_tasks else None)
        return Selection(deferrals + claims, left_tasks, is_byte_limited=len(claims) < len(wanted))

    def _places_to_defer(self, in_flight: InFlight, *, nothing_else: bool) -> int:
        places = self._limits.batches // (2 if nothing_else else 4)
        if places == 0:  # fewer than four places: deferrals get one place, on average in every fourth turn
            places = int(nothing_else or self._random.random() < 1 / 4)
        free = self._limits.batches - in_flight.places
        return max(0, min(free, places - in_flight.deferring()))

    def _batches(
        self, candidates: Sequence[Candidate], in_flight: InFlight, chosen: Sequence[Claim], allowed: Mapping[str, int]
    ) -> list[Claim]:
        places = in_flight.by_topic() + Counter(claim.topic for claim in chosen)
        return choose_batches(candidates, self._limits, self._random, places, allowed, leaves_place=self._leaves_place)
