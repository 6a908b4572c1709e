"""The result of a job, for people, programs and Datadog."""

import dataclasses
from typing import Any

from outbox.base.times import spoken
from outbox.program.terminal import Escaped, as_json, cell
from publishworker.telemetry.metrics import PIPELINE_ROWS, PIPELINE_RUNS, Metrics

#: The fields of results that count rows.
_ROWS = (
    "registered", "existing", "repeated", "rejected", "written", "deleted", "replayed", "unsent", "resent", "missing",
    "delivered", "late", "lost", "unknown", "republished", "redelivered", "mismatched", "out_of_order",
    "cancelled_after_publish",
    "applied", "not_applied", "applied_late", "unregistered",
    "published", "refused", "already_published", "uncommitted", "became_dead",
)  # fmt: skip


def summary(job: str, result: Any, seconds: float, *, json: bool) -> Escaped:
    """Return the fields of a result, and the duration of the job, as one line of JSON, or one field per line."""
    values = dataclasses.asdict(result)
    if json:
        return as_json({"job": job, **values, "seconds": round(seconds, 3)})
    lines = {"job": job, **values, "seconds": spoken(seconds)}
    width = max(15, *map(len, lines))
    return Escaped(
        "\n".join(
            f"{name.replace('_', ' '):<{width}} {_shown(value)}" for name, value in lines.items() if value is not None
        )
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = [{"tasks": number, "topic": topic} for topic, number in value.items()]
    if isinstance(value, list):
        # One per line, indented to the column of values.
        return f"\n{'':<15} ".join("  ".join(cell(each) for each in row.values()) for row in value)
    return cell(value)


def record(metrics: Metrics, job: str, result: Any | None, ended_as: str) -> None:
    """Send metrics of the rows. For a failed job, only count the failure."""
    metrics.count(PIPELINE_RUNS, 1, job=job, result=ended_as)
    if result is None:
        return
    if getattr(result, "certificate", None):  # whose monitor notices a day without one
        metrics.count(PIPELINE_RUNS, 1, job="certificate", result="done")
    for name in _ROWS:
        if number := getattr(result, name, 0):
            metrics.count(PIPELINE_ROWS, number, job=job, outcome=name)
