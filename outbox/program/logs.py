"""Logs on stderr: JSON for machines, one readable line on a terminal. Never a payload."""

import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any

from outbox import observing
from outbox.program.terminal import as_json, json_escaped, sentences


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with Datadog's standard attributes."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "status": record.levelname.lower(),
            "message": record.getMessage(),
            "logger.name": record.name,
            "logger.thread_name": record.threadName,
            "action": getattr(record, "action", None),
            **observing.trace_ids(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["error.kind"] = record.exc_info[0].__name__
            entry["error.message"] = str(record.exc_info[1])
            entry["error.stack"] = self.formatException(record.exc_info)
        return as_json(entry)


class TextFormatter(logging.Formatter):
    """Time in UTC, level, sentence."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%SZ")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the base class
        """Return the line. IDs and topics are untrusted text, and must not look like further lines."""
        record.message = json_escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the same
        """Return the stack trace, indented."""
        return sentences(f"  {super().formatException(ei)}")


def configure(log_format: str = "auto", level: str = "info") -> None:
    """Send all logs to stderr; `auto` is text on a terminal, else JSON. A record may carry further `fields`."""
    as_text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("outbox", "outbox_pipeline", "publishworker"):
        logging.getLogger(name).setLevel(level.upper())
    # It logs attributes of messages that are not a trace context.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    # It logs a stack trace for each call without credentials. The publisher logs them.
    logging.getLogger("grpc._plugin_wrapping").setLevel(logging.CRITICAL)
