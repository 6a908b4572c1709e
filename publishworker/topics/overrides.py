"""Where the messages of each topic go, and how failures are retried: routes and policies of AsynchronousTaskTopics."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace

from outbox.table.controls import problems
from publishworker.delivery.claim import Claim
from publishworker.throttled_log import ThrottledLog
from publishworker.types import NO_POLICY, TopicControls, TopicPolicy

_log = logging.getLogger("publishworker")

_POLICY_COLUMNS = ("MaxAttempts", "BackoffInitialSeconds", "BackoffMaxSeconds", "DeadAfterSeconds")


class Overrides:
    """The routes and policies of all topics, as last read. It belongs to the relay's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin without any: messages go to their own topic, and the worker's retry policy applies."""
        self._throttled_log = ThrottledLog(clock)
        self._routes: Mapping[str, str] = {}
        self._policies: Mapping[str, TopicPolicy] = {}
        #: Topics whose route is invalid, so their messages must wait.
        self.unknown_destination: frozenset[str] = frozenset()

    def apply(self, controls: TopicControls) -> frozenset[str]:
        """Apply routes and policies. Return the topics whose messages go to another Pub/Sub topic than before.

        An invalid row is logged once a minute, and the worker's policy applies instead of an invalid one.
        """
        invalid = {topic: sentence for topic, to in controls.routes.items() if (sentence := route_problem(to))}
        for topic, sentence in invalid.items():
            self._warn("route", topic, f"Topic {topic} counts as paused: {sentence}")
        wrong = {topic: sentence for topic, its in controls.policies.items() if (sentence := policy_problem(its))}
        for topic, sentence in wrong.items():
            self._warn("policy", topic, f"The retry policy of topic {topic} is ignored: {sentence}")
        self.unknown_destination = frozenset(invalid)
        self._policies = {topic: its for topic, its in controls.policies.items() if topic not in wrong}
        before, self._routes = self._routes, {k: to for k, to in controls.routes.items() if k not in invalid}
        changed = {topic for topic, _ in before.items() ^ self._routes.items()}
        for topic in sorted(changed):
            to = self._routes.get(topic, topic)
            _log.info("Messages of topic %s go to %s", topic, to, extra={"action": "routed"})
        return frozenset(changed)

    def given(self, claim: Claim) -> Claim:
        """Return a claim with the destination and the retry policy that its topic has now."""
        policy = self._policies.get(claim.topic, NO_POLICY)
        return replace(claim, publish_to=self._routes.get(claim.topic), policy=policy)

    def _warn(self, action: str, topic: str, sentence: str) -> None:
        self._throttled_log.log(action, topic, f"{sentence}. See AsynchronousTaskTopics")


def route_problem(to: str) -> str:
    """Return why messages cannot go to the Pub/Sub topic `to`, or ""."""
    return _sentence({"PublishTo": to})


def policy_problem(policy: TopicPolicy) -> str:
    """Return why a retry policy is invalid, or ""."""
    return _sentence(dict(zip(_POLICY_COLUMNS, astuple(policy), strict=True)))


def _sentence(row: Mapping[str, object]) -> str:
    return "; ".join(f"{column} {text}" for column, text in problems(row).items())
