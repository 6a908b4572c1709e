"""Topic controls by command and page, and in files: rows, records, output and refusals."""

import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock
from urllib.parse import urlencode

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, JsonObject, KeySet
from google.cloud.spanner_v1.database import Database
from starlette.testclient import TestClient

import outbox
from outbox.devtools.emulators import Emulators
from outbox.rows.task_table import TaskTable
from outbox.table.controls import CONTROLS_COLUMNS, CONTROLS_TABLE
from outbox.table.controls import TopicControls as Controls
from outbox_admin import operations
from outbox_admin.web.visits import Shared
from tests.support.commands import Commands
from tests.support.console import SAME, console, form_of, text
from tests.support.processes import Finished
from tests.support.pubsub import PubSub
from tests.support.spanner import PROJECT

FULL, V2 = (f"projects/{PROJECT}/topics/{name}" for name in ("orders", "orders-v2"))
Command: TypeAlias = Callable[[str], Finished]
#: The texts of a form or of flags, by name. None removes the value.
Change: TypeAlias = Mapping[str, str | None]


@pytest.fixture
def command(outbox: Commands) -> Command:
    return lambda words: outbox.here(*words.split())


def rows(database: Database) -> dict[str, Controls]:
    return TaskTable(database).controls()


def have(database: Database, *names: str) -> None:
    with database.batch() as batch:
        for name in names:
            outbox.register(batch, name, b"")


def write(database: Database, before: Mapping[str, Controls]) -> None:
    """Replace all rows."""
    with database.batch() as batch:
        batch.delete(CONTROLS_TABLE, KeySet(all_=True))
        for topic, row in before.items():
            batch.insert(CONTROLS_TABLE, CONTROLS_COLUMNS, [(topic, *dataclasses.astuple(row))])


def recorded(database: Database) -> tuple[str, Any]:
    latest, *_ = operations.latest(TaskTable(database), 20)  # IDs tell seconds apart, but not parts of one
    assert latest.finished_at is not None
    return latest.operation, json.loads(latest.selection)


def by_command(command: Commands, _caller: TestClient, topic: str, change: Change) -> str:
    words = [name if value is None else f"--{name}={value}" for name, value in change.items()]
    verb = "unset" if None in change.values() else "set"
    dry, done = (command.here("topics", verb, topic, *words, "--reason=why", *more) for more in (["--dry-run"], []))
    assert dry.code == done.code
    assert done.code in {0, 1, 2}
    return done.stderr if done.code else ""


def by_page(_command: Commands, caller: TestClient, topic: str, change: Change) -> str:
    form = urlencode([("unset", name) if value is None else (name, value) for name, value in change.items()])
    asked = caller.post(f"/topic/ask?name={topic}", headers=SAME, content=form)
    if asked.status_code != 303:
        assert 400 <= asked.status_code < 500
        return text(asked.text)
    place = asked.headers["location"]
    preview = text(caller.get(place).text)
    assert "Nothing has been changed yet." in preview
    shown = [name if value is None else f"--{name}={value}" for name, value in change.items()]
    assert [word for word in shown if word not in preview] == [], "in the equivalent command"
    if change.get("route"):
        assert caller.post(place, headers=SAME, content="").status_code == 400  # without a reason
    written = caller.post(place, headers=SAME, content="reason=why")
    assert written.status_code == 303, text(written.text)
    return ""


