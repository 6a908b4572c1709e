"""Query plans as Spanner returns them: as a tree, and whether they read more than they need.

The format: https://cloud.google.com/spanner/docs/reference/rpc/google.spanner.v1#queryplan, the operators:
https://cloud.google.com/spanner/docs/query-execution-operators
"""

import re
from collections.abc import Iterator
from itertools import takewhile

from google.cloud.spanner_v1 import PlanNode, QueryPlan

#: The tables that are read as a whole, because they have few rows: for topics, workers and layouts.
SMALL_TABLES = ("AsynchronousTaskTopics", "AsynchronousTaskWorkers", "AsynchronousTaskShards")
_FORCED = re.compile(r"(\w+)@\{FORCE_INDEX=(\w+)\}")


def lines(plan: QueryPlan, node: PlanNode | None = None, depth: int = 0) -> Iterator[str]:
    """Yield a plan as a tree of relational operators, each with its metadata and conditions."""
    node = node or plan.plan_nodes[0]
    details = ", ".join(f"{name}: {text}" for name, text in sorted((_metadata(node) | _conditions(plan, node)).items()))
    yield "  " * depth + node.display_name + (f" ({details})" if details else "")
    for child in _inputs(plan, node):
        yield from lines(plan, child, depth + 1)


def scans(plan: QueryPlan) -> list[PlanNode]:
    """Return the scans of a plan. It has none on the emulator."""
    return [node for node in plan.plan_nodes if "Scan" in node.display_name and "scan_target" in _metadata(node)]


def problems(plan: QueryPlan, statement: str) -> list[str]:
    """Return one sentence for each part of a plan that reads more than it needs."""
    found = [
        f"{node.display_name}: it reads one side as a whole. The hint JOIN_METHOD=APPLY_JOIN had no effect"
        for node in plan.plan_nodes
        if "Hash Join" in node.display_name
    ]
    for scan in scans(plan):
        if _metadata(scan)["scan_target"] not in SMALL_TABLES:
            found += _of_scan(plan, scan, _FORCED.findall(statement))
    return list(dict.fromkeys(found))


def _of_scan(plan: QueryPlan, scan: PlanNode, forced: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the problems of one scan. `forced` are the tables and indexes that the statement forces."""
    target = _metadata(scan)["scan_target"]
    allowed = {table if index == "_BASE_TABLE" else index for table, index in forced}
    tables = {table for table, _ in forced}
    if target not in allowed and target in tables:
        yield f"{target}: a join back to the table, although the index has all columns"
    elif target not in allowed:
        yield f"{target} is read, although the statement forces {', '.join(sorted(allowed)) or 'no index'}"
    path = list(_to_root(plan, scan))
    # A seek condition belongs to the scan below it, not to the inputs of a join below it.
    above = takewhile(lambda node: len(_inputs(plan, node)) < 2, path)
    if _metadata(scan).get("Full scan") == "true":
        yield f"{target}: a full scan. The optimizer found no seek condition"
    elif not any("Seek Condition" in _conditions(plan, node) for node in above):
        yield f"{target}: a scan without a seek condition"
    bounds = [
        node.display_name for node in path if node.display_name.startswith("Sort") or "Limit" in node.display_name
    ]
    if bounds and bounds[0].startswith("Sort") and target not in tables:
        yield f"{target}: {bounds[0]} reads all rows of the range before the limit applies"


def _to_root(plan: QueryPlan, node: PlanNode) -> Iterator[PlanNode]:
    yield node
    for parent in plan.plan_nodes:
        if any(child.index == node.index for child in _inputs(plan, parent)):
            yield from _to_root(plan, parent)


def _inputs(plan: QueryPlan, node: PlanNode) -> list[PlanNode]:
    children = (plan.plan_nodes[link.child_index] for link in node.child_links)
    return [child for child in children if child.kind == PlanNode.Kind.RELATIONAL]


def _conditions(plan: QueryPlan, node: PlanNode) -> dict[str, str]:
    links = (link for link in node.child_links if link.type_.endswith("Condition"))
    return {link.type_: plan.plan_nodes[link.child_index].short_representation.description for link in links}


def _metadata(node: PlanNode) -> dict[str, str]:
    return {name: str(value) for name, value in (node.metadata or {}).items()}
