"""Run a function over items at once, each on a thread of its own."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results in the order of `items`; the first exception is raised after all have ended.

    Never a pool: a thread on which the Spanner client once failed to get a session can run no transaction any more
    (google-cloud-python #18375), so no thread outlives its item.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(position: int, item: Item) -> None:
        try:
            results[position] = function(item)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=each, name=f"group-{each[0]}", daemon=True) for each in enumerate(items)
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    finally:
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]
    return [results[position] for position in range(len(items))]
