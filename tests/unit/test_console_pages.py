"""Addresses and commands that select tasks, selections in words, templates, and files of the console."""

import base64
import hashlib
import re
import shlex
import threading
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import pytest
from starlette.datastructures import QueryParams

import outbox_admin as admin
from outbox.base.values import shown
from outbox.table.states import CANCELLED, NEVER, STATES
from outbox_admin import cli
from outbox_admin.change_kinds import KINDS
from outbox_admin.changes.running import Running
from outbox_admin.operations import INTERRUPTED_AFTER, Operation
from outbox_admin.tasks.lookup import Task
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.tasks.task_filters import address_of, command_of, selection_of
from outbox_admin.tasks.task_pages import _time_line
from outbox_admin.web.roles import Refused
from outbox_admin.web.visits import CONTENTS, ENVIRONMENT, FILES, Visit, described
from publishworker.pubsub.failures import REASONS, FailureKind
from tests.support.console import bare_console

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
FILTER = {"topic": "it's & <b>", "since": NOW - timedelta(days=1), "until": NOW, "error": "a=b&c"}
PARSER = cli._parser()
VISIT = Visit(console=bare_console(), person="jane", roles=frozenset(), path="/tasks")


def read(query: dict[str, Any]) -> TaskSelection:
    return selection_of(QueryParams(urlencode(query, doseq=True)), NOW)


def test_a_time_line_has_the_attempts_of_a_task_as_far_as_its_row_knows_them() -> None:
    """A worker records the number of failures, and when the next attempt is due."""
    minutes = [NOW + timedelta(minutes=n) for n in range(4)]
    names = ("CreatedAt", "AvailableAt", "DueAt", "ExpiresAt", "SentAt", "CancelledBy", "BlockedBy")
    for as_of, more, expected in (
        (minutes[0], {"Attempts": 0}, ["registered", "due"]),
        (minutes[2], {"Attempts": 3}, ["registered", "3 attempts failed", "attempt 4 is due"]),  # a worker has it
        (minutes[0], {"Attempts": 1, "DueAt": NOW}, ["registered", "1 attempt failed", "attempt 2 is due"]),
        (minutes[3], {"Attempts": 8, "AvailableAt": NEVER}, ["registered", "8 attempts failed"]),
        (minutes[0], {"Attempts": 1, "DueAt": minutes[3], "BlockedBy": "head"},
         ["registered", "1 attempt failed", "the head of its key is checked again", "first due"]),
        (minutes[3], {"Attempts": 0, "SentAt": minutes[2]}, ["registered", "sent"]),
        (minutes[3], {"Attempts": 2, "SentAt": minutes[2], "CancelledBy": "application"},
         ["registered", "2 attempts failed", "cancelled by an application"]),
    ):  # fmt: skip
        columns = dict.fromkeys(names) | {"Id": "a", "CreatedAt": NOW, "AvailableAt": minutes[1]} | more
        line = [text.partition(", at times")[0] for _, text, _ in _time_line(Task("any", columns, as_of), ())]
        assert line == expected


@pytest.mark.parametrize("ids", [None, ("a", "b/../c", "\x00<script>")])
@pytest.mark.parametrize("more", [{}, FILTER, {"ordering_key": "k\n", "id_prefix": "%"}, {"include_expired": True}])
@pytest.mark.parametrize("state", [None, *STATES])
def test_an_address_is_read_as_the_same_selection(
    state: str | None, more: dict[str, Any], ids: tuple[str, ...] | None
) -> None:
    selection = TaskSelection(**{"state": state, "ids": ids, "include_expired": False, **more})
    query = {name: value for name, value in address_of(selection).items() if value not in (None, [])}
    assert read(query) == selection


def test_relative_times_count_from_now_and_empty_fields_do_not_narrow() -> None:
    assert read({"since": " 2h ", "until": "", "topic": "", "id": ["a", "a"]}) == TaskSelection(
        since=NOW - timedelta(hours=2), ids=("a",), include_expired=False
    )
    too_long = ({"topic": "x" * 401}, {"id": "x" * 65}, {"ordering_key": "x" * 1_025})
    for wrong in ({"since": "soon"}, *too_long, {"state": "gone"}):
        with pytest.raises(Refused) as refused:
            read(wrong)
        assert refused.value.field == next(iter(wrong))


