"""The report of an audit as one HTML page without scripts, network requests or other files."""

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, Template, Undefined
from markupsafe import Markup

from outbox.cli.output import cell
from outbox.shared.times import spoken
from outbox_pipeline.jobs.audit.plots import STATES, latencies, tasks_per_hour

#: Max rows of the table of topics, and max plots of topics. summary.json has all topics.
MOST_ROWS, MOST_PLOTS = 200, 8

#: The counts of the summary in groups, with their meanings.
GROUPS = {
    "Tasks of the window": {
        "delivered": "Received in time.",
        "late": "Received, but first published more than the grace period after the end of the window.",
        "lost": "Sent, and not received within the grace period.",
        "arriving": "Sent less than the grace period before the end of the received messages, and not received yet.",
        "pending": "Not sent yet.",
        "dead": "Not sent, and will not be retried automatically.",
    },
    "Messages of these tasks": {
        "messages": "Different messages that were received for tasks of the window.",
        "republished": "Further messages of a task, after its first. Delivery is at least once.",
        "redelivered": "Repeated deliveries of a message by Pub/Sub.",
        "mismatched": "Messages whose attributes, or data if the files contain it, differ from those of their task.",
        "out_of_order": "Tasks that were published before an earlier task of their ordering key.",
    },
    "Other messages": {
        "unknown": "Messages with a task ID that does not exist.",
        "foreign": "Deliveries without a task ID, from another publisher.",
        "unreadable": "Deliveries without a valid message ID, publish time or attributes.",
    },
}
#: The same with --inbox.
EFFECTS = {
    "Effects of the consumer": {
        "applied": "Received, and recorded in the inbox within the grace period.",
        "not_applied": "Received more than the grace period ago, and not recorded in the inbox.",
        "applied_late": "Recorded more than the grace period after the first message was published.",
        "unregistered": "Records of task IDs that do not exist.",
    }
}
#: Counts that should be 0, the most serious first.
_WRONG = ("lost", "not_applied", "mismatched", "unknown", "unregistered", "out_of_order", "dead", "unreadable")
#: What to do about each class of samples, in the order of the page.
_ADVICE = {
    "lost": "If all tasks of a topic are lost, its subscription is probably missing from the files. Otherwise send the "
    "tasks again with <code>outbox retry ID</code>, or all of them with <code>jq -r .task_id "
    "findings/class=lost/*.json | outbox retry --ids-file -</code>. Replay purged tasks from the archive.",
    "not_applied": "The subscriber acknowledged the task without its effect, or has not processed it yet. Look at the "
    "dead-letter topic and the log of the subscriber. Send the tasks again with <code>outbox retry ID</code>.",
    "unregistered": "The task was deleted and is not in the archive, or another database publishes to the topic.",
    "mismatched": "The message or the row was changed after the publish, or another program publishes with this ID. "
    "Compare <code>outbox show ID</code> with the received message.",
    "unknown": "The task was deleted and is not in the archive, or another program or database publishes to the topic.",
    "out_of_order": "Check that the subscription has message ordering enabled, and that only one database publishes to "
    "the key. overtaken_at is the publish time of the earlier task.",
    "dead": "<code>outbox list --state dead</code> shows the reasons. After you have fixed them, run <code>outbox "
    "retry --state dead</code>. <code>outbox discard</code> deletes dead tasks.",
    "late": "These tasks were received. The plots show when they were late. Check the workers at that time.",
    "applied_late": "These tasks have their effect. The subscriber was behind, or its function had failed before.",
    "republished": "Subscribers must ignore a task ID that they have already handled. Many republished tasks mean that "
    "workers are killed or commits fail.",
    "redelivered": "Subscribers must accept repeated messages. Many redeliveries mean that acknowledgements are late.",
    "pending": "No action, if workers are running. <code>outbox status</code> shows the backlog and its age.",
    "arriving": "No action. An audit with a later <code>--until</code> includes these tasks.",
}
_SAMPLED = ("task_id", "topic", "created_at", "sent_at", "first_at", "overtaken_at", "processed_at", "messages")
_LATENCIES = ("p50", "p95", "p99", "max")


def page(summary: Mapping[str, Any]) -> str:
    """Return the HTML page of a summary, with times as RFC 3339 texts or datetimes and latencies in seconds."""
    by_topic = summary["by_topic"]
    largest = sorted(by_topic, key=lambda row: (-row["tasks"], row["topic"]))
    received = [row["topic"] for row in largest if row["max"] is not None]
    plots = latencies(summary["by_hour_and_topic"], received[:MOST_PLOTS])

    def tone(name: str, counts: Mapping[str, Any] = summary) -> str:
        return "zero" if not counts[name] else "wrong" if name in _WRONG else ""

    return _template().render(
        summary=summary,
        facts=_facts(summary),
        groups=GROUPS | (EFFECTS if summary.get("inbox") else {}),
        states=STATES,
        counts=("tasks", *STATES, "mismatched"),
        wrong=_WRONG,
        tone=tone,
        hours=Markup(tasks_per_hour(summary["by_hour"])) if summary["by_hour"] else "",  # noqa: S704 - no text from data
        received=len(received),
        plots=[(topic, Markup(plot)) for topic, plot in zip(received, plots, strict=False)],  # noqa: S704 - the same
        topics=sorted(by_topic, key=lambda row: (-row["lost"], -row["tasks"], row["topic"])),
        most_rows=MOST_ROWS,
        latencies=_LATENCIES,
        classes={name: Markup(advice) for name, advice in _ADVICE.items()},  # noqa: S704 - constants
        sampled=_SAMPLED,
    )


@cache
def _template() -> Template:
    environment = Environment(loader=PackageLoader(__package__, "."), autoescape=True, finalize=_cell)
    environment.filters |= {"time": _time, "seconds": _seconds, "words": lambda name: name.replace("_", " ")}
    return environment.get_template("report.html.jinja")


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, Any]]:
    since = _time(summary["since"]) if summary["since"] else "the first task"
    return [
        ("Database", summary["database"]),
        ("Tasks created", f"from {since} and before {_time(summary['until'])}"),
        ("Tasks and messages are known until", _time(summary["horizon"])),
        ("Unknown IDs are reported for messages before", _time(summary["known_until"])),
        ("Grace period", spoken(summary["grace_seconds"])),
        ("Clock skew", spoken(summary["clock_skew_seconds"])),
        ("Source of tasks", summary["tasks_from"]),
        ("Source of messages", summary["received_from"]),
        (
            "Compared",
            "data and attributes" if summary["data_compared"] else "attributes only, the messages have no data",
        ),
        *([("Consumer", summary["inbox"])] if summary.get("inbox") else []),
        ("Duration of the audit", spoken(summary["seconds"])),
    ]


def _cell(value: object) -> object:
    """Format a value. Control characters become escapes, because XML does not allow them."""
    if isinstance(value, Markup):
        return value
    return "" if isinstance(value, Undefined) else cell(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "\u2013"
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _time(value: str | datetime | None) -> str:
    return cell(value).replace(".000000Z", "Z")
