"""Lines of the log: their format, and the limit on repeated ones."""

import json
import logging
import sys
import time
from datetime import UTC, datetime

import pytest

from outbox.program.logs import JsonFormatter, TextFormatter
from publishworker.log import ThrottledLog


def test_a_log_line_is_one_json_object_without_empty_fields() -> None:
    record = logging.LogRecord("publishworker", logging.WARNING, __file__, 1, "%d tasks\nfailed", (3,), None)
    record.action = "delivery_failed"
    line = JsonFormatter().format(record)
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["status"], entry["message"], entry["action"]) == ("warning", "3 tasks\nfailed", "delivery_failed")
    assert entry["logger.name"] == "publishworker"
    try:
        1 // 0  # noqa: B018 - raises
    except ZeroDivisionError:
        record.exc_info = sys.exc_info()
    entry = json.loads(JsonFormatter().format(record))
    assert entry["error.kind"] == "ZeroDivisionError"
    assert "1 // 0" in entry["error.stack"]


def test_the_time_of_a_text_line_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the times that commands print."""
    record = logging.LogRecord("outbox", logging.WARNING, "", 0, "late", (), None)
    record.created = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        line = TextFormatter().format(record)
    time.tzset()
    assert line == "03:04:05Z WARNING late"


def test_a_text_line_is_one_line() -> None:
    record = logging.LogRecord("publishworker", logging.INFO, "", 0, "task %s", ("a\n12:00:00 CRITICAL \x1b[2J",), None)
    line = TextFormatter().format(record)
    assert line.endswith("task a\\n12:00:00 CRITICAL \\u001b[2J")
    assert line.isprintable()


def test_a_repeated_warning_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Another topic or reason is another warning."""
    seconds = [0.0]
    throttled = ThrottledLog(lambda: seconds[0])
    for now in (0.0, 0.0, 59.9, 60.0, 61.0):
        seconds[0] = now
        throttled.log("delivery_failed", "orders", f"orders fail at {now:g}")
        throttled.log("delivery_failed", "invoices", "invoices fail", max_lines=2)
    assert [line for line in caplog.messages if "orders" in line] == ["orders fail at 0", "orders fail at 60"]
    assert caplog.messages.count("invoices fail") == 4
