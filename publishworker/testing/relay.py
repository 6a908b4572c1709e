"""What the fixtures return: a database of the Spanner emulator, and a relay without a process, threads or waiting."""

import contextlib
import dataclasses
import functools
import logging
import threading
import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from graphlib import TopologicalSorter
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from google.api_core.exceptions import AlreadyExists
from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1 import PublisherAsyncClient
from google.pubsub_v1 import PublisherClient as GeneratedClient
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport
from google.pubsub_v1.types import PublishRequest, PubsubMessage

from outbox.base.values import counted, listed, topic_name
from outbox.devtools import resources
from outbox.errors import OutboxError
from outbox.message import TASK_ID_ATTRIBUTE, check_topic
from outbox.program.channels import channel, emulator_host, open_pubsub
from outbox.program.settings import DatabaseSettings
from outbox.registration import aware
from outbox.table import ddl
from outbox.table.controls import NO_CONTROLS, TopicControls, problems
from outbox.table.shared_sql import at_now
from outbox.table.states import NEVER
from outbox.testing.faults import block
from publishworker.host import Host, Threads
from publishworker.process.app import open_store, relay_of
from publishworker.process.worker_settings import RelaySettings
from publishworker.pubsub.failures import FailureKind, failure_kind
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner.store import topics_to_send
from publishworker.telemetry.metrics import Metrics
from publishworker.turn.membership import Membership
from publishworker.turn.relay import Relay
from publishworker.types import Answer, Failed, LockedRow, Published

_log = logging.getLogger("publishworker")

#: Each table, and its parent or NULL. Names of a named schema begin with it.
_TABLES = """
SELECT IF(TABLE_SCHEMA = '', '', CONCAT(TABLE_SCHEMA, '.')) AS Path, TABLE_NAME, PARENT_TABLE_NAME
FROM INFORMATION_SCHEMA.TABLES WHERE TABLE_TYPE = 'BASE TABLE'"""
#: The topics of all tasks, and how many of their tasks are not sent.
_UNSENT = "SELECT Topic, COUNTIF(SentAt IS NULL) FROM AsynchronousTasks GROUP BY Topic"
#: Seconds for one call, and until all published messages have arrived. The emulator takes milliseconds.
RELAY_SECONDS = 10.0
#: Messages in one pull, and the pause between two pulls in seconds.
PULL_SIZE, PULL_PAUSE = 1_000, 0.02
#: The latest time for a drain. No time that it writes reaches NEVER, and so dead tasks stay dead.
LATEST = NEVER - timedelta(days=1)


@contextlib.contextmanager
def created(
    files: Sequence[Path], migrate: Callable[[Database], object] | None, set_variable: Callable[[str, str], object]
) -> Iterator[Database]:
    """Create a database in its own project, with the DDL in `files`, migrate it, and drop it at the end.

    Raises OutboxError, and what `migrate` raises.
    """
    names = {"project": f"test-{uuid.uuid4().hex[:12]}", "instance": "test-instance", "database": "outbox"}
    for name, value in names.items():
        set_variable(f"OUTBOX_{name.upper()}", value)
    settings = DatabaseSettings.read(names)
    try:
        statements = [each for file in files for each in ddl.cut(file.read_text(encoding="utf-8-sig"))]
        database: Any = resources.create(settings, statements, migrate=migrate)
    except OSError as error:
        raise OutboxError(
            f"the setting outbox_ddl names {error.filename}, which cannot be read: {error.strerror}"
        ) from error
    except OutboxError as error:
        if not files:
            raise
        raise type(error)(f"with the setting outbox_ddl ({', '.join(map(str, files))}): {error}") from error
    try:
        yield database
    finally:
        instance = database._instance  # noqa: SLF001 - the client has no other way
        for each in instance.list_databases():
            instance.database(each.name.rpartition("/")[2]).drop()
        instance.delete()


def empty(database: Database) -> None:
    """Delete all rows, children before parents, and forget what an earlier test has left in the client."""
    # A transaction that got no session leaves it set, and then all later ones of this thread are refused:
    # https://github.com/googleapis/google-cloud-python/issues/18375
    database._local.transaction_running = False  # noqa: SLF001 - nothing public resets it
    with database.snapshot() as snapshot:
        parents = {
            path + table: {path + parent} if parent else () for path, table, parent in snapshot.execute_sql(_TABLES)
        }
    with database.batch(default_retry_delay=0.02) as batch:
        for table in [*TopologicalSorter(parents).static_order()][::-1]:
            batch.delete(table, KeySet(all_=True))


