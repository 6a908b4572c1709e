"""What a worker says about itself in the column Info of its heartbeat, for `outbox workers`: no secret, no message."""

import itertools
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from outbox import __version__
from outbox.program.settings import fields_of
from publishworker.process.worker_settings import RelaySettings
from publishworker.telemetry.history import History, size
from publishworker.turn.relay import Relay
from publishworker.types import CircuitState

#: Max bytes of the JSON, and of all but the history. The row is written every few seconds, and read by each status.
MAX_BYTES, MAX_OTHER_BYTES = 12_000, 4_000
#: Max bytes of the list of shards. Only a worker with hundreds of scattered shards has more.
MAX_SHARD_BYTES = 2_000
#: Max characters of an error, and of the value of a setting.
MAX_CHARACTERS = 200


def worker_info(settings: RelaySettings, relay: Relay, history: History, shards: Sequence[int]) -> dict[str, object]:
    """Return the JSON. Seconds count from the heartbeat. What does not fit is counted in `..._left_out`."""
    runs, load = list(_fitting(_runs(shards), MAX_SHARD_BYTES)), relay.load
    info: dict[str, object] = {
        "host": socket.gethostname()[:MAX_CHARACTERS],
        "version": __version__,
        "shards": runs,
        "shards_left_out": len(shards) - sum(1 + last - first for first, last in runs),
        "in_flight": load.batches,
        "utilization": round(load.utilization, 2),
        "settings": dict(_changed(settings)),
    }
    circuits = [_circuit(topic, state) for topic, state in sorted(load.circuits.items())]
    info |= {"circuits": [], "circuits_left_out": len(circuits)}
    fitting = list(_fitting(circuits, MAX_OTHER_BYTES - size(info)))
    info |= {"circuits": fitting, "circuits_left_out": len(circuits) - len(fitting)}
    history.add_utilization(load.utilization)
    return info | {"history": history.as_json(MAX_BYTES - size(info) - len(',"history":'))}


def _circuit(topic: str, state: CircuitState) -> dict[str, object]:
    return {
        "topic": topic,
        "reason": state.failure.reason,
        "error": state.failure.error[:MAX_CHARACTERS],
        "open_seconds": round(state.seconds_open, 1),
        "seconds_to_probe": round(state.seconds_to_probe, 1),
    }


def _changed(settings: RelaySettings) -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from their defaults. An endpoint is a host and a port, without credentials."""
    for field in fields_of(RelaySettings):
        value = getattr(settings, field.name)
        if field.default is not None and value != field.kind.value(field.default, field.flag):
            yield field.name, value[:MAX_CHARACTERS] if isinstance(value, str) else value


def _runs(shards: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of shard IDs that follow each other."""
    for _, run in itertools.groupby(enumerate(sorted(shards)), lambda pair: pair[1] - pair[0]):
        ids = [id for _, id in run]
        yield ids[0], ids[-1]


def _fitting(values: Iterable[Any], left: int) -> Iterator[Any]:
    """Yield the first values whose JSON has at most `left` bytes."""
    for value in values:
        left -= size(value) + 1  # a comma
        if left < 0:
            return
        yield value
