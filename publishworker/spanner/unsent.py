"""Tells whether any unsent task is left to send, and of which topics. No turn of the relay needs this."""

from collections.abc import Collection, Iterable, Mapping

from outbox.table.controls import TopicControls, problems
from outbox.table.ddl import by_layout
from outbox.table.shared_sql import parameters
from publishworker.spanner import relay_sql
from publishworker.spanner.store import READ_SECONDS, SpannerStore


def any_to_send(store: SpannerStore, shards: Iterable[int] | None = None, *, misrouted: bool = False) -> bool:
    """Tell whether `shards`, or all, have a pending or retrying task that workers may send. Raises StoreError.

    They hold the tasks of paused topics, and of topics with an invalid route. With `misrouted`, tell whether there is
    such a task in a topic with an invalid route that is not paused.
    """
    shards = store.layouts[0].ids if shards is None else tuple(shards)
    topics, controls = _unsent_topics(store, shards)
    paused = {topic for topic, row in controls.items() if row.paused}
    invalid = {topic for topic, row in controls.items() if problems(TopicControls(publish_to=row.publish_to))}
    topics = (topics & invalid if misrouted else topics - invalid) - paused
    return bool(_topics_to_send(store, shards, topics))


def topics_to_send(store: SpannerStore) -> dict[str, bool]:
    """Return the topics with pending or retrying tasks, and whether the first of these have keys. Raises StoreError."""
    shards = store.layouts[0].ids
    return _topics_to_send(store, shards, _unsent_topics(store, shards)[0])


def _unsent_topics(store: SpannerStore, shards: Collection[int]) -> tuple[frozenset[str], Mapping[str, TopicControls]]:
    known = frozenset[str]()
    while True:
        found = store.discover(tuple(shards), known)
        if not found.topics:
            return known, found.controls
        known |= found.topics


def _topics_to_send(store: SpannerStore, shards: Iterable[int], topics: Collection[str]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for each in by_layout(shards if topics else ()):
        values = parameters({"shards": each.numbers, "topics": sorted(topics)})
        request = store.request("outbox-unsent", READ_SECONDS)
        with store.reading() as snapshot:
            found |= dict(map(tuple, snapshot.execute_sql(each.sql(relay_sql.TOPICS_TO_SEND), **values, **request)))
    return found
