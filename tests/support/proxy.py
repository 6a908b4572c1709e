"""A TCP proxy on the loopback interface whose network can fail or be slow.

In a process of its own, so that it costs the one that is measured nothing:

    python -m tests.support.proxy HOST:PORT=SECONDS ...    prints one address each, and forwards until it is killed
"""

import contextlib
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

LOOPBACK = "127.0.0.1"
CHUNK = 65_536


class Proxy:
    """Forwards to `target` ("host:port"). It forwards at first; every method below may be called at any time.

    with Proxy(emulators.spanner_host) as proxy:
        worker = start(SPANNER_EMULATOR_HOST=proxy.address)
        proxy.refuse()
    """

    def __init__(self, target: str) -> None:
        """Prepare for `target`; nothing is open before the block is entered."""
        self.target = target
        #: Called when open connections are about to end by a fault.
        self.on_break: Callable[[], None] = lambda: None
        self._state = threading.Condition()
        self._held = frozenset[str]()
        self._delay = 0.0
        self._listener: socket.socket | None = None
        self._links = set[_Link]()
        self._accepted = 0

    def __enter__(self) -> Self:
        # Bound until the end: while the proxy refuses, no other process gets the port, and no client gets it as its
        # source port, which would connect the client to itself.
        self._reservation = _bound(0)
        self._listen()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.refuse()
        self._reservation.close()

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self._port}"

    @property
    def accepted(self) -> int:
        """Return how many connections have been accepted so far."""
        return self._accepted

    def forward(self) -> None:
        self._hold()
        self._listen()

    def hang(self) -> None:
        self._hold("request", "answer")
        self._listen()

    def mute(self) -> None:
        self._hold("answer")
        self._listen()

    def refuse(self) -> None:
        with self._state:
            listener, self._listener = self._listener, None
        if listener:
            _close(listener)
        self.cut()

    def cut(self) -> None:
        """Cut the open connections; data that was delayed in them is lost."""
        self.on_break()
        with self._state:
            links, self._links = self._links, set()
            for link in links:
                link.close()
            self._state.notify_all()

    def half_close(self) -> None:
        """End the client's direction of each open connection; the server may still answer."""
        self.on_break()
        with self._state:
            for link in self._links:
                with contextlib.suppress(OSError):
                    link.server.shutdown(socket.SHUT_WR)

    def delay(self, seconds: float) -> None:
        """Deliver each chunk of bytes, in both directions, `seconds` after it came; chunks do not wait for others."""
        self._delay = seconds

    @property
    def _port(self) -> int:
        port: int = self._reservation.getsockname()[1]
        return port

    def _hold(self, *directions: str) -> None:
        with self._state:
            self._held = frozenset(directions)
            self._state.notify_all()

    def _listen(self) -> None:
        with self._state:
            if self._listener:
                return
            self._listener = _bound(self._port)
            self._listener.listen()
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(_address(self.target), timeout=5)
            except OSError:  # the target is gone, so the client loses its connection
                client.close()
                continue
            server.settimeout(None)
            self._join(listener, _Link(client, server))

    def _join(self, listener: socket.socket, link: "_Link") -> None:
        with self._state:
            if self._listener is not listener:  # refused in the meantime
                link.close()
                return
            self._links.add(link)
            self._accepted += 1
        for source, target, direction in ((link.client, link.server, "request"), (link.server, link.client, "answer")):
            way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(source, way), daemon=True).start()
            threading.Thread(target=self._write, args=(link, way, target, direction), daemon=True).start()

    def _read(self, source: socket.socket, way: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
        data = b"more"
        while data:
            try:
                data = source.recv(CHUNK)
            except OSError:
                data = b""
            way.put((time.monotonic() + self._delay, data))

    def _write(
        self, link: "_Link", way: "queue.SimpleQueue[tuple[float, bytes]]", target: socket.socket, direction: str
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = way.get()
                link.closed.wait(max(0.0, due - time.monotonic()))
                if not data:  # the source is closed, and its data is delivered
                    break
                with self._state:
                    self._state.wait_for(lambda: direction not in self._held or link.closed.is_set())
                target.sendall(data)
        with self._state:
            self._links.discard(link)
        link.close()


class _Link:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.closed = threading.Event()
        for end in (client, server):
            with contextlib.suppress(OSError):  # it has just been closed
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # no delay but ours

    def close(self) -> None:
        self.closed.set()
        _close(self.client)
        _close(self.server)


def _address(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port)


def _bound(port: int) -> socket.socket:
    # Both sockets of the proxy's port need both options; the one that never listens gets no connection.
    created = socket.socket()
    created.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    created.bind((LOOPBACK, port))
    return created


def _close(end: socket.socket) -> None:
    # close() alone does not release a thread that waits on the socket.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextlib.contextmanager
def silent_port() -> Iterator[str]:
    with _bound(0) as reservation:
        yield f"{LOOPBACK}:{reservation.getsockname()[1]}"


@contextlib.contextmanager
def hanging() -> Iterator[str]:
    with _bound(0) as listener:
        listener.listen()
        yield f"{LOOPBACK}:{listener.getsockname()[1]}"


def main() -> None:
    with contextlib.ExitStack() as stack:
        for argument in sys.argv[1:]:
            target, _, seconds = argument.partition("=")
            proxy = stack.enter_context(Proxy(target))
            proxy.delay(float(seconds))
            print(proxy.address, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
