"""`make demo` as a newcomer runs it: its output, how it ends, and that it notices a broken outbox."""

import os
import re
import signal
import sys
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest

from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT, Finished, children, gone, run, started
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
def test_an_interrupted_demo_stops_its_processes(emulators: Emulators, number: signal.Signals):
    """Ctrl-C in the middle stops the workers by SIGTERM, which they take well, and ends with 130 in one sentence."""
    environment = ENVIRONMENT | emulators.environment()
    with started("orders.demo", "--tasks", "20000", environment=environment) as process:
        process.wait_for_text("workers relay")
        family = children(process.pid)
        assert len(family) == 2
        process.stop(number)
        assert process.wait(60) in {130, -signal.SIGINT}  # a shell shows 130 for both
        eventually(lambda: all(gone(pid) for pid in family), message="no worker left")
        assert process.stderr == "demo: interrupted; what it had started is stopped\n"


@pytest.mark.extended
@linux
def test_a_worker_that_crashes_is_noticed(emulators: Emulators):
    environment = ENVIRONMENT | emulators.environment()
    with started("orders.demo", "--tasks", "20000", environment=environment) as process:
        process.wait_for_text("workers relay")
        worker, other = children(process.pid)
        os.kill(worker, signal.SIGKILL)
        assert process.wait(60) == 1
        assert "ended with exit code -9" in process.stderr
        assert gone(other)


@pytest.mark.parametrize(
    ("demo", "tasks"),
    [*(("orders.demo", tasks) for tasks in ("0", "-3", "many", "1.5", "")), ("payments.demo", "many")],
)
def test_an_invalid_number_is_refused(demo: str, tasks: str):
    """One sentence that names the flag, the value and the allowed values; nothing is started."""
    finished = run(demo, "--tasks", tasks, environment=ENVIRONMENT)
    assert finished.code == 2
    assert finished.stderr == (
        f"demo: --tasks: {tasks!r} is not allowed. It must be a whole number from 1 to 1,000,000\n"
    )


NOON = datetime(2024, 2, 29, 12, tzinfo=UTC)
GOOD = [("a", "1", 1), ("b", "2", 1), ("c", "3", 1)]
UNEXPECTED = "tasks that were received although no transaction committed them: 1"


def _run(summary: ModuleType, arrivals: list[tuple[str, str, float]], faults: list[str]) -> Any:
    from orders.subscriber import Delivery

    return summary.Run(
        committed=dict.fromkeys("abc", NOON),
        rolled_back={"x"},
        marked={"a", "b", "c"},
        deliveries=[Delivery(task, message, NOON + timedelta(seconds=after)) for task, message, after in arrivals],
        orders=1,
        refused=1,
        faults=faults,
    )


def test_duplicates_are_counted_and_are_no_fault(summary: ModuleType):
    """They are counted by kind, latency by the first arrival."""
    arrivals = [("a", "1", 1), ("b", "2", 2), ("b", "2", 9), ("c", "4", 8), ("c", "3", 3), ("c", "3", 4)]
    numbers = summary.summarize(_run(summary, arrivals, []))
    assert summary.verdict(numbers, []) == []
    assert (numbers.registered, numbers.rolled_back, numbers.published, numbers.received) == (3, 1, 3, 3)
    assert (numbers.published_again, numbers.redelivered) == (1, 2)
    assert numbers.latency == pytest.approx((2, 2.9, 2.98))
    assert numbers.per_second == pytest.approx(1)


@pytest.mark.parametrize(
    ("arrivals", "faults", "wrong"),
    [
        (GOOD, [], []),
        (GOOD[:2], [], ["tasks that were committed and never received: 1"]),
        ([], [], ["tasks that were committed and never received: 3"]),
        ([*GOOD, ("x", "4", 1)], [], [UNEXPECTED]),
        ([*GOOD, ("", "4", 1)], [], [UNEXPECTED]),
        ([*GOOD, ("unheard of", "4", 1)], [], [UNEXPECTED]),
        (GOOD, ["worker 1 stopped with exit code 1 instead of 0"], ["worker 1 stopped with exit code 1 instead of 0"]),
    ],
)
def test_each_kind_of_fault_is_noticed(
    summary: ModuleType, arrivals: list[tuple[str, str, float]], faults: list[str], wrong: list[str]
):
    """A lost task that is marked as sent, a rolled back one, one without an ID, one that was never registered."""
    run = _run(summary, arrivals, faults)
    numbers = summary.summarize(run)
    assert summary.verdict(numbers, faults) == wrong
    assert summary.exit_code(wrong) == bool(wrong)
    assert "lost" in summary.text(numbers, run)
