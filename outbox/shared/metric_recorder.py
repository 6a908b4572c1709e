"""Where an application plugs in its metrics client. There is none by default, and it never fails the caller."""

import logging
from typing import Protocol

_log = logging.getLogger("outbox")


class Recorder(Protocol):
    """What `set_metrics` accepts, for example `datadog.DogStatsd`."""

    def increment(self, metric: str, value: float, tags: list[str]) -> object:
        """Add `value` to the counter `metric`; tags are `key:value`."""


_recorder: Recorder | None = None
_complained = False


def set_metrics(recorder: Recorder | None) -> None:
    """Count registered tasks of this process through `recorder`; None (the default) counts nothing."""
    global _recorder, _complained
    _recorder, _complained = recorder, False


def count_registered(topic: str) -> None:
    """Count one call of `register`. A recorder that fails is logged once and never fails the caller."""
    global _complained
    if _recorder is None:
        return
    try:
        _recorder.increment("outbox.registered_task_count", 1, [f"topic:{topic}"])
    except Exception:  # metrics must not fail a transaction
        if not _complained:
            _complained = True
            _log.warning("The metrics recorder failed; registered tasks are not counted", exc_info=True)
