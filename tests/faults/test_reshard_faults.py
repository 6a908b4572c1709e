"""`outbox schema reshard` under load: the command and workers are killed at each step, and a change is aborted."""

import contextlib
import signal

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.table import schema
from outbox.table.layouts import Layout
from tests.support.processes import Process, run, started
from tests.support.spanner import INSTANCE, PROJECT
from tests.support.trial import IN_FLIGHT, Trial
from tests.support.waiting import eventually

#: Steps of a change: begin, build, poll both, retire, drop, forget.
STEPS = ("Record", "Add", "Let workers poll", "Let workers stop", "Drop", "Remove")
NEW = Layout(4, "4")


@pytest.fixture
def database(own_database: Database) -> Database:
    """One whose schema the scenario changes."""
    return own_database


def _place(trial: Trial) -> tuple[str, ...]:
    return "--project", PROJECT, "--instance", INSTANCE, "--database", trial.database.database_id


def _hosts(trial: Trial) -> dict[str, str]:
    return {"SPANNER_EMULATOR_HOST": trial.emulators.spanner_host}


def _command(trial: Trial, stack: contextlib.ExitStack, *flags: str) -> Process:
    arguments = ("schema", "reshard", *flags, *_place(trial))
    return stack.enter_context(started("outbox", *arguments, environment=_hosts(trial)))


def _finish(trial: Trial, stack: contextlib.ExitStack, *flags: str) -> str:
    """Run the command until it succeeds: the emulator refuses a schema update while a transaction is open."""
    outputs = []

    def succeeds() -> bool:
        command = _command(trial, stack, *flags)
        code = command.wait(120)
        outputs.append(command.stdout)
        return code == 0

    eventually(succeeds, seconds=200, message=f"outbox schema reshard {' '.join(flags)}")
    return outputs[-1]


def _run_to(step: str, trial: Trial, stack: contextlib.ExitStack) -> Process:
    """Run the command until it prints the step, and return it. It may be refused before, and is then run again."""

    def reached() -> Process | None:
        command = _command(trial, stack, "--shards", str(NEW.shards))
        eventually(lambda: step in command.stdout or command.child.poll() is not None, seconds=120, message=step)
        return command if step in command.stdout else None

    command = eventually(reached, seconds=200, message=f"the command reaches {step}")
    assert command is not None
    return command


def _kill_at(step: str, trial: Trial, stack: contextlib.ExitStack) -> None:
    command = _run_to(step, trial, stack)
    command.stop(signal.SIGKILL)
    command.wait()


@pytest.mark.long("each step of the change")
def test_reshard_killed(trial: Trial) -> None:
    """`outbox schema reshard` is killed at each step, and a worker at every second step, under load.

    Promised: No task is lost. The command continues where it was. At most the in-flight batches of the killed workers
    are published again, and those of one worker at each of the two switches, because the emulator aborts one of two
    transactions that meet.
    """
    kills = 0
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(trial.workers(2))
        with trial.load(per_second=2):
            for number, step in enumerate(STEPS):
                _kill_at(step, trial, stack)
                if number % 2:
                    kills += 1
                    victim = trial.random.randrange(2)
                    workers[victim].stop(signal.SIGKILL)
                    workers[victim].wait()
                    workers[victim] = stack.enter_context(trial.worker())
            assert "The table has 4 shards" in _finish(trial, stack, "--shards", str(NEW.shards))
        trial.register(8)
        trial.settle()
    assert [*schema.layouts(trial.database)] == [NEW]
    assert trial.audit(duplicates=(kills + 2) * IN_FLIGHT).kept()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("step", "switches"),
    [
        pytest.param("Add", 0, marks=pytest.mark.long("an early step")),
        ("Let workers poll", 2),
        pytest.param("Let workers stop", 2, marks=pytest.mark.long("a late step")),
    ],
)
def test_reshard_aborted(step: str, switches: int, trial: Trial) -> None:
    """The operator aborts a change of the number of shards, at three steps of the change.

    Promised: No task is lost. At most the in-flight batches of one worker are published again at each switch, because
    the emulator aborts one of two transactions that meet.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(trial.workers(2))
        with trial.load(per_second=2):
            _kill_at(step, trial, stack)
            status = run("outbox", "status", *_place(trial), environment=_hosts(trial))
            assert "Changing from 10 to 4 shards since " in status.stdout
            assert "Next: " in _finish(trial, stack, "--status")
            assert "The table has 10 shards" in _finish(trial, stack, "--abort")
        trial.settle()
    assert [*schema.layouts(trial.database)] == [Layout(10)]
    assert trial.audit(duplicates=switches * IN_FLIGHT).kept()
