"""schema/roles.sql, parsed: the privileges of each role on each column."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.cloud.spanner_v1 import CommitRequest
from google.cloud.spanner_v1.database import Database

from outbox.table import ddl
from tests.support.spanner import record_requests

ROLES = Path(__file__).parents[2] / "schema" / "roles.sql"
#: The privileges that a mutation needs; a replace needs three.
PRIVILEGES = {"insert": ("INSERT",), "update": ("UPDATE",), "insert_or_update": ("INSERT", "UPDATE")}
#: Every column, where a privilege names none.
ALL = frozenset({"*"})

Grants = dict[tuple[str, str], frozenset[str]]


def statements(*, optional: bool = False, file: Path = ROLES) -> list[str]:
    files = [file, file.with_name("roles_cancel.sql")] if optional else [file]
    return [" ".join(each.split()) for file in files for each in ddl.cut(file.read_text(encoding="utf-8"))]


def grants(role: str, *, optional: bool = False, file: Path = ROLES) -> Grants:
    found: Grants = {}
    for statement in statements(optional=optional, file=file):
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
        methods = ("commit", "create_session", "batch_create_sessions", "execute_streaming_sql", "streaming_read")
        self._requests = record_requests(database, *methods)

    def _of(self, method: str) -> list[Any]:
        return [request for name, request in self._requests if name == method]

    @property
    def commits(self) -> list[CommitRequest]:
        return self._of("commit")

    @property
    def roles(self) -> set[str]:
        created = {each.session.creator_role for each in self._of("create_session")}
        return created | {each.session_template.creator_role for each in self._of("batch_create_sessions")}

    @property
    def sql(self) -> list[str]:
        return [each.sql for each in self._of("execute_streaming_sql")]

    @property
    def tables(self) -> set[str]:
        queried = re.findall(
            r"\bAsynchronousTask(?:s|sCancelled|Topics|Workers|Shards|Operations)\b(?!:)", " ".join(self.sql)
        )
        return {*queried, *(each.table for each in self._of("streaming_read"))}
