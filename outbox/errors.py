"""Errors that users of this project see.

Their base class is OutboxError. Those that an application's arguments cause are also a ValueError.
Each message says what failed, with which value, and what to do.
"""


class OutboxError(Exception):
    """The base class of this project's errors."""

    #: With which a command ends after this error.
    exit_code = 1


class InvalidMessage(OutboxError, ValueError):
    """`outbox.register` refuses a task that Pub/Sub or the table would refuse. Nothing was added to the transaction."""


class InvalidTransaction(OutboxError, ValueError):
    """The task was refused because this transaction would lose it, or would never be committed. Nothing was added."""


class InvalidConsumer(OutboxError, ValueError):
    """The table ProcessedTasks cannot hold the name of the consumer."""


class MissingTaskId(OutboxError, ValueError):
    """The message has no task ID, or one that the table ProcessedTasks cannot hold. It was not recorded."""


class SettingError(OutboxError):
    """A flag or an environment variable has an invalid value."""

    exit_code = 2


class NotReached(OutboxError):
    """A required service, database, table or permission is missing, or a command cannot write its output."""

    exit_code = 3


class PositionExpired(OutboxError):
    """A reader is so far behind that tasks which it has not read may have been deleted."""


class SchemaDiffers(OutboxError):
    """The database has an object of this schema with another shape."""
