"""schema/roles.sql, parsed: the privileges of each role on each column."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.cloud.spanner_v1 import CommitRequest
from google.cloud.spanner_v1.database import Database

ROLES = Path(__file__).parents[2] / "schema" / "roles.sql"
#: The privileges that a mutation needs; a replace needs three.
PRIVILEGES = {"insert": ("INSERT",), "update": ("UPDATE",), "insert_or_update": ("INSERT", "UPDATE")}
#: Every column, where a privilege names none.
ALL = frozenset({"*"})

Grants = dict[tuple[str, str], frozenset[str]]


def statements() -> list[str]:
    text = re.sub(r"--.*", "", ROLES.read_text(encoding="utf-8"))
    return [" ".join(each.split()) for each in text.split(";") if each.strip()]


def grants(role: str) -> Grants:
    found: Grants = {}
    for statement in statements():
        if re.fullmatch(r"CREATE ROLE \w+", statement):
            continue
        grant = re.fullmatch(r"GRANT (.+) ON TABLE ([\w, ]+) TO ROLE (\w+)", statement)
        if grant is None:
            raise ValueError(statement)
        if grant[3] != role:
            continue
        for privilege, columns in re.findall(r"(SELECT|INSERT|UPDATE|DELETE)(?:\(([^)]*)\))?", grant[1]):
            for table in grant[2].split(", "):
                found[privilege, table] = frozenset(columns.split(", ")) if columns else ALL
    return found


def refused(allowed: Grants, commits: list[CommitRequest]) -> Iterator[str]:
    for request in commits:
        for mutation in request.mutations:
            [(kind, write)] = [
                (kind, getattr(mutation, kind)) for kind in (*PRIVILEGES, "replace", "delete") if kind in mutation
            ]
            if kind == "delete":
                if ("DELETE", write.table) not in allowed:
                    yield f"delete from {write.table}"
                continue
            for privilege in PRIVILEGES[kind]:
                columns = allowed.get((privilege, write.table), frozenset())
                if columns != ALL and (wrong := set(write.columns) - columns):
                    yield f"{privilege} {sorted(wrong)} of {write.table}"


class Heard:
    """The requests of a database's client: commits, sessions, the tables of queries and reads."""

    def __init__(self, database: Database) -> None:
        self.commits: list[CommitRequest] = []
        self.roles: set[str] = set()
        self.tables: set[str] = set()
        api: Any = database.spanner_api
        for name in ("commit", "create_session", "batch_create_sessions", "execute_streaming_sql", "streaming_read"):
            setattr(api, name, functools.partial(self._call, name, getattr(api, name)))

    def _call(self, name: str, original: Any, *arguments: Any, **keywords: Any) -> Any:
        request = keywords.get("request") or arguments[0]
        match name:
            case "commit":
                self.commits.append(request)
            case "create_session":
                self.roles.add(request.session.creator_role)
            case "batch_create_sessions":
                self.roles.add(request.session_template.creator_role)
            case "streaming_read":
                self.tables.add(request.table)
            case _:
                self.tables |= set(re.findall(r"\bAsynchronousTask(?:s|Topics|Workers|Operations)\b", request.sql))
        return original(*arguments, **keywords)
