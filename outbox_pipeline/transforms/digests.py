"""One digest of a message on both sides, so that the audit moves no bodies: pure.

In Spark's own functions for what was received, in Python for what was registered, where the message is within Data. A
test holds the two together.
"""

from collections.abc import Mapping
from hashlib import sha256

from pyspark.sql import Column
from pyspark.sql import functions as f

from outbox.message import TASK_ID_ATTRIBUTE

#: Attributes that the relay, Pub/Sub or a subscription adds, and so are no part of what was registered: the id; those
#: of the service and of tracing; the ordering key, which subscriptions write among the attributes; those of a
#: dead-letter topic. https://cloud.google.com/pubsub/docs/handling-failures#track-delivery-attempts
_ADDED = (TASK_ID_ATTRIBUTE, "ordering_key")
_ADDED_PREFIXES = ("goog", "CloudPubSubDeadLetter")
#: Of 64 digits: a message is compared with that of its own task, not with all others. A number, since Spark groups
#: numbers faster than texts.
_DIGITS = 16


def digest(data: bytes | None, attributes: Mapping[str, str]) -> int:
    """Return the digest of a message, an int64; of its attributes alone if `data` is None."""
    text = b"-:" if data is None else b"%d:%b" % (len(data), data)
    if attributes:
        pairs = sorted(
            (name.encode(), value.encode())
            for name, value in attributes.items()
            if name not in _ADDED and not name.startswith(_ADDED_PREFIXES)
        )
        text += b"".join(b"%d:%b%d:%b" % (len(name), name, len(value), value) for name, value in pairs)
    return int.from_bytes(sha256(text).digest()[: _DIGITS // 2], signed=True)


def digested(data: str, attributes: str) -> Column:
    """Return the same of two columns: bytes, or NULL, and a map of texts."""
    body = f.coalesce(
        f.concat(f.encode(f.concat(f.octet_length(data).cast("string"), f.lit(":")), "UTF-8"), f.col(data)),
        f.lit(b"-:"),
    )
    kept = f.filter(f.map_entries(attributes), _is_kept)
    pairs = f.transform(f.array_sort(kept), lambda pair: f.concat(_sized(pair["key"]), _sized(pair["value"])))
    digits = f.substring(f.sha2(f.concat(body, f.encode(f.array_join(pairs, ""), "UTF-8")), 256), 1, _DIGITS)
    return f.conv(digits, 16, -10).cast("long")


def _is_kept(pair: Column) -> Column:
    name = pair["key"]
    kept = ~name.isin(*_ADDED)
    for prefix in _ADDED_PREFIXES:
        kept = kept & ~name.startswith(prefix)
    return kept


def _sized(text: Column) -> Column:
    return f.concat(f.octet_length(text).cast("string"), f.lit(":"), text)
