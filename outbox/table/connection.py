"""A Spanner database in which every call has a time limit, for workers, commands and jobs.

Some waits of the client are unlimited. A Commit retries for an hour, a stream from an unavailable service loops
forever, and a channel that lost its peer may reconnect only after minutes.
"""

import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

from google.api_core import exceptions as google
from google.api_core.retry import Retry, if_exception_type
from google.cloud import spanner
from google.cloud.spanner_v1 import BurstyPool, SpannerClient
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.services.spanner.transports import SpannerGrpcTransport

from outbox.base.schedules import CALL
from outbox.errors import NotReached
from outbox.program.channels import channel, credentials
from outbox.program.settings import DatabaseSettings, address_of

#: Seconds for a whole Commit with its retries. After that its outcome is unknown.
COMMIT_SECONDS = 10.0
#: The client whose traps this module works around. Applications may have an older one.
CLIENT = (3, 71)
_TRANSIENT = if_exception_type(google.ServiceUnavailable, google.ResourceExhausted)

#: For the relay's reads, together with a Deadline. Without a Retry, the client restarts an unavailable stream forever.
STREAM_RETRY = Retry(predicate=_TRANSIENT, initial=CALL.first, maximum=CALL.most, timeout=3.0)


class Deadline:
    """A limit for a whole read or query, passed to the client as its `timeout`.

    The client restarts a broken stream without a pause and each time with the full timeout. A Deadline counts from its
    creation, and pauses before each restart. It raises DeadlineExceeded.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._calls = 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with the remaining time as its timeout, like the client's own decorators."""

        def limited(*arguments: Any, **keywords: Any) -> Any:
            remaining = self._end - self._clock()
            if self._calls and remaining > 0:
                time.sleep(min(CALL.nth(self._calls - 1), remaining))
                remaining = self._end - self._clock()
            self._calls += 1
            if remaining <= 0:
                raise google.DeadlineExceeded("no answer in time")
            return function(*arguments, timeout=remaining, **keywords)

        return limited


#: Seconds for each unary call of the client, because the client has no argument for its timeout.
UNARY_SECONDS = {
    "create_session": 5.0,
    "get_session": 5.0,
    "begin_transaction": 5.0,
    "delete_session": 5.0,
    "rollback": 2.0,
    "commit": COMMIT_SECONDS,
}

#: Max sessions in the pool if they are not multiplexed: one for each batch in flight, and some for other requests.
SESSIONS = 110


class _Sessions(BurstyPool):
    """The client's pool without its check of each session before use, which costs one request in four."""

    def get(self) -> Any:
        try:
            return self._sessions.get(block=False)
        except queue.Empty:
            session: Any = self._new_session()  # type: ignore[no-untyped-call]  # the client has no types
            session.create()
            return session


class LimitedDatabase(Database):
    """A Database whose every call has a time limit."""

    def __init__(
        self,
        database_id: str,
        instance: Any,
        open_api: Callable[[], SpannerClient],
        role: str = "",
        api: SpannerClient | None = None,
    ) -> None:
        pool: Any = _Sessions(target_size=SESSIONS)  # type: ignore[no-untyped-call]  # the client has no types
        super().__init__(database_id, instance, pool=pool, database_role=role or None)  # type: ignore[no-untyped-call]  # the same
        self._role = role
        self._open_api = open_api
        self._limited_api = api or open_api()
        pool.bind(self)

    def renewed(self) -> "LimitedDatabase":
        """Return the same database with new sessions, because the client never replaces a lost one."""
        # The client's thread for the former session would live on, and keep this object and its sessions in memory.
        if ended := self._sessions_manager._multiplexed_session_terminate_event:  # noqa: SLF001 - nothing public sets it
            ended.set()
        return LimitedDatabase(self.database_id, self._instance, self._open_api, self._role, self._limited_api)

    def on_own_connection(self) -> "LimitedDatabase":
        """Return the same database on a new connection, because one carries at most 100 requests at a time."""
        return LimitedDatabase(self.database_id, self._instance, self._open_api, self._role)

    @property
    def spanner_api(self) -> SpannerClient:
        """Return the client with time limits."""
        return self._limited_api


def open_database(settings: DatabaseSettings, unary_seconds: float = 0.0) -> LimitedDatabase:
    """Return the database at --spanner-endpoint or SPANNER_EMULATOR_HOST. Raises NotReached, SettingError.

    `unary_seconds` replaces UNARY_SECONDS, unless it is 0.
    """
    if tuple(map(int, spanner.__version__.split(".")[:2])) < CLIENT:
        raise NotReached(
            f"google-cloud-spanner {spanner.__version__} is enough for applications, but workers and commands need "
            "3.71: install spanner-outbox[worker]"
        )
    endpoint, plaintext = address_of(settings.spanner_endpoint, "SPANNER_EMULATOR_HOST")
    account = credentials("Spanner", plaintext=plaintext)
    with _without_emulator() if endpoint else contextlib.nullcontext():
        client = spanner.Client(
            project=settings.project,
            credentials=account,
            client_options={"api_endpoint": endpoint} if endpoint else None,
            disable_builtin_metrics=True,
        )

    def open_api() -> SpannerClient:
        transport = SpannerGrpcTransport(
            host=endpoint or SpannerGrpcTransport.DEFAULT_HOST,
            credentials=client.credentials,
            channel=channel(SpannerGrpcTransport, plaintext),
        )
        api = SpannerClient(transport=transport)
        for name, seconds in UNARY_SECONDS.items():
            setattr(api, name, _limited(getattr(api, name), unary_seconds or seconds))
        return api

    instance = client.instance(settings.instance)
    return LimitedDatabase(settings.database, instance, open_api, settings.database_role)


def uses_emulator(settings: DatabaseSettings) -> bool:
    """Tell whether SPANNER_EMULATOR_HOST decides where the database is."""
    return bool(os.environ.get("SPANNER_EMULATOR_HOST")) and not settings.spanner_endpoint


@contextlib.contextmanager
def _without_emulator() -> Iterator[None]:
    """Hide SPANNER_EMULATOR_HOST, which the client prefers to an endpoint."""
    host = os.environ.pop("SPANNER_EMULATOR_HOST", None)
    try:
        yield
    finally:
        if host is not None:
            os.environ["SPANNER_EMULATOR_HOST"] = host


#: A note of an error: an earlier attempt of the same call had no answer, so it may have been executed.
UNANSWERED = "after an attempt without an answer"


class _InternalNotRetried(google.InternalServerError):
    """INTERNAL in a class of our own, because the client retries exactly InternalServerError for two minutes."""


def _limited(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def limited(*arguments: Any, **keywords: Any) -> Any:
        failed: list[Exception] = []
        retry = Retry(
            predicate=_TRANSIENT, initial=CALL.first, maximum=CALL.most, timeout=seconds, on_error=failed.append
        )
        try:
            return call(*arguments, **{"retry": retry, "timeout": seconds, **keywords})
        except google.InternalServerError as error:
            raise _InternalNotRetried(error.message, errors=error.errors) from error  # type: ignore[no-untyped-call]  # as its base
        except google.ClientError as error:
            if any(isinstance(each, google.ServiceUnavailable) for each in failed):
                error.add_note(UNANSWERED)
            raise

    return limited
