"""`outbox pause`, `resume` and `limit` on a database: what is written, what is said, and what is refused."""

import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database

import outbox
from outbox import cli
from outbox.emulators import Emulators
from outbox.errors import NotReached
from outbox.operations.database import open_database
from outbox.operations.table import TaskTable
from outbox.operations.topics import TopicTable
from outbox.settings import DatabaseSettings
from tests.support.proxy import Proxy, silent_port
from tests.support.pubsub_server import pubsub_server, refuse
from tests.support.spanner import INSTANCE, PROJECT

COLUMNS = ("Topic", "Paused", "RatePerSecond", "Burst", "MaxInFlight")
FOLLOW = "outbox: the workers follow within 10 seconds\n"
SHARED = (
    "outbox: the workers follow within 10 seconds; limits are the fleet's, divided by the living workers, "
    "at least 1 each\n"
)
Command = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def command(database: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command on the database: exit code, stdout, stderr."""
    for name, value in (("PROJECT", PROJECT), ("INSTANCE", INSTANCE), ("DATABASE", database.database_id)):
        monkeypatch.setenv(f"OUTBOX_{name}", value)

    def run(words: str) -> tuple[int, str, str]:
        code = cli.main(words.split())
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def rows(database: Database) -> list[list[Any]]:
    """Return all rows of the control table."""
    with database.snapshot() as snapshot:
        return list(snapshot.read("AsynchronousTaskTopics", COLUMNS, KeySet(all_=True)))


def have(database: Database, *topics: str) -> None:
    """Have a task wait for each of `topics`."""
    with database.batch() as batch:
        for topic in topics:
            outbox.register(batch, topic, b"")


def control(database: Database, *row: Any) -> None:
    """Have one row in the control table."""
    with database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", COLUMNS, [row])


def test_pause_and_resume_leave_the_limits_alone(database: Database, command: Command):
    """Of the topics that are named, each once; others stay as they are."""
    control(database, "limited", False, 10.0, 20, 5)
    control(database, "other", True, None, None, None)
    have(database, "orders")

    paused = command("pause orders limited orders")
    assert paused == (
        0,
        "orders: paused\nlimited: paused; at most 10 tasks a second, 20 at once, 5 in flight\n",
        FOLLOW,
    )
    assert rows(database) == [
        ["limited", True, 10.0, 20, 5],
        ["orders", True, None, None, None],
        ["other", True, None, None, None],
    ]

    resumed = command("resume orders limited")
    limits = "at most 10 tasks a second, 20 at once, 5 in flight"
    assert resumed == (0, f"orders: resumed\nlimited: resumed; {limits}\n", FOLLOW)
    assert [row[:2] for row in rows(database)] == [["limited", False], ["orders", False], ["other", True]]
    assert rows(database)[0] == ["limited", False, 10.0, 20, 5]


def test_pause_and_resume_may_be_repeated(database: Database, command: Command):
    """The second time changes nothing and says the same."""
    have(database, "orders")
    assert command("pause orders") == command("pause orders") == (0, "orders: paused\n", FOLLOW)
    assert command("resume orders") == command("resume orders") == (0, "orders: resumed\n", FOLLOW)


def test_a_limit_that_is_not_named_keeps_its_value(database: Database, command: Command):
    """A pause, too; `--off` takes the limits away and leaves the pause."""
    have(database, "orders")
    assert command("limit orders --rate 10 --burst 20") == (
        0,
        "orders: at most 10 tasks a second, 20 at once\n",
        SHARED,
    )
    assert command("limit orders --max-in-flight 5")[1] == (
        "orders: at most 10 tasks a second, 20 at once, 5 in flight\n"
    )
    command("pause orders")
    assert command("limit orders --rate 1234567.5 --burst 1000")[1] == (
        "orders: paused; at most 1,234,567.5 tasks a second, 1,000 at once, 5 in flight\n"
    )
    assert rows(database) == [["orders", True, 1234567.5, 1000, 5]]
    assert command("limit orders --off")[1] == "orders: paused\n"
    assert rows(database) == [["orders", True, None, None, None]]
    command("resume orders")
    assert command("limit orders --off")[1] == "orders: no limits\n"


@pytest.mark.parametrize("words", ["pause {}", "limit {} --max-in-flight 1"])
def test_a_topic_is_known_by_a_row_a_task_or_pubsub(
    database: Database, command: Command, new_topic: Callable[..., str], words: str
):
    """Any of them is enough; a sent task says nothing about what there is to pause."""
    new_topic(in_pubsub := f"in-pubsub-{words[:5]}")
    control(database, "has-row", False, None, None, None)
    have(database, "has-task")
    for topic in (in_pubsub, "has-row", "has-task"):
        assert command(words.format(topic))[0] == 0
    with database.batch() as batch:
        id = outbox.register(batch, "sent", b"")
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), [(id, COMMIT_TIMESTAMP)])
    assert command(words.format("sent"))[0] == 1


@pytest.mark.parametrize("words", ["pause orders ordres", "limit ordres --max-in-flight 1"])
def test_a_topic_that_nobody_knows_is_refused_with_those_that_are_known(
    database: Database, command: Command, words: str
):
    """A typing error is seen; nothing is written, also not for the right ones beside it."""
    have(database, "orders", "orders", "invoices")
    control(database, "reminders", False, None, None, None)
    code, out, err = command(words)
    assert (code, out) == (1, "")
    assert err == (
        "outbox: nobody knows ordres: no task waits for it, AsynchronousTaskTopics has no row of it, and Pub/Sub has "
        f"no projects/{PROJECT}/topics/ordres; nothing was written. "
        "Tasks wait or rows exist for: invoices, orders, reminders\n"
    )
    assert [row[0] for row in rows(database)] == ["reminders"]


def test_at_most_ten_topics_are_named(database: Database, command: Command):
    """In the order of their names, with dots for the others; `no topic` where there is none."""
    assert command("pause ordres")[2].endswith("Tasks wait or rows exist for: no topic\n")
    names = [f"topic-{n:02}" for n in range(11)]
    have(database, *names[1:])
    control(database, names[0], False, None, None, None)
    assert command("pause ordres")[2].endswith(f"for: {', '.join(names[:10])}, ...\n")


def test_a_topic_without_a_row_cannot_be_resumed(database: Database, command: Command):
    """Whatever else knows it; the paused ones are named, and nothing is written."""
    have(database, "orders")
    assert command("resume orders")[2].endswith("nothing was written. Paused: no topic\n")
    control(database, "invoices", True, None, None, None)
    control(database, "reminders", False, None, None, None)
    code, out, err = command("resume orders invoices")
    assert (code, out) == (1, "")
    assert err == (
        "outbox: AsynchronousTaskTopics has no row of orders, so there is no pause to end; nothing was written. "
        "Paused: invoices\n"
    )
    assert rows(database)[0][:2] == ["invoices", True]


@pytest.mark.parametrize("words", ["pause {}", "limit {} --max-in-flight 5"])
def test_tasks_under_the_other_spelling_are_told(database: Database, command: Command, words: str):
    """An id and the full name are two names; both given is no news, and another project's topic has one name."""
    full = f"projects/{PROJECT}/topics/orders"
    have(database, "orders", full, "projects/other/topics/orders")
    says = "outbox: tasks wait for {}, which is another name than {}: it stays as it is\n"
    for given, other in (("orders", full), (full, "orders")):
        code, out, err = command(words.format(given))
        assert (code, out.partition(": ")[0]) == (0, given)
        assert err.startswith(says.format(other, given))
    assert "another name" not in command(words.format("projects/other/topics/orders"))[2]
    assert command(f"pause orders {full}") == (0, f"orders: {paused(words)}\n{full}: {paused(words)}\n", FOLLOW)


def paused(words: str) -> str:
    """Return what is said of a topic that is paused after the command `words`."""
    return "paused; at most 5 in flight" if "limit" in words else "paused"


def test_resume_tells_of_the_other_spelling_as_well(database: Database, command: Command):
    """The tasks that still wait may be those of the other name."""
    full = f"projects/{PROJECT}/topics/orders"
    have(database, full)
    control(database, "orders", True, None, None, None)
    assert f"tasks wait for {full}, which is another name than orders" in command("resume orders")[2]


@pytest.mark.usefixtures("database")
def test_a_pubsub_that_refuses_to_answer_stops_nothing(command: Command, monkeypatch: pytest.MonkeyPatch):
    """Whether the topic exists is not known then: it is said, and the pause is written."""
    with pubsub_server() as server:
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.address)
        server.get_topic = refuse(grpc.StatusCode.PERMISSION_DENIED, "not yours")
        code, out, err = command("pause orders")
    assert (code, out) == (0, "orders: paused\n")
    assert f"Pub/Sub could not be asked whether projects/{PROJECT}/topics/orders exists" in err
    assert "not yours" in err


