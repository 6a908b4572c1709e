"""One digest of a message on both sides, so that the audit moves no bodies: pure."""

from pyspark.sql import Column
from pyspark.sql import functions as f

from outbox.message import TASK_ID_ATTRIBUTE

#: Attributes that the relay, Pub/Sub or a subscription adds, and so are no part of what was registered: the id; the
#: ordering key, which subscriptions write among the attributes; those of the service and of tracing; those of a
#: dead-letter topic. https://cloud.google.com/pubsub/docs/handling-failures#track-delivery-attempts
_ADDED = (TASK_ID_ATTRIBUTE, "ordering_key")
_ADDED_PREFIXES = ("goog", "CloudPubSubDeadLetter")


def digest(attributes: Column, data: Column) -> Column:
    """Return the digest of a message, an int64; NULL without attributes, and of the attributes alone without data.

    Not one that withstands people: a message is compared with that of its own task, not with all others.
    """
    entries = f.sort_array(f.map_entries(f.map_filter(attributes, _is_registered)))
    return f.when(attributes.isNotNull(), f.xxhash64(entries, data))


def _is_registered(name: Column, _: Column) -> Column:
    added = name.isin(*_ADDED)
    for prefix in _ADDED_PREFIXES:
        added |= name.startswith(prefix)
    return ~added
