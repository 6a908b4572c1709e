"""Check the topic controls, because any program may write invalid ones."""

from collections.abc import Mapping
from dataclasses import astuple
from typing import TypeVar

from outbox.table.controls import problems
from publishworker.types import TopicControls

_V = TypeVar("_V")

_LIMIT_COLUMNS = ("RatePerSecond", "Burst", "MaxInFlight")
_POLICY_COLUMNS = ("MaxAttempts", "BackoffInitialSeconds", "BackoffMaxSeconds", "DeadAfterSeconds")


def valid(controls: TopicControls) -> tuple[TopicControls, dict[tuple[str, str], str]]:
    """Return the valid controls, and by kind and topic why others are not. An invalid route pauses its topic."""
    wrong: dict[tuple[str, str], str] = {}

    def keep(kind: str, values: Mapping[str, _V], columns: tuple[str, ...], sentence: str) -> dict[str, _V]:
        for topic, value in values.items():
            row = dict(zip(columns, (value,) if isinstance(value, str) else astuple(value), strict=True))  # type: ignore[call-overload]  # a dataclass
            if found := "; ".join(f"{column} {text}" for column, text in problems(row).items()):
                wrong[kind, topic] = f"{sentence.format(topic)}: {found}. See AsynchronousTaskTopics"
        return {topic: value for topic, value in values.items() if (kind, topic) not in wrong}

    limits = keep("limits", controls.limits, _LIMIT_COLUMNS, "The limits of topic {} are ignored")
    policies = keep("policy", controls.policies, _POLICY_COLUMNS, "The retry policy of topic {} is ignored")
    routes = keep("route", controls.routes, ("PublishTo",), "Topic {} counts as paused")
    paused = controls.paused | (controls.routes.keys() - routes.keys())
    return TopicControls(paused, limits, routes, policies), wrong
