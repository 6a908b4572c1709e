"""Logs on stderr: JSON for machines, one readable line on a terminal. Never a payload."""

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from outbox import observing
from outbox.program import terminal
from outbox.program.terminal import as_json, json_escaped, sentences

_log = logging.getLogger("outbox")
#: The SeverityNumber of OpenTelemetry for each level.
_NUMBERS = {"DEBUG": 5, "INFO": 9, "WARNING": 13, "ERROR": 17, "CRITICAL": 21}


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the attributes of Datadog, Google Cloud and OpenTelemetry.

    https://docs.datadoghq.com/logs/log_configuration/attributes_naming_convention
    https://docs.cloud.google.com/logging/docs/structured-logging
    https://opentelemetry.io/docs/specs/otel/logs/data-model
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, object] = getattr(record, "fields", {})
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        entry: dict[str, object] = {
            "timestamp": at,
            "time": at,
            "status": record.levelname.lower(),
            "severity": record.levelname,
            "severity_number": _NUMBERS.get(record.levelname, 0),
            "message": record.getMessage(),
            "logger.name": record.name,
            "logger.thread_name": record.threadName,
            "action": getattr(record, "action", None),
            **({} if "trace_id" in fields else observing.trace_ids()),
            **fields,
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["error.kind"] = record.exc_info[0].__name__
            entry["error.message"] = str(record.exc_info[1])
            entry["error.stack"] = self.formatException(record.exc_info)
        if trace := entry.get("trace_id"):
            project = os.environ.get("GOOGLE_CLOUD_PROJECT") or os.environ.get("OUTBOX_PROJECT")
            entry["logging.googleapis.com/trace"] = f"projects/{project}/traces/{trace}" if project else trace
        if span := entry.get("span_id"):
            entry["logging.googleapis.com/spanId"] = span
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


def begin(arguments: Sequence[str], *, is_service: bool) -> None:
    """Let the messages of a program be log lines if its log is JSON. Its settings are not read yet, and may be wrong.

    The log of a service is JSON unless it is on a terminal. Other commands write sentences unless JSON is wanted.
    """
    given = "=".join(arguments).partition("--log-format=")[2].partition("=")[0]
    log_format = given or os.environ.get("OUTBOX_LOG_FORMAT") or ("auto" if is_service else "text")
    terminal.as_log_line = _message if _is_json(log_format) else None


def _is_json(log_format: str) -> bool:
    return log_format == "json" or (log_format != "text" and not sys.stderr.isatty())


def _message(program: str, level: int, text: str) -> str:
    record = logging.LogRecord(program, level, "", 0, text, None, None)
    record.action = "message"
    return JsonFormatter().format(record)


def configure(log_format: str = "auto", level: str = "info") -> None:
    """Send all logs to stderr; `auto` is text on a terminal, else JSON. A record may carry further `fields`.

    Also the warnings of packages, and the exceptions that end this program, one of its threads or a callback.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if _is_json(log_format) else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = lambda *error: _log_uncaught("The program ended", error)
    threading.excepthook = lambda given: _log_uncaught(f"Thread {given.thread and given.thread.name} ended", given[:3])
    sys.unraisablehook = lambda given: _log_uncaught(
        "A callback failed", (given.exc_type, given.exc_value, given.exc_traceback)
    )
    for name in ("outbox", "outbox_pipeline", "publishworker"):
        logging.getLogger(name).setLevel(level.upper())
    # It logs attributes of messages that are not a trace context.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    # It logs a stack trace for each call without credentials. The publisher logs them.
    logging.getLogger("grpc._plugin_wrapping").setLevel(logging.CRITICAL)


def _log_uncaught(what: str, error: Any) -> None:
    """Log an exception that nothing has caught, except a request to end the thread or the program."""
    if not issubclass(error[0], (SystemExit, KeyboardInterrupt)):
        _log.critical("%s with an unexpected error: %s", what, error[1], exc_info=error, extra={"action": "uncaught"})
