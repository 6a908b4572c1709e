"""`outbox route`, `policy` and `outbox topics export`, `apply`, `forget`: rows, records, output and refusals."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import operations, topics
from outbox.admin.table import TaskTable
from outbox.admin.topics import Control
from outbox.devtools.emulators import Emulators
from tests.integration.test_topics_spanner import FOLLOW, Command, command, have
from tests.support.commands import Commands, here
from tests.support.spanner import PROJECT, variables

__all__ = ["command"]  # a fixture

V2 = f"projects/{PROJECT}/topics/orders-v2"


@pytest.fixture
def controls(database: Database) -> dict[str, Control]:
    """The rows, read when they are asked for."""

    class Rows(dict[str, Control]):
        def __eq__(self, other: object) -> bool:
            return topics.controls(TaskTable(database)) == other

        __hash__ = None  # type: ignore[assignment]  # it is compared only

    return Rows()


def recorded(database: Database) -> tuple[str, Any]:
    latest, *_ = operations.latest(TaskTable(database), 20)  # IDs tell seconds apart, but not parts of one
    assert latest.finished_at is not None
    return latest.operation, json.loads(latest.selection)


def test_a_route_is_written_and_recorded_and_ends(
    database: Database, command: Command, controls: dict[str, Control]
) -> None:
    """The dry run counts unsent tasks of all states and writes nothing. Other controls of the topic stay."""
    have(database, "orders", "orders", "invoices")
    command("limit orders --max-in-flight 5")
    dry = command("route orders --to orders-v2 --force --dry-run")
    assert dry == (0, "2 tasks of orders would be published to orders-v2\n", "")
    assert controls == {"orders": Control(MaxInFlight=5)}
    code, out, err = command("route orders --to orders-v2 --force")
    assert (code, out) == (0, "orders: at most 5 in flight; published to orders-v2\n")
    assert err.startswith(f"{FOLLOW}outbox: 2 tasks of orders not sent yet. Subscribers of orders-v2 do not get")
    assert controls == {"orders": Control(MaxInFlight=5, PublishTo="orders-v2")}
    assert recorded(database) == ("route", {"topics": ["orders"], "values": {"PublishTo": "orders-v2"}})
    code, out, err = command(f"pause {V2} --yes")
    assert (code, out) == (0, f"{V2}: paused\n")
    assert err.endswith("messages of orders still go to orders-v2, because of its route. Pause it, too\n")
    assert command(f"topics forget {V2} --yes")[0] == 0
    assert command("route orders --off")[:2] == (0, "orders: at most 5 in flight\n")
    assert controls == {"orders": Control(MaxInFlight=5)}
    assert recorded(database) == ("route", {"topics": ["orders"], "values": {"PublishTo": None}})


def test_a_chain_a_cycle_and_a_route_to_itself_are_refused(
    database: Database, command: Command, controls: dict[str, Control]
) -> None:
    """Also under the full name. Nothing is written."""
    have(database, "orders")
    for before, words, reason in (
        ((), "orders --to orders", "orders would be routed to itself"),
        ((), f"orders --to projects/{PROJECT}/topics/orders", "orders would be routed to itself"),
        (("orders-v2", "v3-orders"), "orders --to orders-v2", "orders-v2, which is routed to"),
        (("orders-v2", "orders"), f"orders --to {V2}", "which is routed to"),
        (("legacy", "orders"), "orders --to orders-v2", f"orders, which is routed to {V2}"),
    ):
        if before:
            assert command(f"route {before[0]} --to {before[1]} --force --yes")[0] == 0
        left = topics.controls(TaskTable(database))
        for dry in ("", " --dry-run"):
            code, out, err = command(f"route {words} --force{dry}")
            assert (code, out) == (1, "")
            assert reason in err
            assert err.endswith("Nothing was changed\n")
        assert controls == left


def test_a_destination_that_does_not_exist_is_refused(  # noqa: PLR0917 - fixtures
    emulators: Emulators, database: Database, command: Command, controls: dict[str, Control], topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`--force` does not ask. If Pub/Sub does not answer, a note says so, and the route is written."""
    have(database, "orders")
    code, _, err = command("route orders --to missing-topic")
    assert code == 1
    assert f"topic projects/{PROJECT}/topics/missing-topic does not exist. Create it: `" in err
    assert controls == {}
    assert command(f"route orders --to {topic}")[0] == 0
    assert command("route orders --to missing-topic --force")[0] == 0
    monkeypatch.setattr("outbox.program.pubsub.SECONDS", 0.3)
    without = Commands(emulators, database, more={"PUBSUB_EMULATOR_HOST": "localhost:1"})
    done = without.here("route", "orders", "--to", "third-topic")
    assert done.code == 0
    assert f"Pub/Sub does not say whether projects/{PROJECT}/topics/third-topic exists: " in done.stderr
    assert controls == {"orders": Control(PublishTo="third-topic")}


