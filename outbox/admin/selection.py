"""The tasks that a command or an operation of the console is about, and what became of them."""

import dataclasses
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Self

from outbox.admin import operator_sql
from outbox.errors import OutboxError
from outbox.program.settings import MOMENT
from outbox.table.states import CANCELLED, CONDITIONS

#: As the state of a selection by `ids`: all unsent states.
ANY_UNSENT = "unsent"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskSelection:
    """The tasks of a state or with one of the `ids`, narrowed by all other fields.

    `since` is inclusive, `until` exclusive. Both are compared with SentAt of sent tasks and CreatedAt of others.
    `error` is a part of LastError, ignoring case. `id_prefix` is the beginning of the ID. With `ids` and no state,
    pending tasks are excluded, because they need no retry, and blocked ones, because the head of their key releases
    them, unless this head is gone. Without `include_expired`, unsent tasks whose ExpiresAt has passed are excluded.
    `operation` is the ID of the operation that cancelled the tasks, and then times are those of the cancels. `as_of` is
    the time of the preview. A count is as of then, and a change takes only tasks that matched then, too. Of a resend,
    `to` is the full name of the Pub/Sub topic, and `rate` a max number of tasks per second.
    """

    state: str | None = None
    ids: tuple[str, ...] | None = None
    topic: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    error: str | None = None
    ordering_key: str | None = None
    id_prefix: str | None = None
    operation: str | None = None
    include_expired: bool = True
    as_of: datetime | None = None
    to: str | None = None
    rate: int | None = None

    @classmethod
    def recorded(cls, text: str) -> Self:
        """Return the selection from the column Selection. Raises OutboxError: it is not whole, or not a selection."""
        try:
            values = json.loads(text)
            json.dumps(values, ensure_ascii=False).encode()  # refuses surrogates, as Spanner does
            return cls(**{name: _recorded(name, value) for name, value in values.items()})
        except (ValueError, TypeError, AttributeError, RecursionError):
            # `more_ids` is no field: the record does not have all IDs.
            raise OutboxError("its record does not contain the whole selection. Start a new operation") from None

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the conditions that narrow the selection."""
        return frozenset(self.values) | (
            frozenset() if self.include_expired or self.state in ("sent", CANCELLED) else {"unexpired"}
        )

    @property
    def values(self) -> dict[str, Any]:
        """Return the values that narrow the selection, by parameter name."""
        named = ("topic", "since", "until", "error", "ordering_key", "id_prefix", "operation")
        return {name: value for name in named if (value := getattr(self, name)) is not None}

    @property
    def condition(self) -> str:
        """Return the selection as an SQL condition, without the IDs."""
        if self.state == CANCELLED:
            return "TRUE" + operator_sql.of_cancelled(operator_sql.narrowed("sent", self.names))
        unheld = f"NOT ({CONDITIONS['pending']}) AND NOT ({operator_sql.HELD})"
        state = (CONDITIONS | {ANY_UNSENT: "SentAt IS NULL"})[self.state] if self.state else unheld
        return state + operator_sql.narrowed(self.state, self.names)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one chunk: IDs that were changed, states of tasks that were not changed, and IDs without a row.

    `heads` are the IDs of the key heads that block unchanged tasks.
    """

    changed: tuple[str, ...]
    unchanged: Mapping[str, str]
    missing: tuple[str, ...]
    heads: frozenset[str] = frozenset()


def _recorded(name: str, value: Any) -> Any:
    """Return a field of a recorded selection. Raises ValueError, TypeError: any program may write the column."""
    times = dict.fromkeys(("since", "until", "as_of"), datetime)
    value = MOMENT.parse(value) if name in times else value
    kind: Any = (times | {"ids": list, "include_expired": bool, "rate": int}).get(name, str)
    if not isinstance(value, kind) or (kind is list and not all(isinstance(id, str) for id in value)):
        raise ValueError(name)
    return tuple(value) if kind is list else value
