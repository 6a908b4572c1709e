"""The final text of each SQL statement, for docs/reference/statements.md: its parts are in several modules."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

INTRO = """\
# SQL statements

The text of each statement as it is sent, so that plans can be reviewed. Values are parameters. A table with more than
one [layout](../operations/upgrade.md#change-the-number-of-shards) of shards has other names of columns and indexes.

<!-- Written by `make docs`. Change the modules, not this page. -->"""
MODULES = {
    "The relay": "publishworker.spanner.relay_sql",
    "Workers, applications and operators": "outbox.table.shared_sql",
    "Counts, workers and sent tasks": "outbox.rows.counts_sql",
    "Lists of tasks": "outbox_admin.tasks.task_sql",
    "Changes of tasks": "outbox_admin.changes.change_sql",
    "The record of operations": "outbox_admin.operation_sql",
}
#: Arguments of the functions that put a statement together, by parameter name.
EXAMPLES: dict[str, Any] = {
    "state": "dead", "states": ["dead"], "names": ["topic"], "columns": "Id", "condition": "SentAt IS NULL",
    "ended": "sent", "newest": True, "attempts": False, "lock": True, "views": True, "by_key": False,
}  # fmt: skip


def page() -> str:
    """Return the text of the page."""
    parts = [INTRO]
    for title, name in MODULES.items():
        parts.append(f"## {title}")
        for heading, about, sql in _statements(importlib.import_module(name)):
            text = re.sub(r" +$", "", sql.strip(), flags=re.MULTILINE)
            parts += [f"### {heading}", *([about] if about else []), f"```sql\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def _statements(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            value = {} if name.startswith("_") else getattr(module, name)
            sql = [*value.values()][-1] if isinstance(value, dict) and value else value  # the last one has all parts
            if isinstance(sql, str) and re.match(r"\s*(@\{.*\}\s*)?SELECT\b", sql):
                yield name, comment_above(lines, node.lineno), sql
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            function = getattr(module, node.name)
            parameters = inspect.signature(function).parameters
            if parameters.keys() <= EXAMPLES.keys():
                found = function(**{name: EXAMPLES[name] for name in parameters})
                sql = found[-1] if isinstance(found, list) else found
                if isinstance(sql, str) and sql.lstrip().startswith(("SELECT", "@{")):
                    yield node.name, (ast.get_docstring(node) or "").split("\n")[0], sql


def comment_above(lines: list[str], line: int) -> str:
    """Return the comment above a line."""
    first = line - 1
    while lines[first - 1].startswith("#"):
        first -= 1
    return re.sub(r"OUT-[A-Z]+-\d+[:.] ", "", " ".join(each.lstrip("#: ") for each in lines[first : line - 1]))
