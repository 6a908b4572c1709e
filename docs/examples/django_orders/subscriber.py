"""Writes one invoice for each order, even if Pub/Sub delivers its message several times.

DJANGO_SETTINGS_MODULE=django_orders.settings python -m django_orders.subscriber SUBSCRIPTION
"""

import json
import logging
import signal
import sys

import django
from google.cloud import pubsub_v1

from outbox import TASK_ID_ATTRIBUTE
from outbox.inbox import PulledMessage

log = logging.getLogger(__name__)


def write_invoice(message: PulledMessage) -> None:
    """Write the invoice, unless the task has one."""
    from django_orders.models import Invoice  # noqa: PLC0415 - models need `django.setup`

    task_id = message.attributes.get(TASK_ID_ATTRIBUTE)
    if not task_id:
        raise ValueError("the message has no task ID, so it did not come from the outbox")
    order = json.loads(message.data)
    Invoice.objects.get_or_create(task_id=task_id, defaults={"order_id": order["order_id"], "cents": order["cents"]})


def receive(message: PulledMessage) -> None:
    """Write the invoice, then acknowledge. An exception that leaves this function would end the streaming pull."""
    try:
        write_invoice(message)
    except Exception:
        log.exception("message %s failed", message.message_id)
        message.nack()  # Pub/Sub redelivers it, or forwards it to the dead-letter topic
    else:
        message.ack()


def main(subscription: str) -> None:
    """Receive until Ctrl-C or SIGTERM, and then until the calls that are running have ended."""
    django.setup()
    stream = pubsub_v1.SubscriberClient().subscribe(subscription, receive, await_callbacks_on_shutdown=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stream.cancel())
    stream.result()


if __name__ == "__main__":
    main(sys.argv[1])
