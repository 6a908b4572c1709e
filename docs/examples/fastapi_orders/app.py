"""An order service with FastAPI and SQLAlchemy. Each order registers one task in its own transaction.

uvicorn --app-dir docs/examples fastapi_orders.app:app
"""

import json
import os
import uuid

import sqlalchemy
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox.ext import sqlalchemy as outbox_sqlalchemy

TOPIC = "orders"

engine = sqlalchemy.create_engine(
    "spanner+spanner:///projects/{OUTBOX_PROJECT}/instances/{OUTBOX_INSTANCE}/databases/{OUTBOX_DATABASE}".format(
        **os.environ
    )
)
app = FastAPI(title="Orders")


class Base(DeclarativeBase):
    """The base of the tables of this service. `outbox schema apply` creates those of the outbox."""


class Order(Base):
    """An order."""

    __tablename__ = "Orders"
    OrderId: Mapped[str] = mapped_column(sqlalchemy.String(36), primary_key=True)
    Item: Mapped[str] = mapped_column(sqlalchemy.String(100))
    Cents: Mapped[int] = mapped_column(sqlalchemy.BigInteger)


class NewOrder(BaseModel):
    """The body of a request."""

    item: str = Field(min_length=1, max_length=100)
    cents: int = Field(gt=0)


@app.post("/orders", status_code=201)
def place_order(order: NewOrder) -> dict[str, str]:
    """Place an order. If its transaction conflicts with another one, it runs again."""
    return outbox_sqlalchemy.run_in_transaction(engine, insert_order, str(uuid.uuid4()), order)


def insert_order(session: Session, order_id: str, order: NewOrder) -> dict[str, str]:
    """Insert the order and register its task. Both are committed, or neither."""
    session.add(Order(OrderId=order_id, Item=order.item, Cents=order.cents))
    message = json.dumps({"order_id": order_id, "cents": order.cents}).encode()
    task_id = outbox_sqlalchemy.register(session, TOPIC, message, attributes={"kind": "order-placed"})
    if order.item == "unavailable":  # a fault after `register`: the task is rolled back with the order
        raise HTTPException(409, "this item is not available")
    return {"order_id": order_id, "task_id": task_id}
