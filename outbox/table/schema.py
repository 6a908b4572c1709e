"""Compare the outbox's tables in a database with the DDL.

A database is compared by its INFORMATION_SCHEMA, part by part (see `ddl`). Further objects and columns do not matter.
`request` has further arguments of `execute_sql`.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from google.api_core import exceptions as google
from google.auth.exceptions import GoogleAuthError
from google.cloud.spanner_v1 import param_types
from google.cloud.spanner_v1.database import Database

from outbox.errors import NotReached, OutboxError, SchemaDiffers
from outbox.table import ddl
from outbox.table.connection import Deadline
from outbox.table.ddl import COLUMN, OWN_CHOICES, SHARD_COUNT, Layout, normalized, statements
from outbox.table.timeouts import retry_and_timeout

#: Seconds for a read of INFORMATION_SCHEMA. In a database with very many objects it takes many seconds.
SCHEMA_SECONDS = 30.0


def differences(
    database: Database, expected: Sequence[str], *, free: Collection[str] = OWN_CHOICES, **request: Any
) -> list[str]:
    """Return one sentence for each object that is missing and each part that is different; none if all is well.

    `expected` is DDL from `statements`. The parts with names in `free` may differ. Raises NotReached, SchemaDiffers.
    """
    shapes = dict(map(ddl.parse, expected))
    return list(ddl.compare(shapes, read_parts(database, shapes, request), free))


def problems(database: Database, layout: Layout, *, relay_only: bool, **request: Any) -> list[str]:
    """Return the `differences` from schema.sql of a table with this layout, without those that a role may not see."""
    expected = statements(relay_only=relay_only, layout=layout)
    return differences(database, expected, free=(*OWN_CHOICES, ddl.NOT_OF_ROLES), **request)


def layout(database: Database, **request: Any) -> Layout:
    """Return a layout with all tasks, or any if none is complete. Raises NotReached, SchemaDiffers."""
    found = layouts(database, **request)
    return next(iter(complete(found) or found))


def retention(database: Database, **request: Any) -> timedelta | None:
    """Return how long sent and cancelled tasks are kept, or None if they are kept for ever. Raises NotReached."""
    [[policy]] = query(database, _POLICY, request)
    days = re.fullmatch(r"older_thansentat,interval(\d+)day", normalized(policy))
    return timedelta(days=int(days[1])) if days else None


def complete(found: Mapping[Layout, Mapping[str, str]]) -> list[Layout]:
    """Return the layouts that contain all tasks, because all of their indexes are complete."""
    return [each for each, states in found.items() if list(states.values()) == ["READ_WRITE"] * len(ddl.INDEXES)]


def layouts(database: Database, **request: Any) -> dict[Layout, dict[str, str]]:
    """Return the layouts with the states of their indexes (READ_WRITE: complete). Raises NotReached, SchemaDiffers."""
    [[columns, indexes]] = query(database, _LAYOUTS, request)
    if not columns:
        raise NotReached(f"{database.name}: table AsynchronousTasks is missing; run `outbox schema apply`")
    found = {}
    for name, generated in columns:
        parts = ddl.part(f"column {name}", f"({generated}) STORED")
        suffix = name.lower().removeprefix(COLUMN.lower())
        names = {f"{index.lower()}{suffix}" for index in ddl.INDEXES}
        if SHARD_COUNT in parts:
            states = {index: state for index, state in indexes if index.lower() in names}
            found[Layout(int(parts[SHARD_COUNT]), suffix)] = states
    if not found:
        raise SchemaDiffers(
            f"{database.name}: the number of shards cannot be read from column Shard of AsynchronousTasks"
        )
    return found


_POLICY = """
SELECT IFNULL(ROW_DELETION_POLICY_EXPRESSION, '') FROM INFORMATION_SCHEMA.TABLES
WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) = 'asynchronoustasks'"""
_DIALECT = "SELECT option_value FROM information_schema.database_options WHERE option_name = 'database_dialect'"
# The columns Shard, Shard32 and the like. Id is read too, to tell a missing table from a table without a shard column.
_LAYOUTS = r"""
SELECT
  ARRAY(SELECT AS STRUCT COLUMN_NAME, GENERATION_EXPRESSION FROM INFORMATION_SCHEMA.COLUMNS
        WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) = 'asynchronoustasks'
          AND REGEXP_CONTAINS(LOWER(COLUMN_NAME), r'^(id|shard[0-9]*)$')
        ORDER BY LENGTH(COLUMN_NAME), COLUMN_NAME),
  ARRAY(SELECT AS STRUCT INDEX_NAME, INDEX_STATE FROM INFORMATION_SCHEMA.INDEXES
        WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) = 'asynchronoustasks' AND INDEX_STATE IS NOT NULL
        ORDER BY INDEX_NAME)"""
# The title, a part and its text for all objects in one request. A stored column of an index has no position.
# Polls cannot use a NULL_FILTERED index. The indexes with a WHERE clause are left out: the emulator does not report
# them as NULL_FILTERED, but Spanner might.
_PARTS = """
SELECT CONCAT('table ', TABLE_NAME), 'deletion of unsent tasks', IFNULL(ROW_DELETION_POLICY_EXPRESSION, '')
FROM INFORMATION_SCHEMA.TABLES
WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) IN UNNEST(@names)
UNION ALL
SELECT CONCAT('table ', TABLE_NAME), CONCAT('column ', COLUMN_NAME),
  CONCAT(SPANNER_TYPE, IF(IS_NULLABLE = 'NO', ' NOT NULL', ''),
    IFNULL(CONCAT(' AS (', NULLIF(GENERATION_EXPRESSION, ''), ')', IF(IS_STORED = 'YES', ' STORED', '')), ''),
    IFNULL(CONCAT(' DEFAULT (', NULLIF(CAST(COLUMN_DEFAULT AS STRING), ''), ')'), ''),
    IF(EXISTS(SELECT 1 FROM INFORMATION_SCHEMA.COLUMN_OPTIONS AS o
              WHERE o.TABLE_SCHEMA = '' AND o.TABLE_NAME = c.TABLE_NAME AND o.COLUMN_NAME = c.COLUMN_NAME
                AND o.OPTION_NAME = 'allow_commit_timestamp' AND UPPER(o.OPTION_VALUE) = 'TRUE'),
       ' OPTIONS (allow_commit_timestamp = true)', ''))
