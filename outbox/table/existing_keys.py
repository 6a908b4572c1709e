"""Inserts of rows that a table may have. A program that only registers does not load this."""

from collections.abc import Collection, Sequence

from google.cloud.spanner_v1 import KeySet

from outbox.table.timeouts import request
from outbox.table.transactions import PrimaryKey, Row, SupportsReadInsert, changes, insert, table_errors


def existing(
    transaction: SupportsReadInsert, table: str, columns: Sequence[str], keys: Collection[PrimaryKey], *, tag: str
) -> set[PrimaryKey]:
    """Return the keys that the table has, and lock all of `keys` for the transaction.

    Raises RetryError or DeadlineExceeded after IN_TRANSACTION_SECONDS, NotReached if the table is missing.
    """
    with table_errors(table):
        rows = transaction.read(table, columns, KeySet(keys=list(map(list, keys))), **request(tag))
        # Read to the end, because until then the client blocks the next statement of the transaction.
        return {tuple(row) for row in rows}


def insert_once(
    transaction: SupportsReadInsert, table: str, columns: tuple[str, ...], row: Row, *, key: PrimaryKey, tag: str
) -> bool:
    """Add an insert unless the table or the transaction has the key. Return whether it was added.

    The key stays locked until the commit.
    """
    if key in changes(transaction).inserted or existing(transaction, table, columns[: len(key)], [key], tag=tag):
        return False
    insert(transaction, table, columns, [row], keys=[key])
    return True
