"""The whole way of a task: an order service, two relay workers and a subscriber, on the emulators.

python -m orders.demo --tasks 1000
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from random import Random

from tqdm import tqdm

from orders import audit, command, service, stage
from orders.shop import CREDIT_CENTS, CUSTOMERS, TASKS_PER_ORDER, Shop, draw_orders
from orders.stage import Stage
from orders.subscriber import Inbox, Subscriber
from orders.summary import Run, exit_code, summarize, text, verdict
from outbox.devtools.emulators import Emulators
from outbox.errors import OutboxError
from outbox.table import ddl

#: The emulator scans the whole table for each shard and topic that a poll asks for, where Spanner reads a short range.
SHARDS = 2
WORKERS = 2
#: Threads of the order service.
THREADS = 3
#: Seconds without any order placed and any task received until the demo gives up.
PATIENCE = 30.0
#: Seconds without a message, after the workers have stopped, until nothing more is expected.
QUIET = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code: 0 if every committed task came, and none that was rolled back."""
    parser = argparse.ArgumentParser(prog="orders.demo", description=__doc__.splitlines()[0] if __doc__ else None)
    command.add_tasks(parser, 1000, f"how many tasks are to be sent, rounded up to whole orders of {TASKS_PER_ORDER}")
    parser.add_argument("--console", action="store_true", help="then serve the console of the run until Ctrl-C")
    return command.run(parser, arguments, lambda options: demonstrate(options.tasks, console=options.console))


def demonstrate(tasks: int, *, console: bool = False) -> int:
    """Run it all, print the summary, return the exit code. Raises OutboxError."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        made_by = stack.enter_context(stage.emulators())
        made = _stage()
        run, log = _play(tasks, made, made_by)
        if not console:
            stack.close()
        code = _report(run, log, began)
        if console:
            stack.enter_context(stage.workers(made, WORKERS)).wait_until_polling()
            print("\nTo run the commands that the console shows, first run these lines in another terminal:")
            print(*(f"export {name}={value}" for name, value in made_by.environment().items()), sep="\n")
            stage.serve_console(made)
    return code


def _report(run: Run, log: str, began: float) -> int:
    """Print the summary, return the exit code."""
    numbers = summarize(run)
    wrong = verdict(numbers, run.faults)
    print("\nResults. Times are the emulators' on this machine, not those of Spanner and Pub/Sub.")
    print(text(numbers, run))
    print(f"  {'elapsed':<18}{time.monotonic() - began:>6.1f} s  with the start and the stop of emulators and workers")
    if log:
        print(f"The workers' warnings:\n{log}")
    print(
        "\n".join(f"WRONG: {each}" for each in wrong)
        or "Every committed task was received. No rolled-back task was received."
    )
    return exit_code(wrong)


def _stage() -> Stage:
    """Make what the order service needs, with its customers."""
    made = stage.make("orders", [*service.DDL, *ddl.statements(SHARDS)], service.TOPICS)
    with made.database.batch() as batch:
        batch.insert("Customers", ("CustomerId", "CreditCents"), [(each, CREDIT_CENTS) for each in CUSTOMERS])
    return made


def _play(tasks: int, made: Stage, emulators: Emulators) -> tuple[Run, str]:
    """Place the orders, wait until everything has come, stop the workers; return what happened and their log."""
    orders = draw_orders(tasks, Random())  # noqa: S311 - any orders will do
    inbox = Inbox(handle=lambda _message: None)
    with stage.workers(made, WORKERS) as workers, Subscriber(made.subscriptions, inbox.receive) as subscriber:
        workers.wait_until_polling()
        print(f"{WORKERS} workers relay, {THREADS} threads place {len(orders):,} orders ...", flush=True)

        def check() -> None:
            subscriber.check()
            if ended := emulators.ended() or workers.ended():
                raise OutboxError(ended)

        with contextlib.closing(Shop(made.database, orders, THREADS)) as shop:
            faults = _watch(shop, inbox, check, len(orders))
        faults += workers.stop()
        _wait_for_quiet(inbox)
        log = workers.log()
    return audit.audit(made.database, shop, inbox.deliveries(), faults), log


def _watch(shop: Shop, inbox: Inbox, check: Callable[[], None], orders: int) -> list[str]:
    """Show the progress until all tasks of all placed orders have come, or nothing moves any more. Returns faults."""
    with (
        tqdm(total=orders, desc="orders  ", unit="", disable=None) as ordered,
        tqdm(desc="received", unit=" tasks", disable=None) as received,
    ):
        before, moved_at = (0, 0), time.monotonic()
        while True:
            check()
            still_open = shop.is_open()  # asked first: what is placed after this look counts in the next
            expected = len(shop.placed) * TASKS_PER_ORDER
            received.total = expected
            now = (shop.seen(), inbox.handled())
            for bar, value in zip((ordered, received), now, strict=True):
                bar.update(value - bar.n)
            if now != before:
                before, moved_at = now, time.monotonic()
            if not still_open and inbox.handled() >= expected:
                return []
            if time.monotonic() - moved_at > PATIENCE:
                return [f"time ran out: for {PATIENCE:g} s no order was placed and no task was received"]
            time.sleep(0.05)


def _wait_for_quiet(inbox: Inbox) -> None:
    """Return when nothing has come for a while: a duplicate, or what should not come at all, may be on its way."""
    before, moved_at = -1, time.monotonic()
    while time.monotonic() - moved_at < QUIET:
        if (now := len(inbox.deliveries())) != before:
            before, moved_at = now, time.monotonic()
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
