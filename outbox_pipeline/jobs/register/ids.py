"""Task IDs that derive from the registered values, so that registering the same values again adds no task.

An ID is the uuid5 of a name. The name is a list of texts, encoded as netstrings (`5:order`), so two different lists
never have the same name.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid5

from outbox.base.values import plain

#: The namespace of all derived IDs.
NAMESPACE = UUID("3b0c7e0e-9b50-5d3c-8f43-6d6e2a6d1c55")
EPOCH, MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


def task_id(topic: str, *key: str) -> str:
    """Return the ID that `register` gives a row with this topic and these values of its key columns."""
    return derived(map(plain, (topic, *key)))


def derived(parts: Iterable[str | None]) -> str:
    """Return the ID of a list of texts. None differs from every text."""
    name = "".join("-" if part is None else f"{len(part.encode())}:{part}" for part in parts)
    return str(uuid5(NAMESPACE, name))


def whole_row_id(row: Mapping[str, Any]) -> str:
    """Return the ID of a row of `schemas.INPUT` without a key. It depends on the values only."""
    attributes = row["attributes"]
    pairs = None if attributes is None else [{"key": name, "value": attributes[name]} for name in sorted(attributes)]
    others = (row[name] for name in ("priority", "ordering_key", "at_most_once", "sequence"))
    times = (row[name] for name in ("available_at", "expires_at"))
    return derived(
        [
            row["topic"],
            None if row["data"] is None else row["data"].hex().upper(),
            json.dumps({"attributes": pairs}, ensure_ascii=False, separators=(",", ":")),
            *(text(value) for value in others),
            *(None if time is None else str((time - EPOCH) // MICROSECOND) for time in times),
        ]
    )


def text(value: object) -> str | None:
    """Return a value as Spark casts it to a text. A decimal keeps the digits of its column."""
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else f"{value:f}" if isinstance(value, Decimal) else str(value)
