"""The independent checker finds what is wrong in a history. It judges the histories of `tests/faults`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.specification import checker


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
    ],
)
def test_an_operator_and_other_keys_cause_no_wrong_number(events: str) -> None:
    found = numbers(events)
    assert not {*found} & {*checker.WRONG, "duplicated"}


def test_the_command_checks_files(tmp_path: Path) -> None:
    """It also runs without the project, and fails if something is lost."""
    command = [sys.executable, "-I", checker.__file__]
    for events, code in (("register a, commit a, receive a", 0), ("register a, commit a", 1)):
        file = tmp_path / "history.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in history(events)))
        assert subprocess.run([*command, str(file)], check=False, capture_output=True, cwd=tmp_path).returncode == code
