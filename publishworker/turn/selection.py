"""Which batches start now: deferrals, then a fair share for lower priorities, then the most urgent tasks."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from random import Random

from publishworker.delivery.claim import Claim
from publishworker.topics.availability import Topics
from publishworker.turn.batching import Limits, choose_batches, fitting
from publishworker.turn.fair_share import FairShare
from publishworker.turn.in_flight import InFlight
from publishworker.turn.ordering import ResolvedKeys
from publishworker.types import Candidate


class Selector:
    """Chooses batches from the candidates of a poll. It belongs to the relay's thread."""

    def __init__(self, limits: Limits, topics: Topics, random: Random, fair_share: float) -> None:
        """Choose within `limits`, with `fair_share` (0 to 0.5) of the batches for lower priorities."""
        self._limits = limits
        self._topics = topics
        self._random = random
        self._fair_share = FairShare(fair_share)
        self._leaves_place = fair_share > 0
        #: Whether tasks are left, polled or not, only because the max number of batches or bytes is in flight.
        self.left_tasks = False
        #: Whether the last selection held back batches because too many bytes are in flight.
        self.lacks_bytes = False

    @property
    def below(self) -> int | None:
        """Return the priority below which the next poll also reads ready tasks, for the fair share, or None."""
        return self._fair_share.below

    def select(self, resolved: ResolvedKeys, in_flight: InFlight, cut_off: Collection[str]) -> list[Claim]:
        """Return the batches to start in addition to those in flight.

        `cut_off` are the topics that have more tasks in the table. Batches that defer blocked tasks get at most a
        quarter of the places, or half if no task can be sent. Without deferrals, each poll would return the same
        blocked tasks.
        """
        deferrals = list(resolved.blocked[: self._places_to_defer(in_flight, nothing_else=not resolved.candidates)])
        candidates, probes = self._topics.circuits.probes(resolved.candidates, cut_off)
        allowed = self._topics.rate_limits.allowances(in_flight.tasks_by_topic())
        allowed |= {topic: min(tasks, allowed.get(topic, tasks)) for topic, tasks in probes.items()}
        for_lower = self._batches(self._fair_share.choose(candidates), in_flight, deferrals, allowed)
        for_lower = for_lower[: self._fair_share.batches]
        for batch in for_lower:
            if batch.topic in allowed:
                allowed[batch.topic] -= len(batch.tasks)
        chosen = {id for batch in for_lower for id in batch.ids}
        others = [each for each in candidates if each.id not in chosen]
        wanted = for_lower + self._batches(others, in_flight, deferrals + for_lower, allowed)
        batches = fitting(wanted, self._limits.bytes - in_flight.bytes(), alone=not in_flight.bytes())
        self._note_left_tasks(candidates, batches, len(for_lower), allowed, cut_off)
        self.lacks_bytes = len(batches) < len(wanted)
        return deferrals + batches

    def _note_left_tasks(
        self,
        candidates: Sequence[Candidate],
        batches: Sequence[Claim],
        for_lower: int,
        allowed: Mapping[str, int],
        cut_off: Collection[str],
    ) -> None:
        """Record whether tasks are left that wait for places or bytes, and how many batches lower priorities got.

        Topics in `allowed` are ignored, because their tasks wait for a limit or for a circuit to close.
        """
        started = sum(len(batch.tasks) for batch in batches if batch.topic not in allowed)
        startable = sum(each.task_count for each in candidates if each.topic not in allowed)
        self.left_tasks = bool(set(cut_off) - allowed.keys()) or started < startable
        highest = max((each.priority for each in candidates), default=None)
        self._fair_share.count(len(batches), min(for_lower, len(batches)), highest if self.left_tasks else None)

    def _places_to_defer(self, in_flight: InFlight, *, nothing_else: bool) -> int:
        places = self._limits.batches // (2 if nothing_else else 4)
        if places == 0:  # fewer than four places: deferrals get one place, on average in every fourth turn
            places = int(nothing_else or self._random.random() < 1 / 4)
        free = self._limits.batches - in_flight.places
        return max(0, min(free, places - in_flight.deferring()))

    def _batches(
        self, candidates: Sequence[Candidate], in_flight: InFlight, chosen: Sequence[Claim], allowed: Mapping[str, int]
    ) -> list[Claim]:
        places = in_flight.by_topic() + Counter(batch.topic for batch in chosen)
        return choose_batches(candidates, self._limits, self._random, places, allowed, leaves_place=self._leaves_place)
