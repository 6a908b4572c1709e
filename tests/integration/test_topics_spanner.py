"""`outbox pause`, `resume` and `limit` on a database: written rows, output and refusals."""

import io
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.devtools.emulators import Emulators
from tests.support.commands import Commands
from tests.support.processes import ROOT
from tests.support.relays import execute
from tests.support.spanner import PROJECT

COLUMNS = ("Topic", "Paused", "RatePerSecond", "Burst", "MaxInFlight")
FOLLOW = "outbox: workers apply this within 10 seconds\n"
SHARED = (
    "outbox: workers apply this within 10 seconds; each live worker gets an equal part. Its burst and max in flight "
    "are at least 1\n"
)
FULL = f"projects/{PROJECT}/topics/orders"
Command = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def command(emulators: Emulators, database: Database) -> Command:
    def run(words: str) -> tuple[int, str, str]:
        done = Commands(emulators, database).here(*words.split())
        return done.code, done.stdout, done.stderr

    return run


def rows(database: Database) -> list[list[Any]]:
    with database.snapshot() as snapshot:
        return list(snapshot.read("AsynchronousTaskTopics", COLUMNS, KeySet(all_=True)))


def have(database: Database, *topics: str) -> None:
    with database.batch() as batch:
        for topic in topics:
            outbox.register(batch, topic, b"")


def control(database: Database, topic: str, paused: bool = False, *limits: Any) -> None:
    with database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", COLUMNS, [(topic, paused, *(limits or (None, None, None)))])


@pytest.mark.emulator_only("another transaction has its one lock")
def test_pause_and_resume_leave_the_limits_alone(database: Database, command: Command) -> None:
    """Again and again; a transaction that is aborted runs again: here another one has the emulator's locks."""
    control(database, "limited", False, 10.0, 20, 5)
    control(database, "other", True)
    have(database, "orders")
    limits = "at most 10 tasks a second, 20 at once, 5 in flight"

    def left(paused: bool) -> list[list[Any]]:
        nothing = [None, None, None]
        return [["limited", paused, 10.0, 20, 5], ["orders", paused, *nothing], ["other", True, *nothing]]

    session = database.session()
    session.create()
    list(session.transaction().execute_sql("SELECT Id FROM AsynchronousTasks"))
    for _ in range(2):
        assert command("pause orders limited orders") == (0, f"orders: paused\nlimited: paused; {limits}\n", FOLLOW)
        assert rows(database) == left(paused=True)
    session.delete()
    for _ in range(2):
        assert command("resume orders limited") == (0, f"orders: resumed\nlimited: resumed; {limits}\n", FOLLOW)
        assert rows(database) == left(paused=False)


def test_a_limit_that_is_not_given_keeps_its_value(database: Database, command: Command) -> None:
    """So does a pause. `--off` removes the limits and keeps the pause."""
    have(database, "orders")
    assert command("limit orders --max-in-flight 5") == (0, "orders: at most 5 in flight\n", SHARED)
    command("pause orders")
    assert command("limit orders --rate 1234567.5 --burst 1000")[1] == (
        "orders: paused; at most 1,234,567.5 tasks a second, 1,000 at once, 5 in flight\n"
    )
    assert rows(database) == [["orders", True, 1234567.5, 1000, 5]]
    assert command("limit orders --off") == (0, "orders: paused\n", FOLLOW)
    assert rows(database) == [["orders", True, None, None, None]]


def test_the_commands_of_the_page_print_its_output(database: Database, command: Command) -> None:
    """Without the flags that name the database. The SQL of the page leaves the rows that the commands leave."""
    page = (ROOT / "docs/operations/topics.md").read_text(encoding="utf-8")
    console, sql = (
        re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0] for kind in ("console", "sql")
    )
    have(database, "orders", "invoices")
    shown = re.findall(r"^\$ outbox (.*?) --project .*\n((?:[^$].*\n)*)", console, re.MULTILINE)
    assert [words.split()[0] for words, _ in shown] == ["pause", "resume", "limit", "limit", "limit"]
    for words, expected in shown:
        assert command(words)[:2] == (0, expected)
    assert rows(database) == [[topic, False, None, None, None] for topic in ("invoices", "orders")]
    *statements, _ = [re.sub(r"--.*", "", each).strip() for each in sql.split(";")]
    left: list[Any] = []
    for statement in statements[1:]:
        execute(database, statement)
        left.append(rows(database)[1])
    assert left == [
        ["orders", True, None, None, None],
        ["orders", False, None, None, None],
        ["orders", False, 10.0, 20, None],
        ["orders", False, 10.0, 20, 5],
        ["orders", False, None, None, None],
    ]


