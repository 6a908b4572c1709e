"""Each filter of tasks on each command and page. A place that forgets a filter fails by the names of both."""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import pytest
from google.cloud.spanner_v1.database import Database
from starlette.testclient import TestClient

from outbox.base.values import shown
from outbox.program.settings import flag_of
from outbox.rows.task_table import TaskTable
from outbox_admin.change_kinds import KINDS
from outbox_admin.tasks.selections import ENDED, FILTERS, TaskSelection
from outbox_admin.topics import editing
from tests.support.commands import Commands
from tests.support.console import begun, console, finished
from tests.support.operations import DAY, OF_STATES, PAST, insert, row, rows_of


@dataclass(frozen=True)
class Example:
    """A value of a filter, and columns of tasks that it selects and leaves out."""

    value: Any
    selects: Mapping[str, Any]
    leaves: Mapping[str, Any]


_EARLIER, _LATER = ({"CreatedAt": time, "SentAt": time} for time in (PAST - DAY, PAST))
EXAMPLES = {
    "topic": Example("bills", {"Topic": "bills"}, {}),
    "since": Example(PAST, _LATER, _EARLIER),
    "until": Example(PAST, _EARLIER, _LATER),
    "error": Example("Not_Found", {"LastError": "not_found: no"}, {"LastError": "unavailable: no"}),
    "ordering_key": Example("k", {"OrderingKey": "k"}, {"OrderingKey": "l"}),
    "id_prefix": Example("sel", {}, {}),
    "cancelled_by": Example("one", {"CancelledBy": "one"}, {"CancelledBy": "two"}),
}
SELECTED, LEFT = "selected-{}", "left-{}"


def inserted(database: Database, name: str, state: str) -> None:
    """Insert two tasks of a state. The filter selects one of them."""
    kinds = {SELECTED: EXAMPLES[name].selects, LEFT: EXAMPLES[name].leaves}
    for id, columns in kinds.items():
        given = {column: value for column, value in columns.items() if column != "SentAt" or state in ENDED}
        insert(database, [row(id.format(state), **OF_STATES[state][0] | given)])


def text_of(name: str) -> str:
    value = EXAMPLES[name].value
    return shown(value) if isinstance(value, datetime) else str(value)


def test_each_filter_has_an_example() -> None:
    assert EXAMPLES.keys() == FILTERS.keys()


@pytest.mark.parametrize("name", FILTERS)
def test_lists_are_narrowed_by_each_filter(database: Database, outbox: Commands, jane: TestClient, name: str) -> None:
    """Of each state, by the command and on the page, which also has the field of the filter and the command."""
    found, has_flag, flag = {}, "list" in FILTERS[name].commands, f"{flag_of(name)}={text_of(name)}"
    for state in FILTERS[name].states:
        inserted(database, name, state)
        page = html.unescape(jane.get(f"/tasks?{urlencode({'state': state, name: text_of(name)})}").text)
        found["the page", state] = re.findall(r'name="exact" value="id=([^"]+)"', page)
        assert f'name="{name}" value="{text_of(name)}"' in page
        assert (flag in page, "not have all of these" in page) == (has_flag, not has_flag)
        if has_flag:
            tasks = outbox.objects("list", "--json", f"--state={state}", flag)
            found["the command", state] = [task["id"] for task in tasks]
    assert found == {(place, state): [SELECTED.format(state)] for place, state in found}


@pytest.mark.parametrize(
    ("name", "change", "state"),
    [
        (name, change, next(state for state in kind.states if state in FILTERS[name].states))
        for name in FILTERS
        for change, kind in KINDS.items()
        if {*kind.states} & {*FILTERS[name].states}
    ],
)
def test_changes_are_narrowed_by_each_filter(  # noqa: PLR0917 - cases
    database: Database, table: TaskTable, outbox: Commands, name: str, change: str, state: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In the preview of the command and of the page, in the printed command, in the record, and in each chunk."""
    monkeypatch.setattr("outbox_admin.changes.resending.opened", lambda *_: lambda _messages: {})
    monkeypatch.setattr(editing, "check_destinations", lambda *_, **_more: "")
    inserted(database, name, state)
    before, of_topic = rows_of(database), {} if name == "topic" else {"topic": "orders"}
    query = {"state": state} | (of_topic if change == "resend" else {}) | {name: text_of(name)}
    if change in FILTERS[name].commands:
        words = [f"{flag_of(each)}={text}" for each, text in query.items() if each != "state" or change != "resend"]
        more = {"resend": ["--to=other"], "purge": ["--until=0s"]}.get(change, [])
        [preview] = outbox.objects(change, *more, *words, "--dry-run", "--json")  # the last --until counts
        assert preview["tasks"] == 1
    jane, address = console(database), f"/tasks/{change}?{urlencode(query)}"
    page = html.unescape(jane.get(address).text)
    assert f"{change.title()} 1 task" in page
    has_command = change in FILTERS[name].commands or (name, change) == ("cancelled_by", "restore")
    assert (f"outbox {change} " in page) == has_command
    if change in FILTERS[name].commands:
        assert f"{flag_of(name)}={text_of(name)}" in page
    operation = finished(table, begun(jane, address, typed="1", to="other"))
    assert (operation.operation, operation.tasks, operation.unchanged) == (change, 1, {})
    assert getattr(TaskSelection.recorded(operation.selection), name) == EXAMPLES[name].value
    after = rows_of(database)
    assert after[LEFT.format(state)] == before[LEFT.format(state)]
    assert (after.get(SELECTED.format(state)) == before[SELECTED.format(state)]) == (change == "resend")
