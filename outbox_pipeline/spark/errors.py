"""What goes wrong inside Spark, as one sentence of our own instead of two stack traces."""

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from outbox import errors
from outbox.errors import OutboxError

#: How Python ends a stack trace, which Spark hands on as text: those of executors, and of the planner.
_OURS = re.compile(r"\boutbox\.errors\.(\w+): (.+)")


@contextlib.contextmanager
def spark_errors() -> Iterator[None]:
    """Turn the errors of Spark inside the block into errors of this project; what a task raised is raised here."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise of_text(str(error)) from error


def of_text(text: str) -> OutboxError:
    """Return the error of ours that a text of Spark tells of, or one that says how the text begins."""
    if found := _OURS.findall(text):
        name, sentence = found[-1]
        kind = getattr(errors, name, OutboxError)
        made: OutboxError = kind(sentence.strip())
        return made
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The last line of a Python stack trace says what happened, of Java's the first one after what was called.
    python = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception): ", line)]
    java = [line[2:] for line in lines if re.match(r": [\w.$]+: ", line)]
    reason = python[-1] if python else [*java, *lines, "no reason is given"][0]
    return OutboxError(f"Spark: {reason[:500]}")
