"""`outbox schema reshard` under load: the command is killed, and the change is aborted."""

import contextlib
import signal

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.table import schema
from outbox.table.ddl import Layout
from tests.support.processes import Process, run, started
from tests.support.spanner import variables
from tests.support.trial import IN_FLIGHT, Trial
from tests.support.waiting import eventually


@pytest.fixture
def database(own_database: Database) -> Database:
    """One whose schema the scenario changes."""
    return own_database


def _variables(trial: Trial) -> dict[str, str]:
    return variables(trial.database.database_id, trial.emulators)


def _command(trial: Trial, stack: contextlib.ExitStack, *flags: str) -> Process:
    return stack.enter_context(started("outbox", "schema", "reshard", *flags, environment=_variables(trial)))


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


def _kill_at(step: str, trial: Trial, stack: contextlib.ExitStack) -> None:
    """Run the command until it prints the step, and kill it. It may be refused before, and is then run again."""

    def reached() -> Process | None:
        command = _command(trial, stack, "--shards", "4")
        eventually(lambda: step in command.stdout or command.child.poll() is not None, seconds=120, message=step)
        return command if step in command.stdout else None

    command = eventually(reached, seconds=200, message=f"the command reaches {step}")
    assert command is not None
    command.stop(signal.SIGKILL)
    command.wait()


@pytest.mark.extended
def test_reshard_aborted(trial: Trial) -> None:
    """`outbox schema reshard` is killed while workers poll old and new shards, under load. The operator aborts it.

    Promised: No task is lost. At most the in-flight batches of one worker are published again at each switch, because
    the emulator aborts one of two transactions that meet.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(trial.workers(2))
        with trial.load(per_second=2):
            _kill_at("Let workers poll", trial, stack)
            status = run("outbox", "status", environment=_variables(trial))
            assert "Changing from 10 to 4 shards since " in status.stdout
            assert "Next: " in _finish(trial, stack, "--status")
            assert "The table has 10 shards" in _finish(trial, stack, "--abort")
        trial.settle()
    assert [*schema.layouts(trial.database)] == [Layout(10)]
    assert trial.audit(duplicates=2 * IN_FLIGHT).kept()
