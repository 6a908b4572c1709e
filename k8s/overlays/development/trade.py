"""Place an order per second until SIGTERM, receive the tasks, and print the counts every five orders.

python -m trade
"""  # noqa: INP001 - a script in a ConfigMap

import os
import signal
import sys
import threading
from random import Random

from google.api_core.exceptions import GoogleAPIError
from google.auth.credentials import AnonymousCredentials
from google.cloud import spanner
from google.cloud.spanner_v1.database import Database
from orders import service
from orders.shop import TASKS_PER_ORDER, draw_orders
from orders.subscriber import Inbox, Subscriber

#: Seconds between two orders, and seconds until the tables must exist.
PAUSE_SECONDS, WAIT_SECONDS = 1.0, 120
#: Orders per line of output.
LINE_ORDERS = 5


def main() -> int:
    """Trade until SIGTERM; return 0, or 1 with an error if the tables do not exist."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    project = os.environ["OUTBOX_PROJECT"]
    client = spanner.Client(project=project, credentials=AnonymousCredentials(), disable_builtin_metrics=True)
    database = client.instance(os.environ["OUTBOX_INSTANCE"]).database(os.environ["OUTBOX_DATABASE"])
    if not _is_prepared(database, stop):
        print("The tables do not exist. See the logs of the init containers of publishworker.", file=sys.stderr)
        return 1
    inbox = Inbox(handle=lambda _message: None)
    subscriptions = [f"projects/{project}/subscriptions/{topic}" for topic in service.TOPICS]
    with Subscriber(subscriptions, inbox.receive) as subscriber:
        _trade(database, inbox, subscriber, stop)
    return 0


def _is_prepared(database: Database, stop: threading.Event) -> bool:
    for _ in range(WAIT_SECONDS):
        try:
            with database.snapshot() as snapshot:
                list(snapshot.execute_sql("SELECT Id FROM AsynchronousTasks LIMIT 1", timeout=5))
        except GoogleAPIError:  # the emulator, the database or the table does not exist yet
            if stop.wait(1):
                return False
        else:
            return True
    return False


def _trade(database: Database, inbox: Inbox, subscriber: Subscriber, stop: threading.Event) -> None:
    placed = refused = 0
    while not stop.is_set():
        for order in draw_orders(LINE_ORDERS * TASKS_PER_ORDER, Random()):  # noqa: S311 - any orders will do
            subscriber.check()
            try:
                service.place(database, order)
            except service.OverCreditLimit:
                refused += 1
            else:
                placed += 1
            if (placed + refused) % LINE_ORDERS == 1:
                expected = placed * TASKS_PER_ORDER
                line = f"orders: {placed} placed, {refused} refused; tasks: {inbox.handled()} of {expected} received"
                print(line, flush=True)
            if stop.wait(PAUSE_SECONDS):
                return


if __name__ == "__main__":
    sys.exit(main())
