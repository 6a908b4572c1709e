"""DogStatsD agents that keep each sample."""

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: DogStatsD's names for the types in the table of metrics.
TYPES = {"c": "count", "g": "gauge", "d": "distribution"}


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    value: float
    type: str
    tags: frozenset[str]

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(tag.partition(":")[0] for tag in self.tags)


def samples(packet: str) -> Iterator[Sample]:
    for line in packet.splitlines():
        name, _, rest = line.partition(":")
        value, kind, *fields = rest.split("|")
        tags = next((each[1:] for each in fields if each.startswith("#")), "")
        if name.startswith("outbox."):
            # Several values of one name in one line are divided by colons.
            for each in value.split(":"):
                yield Sample(name, float(each), TYPES[kind], frozenset(tags.split(",") if tags else ()))


class Agent:
    """`heard` is every sample that came while the agent was there."""

    def __init__(self, url: str) -> None:
        self.environment = {"DD_DOGSTATSD_URL": url}
        self.heard: list[Sample] = []
        self.packets = 0

    @property
    def counts(self) -> Counter[str]:
        """Return the sums of all counters by name."""
        sums: Counter[str] = Counter()
        for each in list(self.heard):
            if each.type == "count":
                sums[each.name] += int(each.value)
        return sums

    def named(self, name: str) -> list[Sample]:
        return [each for each in list(self.heard) if each.name == name]

    @contextlib.contextmanager
    def _served(self, end: socket.socket) -> Iterator[None]:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        thread = threading.Thread(target=self._listen, args=(end,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.sendto(b"stop", end.getsockname())
            thread.join(5)

    def _listen(self, end: socket.socket) -> None:
        while (packet := end.recv(1 << 20)) != b"stop":
            self.packets += 1
            self.heard.extend(samples(packet.decode()))


class UnixAgent(Agent):
    """An agent on a Unix socket, which appears and disappears."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"unix://{path}")
        self.path = path

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Be there for the time of the block; the socket's file is gone afterwards, as with a pod of an agent."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.bind(str(self.path))
            try:
                with self._served(end):
                    yield
            finally:
                self.path.unlink()


@contextlib.contextmanager
def listening() -> Iterator[Agent]:
    """Yield an agent on a UDP port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind(("127.0.0.1", 0))
        agent = Agent(f"udp://127.0.0.1:{end.getsockname()[1]}")
        with agent._served(end):
            yield agent
