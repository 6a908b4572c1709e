"""Task IDs that derive from the registered values, so that registering the same values again adds no task.

An ID is the uuid5 of a name. The name is a list of texts, encoded as netstrings (`5:order`), so two different lists
never have the same name. Applications call `task_id`. DataFrames use `as_uuid5` of `named`.
"""

from collections.abc import Sequence
from uuid import UUID, uuid5

from pyspark.sql import Column
from pyspark.sql import functions as f

from outbox.base.values import plain

#: The namespace of all derived IDs.
NAMESPACE = UUID("3b0c7e0e-9b50-5d3c-8f43-6d6e2a6d1c55")


def task_id(topic: str, *key: str) -> str:
    """Return the ID that `register` gives a row with this topic and these values of its key columns."""
    name = "".join(f"{len(part.encode())}:{part}" for part in map(plain, (topic, *key)))
    return str(uuid5(NAMESPACE, name))


def named(parts: Sequence[Column]) -> Column:
    """Return the name of a list of texts. NULL differs from every text."""
    each = [f.coalesce(f.concat(f.octet_length(part).cast("string"), f.lit(":"), part), f.lit("-")) for part in parts]
    return f.concat(*each)


def as_uuid5(name: Column) -> Column:
    """Return the uuid5 of a name (RFC 4122, 4.3), computed with Spark's built-in functions."""
    digest = f.sha1(f.concat(f.unhex(f.lit(NAMESPACE.hex)), f.encode(name, "UTF-8")))
    variant = f.translate(f.substring(digest, 17, 1), "0123456789abcdef", "89ab89ab89ab89ab")
    # The digits of the version, 5, and of the variant replace two digits of the digest.
    parts = (f.substring(digest, 1, 12), f.lit("5"), f.substring(digest, 14, 3), variant, f.substring(digest, 18, 15))
    return f.regexp_replace(f.concat(*parts), "^(.{8})(.{4})(.{4})(.{4})(.{12})$", "$1-$2-$3-$4-$5")
