"""Topic controls: pauses, limits, routes and retry policies, and the topics that a database has.

A topic is a value of the column Topic. Tasks are only read from the index. Each function raises NotReached or
OutboxError.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.base.values import listed, topic_name
from outbox.errors import OutboxError, SettingError
from outbox.program.channels import check_topic_exists
from outbox.program.settings import did_you_mean
from outbox.rows import counts_sql
from outbox.rows.backlog import COUNT_LIMIT, Count, count, ranges_of
from outbox.rows.task_table import SCAN_SECONDS, TaskTable, Transaction
from outbox.table.controls import CONTROLS_COLUMNS, CONTROLS_TABLE, FIELDS, NO_CONTROLS, TopicControls, flag, problems
from outbox.table.states import UNSENT
from outbox_admin import operations
from outbox_admin.operations import UNNAMED, Author
from outbox_admin.tasks import selected
from outbox_admin.tasks.selections import TaskSelection

_TAG = "outbox-topics"
#: What a person must know before a route changes.
ORDERED = "Subscribers of {} do not get the earlier messages of an ordering key, and order holds only within a topic"

#: The rows of some topics before and after a change. None: the table has no row.
Difference: TypeAlias = Mapping[str, tuple[TopicControls | None, TopicControls | None]]


def waiting(table: TaskTable, topics: Iterable[str]) -> set[str]:
    """Return the `topics` that have an unsent task: ready, due, scheduled or dead."""
    return {topic for (topic,) in table.query(counts_sql.TOPICS_WITH_UNSENT, _TAG, {"topics": list(topics)})}


def sent_lately(table: TaskTable) -> set[str]:
    """Return the topics of tasks sent in the last minute. At most COUNT_LIMIT tasks of each shard are read."""
    now = table.now()

    def query(statement: str, values: Mapping[str, Any]) -> list[list[Any]]:
        return table.query(statement, _TAG, {**values, "now": now}, seconds=SCAN_SECONDS)

    rows, _ = count(query, counts_sql.COUNT_SENT, ranges_of(table.shards), COUNT_LIMIT)
    return {row.topic for row in rows}


def unknown(table: TaskTable, topics: Iterable[str]) -> list[str]:
    """Return the `topics` that have no row, no unsent task, and no task sent in the last minute."""
    known = table.controls().keys() | waiting(table, topics)
    if not known.issuperset(topics):
        known |= sent_lately(table)
    return [topic for topic in topics if topic not in known]


@dataclasses.dataclass(frozen=True, slots=True)
class ControlsPreview:
    """What a change would do. `unsent` are the tasks of topics whose route changes, if that of one does."""

    difference: Difference
    unsent: Count | None = None
    #: Why it is unknown whether the destination of the route exists.
    unchecked: str | None = None


def preview(
    table: TaskTable, topics: Sequence[str], values: Mapping[str, Any] | None, *, exact: bool, force: bool = False
) -> ControlsPreview:
    """Check a `change`, and return what it would do. `force` does not ask Pub/Sub for the destination of a route."""
    unchecked = None if force or not values else check_destinations(table, [values.get("publish_to")])
    difference = change(table, "controls", topics, values, dry_run=True)
    routed = [topic for topic, rows in difference.items() if len({row and row.publish_to for row in rows}) == 2]
    if not routed:
        return ControlsPreview(difference, None, unchecked)
    now = table.now()
    wanted = (TaskSelection(state=state, topic=topic, as_of=now) for topic, state in itertools.product(routed, UNSENT))
    counts = [selected.count(table, each, exact=exact) for each in wanted]
    unsent = Count(sum(each.number for each in counts), any(each.at_least for each in counts))
    return ControlsPreview(difference, unsent, unchecked)


def check_destinations(
    table: TaskTable, topics: Iterable[str | None], *, otherwise: str = ", or pass --force"
) -> str | None:
    """Ask Pub/Sub whether topics exist. Return why that is unknown, or None. Raises OutboxError if one does not.

    The error says to create the topic, and what the caller can do `otherwise`.
    """
    names = (topic_name(topic, table.project) for topic in sorted({*filter(None, topics)}))
    found = (check_topic_exists(table.pubsub, name, otherwise) for name in names)
    return "; ".join(filter(None, found)) or None


def change(
    table: TaskTable,
    operation: str,
    topics: Sequence[str],
    values: Mapping[str, Any] | None,
    author: Author = UNNAMED,
    *,
    dry_run: bool = False,
) -> Difference:
    """Write `values`, by field, to the rows of all `topics` in one transaction, and return the difference.

    Missing rows are created, but a value of None or False needs
    a row. Other fields keep their values. Without `values`, the rows are deleted. The transaction also records the
    operation. With `dry_run` it checks the same and writes nothing.
    """

    def after(before: Mapping[str, TopicControls]) -> Mapping[str, TopicControls | None]:
        if not values or all(value is None or value is False for value in values.values()):
            _require_rows(before, topics)
        if values is None:
            return dict.fromkeys(topics)
        return {topic: dataclasses.replace(before.get(topic, NO_CONTROLS), **values) for topic in topics}

    return _write(table, operation, after, author, dry_run=dry_run)


def switch(
    table: TaskTable, operation: str, topics: Sequence[str], author: Author = UNNAMED, *, dry_run: bool = False
) -> Difference:
    """Pause or resume topics, or ask for a `probe`: one publish of each worker whose circuit of the topic is open."""
    values = {"probe_requested_at": table.now()} if operation == "probe" else {"paused": operation == "pause"}
    return change(table, operation, topics, values, author, dry_run=dry_run)


def apply(
    table: TaskTable, wanted: Mapping[str, Mapping[str, Any]], author: Author = UNNAMED, *, dry_run: bool = False
) -> Difference:
    """Replace the rows of these topics in one transaction, which records the difference. Return it.

    `wanted` has values by field. A field that a topic lacks gets its default, but a pause stays: it may be of an
    incident that the author of the values does not know. With `dry_run` it checks the same and writes nothing. Raises
    SettingError if an ID and its full name, which are one topic for Pub/Sub, have different controls.
    """
    by_full_name: dict[str, str] = {}
    for topic, values in wanted.items():
        other = by_full_name.setdefault(topic_name(topic, table.project), topic)
        if wanted[other] != values:
            raise SettingError(
                f"{other} and {topic} are the same Pub/Sub topic, but have different controls. Nothing was changed"
            )

    def after(before: Mapping[str, TopicControls]) -> Mapping[str, TopicControls | None]:
        rows = [(topic, before.get(topic, NO_CONTROLS), values) for topic, values in wanted.items()]
        return {
            topic: TopicControls(**{"paused": row.paused, **values}, probe_requested_at=row.probe_requested_at)
            for topic, row, values in rows
        }

    return _write(table, "controls", after, author, dry_run=dry_run)


def _write(
    table: TaskTable,
    operation: str,
    after: Callable[[Mapping[str, TopicControls]], Mapping[str, TopicControls | None]],
    author: Author,
    *,
    dry_run: bool,
) -> Difference:
    """Write the rows that `after` returns for all rows, and record the operation if it changes any."""
    tried: list[Difference] = []

    def work(transaction: Transaction) -> Difference:
        # All rows, with shared locks: a route depends on the routes of other topics.
        rows = transaction.read(CONTROLS_TABLE, CONTROLS_COLUMNS, KeySet(all_=True))
        before = {topic: TopicControls(*row) for topic, *row in rows}
        if tried and all(before.get(topic) == row for topic, (_, row) in tried[-1].items()):
            return tried[-1]  # the commit of the earlier attempt was not answered, and took effect
        difference = {topic: (before.get(topic), row) for topic, row in after(before).items()}
        _check(table, before, difference)
        changed = {topic: pair for topic, pair in difference.items() if pair[0] != pair[1]}
        if changed and not dry_run:
            tried.append(difference)
            for topic, (_, row) in changed.items():
                if row is None:
                    transaction.delete(CONTROLS_TABLE, KeySet(keys=[[topic]]))
                else:  # with all columns, so that the result does not depend on the treatment of omitted ones
                    transaction.insert_or_update(CONTROLS_TABLE, CONTROLS_COLUMNS, [(topic, *dataclasses.astuple(row))])
            operations.record(transaction, table, operation, recorded(changed), author, FinishedAt=COMMIT_TIMESTAMP)
        return difference

    return table.transact(_TAG, work)


def _require_rows(before: Mapping[str, TopicControls], topics: Iterable[str]) -> None:
    if missing := [topic for topic in topics if topic not in before]:
        paused = [topic for topic, row in before.items() if row.paused]
        hints = "".join(did_you_mean(topic, paused) for topic in missing)
        raise OutboxError(
            f"cannot change {listed(missing)}: no row in AsynchronousTaskTopics. Nothing was changed.{hints} "
            f"Paused topics: {listed(paused) or 'none'}"
        )


def _check(table: TaskTable, before: Mapping[str, TopicControls], difference: Difference) -> None:
    """Raise SettingError if the change makes a row invalid, and OutboxError if a route leads to a routed topic."""
    after = {topic: row for topic, (_, row) in difference.items() if row}
    for topic, row in after.items():
        found = problems(row, flag)
        if found and not problems(before.get(topic, NO_CONTROLS)):
            raise SettingError(f"topic {topic}: {'; '.join(found.values())}. Nothing was changed")
    routes = {
        topic_name(topic, table.project): topic_name(row.publish_to, table.project)
        for topic, row in {**before, **after}.items()
        if row.publish_to is not None
    }
    changed = {
        topic_name(topic, table.project)
        for topic, row in after.items()
        if row.publish_to not in (None, before.get(topic, NO_CONTROLS).publish_to)
    }
    for topic, to in routes.items():
        if to in routes and not changed.isdisjoint((topic, to)):
            further = "itself" if to == topic else f"{to}, which is routed to {routes[to]}"
            raise OutboxError(
                f"{topic} would be routed to {further}. A worker follows one route only, so the topic at its end must "
                "have none. Nothing was changed"
            )


def recorded(difference: Difference) -> dict[str, Any]:
    """Return a difference as the record has it: for each field that changes, the values before and after."""
    return {
        "topics": {
            topic: {
                name: [getattr(row, name, None) for row in rows]
                for name in FIELDS
                if getattr(rows[0], name, None) != getattr(rows[1], name, None)
            }
            for topic, rows in difference.items()
        }
    }
