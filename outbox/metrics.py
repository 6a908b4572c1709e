"""Where an application plugs in its metrics client. There is none by default, and it never fails the caller."""

import inspect
import logging
from typing import Any, Protocol

from outbox.base.values import check_finished, class_name

_log = logging.getLogger("outbox")


class Recorder(Protocol):
    """Counts metrics, for example `datadog.DogStatsd`. It may raise: the caller of `register` is not affected."""

    def increment(self, metric: str, value: float, tags: list[str]) -> object:
        """Add `value` to the counter `metric`; tags are `key:value`."""


_recorder: Recorder | None = None
_complained = False


def set_metrics(recorder: Recorder | None) -> None:
    """Count registered and processed tasks of this process through `recorder`.

    Args:
        recorder: called in the thread that registers or processes. None, the default, counts nothing. Its first error
            is logged with a traceback, later ones are ignored.

    Raises:
        TypeError: `recorder` is neither None nor an object with such a plain method.
    """
    if recorder is not None and not _can_count(recorder):
        raise TypeError(
            f"recorder is {class_name(recorder)}. It must have a plain method increment(metric, value, tags), as a "
            "DogStatsd of the package datadog has, or be None"
        )
    global _recorder, _complained
    _recorder, _complained = recorder, False


def _can_count(recorder: object) -> bool:
    increment: Any = getattr(recorder, "increment", None)
    if not callable(increment) or inspect.iscoroutinefunction(increment) or inspect.isclass(recorder):
        return False
    try:
        inspect.signature(increment).bind("metric", 1, ["tag:value"])
    except TypeError:
        return False
    except ValueError:
        pass  # a function without a signature, such as one of C
    return True


def count_registered(topic: str, count: int = 1) -> None:
    """Count registered tasks."""
    _count("outbox.registered_task_count", count, f"topic:{topic}")


def count_delivery(consumer: str, outcome: str) -> None:
    """Count a message that `outbox.inbox.Handler` received."""
    _count("outbox.inbox_message_count", 1, f"consumer:{consumer}", f"outcome:{outcome}")


def _count(metric: str, count: int, *tags: str) -> None:
    """Add to a counter. A recorder that fails is logged once and never fails the caller."""
    global _complained
    if _recorder is None:
        return
    try:
        check_finished(_recorder.increment(metric, count, list(tags)), "increment")
    except Exception:  # metrics must not fail a transaction
        if not _complained:
            _complained = True
            _log.warning("The metrics recorder failed; metrics of this process are lost", exc_info=True)
