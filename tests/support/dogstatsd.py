"""A DogStatsD agent on a Unix socket that appears and disappears, and keeps each sample."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class UnixAgent:
    """Listens at `path` while it is there; `heard` is everything that came."""

    path: Path
    heard: list[Sample] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {"DD_DOGSTATSD_URL": f"unix://{self.path}"}

    def total(self, name: str) -> int:
        return int(sum(each.value for each in list(self.heard) if each.name == name))

    def named(self, name: str) -> list[Sample]:
        return [each for each in list(self.heard) if each.name == name]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Be there for the time of the block; the socket's file is gone afterwards, as with a pod of an agent."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            end.bind(str(self.path))
            thread = threading.Thread(target=self._listen, args=(end,), daemon=True)
            thread.start()
            try:
                yield
            finally:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
                    own.sendto(b"stop", str(self.path))
                thread.join(5)
                self.path.unlink()

    def _listen(self, end: socket.socket) -> None:
        while (packet := end.recv(1 << 20)) != b"stop":
            self.heard.extend(samples(packet.decode()))
