"""What workers do is allowed by the specification, step by step: workers of the simulation, and in `tests/faults`."""

import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from outbox import cli
from outbox.errors import SettingError
from outbox.specification.conformance import Conformance, conform
from publishworker.delivery.marking import SharedMarking
from publishworker.delivery.tools import Tools
from publishworker.delivery.trace import File, Trace
from publishworker.host import Host
from publishworker.turn.in_flight import delivery_of
from tests.simulation.plan import Plan
from tests.simulation.seeded_faults import DEFECTS
from tests.simulation.world import World
from tests.support.fakes import FakePublisher, FakeStore
from tests.support.parts import claim_of, policy
from tests.support.processes import ROOT
from tests.support.relay_bench import Bench


def traced(seed: int) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    World(Plan.of(seed), steps=steps).play(limit=120.0)
    return steps


def played(seeds: Iterator[int]) -> Iterator[tuple[int, Conformance]]:
    """Play histories by seed."""
    for seed in seeds:
        yield seed, conform(traced(seed))


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
    owner, name, make = DEFECTS[defect]
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        assert any(found.differences for _, found in played(iter(range(20))))


def row(id: str = "a", **values: Any) -> dict[str, Any]:
    default = {"state": "ready", "times_sent": 0, "created": at(0), "version": [1, 1], "is_specified": True}
    return {"id": id, **default, **values}


def at(second: float) -> str:
    """Return a time without the zeros at its end, as some languages write it."""
    return f"2026-01-01T00:00:{second:04.1f}Z".replace(".0Z", "Z")


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
    """Number the steps. Each claim begins a batch."""
    batches = itertools.accumulate(int(step["step"] == "claim") for step in steps)
    return [
        {"worker": worker, "n": n, **({} if step["step"] == "poll" else {"batch": batch}), **step}
        for n, (step, batch) in enumerate(zip(steps, batches, strict=True), 1)
    ]


def sent(worker: str, second: float, *, times_sent: int = 0) -> list[dict[str, Any]]:
    """Return the steps of a batch that sends a task."""
    locked, commit = lock(row(times_sent=times_sent)), COMMIT | {"at": at(second)}
    return trace(CLAIM, locked, *published("a"), mark(a="sent"), commit, worker=worker)


def test_a_commit_without_a_trace_is_a_difference() -> None:
    """Only an operator who sends the task again explains the second batch, and nothing explains a third."""
    assert not conform([*sent("x", 6, times_sent=1), *sent("y", 2)]).differences
    [found] = conform([*sent("x", 6, times_sent=2), *sent("y", 2)]).differences
    assert "x, batch 1: reads a as ('ready', 2) at 2026-01-01T00:00:06+00:00" in found
    assert "by the steps in all files: [('sent', 1)]" in found


def test_times_are_compared_as_times() -> None:
    """The text of 2.5 s would come before the text of 2 s."""
    assert not conform([*sent("x", 2.5, times_sent=1), *sent("y", 2)]).differences
    assert conform([*sent("x", 2, times_sent=1), *sent("y", 2.5)]).differences


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


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(
            [CLAIM, lock(row()), fail("no"), lock(row()), *published("a"), mark(a="sent"), COMMIT], id="abort"
        ),
        pytest.param(
            [CLAIM | {"tasks": [["a", None], ["b", None]]}, lock(row(), row("b")), *published("a"), fail("no"),
             lock(row(), row("b")), *published("b"), mark(a="sent", b="sent"), COMMIT],
            id="abort between two requests",
        ),
        pytest.param(
            [CLAIM, lock(row()), *published("a"), mark(a="sent"), COMMIT,
             CLAIM, lock(row(times_sent=1)), *published("a"), mark(a="sent"), COMMIT | {"at": at(3)}],
            id="reset",
        ),
        pytest.param(
            [CLAIM, lock(row()), *published("a"), mark(a="sent"), fail("unknown"),
             lock(row(times_sent=1)), mark(), COMMIT],
            id="reset in doubt",
        ),
        pytest.param(
            [POLL | {"queue": [["a", "dead"], ["b", "ready"]]}, CLAIM | {"tasks": [["b", "k"]], "skips_dead": True},
             lock(row("b")), *published("b"), mark(b="sent"), COMMIT],
            id="a dead head is skipped",
        ),
    ],
)  # fmt: skip
def test_a_step_of_another_relay_that_keeps_the_promises_is_none(steps: list[dict[str, Any]]) -> None:
    """Versions are hashes of the message only, an abort is a failure, and polls return dead tasks."""
    found = conform(trace(*steps))
    assert not found.differences
    assert found.transactions


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([CLAIM, lock(row(state="Dead"))], "step 2 of worker w has a row in state 'Dead'"),
        ([CLAIM, lock(row()), fail("maybe")], "step 3 of worker w has 'maybe' as `written`"),
        ([CLAIM, CLAIM | {"batch": 1}], "batch 1 of worker w begins twice"),
    ],
)
def test_an_unknown_value_is_refused(steps: list[dict[str, Any]], error: str) -> None:
    with pytest.raises(SettingError, match=error):
        conform(trace(*steps))


