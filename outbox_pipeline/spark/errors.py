"""Turns the stack traces of Spark errors into one sentence."""

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from outbox import errors
from outbox.errors import OutboxError

#: The last line of a Python stack trace from an executor or the planner, which Spark passes on as text.
_OURS = re.compile(r"\boutbox\.errors\.(\w+): (.+)")


@contextlib.contextmanager
def spark_errors() -> Iterator[None]:
    """Turn Spark's errors inside the block into OutboxErrors. An OutboxError of a Spark task keeps its class."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise error_from(str(error)) from error


def error_from(text: str) -> OutboxError:
    """Return the OutboxError that Spark's error text contains, or a new one with the reason that the text names."""
    if found := _OURS.findall(text):
        name, sentence = found[-1]
        kind = getattr(errors, name, OutboxError)
        error: OutboxError = kind(sentence.strip())
        return error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The reason is in the last line of a Python stack trace, and in the first line with a class name of a Java one.
    python = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception): ", line)]
    java = [line[2:] for line in lines if re.match(r": [\w.$]+: ", line)]
    reason = python[-1] if python else [*java, *lines, "no reason is given"][0]
    return OutboxError(f"Spark: {reason[:500]}")