LIMITED = Controls(rate_per_second=10.0, burst=20)
#: The rows before a change of orders, the change, and the row of orders afterwards, or why the change is refused.
CASES: dict[str, tuple[dict[str, Controls], Change, Controls | str]] = {
    "a first control": ({}, {"max-in-flight": "5"}, Controls(max_in_flight=5)),
    "to the last digit": ({}, {"rate": "1234567.5", "burst": "1000"}, Controls(False, 1234567.5, 1000)),
    "other values stay": ({"orders": Controls(True, 10.0, 20, 5)}, {"rate": "7"}, Controls(True, 7.0, 20, 5)),
    "durations": (
        {"orders": LIMITED}, {"backoff-initial": "0.5", "backoff-max": "60s", "dead-after": "0"},
        Controls(False, 10.0, 20, None, None, None, 0.5, 60.0, 0.0),
    ),
    "removed values": (
        {"orders": Controls(True, 10.0, 20, 5, "third-topic", 3)}, {"rate": None, "burst": None, "route": None},
        Controls(True, None, None, 5, None, 3),
    ),
    "an invalid row of SQL": ({"orders": Controls(burst=4)}, {"max-attempts": "3"}, Controls(burst=4, max_attempts=3)),
    "a route of others": ({"legacy": Controls(publish_to="third")}, {"max-attempts": "3"}, Controls(max_attempts=3)),
    "a rate alone": ({}, {"rate": "5"}, "topic orders: --rate and --burst go together. Set both or neither."),
    "a burst removed": ({"orders": LIMITED}, {"burst": None}, "--rate and --burst go together."),
    "a contradiction": (
        {"orders": Controls(backoff_initial_seconds=0.5)}, {"backoff-max": "0.1"},
        "--backoff-initial is 0.5. It must not exceed --backoff-max, which is 0.1.",
    ),
    "no number": ({}, {"rate": "fast"}, "'fast' is not allowed. It must be a finite number of tasks a second"),
    "too few": ({}, {"max-attempts": "0"}, "'0' is not allowed. It must be a whole number from 1 to 1,000,000"),
    "too long": ({}, {"backoff-max": "8d"}, "'8d' is not allowed. It must be seconds, or a duration"),
    "no topic name": ({}, {"route": "x"}, "'x' is not allowed. It must be a topic ID or projects/"),
    "a missing destination": ({}, {"route": "missing-topic"}, "topics/missing-topic does not exist. Create it: `"),
    "a loop": ({}, {"route": "orders"}, "orders would be routed to itself"),
    "a loop by the full name": ({}, {"route": FULL}, "orders would be routed to itself"),
    "a chain": ({"orders-v2": Controls(publish_to="third-topic")}, {"route": "orders-v2"}, "which is routed to"),
    "a cycle": ({"orders-v2": Controls(publish_to="orders")}, {"route": V2}, "which is routed to"),
    "a chain at its end": ({"legacy": Controls(publish_to="orders")}, {"route": V2}, f"which is routed to {V2}"),
    "no row": ({}, {"max-attempts": None}, "cannot change orders: no row in AsynchronousTaskTopics."),
}  # fmt: skip


#: By page in `make test`.
QUICK = {"other values stay", "durations", "removed values", "a rate alone", "no number", "a cycle"}


@pytest.mark.parametrize(
    ("adapter", "names"),
    [
        (by_page, QUICK),
        *(
            pytest.param(adapter, names, marks=pytest.mark.extended)
            for adapter, names in ((by_command, CASES), (by_page, CASES.keys() - QUICK))
        ),
    ],
)
def test_a_change_writes_the_row_and_its_record_or_nothing(  # noqa: PLR0917 - pytest names them
    emulators: Emulators, database: Database, pubsub: PubSub, monkeypatch: pytest.MonkeyPatch,
    adapter: Callable[[Commands, TestClient, str, Change], str], names: Iterable[str],
) -> None:  # fmt: skip
    """The topics `orders` and `orders-v2` of the cases have other names here, because they exist in Pub/Sub."""
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", emulators.pubsub_host)
    monkeypatch.setattr(Shared, "forget", mock.Mock())
    ids = {name: pubsub.new_topic().rpartition("/")[2] for name in ("orders", "orders-v2")}
    topic, ways = ids["orders"], (Commands(emulators, database), console(database))

    def real(value: Any) -> Any:
        """Replace the names in a text, or in the route of a row."""
        if isinstance(value, Controls):
            return dataclasses.replace(value, publish_to=real(value.publish_to))
        return re.sub("orders-v2|orders", lambda found: ids[found[0]], value) if isinstance(value, str) else value

    have(database, topic)
    for name, (before, change, expected) in CASES.items():
        if name not in names:
            continue
        write(database, {real(each): real(row) for each, row in before.items()})
        had, count = rows(database), len(operations.latest(TaskTable(database), 100))
        refusal = adapter(*ways, topic, {flag: real(value) for flag, value in change.items()})
        if isinstance(expected, str):
            # A page names the fields of its form.
            sentence = expected if adapter is by_command else expected.replace("--", "")
            assert real(sentence) in refusal, name
            assert "--force" not in refusal or adapter is by_command, name
            assert (rows(database), len(operations.latest(TaskTable(database), 100))) == (had, count), name
            continue
        assert (refusal, rows(database)) == ("", had | {topic: real(expected)}), name
        before_it, after = had.get(topic), dataclasses.asdict(real(expected))
        differing = {
            field: [getattr(before_it, field, None), value]
            for field, value in after.items()
            if getattr(before_it, field, None) != value
        }
        assert recorded(database) == ("controls", {"topics": {topic: differing}}), name


