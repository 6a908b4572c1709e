"""The proxy of the fault tests: a fault that does not happen makes every test with this proxy pass."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.support.proxy import Proxy
from tests.support.waiting import eventually


class Echo(socketserver.ThreadingTCPServer):
    """A server that answers every byte with the same byte, and keeps the bytes that came."""

    daemon_threads = True
    received = b""

    @property
    def address(self) -> str:
        """Return its host and port."""
        return f"127.0.0.1:{self.server_address[1]}"

    def finish_request(self, request: socket.socket, client_address: object) -> None:
        """Answer one connection to its end."""
        with contextlib.suppress(OSError):
            while data := request.recv(100):
                self.received += data
                request.sendall(data)


@pytest.fixture
def echo() -> Iterator[Echo]:
    """Run an echo server."""
    with Echo(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    """Run a proxy of the echo server."""
    with Proxy(echo.address) as made:
        yield made


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    """Connect to the proxy, which forwards at first; no call waits for long."""
    with _dial(proxy.address) as made:
        assert _ask(made, b"a") == b"a"
        yield made


def _dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def _ask(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return client.recv(100)


def _is_silent(client: socket.socket) -> bool:
    client.settimeout(0.1)
    try:
        return client.recv(100) == b"never"
    except TimeoutError:
        return True
    finally:
        client.settimeout(5)


def test_refusing_cuts_and_refuses(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    """A refusing proxy is a server that is gone; it is back at the same address, unless its target is gone."""
    assert proxy.accepted == 1
    proxy.refuse()
    assert client.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        _dial(proxy.address)
    proxy.forward()
    with _dial(proxy.address) as again:
        assert _ask(again, b"b") == b"b"
    echo.server_close()
    with _dial(proxy.address) as late, contextlib.suppress(ConnectionResetError):
        assert late.recv(100) == b""


def test_hanging_answers_nothing_until_it_forwards(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    """A hanging proxy is a partition: old and new connections stay open, and nothing gets through."""
    proxy.hang()
    client.sendall(b"b")
    with _dial(proxy.address) as late:
        late.sendall(b"c")
        assert _is_silent(client)
        assert _is_silent(late)
        assert echo.received == b"a"
        proxy.forward()
        assert (client.recv(100), late.recv(100)) == (b"b", b"c")


def test_muted_the_server_hears_and_the_client_does_not(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    """A muted and then cut connection loses the answer: the server acts, and the client cannot know it."""
    proxy.mute()
    client.sendall(b"commit")
    eventually(lambda: echo.received == b"acommit")
    assert _is_silent(client)
    proxy.cut()
    assert client.recv(100) == b""


def test_a_truncated_connection_ends_in_the_middle(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    """Half of the next bytes come through, then both ends see the end."""
    proxy.truncate()
    client.sendall(b"next")
    eventually(lambda: echo.received == b"ane", message="half of it arrived")
    with contextlib.suppress(OSError):  # a reset is an end, too
        assert client.recv(100) in (b"", b"n")
    with _dial(proxy.address) as again:
        assert _ask(again, b"again") == b"again"


def test_a_half_closed_connection_still_answers(proxy: Proxy) -> None:
    """The server sees the end of the requests; its later answer arrives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.target = f"127.0.0.1:{listener.getsockname()[1]}"
        with _dial(proxy.address) as client:
            server, _ = listener.accept()
            with server:
                client.sendall(b"a request")
                assert server.recv(100) == b"a request"
                proxy.half_close()
                assert server.recv(100) == b""
                server.sendall(b"an answer")
                assert client.recv(100) == b"an answer"
