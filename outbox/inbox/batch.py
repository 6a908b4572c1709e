"""The callback for a streaming pull with `max_batch`: one transaction for messages that arrive together."""

from collections.abc import Collection, Sequence
from typing import TypeAlias

from google.api_core.exceptions import Aborted, DeadlineExceeded, GoogleAPIError, RetryError, ServiceUnavailable
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.transaction import Transaction

from outbox.errors import MissingTaskId, NotReached
from outbox.inbox.collector import Collector
from outbox.inbox.once import COLUMNS, TABLE, ReceivedMessage, inbox_row, table_errors
from outbox.inbox.receiver import EarlierFailed, Failure, Handle, PulledMessage, Receiver, Settings, log, name_of
from outbox.inbox.watching import Watch, uncommitted, watched
from outbox.metrics import count_delivery
from outbox.table.transact import CONTENT
from outbox.table.transactions import existing, insert
from outbox.tracing import processing

#: Errors that may mean that Spanner is unavailable: each further message would wait as long.
_UNAVAILABLE = (RetryError, ServiceUnavailable, DeadlineExceeded)


class _Singly(Exception):
    """The messages of a batch must have a transaction each."""


#: Whether the function ran for a message (False: a duplicate), or its error.
Outcome: TypeAlias = bool | Exception


class BatchReceiver(Receiver):
    """The callback for a streaming pull with `max_batch`. Messages that arrive together have one transaction.

    `process` still uses one transaction for each message.
    """

    def __init__(self, settings: Settings, handle: Handle) -> None:
        super().__init__(settings, handle)
        self._batches = Collector[PulledMessage](self._receive_all, settings.max_batch, settings.max_delay)

    def __call__(self, message: PulledMessage) -> None:
        """Let the message wait for others, or process those that wait. See `Receiver`.

        The client extends the deadline of waiting messages, and its flow control limits their number.
        """
        try:
            self._row(message)
        except MissingTaskId:
            super().__call__(message)
        else:
            self._batches.add(message)

    def _row(self, message: ReceivedMessage) -> tuple[str, str]:
        return inbox_row(message, self._settings.consumer, self._settings.key)

    def _receive_all(self, messages: list[PulledMessage]) -> None:
        """Process messages, together if there are several. Raises what ends the streaming pull."""
        try:
            if len(messages) == 1:
                super().__call__(messages[0])
            else:
                self._receive_together(messages)
        except BaseException:
            # The streaming pull does this for the message of this call only.
            for message in messages:
                message.nack()
            raise

    def _receive_together(self, messages: list[PulledMessage]) -> None:
        reason: Exception | None = None
        outcomes: list[Outcome] = []
        try:
            with table_errors():
                outcomes = self._run(lambda transaction: self._attempt_all(transaction, messages))
        # If every attempt was aborted, the cause may be one message, whose function calls another service.
        except (_Singly, Aborted, *CONTENT) as error:
            reason = error
        except NotReached:
            raise
        except Exception as error:
            outcomes = [error] * len(messages)
        if reason is None:
            self._log_failures(self._settle(messages, outcomes))
        else:  # here, so that no traceback of a message has that of the batch
            self._receive_singly(messages, reason)

    def _settle(self, messages: list[PulledMessage], outcomes: Sequence[Outcome]) -> list[Failure]:
        """Count, and acknowledge or reject, after the transaction. Return the failures, which are not logged yet."""
        accepted, failures = list[PulledMessage](), list[Failure]()
        for message, outcome in zip(messages, outcomes, strict=True):
            failed = isinstance(outcome, Exception)
            count_delivery(self._settings.consumer, "failed" if failed else "processed" if outcome else "duplicate")
            if isinstance(outcome, Exception):
                message.nack()
                failures.append((message, outcome))
            else:
                accepted.append(message)
        self._acknowledge(accepted)
        return failures

    def _receive_singly(self, messages: list[PulledMessage], reason: Exception) -> None:
        """Process each message in its own transaction. After two unavailable errors in a row, reject the rest untried.

        The cause of only one such error may be its message.
        """
        text = "Consumer %s: %d messages get a transaction each instead of one together: %s"
        log.warning(text, self._settings.consumer, len(messages), reason)
        failed, outage, unavailable = set[str](), None, None
        failures = list[Failure]()
        try:
            for message in messages:
                if error := outage or self._earlier_failed(message, failed):
                    failures += self._settle([message], [error])
                    continue
                if error := self._receive(message):
                    failed.add(_ordering_key(message))
                    failures.append((message, error))
                before, unavailable = unavailable, error if isinstance(error, _UNAVAILABLE) else None
                outage = before and unavailable
        finally:
            self._log_failures(failures)

    def _earlier_failed(self, message: ReceivedMessage, failed: Collection[str]) -> Exception | None:
        if (key := _ordering_key(message)) and key in failed:
            return EarlierFailed(f"an earlier message of its ordering key {key!r} failed")
        return None

    def _attempt_all(self, transaction: Transaction, messages: list[PulledMessage]) -> list[Outcome]:
        rows = [self._row(message) for message in messages]
        processed = existing(transaction, TABLE, COLUMNS[:2], set(rows), tag="outbox-process-once")
        before, failed, outcomes = set(processed), set[str](), list[Outcome]()
        with uncommitted(transaction), watched(transaction) as watch:
            for message, row in zip(messages, rows, strict=True):
                outcome: Outcome = self._earlier_failed(message, failed) or row not in processed
                if outcome is True:
                    outcome = self._try(transaction, message, watch)
                if outcome is True:
                    processed.add(row)
                elif isinstance(outcome, Exception):
                    failed.add(_ordering_key(message))
                outcomes.append(outcome)
        if new := sorted(processed - before):
            insert(transaction, TABLE, COLUMNS, [(*row, COMMIT_TIMESTAMP) for row in new])
        return outcomes

    def _try(self, transaction: Transaction, message: ReceivedMessage, watch: Watch) -> Outcome:
        """Call the function. If it fails, drop what it has buffered. Raises _Singly if that is not enough."""
        savepoint = watch.begin(transaction)
        outcome: Outcome = True
        try:
            with processing(self._settings.consumer, message):
                self._call(transaction, message)
        except Aborted:
            raise
        except Exception as error:
            if watch.has_dml or isinstance(error, (GoogleAPIError, NotReached)):
                raise _Singly(f"one failed with {type(error).__name__}, and only a rollback undoes it") from error
            savepoint.restore()
            outcome = error
        if watch.reads_stale:
            raise _Singly(f"{name_of(self.handle)} reads what an earlier message may have changed by a mutation")
        return outcome


def _ordering_key(message: ReceivedMessage) -> str:
    return getattr(message, "ordering_key", "")