def test_a_probe_is_asked_for_by_command_and_page(database: Database, command: Command, tmp_path: Path) -> None:
    """The page offers it while a circuit is open. A file does not have it, and leaves it."""
    have(database, "orders")
    assert command("topics probe orders --dry-run").stdout == "orders: no row -> probe requested\n"
    assert rows(database) == {}
    assert json.loads(command("topics probe orders --json").stdout) == {
        "dry_run": False,
        "topics": {"orders": {"paused": [None, False]}},
    }
    first = rows(database)["orders"].probe_requested_at
    caller = console(database)
    assert "Probe now" not in caller.get("/topic?name=orders").text
    info = {"version": "1", "circuits": [{"topic": "orders", "reason": "not_found", "error": "404"}]}
    with database.batch() as batch:
        columns = ("WorkerId", "SeenAt", "StartedAt", "Info")
        batch.insert("AsynchronousTaskWorkers", columns, [("w", COMMIT_TIMESTAMP, first, JsonObject(info))])
    page = console(database).get("/topic?name=orders").text
    assert caller.post(form_of(page, "/topic/probe"), headers=SAME, content="reason=why").status_code == 303
    second = rows(database)["orders"].probe_requested_at
    assert first
    assert second
    assert first < second
    assert recorded(database) == ("probe", {"topics": {"orders": {}}})
    assert json.loads(command("topics export").stdout) == {"topics": {"orders": {}}}
    file = tmp_path / "topics.json"
    file.write_text('{"topics": {"orders": {"max_in_flight": 5}}}')
    assert command(f"topics apply {file}").code == 0
    assert rows(database) == {"orders": Controls(max_in_flight=5, probe_requested_at=second)}


