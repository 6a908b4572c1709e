"""What workers do is allowed by the specification, step by step, and an independent checker finds nothing wrong."""

import itertools
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.plan import Plan
from tests.simulation.seeded_faults import seeded
from tests.simulation.world import World
from tests.specification import checker
from tests.specification.conformance import Conformance, conform
from tests.specification.histories import lines, record


def played(seeds: Iterable[int]) -> Iterator[tuple[int, Conformance]]:
    """Play histories by seed."""
    for seed in seeds:
        steps: list[dict[str, Any]] = []
        World(Plan.of(seed), steps=steps).play(limit=120.0)
        yield seed, conform(steps)


@pytest.mark.parametrize(
    ("first", "seconds"),
    [(0, 2.0), pytest.param(1_000, 120.0, marks=[pytest.mark.long("many histories"), pytest.mark.timeout(3600)])],
)
def test_every_transaction_is_allowed_by_the_specification(first: int, seconds: float) -> None:
    """The first difference is printed with both states."""
    end, histories, transactions, skipped = time.process_time() + seconds, 0, 0, 0
    for seed, found in played(itertools.count(first)):
        assert not found.differences, f"seed {seed}: {found.differences[0]}"
        histories, transactions, skipped = histories + 1, transactions + found.transactions, skipped + found.skipped
        if time.process_time() > end:
            break
    print(f"{histories} histories, {transactions:,} transactions, {skipped:,} not specified")
    assert transactions > 100


@pytest.mark.parametrize(
    "defect",
    [
        "SentAt is read again under the lock",
        *(
            pytest.param(defect, marks=pytest.mark.extended)
            for defect in (
                "a transaction attempt remembers outcomes",
                "only published tasks are marked",
                "deferred tasks are released",
                "a key is sent from its head on",
            )
        ),
        "messages follow the route of their topic",
    ],
)
def test_a_defect_of_the_relay_is_not_allowed(defect: str) -> None:
    with seeded(defect):
        assert any(found.differences for _, found in played(range(20)))


def row(id: str = "a", **values: Any) -> dict[str, Any]:
    default = {"state": "ready", "times_sent": 0, "created": at(0), "version": [1, 1], "is_specified": True}
    return {"id": id, **default, **values}


def at(second: float) -> str:
    return f"2026-01-01T00:00:{second:02.0f}+00:00"


CLAIM = {"step": "claim", "kind": "publish", "topic": "t", "tasks": [["a", None]], "releases": [], "skips_dead": False}
BOTH = CLAIM | {"tasks": [["a", "k"], ["b", "k"]]}
POLL = {"step": "poll", "topic": "t", "key": "k", "queue": [["a", "ready"], ["b", "ready"]]}
COMMIT = {"step": "commit", "at": at(2)}


def lock(*rows: dict[str, Any], ids: str = "") -> dict[str, Any]:
    return {"step": "lock", "now": at(1), "ids": [*ids] or [row["id"] for row in rows], "rows": [*rows]}


def published(*ids: str, answer: str = "published") -> list[dict[str, Any]]:
    return [{"step": "publish", "ids": [*ids]}, {"step": "answer", "results": dict.fromkeys(ids, answer)}]


def mark(**states: str) -> dict[str, Any]:
    return {"step": "mark", "states": states}


def fail(written: str) -> dict[str, Any]:
    return {"step": "fail", "written": written}


def trace(*steps: dict[str, Any], worker: str = "w") -> list[dict[str, Any]]:
    """Name the worker. Each claim begins a batch."""
    batches = itertools.accumulate(int(step["step"] == "claim") for step in steps)
    return [
        {"worker": worker, **({} if step["step"] == "poll" else {"batch": batch}), **step}
        for step, batch in zip(steps, batches, strict=True)
    ]


def sent(worker: str, second: float, *, times_sent: int = 0) -> list[dict[str, Any]]:
    """Return the steps of a batch that sends a task."""
    locked, commit = lock(row(times_sent=times_sent)), COMMIT | {"at": at(second)}
    return trace(CLAIM, locked, *published("a"), mark(a="sent"), commit, worker=worker)


