"""Emulators that the processes of pytest-xdist share: the controller starts each when the first process needs it."""

import contextlib
import secrets
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import TypeAlias

from outbox.devtools.child_process import LOOPBACK
from outbox.devtools.emulators import PUBSUB, SPANNER, Program, running_one
from outbox.errors import NotReached

#: Host and port of the controller, and its key.
Address: TypeAlias = tuple[str, int, str]


class Sharing:
    """Starts emulators on request, and stops them at the end. It belongs to the controller."""

    def __init__(self) -> None:
        key = secrets.token_hex()
        self._listener = Listener((LOOPBACK, 0), authkey=key.encode())
        host, port = self._listener.address
        self.address: Address = (str(host), int(port), key)
        # The emulators end with the thread that has started them.
        self._thread = threading.Thread(target=self._serve, name="outbox-emulators", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the emulators."""
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


def ask(address: Address, program: Program) -> str:
    """Return the host of an emulator that the controller at `address` has started. Raises NotReached."""
    with _connected(address) as connection:
        connection.send(program.title)
        host, missing = connection.recv()
    if missing:
        raise NotReached(missing)
    return str(host)


def _connected(address: Address) -> Connection:
    host, port, key = address
    return Client((host, port), authkey=key.encode())
