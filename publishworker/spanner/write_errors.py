"""What an error of Spanner says about the rows: whether they may have been written, and what the cause is."""

import re

from google.api_core import exceptions as google
from google.auth.exceptions import GoogleAuthError
from google.rpc.error_details_pb2 import ResourceInfo

from outbox.errors import NotReached
from outbox.table.connection import UNANSWERED
from outbox.table.own_transactions import CONTENT
from publishworker.pubsub.failures import NO_CREDENTIALS

#: The errors that the client raises for a request.
SERVICE_ERRORS = (google.GoogleAPICallError, google.RetryError, GoogleAuthError)
#: Errors by which Spanner certainly has not executed a request. After all other errors the outcome is unknown.
_NOT_EXECUTED = (*CONTENT, google.Aborted, google.NotFound, google.PermissionDenied, google.Unauthenticated)

#: Spanner refuses a query of a missing table with INVALID_ARGUMENT and this text.
_TABLE_MISSING = "Table not found: "


class StoreError(NotReached):
    """Spanner did not answer, or refused the request. Rows may have been written, unless the error is a NotWritten."""


class NotWritten(StoreError):
    """Nothing was written: the rows were not locked, or Spanner aborted or refused the transaction."""


class DatabaseMissing(NotWritten):
    """Spanner has no such database, instance or table, or no longer has it."""


class WriteRefused(NotWritten):
    """Nothing was written, because Spanner refuses the content of the request. A single row may be the reason."""


class TimedOut(StoreError):
    """Spanner did not answer within the time limit of the request. A read may have asked for too much."""


def error_class(error: Exception) -> type[StoreError]:
    is_unanswered = UNANSWERED in getattr(error, "__notes__", ()) and not isinstance(error, google.Aborted)
    if is_unanswered or not isinstance(error, _NOT_EXECUTED):
        return TimedOut if isinstance(error, google.DeadlineExceeded) else StoreError
    if (isinstance(error, google.NotFound) and not is_lost_session(error)) or _TABLE_MISSING in str(error):
        return DatabaseMissing
    return WriteRefused if isinstance(error, CONTENT) else NotWritten


def lasting_reason(error: StoreError) -> str | None:
    """Return why Spanner refuses the request until a person acts, or None if the failure may end by itself."""
    if isinstance(error, DatabaseMissing):
        return "the database, the instance or a table has been missing"
    cause = getattr(error.__cause__, "cause", None) or error.__cause__
    no_access = isinstance(cause, (google.PermissionDenied, google.Unauthenticated, GoogleAuthError))
    return "Spanner has refused its credentials or permissions" if no_access or NO_CREDENTIALS in str(cause) else None


def is_lost_session(error: BaseException | None) -> bool:
    """Tell whether Spanner has no such session. The text differs between servers: googleapis/google-cloud-cpp#9183."""
    if not isinstance(error, google.NotFound):
        return False
    resources = (detail.resource_type for detail in error.details if isinstance(detail, ResourceInfo))
    return any(name.endswith("google.spanner.v1.Session") for name in resources) or "Session not found" in str(error)


def describe(error: Exception) -> str:
    """Return the first line of a service's error, without request IDs and a full stop."""
    text = str(getattr(error, "cause", None) or error)
    line = text.splitlines()[0] if text else type(error).__name__
    return re.sub(r",? request_id = [0-9.]+", "", line)[:500].rstrip(".")
