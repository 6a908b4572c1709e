"""The publisher and ordering keys, against a server that keeps a record: one request of a key at a time, and no more.

A failure stops its key and no other; tasks that were not tried have no outcome.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest

from outbox.message import MAX_REQUEST_BYTES, TASK_ID_ATTRIBUTE
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.types import LockedRow
from tests.support.fakes import serialized
from tests.support.outages import hang
from tests.support.pubsub_server import Handler, PubSubServer, accept, reasons, refuse, sent, to_message

#: Seconds for which an answer is kept back, so that a request that should have waited for it is seen.
KEPT_BACK = 0.05


class Recorder:
    """Calls `answer`, a little late, and keeps accepted IDs and the max number of concurrent requests of a key."""

    def __init__(self) -> None:
        self.answer: Handler = accept
        self.requests: list[tuple[str, list[str]]] = []  # the key and the ids of each, as they came
        self.accepted: list[str] = []
        self.max_requests: Counter[str] = Counter()  # requests at once, by key
        self._now: Counter[str] = Counter()
        self._met = threading.Event()
        self._lock = threading.Lock()

    def publish(self, request: Any, context: grpc.ServicerContext) -> Any:
        [key] = {message.ordering_key for message in request.messages}
        ids = [message.attributes[TASK_ID_ATTRIBUTE] for message in request.messages]
        with self._lock:
            self.requests.append((key, ids))
            self._now[key] += 1
            self.max_requests[key] = max(self.max_requests[key], self._now[key])
            if key and self._now[key] > 1:
                self._met.set()
        try:
            self._met.wait(KEPT_BACK)
            answer = self.answer(request, context)
            with self._lock:
                self.accepted += ids
            return answer
        finally:
            with self._lock:
                self._now[key] -= 1

    def of(self, key: str) -> list[list[str]]:
        return [ids for each, ids in self.requests if each == key]


@pytest.fixture
def record(server: PubSubServer) -> Recorder:
    recorder = Recorder()
    server.publish = recorder.publish
    return recorder


def row(id: str, key: str | None = "k", data: bytes = b"data") -> LockedRow:
    """Return a locked row whose message has another key than its column, which decides."""
    message = serialized(data, ordering_key="another") if data != b"broken" else b"\xff\xff\xff"
    return LockedRow(id, "orders", message, key, datetime.now(UTC), None, None)


def prefix(count: int, key: str = "k", size: int = 4) -> list[LockedRow]:
    return [row(f"{key}{n}", key, bytes(size)) for n in range(count)]


def ids(rows: Sequence[LockedRow]) -> list[str]:
    return [each.id for each in rows]


def test_a_sendable_prefix_is_one_request_in_order(publisher: PubSubPublisher, record: Recorder) -> None:
    x, y = prefix(30, "x"), prefix(30, "y")
    mixed = [each for pair in zip(x, y, [row(f"{n}", None) for n in range(30)], strict=True) for each in pair]
    all_here = threading.Barrier(3, timeout=10)

    def wait_for_the_others(request: Any, context: grpc.ServicerContext) -> Any:
        all_here.wait()  # breaks, and fails the request, unless three are in flight
        return accept(request, context)

    record.answer = wait_for_the_others
    assert sent(publisher.publish("orders", mixed, 8)) == set(ids(mixed))
    assert (record.of("x"), record.of("y")) == ([ids(x)], [ids(y)])
    assert len(record.of("")) == 1


@pytest.mark.parametrize(("count", "size", "requests"), [(5, 3_000_000, [3, 2]), (2_001, 1, [1000, 1000, 1])])
def test_a_prefix_too_large_for_a_request_is_published_in_several_in_order(
    publisher: PubSubPublisher, record: Recorder, count: int, size: int, requests: list[int]
) -> None:
    """Each request follows the answer to the one before. Other keys are published in parallel."""
    assert 3 * 3_000_000 < MAX_REQUEST_BYTES < 4 * 3_000_000
    large, small = prefix(count, "large", size), prefix(3, "small")
    assert sent(publisher.publish("orders", [*large, *small], 8)) == set(ids([*large, *small]))
    assert [len(each) for each in record.of("large")] == requests
    assert [id for each in record.of("large") for id in each] == ids(large)
    assert record.max_requests == {"large": 1, "small": 1}
    assert record.requests.index(("small", ids(small))) < len(requests)


CODES = {code.name.lower(): code for code in grpc.StatusCode if code.name not in ("OK", "INVALID_ARGUMENT")}


@pytest.mark.parametrize(("reason", "failing"), [("deadline_exceeded", 0), *((reason, 2) for reason in CODES)])
def test_any_failure_stops_its_key_after_one_try(
    publisher: PubSubPublisher, record: Recorder, reason: str, failing: int
) -> None:
    """Tasks behind it have no outcome; other keys continue. The next call publishes the key again."""
    hangs = reason == "deadline_exceeded"
    rows = prefix(6)
    rows[failing] = row(f"k{failing}", data=b"failing")
    record.answer = to_message(b"failing", hang if hangs else refuse(CODES[reason]))
    begin = time.monotonic()
    outcomes = publisher.publish("orders", [*rows, *prefix(2, "other")], 0.4 if hangs else 5, ids(rows))
    assert time.monotonic() - begin < 4
    assert sent(outcomes) == {*ids(rows)[:failing], "other0", "other1"}
    assert reasons(outcomes) == {f"k{failing}": reason}
    assert len(record.of("k")) == failing + 1
    record.answer = accept
    assert sent(publisher.publish("orders", rows[failing:], 5)) == set(ids(rows)[failing:])
    assert len(record.of("k")) == failing + 2


@pytest.mark.parametrize("place", range(8))
def test_a_poison_message_fails_alone_and_stops_its_key(
    publisher: PubSubPublisher, record: Recorder, place: int
) -> None:
    rows = prefix(8)
    rows[place] = row(f"k{place}", data=b"poison")
    record.answer = to_message(b"poison", refuse(grpc.StatusCode.INVALID_ARGUMENT))
    outcomes = publisher.publish("orders", [*rows, *prefix(2, "other")], 5)
    assert [id for id in record.accepted if id.startswith("k")] == ids(rows)[:place]
    assert reasons(outcomes) == {f"k{place}": "invalid_argument"}
    assert sent(outcomes) == {*ids(rows)[:place], "other0", "other1"}
    assert record.max_requests["k"] == 1
    assert len(record.of("k")) <= 1 + 2 * 3


@pytest.mark.parametrize(("size", "reason"), [(None, "undecodable"), (10_400_000, "too_large")])
def test_an_unsendable_message_stops_its_key(
    publisher: PubSubPublisher, record: Recorder, size: int | None, reason: str
) -> None:
    bad = row("bad", data=b"broken" if size is None else bytes(size))
    outcomes = publisher.publish("orders", [*prefix(3), bad, row("after"), row("loose", None)], 5)
    assert reasons(outcomes) == {"bad": reason}
    assert sent(outcomes) == {"k0", "k1", "k2", "loose"}
    assert record.of("k") == [["k0", "k1", "k2"]]


def test_tasks_published_singly_keep_their_order(publisher: PubSubPublisher, record: Recorder) -> None:
    assert len(sent(publisher.publish("orders", prefix(5), 5, {"k2"}))) == 5
    assert record.of("k") == [["k0", "k1"], ["k2"], ["k3", "k4"]]
    assert record.max_requests["k"] == 1
    record.answer = refuse(grpc.StatusCode.UNAVAILABLE)
    assert reasons(publisher.publish("orders", prefix(5), 5, {"k2"})) == dict.fromkeys(["k0", "k1"], "unavailable")