def test_a_pubsub_that_is_away_stops_nothing(database: Database, command: Command, monkeypatch: pytest.MonkeyPatch):
    """And is not even asked for a topic that the database knows."""
    have(database, "known")
    with silent_port() as host:
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", host)
        assert command("pause known") == (0, "known: paused\n", FOLLOW)
        code, _, err = command("pause orders")
    assert code == 0
    assert "Pub/Sub could not be asked" in err


def test_a_table_that_is_missing_is_exit_code_3(
    empty_database: Database, command: Command, monkeypatch: pytest.MonkeyPatch
):
    """With the command that makes it."""
    monkeypatch.setenv("OUTBOX_DATABASE", empty_database.database_id)
    code, _, err = command("pause orders")
    assert code == 3
    assert "table AsynchronousTasks is missing; run `outbox schema apply`" in err


@pytest.mark.parametrize("call", ["commit", "streaming_read", "execute_streaming_sql"])
@pytest.mark.parametrize("fault", [Proxy.refuse, Proxy.hang])
def test_no_call_waits_for_a_spanner_that_goes_away(
    emulators: Emulators, database: Database, monkeypatch: pytest.MonkeyPatch, call: str, fault: Callable[[Proxy], None]
):
    """In the middle of a command: the client alone would try a commit for an hour, and a stream for ever."""
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        ours = open_database(
            DatabaseSettings(project=PROJECT, instance=INSTANCE, database=database.database_id, database_role="")
        )
        table = TopicTable(TaskTable(ours))
        table.change(["orders"], {"Paused": False})
        original = getattr(ours.spanner_api, call)

        def fail(*arguments: Any, **keywords: Any) -> Any:
            fault(proxy)
            return original(*arguments, **keywords)

        monkeypatch.setattr(ours.spanner_api, call, fail)
        begun = time.monotonic()
        with pytest.raises(NotReached, match="Spanner did not answer"):
            table.waiting(["orders"]) if call == "execute_streaming_sql" else table.change(["orders"], {"Paused": True})
        assert time.monotonic() - begun < 10


def test_a_transaction_that_is_aborted_is_run_again(database: Database, command: Command):
    """Another one holds locks all the while: on the emulator, those of the whole database."""
    have(database, "orders")
    session = database.session()
    session.create()
    holder = session.transaction()
    list(holder.execute_sql("SELECT Id FROM AsynchronousTasks"))
    assert command("pause orders") == (0, "orders: paused\n", FOLLOW)
    session.delete()
    assert rows(database) == [["orders", True, None, None, None]]