@pytest.mark.parametrize("words", ["pause {}", "topics set {} --max-in-flight 1"])
def test_a_topic_is_known_by_a_row_or_a_task(database: Database, command: Command, words: str) -> None:
    """Either is enough, as for `outbox topics`; a task sent earlier is not. `--yes` accepts any name."""
    write(database, {"has-row": Controls()})
    have(database, "has-task")
    sent = {"sent-now": COMMIT_TIMESTAMP, "sent-before": datetime.now(UTC) - timedelta(minutes=2)}
    with database.batch() as batch:
        ids = [outbox.register(batch, topic, b"") for topic in sent]
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), list(zip(ids, sent.values(), strict=True)))
    for topic in ("has-row", "has-task", "sent-now"):
        assert command(words.format(topic)).code == 0
    assert command(words.format("sent-before")).code == 2
    assert command(words.format("sent-before") + " --yes").code == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_an_unknown_topic_is_a_question_at_a_terminal(
    database: Database, command: Command, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    have(database, "orders")
    for words in ("pause {}", "topics set {} --max-in-flight 1"):
        typed = io.StringIO(answer)
        monkeypatch.setattr(typed, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", typed)
        done = command(words.format("ordres"))
        assert done.code == code
        assert "Did you mean 'orders'? Known topics: orders. " in done.stderr
        assert "'ordres' anyway? [y/N] " in done.stderr
        assert [*rows(database)] == ([] if code else ["ordres"])
        write(database, {})


def test_a_destination_that_pubsub_says_nothing_about_is_written(
    emulators: Emulators, database: Database, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a note. `--force` does not ask."""
    have(database, "orders")
    assert command("topics set orders --route missing-topic --force").code == 0
    monkeypatch.setattr("outbox.program.channels.TOPIC_SECONDS", 0.3)
    without = Commands(emulators, database, more={"PUBSUB_EMULATOR_HOST": "localhost:1"})
    done = without.here("topics", "set", "orders", "--route", "third-topic")
    assert done.code == 0
    assert f"Pub/Sub does not say whether projects/{PROJECT}/topics/third-topic exists: " in done.stderr
    assert rows(database) == {"orders": Controls(publish_to="third-topic")}


EXPORTED = {
    "orders": {
        "paused": True, "rate_per_second": 10.0, "burst": 20, "max_in_flight": 5, "publish_to": "orders-v2",
        "max_attempts": 3, "backoff_initial_seconds": 1.0, "backoff_max_seconds": 60.0, "dead_after_seconds": 0.0,
    },
    "invoices": {},
}  # fmt: skip


def test_an_export_can_be_applied(database: Database, command: Command, tmp_path: Path) -> None:
    """Other values of its topics are unset. A pause, and other topics, stay. One record has the difference."""
    file = tmp_path / "topics.json"
    file.write_text(json.dumps({"topics": EXPORTED}))
    wanted = {"orders": Controls(True, 10.0, 20, 5, "orders-v2", 3, 1.0, 60.0, 0.0), "invoices": Controls()}
    dry = command(f"topics apply {file} --force --dry-run")
    assert dry.stdout.endswith("\n2 topics would be changed, 0 unchanged\n")
    assert dry.stderr.startswith("outbox: unknown topic 'orders', 'invoices' (no row")
    assert "no row -> paused; at most 10 tasks a second, 20 at once, 5 in flight; published to orders" in dry.stdout
    assert rows(database) == {}
    assert command(f"topics apply {file} --force").code == 2  # no topic is known
    assert command(f"topics apply {file} --force --yes").code == 0
    assert rows(database) == wanted
    assert recorded(database)[0] == "controls"
    exported = command("topics export").stdout
    assert json.loads(exported) == {"topics": EXPORTED}
    file.write_text(exported)
    assert command(f"topics apply {file} --force").stdout == "0 topics changed, 2 unchanged\n"
    file.write_text('{"topics": {"orders": {"burst": 2e+01, "rate_per_second": 7}}}')
    assert command(f"topics apply {file}").code == 0
    assert rows(database) == {**wanted, "orders": Controls(True, 7.0, 20)}
    operation, difference = recorded(database)
    assert (operation, difference["topics"]["orders"]["max_attempts"]) == ("controls", [3, None])
    assert difference["topics"]["orders"].keys().isdisjoint(("burst", "paused"))
    file.write_text('{"topics": {"orders": {"paused": false}}}')
    assert command(f"topics apply {file}").code == 0
    assert rows(database) == {**wanted, "orders": Controls()}


#: The text of a file that is wrong, and why.
WRONG = {
    "{": "cannot be read as JSON",
    "[" * 100_000: "cannot be read as JSON",
    '{"topics": {"mails": {"paused": true}, "mails": {}}}': "topics.mails is there twice. Nothing was changed",
    '{"topics": {"orders": {"burst": 5, "burst": 6}}}': "topics.orders.burst is there twice",
    "[]": 'the file must be {"topics": {...}}',
    '{"topics": {}, "more": 1}': 'the file must be {"topics": {...}}',
    '{"topics": {"orders": []}}': "topics.orders must be an object",
    '{"topics": {"": {}}}': "topics. is no topic",
    f'{{"topics": {{"orders": {{"paused": true}}, "projects/{PROJECT}/topics/orders": {{}}}}}}': "orders and projects/"
    f"{PROJECT}/topics/orders are the same Pub/Sub topic, but have different controls. Nothing was changed",
}
#: A field of a topic that is wrong, and why.
WRONG_FIELDS = {
    '"max_atempts": 3': "max_atempts is unknown. Did you mean 'max_attempts'?",
    '"paused": 1': "paused is 1. It must be true or false",
    '"paused": null': "paused is None. It must be true or false",
    '"max_attempts": true': "max_attempts is True. It must be a whole number from 1 to 1,000,000",
    '"max_attempts": 2.5': "max_attempts is 2.5. It must be a whole number",
    '"max_attempts": "3"': "max_attempts is '3'. It must be a whole number",
    '"backoff_max_seconds": NaN': "backoff_max_seconds is nan. It must be a number",
    f'"backoff_max_seconds": 1{"0" * 400}': "backoff_max_seconds is 1000",
    '"rate_per_second": 5': "rate_per_second and burst go together",
    '"publish_to": 7': "publish_to is 7. It must be a topic ID",
    '"publish_to": "no topic"': "publish_to is 'no topic'. It must be a topic ID",
}


def test_a_wrong_file_is_refused_with_the_path_before_anything_is_written(
    database: Database, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another topic of the file is right."""
    of_fields = {
        f'{{"topics": {{"right": {{"paused": true}}, "orders": {{{field}}}}}}}': f"topics.orders.{sentence}"
        for field, sentence in WRONG_FIELDS.items()
    }
    for file, sentence in (WRONG | of_fields).items():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.encode())))
        done = command("topics apply - --force --yes")
        assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1), file
        assert sentence in done.stderr
    assert rows(database) == {}


def test_a_file_with_a_chain_or_a_missing_destination_writes_nothing(
    database: Database, command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "topics.json"
    file.write_text('{"topics": {"orders": {"publish_to": "second"}, "second": {"publish_to": "third"}}}')
    assert "which is routed to" in command(f"topics apply {file} --force --yes").stderr
    file.write_text('{"topics": {"orders": {"publish_to": "missing-topic"}, "right": {"paused": true}}}')
    assert "does not exist" in command(f"topics apply {file} --yes").stderr
    assert f"'{tmp_path}/none.json' cannot be read" in command(f"topics apply {tmp_path}/none.json").stderr
    assert rows(database) == {}
