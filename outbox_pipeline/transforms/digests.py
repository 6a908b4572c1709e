"""One digest of a message on both sides, so that the audit moves no bodies: pure."""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import pandas as pd
from pyspark.sql import Column
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import DataType, LongType

from outbox.message import TASK_ID_ATTRIBUTE, parsed

#: Attributes that the relay, Pub/Sub or a subscription adds, and so are no part of what was registered: the id; those
#: of the service and of tracing; the ordering key, which subscriptions write among the attributes; those of a
#: dead-letter topic. https://cloud.google.com/pubsub/docs/handling-failures#track-delivery-attempts
_ADDED = frozenset((TASK_ID_ATTRIBUTE, "ordering_key"))
_ADDED_PREFIXES = ("goog", "CloudPubSubDeadLetter")
#: Bytes: a message is compared with that of its own task, not with all others. A number, since Spark moves and groups
#: numbers faster than texts.
_BYTES = 8


def digest(data: bytes | None, attributes: Mapping[str, str]) -> int:
    """Return the digest of a message, an int64; of its attributes alone if `data` is None."""
    # Each step of this is taken for each message twice; a protobuf map's items() takes three times as long.
    kept = [
        (name, attributes[name]) for name in attributes if name not in _ADDED and not name.startswith(_ADDED_PREFIXES)
    ]
    kept.sort()
    text = repr(kept).encode()
    body = b"-:" if data is None else b"%d:%b" % (len(data), data)
    return int.from_bytes(blake2b(body + text, digest_size=_BYTES).digest(), signed=True)


def in_python(function: Callable[..., Any], type_: DataType) -> Callable[..., Column]:
    """Return a function of columns that calculates in Python, of pandas' Series; other columns stay where they are."""
    declared: Any = pandas_udf
    # Not deterministic, which is to say: Spark must not do it twice where it could do it once.
    made: Callable[..., Column] = declared(function, type_).asNondeterministic()
    return made


def registered(data: str, *, bodies: bool) -> Column:
    """Return the digests of a column of tasks' Data, NULL of what is no message; without the data unless `bodies`."""
    return (_of_messages if bodies else _of_attributes)(data)


def _digests(tasks: pd.Series, *, bodies: bool) -> pd.Series:
    digests = []
    for data in tasks:
        message = parsed(data)  # the relay makes a task dead whose Data is no message
        digests.append(None if message is None else digest(message.data if bodies else None, message.attributes))
    return pd.Series(digests, dtype="Int64")


def _digests_of_messages(tasks: pd.Series) -> pd.Series:
    return _digests(tasks, bodies=True)


def _digests_of_attributes(tasks: pd.Series) -> pd.Series:
    return _digests(tasks, bodies=False)


_of_messages = in_python(_digests_of_messages, LongType())
_of_attributes = in_python(_digests_of_attributes, LongType())