FROM INFORMATION_SCHEMA.COLUMNS AS c
WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) IN UNNEST(@names)
UNION ALL
SELECT CONCAT('table ', TABLE_NAME), CONCAT('constraint ', CONSTRAINT_NAME), CONCAT('CHECK (', CHECK_CLAUSE, ')')
FROM INFORMATION_SCHEMA.TABLE_CONSTRAINTS
JOIN INFORMATION_SCHEMA.CHECK_CONSTRAINTS USING (CONSTRAINT_SCHEMA, CONSTRAINT_NAME)
WHERE TABLE_SCHEMA = '' AND LOWER(TABLE_NAME) IN UNNEST(@names) AND NOT STARTS_WITH(CONSTRAINT_NAME, 'CK_IS_NOT_NULL_')
UNION ALL
SELECT IF(INDEX_TYPE = 'INDEX', CONCAT('index ', INDEX_NAME), CONCAT('table ', TABLE_NAME)),
  IF(INDEX_TYPE = 'INDEX', 'definition', 'primary key'),
  IF(INDEX_TYPE = 'INDEX', CONCAT('ON ', TABLE_NAME, ' (', KeyColumns, ')',
    IF(IS_NULL_FILTERED AND NOT REGEXP_CONTAINS(LOWER(INDEX_NAME), '^asynchronoustasks(inorder|torestore)'),
      ' NULL_FILTERED', '')),
    KeyColumns)
FROM (
  SELECT INDEX_TYPE, INDEX_NAME, TABLE_NAME, IS_NULL_FILTERED,
    ARRAY_TO_STRING(ARRAY(
      SELECT CONCAT(COLUMN_NAME, IF(COLUMN_ORDERING = 'DESC', ' DESC', '')) FROM INFORMATION_SCHEMA.INDEX_COLUMNS AS c
      WHERE c.TABLE_SCHEMA = '' AND c.TABLE_NAME = i.TABLE_NAME AND c.INDEX_NAME = i.INDEX_NAME
        AND ORDINAL_POSITION IS NOT NULL ORDER BY ORDINAL_POSITION), ', ') AS KeyColumns
  FROM INFORMATION_SCHEMA.INDEXES AS i
  WHERE i.TABLE_SCHEMA = '' AND (LOWER(INDEX_NAME) IN UNNEST(@names)
    OR (INDEX_TYPE = 'PRIMARY_KEY' AND LOWER(TABLE_NAME) IN UNNEST(@names))))