def test_a_policy_keeps_the_values_that_are_not_given(
    database: Database, command: Command, controls: dict[str, Control]
) -> None:
    have(database, "orders")
    assert command("policy orders --max-attempts 3 --backoff-max 60s") == (
        0, "orders: dead after 3 attempts; retries at most 60 s apart\n", FOLLOW,
    )  # fmt: skip
    assert command("policy orders --backoff-initial 0.5 --dead-after 1h")[0] == 0
    assert controls == {"orders": Control(False, None, None, None, None, 3, 0.5, 60.0, 3600.0)}
    assert recorded(database)[1]["values"] == {"BackoffInitialSeconds": 0.5, "DeadAfterSeconds": 3600.0}
    code, _, err = command("policy orders --backoff-max 0.1")
    assert code == 2, "the same mistake in the settings of a worker also ends with 2"
    assert "topic orders: BackoffInitialSeconds is 0.5. It must not exceed BackoffMaxSeconds, which is 0.1. " in err
    assert command("policy orders --off")[:2] == (0, "orders: no limits\n")
    assert controls == {"orders": Control()}


def test_wrong_flags_are_refused() -> None:
    for words, sentence in {
        "policy orders": "no value given. Pass --max-attempts, --backoff-initial, ",
        "policy orders --off --max-attempts 3": "--off removes all values. Pass it without --max-attempts",
        "policy orders --backoff-max 8d": "'8d' is not allowed",
        "policy orders --max-attempts 0": "'0' is not allowed",
        "route orders --to x": "'x' is not allowed",
        "route orders --to orders-v2 --off": "not allowed with argument",
        "route orders": "one of the arguments --to --off is required",
    }.items():
        done = here(*words.split(), environment=variables("shop") | {"SPANNER_EMULATOR_HOST": "127.0.0.1:9"})
        assert done.code == 2
        assert sentence in done.stderr


FULL = {
    "orders": {
        "paused": True, "rate_per_second": 10.0, "burst": 20, "max_in_flight": 5, "publish_to": "orders-v2",
        "max_attempts": 3, "backoff_initial_seconds": 1.0, "backoff_max_seconds": 60.0, "dead_after_seconds": 0.0,
    },
    "invoices": {"paused": False},
}  # fmt: skip


