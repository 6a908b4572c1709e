"""What really happened, by the rows in Spanner, held against the order service's own books."""

from collections.abc import Collection, Sequence
from datetime import datetime

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
    orders = {id: placed_at for id, placed_at, _ in _rows(database, "SELECT OrderId, PlacedAt, TRUE FROM Orders")}
    task_rows = _rows(database, "SELECT Id, CreatedAt, SentAt IS NOT NULL FROM AsynchronousTasks")
    tasks = {id: (created_at, sent) for id, created_at, sent in task_rows}
    failed = [order for order, _ in shop.failed]
    # An order whose commit was not answered may be in the table or not.
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
            *_count("orders that failed", failed),
            *[f"the first of them: {error}" for _, error in shop.failed[:1]],
            *_count("placed orders without a row in Orders", [each for each in shop.placed if each.id not in orders]),
            *_count("refused orders with a row in Orders", [each for each in shop.refused if each.id in orders]),
            *_count("tasks of committed orders without a row in AsynchronousTasks", committed.keys() - tasks.keys()),
            *_count("rows of AsynchronousTasks that belong to no committed order", tasks.keys() - committed.keys()),
            *_count(
                "tasks with another commit timestamp than their order",
                [id for id in committed.keys() & tasks.keys() if tasks[id][0] != committed[id]],
            ),
        ],
    )


def _rows(database: Database, statement: str) -> list[tuple[str, datetime, bool]]:
    # Both limits: without a Retry of our own the client asks an unavailable Spanner again for ever.
    retry = Retry(predicate=if_exception_type(ServiceUnavailable), timeout=READ_SECONDS)
    with database.snapshot() as snapshot:
        return [*map(tuple, snapshot.execute_sql(statement, retry=retry, timeout=READ_SECONDS))]


def _count(what: str, found: Collection[object]) -> list[str]:
    return [f"{what}: {len(found):,}"] if found else []
