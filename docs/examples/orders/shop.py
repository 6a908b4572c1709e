"""Customers for the order service: several threads place orders, some of which are refused."""

import queue
import threading
import uuid
from collections.abc import Sequence
from random import Random

from google.cloud.spanner_v1.database import Database

from orders import service
from orders.service import Order

#: Articles of each order, and so tasks of each order: one a topic, and one a parcel.
ARTICLES = 2
TASKS_PER_ORDER = 3 + ARTICLES
CUSTOMERS = tuple(str(uuid.uuid5(service.TASK_IDS, f"customer {number}")) for number in range(20))
CREDIT_CENTS = 100_000
#: One order of so many is over the credit limit.
REFUSED_SHARE = 10


def draw_orders(tasks: int, random: Random) -> list[Order]:
    """Return orders with at least `tasks` tasks within the credit limit, and others beyond it, well mixed."""
    good = -(-tasks // TASKS_PER_ORDER)
    bad = max(1, good // (REFUSED_SHARE - 1))
    cents = [random.randint(1, CREDIT_CENTS) for _ in range(good)]
    cents += [random.randint(CREDIT_CENTS + 1, 2 * CREDIT_CENTS) for _ in range(bad)]
    random.shuffle(cents)
    articles = [f"article {number}" for number in range(100)]
    return [
        Order(str(uuid.uuid4()), random.choice(CUSTOMERS), tuple(random.sample(articles, ARTICLES)), each)
        for each in cents
    ]


class Shop:
    """Places orders from several threads, and records the outcome of each on its own."""

    def __init__(self, database: Database, orders: Sequence[Order], threads: int) -> None:
        """Begin at once."""
        self._database = database
        self._waiting: queue.SimpleQueue[Order] = queue.SimpleQueue()
        for order in orders:
            self._waiting.put(order)
        self._stop = threading.Event()
        self.placed: list[Order] = []
        self.refused: list[Order] = []
        self.failed: list[tuple[Order, Exception]] = []
        # Daemons: a Spanner that is gone keeps its callers waiting, and the process must end all the same.
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def seen(self) -> int:
        """Return with how many orders it is done."""
        return len(self.placed) + len(self.refused) + len(self.failed)

    def is_open(self) -> bool:
        """Tell whether orders are still being placed."""
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Place no further order, and give those under way a moment."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=1)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                order = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                service.place(self._database, order)
            except service.OverCreditLimit:
                self.refused.append(order)
            except Exception as error:  # the books name it, and the demo fails
                self.failed.append((order, error))
            else:
                self.placed.append(order)
