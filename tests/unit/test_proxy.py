"""The proxy of the fault tests: a proxy that lies makes every test behind it lie."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.processes import started
from tests.support.proxy import Proxy
from tests.support.waiting import eventually


class Echo:
    """A server that answers every byte with the same byte, and keeps what it got."""

    def __init__(self) -> None:
        """Listen."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.received = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while data := client.recv(100):
                self.received += data
                client.sendall(data)


@pytest.fixture
def echo() -> Iterator[Echo]:
    """Run an echo server."""
    server = Echo()
    yield server
    server.listener.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    """Run a proxy of the echo server."""
    with Proxy(echo.address) as made:
        yield made


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    """Connect to the proxy; no call waits for long."""
    with _dial(proxy) as made:
        yield made


def _dial(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def _ask(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return client.recv(100)


def _silent(client: socket.socket) -> bool:
    client.settimeout(0.1)
    try:
        return client.recv(100) == b"never"
    except TimeoutError:
        return True
    finally:
        client.settimeout(5)


def test_it_forwards(client: socket.socket) -> None:
    """Without a fault the proxy is not there."""
    assert _ask(client, b"a") == b"a"


def test_refusing_cuts_and_refuses(proxy: Proxy, client: socket.socket) -> None:
    """A refusing proxy is a server that is gone, on the same address when it comes back."""
    assert _ask(client, b"a") == b"a"
    proxy.refuse()
    assert client.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        _dial(proxy)
    proxy.forward()
    with _dial(proxy) as again:
        assert _ask(again, b"b") == b"b"


def test_hanging_answers_nothing_until_it_forwards(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    """A hanging proxy is a partition: old and new connections stay open, and nothing gets through."""
    assert _ask(client, b"a") == b"a"
    proxy.hang()
    client.sendall(b"b")
    with _dial(proxy) as late:
        late.sendall(b"c")
        assert _silent(client)
        assert _silent(late)
        assert echo.received == b"a"
        proxy.forward()
        assert (client.recv(100), late.recv(100)) == (b"b", b"c")


def test_muted_the_server_hears_and_the_client_does_not(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    """A muted and then cut connection is the lost answer: done, and nobody knows."""
    proxy.mute()
    client.sendall(b"commit")
    eventually(lambda: echo.received == b"commit")
    assert _silent(client)
    proxy.cut()
    assert client.recv(100) == b""
    proxy.forward()
    with _dial(proxy) as again:
        assert _ask(again, b"x") == b"x"


def test_a_delay_holds_in_both_directions(proxy: Proxy, client: socket.socket) -> None:
    """A round trip through a delayed proxy takes twice the delay."""
    proxy.delay(0.05)
    began = time.monotonic()
    assert _ask(client, b"a") == b"a"
    assert time.monotonic() - began >= 0.1
    proxy.delay(0)
    assert _ask(client, b"b") == b"b"


def test_chunks_in_flight_are_delayed_once(proxy: Proxy, client: socket.socket) -> None:
    """A delay is a distance: what is sent while other chunks are on their way does not wait for them."""
    proxy.delay(0.2)
    began = time.monotonic()
    sent = b""
    for number in range(20):
        sent += bytes([number])
        client.sendall(sent[-1:])
        time.sleep(0.005)  # so that each is a chunk of its own
    received = b""
    while len(received) < len(sent):
        received += client.recv(100)
    assert received == sent
    assert 0.4 <= time.monotonic() - began < 20 * 0.2


def test_what_was_sent_before_the_end_arrives(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    """A delayed end of a connection does not overtake its bytes."""
    proxy.delay(0.05)
    client.sendall(b"last")
    client.shutdown(socket.SHUT_WR)
    eventually(lambda: echo.received == b"last")


def test_a_process_of_its_own_delays(echo: Echo) -> None:
    """A benchmark's proxy takes nothing from the process that is measured."""
    with started("tests.support.proxy", f"{echo.address}=0.05") as process:
        process.wait_for_text("\n")
        host, _, port = process.stdout.strip().rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            began = time.monotonic()
            assert _ask(client, b"a") == b"a"
            assert time.monotonic() - began >= 0.1


def test_a_target_that_is_gone_cuts_the_client(proxy: Proxy, echo: Echo) -> None:
    """A proxy never looks healthier than what is behind it."""
    echo.listener.shutdown(socket.SHUT_RDWR)
    echo.listener.close()
    with _dial(proxy) as client, contextlib.suppress(ConnectionResetError):
        assert client.recv(100) == b""


def test_the_end_of_the_block_cuts_and_refuses(echo: Echo) -> None:
    """Nothing of a proxy outlives its test."""
    with Proxy(echo.address) as proxy:
        client = _dial(proxy)
        assert _ask(client, b"a") == b"a"
        assert proxy.accepted == 1
        host, _, port = proxy.address.rpartition(":")
    with client:
        assert client.recv(100) == b""
    with socket.socket() as late:
        assert late.connect_ex((host, int(port))) != 0


def test_a_truncated_connection_ends_in_the_middle(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    """Half of the next bytes come through, then both ends see the end."""
    assert _ask(client, b"one") == b"one"
    proxy.truncate()
    client.sendall(b"next")
    eventually(lambda: echo.received == b"onene", message="half of it arrived")
    with contextlib.suppress(OSError):  # a reset is an end, too
        assert client.recv(100) in (b"", b"n")
    assert _dial_and_ask(proxy, b"again") == b"again"


def test_a_half_closed_connection_still_answers(proxy: Proxy) -> None:
    """The server sees the end of the requests; what it says then arrives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.target = f"127.0.0.1:{listener.getsockname()[1]}"
        with _dial(proxy) as client:
            server, _ = listener.accept()
            with server:
                client.sendall(b"a request")
                assert server.recv(100) == b"a request"
                proxy.half_close()
                assert server.recv(100) == b""
                server.sendall(b"an answer")
                assert client.recv(100) == b"an answer"


def _dial_and_ask(proxy: Proxy, data: bytes) -> bytes:
    with _dial(proxy) as client:
        return _ask(client, data)
