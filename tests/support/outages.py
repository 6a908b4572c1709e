"""The costs of an outage: recorded attempts, logged lines, CPU."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from google.cloud.spanner_v1.database import Database

from tests.support.processes import Process
from tests.support.pubsub_server import accept
from tests.support.spanner import count
from tests.support.waiting import eventually

#: Seconds between two checks while an outage lasts.
CHECK_SECONDS = 0.5


def lasting(seconds: float, act: Callable[[], object] = lambda: None) -> None:
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        act()
        next_check = min(now + CHECK_SECONDS, end)
        eventually(lambda at=next_check: time.monotonic() >= at, seconds=CHECK_SECONDS + 1)  # type: ignore[misc]  # a default of a lambda


def seconds_until(condition: Callable[[], Any], seconds: float, message: str) -> float:
    begin = time.monotonic()
    eventually(condition, seconds=seconds, message=message)
    return time.monotonic() - begin


def recorded(database: Database) -> int:
    return count(database, "Attempts > 0 OR LastError IS NOT NULL OR AvailableAt IS NOT NULL")


def log_lines(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.stderr.splitlines()]


def log_count(process: Process, action: str) -> int:
    return sum(line["action"] == action for line in log_lines(process))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def hang(request: Any, context: grpc.ServicerContext) -> Any:
    given_up = threading.Event()
    if context.add_callback(given_up.set):
        given_up.wait()
    return accept(request, context)
