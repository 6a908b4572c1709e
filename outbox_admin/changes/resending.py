"""Publish the messages of `outbox resend` and of a replay to another topic, with the worker's publisher."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from outbox.base.schedules import OUTAGE_PROBE
from outbox.errors import NotReached, OutboxError
from outbox.program.channels import create_topic_command, open_pubsub
from outbox.program.settings import PubSubSettings
from publishworker.pubsub.failures import FailureKind, failure_kind
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.types import Failed, LockedRow


def message(id: str, ordering_key: str | None, data: bytes, created_at: datetime) -> LockedRow:
    """Return the columns of a task that a publisher reads."""
    return LockedRow(id, "", data, ordering_key, created_at, None, None)


#: Publishes messages, those of a key in the given order, and returns why Pub/Sub refuses some of them, by ID. Raises
#: OutboxError if the topic does not accept messages, NotReached if Pub/Sub does not answer.
Send = Callable[[Sequence[LockedRow]], Mapping[str, str]]

#: Seconds for the publish requests of one attempt.
RESEND_SECONDS = 10.0
#: Seconds until the last attempt while Pub/Sub accepts nothing.
PATIENCE_SECONDS = 60.0


def opened(settings: PubSubSettings, topic: str) -> Send:
    """Return a function that publishes to a topic. Raises NotReached, SettingError."""
    create_command = partial(create_topic_command, settings)
    return partial(send, PubSubPublisher(open_pubsub(settings), settings.project, create_command=create_command), topic)


def send(publisher: PubSubPublisher, topic: str, rows: Sequence[LockedRow]) -> Mapping[str, str]:
    """Publish all messages, and return why Pub/Sub refuses some of them, by ID. See `Send`.

    After a failure, it goes on with the first message of each key that is not published. So it skips only messages that
    are refused for what they contain.
    """
    refused: dict[str, str] = {}
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while rows:
        answers = publisher.publish(topic, rows, RESEND_SECONDS)
        failed = {id: answer for id, answer in answers.items() if isinstance(answer, Failed)}
        for failure in failed.values():
            if failure_kind(failure.reason) is FailureKind.TARGET or failure.reason == "invalid_topic":
                raise OutboxError(failure.error)
        content = {id for id, failure in failed.items() if failure_kind(failure.reason) is FailureKind.CONTENT}
        refused |= {id: f"{failed[id].reason}: {failed[id].error}" for id in content}
        left = [row for row in rows if row.id not in answers or row.id in failed.keys() - content]
        if len(left) < len(rows):
            give_up_at = time.monotonic() + PATIENCE_SECONDS
        elif time.monotonic() >= give_up_at:
            reasons = sorted({failure.error for failure in failed.values()})
            raise NotReached(f"Pub/Sub has accepted no message for {PATIENCE_SECONDS:g} s: {', '.join(reasons)}")
        else:
            time.sleep(OUTAGE_PROBE.first)
        rows = left
    return refused