def test_a_missing_part_of_a_trace_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is printed instead. The parts may come in any order."""
    steps = traced(1)
    worker = steps[0]["worker"]
    parts = [tmp_path / f"{n}.jsonl" for n in range(3)]
    for part, begin, end in zip(parts, (0, 3, 6), (3, 6, None), strict=True):
        part.write_text("".join(json.dumps(step) + "\n" for step in steps[begin:end]), encoding="utf-8")
    assert cli.main(["conform", *map(str, reversed(parts))]) == 0
    for given, reason in (
        (parts[1:], "step 1 of worker {} is missing"), (parts[::2], "step 4 of worker {} is missing"),
    ):  # fmt: skip
        assert cli.main(["conform", *map(str, given)]) == 2
        assert reason.format(worker) in capsys.readouterr().err
    with pytest.raises(SettingError, match=r"step 1 of worker .* is there twice"):
        conform(steps + steps)


def test_the_command_compares_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed worker leaves an incomplete line. The first step that is not allowed is printed with both states."""
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    lines = [json.dumps(step) for step in traced(1)]
    good.write_text("\n".join(lines) + '\n{"step": "lo', encoding="utf-8")
    bad.write_text("\n".join(lines).replace('"sent"', '"dead"') + "\n", encoding="utf-8")
    assert cli.main(["conform", str(good)]) == 0
    assert "1 worker, 4 transactions compared, 0 not specified, 0 differences" in capsys.readouterr().out
    assert cli.main(["conform", str(bad)]) == 1
    printed = capsys.readouterr().out
    assert "before: [" in printed
    assert "after: [" in printed


def test_a_worker_that_starts_again_cuts_an_incomplete_line(tmp_path: Path) -> None:
    """Otherwise its first step would follow on the same line. A file that is given twice is compared once."""
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(step) + "\n" for step in traced(1)) + '{"step": "lo', encoding="utf-8")
    Trace(File(str(file)).write, "again").step("route", routes={})
    assert cli.main(["conform", str(file), str(file)]) == 0


@pytest.mark.parametrize(
    "text",
    ["", "[" * 100_000 + "\n", '{"worker": "w", "step": "walk"}\n', "no JSON\n", '{"step": "lock"}\n', "7\n",
     '{"worker": "w", "step": "lock"}\n', '{"worker": "w", "step": "lock", "n": 1}\n'],
)  # fmt: skip
def test_the_command_refuses_other_files(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(text, encoding="utf-8")
    assert cli.main(["conform", str(file)]) == 2
    assert "outbox: " in capsys.readouterr().err
    assert cli.main(["conform", str(tmp_path / "gone")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_a_trace_has_no_message_and_no_ordering_key(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    bench = Bench(trace=Trace(File(str(file)).write, "w"))
    bench.line("a", key="personal")
    bench.turns()
    text = file.read_text(encoding="utf-8")
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert steps == ["poll", "claim", "lock", "publish", "answer", "mark", "commit"]
    assert "personal" not in text
    assert "data" not in text


def test_the_page_names_every_member_of_a_step() -> None:
    """Another relay writes its trace by the page."""
    page = (ROOT / "docs/architecture/specification.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`", page[page.index("To check a relay in another language") :])
    assert {name for seed in range(3) for step in traced(seed) for name in step} <= {*named}


@pytest.mark.parametrize("path", ["/", ""])
def test_a_trace_needs_a_file(path: str) -> None:
    with pytest.raises(SettingError, match=f"--trace: '{path}' cannot be written: Is a directory"):
        File(path)


def test_a_batch_without_a_trace_uses_the_store_itself() -> None:
    tools = Tools(
        store=FakeStore(), publisher=FakePublisher(), policy=policy(), publish_seconds=5, marking=SharedMarking(Host())
    )
    assert delivery_of(claim_of("orders", "a"), tools)._tools is tools


def test_a_full_disk_ends_the_trace_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    file = File("/dev/full")
    for _ in range(3):
        file.write({"step": "poll"})
    assert len(caplog.records) == 1