@pytest.mark.parametrize("text", ["2026-11-26 11:30", "2026-11-26T11:30:00", " 2026-11-26 11:30 UTC ", "30m"])
def test_a_time_without_an_offset_is_in_utc_as_all_times_of_a_page(text: str) -> None:
    assert read({"since": text}).since == NOW - timedelta(minutes=30)


def test_an_operation_whose_thread_cannot_start_can_be_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a limit of processes. Otherwise it would be running until the console ends."""
    executed = threading.Event()
    monkeypatch.setattr(admin.execution, "resume", lambda _table, _id: executed.set() or ())
    running = Running(mock.Mock())
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        running.start("an-id")
    assert (running.ids, "can't start new thread" in running.errors["an-id"]) == (set(), True)
    running.start("an-id")
    assert executed.wait(10)


def test_a_window_that_the_commands_refuse_is_refused() -> None:
    of_one_end = ({"since": time} for time in ("2026-11-26T14:00:00+02:00", "2026-12-01T00:00:00Z"))
    for query in ({"since": "2h", "until": "3h"}, {"since": "2h", "until": "2h"}, *of_one_end):
        with pytest.raises(Refused) as refused:
            read(query)
        assert "is not before the end" in refused.value.advice


@pytest.mark.parametrize(
    ("name", "selection"),
    [
        ("retry", TaskSelection(state="dead", **FILTER)),
        ("retry", TaskSelection(ids=("-x", "b"), include_expired=False)),
        ("cancel", TaskSelection(state="unsent", ids=("a",))),
        ("cancel", TaskSelection(state="blocked", topic="-orders")),
        ("purge", TaskSelection(state="sent", **FILTER)),
        ("restore", TaskSelection(state=CANCELLED, **FILTER)),
        ("resend", TaskSelection(state="sent", topic="orders", ordering_key="k", since=NOW)),
        ("list", TaskSelection(state="sent", **FILTER)),
    ],
)
def test_a_shown_command_is_one_that_the_parser_accepts(name: str, selection: TaskSelection) -> None:
    """And it has the whole selection."""
    found = command_of(VISIT, name, selection)
    assert found
    options = PARSER.parse_args(shlex.split(found)[1:])
    assert options.topic == selection.topic
    assert tuple(getattr(options, "ids", ())) == (selection.ids or ())
    assert getattr(options, "error", None) == selection.error
    assert getattr(options, "include_expired", False) == (name == "retry" and selection.include_expired)
    assert {*vars(options).get("states", []), vars(options).get("state")} - {None} == (
        {selection.state} & {*STATES, CANCELLED} if name != "resend" else set()
    )


ONE_FILTER: dict[str, Any] = {
    "topic": "t", "since": NOW, "until": NOW, "error": "e", "ordering_key": "k", "id_prefix": "p", "ids": ("i",),
    "cancelled_by": "o",
}  # fmt: skip


@pytest.mark.parametrize("field", ONE_FILTER)
@pytest.mark.parametrize(
    ("name", "states"), [("list", (*STATES, CANCELLED)), *((name, kind.states) for name, kind in KINDS.items())]
)
def test_a_filter_that_a_command_does_not_have_leads_to_no_command(
    name: str, states: tuple[str, ...], field: str
) -> None:
    for state in states:
        value = ONE_FILTER[field]
        if found := command_of(VISIT, name, TaskSelection(state=state, **{field: value})):
            words = re.split("[= ]", found)
            assert (shown(value) if isinstance(value, datetime) else value[0]) in words
            PARSER.parse_args(shlex.split(found)[1:])


def operation(selection: str, name: str = "retry", **times: datetime | None) -> Operation:
    all_times = {"finished_at": None, "seen_at": NOW, "stopped_at": None} | times
    row = {"tasks": 1, "reason": None, "selected": None, "principal": "jane", "started_at": NOW}
    return Operation(id="1", operation=name, selection=selection, **row, **all_times)  # type: ignore[arg-type]  # mixed


def test_a_recorded_selection_is_shown_in_words() -> None:
    """Any program may write the column."""
    words = {
        ("retry", '{"state": "dead", "include_expired": true}'): "state dead, include expired true",
        ("cancel", '{"state": "dead", "include_expired": true}'): "state dead",
        ("retry", '{"ids": ["a", "b", "c", "d", "e", "f"], "more_ids": 3}'): "ids a, b, c, d, e, ..., more ids 3",
        ("controls", '{"topics": {"x": {"burst": [5, null]}}}'): 'topics {"x": {"burst": [5, null]}}',
        ("pause", "no JSON"): "no JSON",
        ("pause", "[1]"): "[1]",
        ("pause", '{"ids": 3}'): "ids 3",
    }
    assert {(name, selection): described(operation(selection, name)) for name, selection in words} == words


def test_the_state_of_an_operation_follows_from_its_times() -> None:
    later = NOW + INTERRUPTED_AFTER
    assert operation("").state(later - timedelta(seconds=1)) == "running"
    assert operation("").state(later) == "interrupted"
    assert operation("").state(later, is_here=True) == "running"
    assert operation("", stopped_at=NOW).state(later) == "stopped"
    assert operation("", stopped_at=NOW, finished_at=NOW).state(later) == "finished"
    assert operation("", seen_at=None).state(later) == "unfinished"


STATIC = resources.files("outbox_admin.web") / "static"
TEMPLATES = [*Path(str(resources.files("outbox_admin"))).rglob("*.html")]
PARTS: Any = ENVIRONMENT.get_template("web/parts.html").module
RUNBOOK = Path(__file__).parents[2] / "docs/operations/runbook.md"
#: Of dist/idiomorph.min.js in the npm package idiomorph 0.8.0 (0BSD). A new version is a new hash here.
IDIOMORPH = "TL1TXK92Y6Ue2pvOZZU3HDhPxDDVS41BTimmEWfxn5Y="


def test_idiomorph_is_the_published_file() -> None:
    content = (STATIC / "idiomorph.min.js").read_bytes()
    assert base64.b64encode(hashlib.sha256(content).digest()).decode() == IDIOMORPH


def test_pages_load_nothing_from_elsewhere_and_have_no_inline_code() -> None:
    """The content security policy would block it, silently for a person without the browser's console."""
    assert CONTENTS.keys() == {*FILES.values()}
    assert len(TEMPLATES) > 15
    for template in TEMPLATES:
        text = template.read_text(encoding="utf-8")
        assert not re.search(r"<(script|link|img)[^>]*(https?:)?//", text)
        assert not re.search(r"\son\w+=|\sstyle=|javascript:|<style|\|safe", text)
        assert set(re.findall(r"FILES\[.([^\]]+).\]", text)) <= FILES.keys()
        assert "/static/" not in text


def test_pages_explain_every_state() -> None:
    assert (*PARTS.SENTENCES, CANCELLED) == STATES


def test_every_reason_leads_to_a_section_that_exists() -> None:
    headings = re.findall(r"^#+ (.+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    sections = {reason.name: PARTS.runbook(f"{reason.name}: 404").partition("#")[2] for reason in REASONS}
    assert set(sections.values()) - {""} <= anchors
    assert {name for name, section in sections.items() if not section} == {
        reason.name for reason in REASONS if reason.kind is FailureKind.UNKNOWN
    }


def test_other_errors_lead_to_the_whole_runbook() -> None:
    for error in ("", ": x", "by hand: x"):
        assert PARTS.runbook(error).strip() == "operations/runbook.md"


def test_pages_say_what_to_do_also_if_the_address_of_the_documentation_is_unknown() -> None:
    assert 'href="https://x/operations/runbook.md#a-topic-was-deleted"' in PARTS.advice("not_found: 404", "https://x")
    assert PARTS.advice("not_found: 404", "").strip().startswith("Pause the topic. Create it")
    assert PARTS.advice("by hand: x", "").strip() == "The error says why. Fix the cause, and then retry the task."