def variables_of(database: Database) -> dict[str, str]:
    """Return the variables with which the commands of this project use a database."""
    _, project, _, instance, _, name = str(database.name).split("/")
    return {"OUTBOX_PROJECT": project, "OUTBOX_INSTANCE": instance, "OUTBOX_DATABASE": name}


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did: the number of messages that were published, and of attempts that failed."""

    published: int
    failed: int


class OutboxRelay:
    """Relays the tasks of one database when the test says so."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Connect to the database that the variables name, and to the emulator of PUBSUB_EMULATOR_HOST."""
        self._settings = RelaySettings.read({}, environment)
        self._store = open_store(self._settings)
        self._now: datetime | None = None  # None: the time of the database
        api = self._store.database.spanner_api  # this relay's own
        api.execute_streaming_sql = functools.partial(self._execute_at, api.execute_streaming_sql)
        # The client's own channel to an emulator receives at most 4 MB.
        plaintext = channel(SubscriberGrpcTransport, emulator_host(self._settings))
        self._topics = PublisherClient()
        self._subscriber = SubscriberClient(transport=SubscriberGrpcTransport(channel=plaintext))
        self._subscriptions: dict[str, str] = {}  # by the topic's full name
        self._messages: defaultdict[str, list[PubsubMessage]] = defaultdict(list)
        self._publisher = _Publisher(self._settings)
        self._has_drained = False
        #: By the topic's full name: the data of other messages, and how many of them the test expects.
        self._foreign: defaultdict[str, list[bytes]] = defaultdict(list)
        self._expected: dict[str, int | None] = {}
        self._watching = contextlib.ExitStack()
        self._watch(PublisherClient, _of_library)
        self._watch(GeneratedClient, _of_request)
        self._watch(PublisherAsyncClient, _of_request)

    def close(self) -> None:
        """Delete the subscriptions and disconnect."""
        self._watching.close()
        for name in self._subscriptions.values():
            self._subscriber.delete_subscription(subscription=name, timeout=RELAY_SECONDS)
        self._subscriber.close()
        self._topics.transport.close()

    def drain(self, now: datetime | None = None) -> Drained:
        """Publish all tasks that are due, as a worker does that has just started, in this thread.

        Topics that do not exist are created, also those to which a route leads. A failed task is due again at once, for
        the next call with this or a later `now`. Scheduled tasks stay until they are due.

        Args:
            now: the time of this call, such as one in a week, to publish what is due then. The default is the time of
                the database. No task changes its `available_at` or `expires_at` because of it.

        Raises:
            ValueError: `now` is no time with a time zone.
        """
        time = aware("now", now)
        self._now, self._has_drained = time and min(time, LATEST), True
        controls = self._store.discover((), ()).controls
        for topic in topics_to_send(self._store):
            to = controls.get(topic, NO_CONTROLS).publish_to or topic
            if not problems(TopicControls(publish_to=to)):
                self._subscribe(topic_name(to, self._settings.project))
        relay, published, failed = self._relay(), 0, 0
        while True:
            self._publisher.failed = False
            turn = relay.turn()
            published, failed = published + turn.published, failed + turn.failed
            # Without the second condition a task that Pub/Sub refuses would be tried until it is dead.
            if not turn.made_progress or (self._publisher.failed and not turn.published):
                relay.finish()
                return Drained(published, failed)

    def published(self, topic: str, *, foreign: int | None = 0) -> list[PubsubMessage]:
        """Return the messages of tasks that were published to a topic in this test, in the order of their publication.

        Args:
            topic: a topic ID or a full name.
            foreign: how many other messages the test expects on the topic, which no task explains. None: any number.
                The end of the test checks the other topics.

        Raises:
            AssertionError: there is another number of foreign messages, a message does not arrive within 10 s, or
                nothing was published because the test has not called `drain`, or because `topic` is misspelled.
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        name = topic_name(check_topic(topic), self._settings.project)
        self._expected[name] = foreign
        messages, expected = self._messages[name], self._publisher.counts[name]
        empty_pulls = 0
        while len(messages) < expected:
            if self._receive(name):
                continue
            # Counted, because the clock of a test may stand still.
            empty_pulls += 1
            if empty_pulls * PULL_PAUSE > RELAY_SECONDS:
                raise AssertionError(
                    f"{len(messages)} of {expected} messages have arrived on {name} within {RELAY_SECONDS:g} s"
                )
            threading.Event().wait(PULL_PAUSE)
        self._check_foreign(name)
        if not messages:
            self._check_nothing(name)
        return sorted(messages, key=lambda message: int(message.message_id))  # the emulator numbers them

    def check_foreign(self) -> None:
        """Raise AssertionError if a topic has a message that no task explains, and that the test does not expect."""
        __tracebackhide__ = True
        for name in self._subscriptions:
            while self._receive(name):
                pass
        for name in self._foreign:
            self._check_foreign(name)

    def _check_foreign(self, name: str) -> None:
        __tracebackhide__ = True
        found, expected = self._foreign[name], self._expected.get(name, 0)
        if expected is None or len(found) == expected:
            return
        # Not that the topic has got them: the request of the application may have failed.
        problem = f"topic {name}: {counted(len(found), 'message')} that no task explains, expected {expected}"
        if len(found) < expected:
            raise AssertionError(f"{problem}. Pass foreign={len(found)} to published if that is right")
        raise AssertionError(
            f"{problem}: {listed(repr(data[:100]) for data in found)}. Publish by outbox.register, in the transaction "
            f"that writes your rows. If the test expects these messages, pass foreign={len(found)} to published"
        )

    def _check_nothing(self, name: str) -> None:
        """Raise AssertionError if a mistake of the test explains why a topic has no message."""
        __tracebackhide__ = True
        with self._store.database.snapshot() as snapshot:
            rows = list(snapshot.execute_sql(_UNSENT))
        unsent = {topic_name(topic, self._settings.project): number for topic, number in rows}
        if unsent.get(name):
            tasks = counted(unsent[name], "task")
            problem = f"topic {name} has {tasks} to publish: call outbox_relay.drain"
            if not self._has_drained:
                raise AssertionError(f"{problem}() before published()")
            # No error, because a test may expect it. pytest shows it if the test fails.
            _log.warning("%s(now=...) if they are scheduled", problem)
        id, ids = name.rpartition("/")[2], [topic.rpartition("/")[2] for topic in unsent]
        if id not in ids and (similar := get_close_matches(id, ids, 1, cutoff=0.9)):
            raise AssertionError(
                f"no task of this test has the topic {id!r}. Did you mean {similar[0]!r}? If both topics exist, call "
                f"assert_registered(outbox_database, topic={id!r}, times=0)"
            )

    def _watch(self, client: Any, read: Callable[..., tuple[str, list[bytes]]]) -> None:
        """Record what the application publishes without the relay, also to topics that do not exist."""
        publish = client.publish

        @functools.wraps(publish)
        def watched(*arguments: Any, **options: Any) -> Any:
            with contextlib.suppress(Exception):  # `publish` raises it, too
                topic, data = read(*arguments, **options)
                self._foreign[topic] += data
            return publish(*arguments, **options)

        self._watching.enter_context(mock.patch.object(client, "publish", watched))

    def _receive(self, name: str) -> bool:
        """Receive messages of a topic; return whether there were any."""
        received = self._pull(self._subscriptions[name])
        for each in received:
            if each.attributes.get(TASK_ID_ATTRIBUTE) in self._publisher.ids:
                self._messages[name].append(each)
            # Other test runs and programs may publish to a topic of another project.
            elif name.startswith(f"projects/{self._settings.project}/") and each.data not in self._foreign[name]:
                self._foreign[name].append(each.data)
        return bool(received)

    @block
    def losing_publish_answers(self) -> Iterator[None]:
        """Lose the answers to publish requests in the block: the messages are published, and the relay sees a failure.

        The next drain publishes the tasks again, so subscribers get duplicates with the same task IDs.
        """
        self._publisher.loses_answers = True
        try:
            yield
        finally:
            self._publisher.loses_answers = False

    def _execute_at(self, execute: Callable[..., Any], *, request: Any, **options: Any) -> Any:
        """Call the function of the client with the time of `drain` in its statement."""
        if self._now is not None:
            request.sql = at_now(request.sql, f"TIMESTAMP '{self._now.isoformat()}'")
        return execute(request=request, **options)

    def _relay(self) -> Relay:
        """Return a new relay, because the circuits of a used one may be open."""
        # Failed tasks are due again at once, each turn discovers topics, and no batch marks for long. A max backoff of
        # 0 would also defer tasks behind a head that is not due until now, again in each turn.
        settings = dataclasses.replace(self._settings, backoff_initial=0, poll_interval=0, shutdown_timeout=0)
        relay = relay_of(
            settings,
            self._store,
            self._publisher,
            Membership(self._store, f"test-{uuid.uuid4().hex}"),
            metrics=Metrics(),
            host=Host(random=Random(0), threads=_InlineThreads()),  # noqa: S311 - the same order each time, and no secret
        )
        relay.stop()  # a failed commit is tried once more, and then left to the next drain
        return relay

    def _subscribe(self, topic: str) -> None:
        if topic in self._subscriptions:
            return
        with contextlib.suppress(AlreadyExists):
            self._topics.create_topic(name=topic, timeout=RELAY_SECONDS)
        name = f"projects/{self._settings.project}/subscriptions/test-{uuid.uuid4().hex}"
        request = {"name": name, "topic": topic, "enable_message_ordering": True}
        self._subscriber.create_subscription(request, timeout=RELAY_SECONDS)
        self._subscriptions[topic] = name

    def _pull(self, subscription: str) -> Sequence[PubsubMessage]:
        # A pull that waits may lease messages and lose them when its deadline cuts it off. An immediate one cannot.
        request = {"subscription": subscription, "max_messages": PULL_SIZE, "return_immediately": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of return_immediately, for production's sake
            received = self._subscriber.pull(request, timeout=RELAY_SECONDS).received_messages
        if received:
            ids = [each.ack_id for each in received]
            self._subscriber.acknowledge(subscription=subscription, ack_ids=ids, timeout=RELAY_SECONDS)
        return [each.message for each in received]


def _of_library(_client: object, topic: str, data: bytes, *_: Any, **_options: Any) -> tuple[str, list[bytes]]:
    return topic, [data]


def _of_request(
    client: object, request: Any = None, *, topic: str = "", messages: Any = (), **_: Any
) -> tuple[str, list[bytes]]:
    sent = PublishRequest(request or {"topic": topic, "messages": messages})
    # The library sends its batches with the method of its base class.
    return sent.topic, [] if isinstance(client, PublisherClient) else [each.data for each in sent.messages]


class _Publisher(PubSubPublisher):
    """Counts the published messages of each topic, and loses answers on request."""

    def __init__(self, settings: RelaySettings) -> None:
        super().__init__(open_pubsub(settings), settings.project)
        self.counts: Counter[str] = Counter()  # by the topic's full name
        self.ids = set[str]()
        self.failed = self.loses_answers = False

    def publish(
        self, topic: str, rows: Sequence[LockedRow], seconds: float, alone: Collection[str] = frozenset()
    ) -> dict[str, Answer]:
        outcomes = super().publish(topic, rows, seconds, alone)
        sent = [id for id, outcome in outcomes.items() if isinstance(outcome, Published)]
        self.counts[topic_name(topic, self._project)] += len(sent)
        self.ids.update(sent)
        failures = [failure_kind(each.reason) for each in outcomes.values() if isinstance(each, Failed)]
        # After a failure that is about its message, a task is dead at once.
        self.failed |= self.loses_answers or any(kind is not FailureKind.CONTENT for kind in failures)
        if self.loses_answers:
            outcomes |= dict.fromkeys(sent, Failed("unavailable", f"{topic}: the test has lost the answer"))
        return outcomes


class _InlineThreads(Threads):
    """Threads that run to their end when they start, so that the order of events is the same each time."""

    def thread(self, name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        return _InlineThread(target=target, args=arguments, name=name)


class _InlineThread(threading.Thread):
    def start(self) -> None:
        self.run()

    def join(self, timeout: float | None = None) -> None:
        """Return at once: `start` has waited for the end."""
