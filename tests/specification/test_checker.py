"""The independent checker finds what is wrong in a history, and histories of the simulation have nothing wrong."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.seeded_faults import seeded
from tests.specification import checker
from tests.specification.histories import lines, plan_of, record

FOLDER = Path(__file__).parent
KEPT = sorted((FOLDER / "histories_kept").glob("*.gz"))


def history(text: str) -> list[dict[str, Any]]:
    """Return the events of a text such as "register a key, commit a". The message ID of a receive is its third word."""
    events = []
    for event, task, *more in (each.split() for each in text.split(",")):
        name = {"register": "key", "receive": "message"}.get(event)
        events.append({"event": event, "task": task, **({name: more[0] if more else f"m-{task}"} if name else {})})
    return events


def numbers(text: str) -> dict[str, Any]:
    """Return the numbers that are not 0, without the examples."""
    found = checker.check(history(text))
    return {name: value for name, value in found.items() if value and name != "problems"}


def test_a_task_that_is_received_once_is_ok() -> None:
    assert numbers("register a, commit a, publish a, receive a, effect a") == {
        "attempted": 1, "acknowledged": 1, "ok": 1, "effects": {1: 1}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("events", "name"),
    [
        ("register a, commit a", "lost"),
        ("receive a", "unexpected"),
        ("register a, rollback a, receive a", "unexpected"),
        ("register a, commit a, publish a, delete a", "unpublished"),
        ("register a, receive a", "recovered"),
        ("register a, commit a, receive a m1, receive a m2", "duplicated"),
        ("register a, commit a, receive a m1, receive a m1", "redelivered_messages"),
        ("register a, commit a, receive a, effect a, effect a", "effects_twice"),
        ("register a, commit a, effect a, receive a", "effects_without_message"),
        ("register a k, register b k, commit a, commit b, receive b, receive a", "order_violations"),
        ("register a k, commit a, register b k, receive b, commit b, receive a", "order_violations"),
        ("register a, commit a, receive a m1, retry a", "lost"),
        ("receive a, register a, commit a", "unexpected"),
        ("register a, rollback a, receive a m1, register a, commit a, receive a m1", "unexpected"),
    ],
)
def test_what_is_wrong_has_a_number(events: str, name: str) -> None:
    found = numbers(events)
    assert found[name] == 1
    assert {*found} & {*checker.WRONG} == {name} & {*checker.WRONG}


@pytest.mark.parametrize(
    "events",
    [
        "register a, commit a, receive a m1, retry a, receive a m2",
        "register a k, register b k, commit a, commit b, delete a, receive b",
        "register a k, register b k, commit a, commit b, receive a m1, receive b, retry a, receive a m2",
        "register a k, register b j, commit a, commit b, receive b, receive a",
        "register a, rollback a, register a, commit a, receive a",
        "register a, commit a, register a, rollback a, receive a, register a, rollback a",
        "register a k, register b k, receive a, commit a, receive b, commit b",
    ],
)
def test_an_operator_other_keys_and_a_second_registration_cause_no_wrong_number(events: str) -> None:
    found = numbers(events)
    assert not {*found} & {*checker.WRONG, "duplicated"}


def test_other_events_are_ignored() -> None:
    assert checker.check([{"event": "kill", "worker": "w"}])["problems"] == {}


@pytest.mark.parametrize("seed", [6, 10, 11, 12])
def test_histories_of_the_simulation_have_nothing_wrong(seed: int) -> None:
    """Both judges count the same duplicates, and share no code."""
    events, audit = record(plan_of(seed))
    found = checker.check(events)
    assert found["problems"] == {}
    assert found["duplicate_messages"] == audit.duplicates
    assert found["acknowledged"] == len(audit.tasks)


@pytest.mark.parametrize(
    ("defect", "name"),
    [
        ("a key is sent from its head on", "order_violations"),
        ("due tasks are polled", "lost"),
        ("a transaction attempt remembers outcomes", "duplicated"),
    ],
)
def test_the_checker_notices_defects_of_the_relay(defect: str, name: str) -> None:
    plans = [plan for plan in map(plan_of, range(30)) if plan.keys and plan.faults and plan.seconds < 60]
    with seeded(defect):
        assert any(checker.check(record(plan, limit=60.0)[0])[name] for plan in plans)


def test_the_command_checks_the_kept_histories(tmp_path: Path) -> None:
    """It also runs without the project, and fails if something is lost or there is nothing to check."""
    lost = tmp_path / "lost.jsonl"
    lost.write_bytes(lines(history("register a, commit a")))
    command = [sys.executable, "-I", str(FOLDER / "checker.py"), *map(str, KEPT)]
    assert len(KEPT) == 3
    assert subprocess.run(command, check=False, capture_output=True, cwd=tmp_path).returncode == 0
    (tmp_path / "empty").touch()
    for others in ([*command, str(lost)], [*command, "empty"], command[:3]):
        assert subprocess.run(others, check=False, capture_output=True, cwd=tmp_path).returncode == 1
