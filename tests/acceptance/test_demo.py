"""`make demo` and `make demo-pipeline` as a newcomer runs them: output, exit codes, and a lost task is noticed."""

import importlib
import json
import re
import signal
import sys
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT, children, gone, run, started
from tests.support.waiting import eventually

EXAMPLES = ROOT / "docs" / "examples"
#: Finds the example; without the emulators' variables it starts emulators of its own.
ENVIRONMENT = {"PYTHONPATH": str(EXAMPLES)}
linux = pytest.mark.skipif(sys.platform != "linux", reason="the processes are read from /proc")


@pytest.mark.usefixtures("emulators")  # skips where there are none
def test_demo_on_emulators_of_its_own():
    """Every committed task arrives, none that was rolled back; emulators and workers are gone with it."""
    with started("orders.demo", "--tasks", "150", environment=ENVIRONMENT) as process:
        process.wait_for_text("workers relay")
        # Two emulators, one of which is a script that runs Java, and two workers.
        family = children(process.pid)
        assert len(family) >= 4 or sys.platform != "linux"
        assert process.wait(100) == 0, process.stdout + process.stderr
        assert all(gone(pid) for pid in family)
        assert process.stderr == ""  # the progress is for terminals
        lines = re.findall(r"^  (\w[\w ]*?)  +([\d,.]+)(?: s)?  \S", process.stdout, re.MULTILINE)
    numbers = {name: float(number.replace(",", "")) for name, number in lines}
    assert numbers["registered"] == numbers["received"] == numbers["published"] == 150
    assert numbers["rolled back"] > 0
    assert numbers["lost"] == numbers["unexpected"] == 0
    assert 0 < numbers["latency p50"] <= numbers["latency p95"] <= numbers["latency p99"]
    assert numbers["tasks per second"] > 0


@pytest.mark.extended
@linux
def test_an_interrupted_demo_stops_its_processes(emulators: Emulators):
    """Ctrl-C in the middle stops the workers by SIGTERM, which they take well, and ends with 130 in one sentence."""
    environment = ENVIRONMENT | emulators.environment()
    with started("orders.demo", "--tasks", "20000", environment=environment) as process:
        process.wait_for_text("workers relay")
        family = children(process.pid)
        assert len(family) == 2
        process.stop(signal.SIGINT)
        assert process.wait(60) in {130, -signal.SIGINT}  # a shell shows 130 for both
        eventually(lambda: all(gone(pid) for pid in family), message="no worker left")
        assert process.stderr == "demo: interrupted; what it had started is stopped\n"


@pytest.mark.parametrize(("demo", "tasks"), [("orders.demo", "0"), ("payments.demo", "many")])
def test_an_invalid_number_is_refused(demo: str, tasks: str):
    """One sentence that names the flag, the value and the allowed values; nothing is started."""
    finished = run(demo, "--tasks", tasks, environment=ENVIRONMENT)
    assert finished.code == 2
    assert finished.stderr == (
        f"demo: --tasks: {tasks!r} is not allowed. It must be a whole number from 1 to 1,000,000\n"
    )


def test_each_kind_of_fault_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """A lost task that is marked as sent, a rolled back one, one without an ID, and a fault of a process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    summary, subscriber = (importlib.import_module(f"orders.{name}") for name in ("summary", "subscriber"))
    noon = datetime(2024, 2, 29, 12, tzinfo=UTC)
    unexpected = "tasks that were received although no transaction committed them: 1"
    exited = "worker 1 stopped with exit code 1 instead of 0"
    for received, faults, wrong in (
        (["a", "b", "c"], [], []),
        (["a", "b"], [], ["tasks that were committed and never received: 1"]),
        (["a", "b", "c", "x"], [], [unexpected]),
        (["a", "b", "c", ""], [], [unexpected]),
        (["a", "b", "c"], [exited], [exited]),
    ):
        deliveries = [subscriber.Delivery(id, id, noon + timedelta(seconds=1)) for id in received]
        run = summary.Run(dict.fromkeys("abc", noon), {"x"}, {*"abc"}, deliveries, orders=1, refused=1, faults=faults)
        numbers = summary.summarize(run)
        assert (summary.verdict(numbers, faults), summary.exit_code(wrong)) == (wrong, bool(wrong))
        assert "lost" in summary.text(numbers, run)


@pytest.mark.extended
@linux
@pytest.mark.usefixtures("emulators")
def test_a_demo_with_a_console_serves_it_until_it_is_stopped():
    with started("orders.demo", "--tasks", "150", "--console", environment=ENVIRONMENT) as process:
        process.wait_for_text("/\n", seconds=100)
        address = re.findall(r"^http://\S+$", process.stdout, re.MULTILINE)[0]
        assert "\nexport SPANNER_EMULATOR_HOST=" in process.stdout

        def healthy() -> bool:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return b"Healthy" in answer.read()

        eventually(healthy, seconds=60, message="both workers have reported their shards")
        family = children(process.pid)
        process.stop(signal.SIGINT)
        assert process.wait(60) == 0
        assert all(gone(pid) for pid in family)


PAYMENTS = 300
#: Of ten payments four are of the topic that is replayed.
REPLAYED = PAYMENTS * 4 // 10


@pytest.mark.long("it waits for most of three minutes, and the tests of each job are in tests/pipeline")
@pytest.mark.timeout(400)
def test_all_jobs_one_after_the_other(emulators: Emulators, tmp_path: Path) -> None:
    """No task is lost or altered. A replayed task was sent twice, with a message for each."""
    done = run(
        "payments.demo", "--tasks", str(PAYMENTS), "--output", str(tmp_path / "out"),
        environment=ENVIRONMENT | emulators.environment(), seconds=380,
    )  # fmt: skip
    assert done.code == 0, done.stdout + done.stderr
    assert done.stdout.endswith("Nothing is lost.\n")
    both = re.findall(r"^  ([a-z ]+?)  +([\d,]+) +([\d,]+)(?:  \S|$)", done.stdout, re.MULTILINE)
    numbers = {name: (int(first.replace(",", "")), int(second.replace(",", ""))) for name, first, second in both}
    assert numbers["sendings"] == (PAYMENTS, PAYMENTS + REPLAYED)
    for name in ("lost", "still to be sent", "late", "altered", "out of order", "unknown"):
        assert numbers[name] == (0, 0), name
    assert numbers["messages"][1] >= numbers["sendings"][1]
    [sent] = re.findall(r"sent (\d+) by Spark, and (\d+) by 2 workers", done.stdout)
    assert sum(map(int, sent)) >= PAYMENTS
    for name in ("first", "second"):
        assert (tmp_path / "out" / f"{name}-audit" / "report.html").exists()
        summary = json.loads((tmp_path / "out" / f"{name}-audit" / "summary.json").read_text(encoding="utf-8"))
        assert summary["data_compared"] is True
    assert "Traceback" not in done.stderr
