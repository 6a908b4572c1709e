"""Writes one invoice for each order, even if Pub/Sub delivers its message several times.

python -m fastapi_orders.subscriber SUBSCRIPTION
"""

import json
import logging
import sys
from typing import Any

import sqlalchemy
from google.cloud import pubsub_v1
from sqlalchemy.orm import Mapped, Session, mapped_column

from fastapi_orders.app import Base, engine
from outbox import TASK_ID_ATTRIBUTE

log = logging.getLogger(__name__)


class Invoice(Base):
    """An invoice. Its key is the task ID, so a second delivery inserts no second row."""

    __tablename__ = "Invoices"
    TaskId: Mapped[str] = mapped_column(sqlalchemy.String(64), primary_key=True)
    OrderId: Mapped[str] = mapped_column(sqlalchemy.String(36))
    Cents: Mapped[int] = mapped_column(sqlalchemy.BigInteger)


def write_invoice(message: Any) -> None:
    """Write the invoice, unless the task has one."""
    task_id = message.attributes.get(TASK_ID_ATTRIBUTE)
    if not task_id:
        raise ValueError("the message has no task ID, so it did not come from the outbox")
    order = json.loads(message.data)
    with Session(engine) as session, session.begin():
        if session.get(Invoice, task_id) is None:
            session.add(Invoice(TaskId=task_id, OrderId=order["order_id"], Cents=order["cents"]))


def receive(message: Any) -> None:
    """Write the invoice, then acknowledge. An exception that leaves this function would end the streaming pull."""
    try:
        write_invoice(message)
    except Exception:
        log.exception("message %s failed", message.message_id)
        message.nack()  # Pub/Sub redelivers it, or forwards it to the dead-letter topic
    else:
        message.ack()


def main(subscription: str) -> None:
    """Receive until Ctrl-C."""
    stream = pubsub_v1.SubscriberClient().subscribe(subscription, receive)
    try:
        stream.result()
    except KeyboardInterrupt:
        stream.cancel()
        stream.result()


if __name__ == "__main__":
    main(sys.argv[1])
