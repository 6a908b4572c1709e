"""Topic controls: pauses, limits, routes and retry policies, and the topics that a database has.

A topic is a value of the column Topic. Tasks are only read from the index. Each function raises NotReached or
OutboxError.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.admin import operations, statements
from outbox.admin.backlog import COUNT_LIMIT, count, ranges_of
from outbox.admin.operations import UNNAMED, Author
from outbox.admin.table import SCAN_SECONDS, TaskTable, Transaction
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import PubSubSettings
from outbox.table.controls import problems
from outbox.table.statements import CONTROL_COLUMNS, CONTROLS

_TABLE = "AsynchronousTaskTopics"
_TAG = "outbox-topics"


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """The controls of one topic, by column. None means no limit, no route, or the retry policy of the worker."""

    Paused: bool = False
    RatePerSecond: float | None = None
    Burst: int | None = None
    MaxInFlight: int | None = None
    PublishTo: str | None = None
    MaxAttempts: int | None = None
    BackoffInitialSeconds: float | None = None
    BackoffMaxSeconds: float | None = None
    DeadAfterSeconds: float | None = None


#: The controls of a topic before and after a change. None: the table has no row.
Difference: TypeAlias = Mapping[str, tuple[Control | None, Control | None]]


def controls(table: TaskTable) -> dict[str, Control]:
    """Return all rows by topic."""
    return {topic: Control(*row) for topic, *row in table.query(CONTROLS, _TAG)}


def waiting(table: TaskTable, topics: Iterable[str]) -> set[str]:
    """Return the `topics` that have an unsent task: ready, due, scheduled or dead."""
    values = {"topics": list(topics), "shards": list(table.shards)}
    return {topic for (topic,) in table.query(statements.TOPICS_WITH_UNSENT, _TAG, values)}


def sent_lately(table: TaskTable) -> set[str]:
    """Return the topics of tasks sent in the last minute. At most COUNT_LIMIT tasks of each shard are read."""
    now = table.now()

    def query(statement: str, **values: Any) -> list[list[Any]]:
        return table.query(statement, _TAG, values | {"now": now}, seconds=SCAN_SECONDS)

    rows, _ = count(query, statements.COUNT_SENT, ranges_of(table), COUNT_LIMIT)
    return {row.topic for row in rows}


def unknown(table: TaskTable, topics: Iterable[str]) -> list[str]:
    """Return the `topics` that have no row, no unsent task, and no task sent in the last minute."""
    known = controls(table).keys() | waiting(table, topics)
    if not known.issuperset(topics):
        known |= sent_lately(table)
    return [topic for topic in topics if topic not in known]


def check_destination(table: TaskTable, topic: str) -> str | None:
    """Ask Pub/Sub whether a topic exists. Return why that is unknown, or None. Raises OutboxError if it does not."""
    from outbox.program.pubsub import check_topic  # noqa: PLC0415 - imports the client

    _, project, _, instance, _, database = table.name.split("/")
    settings = PubSubSettings.read({"project": project, "instance": instance, "database": database})
    return check_topic(settings, full_name(topic, project))


def change(
    table: TaskTable,
    operation: str,
    topics: Sequence[str],
    values: Mapping[str, Any],
    author: Author = UNNAMED,
    *,
    dry_run: bool = False,
) -> dict[str, Control]:
    """Write `values`, by column, to the rows of all `topics` in one transaction, and return the new rows.

    Missing rows are created. Columns that are not in `values` keep their values. The transaction also records the
    `operation`: pause, resume, limit, route or policy. With `dry_run` it checks the same and writes nothing.
    """

    def work(transaction: Transaction) -> dict[str, Control]:
        before = _read(transaction)
        after = {topic: dataclasses.replace(before.get(topic, Control()), **values) for topic in topics}
        _check(table, before, after)
        if not dry_run:
            _write(transaction, after)
            selection = {"topics": list(topics), "values": dict(values)}
            operations.record(transaction, table, operation, selection, author, FinishedAt=COMMIT_TIMESTAMP)
        return after

    return table.transact(_TAG, work)


def apply(
    table: TaskTable, wanted: Mapping[str, Control], author: Author = UNNAMED, *, dry_run: bool = False
) -> Difference:
    """Replace the rows of these topics in one transaction, which records the difference. Return it.

    With `dry_run` it checks the same and writes nothing. Raises SettingError if an ID and its full name, which are one
    topic for Pub/Sub, have different controls.
    """
    by_full_name: dict[str, str] = {}
    for topic, control in wanted.items():
        other = by_full_name.setdefault(full_name(topic, table.project), topic)
        if wanted[other] != control:
            raise SettingError(
                f"{other} and {topic} are the same Pub/Sub topic, but have different controls. Nothing was changed"
            )

    def work(transaction: Transaction) -> Difference:
        before = _read(transaction)
        after = {topic: control for topic, control in wanted.items() if before.get(topic) != control}
        _check(table, before, after)
        difference = {topic: (before.get(topic), control) for topic, control in after.items()}
        if after and not dry_run:
            _write(transaction, after)
            operations.record(transaction, table, "apply", _recorded(difference), author, FinishedAt=COMMIT_TIMESTAMP)
        return difference

    return table.transact(_TAG, work)


def forget(table: TaskTable, topic: str, author: Author = UNNAMED) -> None:
    """Delete the row of a topic, and record what it was. Raises OutboxError if there is none."""

    def work(transaction: Transaction) -> None:
        before = _read(transaction)
        if topic not in before:
            raise OutboxError(f"topic {topic!r} has no row in AsynchronousTaskTopics. Nothing was changed")
        transaction.delete(_TABLE, KeySet(keys=[[topic]]))
        selection = _recorded({topic: (before[topic], None)})
        operations.record(transaction, table, "forget", selection, author, FinishedAt=COMMIT_TIMESTAMP)

    table.transact(_TAG, work)


def _read(transaction: Transaction) -> dict[str, Control]:
    """Return all rows, with shared locks: a route depends on the routes of other topics."""
    return {topic: Control(*row) for topic, *row in transaction.read(_TABLE, CONTROL_COLUMNS, KeySet(all_=True))}


def _write(transaction: Transaction, after: Mapping[str, Control]) -> None:
    """Write rows, with all columns, so that the result does not depend on the treatment of omitted ones."""
    rows = [(topic, *dataclasses.astuple(control)) for topic, control in after.items()]
    transaction.insert_or_update(_TABLE, CONTROL_COLUMNS, rows)


def _check(table: TaskTable, before: Mapping[str, Control], after: Mapping[str, Control]) -> None:
    """Raise SettingError if the change makes a row invalid, and OutboxError if a route leads to a routed topic."""
    for topic, control in after.items():
        found = problems(dataclasses.asdict(control))
        if found and not problems(dataclasses.asdict(before.get(topic, Control()))):
            texts = "; ".join(f"{column} {text}" for column, text in found.items())
            raise SettingError(f"topic {topic}: {texts}. Nothing was changed")
    routes = {
        full_name(topic, table.project): full_name(control.PublishTo, table.project)
        for topic, control in {**before, **after}.items()
        if control.PublishTo is not None
    }
    changed = {
        full_name(topic, table.project)
        for topic, control in after.items()
        if control.PublishTo not in (None, before.get(topic, Control()).PublishTo)
    }
    for topic, to in routes.items():
        if to in routes and not changed.isdisjoint((topic, to)):
            further = "itself" if to == topic else f"{to}, which is routed to {routes[to]}"
            raise OutboxError(
                f"{topic} would be routed to {further}. A worker follows one route only, so the topic at its end must "
                "have none. Nothing was changed"
            )


def full_name(topic: str, project: str) -> str:
    """Return the full name of a topic. An ID is a topic of `project`."""
    return topic if topic.startswith("projects/") else f"projects/{project}/topics/{topic}"


def _recorded(difference: Difference) -> dict[str, Any]:
    """Return a difference as the record has it: for each column that changes, the values before and after."""
    return {
        "topics": {
            topic: {
                field.name: [getattr(control, field.name, None) for control in controls]
                for field in dataclasses.fields(Control)
                if getattr(controls[0], field.name, None) != getattr(controls[1], field.name, None)
            }
            for topic, controls in difference.items()
        }
    }
