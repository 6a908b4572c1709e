"""A DogStatsD agent on a loopback UDP port that adds up the counts that it receives."""

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator


class Agent:
    def __init__(self, port: int) -> None:
        self.environment = {"DD_DOGSTATSD_URL": f"udp://127.0.0.1:{port}"}
        self.counts: Counter[str] = Counter()

    def hear(self, packet: str) -> None:
        for line in packet.splitlines():
            name, _, rest = line.partition(":")
            value, kind = rest.split("|")[:2]
            if kind == "c" and name.startswith("outbox."):
                self.counts[name] += int(float(value))


@contextlib.contextmanager
def listening() -> Iterator[Agent]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        end.bind(("127.0.0.1", 0))
        agent = Agent(end.getsockname()[1])

        def listen() -> None:
            while (packet := end.recv(65536)) != b"stop":
                agent.hear(packet.decode())

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield agent
        finally:
            end.sendto(b"stop", end.getsockname())
            thread.join(5)
