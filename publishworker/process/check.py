"""`publishworker check`: one line for each check: `ok`, or the error and how to fix it."""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from google.api_core.exceptions import GoogleAPICallError, NotFound, PermissionDenied
from google.auth.exceptions import GoogleAuthError
from google.pubsub_v1 import PublisherClient, Topic

from outbox.base.values import counted, topic_name
from outbox.errors import InvalidMessage, NotReached
from outbox.message import check_topic
from outbox.program.pubsub import TOPIC_SECONDS, create_topic_command, emulator_host, open_pubsub
from outbox.program.settings import unknown_variables
from outbox.program.terminal import say
from outbox.table import schema
from outbox.table.connection import open_database
from outbox.table.controls import NO_CONTROLS
from publishworker.process import exits
from publishworker.process.worker_settings import WorkerSettings
from publishworker.pubsub.messages import topic_filter
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import SpannerStore
from publishworker.spanner.unsent import topics_to_send
from publishworker.spanner.write_errors import describe
from publishworker.topics.availability import split_valid

_ONE_REGION = (
    "Pub/Sub keeps their order only within one region, so give all workers the same regional endpoint, such as "
    "europe-west1-pubsub.googleapis.com"
)


#: A line of the output: `ok`, `unknown`, `warning`, `wrong`, `missing` or `unreachable`, and a text.
Finding = tuple[str, str]


def check(options: argparse.Namespace) -> int:
    """Print the findings. Return 0 if all is well, 3 if something is missing or not reached, otherwise 1."""
    settings = WorkerSettings.read(vars(options))
    verdicts = set()
    for verdict, text in _findings(settings, options.topics):
        verdicts.add(verdict)
        say(f"{verdict:<12}{text}")
    if verdicts & {"missing", "unreachable"}:
        return exits.NOT_REACHED
    return exits.FAILED if "wrong" in verdicts else exits.DONE


def _findings(settings: WorkerSettings, topics: Iterable[str]) -> Iterator[Finding]:
    values = dataclasses.asdict(settings)
    yield from (("warning", sentence) for sentence in unknown_variables())
    yield "ok", "settings: " + ", ".join(f"{name}={value}" for name, value in values.items())
    try:
        found = set(topics)
        yield from _database(settings, found)
        client = PublisherClient(transport=open_pubsub(settings))
        allowed = topic_filter(settings.allowed_topics, settings.project)
        for topic in sorted(found):
            yield _topic(client, topic, settings, allowed)
    except NotReached as error:
        yield "unreachable", str(error)


def _database(settings: WorkerSettings, topics: set[str]) -> Iterator[Finding]:
    """Check the table, permissions and topic controls. Add the topics in use to `topics`. Raises NotReached."""
    database = open_database(settings)
    layout = schema.layout(database)
    if wrong := schema.problems(database, layout, relay_only=True):
        yield "missing", f"table: {'; '.join(wrong)}. Run `outbox schema apply`, or see docs/reference/schema.md"
        return
    yield "ok", f"table: {database.name}, {counted(layout.shards, 'shard')}"
    verify_grants(database)
    yield "ok", "permissions: the worker may write SentAt and heartbeats"
    store = SpannerStore(database, layout)
    to_send = topics_to_send(store)
    ordered = [topic for topic, has_keys in to_send.items() if has_keys]
    if ordered and not settings.pubsub_endpoint and not emulator_host(settings):
        names = ", ".join(sorted(ordered))
        yield "warning", f"tasks have ordering keys (topics {names}), but --pubsub-endpoint is not set. {_ONE_REGION}"
    controls = store.discover((), ()).controls
    valid, invalid = split_valid(controls)
    for topic, row in sorted(controls.items()):
        if row.paused:
            yield "ok", f"topic {topic} is paused: no task is sent until `outbox resume {topic}`"
        if to := valid[topic].publish_to:
            yield "ok", f"messages of topic {topic} go to {to}"
    yield from (("wrong", sentence) for sentence in invalid.values())
    used = {*to_send, *(topic for topic, row in controls.items() if row != NO_CONTROLS)}
    topics |= {controls.get(topic, NO_CONTROLS).publish_to or topic for topic in used}


def _topic(client: PublisherClient, topic: str, settings: WorkerSettings, allowed: Callable[[str], bool]) -> Finding:
    try:
        check_topic(topic)
    except InvalidMessage as error:
        return "wrong", str(error)
    name = topic_name(topic, settings.project)
    if not allowed(name):
        return "wrong", f"topic {name} matches no pattern of --allowed-topics: its tasks would become dead"
    try:
        found = client.get_topic(topic=name, timeout=TOPIC_SECONDS, retry=None)
    except NotFound as error:
        create = create_topic_command(settings, name)
        return "wrong", f"topic {name} does not exist. Create it: {create}. Pub/Sub: {describe(error)}"
    except PermissionDenied as error:
        needed = "no permission to check it (pubsub.topics.get); publishing needs roles/pubsub.publisher"
        return "unknown", f"topic {name}: {needed}. Pub/Sub: {describe(error)}"
    except (GoogleAPICallError, GoogleAuthError) as error:
        return "unreachable", f"topic {name}: {describe(error)}"
    return _of_transforms(name, found)


def _of_transforms(name: str, topic: Topic) -> Finding:
    used = [each for each in topic.message_transforms if not each.disabled]
    if transforms := ", ".join(each.javascript_udf.function_name or "without a name" for each in used):
        effect = "one that drops messages loses tasks, and the inbox refuses messages without their attributes"
        return "warning", f"topic {name} has message transforms ({transforms}): {effect}"
    return "ok", f"topic {name}"
