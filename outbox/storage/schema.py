"""The outbox's tables in a database: differences from the DDL, and creating what is missing.

A database is compared by its INFORMATION_SCHEMA, part by part (see `ddl`). Nothing here alters or drops anything.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from google.api_core import exceptions as google
from google.api_core.retry import Retry, if_exception_type
from google.auth.exceptions import GoogleAuthError
from google.cloud.spanner_v1 import CreateSessionRequest, Session, param_types
from google.cloud.spanner_v1.database import Database

from outbox.errors import NotReached, OutboxError, SchemaDiffers
from outbox.storage.ddl import (
    OPERATIONS,
    OWN_CHOICES,
    RETENTION,
    SHARD_COUNT,
    Shape,
    column,
    compare,
    index,
    normal,
    parse,
    retention,
    statements,
)

__all__ = [
    "OPERATIONS",
    "OWN_CHOICES",
    "RETENTION",
    "SHARD_COUNT",
    "apply",
    "differences",
    "limits",
    "service_errors",
    "shard_count",
    "statements",
]

#: Seconds for the first call, and for each query after it. An unreachable Spanner is reported within 15 s.
REACH_SECONDS, QUERY_SECONDS = 5.0, 5.0


def differences(
    database: Database, expected: Sequence[str], *, free: Collection[str] = OWN_CHOICES, **request: Any
) -> list[str]:
    """Return one sentence for each object that is missing and each part that is different; none if all is well.

    Args:
        database: is only read.
        expected: DDL from `statements`.
        free: names of parts that may differ; by default a database keeps its own shard count and retention.
        request: `retry` and `timeout` of the Spanner client for each query.

    Raises:
        NotReached: Spanner, the database or a permission to read it.
    """
    try:
        found = _read(database, shapes := [parse(statement) for statement in expected], request)
    except SchemaDiffers as error:
        return [str(error)]
    return [sentence for shape in shapes for sentence in compare(shape, found.get(normal(shape.title)), free)]


def shard_count(database: Database, **request: Any) -> int:
    """Return the number of shards of the table in `database`. Raises NotReached, SchemaDiffers."""
    table = "table AsynchronousTasks"
    parts = _read(database, [Shape(table, {})], request).get(normal(table))
    if parts is None:
        raise NotReached(f"{database.name}: {table} is missing; run `outbox schema apply`")
    if normal(SHARD_COUNT) not in parts:
        raise SchemaDiffers(f"{database.name}: {table}, column Shard has no number of shards")
    return int(parts[normal(SHARD_COUNT)])


def apply(
    database: Database, wanted: Sequence[str], *, free: Collection[str] = (), **request: Any
) -> list[tuple[str, str]]:
    """Make what is missing of `wanted` in one schema update, and wait for it: an index of a large table takes long.

    Args:
        database: a GoogleSQL database; other objects, and further columns and indexes of ours, stay as they are.
        wanted: DDL from `statements`.
        free: names of parts in which an object that exists may differ, such as SHARD_COUNT.
        request: `retry` and `timeout` of the Spanner client for each query.

    Returns:
        "table AsynchronousTasks" and the like with "created" or "exists", in the order of the statements.

    Raises:
        SchemaDiffers: an object exists with another shape; nothing was made.
        NotReached: Spanner, the database or a permission.
        OutboxError: Spanner refused the update, for instance because another one is making the same tables.
    """
    shapes = [parse(statement) for statement in wanted]
    found = _read(database, shapes, request)
    # An index that is still being filled is there.
    free = {*free, "state"}
    there = [shape for shape in shapes if normal(shape.title) in found]
    wrong = [sentence for shape in there for sentence in compare(shape, found[normal(shape.title)], free)]
    if wrong:
        raise SchemaDiffers(
            "\n  ".join([f"{database.name}: nothing was made, because these exist with another shape:", *wrong])
        )
    missing = [statement for statement, shape in zip(wanted, shapes, strict=True) if shape not in there]
    if missing:
        with service_errors(database.name):
            database.update_ddl(missing).result()
    return [(shape.title, "exists" if shape in there else "created") for shape in shapes]


_DIALECT = "SELECT option_value FROM information_schema.database_options WHERE option_name = 'database_dialect'"
_TABLES = """
SELECT TABLE_NAME, ROW_DELETION_POLICY_EXPRESSION
FROM INFORMATION_SCHEMA.TABLES
WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) IN UNNEST(@names)"""
_COLUMNS = """
SELECT TABLE_NAME, COLUMN_NAME, SPANNER_TYPE, IS_NULLABLE, GENERATION_EXPRESSION, IS_STORED, COLUMN_DEFAULT,
  EXISTS(SELECT 1 FROM INFORMATION_SCHEMA.COLUMN_OPTIONS AS o
         WHERE o.TABLE_SCHEMA = '' AND o.TABLE_NAME = c.TABLE_NAME AND o.COLUMN_NAME = c.COLUMN_NAME
           AND o.OPTION_NAME = 'allow_commit_timestamp' AND UPPER(o.OPTION_VALUE) = 'TRUE')
