"""Create missing tables, parts of tables, indexes and roles. Nothing here changes or drops a column or an object."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from google.cloud.spanner_v1.database import Database

from outbox.errors import SchemaDiffers
from outbox.table import ddl, schema
from outbox.table.ddl import Layout, normalized


def apply(
    database: Database, wanted: Sequence[str], *, free: Collection[str] = (), **request: Any
) -> list[tuple[str, str]]:
    """Create the missing objects and add the missing parts in one schema update, and wait for it.

    An index of a large table takes long. `wanted` is DDL from `statements`. If the table was resharded, its names
    replace those of `wanted`. An object that exists may differ in the parts with names in `free`, such as SHARD_COUNT.
    Return pairs such as ("table AsynchronousTasks", "created"), with "created" or "exists", in the order of `wanted`,
    and then such as ("table AsynchronousTasks, column Id", "added").

    Raises:
        SchemaDiffers: a part has another definition, which Spanner or the rows may not allow to change. Everything else
            was created and added. Nothing was, if a table lacks a column that cannot be added, because no version of
            this project has created that table.
        NotReached: Spanner does not answer, or the database or a permission is missing.
        OutboxError: Spanner refused the update, for instance because another client is creating the same tables.
    """
    shapes = dict(map(ddl.parse, wanted))
    found = schema.read_parts(database, shapes, request)
    if layout := _resharded(found):
        wanted = [layout.sql(each) for each in wanted]
        shapes = dict(map(ddl.parse, wanted))
        found = schema.read_parts(database, shapes, request)
    existing = {title: parts for title, parts in shapes.items() if normalized(title) in found}
    parts = ddl.missing_parts(existing, found)
    # An index whose backfill has not finished counts as existing.
    differences = list(ddl.compare(existing, found, {*free, "state"}))
    wrong = [each for each in differences if each.partition(" is missing:")[0] not in parts]
    if any(" is missing:" in each for each in wrong):
        why = "nothing was created, as a table lacks a column that cannot be added, so the outbox did not create it:"
        raise SchemaDiffers("\n  ".join([f"{database.name}: {why}", *differences]))
    # An index on other columns, or on another table, is not this one.
    others = {each.partition(", definition:")[0] for each in wrong}
    parts = {title: statement for title, statement in parts.items() if title.partition(", stored")[0] not in others}
    missing = [statement for statement, title in zip(wanted, shapes, strict=True) if title not in existing]
    if missing or parts:
        with schema.service_errors(database.name):
            database.update_ddl([*parts.values(), *missing]).result()
    states = [(title, "exists" if title in existing else "created") for title in shapes]
    states += [(title, "added") for title in parts]
    if wrong:
        changed = [f"{title} ({state})" for title, state in states if state != "exists"]
        done = f"changed: {', '.join(changed)}. These" if changed else "nothing is missing, but these"
        why = (
            f"{done} parts have a different definition. Change them with your own DDL, or drop the index and run again "
            "(`outbox schema reshard` changes the number of shards):"
        )
        raise SchemaDiffers("\n  ".join([f"{database.name}: {why}", *wrong]))
    return states


def apply_roles(database: Database) -> list[tuple[str, str]]:
    """Create the missing roles of roles.sql, and execute its grants, in one schema update.

    A role or a grant that exists stays as it is. Return pairs such as ("role publishworker", "created"), with "created"
    or "exists". Raises NotReached, OutboxError.
    """
    statements = ddl.cut(ddl.text("roles.sql"))
    existing = {role.casefold() for [role] in schema.query(database, _ROLES, {})}
    names = re.findall(r"^CREATE ROLE (\w+)$", "\n".join(statements), re.MULTILINE)
    created = [name for name in names if name.casefold() not in existing]
    grants = [each for each in statements if not each.startswith("CREATE ROLE ")]
    with schema.service_errors(database.name):
        database.update_ddl([*(f"CREATE ROLE {name}" for name in created), *grants]).result()
    return [(f"role {name}", "created" if name in created else "exists") for name in names]


def _resharded(found: Mapping[str, Mapping[str, str]]) -> Layout | None:
    """Return the layout of a table whose shard column is not that of schema.sql, or None for all others."""
    columns = " ".join(found.get(normalized("table AsynchronousTasks"), ()))
    suffixes = sorted(re.findall(r"\bcolumnshard(\d*)\b", columns))
    return Layout.added(int(suffixes[0])) if suffixes and suffixes[0] else None


_ROLES = "SELECT ROLE_NAME FROM INFORMATION_SCHEMA.ROLES"
