"""Task IDs that derive from the registered values, so that registering the same values again adds no task.

An id is the uuid5 of a name, which is put together from texts as netstrings (`5:order`), so that no two lists of texts
have the same name. Applications have it as `task_id`, DataFrames as `uuid5` of `named`.
"""

from collections.abc import Sequence
from uuid import UUID, uuid5

from pyspark.sql import Column
from pyspark.sql import functions as f

#: The namespace of all ids that are made of business keys.
NAMESPACE = UUID("3b0c7e0e-9b50-5d3c-8f43-6d6e2a6d1c55")


def task_id(topic: str, *key: str) -> str:
    """Return the id that `register` gives to a row of that topic with these values in its key columns."""
    name = "".join(f"{len(part.encode())}:{part}" for part in (topic, *key))
    return str(uuid5(NAMESPACE, name))


def named(parts: Sequence[Column]) -> Column:
    """Return the name of texts; NULL is a name of its own, unlike all texts."""
    each = [f.coalesce(f.concat(f.octet_length(part).cast("string"), f.lit(":"), part), f.lit("-")) for part in parts]
    return f.concat(*each)


def as_uuid5(name: Column) -> Column:
    """Return the uuid5 of a name (RFC 4122, 4.3), as Spark's own functions calculate it."""
    digest = f.sha1(f.concat(f.unhex(f.lit(NAMESPACE.hex)), f.encode(name, "UTF-8")))
    variant = f.translate(f.substring(digest, 17, 1), "0123456789abcdef", "89ab89ab89ab89ab")
    return f.concat(
        f.substring(digest, 1, 8),
        f.lit("-"),
        f.substring(digest, 9, 4),
        f.lit("-5"),
        f.substring(digest, 14, 3),
        f.lit("-"),
        variant,
        f.substring(digest, 18, 3),
        f.lit("-"),
        f.substring(digest, 21, 12),
    )
