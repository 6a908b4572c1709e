"""The time limits of requests, and which failures the client retries meanwhile."""

from typing import Any

from google.api_core import exceptions as google
from google.api_core.retry import AsyncRetry, Retry, if_exception_type

from outbox.base.schedules import CALL


def retry_and_timeout(seconds: float, kind: type[Retry] | type[AsyncRetry] = Retry) -> dict[str, Any]:
    """Return `retry` and `timeout` for one call, because the client would repeat it for ever in an outage."""
    unavailable = if_exception_type(google.ServiceUnavailable)
    retry = kind(predicate=unavailable, initial=CALL.first, maximum=CALL.most, timeout=seconds)
    return {"retry": retry, "timeout": seconds}


#: Max seconds for a read in the transaction of an application, including the wait for another transaction's lock.
#: Without a limit of our own, the client repeats the read without a pause while Spanner is unavailable.
IN_TRANSACTION_SECONDS = 30.0


def request(
    tag: str,
    seconds: float = IN_TRANSACTION_SECONDS,
    kind: type[Retry] | type[AsyncRetry] = Retry,
    **options: object,
) -> dict[str, Any]:
    """Return the arguments of a read or a query, by default in the transaction of an application."""
    return {"request_options": {"request_tag": tag, **options}, **retry_and_timeout(seconds, kind)}