def test_a_commit_without_a_trace_is_a_difference() -> None:
    """A retry explains one more TimesSent, a replay two, and nothing explains three."""
    assert not conform([*sent("x", 6, times_sent=1), *sent("y", 2)]).differences
    assert not conform([*sent("x", 6, times_sent=2), *sent("y", 2)]).differences
    [found] = conform([*sent("x", 6, times_sent=3), *sent("y", 2)]).differences
    assert "x, batch 1: reads a as ('ready', 3) at 2026-01-01T00:00:06+00:00" in found
    assert "by the steps in all files: [('sent', 1)]" in found


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([CLAIM, *published("a")], id="publish without a lock"),
        pytest.param([CLAIM, lock(row()), mark(), COMMIT, *published("a")], id="publish after the commit"),
        pytest.param([CLAIM, lock(row()), mark(), *published("a"), COMMIT], id="publish after the marks"),
        pytest.param([CLAIM, lock(ids="a"), *published("a"), mark(), COMMIT], id="publish of a missing row"),
        pytest.param([CLAIM, lock(row(), row("b")), *published("a", "b"), mark(a="sent"), COMMIT], id="not claimed"),
        pytest.param([CLAIM, lock(row()), *published("a"), COMMIT], id="commit without marks"),
        pytest.param([CLAIM, lock(row()), *published("a"), mark(a="sent", b="sent"), COMMIT], id="mark of another"),
        pytest.param(
            [CLAIM, lock(row(), row("b")), *published("a"), mark(a="sent", b="dead"), COMMIT], id="change of another"
        ),
        pytest.param([CLAIM, lock(row()), fail("no"), lock(row()), mark(a="sent"), COMMIT], id="mark after an abort"),
        pytest.param([CLAIM, lock(row(is_specified=False)), mark(a="sent"), COMMIT], id="mark of an expiring task"),
        pytest.param([CLAIM | {"kind": "mark first"}, lock(row()), mark(a="sent"), COMMIT], id="mark first"),
        pytest.param([POLL, BOTH, lock(row(), row("b")), *published("b", "a")], id="wrong order in a request"),
        pytest.param([POLL, BOTH, lock(row(), row("b")), *published("b"), *published("a")], id="wrong order"),
        pytest.param([POLL, BOTH, lock(row(created=at(1)), row("b")), *published("a", "b")], id="not by CreatedAt"),
        pytest.param(
            [POLL, BOTH, lock(row(), row("b")), *published("a")[:1], *published("b")], id="before the first answer"
        ),
        pytest.param(
            [POLL, BOTH, lock(row(), row("b")), *published("a"), mark(a="sent"), fail("unknown"),
             lock(row(), row("b")), *published("b"), mark(a="sent"), COMMIT],
            id="publish while in doubt",
        ),
        pytest.param(
            [POLL, CLAIM | {"tasks": [["a", "k"]], "releases": [["b", "k"]]}, lock(row()), *published("a"),
             mark(a="sent"), COMMIT],
            id="no lock of the next task",
        ),
    ],
)  # fmt: skip
def test_a_step_that_breaks_a_promise_is_a_difference(steps: list[dict[str, Any]]) -> None:
    assert conform(trace(*steps)).differences


FOLDER = Path(__file__).parent
KEPT = sorted((FOLDER / "histories_kept").glob("*.gz"))


def history(text: str) -> list[dict[str, Any]]:
    """Return the events of a text such as "register a key, commit a due, receive a message time, row a state"."""
    events = []
    for event, task, *more in (each.split() for each in text.split(",")):
        found: dict[str, Any] = {"event": event, "task": task}
        match event, more or [f"m-{task}"]:
            case "register", [key]:
                found["key"] = key
            case "receive", [message, *at]:
                found |= {"message": message, **({"at": float(at[0])} if at else {})}
            case "commit", [due] if more:
                found["due"] = float(due)
            case "row", [state]:
                found["state"] = state
        events.append(found)
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
        ("register a, commit a, delete a, restore a", "lost"),
        ("register a, commit a, receive a m1, commit a", "lost"),
        ("register a, commit a, delete a, row a unsent", "unsent"),
        ("register a, commit a, delete a, row a sent", "sent_without_message"),
        ("register a, commit a 2, receive a m1 1", "early"),
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
        "register a, commit a, receive a m1, commit a, receive a m2, row a sent",
        "register a, commit a, delete a, row a cancelled",
        "register a, commit a 2, ready a, receive a m1 1, row a sent",
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


@pytest.mark.parametrize(
    ("defect", "name"),
    [
        ("a key is sent from its head on", "order_violations"),
        ("due tasks are polled", "lost"),
        ("a transaction attempt remembers outcomes", "duplicated"),
    ],
)
def test_the_checker_notices_defects_of_the_relay(defect: str, name: str) -> None:
    plans = [plan for plan in map(Plan.of, range(60)) if plan.keys and plan.faults and plan.seconds < 60]
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
