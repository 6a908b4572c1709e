"""`make demo` as a newcomer runs it: what it prints, how it ends, and that it notices a broken outbox."""

import os
import re
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.cloud.spanner_v1.instance import Instance

from outbox import TASK_ID_ATTRIBUTE, schema
from outbox.emulators import Emulators
from tests.support.processes import ROOT, Finished, children, gone, run, started
from tests.support.spanner import fresh_database
from tests.support.waiting import eventually

EXAMPLES = ROOT / "docs" / "examples"
#: Finds the example; without the emulators' variables it starts emulators of its own.
ENVIRONMENT = {"PYTHONPATH": str(EXAMPLES)}

linux = pytest.mark.skipif(sys.platform != "linux", reason="the processes are read from /proc")


@pytest.fixture
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def summary(_examples: None) -> ModuleType:
    """The module that counts and judges."""
    import orders.summary

    return orders.summary


def _numbers(output: str) -> dict[str, float]:
    lines = re.findall(r"^  (\w[\w ]*?)  +([\d,.]+)(?: s)?  \S", output, re.MULTILINE)
    return {name: float(number.replace(",", "")) for name, number in lines}


def _check(finished: Finished) -> None:
    assert finished.code == 0, finished.stdout + finished.stderr
    numbers = _numbers(finished.stdout)
    assert numbers["registered"] == numbers["received"] == numbers["published"] == 150
    assert numbers["rolled back"] > 0
    assert numbers["lost"] == numbers["unexpected"] == 0
    assert 0 < numbers["latency p50"] <= numbers["latency p95"] <= numbers["latency p99"]
    assert numbers["tasks per second"] > 0
    assert finished.stderr == ""  # the progress is for terminals


@pytest.mark.usefixtures("emulators")  # skips where there are none
def test_demo_on_emulators_of_its_own():
    """Every committed task arrives, none that was rolled back; emulators and workers are gone with it."""
    with started("orders.demo", "--tasks", "150", environment=ENVIRONMENT) as process:
        process.wait_for_text("workers relay")
        # Two emulators, one of which is a script that runs Java, and two workers.
        family = children(process.pid)
        assert len(family) >= 4 or sys.platform != "linux"
        code = process.wait(100)
        _check(Finished(code, process.stdout, process.stderr))
        assert all(gone(pid) for pid in family)


@pytest.mark.extended
def test_demo_on_given_emulators(emulators: Emulators):
    """It uses the emulators that the variables name and leaves them running, twice in a row."""
    for _ in range(2):
        _check(run("orders.demo", "--tasks", "150", environment=ENVIRONMENT | emulators.environment(), seconds=60))
    assert emulators.ended() is None


@pytest.mark.extended
@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(emulators: Emulators, number: signal.Signals):
    """Ctrl-C in the middle stops the workers by SIGTERM, which they take well, and ends with 130 in one sentence."""
    environment = ENVIRONMENT | emulators.environment()
    with started("orders.demo", "--tasks", "20000", environment=environment) as process:
        process.wait_for_text("workers relay")
        family = children(process.pid)
        assert len(family) == 2
        process.stop(number)
        assert process.wait(60) == 130
        eventually(lambda: all(gone(pid) for pid in family), message="no worker left")
        assert process.stderr == "demo: interrupted; what it had started is stopped\n"


@pytest.mark.extended
@linux
def test_a_worker_that_dies_is_noticed(emulators: Emulators):
    """It does not go on with the other one."""
    environment = ENVIRONMENT | emulators.environment()
    with started("orders.demo", "--tasks", "20000", environment=environment) as process:
        process.wait_for_text("workers relay")
        worker, other = children(process.pid)
        os.kill(worker, signal.SIGKILL)
        assert process.wait(60) == 1
        assert "ended with exit code -9" in process.stderr
        assert gone(other)


@pytest.mark.parametrize("tasks", ["0", "-3", "many", "1.5", ""])
def test_a_number_that_is_none(tasks: str):
    """One sentence that names the flag, the value and what is allowed; nothing is started."""
    finished = run("orders.demo", "--tasks", tasks, environment=ENVIRONMENT)
    assert finished.code == 2
    assert finished.stderr == (
        f"demo: --tasks: {tasks!r} is not allowed: it must be a whole number from 1 to 1,000,000\n"
    )


def test_no_emulators(tmp_path: Path):
    """It says what is missing and how to get it."""
    finished = run("orders.demo", environment=ENVIRONMENT | {"CLOUDSDK_ROOT_DIR": str(tmp_path)})
    assert finished.code == 3
    assert finished.stderr.startswith("demo: the Spanner emulator and the Pub/Sub emulator not found")
    assert "gcloud components install" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.usefixtures("_examples")
