"""`cancel` for applications deletes an unsent task in their transaction, and releases the next task of its key."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud.spanner_v1 import AsyncClient
from google.cloud.spanner_v1.database import Database

import outbox
from outbox import aio
from outbox.devtools.emulators import Emulators
from outbox.table.states import NEVER
from tests.support.drivers import STACKS
from tests.support.operations import FUTURE, OF_STATES, PAST, SECOND, insert, row, rows_of
from tests.support.spanner import INSTANCE, PROJECT

DEAD, DEFERRED = {"AvailableAt": NEVER}, {"AvailableAt": FUTURE, "BlockedBy": "head", "Attempts": 2}
#: Cancels each task in a transaction of its own, and returns the answers.
Cancel = Callable[..., list[bool]]


@pytest.fixture(params=["spanner", "aio", *STACKS])
def cancel(
    request: pytest.FixtureRequest, database: Database, emulators: Emulators, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cancel]:
    """The function of one client or driver."""
    if request.param == "spanner":
        yield lambda *ids: [database.run_in_transaction(outbox.cancel, id) for id in ids]
    elif request.param == "aio":
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", emulators.spanner_host)

        async def work(*ids: str) -> list[bool]:
            client = AsyncClient(project=PROJECT, credentials=AnonymousCredentials(), disable_builtin_metrics=True)
            ours = await client.instance(INSTANCE).database(database.database_id)
            return [await ours.run_in_transaction(aio.cancel, id) for id in ids]

        yield lambda *ids: asyncio.run(work(*ids))
    else:
        with closing(STACKS[request.param](database)) as stack:

            def one(id: str) -> bool:
                with stack.transaction() as handle:
                    answer: bool = stack.call("cancel", handle, id)
                    return answer

            yield lambda *ids: [one(id) for id in ids]


def line(key: str, *columns: dict[str, Any], topic: str = "orders") -> list[dict[str, Any]]:
    return [
        row(f"{key} {n}", OrderingKey=key, Topic=topic, CreatedAt=PAST + n * SECOND, **each)
        for n, each in enumerate(columns)
    ]


def test_unsent_tasks_of_every_state_are_deleted_and_no_others(cancel: Cancel, database: Database) -> None:
    tasks = [row(f"{state} {n}", **each) for state, many in OF_STATES.items() for n, each in enumerate(many)]
    insert(database, [*tasks, row("other"), row("other dead", **DEAD)])
    before = rows_of(database)
    ids = [each["Id"] for each in tasks]
    assert dict(zip(ids, cancel(*ids), strict=True)) == {id: not id.startswith("sent") for id in ids}
    assert rows_of(database) == {id: each for id, each in before.items() if id.startswith("sent") or id not in ids}
    assert cancel("pending 0", "missing") == [False, False]


def test_the_next_task_of_the_key_is_released(cancel: Cancel, database: Database) -> None:
    """A dead task does not hide it. A task that is not deferred, or behind another head, is left as it is."""
    insert(
        database,
        [
            *line("a", {"SentAt": PAST}, {"AvailableAt": FUTURE}, DEFERRED, DEFERRED),
            *line("b'", DEAD, DEAD, DEFERRED, DEFERRED),
            *line("waits", {}, {"AvailableAt": FUTURE}, DEFERRED),
            *line("behind", {"AvailableAt": FUTURE}, DEFERRED, DEFERRED),
            *line("alone", {}),
            *line("other", {"AvailableAt": FUTURE}, DEFERRED, topic="invoices"),
        ],
    )
    before = rows_of(database)
    assert cancel("a 1", "b' 0", "waits 0", "behind 1", "alone 0") == [True] * 5
    after = rows_of(database)
    assert {id for id in after if after[id] != before[id]} == {"a 2", "b' 2"}
    for id in ("a 2", "b' 2"):
        assert after[id] == before[id] | {"AvailableAt": None, "BlockedBy": None}