@pytest.mark.parametrize("words", ["pause {}", "limit {} --max-in-flight 1"])
def test_a_topic_is_known_by_a_row_or_a_task(database: Database, command: Command, words: str) -> None:
    """Either is enough, as for `outbox topics`; a task sent earlier is not. `--yes` accepts any name."""
    control(database, "has-row")
    have(database, "has-task")
    sent = {"sent-now": COMMIT_TIMESTAMP, "sent-before": datetime.now(UTC) - timedelta(minutes=2)}
    with database.batch() as batch:
        ids = [outbox.register(batch, topic, b"") for topic in sent]
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), list(zip(ids, sent.values(), strict=True)))
    for topic in ("has-row", "has-task", "sent-now"):
        assert command(words.format(topic))[0] == 0
    assert command(words.format("sent-before"))[0] == 2
    assert command(words.format("sent-before") + " --yes")[0] == 0


def test_an_unknown_topic_is_refused_with_the_known_ones(database: Database, command: Command) -> None:
    """So a typing error is noticed. Nothing is written, also not for known topics. At most ten names are printed."""
    advice = "{} 'ordres' anyway? Nothing was changed\n"
    assert command("pause ordres")[2].endswith(f"Known topics: none. {advice.format('Pause')}")
    have(database, "orders", "orders", "invoices")
    control(database, "reminders")
    refusal = (
        "outbox: Not a terminal. Pass --yes to confirm: unknown topic 'ordres' (no row in "
        "AsynchronousTaskTopics, no unsent task, and none sent in the last minute). Did you mean 'orders'? "
        "Known topics: invoices, orders, reminders. "
    )
    for words, verb in {
        "pause orders ordres": "Pause",
        "limit ordres --max-in-flight 1": "Limit",
        "route ordres --to orders-v2 --force": "Route",
        "policy ordres --max-attempts 3": "Set the policy of",
    }.items():
        assert command(words) == (2, "", refusal + advice.format(verb))
        assert [row[0] for row in rows(database)] == ["reminders"]
    names = [f"a-{n:02}" for n in range(10)]
    have(database, *names)
    assert command("pause ordres")[2].endswith(f"Known topics: {', '.join(names)}, .... {advice.format('Pause')}")


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_an_unknown_topic_is_a_question_at_a_terminal(
    database: Database, command: Command, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    have(database, "orders")
    for words in ("pause {}", "limit {} --max-in-flight 1"):
        typed = io.StringIO(answer)
        monkeypatch.setattr(typed, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", typed)
        done = command(words.format("ordres"))
        assert done[0] == code
        assert "Did you mean 'orders'? Known topics: orders. " in done[2]
        assert "'ordres' anyway? [y/N] " in done[2]
        assert [row[0] for row in rows(database)] == ([] if code else ["ordres"])
        with database.batch() as batch:
            batch.delete("AsynchronousTaskTopics", KeySet(all_=True))


def test_a_topic_without_a_row_cannot_be_resumed(database: Database, command: Command) -> None:
    """Even if it has tasks; the paused topics are named, and nothing is written."""
    have(database, "orders")
    assert command("resume orders")[2].endswith("Nothing was written. Paused topics: none\n")
    control(database, "invoices", True)
    control(database, "reminders")
    sentence = "outbox: cannot resume orders: no row in AsynchronousTaskTopics. Nothing was written. "
    assert command("resume orders invoices") == (1, "", f"{sentence}Paused topics: invoices\n")
    assert rows(database)[0][:2] == ["invoices", True]


def test_tasks_under_the_other_spelling_are_reported(database: Database, command: Command) -> None:
    """An id and the full name are two names; both given need no warning, and another project's topic has one name."""
    have(database, "orders", FULL, "projects/other/topics/orders")
    sentence = "outbox: unsent tasks also use {0}, which is the same topic as {1}. Pass {0} too; otherwise"
    for given, other in (("orders", FULL), (FULL, "orders")):
        code, out, err = command(f"pause {given}")
        assert (code, out) == (0, f"{given}: paused\n")
        assert err.startswith(sentence.format(other, given))
    assert "the same topic" not in command("pause projects/other/topics/orders")[2]
    assert command(f"pause orders {FULL}") == (0, f"orders: paused\n{FULL}: paused\n", FOLLOW)
    assert f"unsent tasks also use {FULL}, which is the same topic as orders" in command("resume orders")[2]


def test_tasks_under_the_other_spelling_are_reported_before_a_refusal(database: Database, command: Command) -> None:
    """Once, because the other name is probably the right one."""
    have(database, FULL)
    for words, code in {"pause orders": 2, "limit orders --max-in-flight 5": 2, "resume orders": 1}.items():
        refused = command(words)
        first, second = refused[2].splitlines()
        assert (refused[0], refused[1]) == (code, "")
        assert first.startswith(f"outbox: unsent tasks also use {FULL}, which is the same topic as orders.")
        assert "orders" in second
