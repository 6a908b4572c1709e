"""Pauses and limits of topics in a database, and which topics it knows: for the commands.

A topic is its name as tasks have it in their column Topic. Nothing here reads a task's row, only seeks in the index.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.cloud.spanner_v1 import KeySet, param_types
from google.cloud.spanner_v1.database import Database

from outbox.schema import QUERY_SECONDS, limits, service_errors, shard_count

_TABLE = "AsynchronousTaskTopics"
_INDEX = "AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksToSend}"
_TAG = "outbox-topics"

#: Seconds in which a transaction that Spanner aborts is run again, and between two runs if it names no pause.
_ABORTED_SECONDS, _AGAIN_SECONDS = 10.0, 0.05

_WAITING = f"""
SELECT name FROM UNNEST(@topics) AS name, UNNEST(ARRAY(
  SELECT 1 FROM {_INDEX} WHERE Shard IN UNNEST(@shards) AND SentAt IS NULL AND Topic = name LIMIT 1))"""
# The next name in the order of the index: a seek for each shard, however many tasks wait.
_NEXT = f"""
SELECT MIN(name) FROM (
  SELECT MIN(Topic) AS name FROM {_TABLE} WHERE Topic > @after
  UNION ALL
  SELECT found FROM UNNEST(@shards) AS in_shard, UNNEST(ARRAY(
    SELECT Topic FROM {_INDEX}
    WHERE Shard = in_shard AND SentAt IS NULL AND Topic > @after
    ORDER BY Topic LIMIT 1)) AS found)"""
_PAUSED = f"SELECT Topic FROM {_TABLE} WHERE Paused ORDER BY Topic LIMIT @count"

_TYPES = {
    "topics": param_types.Array(param_types.STRING),
    "shards": param_types.Array(param_types.INT64),
    "after": param_types.STRING,
    "count": param_types.INT64,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """The pause and the limits of one topic. None: no limit."""

    Paused: bool = False
    RatePerSecond: float | None = None
    Burst: int | None = None
    MaxInFlight: int | None = None


_COLUMNS = tuple(field.name for field in dataclasses.fields(Control))


class TopicTable:
    """The rows of AsynchronousTaskTopics beside the unsent tasks. Every method raises NotReached or OutboxError."""

    def __init__(self, database: Database) -> None:
        """Look whether the tasks' table is there, and how many shards it has."""
        self._database = database
        self._shards = list(range(shard_count(database)))

    def rows(self, topics: Iterable[str]) -> set[str]:
        """Return those of `topics` that have a row."""
        keys = KeySet(keys=[[topic] for topic in topics])
        with service_errors(self._database.name), self._database.snapshot() as snapshot:
            rows = snapshot.read(_TABLE, ("Topic",), keys, request_options={"request_tag": _TAG}, **_limits())
            return {topic for (topic,) in rows}

    def waiting(self, topics: Iterable[str]) -> set[str]:
        """Return those of `topics` that have an unsent task: ready, due, scheduled or dead."""
        return {topic for (topic,) in self._query(_WAITING, topics=list(topics), shards=self._shards)}

    def known(self, count: int) -> list[str]:
        """Return the first `count` of all topics that have a row or an unsent task, sorted."""
        names: list[str] = []
        while len(names) < count:
            [[name]] = self._query(_NEXT, shards=self._shards, after=names[-1] if names else "")
            if name is None:
                break
            names.append(name)
        return names

    def paused(self, count: int) -> list[str]:
        """Return the first `count` of the paused topics, sorted."""
        return [topic for (topic,) in self._query(_PAUSED, count=count)]

    def change(self, topics: Sequence[str], values: Mapping[str, Any]) -> dict[str, Control]:
        """Write `values`, by column, to the rows of all `topics` in one transaction, and return what the rows are now.

        Rows that are missing are made; columns that are not named keep their values.
        """

        def work(transaction: Any) -> dict[str, Control]:
            keys = KeySet(keys=[[topic] for topic in topics])
            rows = transaction.read(
                _TABLE, ("Topic", *_COLUMNS), keys, request_options={"request_tag": _TAG}, **_limits()
            )
            before = {topic: Control(*row) for topic, *row in rows}
            after = {topic: dataclasses.replace(before.get(topic, Control()), **values) for topic in topics}
            # All columns, so that nothing depends on what an omitted one becomes.
            written = [(topic, *dataclasses.astuple(control)) for topic, control in after.items()]
            transaction.insert_or_update(_TABLE, ("Topic", *_COLUMNS), written)
            return after

        with service_errors(self._database.name):
            changed: dict[str, Control] = self._database.run_in_transaction(
                work, timeout_secs=_ABORTED_SECONDS, default_retry_delay=_AGAIN_SECONDS, transaction_tag=_TAG
            )
        return changed

    def _query(self, sql: str, **params: Any) -> list[list[Any]]:
        types = {name: _TYPES[name] for name in params}
        with service_errors(self._database.name), self._database.snapshot() as snapshot:
            return list(snapshot.execute_sql(sql, params, types, request_options={"request_tag": _TAG}, **_limits()))


def _limits() -> dict[str, Any]:
    return limits(QUERY_SECONDS)