UNION ALL
SELECT CONCAT('index ', INDEX_NAME), CONCAT('stored column ', COLUMN_NAME), CONCAT('STORING (', COLUMN_NAME, ')')
FROM INFORMATION_SCHEMA.INDEX_COLUMNS
WHERE TABLE_SCHEMA = '' AND LOWER(INDEX_NAME) IN UNNEST(@names) AND ORDINAL_POSITION IS NULL
UNION ALL
SELECT CONCAT('index ', INDEX_NAME), 'state', IFNULL(INDEX_STATE, 'none') FROM INFORMATION_SCHEMA.INDEXES
WHERE TABLE_SCHEMA = '' AND LOWER(INDEX_NAME) IN UNNEST(@names)
UNION ALL
SELECT CONCAT('change stream ', CHANGE_STREAM_NAME), 'name', CHANGE_STREAM_NAME
FROM INFORMATION_SCHEMA.CHANGE_STREAMS
WHERE LOWER(CHANGE_STREAM_NAME) IN UNNEST(@names)"""


def read_parts(database: Database, titles: Iterable[str], request: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the parts of each object that exists, by the `normalized` title of the object and name of the part."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    names = [title.rpartition(" ")[2].lower() for title in titles]
    for title, name, text in query(database, _PARTS, request, names=names):
        found[normalized(title)] |= {normalized(part): each for part, each in ddl.part(name, text).items()}
    return dict(found)


def query(database: Database, sql: str, request: Mapping[str, Any], **parameters: Any) -> list[Any]:
    """Return the rows of a query about the schema. Raises NotReached, SchemaDiffers, OutboxError."""
    request = {**retry_and_timeout(SCHEMA_SECONDS), "timeout": Deadline(SCHEMA_SECONDS), **request}
    types = {name: param_types.Array(param_types.STRING) for name in parameters}

    def read(sql: str, **request: Any) -> list[Any]:
        with database.snapshot() as snapshot:
            return list(snapshot.execute_sql(sql, **request))

    with service_errors(database.name):
        try:
            return read(sql, params=parameters, param_types=types, **request)
        except google.InvalidArgument:
            if read(_DIALECT, **request) == [["POSTGRESQL"]]:
                raise SchemaDiffers(
                    f"{database.name} has the PostgreSQL dialect: use a database of the GoogleSQL dialect"
                ) from None
            raise


_REFUSED = (google.InvalidArgument, google.FailedPrecondition, google.AlreadyExists)
_NO_CREDENTIALS = (google.Unauthenticated, GoogleAuthError)
#: What gRPC says if no token for a request can be had.
_WITHOUT_LOGIN = "Getting metadata from plugin failed"
#: What an error of Google's clients means, and what to do. The first class that matches decides.
_ADVICE: dict[type[Exception], str] = {
    google.NotFound: " not found. Create it, or check --project, --instance and --database.",
    google.PermissionDenied: ": a permission is missing. Reading needs roles/spanner.databaseReader, changes need "
    "roles/spanner.databaseUser, and `outbox schema apply` needs roles/spanner.databaseAdmin.",
    **dict.fromkeys(
        _NO_CREDENTIALS,
        ": no valid credentials. Run `gcloud auth application-default login`, give the pod a service account, or set "
        "SPANNER_EMULATOR_HOST (`outbox emulators` prints it).",
    ),
    # The statements of one schema update are applied one by one, so those before the refused one stay.
    **dict.fromkeys(
        _REFUSED,
        ": Spanner refused the request. If it was a schema update, its first statements may have been applied.",
    ),
    google.Aborted: ": Spanner kept aborting the transaction because others write the same rows. Nothing changed. "
    "Try again.",
    google.ResourceExhausted: ": a quota or the memory of Spanner is exhausted. Narrow the request (--topic, --since, "
    "a smaller --limit) or try again.",
    google.DeadlineExceeded: ": Spanner did not answer in time. Check the network, or the emulator if "
    "SPANNER_EMULATOR_HOST is set. If other requests work, try again, because rows may be locked, or narrow the "
    "request, if the command has --topic or --since.",
    google.GoogleAPIError: ": Spanner did not answer. Check the network, or the emulator if SPANNER_EMULATOR_HOST is "
    "set.",
}


@contextlib.contextmanager
def service_errors(target: str) -> Iterator[None]:
    """Turn the errors of Google's clients inside the block into NotReached, or OutboxError for refused statements."""
    try:
        yield
    except (google.GoogleAPIError, GoogleAuthError) as error:
        # A login that has expired fails below the client, which then calls Spanner unavailable.
        failed = GoogleAuthError() if _WITHOUT_LOGIN in str(error) else error
        advice = next(advice for kind, advice in _ADVICE.items() if isinstance(failed, kind))
        reason = re.sub(r",? request_id = [0-9.]+", "", str(error).partition("\n")[0]).rstrip(".")
        kind = OutboxError if isinstance(error, (*_REFUSED, google.Aborted)) else NotReached
        raise kind(f"{target}{advice} {reason}") from error
