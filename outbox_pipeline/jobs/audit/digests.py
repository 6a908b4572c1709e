"""The digest of a message, computed for tasks and for received messages, so that the audit does not shuffle bodies."""

from pyspark.sql import Column
from pyspark.sql import functions as f

from outbox.message import TASK_ID_ATTRIBUTE

#: Attributes that were not registered, because the relay, Pub/Sub or a subscription adds them: the task ID; the
#: ordering key, which subscriptions write into the attributes; Google's own and tracing attributes; the attributes of a
#: dead-letter topic, see https://cloud.google.com/pubsub/docs/handling-failures#track-delivery-attempts
_ADDED = (TASK_ID_ATTRIBUTE, "ordering_key")
_ADDED_PREFIXES = ("goog", "CloudPubSubDeadLetter")


def digest(attributes: Column, data: Column) -> Column:
    """Return the digest of a message as an int64, or NULL if the attributes are NULL. NULL data is left out.

    The hash finds corruption, not forgeries. 64 bits suffice, because each message is compared with its own task only.
    """
    entries = f.sort_array(f.map_entries(f.map_filter(attributes, _is_registered)))
    return f.when(attributes.isNotNull(), f.xxhash64(entries, data))


def _is_registered(name: Column, _: Column) -> Column:
    added = name.isin(*_ADDED)
    for prefix in _ADDED_PREFIXES:
        added |= name.startswith(prefix)
    return ~added
