"""Errors that a user of this project meets.

    OutboxError
    ├── InvalidMessage (also a ValueError)   outbox.register refuses what Pub/Sub would refuse later
    ├── SettingError                         a flag or an environment variable that is not allowed: exit code 2
    ├── NotReached                           a service, a table or a permission is missing: exit code 3
    └── SchemaDiffers                        the database has the names of the schema with another shape

Each says what happened, with which value, and what to do.
"""


class OutboxError(Exception):
    """The root of this project's errors."""


class InvalidMessage(OutboxError, ValueError):
    """The task was refused before anything was added to the transaction."""


class SettingError(OutboxError):
    """A setting has a value that is not allowed."""


class NotReached(OutboxError):
    """A service, a database, a table or a permission that is needed is not there."""


class SchemaDiffers(OutboxError):
    """The database holds an object of this schema with another shape."""