def test_the_service(spanner_instance: Instance):
    """An order and its tasks are there together, once, however often it is placed, or not at all."""
    from orders import service

    def count(table: str) -> int:
        with database.snapshot() as snapshot:
            [[number]] = snapshot.execute_sql(f"SELECT COUNT(*) FROM {table}")
            return number

    with fresh_database(spanner_instance, [*service.DDL, *schema.statements()]) as database:
        with database.batch() as batch:
            batch.insert("Customers", ("CustomerId", "CreditCents"), [("ada", 100)])
        for order in (
            service.Order("too dear", "ada", ("an engine",), 101),
            service.Order("from a stranger", "bob", ("a nut",), 1),
        ):
            with pytest.raises(service.OverCreditLimit):
                service.place(database, order)
        assert (count("Orders"), count("AsynchronousTasks")) == (0, 0)
        for _ in range(2):
            service.place(database, service.Order("twice", "ada", ("a nut", "a bolt"), 100))
        assert (count("Orders"), count("AsynchronousTasks")) == (1, 5)


class _Message:
    """What the subscriber's client gives to a callback."""

    def __init__(self, task_id: str) -> None:
        self.attributes, self.message_id, self.answer = {TASK_ID_ATTRIBUTE: task_id}, "1", ""

    def ack(self) -> None:
        self.answer = "ack"

    def nack(self) -> None:
        self.answer = "nack"


@pytest.mark.usefixtures("_examples")
def test_the_subscriber():
    """A task takes effect once; what could not be handled is asked for again and not taken for done."""
    from orders.subscriber import Inbox

    handled: list[str] = []

    def handle(message: _Message) -> None:
        if message.attributes[TASK_ID_ATTRIBUTE] == "bad" and not handled:
            raise RuntimeError
        handled.append(message.attributes[TASK_ID_ATTRIBUTE])

    inbox = Inbox(handle)
    messages = [_Message(task_id) for task_id in ("bad", "a", "a", "bad")]
    for message in messages:
        inbox.receive(message)
    assert [message.answer for message in messages] == ["nack", "ack", "ack", "ack"]
    assert handled == ["a", "bad"]
    assert (inbox.handled(), len(inbox.deliveries())) == (2, 4)


NOON = datetime(2024, 2, 29, 12, tzinfo=UTC)


def _run(summary: ModuleType, arrivals: list[tuple[str, str, float]], **changes: Any) -> Any:
    """A run in which `a`, `b` and `c` were committed at noon and `x` rolled back."""
    from orders.subscriber import Delivery

    values = {
        "committed": dict.fromkeys("abc", NOON),
        "rolled_back": {"x"},
        "marked": {"a", "b", "c"},
        "deliveries": [Delivery(task, message, NOON + timedelta(seconds=after)) for task, message, after in arrivals],
        "orders": 1,
        "refused": 1,
    }
    return summary.Run(**values | changes)


def _judge(summary: ModuleType, run: Any) -> tuple[Any, list[str], int]:
    numbers = summary.summarize(run)
    wrong = summary.verdict(numbers, run.faults)
    return numbers, wrong, summary.exit_code(wrong)


def test_a_good_run_with_duplicates(summary: ModuleType):
    """Duplicates are counted by kind, latency by the first arrival; they are no fault."""
    arrivals = [("a", "1", 1), ("b", "2", 2), ("b", "2", 9), ("c", "4", 8), ("c", "3", 3), ("c", "3", 4)]
    numbers, wrong, code = _judge(summary, _run(summary, arrivals))
    assert (wrong, code) == ([], 0)
    assert (numbers.registered, numbers.rolled_back, numbers.published, numbers.received) == (3, 1, 3, 3)
    assert (numbers.lost, numbers.unexpected) == (0, 0)
    assert (numbers.published_again, numbers.redelivered) == (1, 2)
    assert numbers.latency == pytest.approx((2, 2.9, 2.98))
    assert numbers.per_second == pytest.approx(1)


def test_a_lost_task_is_noticed(summary: ModuleType):
    """Also one that is marked as sent."""
    numbers, wrong, code = _judge(summary, _run(summary, [("a", "1", 1), ("b", "2", 1)]))
    assert (numbers.lost, numbers.published, numbers.received, code) == (1, 3, 2, 1)
    assert wrong == ["tasks that were committed and never received: 1"]


@pytest.mark.parametrize("intruder", ["x", "", "unheard of"])
def test_an_unexpected_task_is_noticed(summary: ModuleType, intruder: str):
    """One that rolled back, one without an id, one that nobody registered."""
    arrivals = [("a", "1", 1), ("b", "2", 1), ("c", "3", 1), (intruder, "4", 1)]
    numbers, wrong, code = _judge(summary, _run(summary, arrivals))
    assert (numbers.unexpected, numbers.received, numbers.lost, code) == (1, 3, 0, 1)
    assert wrong == ["tasks that were received although no transaction committed them: 1"]


def test_any_other_fault_is_noticed(summary: ModuleType):
    """A run that came to its end in time, with all its tasks, and yet not well."""
    arrivals = [("a", "1", 1), ("b", "2", 1), ("c", "3", 1)]
    _, wrong, code = _judge(summary, _run(summary, arrivals, faults=["worker 1 stopped with exit code 1 instead of 0"]))
    assert (wrong, code) == (["worker 1 stopped with exit code 1 instead of 0"], 1)


def test_nothing_received_at_all(summary: ModuleType):
    """There is no latency then, and the summary can still be printed."""
    run = _run(summary, [])
    numbers, _, code = _judge(summary, run)
    assert (numbers.lost, numbers.latency, numbers.per_second, code) == (3, None, 0, 1)
    assert "lost" in summary.text(numbers, run)
