"""A small order service: what an application with an outbox looks like.

`place` is the part to copy: one transaction writes the order and registers every message about it. If the transaction
commits, all of them are sent; if it does not, none is. Nothing here knows Pub/Sub.
"""

import dataclasses
import json
import uuid
from collections.abc import Iterator

from google.api_core.exceptions import AlreadyExists
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.transaction import Transaction

import outbox

#: The application's own tables. Those of the outbox come from `outbox schema print`.
DDL = (
    """CREATE TABLE Customers (
      CustomerId  STRING(36) NOT NULL,
      CreditCents INT64      NOT NULL,
    ) PRIMARY KEY (CustomerId)""",
    """CREATE TABLE Orders (
      OrderId     STRING(36) NOT NULL,
      CustomerId  STRING(36) NOT NULL,
      Articles    ARRAY<STRING(100)> NOT NULL,
      Cents       INT64      NOT NULL,
      PlacedAt    TIMESTAMP  NOT NULL OPTIONS (allow_commit_timestamp = true),
    ) PRIMARY KEY (OrderId)""",
)
TOPICS = ("orders", "invoices", "parcels", "emails")

#: Where the ids of this application's tasks come from: any UUID, the same one for ever.
TASK_IDS = uuid.UUID("6c2f0c3e-6a0c-4c55-9d0e-2f3a7a5f9a10")


class OverCreditLimit(Exception):
    """The customer may not order for so much; nothing was written and nothing will be sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What a customer sends; the id was drawn by the shop's website, once for each order."""

    id: str
    customer_id: str
    articles: tuple[str, ...]
    cents: int


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One message about an order."""

    id: str
    topic: str
    data: bytes
    priority: int


def place(database: Database, order: Order) -> None:
    """Write the order and register its tasks: all or nothing. To place it again changes nothing and is no error."""

    def work(transaction: Transaction) -> None:
        row = (order.id, order.customer_id, order.articles, order.cents, COMMIT_TIMESTAMP)
        transaction.insert("Orders", ("OrderId", "CustomerId", "Articles", "Cents", "PlacedAt"), [row])
        for task in tasks_of(order):
            outbox.register(
                transaction, task.topic, task.data, {"order": order.id}, priority=task.priority, task_id=task.id
            )
        # Last on purpose: what was registered before an error is gone with the order, wherever the error comes from.
        _check_credit(transaction, order)

    try:
        # The delay is for aborts after which Spanner names none; the client's own would be 2 s and more.
        database.run_in_transaction(work, timeout_secs=60, default_retry_delay=0.05)
    except AlreadyExists:
        # The caller tries again because the first answer was lost. The ids follow from the order, so its row and its
        # tasks are the ones of the first time.
        return


def tasks_of(order: Order) -> Iterator[Task]:
    """Yield what others have to hear about the order, the same tasks with the same ids each time."""
    yield _task(order, "orders", {"cents": order.cents}, outbox.Priority.HIGH)
    yield _task(order, "invoices", {"customer": order.customer_id, "cents": order.cents}, outbox.Priority.NORMAL)
    for number, article in enumerate(order.articles):
        yield _task(order, "parcels", {"article": article}, outbox.Priority.HIGH, number)
    yield _task(order, "emails", {"customer": order.customer_id, "template": "thanks"}, outbox.Priority.LOW)


def _task(order: Order, topic: str, content: dict[str, object], priority: int, number: int = 0) -> Task:
    # Hashed, never a monotonically increasing number: the ID is the primary key.
    id = str(uuid.uuid5(TASK_IDS, f"{order.id}/{topic}/{number}"))
    return Task(id, topic, json.dumps({"order": order.id, **content}).encode(), priority)


def _check_credit(transaction: Transaction, order: Order) -> None:
    # The result is read to its end: Spanner's client wants that of the first statement of a transaction.
    rows = list(transaction.read("Customers", ["CreditCents"], KeySet(keys=[[order.customer_id]])))
    if not rows or order.cents > rows[0][0]:
        raise OverCreditLimit(f"order {order.id} is over the limit of customer {order.customer_id}")