FROM INFORMATION_SCHEMA.COLUMNS AS c
WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) IN UNNEST(@names)"""
_CHECKS = """
SELECT t.TABLE_NAME, t.CONSTRAINT_NAME, c.CHECK_CLAUSE
FROM INFORMATION_SCHEMA.TABLE_CONSTRAINTS AS t
JOIN INFORMATION_SCHEMA.CHECK_CONSTRAINTS AS c USING (CONSTRAINT_SCHEMA, CONSTRAINT_NAME)
WHERE t.TABLE_SCHEMA = '' AND LOWER(t.TABLE_NAME) IN UNNEST(@names)"""
#: A column without a position is a stored one.
_INDEXES = """
SELECT i.TABLE_NAME, INDEX_NAME, IS_UNIQUE, IS_NULL_FILTERED, INDEX_STATE,
  ARRAY(SELECT CONCAT(COLUMN_NAME, IF(COLUMN_ORDERING = 'DESC', ' DESC', ''))
        FROM INFORMATION_SCHEMA.INDEX_COLUMNS AS c
        WHERE c.TABLE_SCHEMA = '' AND c.TABLE_NAME = i.TABLE_NAME AND c.INDEX_NAME = i.INDEX_NAME
          AND ORDINAL_POSITION IS NOT NULL
        ORDER BY ORDINAL_POSITION),
  ARRAY(SELECT COLUMN_NAME
        FROM INFORMATION_SCHEMA.INDEX_COLUMNS AS c
        WHERE c.TABLE_SCHEMA = '' AND c.TABLE_NAME = i.TABLE_NAME AND c.INDEX_NAME = i.INDEX_NAME
          AND ORDINAL_POSITION IS NULL)
FROM INFORMATION_SCHEMA.INDEXES AS i
WHERE i.TABLE_SCHEMA = ''
  AND (LOWER(i.INDEX_NAME) IN UNNEST(@names)
       OR (i.INDEX_TYPE = 'PRIMARY_KEY' AND LOWER(i.TABLE_NAME) IN UNNEST(@names)))"""
_STREAMS = """
SELECT CHANGE_STREAM_NAME,
  ARRAY(SELECT CONCAT(TABLE_NAME, '(', COLUMN_NAME, ')')
        FROM INFORMATION_SCHEMA.CHANGE_STREAM_COLUMNS AS c
        WHERE c.CHANGE_STREAM_NAME = s.CHANGE_STREAM_NAME)
