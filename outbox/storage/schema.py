"""Compare the outbox's tables in a database with the DDL, and create missing ones.

A database is compared by its INFORMATION_SCHEMA, part by part (see `ddl`). Nothing here alters or drops an object.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from google.api_core import exceptions as google
from google.auth.exceptions import GoogleAuthError
from google.cloud.spanner_v1 import CreateSessionRequest, Session, param_types
from google.cloud.spanner_v1.database import Database

from outbox.errors import NotReached, OutboxError, SchemaDiffers
from outbox.storage import ddl
from outbox.storage.connection import retry_and_timeout
from outbox.storage.ddl import OPERATIONS, OWN_CHOICES, RETENTION, SHARD_COUNT, Shape, normal, statements
from outbox.storage.layout import COLUMN, Layout

__all__ = [
    "OPERATIONS", "OWN_CHOICES", "RETENTION", "SHARD_COUNT", "apply", "differences", "layout", "layouts",
    "service_errors", "statements",
]  # fmt: skip

#: Seconds for the first call, which reports an unreachable Spanner, and for a read of INFORMATION_SCHEMA after it. In a
#: database with very many objects this read takes many seconds.
REACH_SECONDS, SCHEMA_SECONDS = 5.0, 30.0


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
        NotReached: Spanner does not answer, or the database or the permission to read it is missing.
    """
    try:
        found = _read(database, shapes := [ddl.parse(statement) for statement in expected], request)
    except SchemaDiffers as error:
        return [str(error)]
    return [sentence for shape in shapes for sentence in ddl.compare(shape, found.get(normal(shape.title)), free)]


def layout(database: Database, **request: Any) -> Layout:
    """Return a layout of the table in `database` that all tasks are in. Raises NotReached, SchemaDiffers.

    While the number of shards changes, there may be two. If none is complete, return any.
    """
    found = layouts(database, **request)
    return next(
        (each for each, states in found.items() if list(states.values()) == ["READ_WRITE"] * 2), next(iter(found))
    )


def layouts(database: Database, **request: Any) -> dict[Layout, dict[str, str]]:
    """Return the layouts of the table in `database`, and the state of each of their indexes that exists, by its name.

    A new index has the state READ_WRITE when it contains all rows. Raises NotReached, SchemaDiffers.
    """
    [[columns, indexes]] = _query(database, _LAYOUTS, request)
    if not columns:
        raise NotReached(f"{database.name}: table AsynchronousTasks is missing; run `outbox schema apply`")
    found = {}
    for name, generated in columns:
        parts = ddl.column(name, f"({generated}) STORED")
        suffix = name.lower().removeprefix(COLUMN.lower())
        if SHARD_COUNT in parts:
            states = {
                index: state
                for index, state in indexes
                if index.lower().endswith((f"tosend{suffix}", f"inorder{suffix}"))
            }
            found[Layout(int(parts[SHARD_COUNT]), suffix)] = states
    if not found:
        raise SchemaDiffers(
            f"{database.name}: the number of shards cannot be read from column Shard of AsynchronousTasks"
        )
    return found


def apply(
    database: Database, wanted: Sequence[str], *, free: Collection[str] = (), **request: Any
) -> list[tuple[str, str]]:
    """Create the missing objects in one schema update, and wait for it. An index of a large table takes long.

    Args:
        database: a GoogleSQL database. Other objects, and additional columns and indexes, are not changed.
        wanted: DDL from `statements`.
        free: names of parts in which an object that exists may differ, such as SHARD_COUNT.
        request: `retry` and `timeout` of the Spanner client for each query.

    Returns:
        "table AsynchronousTasks" and the like with "created" or "exists", in the order of the statements.

    Raises:
        SchemaDiffers: an object exists with another shape. Nothing was created.
        NotReached: Spanner does not answer, or the database or a permission is missing.
        OutboxError: Spanner refused the update, for instance because another client is creating the same tables.
    """
    shapes = [ddl.parse(statement) for statement in wanted]
    found = _read(database, shapes, request)
    # An index whose backfill has not finished counts as existing.
    free = {*free, "state"}
    existing = [shape for shape in shapes if normal(shape.title) in found]
    wrong = [sentence for shape in existing for sentence in ddl.compare(shape, found[normal(shape.title)], free)]
    if wrong:
        raise SchemaDiffers(
            "\n  ".join(
                [
                    f"{database.name}: nothing was created, because these objects have a different definition:",
                    *wrong,
                ]
            )
        )
    missing = [statement for statement, shape in zip(wanted, shapes, strict=True) if shape not in existing]
    if missing:
        with service_errors(database.name):
            database.update_ddl(missing).result()
    return [(shape.title, "exists" if shape in existing else "created") for shape in shapes]


_DIALECT = "SELECT option_value FROM information_schema.database_options WHERE option_name = 'database_dialect'"
# Id, which every table of tasks has, and the columns Shard, Shard32 and the like.
_LAYOUTS = r"""
SELECT
  ARRAY(SELECT AS STRUCT COLUMN_NAME, GENERATION_EXPRESSION FROM INFORMATION_SCHEMA.COLUMNS
        WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) = 'asynchronoustasks'
          AND REGEXP_CONTAINS(LOWER(COLUMN_NAME), r'^(id|shard[0-9]*)$')
        ORDER BY LENGTH(COLUMN_NAME), COLUMN_NAME),
  ARRAY(SELECT AS STRUCT INDEX_NAME, INDEX_STATE FROM INFORMATION_SCHEMA.INDEXES
        WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) = 'asynchronoustasks' AND INDEX_STATE IS NOT NULL
        ORDER BY INDEX_NAME)"""
