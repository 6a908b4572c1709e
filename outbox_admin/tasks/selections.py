"""Which tasks a command, a page or a change is about: a state or IDs, narrowed by filters.

A filter is a field of TaskSelection that is declared with `narrowing`. Its flag, its field on the pages, its SQL, and
its part of an address, of the record of an operation and of a printed command follow from this declaration.
"""

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Self

from outbox.base.values import json_column
from outbox.errors import OutboxError
from outbox.program.settings import MOMENT, SettingType
from outbox.table.states import CANCELLED, STATES
from outbox_admin.change_kinds import KINDS
from outbox_admin.value_types import ID, KEY, TEXT, TOPIC

#: The states of tasks that are in the order of SentAt, and in no range of a topic.
ENDED = ("sent", CANCELLED)
#: The commands that select tasks by filters. A page of the console does what each of them does.
COMMANDS = ("list", *KINDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Filter:
    """How a field of TaskSelection narrows a selection."""

    #: SQL about a row. The parameter has the name of the field. {time} is CreatedAt, or SentAt of ended tasks.
    condition: str
    #: The allowed values of the flag and of the field on a page.
    kind: SettingType
    label: str
    help: str = ""
    metavar: str = ""
    #: The commands that have the flag.
    commands: tuple[str, ...] = COMMANDS
    #: The states whose page has the field.
    states: tuple[str, ...] = STATES
    #: The columns of the condition that the index for polls does not have.
    columns: str = ""


def narrowing(condition: str, kind: SettingType, label: str, help: str = "", metavar: str = "", **more: Any) -> Any:
    """Declare a field of TaskSelection that is a Filter."""
    return dataclasses.field(default=None, metadata={"filter": Filter(condition, kind, label, help, metavar, **more)})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskSelection:
    """The tasks of a state or with one of the `ids`, narrowed by all filters.

    `since` is inclusive, `until` exclusive. With `ids` and no state, pending tasks are excluded, because they need no
    retry, and blocked ones, because the head of their key releases them, unless this head is gone. Without
    `include_expired`, unsent tasks whose ExpiresAt has passed are excluded. `cancelled_by` is the ID of an operation.
    `as_of` is the time of the preview. A count is as of then, and a change takes only tasks that matched then, too. Of
    a resend, `to` is the full name of the Pub/Sub topic, and `rate` a max number of tasks per second.
    """

    state: str | None = None
    ids: tuple[str, ...] | None = None
    topic: str | None = narrowing(
        "Topic = @topic", TOPIC, "Topic", "Only tasks with this value in the Topic column", "TOPIC"
    )
    since: datetime | None = narrowing(
        "{time} >= @since",
        MOMENT,
        "Since (UTC), such as 2h",
        "Only tasks at or after this time: SentAt of sent or cancelled tasks, CreatedAt of unsent tasks. Allowed: {}",
        "TIME",
    )
    until: datetime | None = narrowing(
        "{time} < @until", MOMENT, "Until (UTC)", "Only tasks before this time. Allowed: {}", "TIME"
    )
    error: str | None = narrowing(
        "STRPOS(LOWER(LastError), LOWER(@error)) > 0",
        TEXT,
        "Error contains",
        "Only tasks whose LastError contains this text, ignoring case",
        "TEXT",
        commands=tuple(name for name in COMMANDS if name != "resend"),  # a sent task has no error
        columns="LastError",
    )
    ordering_key: str | None = narrowing(
        "OrderingKey = @ordering_key AND OrderingKey IS NOT NULL",
        KEY,
        "Ordering key",
        "Only tasks with this ordering key",
        "KEY",
    )
    id_prefix: str | None = narrowing("STARTS_WITH(Id, @id_prefix)", ID, "ID begins with", commands=())
    #: `outbox restore` gets it as an argument.
    cancelled_by: str | None = narrowing(
        "CancelledBy = @cancelled_by",
        ID,
        "Cancelled by operation",
        commands=(),
        states=(CANCELLED,),
        columns="CancelledBy",
    )
    include_expired: bool = True
    as_of: datetime | None = None
    to: str | None = None
    rate: int | None = None

    @classmethod
    def recorded(cls, text: str) -> Self:
        """Return the selection from the column Selection. Raises OutboxError: it is not whole, or not a selection."""
        try:
            values = json_column(text)
            return cls(**{name: _field(name, value) for name, value in values.items()})
        except (ValueError, TypeError, AttributeError):
            # `more_ids` is no field: the record does not have all IDs.
            raise OutboxError("its record does not contain the whole selection. Start a new operation") from None

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of the filters that narrow the selection."""
        return {name: value for name in FILTERS if (value := getattr(self, name)) is not None}

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the conditions that narrow the selection: of filters, and perhaps `unexpired`."""
        has_expired = self.include_expired or self.state in ENDED
        return frozenset(self.values) | (frozenset() if has_expired else {"unexpired"})


#: The filters by name.
FILTERS: Mapping[str, Filter] = {
    field.name: field.metadata["filter"] for field in dataclasses.fields(TaskSelection) if field.metadata
}
_TYPES: Mapping[str, Any] = {field.name: field.type for field in dataclasses.fields(TaskSelection)}


def _field(name: str, value: Any) -> Any:
    """Return a field of a recorded selection. Raises ValueError, TypeError: any program may write the column."""
    if name == "ids" and isinstance(value, list) and all(isinstance(id, str) for id in value):
        return tuple(value)
    kind = _TYPES.get(name, ())
    value = MOMENT.parse(value) if kind == datetime | None else value
    if name == "ids" or value is None or not isinstance(value, kind):
        raise ValueError(name)
    return value
