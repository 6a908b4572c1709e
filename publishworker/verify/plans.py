"""Query plans as trees, and what is wrong with them. Pure.

The format: https://cloud.google.com/spanner/docs/reference/rpc/google.spanner.v1#queryplan, the operators:
https://cloud.google.com/spanner/docs/query-execution-operators
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from google.cloud.spanner_v1 import PlanNode, QueryPlan

#: The tables that are read as a whole, because they have one row for each topic, worker or operation.
SMALL_TABLES = ("AsynchronousTaskTopics", "AsynchronousTaskWorkers", "AsynchronousTaskOperations")
_FORCED = re.compile(r"(\w+)@\{FORCE_INDEX=(\w+)\}")


@dataclass(frozen=True, slots=True)
class Node:
    """A relational operator, with the conditions of its scan and the operators that feed it."""

    name: str
    metadata: Mapping[str, str]
    conditions: Mapping[str, str] = field(default_factory=dict)
    children: Sequence["Node"] = ()

    @property
    def target(self) -> str:
        """Return the table or index that is scanned, or an empty text."""
        return self.metadata.get("scan_target", "") if "Scan" in self.name else ""

    def scans(self) -> Iterator["Node"]:
        """Yield the scans in the tree."""
        if self.target:
            yield self
        for child in self.children:
            yield from child.scans()

    def lines(self, depth: int = 0) -> Iterator[str]:
        """Yield the tree as lines of text."""
        details = ", ".join(f"{name}: {text}" for name, text in sorted({**self.metadata, **self.conditions}.items()))
        yield "  " * depth + self.name + (f" ({details})" if details else "")
        for child in self.children:
            yield from child.lines(depth + 1)


def tree(plan: QueryPlan) -> Node | None:
    """Return the root of a plan, or None if there is no plan, as on the emulator."""
    nodes = {node.index: node for node in plan.plan_nodes}
    return _node(nodes[min(nodes)], nodes) if nodes else None


def _node(node: PlanNode, nodes: Mapping[int, PlanNode]) -> Node:
    children, conditions = [], {}
    for link in node.child_links:
        child = nodes[link.child_index]
        if child.kind == PlanNode.Kind.RELATIONAL:
            children.append(_node(child, nodes))
        elif link.type_.endswith("Condition"):
            conditions[link.type_] = child.short_representation.description
    metadata = {name: str(value) for name, value in (node.metadata or {}).items()}
    return Node(node.display_name, metadata, conditions, tuple(children))


def problems(root: Node, statement: str) -> Iterator[str]:
    """Yield one sentence for each part of a plan that reads more than it needs."""
    forced = _FORCED.findall(statement)
    allowed = {table if index == "_BASE_TABLE" else index for table, index in forced}
    yield from dict.fromkeys(_of_node(root, allowed, {table for table, _ in forced}, seek=False, sort=""))


def _of_node(node: Node, allowed: set[str], tables: set[str], *, seek: bool, sort: str) -> Iterator[str]:
    """Yield the problems of a subtree. `sort` names the sort above it that no limit separates from it."""
    seek = seek or "Seek Condition" in node.conditions
    if "Hash Join" in node.name:
        yield f"{node.name}: it reads one side as a whole. The hint JOIN_METHOD=APPLY_JOIN had no effect"
    if node.name.startswith("Sort"):
        sort = node.name
    elif "Limit" in node.name:
        sort = ""
    if node.target and node.target not in SMALL_TABLES:
        yield from _of_scan(node, allowed, tables, seek=seek, sort=sort)
    for child in node.children:
        # A seek condition belongs to the scan below it, not to the inputs of a join below it.
        yield from _of_node(child, allowed, tables, seek=seek and len(node.children) == 1, sort=sort)


def _of_scan(scan: Node, allowed: set[str], tables: set[str], *, seek: bool, sort: str) -> Iterator[str]:
    target = scan.target
    if target not in allowed and target in tables:
        yield f"{target}: a join back to the table, although the index has all columns"
    elif target not in allowed:
        yield f"{target} is read, although the statement forces {', '.join(sorted(allowed)) or 'no index'}"
    if scan.metadata.get("Full scan") == "true":
        yield f"{target}: a full scan. The optimizer found no seek condition"
    elif not seek:
        yield f"{target}: a scan without a seek condition"
    if sort and target not in tables:
        yield f"{target}: {sort} reads all rows of the range before the limit applies"
