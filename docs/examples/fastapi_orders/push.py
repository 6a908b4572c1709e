"""Writes one invoice for each order, as the endpoint of a push subscription. Pub/Sub may send a message several times.

uvicorn --app-dir docs/examples --port 8001 fastapi_orders.push:app
"""

import json
import os

from fastapi import FastAPI, HTTPException
from google.cloud import spanner

from outbox import TASK_ID_ATTRIBUTE, InvalidMessage, inbox

client = spanner.Client(os.environ["OUTBOX_PROJECT"], disable_builtin_metrics=True)
database = client.instance(os.environ["OUTBOX_INSTANCE"]).database(os.environ["OUTBOX_DATABASE"])
app = FastAPI(title="Billing")


@inbox.Handler(database, consumer="billing")
def write_invoice(transaction: inbox.Transaction, message: inbox.ReceivedMessage) -> None:
    """Insert the invoice. It runs once for each task, in the transaction that records the task."""
    order = json.loads(message.data)
    task_id = message.attributes[TASK_ID_ATTRIBUTE]
    transaction.insert("Invoices", ("TaskId", "OrderId", "Cents"), [(task_id, order["order_id"], order["cents"])])


@app.post("/invoices", status_code=204)
def receive(body: dict[str, object]) -> None:
    """Answer after the commit. After any other status than 2xx, Pub/Sub sends the message again."""
    try:
        message = inbox.pushed_message(body)
    except InvalidMessage as error:
        raise HTTPException(400, str(error)) from error
    write_invoice.process(message)
