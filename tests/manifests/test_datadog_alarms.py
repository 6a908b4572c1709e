"""When the monitors alarm: their queries, calculated by Datadog's rules over numbers of situations."""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.manifests.datadog_documents import monitors
from tests.manifests.datadog_queries import METRIC, alarm

MONITORS = monitors()
COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
CALCULATE: dict[type, Callable[[float, float], float]] = {ast.Sub: operator.sub, ast.Mult: operator.mul}

#: By the end of a metric's name, a value for each minute of the window; None where nothing came.
Series = Mapping[str, Sequence[float | None]]


def calculated(node: ast.AST, values: Mapping[str, float | None]) -> float | None:
    """Calculate an expression at one point in time; without a value of a metric there is no result."""
    if isinstance(node, ast.Expression):
        return calculated(node.body, values)
    if isinstance(node, ast.Constant):
        return float(node.value)
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Call):  # default_zero is all that is used
        return calculated(node.args[0], values) or 0.0
    assert isinstance(node, ast.BinOp)
    left, right = calculated(node.left, values), calculated(node.right, values)
    return None if left is None or right is None else CALCULATE[type(node.op)](left, right)


def alarms(name: str, series: Series) -> bool:
    """Tell whether a monitor alarms at the end of a window.

    Counts are added up over the window, then calculated with, and are 0 if there are none; all else is calculated with
    point by point, then taken together (Datadog's guide as-count-in-monitor-evaluations).
    """
    parts = alarm(MONITORS[name]["query"])
    assert parts is not None
    names: dict[str, str] = {}
    for found in METRIC.finditer(parts.expression):
        names[f"m{len(names)}"] = next(each for each in series if found["name"].endswith(each))
    left = iter(names)
    tree = ast.parse(METRIC.sub(lambda _: next(left), parts.expression), mode="eval")
    if "as_count" in parts.expression:
        sums = {each: sum(value or 0 for value in series[of]) for each, of in names.items()}
        result = calculated(tree, sums)
    else:
        columns = zip(*(series[of] for of in names.values()), strict=True)
        points = [calculated(tree, dict(zip(names, column, strict=True))) for column in columns]
        result = {"min": min, "max": max, "sum": sum}[parts.time]([point for point in points if point is not None])
    assert result is not None
    return COMPARE[parts.sign](result, parts.threshold)


@pytest.mark.parametrize(
    ("situation", "pending", "published", "expected"),
    [
        ("idle", [0] * 10, [None] * 10, False),
        ("busy", [900] * 10, [20.0] * 10, False),
        ("one task sent in ten minutes", [5_000_000] * 10, [None] * 9 + [1 / 60], False),
        ("all topics are paused", [0] * 10, [0.0] * 10, False),
        ("a burst came just now", [0] * 9 + [700], [None] * 10, False),
        ("grows, and the agent sends zeros", list(range(10, 20)), [0.0] * 10, True),
        ("grows, and nothing is sent", list(range(10, 20)), [None] * 10, True),
        ("the count is full, so it cannot grow", [10_000] * 10, [None] * 10, True),
        ("the count takes long", [700, None, None, None, 800, None, None, None, 900, None], [None] * 10, True),
    ],
)
def test_a_stalled_backlog_alarms(
    situation: str, pending: Sequence[float | None], published: Sequence[float | None], expected: bool
) -> None:
    """Whether or not it is seen growing, and neither an idle outbox nor a paused one."""
    assert alarms("backlog-stalled", {"pending_task_count": pending, "published_task_count": published}) is expected, (
        situation
    )


@pytest.mark.parametrize(
    ("situation", "failed", "published", "expected"),
    [
        ("one failure in a quiet night", [1], [1], False),
        ("one in a hundred", [100], [10_000], False),
        ("one in five", [1_000], [4_000], True),
        ("all of a few", [25], [0], True),
        ("nothing happens", [None], [None], False),
    ],
)
def test_many_failures_alarm(
    situation: str, failed: Sequence[float | None], published: Sequence[float | None], expected: bool
) -> None:
    """But not some, of a few or of very many."""
    assert alarms("failure-rate", {"failed_task_count": failed, "published_task_count": published}) is expected, (
        situation
    )


@pytest.mark.parametrize(
    ("situation", "failed", "published", "expected"),
    [
        ("a group's commit failed", [100], [5_000], False),
        ("some commits fail all the time", [500], [100_000], False),
        ("most commits fail", [3_000], [4_000], True),
    ],
)
def test_many_failed_commits_alarm(
    situation: str, failed: Sequence[float | None], published: Sequence[float | None], expected: bool
) -> None:
    """But not one group, which is no storm of duplicates."""
    series = {"failed_commits_count": failed, "total_published_task_count": published}
    assert alarms("failed-commits", series) is expected, situation


@pytest.mark.parametrize(
    ("situation", "states", "expected"),
    [
        ("rests and is probed", [2, 1, 2, 2, 1] * 3, True),
        ("worked in between", [2] * 7 + [0] + [2] * 7, False),
        ("began to rest", [None] * 12 + [2] * 3, False),
        ("waits for a task to be probed with, until it is forgotten", [2] * 3 + [1] * 10 + [None] * 2, False),
    ],
)
def test_a_topic_that_does_not_work_for_long_alarms(
    situation: str, states: Sequence[float | None], expected: bool
) -> None:
    """While it is probed, too, but not as soon as it rests."""
    assert alarms("topic-rests", {"breaker_state": states}) is expected, situation


@pytest.mark.parametrize(
    ("name", "metric", "values", "expected"),
    [
        ("oldest-age", "oldest_task_age", [310, 370, 430, 490, 550], True),
        ("oldest-age", "oldest_task_age", [310, 370, 430, 12, 72], False),
        ("no-heartbeat", "heartbeat_count", [4, 4, 0, 0, 0], False),
        ("no-heartbeat", "heartbeat_count", [0] * 5, True),
        ("dead-tasks", "dead_task_count", [None] * 9 + [1], True),
        ("dead-tasks", "dead_task_count", [0] * 10, False),
    ],
)
def test_others_alarm(name: str, metric: str, values: Sequence[float | None], expected: bool) -> None:
    """At their thresholds, and not below."""
    assert alarms(name, {metric: values}) is expected
