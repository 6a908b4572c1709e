"""Tells whether any unsent task is left to send, and of which topics. No turn of the relay needs this."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from outbox.table.controls import TopicControls, problems
from outbox.table.layouts import by_layout
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
    return bool(_read(store, relay_sql.ANY_TO_SEND, shards, topics))


def topics_in_use(store: SpannerStore) -> tuple[frozenset[str], frozenset[str]]:
    """Return the topics with pending or retrying tasks, and those with keys, by the first tasks of each shard.

    Raises StoreError.
    """
    shards = store.layouts[0].ids
    found = _read(store, relay_sql.TOPICS_IN_USE, shards, _unsent_topics(store, shards)[0])
    to_send = frozenset(topic for topic, is_left, _ in found if is_left)
    return to_send, frozenset(topic for topic, _, has_keys in found if has_keys)


def _unsent_topics(store: SpannerStore, shards: Collection[int]) -> tuple[frozenset[str], Mapping[str, TopicControls]]:
    known = frozenset[str]()
    while True:
        found = store.discover(tuple(shards), known)
        if not found.topics:
            return known, found.controls
        known |= found.topics


def _read(store: SpannerStore, statement: str, shards: Iterable[int], topics: Collection[str]) -> list[Any]:
    found: list[Any] = []
    for each in by_layout(shards if topics else ()):
        values = parameters({"shards": each.numbers, "topics": sorted(topics)})
        with store.reading() as snapshot:
            found += snapshot.execute_sql(each.sql(statement), **values, **store.request("outbox-unsent", READ_SECONDS))
    return found