# Tables, columns, checks, indexes and change streams in one request. A stored column of an index has no position.
_OBJECTS = """
SELECT
  ARRAY(SELECT AS STRUCT TABLE_NAME, ROW_DELETION_POLICY_EXPRESSION
        FROM INFORMATION_SCHEMA.TABLES
        WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) IN UNNEST(@names)),
  ARRAY(SELECT AS STRUCT TABLE_NAME, COLUMN_NAME, SPANNER_TYPE, IS_NULLABLE, GENERATION_EXPRESSION, IS_STORED,
          COLUMN_DEFAULT,
          EXISTS(SELECT 1 FROM INFORMATION_SCHEMA.COLUMN_OPTIONS AS o
                 WHERE o.TABLE_SCHEMA = '' AND o.TABLE_NAME = c.TABLE_NAME AND o.COLUMN_NAME = c.COLUMN_NAME
                   AND o.OPTION_NAME = 'allow_commit_timestamp' AND UPPER(o.OPTION_VALUE) = 'TRUE')
        FROM INFORMATION_SCHEMA.COLUMNS AS c
        WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) IN UNNEST(@names)),
  ARRAY(SELECT AS STRUCT t.TABLE_NAME, t.CONSTRAINT_NAME, c.CHECK_CLAUSE
        FROM INFORMATION_SCHEMA.TABLE_CONSTRAINTS AS t
        JOIN INFORMATION_SCHEMA.CHECK_CONSTRAINTS AS c USING (CONSTRAINT_SCHEMA, CONSTRAINT_NAME)
        WHERE t.TABLE_SCHEMA = '' AND LOWER(t.TABLE_NAME) IN UNNEST(@names)),
  ARRAY(SELECT AS STRUCT i.TABLE_NAME, INDEX_NAME, IS_UNIQUE, IS_NULL_FILTERED, INDEX_STATE,
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
               OR (i.INDEX_TYPE = 'PRIMARY_KEY' AND LOWER(i.TABLE_NAME) IN UNNEST(@names)))),
  ARRAY(SELECT AS STRUCT CHANGE_STREAM_NAME,
          ARRAY(SELECT CONCAT(TABLE_NAME, '(', COLUMN_NAME, ')')
                FROM INFORMATION_SCHEMA.CHANGE_STREAM_COLUMNS AS c
                WHERE c.CHANGE_STREAM_NAME = s.CHANGE_STREAM_NAME)
        FROM INFORMATION_SCHEMA.CHANGE_STREAMS AS s
        WHERE LOWER(CHANGE_STREAM_NAME) IN UNNEST(@names))"""


def _read(database: Database, shapes: Sequence[Shape], request: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the parts of each object that exists: by the `normal` title of the object, then by the `normal` part."""
    found: dict[str, dict[str, str]] = defaultdict(dict)

    def add(title: str, parts: Mapping[str, str]) -> None:
        found[normal(title)] |= {normal(name): text for name, text in parts.items()}

    names = [shape.name.lower() for shape in shapes]
    [[tables, columns, checks, indexes, streams]] = _query(database, _OBJECTS, request, names=names)
    for table, policy in tables:
        add(f"table {table}", ddl.retention(policy))
    for table, name, type_, nullable, generated, stored, default, timestamp in columns:
        text = type_ + (" NOT NULL" if nullable == "NO" else "")
        text += f" AS ({generated})" + (" STORED" if stored == "YES" else "") if generated else ""
        text += f" DEFAULT ({default})" if default else ""
        text += " OPTIONS (allow_commit_timestamp = true)" if timestamp else ""
        add(f"table {table}", ddl.column(name, text))
    for table, name, clause in checks:
        add(f"table {table}", {f"constraint {name}": f"CHECK ({clause})"})
    for table, name, unique, null_filtered, state, key, stored in indexes:
        if name == "PRIMARY_KEY":
            add(f"table {table}", {"primary key": ", ".join(key)})
        else:
            parts = ddl.index(table, ", ".join(key), stored, unique=unique, null_filtered=null_filtered, state=state)
            add(f"index {name}", parts)
    for name, watched in streams:
        add(f"change stream {name}", {"watches": ", ".join(sorted(watched)) or "whole tables, or nothing"})
    return dict(found)


def _query(database: Database, sql: str, request: Mapping[str, Any], **parameters: Any) -> list[Any]:
    """Return the rows of one statement. Raises NotReached, SchemaDiffers, OutboxError."""
    request = {**retry_and_timeout(SCHEMA_SECONDS), **request}
    types = {name: param_types.Array(param_types.STRING) for name in parameters}

    def read(sql: str, **request: Any) -> list[Any]:
        with database.snapshot() as snapshot:
            return list(snapshot.execute_sql(sql, **request))

    with service_errors(database.name):
        _reach(database)
        try:
            return read(sql, params=parameters, param_types=types, **request)
        except google.InvalidArgument:
            if read(_DIALECT, **request) == [["POSTGRESQL"]]:
                raise SchemaDiffers(
                    f"{database.name} has the PostgreSQL dialect: use a database of the GoogleSQL dialect"
                ) from None
            raise


def _reach(database: Database) -> None:
    """Ask for a session, with a limit: the client itself would ask for its first one in silence for half a minute."""
    # A multiplexed session leaves nothing behind: it needs no deletion and is not counted.
    session = Session(multiplexed=True, creator_role=database.database_role or "")
    request = CreateSessionRequest(database=database.name, session=session)
    database.spanner_api.create_session(request=request, **retry_and_timeout(REACH_SECONDS))


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
            "set. If other requests work, narrow the request with --topic or --since, or try again, because rows may "
            f"be locked. {reason(error)}"
        ) from error
    except google.GoogleAPIError as error:
        raise NotReached(
            f"{target}: Spanner did not answer. Check the network, or the emulator if SPANNER_EMULATOR_HOST is set. "
            f"{reason(error)}"
        ) from error