FROM INFORMATION_SCHEMA.CHANGE_STREAMS AS s
WHERE LOWER(CHANGE_STREAM_NAME) IN UNNEST(@names)"""


def _read(database: Database, shapes: Sequence[Shape], request: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the parts of those objects that are there, titles and parts by their `normal` names."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    names = [shape.name.lower() for shape in shapes]
    request = {**limits(QUERY_SECONDS), **request}

    def add(title: str, parts: Mapping[str, str]) -> None:
        found[normal(title)] |= {normal(name): text for name, text in parts.items()}

    with service_errors(database.name):
        _reach(database)
        _require_googlesql(database, request)
        for table, policy in _rows(database, _TABLES, names, request):
            add(f"table {table}", retention(policy))
        for table, name, type_, nullable, generated, stored, default, timestamp in _rows(
            database, _COLUMNS, names, request
        ):
            parts = column(
                name, type_, required=nullable == "NO", generated=generated, default=default,
                commit_timestamp=timestamp, stored=stored == "YES",
            )  # fmt: skip
            add(f"table {table}", parts)
        for table, name, clause in _rows(database, _CHECKS, names, request):
            add(f"table {table}", {f"constraint {name}": f"CHECK ({clause})"})
        for table, name, unique, null_filtered, state, key, stored in _rows(database, _INDEXES, names, request):
            if name == "PRIMARY_KEY":
                add(f"table {table}", {"primary key": ", ".join(key)})
            else:
                parts = index(table, ", ".join(key), stored, unique=unique, null_filtered=null_filtered, state=state)
                add(f"index {name}", parts)
        for name, columns in _rows(database, _STREAMS, names, request):
            add(f"change stream {name}", {"watches": ", ".join(sorted(columns)) or "no single column"})
    return dict(found)


def _reach(database: Database) -> None:
    """Ask for a session, with a limit: the client itself would ask for its first one in silence for half a minute."""
    # A multiplexed session leaves nothing behind: it needs no deletion and is not counted.
    session = Session(multiplexed=True, creator_role=database.database_role or "")
    request = CreateSessionRequest(database=database.name, session=session)
    database.spanner_api.create_session(request=request, **limits(REACH_SECONDS))


def _require_googlesql(database: Database, request: Mapping[str, Any]) -> None:
    with database.snapshot() as snapshot:
        dialect = [value for (value,) in snapshot.execute_sql(_DIALECT, **request)]
    if dialect == ["POSTGRESQL"]:
        raise SchemaDiffers(f"{database.name} has the PostgreSQL dialect: use a database of the GoogleSQL dialect")


def _rows(database: Database, sql: str, names: Sequence[str], request: Mapping[str, Any]) -> list[Any]:
    # One snapshot a query: on the emulator one of several queries ends transactions of other threads.
    with database.snapshot() as snapshot:
        types = {"names": param_types.Array(param_types.STRING)}
        return list(snapshot.execute_sql(sql, params={"names": names}, param_types=types, **request))


def limits(seconds: float) -> dict[str, Any]:
    """Return `retry` and `timeout` for one call of the Spanner client.

    Without a Retry of our own, a read or a query to a service that is away loops inside the client for ever.
    """
    retry = Retry(predicate=if_exception_type(google.ServiceUnavailable), initial=0.1, maximum=1.0, timeout=seconds)
    return {"retry": retry, "timeout": seconds}


@contextlib.contextmanager
def service_errors(target: str) -> Iterator[None]:
    """Turn the errors of Google's clients inside the block into NotReached, or OutboxError for refused statements."""

    def reason(error: Exception) -> str:
        return re.sub(r",? request_id = [0-9.]+", "", str(error).partition("\n")[0])

    try:
        yield
    except google.NotFound as error:
        raise NotReached(
            f"{target} not found. Create it, or check --project, --instance and --database. {reason(error)}"
        ) from error
    except google.PermissionDenied as error:
        raise NotReached(
            f"{target}: a permission is missing. Reading needs roles/spanner.databaseReader, changes need "
            f"roles/spanner.databaseUser, and `outbox schema apply` needs roles/spanner.databaseAdmin. "
            f"{reason(error)}"
        ) from error
    except (google.Unauthenticated, GoogleAuthError) as error:
        raise NotReached(
            f"{target}: no valid credentials. Run `gcloud auth application-default login`, give the pod a service "
            f"account, or set SPANNER_EMULATOR_HOST (`outbox emulators` prints it). {reason(error)}"
        ) from error
    except (google.InvalidArgument, google.FailedPrecondition, google.AlreadyExists) as error:
        # The statements of one schema update are applied one by one, so those before the refused one stay.
        raise OutboxError(
            f"{target}: Spanner refused the request; part of it may have been applied. {reason(error)}"
        ) from error
    except google.Aborted as error:
        raise OutboxError(
            f"{target}: Spanner kept aborting the transaction because others write the same rows. Nothing changed. "
            f"Try again. {reason(error)}"
        ) from error
    except google.ResourceExhausted as error:
        raise NotReached(
            f"{target}: a quota or the memory of Spanner is exhausted. Narrow the request (--topic, --since, a "
            f"smaller --limit) or try again. {reason(error)}"
        ) from error
    except google.DeadlineExceeded as error:
        raise NotReached(
            f"{target}: Spanner did not answer in time. Check the network, or the emulator if SPANNER_EMULATOR_HOST is "
            "set. If other requests work, there is too much to read (narrow it with --topic or --since) or rows are "
            f"locked (try again). {reason(error)}"
        ) from error
    except google.GoogleAPIError as error:
        raise NotReached(
            f"{target}: Spanner did not answer. Check the network, or the emulator if SPANNER_EMULATOR_HOST is set. "
            f"{reason(error)}"
        ) from error
