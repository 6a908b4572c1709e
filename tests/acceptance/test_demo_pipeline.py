"""`make demo-pipeline` as a newcomer runs it: all jobs on Spark, with few payments; its output, how it ends."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT, children, gone, run, started
from tests.support.waiting import eventually

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "docs" / "examples")}
PAYMENTS = 300
#: Of ten payments four are of the topic that is replayed.
REPLAYED = PAYMENTS * 4 // 10


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_all_jobs_one_after_the_other(emulators: Emulators, tmp_path: Path, long: bool) -> None:
    """No task is lost or altered. A replayed task was sent twice, with a message for each."""
    if not long:
        pytest.skip("--long; it waits for most of three minutes, and the tests of each job are in tests/pipeline")
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


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="the processes are read from /proc")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long("SIGTERM goes the same way")), signal.SIGTERM]
)
def test_an_interrupted_demo_stops_its_processes(emulators: Emulators, tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C ends with 130 and one sentence; Spark is gone with it."""
    flags = ("--tasks", "20000", "--output", str(tmp_path))
    with started("payments.demo", *flags, environment=ENVIRONMENT | emulators.environment()) as process:
        # What it collects goes there: Spark runs, and the work begins.
        eventually((tmp_path / "received.jsonl").exists, seconds=100, message="it has begun")
        family = children(process.pid)
        assert family
        process.stop(number)
        # Python ends by SIGINT if the KeyboardInterrupt went through an exec() of text. A shell shows 130 for both.
        assert process.wait(100) in {130, -signal.SIGINT}
        eventually(lambda: all(gone(pid) for pid in family), message="no process left")
        assert process.stderr.endswith("demo: interrupted; what it had started is stopped\n")
        assert "Traceback" not in process.stderr


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    """One sentence with its path; nothing is started."""
    (tmp_path / "file").touch()
    done = run("payments.demo", "--output", str(tmp_path / "file"), environment=ENVIRONMENT)
    assert done.code == 1
    assert done.stderr == f"demo: --output {tmp_path / 'file'}: File exists\n"
