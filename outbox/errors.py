"""Errors that users of this project see.

    OutboxError
    ├── InvalidMessage (also a ValueError)   outbox.register refuses a task that Pub/Sub would refuse
    ├── InvalidTransaction (also a ValueError)
    │                                        outbox.register refuses a transaction that could lose the task
    ├── InvalidConsumer (also a ValueError)  outbox.inbox refuses the name of a consumer
    ├── MissingTaskId (also a ValueError)    outbox.inbox got a message that did not come from the outbox
    ├── SettingError                         an invalid flag or environment variable: exit code 2
    ├── NotReached                           a service, a table or a permission is missing: exit code 3
    └── SchemaDiffers                        an object of the schema exists with another shape

Each message says what failed, with which value, and what to do.
"""


class OutboxError(Exception):
    """The base class of this project's errors."""


class InvalidMessage(OutboxError, ValueError):
    """The task was refused before anything was added to the transaction."""


class InvalidTransaction(OutboxError, ValueError):
    """The task was refused because this transaction would lose it, or would never be committed. Nothing was added."""


class InvalidConsumer(OutboxError, ValueError):
    """The table ProcessedTasks cannot hold the name of the consumer."""


class MissingTaskId(OutboxError, ValueError):
    """The message has no task ID, or one that the table ProcessedTasks cannot hold. It was not recorded."""


class SettingError(OutboxError):
    """A setting has an invalid value."""


class NotReached(OutboxError):
    """A required service, database, table or permission is missing."""


class SchemaDiffers(OutboxError):
    """The database has an object of this schema with another shape."""
