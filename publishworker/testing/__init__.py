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
import secrets
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from outbox.devtools.child_process import LOOPBACK
from outbox.devtools.emulators import PUBSUB, SPANNER, Program, running_one, without_proxy
from outbox.errors import NotReached

if TYPE_CHECKING:
    from google.cloud.spanner_v1.database import Database
    from google.pubsub_v1.types import PubsubMessage

    from publishworker.testing.relay import OutboxRelay

#: Host and port of the controller of pytest-xdist, and its key.
_Address: TypeAlias = tuple[str, int, str]


class _Sharing:
    """Emulators that the processes of pytest-xdist share: the controller starts each when the first one needs it."""

    def __init__(self) -> None:
        key = secrets.token_hex()
        self._listener = Listener((LOOPBACK, 0), authkey=key.encode())
        host, port = self._listener.address
        self.address: _Address = (str(host), int(port), key)
        # The emulators end with the thread that has started them.
        self._thread = threading.Thread(target=self._serve, name="outbox-emulators", daemon=True)
        self._thread.start()

    def end(self) -> None:
        with _connected(self.address) as connection:
            connection.send("")
        self._thread.join()

    def _serve(self) -> None:
        hosts: dict[str, str] = {}
        with self._listener, contextlib.ExitStack() as stack:
            while True:
                with self._listener.accept() as connection:
                    if not (title := connection.recv()):
                        return
                    program = SPANNER if title == SPANNER.title else PUBSUB
                    try:
                        hosts[title] = hosts.get(title) or stack.enter_context(running_one(program))
                        connection.send((hosts[title], ""))
                    except NotReached as error:
                        connection.send(("", str(error)))


def _ask(address: _Address, program: Program) -> str:
    with _connected(address) as connection:
        connection.send(program.title)
        host, missing = connection.recv()
    if missing:
        raise NotReached(missing)
    return str(host)


def _connected(address: _Address) -> Connection:
    host, port, key = address
    return Client((host, port), authkey=key.encode())


_SHARING = pytest.StashKey[_Sharing]()
_ADDRESS = "outbox_emulators"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting `outbox_ddl`."""
    parser.addini(
        "outbox_ddl", "files with the DDL of the application's tables, for the fixture outbox_database", type="paths"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Share the emulators of a run with pytest-xdist: its controller starts each when the first process needs it."""
    sharing = node.config.stash.setdefault(_SHARING, None) or _Sharing()
    node.config.stash[_SHARING] = sharing
    node.workerinput[_ADDRESS] = sharing.address


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the shared emulators."""
    if sharing := config.stash.get(_SHARING, None):
        sharing.end()


@pytest.fixture(scope="session")
def spanner_emulator(request: pytest.FixtureRequest) -> Iterator[str]:
    """HOST:PORT of a Spanner emulator, to which the environment points. SPANNER_EMULATOR_HOST can name one."""
    with _running(request.config, SPANNER) as host:
        yield host


@pytest.fixture(scope="session")
def pubsub_emulator(request: pytest.FixtureRequest) -> Iterator[str]:
    """HOST:PORT of a Pub/Sub emulator, to which the environment points. PUBSUB_EMULATOR_HOST can name one."""
    with _running(request.config, PUBSUB) as host:
        yield host


@contextlib.contextmanager
def _running(config: pytest.Config, program: Program) -> Iterator[str]:
    address = getattr(config, "workerinput", {}).get(_ADDRESS)
    with contextlib.ExitStack() as stack:
        try:
            host = _ask(address, program) if address else stack.enter_context(running_one(program))
        except NotReached as error:
            if os.environ.get("CI"):
                pytest.fail(str(error), pytrace=False)
            pytest.skip(str(error))
        # The last variable: see outbox.devtools.emulators.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        variables = {program.variable: host, "GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW": "false"}
        for name, value in (variables | without_proxy(host)).items():
            patch.setenv(name, value)
        yield host


@pytest.fixture(scope="session")
def _outbox_database(
    request: pytest.FixtureRequest,
    spanner_emulator: str,  # noqa: ARG001 - it must run
) -> Iterator["Database"]:
    from publishworker.testing.database import created, environment  # noqa: PLC0415 - it imports the Google clients

    with created(request.config.getini("outbox_ddl")) as database, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(database).items():
            patch.setenv(name, value)
        yield database


@pytest.fixture
def outbox_database(_outbox_database: "Database") -> "Database":
    """A database of the emulator with the outbox's tables and those of the setting `outbox_ddl`, all empty.

    Its name is the same for all tests of a process, and OUTBOX_PROJECT, OUTBOX_INSTANCE and OUTBOX_DATABASE are set.
    """
    from publishworker.testing.database import empty  # noqa: PLC0415 - it imports the Google clients

    empty(_outbox_database)
    return _outbox_database


@pytest.fixture
def outbox_relay(
    outbox_database: "Database",
    pubsub_emulator: str,  # noqa: ARG001 - it must run
) -> Iterator["OutboxRelay"]:
    """A relay of `outbox_database` that runs in the test's own thread when the test calls `drain`."""
    from publishworker.testing.database import environment  # noqa: PLC0415 - it imports the Google clients
    from publishworker.testing.relay import OutboxRelay  # noqa: PLC0415 - the same

    relay = OutboxRelay(environment(outbox_database))
    yield relay
    relay.close()


@pytest.fixture
def published(outbox_relay: "OutboxRelay") -> "Callable[[str], list[PubsubMessage]]":
    """Return the messages that `outbox_relay` has published to a topic in this test: `published("orders")`."""
    return outbox_relay.published
