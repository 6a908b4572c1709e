"""When the monitors alarm: their queries, calculated by Datadog's rules over the numbers of a situation."""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.manifests.datadog_queries import ALARM, METRIC, MONITORS

COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
CALCULATE: dict[type, Callable[[float, float], float]] = {ast.Sub: operator.sub, ast.Mult: operator.mul}

#: A value for each minute of the window; None without a sample.
Series = Sequence[float | None]


def calculated(node: ast.AST, values: Mapping[str, float | None]) -> float | None:
    """Calculate an expression at one point in time; without a value of a metric there is no result."""
    if isinstance(node, ast.Constant):
        return float(node.value)
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Call):
        assert ast.unparse(node.func) == "default_zero"
        return calculated(node.args[0], values) or 0.0
    assert isinstance(node, ast.BinOp)
    left, right = calculated(node.left, values), calculated(node.right, values)
    return None if left is None or right is None else CALCULATE[type(node.op)](left, right)


def alarms(name: str, *series: Series) -> bool:
    """Return whether a monitor alarms at the end of a window; there is a series for each metric, in the query's order.

    Datadog adds up counts over the window, calculates with the sums, and takes no points for 0. With other metrics it
    calculates point by point and then combines the results (its guide as-count-in-monitor-evaluations).
    """
    parts = ALARM.fullmatch(MONITORS[name]["query"])
    assert parts is not None
    names = [f"m{number}" for number in range(len(METRIC.findall(parts["expression"])))]
    left = iter(names)
    tree = ast.parse(METRIC.sub(lambda _: next(left), parts["expression"]), mode="eval").body
    if "as_count" in parts["expression"]:
        sums = {each: sum(value or 0 for value in values) for each, values in zip(names, series, strict=True)}
        result = calculated(tree, sums)
    else:
        points = [calculated(tree, dict(zip(names, column, strict=True))) for column in zip(*series, strict=True)]
        result = {"min": min, "max": max}[parts["time"]]([point for point in points if point is not None])
    assert result is not None
    return COMPARE[parts["sign"]](result, float(parts["threshold"]))


NOTHING: Series = [None] * 10
SITUATIONS: dict[str, dict[str, tuple[bool, *tuple[Series, ...]]]] = {
    # Whether or not it is seen to grow; silent for an idle outbox and for a paused one.
    "backlog-stalled": {
        "idle": (False, [0] * 10, NOTHING),
        "busy": (False, [900] * 10, [20.0] * 10),
        "one task sent in ten minutes": (False, [5_000_000] * 10, [None] * 9 + [1 / 60]),
        "all topics are paused": (False, [0] * 10, [0.0] * 10),
        "a burst came just now": (False, [0] * 9 + [700], NOTHING),
        "grows, and the agent sends zeros": (True, list(range(10, 20)), [0.0] * 10),
        "grows, and nothing is sent": (True, list(range(10, 20)), NOTHING),
        "the count is full, so it cannot grow": (True, [10_000] * 10, NOTHING),
        "the count takes long": (True, [700, None, None, None, 800, None, None, None, 900, None], NOTHING),
    },
    "failure-rate": {
        "one failure in a quiet night": (False, [1], [1]),
        "one in a hundred": (False, [100], [10_000]),
        "one in five": (True, [1_000], [4_000]),
        "all of a few": (True, [25], [0]),
        "nothing happens": (False, [None], [None]),
    },
    # One batch is no storm of duplicates.
    "failed-commits": {
        "a batch's commit failed": (False, [100], [5_000]),
        "some commits fail all the time": (False, [500], [100_000]),
        "most commits fail": (True, [3_000], [4_000]),
    },
    "circuit-open": {
        "the circuit is open and is probed": (True, [2, 1, 2, 2, 1] * 3),
        "worked in between": (False, [2] * 7 + [0] + [2] * 7),
        "the circuit has just opened": (False, [None] * 12 + [2] * 3),
        "no task to probe with, until it is forgotten": (False, [2] * 3 + [1] * 10 + [None] * 2),
    },
    # A head that is retried soon blocks its key for a short time only.
    "blocked-keys": {
        "the head of a key is dead or scheduled": (True, [3] * 15),
        "a head was retried and sent": (False, [3] * 4 + [0] * 11),
        "a key has just been blocked": (False, [None] * 12 + [3] * 3),
        "no key was ever blocked": (False, [None] * 15),
    },
    "oldest-age": {"late": (True, [310, 370, 430, 490, 550]), "late for a while": (False, [310, 370, 430, 12, 72])},
    "poll-latency": {"slow": (True, [1.2] * 15), "slow for a while": (False, [1.2] * 10 + [0.1] * 5)},
    "no-heartbeat": {"just stopped": (False, [4, 4, 0, 0, 0]), "none": (True, [0] * 5)},
    **{
        name: {"one": (True, [None] * 9 + [1]), "none": (False, [0] * 10)}
        for name in ("dead-tasks", "at-most-once-unconfirmed", "shutdown-timeout", "stuck-batch", "lost-metrics")
    },
}


@pytest.mark.parametrize("name", MONITORS)
def test_a_monitor_alarms_in_some_situations_and_not_in_others(name: str) -> None:
    expected = {situation: alarm for situation, (alarm, *_) in SITUATIONS[name].items()}
    assert {situation: alarms(name, *series) for situation, (_, *series) in SITUATIONS[name].items()} == expected
    assert set(expected.values()) == {True, False}
