"""Writes one invoice for each order, even if Pub/Sub delivers its message several times.

python -m fastapi_orders.subscriber SUBSCRIPTION
"""

import json
import logging
import signal
import sys

import sqlalchemy
from google.cloud import pubsub_v1
from sqlalchemy.orm import Mapped, Session, mapped_column

from fastapi_orders.app import Base, engine
from outbox import TASK_ID_ATTRIBUTE
from outbox.ext import sqlalchemy as outbox_sqlalchemy
from outbox.inbox import PulledMessage

log = logging.getLogger(__name__)


class Invoice(Base):
    """An invoice."""

    __tablename__ = "Invoices"
    TaskId: Mapped[str] = mapped_column(sqlalchemy.String(64), primary_key=True)
    OrderId: Mapped[str] = mapped_column(sqlalchemy.String(36))
    Cents: Mapped[int] = mapped_column(sqlalchemy.BigInteger)


def write_invoice(session: Session, message: PulledMessage) -> None:
    """Write the invoice, unless the inbox has the task, in the transaction that records the task."""
    order = json.loads(message.data)
    if outbox_sqlalchemy.process_once(session, message, consumer="billing-pull"):
        task_id = message.attributes[TASK_ID_ATTRIBUTE]
        session.add(Invoice(TaskId=task_id, OrderId=order["order_id"], Cents=order["cents"]))


def receive(message: PulledMessage) -> None:
    """Write the invoice, then acknowledge. An exception that leaves this function would end the streaming pull."""
    try:
        outbox_sqlalchemy.run_in_transaction(engine, write_invoice, message)
    except Exception:
        log.exception("message %s failed", message.message_id)
        message.nack()  # Pub/Sub redelivers it, or forwards it to the dead-letter topic
    else:
        message.ack()


def main(subscription: str) -> None:
    """Receive until Ctrl-C or SIGTERM, and then until the calls that are running have ended."""
    stream = pubsub_v1.SubscriberClient().subscribe(subscription, receive, await_callbacks_on_shutdown=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stream.cancel())
    stream.result()


if __name__ == "__main__":
    main(sys.argv[1])