def test_an_export_can_be_applied(
    database: Database, command: Command, controls: dict[str, Control], tmp_path: Path
) -> None:
    """What a file does not have is unset; a topic that is not in it stays. One record has the difference."""
    file = tmp_path / "topics.json"
    file.write_text(json.dumps({"topics": FULL}))
    wanted = {"orders": Control(True, 10.0, 20, 5, "orders-v2", 3, 1.0, 60.0, 0.0), "invoices": Control()}
    dry = command(f"topics apply {file} --force --dry-run")
    assert dry[1].endswith("\n2 topics would be changed, 0 unchanged\n")
    assert dry[2].startswith("outbox: unknown topic 'orders', 'invoices' (no row")
    assert "orders: no row -> paused; at most 10 tasks a second, 20 at once, 5 in flight; published to orders" in dry[1]
    assert controls == {}
    assert command(f"topics apply {file} --force")[0] == 2  # no topic is known
    assert command(f"topics apply {file} --force --yes")[0] == 0
    assert controls == wanted
    assert recorded(database)[0] == "apply"
    exported = command("topics export")[1]
    assert json.loads(exported) == {"topics": FULL}
    file.write_text(exported)
    assert command(f"topics apply {file} --force")[1] == "0 topics changed, 2 unchanged\n"
    file.write_text('{"topics": {"orders": {"burst": 2e+01, "rate_per_second": 7}}}')
    assert command(f"topics apply {file}")[0] == 0
    assert controls == {**wanted, "orders": Control(RatePerSecond=7.0, Burst=20)}
    operation, difference = recorded(database)
    assert (operation, difference["topics"]["orders"]["MaxAttempts"]) == ("apply", [3, None])
    assert "Burst" not in difference["topics"]["orders"]


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
    '"rate_per_second": 5': "rate_per_second and Burst go together",
    '"publish_to": 7': "publish_to is 7. It must be a topic ID",
    '"publish_to": "no topic"': "publish_to is 'no topic'. It must be a topic ID",
}


def test_a_wrong_file_is_refused_with_the_path_before_anything_is_written(
    command: Command, controls: dict[str, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another topic of the file is right."""
    of_fields = {
        f'{{"topics": {{"right": {{"paused": true}}, "orders": {{{field}}}}}}}': f"topics.orders.{sentence}"
        for field, sentence in WRONG_FIELDS.items()
    }
    for text, sentence in (WRONG | of_fields).items():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code, out, err = command("topics apply - --force --yes")
        assert (code, out, err.count("\n")) == (2, "", 1), text
        assert sentence in err
    assert controls == {}


def test_a_file_with_a_chain_or_a_missing_destination_writes_nothing(
    command: Command, controls: dict[str, Control], tmp_path: Path
) -> None:
    file = tmp_path / "topics.json"
    file.write_text('{"topics": {"orders": {"publish_to": "second"}, "second": {"publish_to": "third"}}}')
    assert "which is routed to" in command(f"topics apply {file} --force --yes")[2]
    file.write_text('{"topics": {"orders": {"publish_to": "missing-topic"}, "right": {"paused": true}}}')
    assert "does not exist" in command(f"topics apply {file} --yes")[2]
    assert command(f"topics apply {tmp_path}/none.json")[2].startswith(f"outbox: '{tmp_path}/none.json' cannot be read")
    assert controls == {}


def test_a_topic_is_forgotten_after_a_confirmation(
    database: Database, command: Command, controls: dict[str, Control]
) -> None:
    """Its pause ends with it, so the command asks. The record has what it was."""
    command("pause orders --yes")
    code, _, err = command("topics forget orders")
    assert (code, "orders has: paused. Forget it?" in err) == (2, True)
    assert controls == {"orders": Control(True)}
    assert command("topics forget orders --yes") == (0, "orders: forgotten\n", FOLLOW)
    assert controls == {}
    assert recorded(database) == ("forget", {"topics": {"orders": {"Paused": [True, None]}}})
    assert command("topics forget orders --yes") == (
        1, "", "outbox: topic 'orders' has no row in AsynchronousTaskTopics. Nothing was changed\n",
    )  # fmt: skip


def test_the_list_shows_routes_and_policies(command: Command) -> None:
    command("route orders --to orders-v2 --force --yes")
    command("policy orders --max-attempts 3")
    assert "orders  published to orders-v2; dead after 3 attempts" in command("topics")[1]
    [found] = json.loads(command("topics --json")[1])["topics"]
    assert (found["publish_to"], found["max_attempts"], found["dead_after_seconds"]) == ("orders-v2", 3, None)
    assert command("topics --exact")[0] == 0
