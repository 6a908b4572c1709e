"""A TCP proxy on the loopback interface whose network can fail or be slow.

In a process of its own, so that it costs the one that is measured nothing:

    python -m tests.support.proxy HOST:PORT=SECONDS ...    prints one address each, and forwards until it is killed
"""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self

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
        #: How many connections have been accepted so far.
        self.accepted = 0
        self._held = frozenset[str]()
        self._delay = 0.0
        self._server: asyncio.Server | None = None
        #: The ends of each open connection: the client's, and that of the target.
        self._links = set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]]()

    def __enter__(self) -> Self:
        # Bound until the end: while the proxy refuses, no other process gets the port, and no client gets it as its
        # source port, which would connect the client to itself.
        self._reservation = _bound(0)
        running = threading.Event()

        async def live() -> None:
            self._loop, self._end, self._moved = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
            running.set()
            await self._end.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
        self._thread.start()
        running.wait()
        self.forward()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._reservation.close()

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self._reservation.getsockname()[1]}"

    def forward(self) -> None:
        self._wait_for(self._listen())

    def hang(self) -> None:
        self._wait_for(self._listen("request", "answer"))

    def mute(self) -> None:
        self._wait_for(self._listen("answer"))

    def refuse(self) -> None:
        async def close() -> None:
            if self._server:
                self._server.close()
            self._server = None

        self._wait_for(close())
        self.cut()

    def cut(self) -> None:
        """Cut the open connections; data that was delayed in them is lost."""

        async def abort() -> None:
            links, self._links = self._links, set()
            for end in (end for link in links for end in link):
                end.transport.abort()

        self.on_break()
        self._wait_for(abort())

    def half_close(self) -> None:
        """End the client's direction of each open connection; the server may still answer."""

        async def end() -> None:
            for _, server in self._links:
                server.write_eof()

        self.on_break()
        self._wait_for(end())

    def delay(self, seconds: float) -> None:
        """Deliver each chunk of bytes, in both directions, `seconds` after it came; chunks do not wait for others."""
        self._delay = seconds

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self, *held: str) -> None:
        self._held, moved, self._moved = frozenset(held), self._moved, asyncio.Event()
        moved.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._join, sock=_bound(self._reservation.getsockname()[1]))

    async def _join(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        listener = self._server
        try:
            answers, server = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 5)
        except (OSError, TimeoutError):  # the target is gone, so the client loses its connection
            client.transport.abort()
            return
        link = client, server
        if listener is not None and self._server is listener:  # not refused in the meantime
            self.accepted += 1
            self._links.add(link)
            parts = (reader, server, "request"), (answers, client, "answer")
            ways = [asyncio.ensure_future(self._forward(*each)) for each in parts]
            with contextlib.suppress(asyncio.CancelledError):  # the end of the proxy
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for each in ways:
                each.cancel()
            self._links.discard(link)
        for end in link:
            end.close()

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, direction: str) -> None:
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            data = b"more"
            while data:
                try:
                    data = await source.read(CHUNK)
                except OSError:
                    data = b""
                way.put_nowait((self._loop.time() + self._delay, data))

        reading = asyncio.ensure_future(read())
        with contextlib.suppress(OSError, RuntimeError):  # the other side is closed, or half closed
            while True:
                due, data = await way.get()
                await asyncio.sleep(due - self._loop.time())
                if not data:  # the source is closed, and its data is delivered
                    break
                while direction in self._held:
                    await self._moved.wait()
                target.write(data)
                await target.drain()
        reading.cancel()


def _bound(port: int) -> socket.socket:
    # Both sockets of the proxy's port need both options; the one that never listens gets no connection.
    created = socket.socket()
    created.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    created.bind((LOOPBACK, port))
    return created


@contextlib.contextmanager
def silent_port() -> Iterator[str]:
    with _bound(0) as reservation:
        yield f"{LOOPBACK}:{reservation.getsockname()[1]}"


@contextlib.contextmanager
def refusing(_target: str) -> Iterator[str]:
    with silent_port() as host:
        yield host


@contextlib.contextmanager
def hanging(target: str) -> Iterator[str]:
    with Proxy(target) as proxy:
        proxy.hang()
        yield proxy.address


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
