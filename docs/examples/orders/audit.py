"""What really happened, by the rows in Spanner, held against the order service's own books."""

from collections.abc import Sequence
from typing import Any

from google.api_core.exceptions import ServiceUnavailable
from google.api_core.retry import Retry, if_exception_type
from google.cloud.spanner_v1.database import Database

from orders.service import tasks_of
from orders.shop import Shop
from orders.subscriber import Delivery
from orders.summary import Run

#: Seconds for a read of a whole table.
READ_SECONDS = 30.0


def audit(database: Database, shop: Shop, deliveries: Sequence[Delivery], faults: Sequence[str]) -> Run:
    """Return the run, with a fault for each thing on which rows and books do not agree."""
    orders = dict(_rows(database, "SELECT OrderId, PlacedAt FROM Orders"))
    task_rows = _rows(database, "SELECT Id, CreatedAt, SentAt IS NOT NULL FROM AsynchronousTasks")
    tasks = {id: (created_at, sent) for id, created_at, sent in task_rows}
    failed = [order for order, _ in shop.failed]
    # An order whose outcome nobody told us may stand in the table or not: the table is the truth.
    standing = [order for order in [*shop.placed, *shop.refused, *failed] if order.id in orders]
    # Order and tasks share a transaction, and with it the commit timestamp.
    committed = {task.id: orders[order.id] for order in standing for task in tasks_of(order)}
    return Run(
        committed=committed,
        rolled_back={task.id for order in shop.refused for task in tasks_of(order)},
        marked={id for id, (_, sent) in tasks.items() if sent},
        deliveries=deliveries,
        orders=len(standing),
        refused=len(shop.refused),
        faults=[
            *faults,
            *_count(shop.failed, f"orders failed, the first with: {shop.failed[0][1] if shop.failed else ''}"),
            *_count([each for each in shop.placed if each.id not in orders], "placed orders have no row in Orders"),
            *_count([each for each in shop.refused if each.id in orders], "refused orders have a row in Orders"),
            *_count(committed.keys() - tasks.keys(), "tasks of orders in Orders have no row in AsynchronousTasks"),
            *_count(tasks.keys() - committed.keys(), "rows of AsynchronousTasks belong to no order in Orders"),
            *_count(
                [id for id in committed.keys() & tasks.keys() if tasks[id][0] != committed[id]],
                "tasks have another commit timestamp than their order",
            ),
        ],
    )


def _rows(database: Database, statement: str) -> list[Any]:
    # Both limits: without a Retry of our own the client asks an unavailable Spanner again for ever.
    retry = Retry(predicate=if_exception_type(ServiceUnavailable), timeout=READ_SECONDS)
    with database.snapshot() as snapshot:
        return list(snapshot.execute_sql(statement, retry=retry, timeout=READ_SECONDS))


def _count(found: Sequence[object] | set[str], sentence: str) -> list[str]:
    return [f"{len(found):,} {sentence}"] if found else []
