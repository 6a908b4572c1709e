"""Read-write transactions that workers, commands and subscribers begin themselves."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.api_core import exceptions as google
from google.auth.exceptions import GoogleAuthError
from google.cloud.spanner_v1 import TransactionOptions
from google.cloud.spanner_v1.session import Session

from outbox.base.values import class_name

T = TypeVar("T")

#: Errors about the content of a request, such as a value that a constraint forbids. Spanner has not executed it.
CONTENT = (google.AlreadyExists, google.FailedPrecondition, google.InvalidArgument, google.OutOfRange)

#: Options of `transact`: serializable and pessimistic, whatever the client's defaults are. Otherwise the hint
#: LOCK_SCANNED_RANGES=exclusive locks nothing.
PESSIMISTIC: Mapping[str, Any] = {
    "isolation_level": TransactionOptions.IsolationLevel.SERIALIZABLE,
    "read_lock_mode": TransactionOptions.ReadWrite.ReadLockMode.PESSIMISTIC,
}


def transact(database: Any, work: Callable[[Any], T], **options: Any) -> T:
    """Run `work` in a read-write transaction, again after each ABORTED, and return its result.

    `options` are those of `run_in_transaction`. After an error of Google's API the client leaves the transaction and
    its locks open. So this function rolls back if `work` has raised an error of the API other than ABORTED, or if
    Spanner has refused the commit. After other errors of `work` the client rolls back.

    If the client gets no session, it refuses all later transactions of the thread, unless the flag is reset here:
    https://github.com/googleapis/google-cloud-python/issues/18375
    """
    transaction: Any = None
    working = False

    def attempt(begun: Any) -> T:
        nonlocal transaction, working
        transaction, working = begun, True
        result = work(begun)
        working = False
        return result

    try:
        result: T = database.run_in_transaction(attempt, **options)
    except RuntimeError:
        raise  # the thread is already in a transaction, so the flag is right
    except Exception as error:
        if transaction is None:
            with contextlib.suppress(AttributeError):  # a test's fake
                database._local.transaction_running = False  # noqa: SLF001 - nothing public resets it
        elif isinstance(error, CONTENT) or (
            working and isinstance(error, google.GoogleAPICallError) and not isinstance(error, google.Aborted)
        ):
            with contextlib.suppress(google.GoogleAPIError, GoogleAuthError):
                transaction.rollback()
        raise
    return result


def check_database(database: object, remedy: str = "") -> None:
    """Raise TypeError, which ends with `remedy`, unless `database` is that of a synchronous Spanner client.

    A Session has the same methods, but one transaction at a time.
    """
    run = getattr(database, "run_in_transaction", None)
    if inspect.iscoroutinefunction(run):
        remedy = ". That of an AsyncClient needs `await`, so use one of spanner.Client"
    elif callable(run) and not isinstance(database, Session):
        return
    raise TypeError(f"database is {class_name(database)}. It must be the Database of a Spanner Client{remedy}")
