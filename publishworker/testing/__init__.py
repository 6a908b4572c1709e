"""A pytest plugin for the tests of an application: emulators, a database with the outbox's tables, and a relay.

    def test_an_order_is_announced(outbox_database, outbox_relay, published):
        place_order(outbox_database, "order-1")
        outbox_relay.drain()
        [message] = published("orders")

pytest finds it by its entry point once `spanner-outbox[testing]` is installed. The Google clients are imported when a
fixture is used. A test whose emulator is not installed is skipped. If the variable CI is set, it fails.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeAlias

import pytest

from outbox.base.start import importer
from outbox.devtools.emulators import PUBSUB, SPANNER, Program, environment, running_one, sharing
from outbox.errors import NotReached, OutboxError

if TYPE_CHECKING:
    from google.cloud.spanner_v1.database import Database
    from google.pubsub_v1.types import PubsubMessage

    from publishworker.testing.relay import Drained, OutboxRelay
else:
    # For type hints in tests. It is imported when it is first used, because pytest loads this module for every project.
    __getattr__ = importer(__name__, {"relay": "Drained OutboxRelay"})

__all__ = ["Drained", "Migrate", "OutboxRelay", "Published"]

#: The type of the fixture `outbox_migrate`.
Migrate: TypeAlias = "Callable[[Database], object] | None"


class Published(Protocol):
    """The type of the fixture `published`."""

    def __call__(self, topic: str, *, foreign: int | None = 0) -> "list[PubsubMessage]":
        """See `OutboxRelay.published`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting `outbox_ddl`."""
    parser.addini(
        "outbox_ddl", "files with the DDL of the application's tables, for the fixture outbox_database", type="paths"
    )


@pytest.fixture(scope="session")
def spanner_emulator(request: pytest.FixtureRequest) -> Iterator[str]:
    """HOST:PORT of a Spanner emulator, to which the environment points. SPANNER_EMULATOR_HOST can name one."""
    with _running(request, SPANNER) as host:
        yield host


@pytest.fixture(scope="session")
def pubsub_emulator(request: pytest.FixtureRequest) -> Iterator[str]:
    """HOST:PORT of a Pub/Sub emulator, to which the environment points. PUBSUB_EMULATOR_HOST can name one."""
    with _running(request, PUBSUB) as host:
        yield host


@contextlib.contextmanager
def _running(request: pytest.FixtureRequest, program: Program) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        try:
            if hasattr(request.config, "workerinput"):  # a process of pytest-xdist; the folder is that of the run
                folder = request.getfixturevalue("tmp_path_factory").getbasetemp().parent
                host = stack.enter_context(sharing(program, folder))
            else:
                host = stack.enter_context(running_one(program))
        except NotReached as error:
            if os.environ.get("CI"):
                pytest.fail(str(error), pytrace=False)
            pytest.skip(str(error))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment({program.variable: host}).items():
            patch.setenv(name, value)
        yield host


@pytest.fixture(scope="session")
def outbox_migrate() -> Migrate:
    """Override it in conftest.py: return a function that creates your tables in the database that it gets."""
    return None


@pytest.fixture(scope="session")
def outbox_session_database(
    request: pytest.FixtureRequest,
    spanner_emulator: str,  # noqa: ARG001 - it must run
    outbox_migrate: Migrate,
) -> Iterator["Database"]:
    """The database of `outbox_database`, for fixtures of session scope. Override it to test on a database of your own.

    OUTBOX_PROJECT, OUTBOX_INSTANCE and OUTBOX_DATABASE are set, also while `outbox_migrate` runs.
    """
    from publishworker.testing.relay import created  # noqa: PLC0415 - it imports the Google clients

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        try:
            database = stack.enter_context(created(request.config.getini("outbox_ddl"), outbox_migrate, patch.setenv))
        except OutboxError as error:
            pytest.fail(str(error), pytrace=False)
        yield database


@pytest.fixture
def outbox_database(outbox_session_database: "Database") -> "Database":
    """A database of the emulator with the outbox's tables and your own, all empty.

    Your own are those of the setting `outbox_ddl` and of the fixture `outbox_migrate`. The name of the database is the
    same for all tests of a process.
    """
    from publishworker.testing.relay import empty  # noqa: PLC0415 - it imports the Google clients

    empty(outbox_session_database)
    return outbox_session_database


@pytest.fixture
def outbox_relay(
    outbox_database: "Database",
    pubsub_emulator: str,  # noqa: ARG001 - it must run
) -> Iterator["OutboxRelay"]:
    """A relay of `outbox_database` that runs in the test's own thread when the test calls `drain`."""
    from publishworker.testing.relay import OutboxRelay, variables_of  # noqa: PLC0415 - it imports the Google clients

    relay = OutboxRelay(variables_of(outbox_database))
    yield relay
    try:
        relay.check_foreign()
    finally:
        relay.close()


@pytest.fixture
def published(outbox_relay: "OutboxRelay") -> Published:
    """Return the messages that `outbox_relay` has published to a topic in this test: `published("orders")`."""
    return outbox_relay.published
