"""The plan checker, on plans in the documented format: a good one, and each way in which one can be bad."""

from typing import Any

import pytest
from google.cloud.spanner_v1 import PlanNode, QueryPlan

from publishworker.process.verify.plans import lines, problems, scans

INDEX, TABLE = "AsynchronousTasksToSend", "AsynchronousTasks"
POLL = f"SELECT Id FROM {TABLE}@{{FORCE_INDEX={INDEX}}} WHERE Shard = 1"
LOCK = f"SELECT Id FROM UNNEST(@ids) AS i JOIN {TABLE}@{{FORCE_INDEX=_BASE_TABLE}} ON Id = i"


def plan(*nodes: tuple[str, dict[str, Any], tuple[int, ...], str]) -> QueryPlan:
    """Each node has a name, metadata, the indexes of its children, and a seek condition or an empty text."""
    found = []
    conditions = []
    for index, (name, metadata, children, seek) in enumerate(nodes):
        links = [PlanNode.ChildLink(child_index=child) for child in children]
        if seek:
            links.append(PlanNode.ChildLink(child_index=len(nodes) + len(conditions), type_="Seek Condition"))
            conditions.append(seek)
        kind = PlanNode.Kind.RELATIONAL
        found.append(PlanNode(index=index, kind=kind, display_name=name, child_links=links, metadata=metadata))
    for index, text in enumerate(conditions, len(nodes)):
        short = PlanNode.ShortRepresentation(description=text)
        found.append(PlanNode(index=index, kind=PlanNode.Kind.SCALAR, short_representation=short))
    return QueryPlan(plan_nodes=found)


def scan(target: str, **more: Any) -> tuple[str, dict[str, Any], tuple[int, ...], str]:
    kind = "TableScan" if target == TABLE else "IndexScan"
    return "Scan", {"scan_type": kind, "scan_target": target, **more}, (), ""


SEEK = ("Filter Scan", {}, (2,), "($Shard = 1) AND IS_NULL($SentAt)")
GOOD = plan(("Distributed Union", {}, (1,), ""), SEEK, scan(INDEX))


@pytest.mark.parametrize(
    ("statement", "bad", "sentence"),
    [
        (POLL, plan(("Distributed Union", {}, (1,), ""), scan(INDEX, **{"Full scan": "true"})), "a full scan"),
        (POLL, plan(("Distributed Union", {}, (1,), ""), scan(INDEX)), "a scan without a seek condition"),
        (POLL, plan(("Sort Limit", {}, (1,), ""), SEEK, scan(INDEX)), "Sort Limit reads all rows of the range"),
        (
            POLL,
            plan(("Hash Join", {}, (1, 3), ""), SEEK, scan(INDEX), ("Filter Scan", {}, (4,), "x"), scan(INDEX)),
            "JOIN_METHOD=APPLY_JOIN had no effect",
        ),
        (
            POLL,
            plan(
                ("Distributed Cross Apply", {}, (1, 3), ""), SEEK, scan(INDEX),
                ("Filter Scan", {}, (4,), "($Id = $Id_1)"), scan(TABLE),
            ),
            "AsynchronousTasks: a join back to the table",
        ),
        (LOCK, plan(("Distributed Union", {}, (1,), ""), SEEK, scan("ByTopic")), "forces AsynchronousTasks"),
    ],
    ids=["full scan", "no seek", "sort", "hash join", "back join", "another index"],
)  # fmt: skip
def test_a_bad_plan_is_named(statement: str, bad: QueryPlan, sentence: str) -> None:
    assert [each for each in problems(bad, statement) if sentence in each], problems(bad, statement)


@pytest.mark.parametrize(
    ("statement", "good"),
    [
        (POLL, GOOD),
        (POLL, plan(("Sort", {}, (1,), ""), ("Limit", {}, (2,), ""), ("Filter Scan", {}, (3,), "x"), scan(INDEX))),
        (LOCK, plan(("Sort", {}, (1,), ""), SEEK, scan(TABLE))),
        ("SELECT 1 FROM AsynchronousTaskTopics", plan(scan("AsynchronousTaskTopics", **{"Full scan": "true"}))),
    ],
    ids=["seek", "sort of a limited range", "sort of rows by key", "small table"],
)
def test_a_good_plan_has_no_problem(statement: str, good: QueryPlan) -> None:
    assert problems(good, statement) == []


def test_the_emulator_has_no_plan() -> None:
    assert scans(QueryPlan()) == []


def test_a_plan_is_shown_as_a_tree() -> None:
    assert list(lines(GOOD)) == [
        "Distributed Union",
        "  Filter Scan (Seek Condition: ($Shard = 1) AND IS_NULL($SentAt))",
        f"    Scan (scan_target: {INDEX}, scan_type: IndexScan)",
    ]
