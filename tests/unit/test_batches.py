"""Lists of items that several threads add, one list at a time."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox.inbox.collector import Collector

SECONDS = 30.0


def test_each_item_is_in_one_list_and_lists_do_not_overlap() -> None:
    """Items of a thread keep their order, and no thread waits while another one processes."""
    lists, at_once = list[list[tuple[int, int]]](), threading.Semaphore(1)

    def process(items: list[tuple[int, int]]) -> None:
        assert at_once.acquire(blocking=False)
        lists.append(items)
        time.sleep(0.001)
        at_once.release()

    collector = Collector(process, 7, 0.001)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(lambda n=n: [collector.add((n, k)) for k in range(50)]) for n in range(8)]:
            done.result(SECONDS)
    items = [item for each in lists for item in each]
    assert sorted(items) == [(n, k) for n in range(8) for k in range(50)]
    assert all([k for n, k in items if n == thread] == list(range(50)) for thread in range(8))
    assert max(map(len, lists)) == 7


@pytest.fixture
def lists() -> list[list[str]]:
    return []


def test_a_full_list_does_not_wait_and_another_one_waits_for_its_delay(lists: list[list[str]]) -> None:
    full = Collector(lists.append, 2, SECONDS)
    thread = threading.Thread(target=full.add, args=["a"])
    thread.start()
    while not full._is_busy:
        time.sleep(0.001)
    full.add("b")
    thread.join(SECONDS / 2)
    assert lists == [["a", "b"]]
    start = time.monotonic()
    Collector(lists.append, 2, 0.1).add("c")
    assert lists[1:] == [["c"]]
    assert 0.1 <= time.monotonic() - start < SECONDS


def test_an_error_reaches_the_thread_that_processes_and_loses_no_item() -> None:
    """The items that were not processed are in the next list."""
    answers: Iterator[Exception | None] = iter([LookupError(), None])
    lists = list[list[str]]()

    def process(items: list[str]) -> None:
        lists.append(items)
        collector._items.extend([("left", 0.0)] * (len(lists) == 1))
        if error := next(answers):
            raise error

    collector = Collector(process, 5, 0.0)
    with pytest.raises(LookupError):
        collector.add("a")
    collector.add("b")
    assert lists == [["a"], ["left", "b"]]
