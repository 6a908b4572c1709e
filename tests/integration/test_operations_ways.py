"""Retry, cancel and purge, as a function, a command and a page: the same tasks are counted, changed and recorded."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes, operations
from outbox.admin.changes import TaskSelection
from outbox.admin.operations import Author
from outbox.admin.table import TaskTable
from outbox.base.values import shown
from outbox.console.operation_pages import address_of
from outbox.devtools.emulators import Emulators
from outbox.table.states import NEVER, UNSENT
from tests.support.commands import Commands
from tests.support.console import begun, console, finished
from tests.support.operations import (
    CREATED,
    FUTURE,
    MICROSECOND,
    OF_STATES,
    PAST,
    SECOND,
    changed,
    insert,
    row,
    rows_of,
)

DEAD = {"AvailableAt": NEVER, "Attempts": 10, "LastError": "not_found: 404"}
EVERY = {"Sequence": 3, "AtMostOnce": True, "Priority": -1, "DueAt": PAST, "Data": b"\x00\xff no message"}
BILL = DEAD | {"Topic": "it's", "LastError": 'x Not_Found "\\ \N{GRINNING FACE}\n'}
#: Rows around both ends of a time.
EDGES = {"early": -MICROSECOND, "first": 0 * SECOND, "last": SECOND - MICROSECOND, "late": SECOND}
#: The tasks of each state, with some of other topics, keys, times and errors.
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    state: {f"{state} {n}": each for n, each in enumerate(many)} for state, many in OF_STATES.items()
}
ROWS["sent"] |= {f"sent {name}": EVERY | {"SentAt": PAST + 9 * SECOND + each} for name, each in EDGES.items()}
ROWS["sent"] |= {"sent bill": {"SentAt": PAST + 9 * SECOND, "Topic": "it's"}}
ROWS["dead"] |= {f"bill {name}": BILL | {"CreatedAt": PAST + each} for name, each in EDGES.items()}
ROWS["dead"] |= {"bill no error": BILL | {"CreatedAt": PAST, "LastError": None}, "other": DEAD | EVERY}
ROWS["dead"] |= {
    "head": DEAD | {"OrderingKey": "k"},
    "k": DEAD | {"OrderingKey": "k"},
    "head of l": DEAD | {"OrderingKey": "l"},
    "in time": DEAD | {"ExpiresAt": FUTURE},
}
ROWS["expired"] = {"expired": DEAD | {"ExpiresAt": PAST, "LastError": "internal: no"}}
ROWS["retrying"] |= {"again": EVERY | {"AvailableAt": FUTURE, "Attempts": 2}}
ROWS["retrying"]["retrying 1"] = ROWS["retrying"]["retrying 1"] | {"OrderingKey": "own"}
ROWS["scheduled"] |= {"scheduled bill": {"AvailableAt": FUTURE, "Topic": "it's"}}
IDS = ("head", "again", "sent 0", "scheduled 0", "pending 0", "pending 1", "blocked 0", "expired", "missing")
WINDOW = {"topic": "it's", "since": PAST, "until": PAST + SECOND}
IN_WINDOW = ["bill first", "bill last"]

#: Change, selection, the tasks that it changes, and those that it names but does not change, by state.
Case = tuple[str, dict[str, Any], list[str], dict[str, int]]
OF_EACH_STATE: dict[str, Case] = {
    f"cancel {state}": ("cancel", {"state": state}, [*ROWS[state]], {}) for state in UNSENT if state != "dead"
}
CASES: dict[str, Case] = {
    **OF_EACH_STATE,
    "cancel dead": ("cancel", {"state": "dead"}, [*ROWS["dead"], "expired"], {}),
    "cancel in a window": ("cancel", {"state": "dead", "error": "NOT_FOUND", **WINDOW}, IN_WINDOW, {}),
    "cancel IDs": ("cancel", {"ids": IDS}, [id for id in IDS[:-1] if id != "sent 0"], {"sent": 1, "missing": 1}),
    "purge": (
        "purge", {"state": "sent", "topic": "orders", "until": PAST + 10 * SECOND},
        ["sent 0", "sent 1", "sent early", "sent first", "sent last"], {},
    ),
    "retry dead": ("retry", {"state": "dead"}, [*ROWS["dead"]], {"expired": 1}),
    "retry expired": ("retry", {"state": "dead", "include_expired": True}, [*ROWS["dead"], "expired"], {}),
    "retry of a key": ("retry", {"state": "dead", "ordering_key": "k", "id_prefix": "hea"}, ["head"], {}),
    "retry retrying": ("retry", {"state": "retrying"}, [*ROWS["retrying"]], {}),
    "retry in a window": ("retry", {"state": "dead", "error": 'not_found "\\', **WINDOW}, IN_WINDOW, {}),
    "retry sent": (
        "retry", {"state": "sent", "topic": "orders", "since": PAST + 9 * SECOND, "until": PAST + 10 * SECOND},
        ["sent first", "sent last"], {},
    ),
    "retry IDs": ("retry", {"ids": IDS}, [*IDS[:4]], {"pending": 2, "blocked": 1, "expired": 1, "missing": 1}),
    "retry IDs in a state": ("retry", {"ids": IDS[:3], "state": "dead"}, ["head"], {"retrying": 1, "sent": 1}),
}  # fmt: skip
#: As a function only. No command selects by ordering key.
ONE_WAY = {*OF_EACH_STATE, "cancel in a window", "retry of a key", "retry retrying", "retry IDs in a state"}
#: As a function, and in the extended tests as a command and a page.
QUICK_ONE_WAY = {"cancel dead", "retry dead", "retry expired", "retry sent"}
#: Returns the number of the preview, and how many tasks it refuses.
Way = Callable[[Emulators, Database, TaskTable, str, TaskSelection], tuple[int, int]]


def function(
    _: Emulators, _database: Database, table: TaskTable, name: str, selection: TaskSelection
) -> tuple[int, int]:
    at = table.now()
    selection = dataclasses.replace(
        selection, state=selection.state or changes.OF_IDS[name], as_of=at, until=selection.until or at
    )
    preview = changes.preview(table, selection, name)
    assert sum(number for *_, number in preview.groups) == preview.tasks
    assert len(changed(changes.change(table, name, selection, Author(reason="why")))) == preview.tasks
    return preview.tasks, sum(preview.refused.values())


def command(
    emulators: Emulators, database: Database, _: TaskTable, name: str, selection: TaskSelection
) -> tuple[int, int]:
    given = {each: getattr(selection, each) for each in ("state", "topic", "error")}
    times = {each: shown(time) for each in ("since", "until") if (time := getattr(selection, each))}
    words = [name, *(selection.ids or ()), *(f"--{flag}={value}" for flag, value in (given | times).items() if value)]
    words += ["--include-expired"] if name == "retry" and selection.include_expired else []
    outbox = Commands(emulators, database)
    dry, done = outbox.here(*words, "--dry-run"), outbox.here(*words, "--yes", "--reason=why")
    number = re.match(r"(\d+) tasks? would (become due now|be deleted|be cancelled)\n", dry.stdout)
    assert number
    effect = {"retry": "due now", "purge": "deleted", "cancel": "cancelled"}[name]
    assert done.stdout == f"{effect}: {number[0].partition(' would')[0]}\n"
    refused = re.findall(r"(\d+) tasks? would not be changed", dry.stderr)
    return int(number[1]), sum(map(int, refused))


def page(_: Emulators, database: Database, table: TaskTable, name: str, selection: TaskSelection) -> tuple[int, int]:
    query = {each: value for each, value in address_of(selection).items() if value}
    address, jane = f"/tasks/{name}?{urlencode(query, doseq=True)}", console(database)
    text = jane.get(address).text
    number = re.search(rf"{name.title()} (\d+) task", text)
    assert number
    operation = finished(table, begun(jane, address, typed=number[1]))
    assert (operation.principal, operation.selected) == ("jane@example.com", int(number[1]))
    return int(number[1]), sum(map(int, re.findall(r"(\d+) (?:is|are) not changed: ", text)))


@pytest.mark.parametrize(
    ("way", "case"),
    [
        pytest.param(way, case, marks=[pytest.mark.extended] * (way is not function and case in QUICK_ONE_WAY))
        for case in CASES
        for way in (function, command, page)
        if way is function or case not in ONE_WAY
    ],
)
def test_a_change_counts_changes_and_records_the_selected_tasks(  # noqa: PLR0917 - fixtures
    emulators: Emulators, database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch, way: Way, case: str
) -> None:
    """Chunk by chunk. A retry writes nothing else, keeps the age of a retried task, and an ExpiresAt in the future.

    A cancel releases the next task of the key, and nothing else.
    """
    monkeypatch.setattr(changes, "CHUNK", 2)
    monkeypatch.setattr(changes, "PAGE", 4)
    name, given, ids, refused = CASES[case]
    insert(database, [row(id, **each) for of_state in ROWS.values() for id, each in of_state.items()])
    before, begun = rows_of(database), table.now()
    selection = TaskSelection(**{"include_expired": name != "retry"} | given)
    assert way(emulators, database, table, name, selection) == (len(ids), sum(refused.values()))
    after = rows_of(database)
    if name == "retry":
        for id in ids:
            assert begun <= after[id]["AvailableAt"] <= table.now()
            new = {"SentAt": None, "BlockedBy": None, "Attempts": 0, "AvailableAt": after[id]["AvailableAt"]}
            new["ExpiresAt"] = before[id]["ExpiresAt"] if id == "in time" else None
            before[id] |= new | {"DueAt": (before[id]["DueAt"] or CREATED) if id in ROWS["retrying"] else None}
    if name == "cancel" and "head" in ids:
        before[min({*ROWS["blocked"]} - {*ids})] |= {"AvailableAt": None, "BlockedBy": None}
    assert after == {id: each for id, each in before.items() if name == "retry" or id not in ids}
    [operation] = operations.latest(table, 9)
    assert (operation.operation, operation.tasks, operation.reason) == (name, len(ids), "why")
    assert operation.finished_at is not None
