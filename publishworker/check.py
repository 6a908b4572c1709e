"""`publishworker check`: one line for each check: `ok`, or the error and how to fix it."""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from google.api_core.exceptions import GoogleAPICallError, NotFound, PermissionDenied
from google.auth.exceptions import GoogleAuthError
from google.pubsub_v1 import PublisherClient

from outbox.errors import InvalidMessage, NotReached
from outbox.message import check_topic
from outbox.shared.pubsub import create_topic_command, emulator_host, open_pubsub
from outbox.shared.settings import unknown_variables
from outbox.storage import schema
from outbox.storage.connection import LimitedDatabase, open_database
from publishworker import exits
from publishworker.pubsub.messages import topic_filter, topic_name
from publishworker.settings import WorkerSettings
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import SpannerStore, describe
from publishworker.topics.rate_limit import problem
from publishworker.types import TopicControls

#: Seconds for one request about a topic.
_TOPIC_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the output."""

    verdict: Literal["ok", "unknown", "warning", "wrong", "missing", "unreachable"]
    text: str


def check(options: argparse.Namespace) -> int:
    """Print the findings; return 0 if all is well, 3 if a service, the table or a permission is missing, else 1."""
    settings = WorkerSettings.read(vars(options))
    verdicts = set()
    for finding in _findings(settings, options.topics):
        verdicts.add(finding.verdict)
        print(f"{finding.verdict:<12}{finding.text}", flush=True)
    if verdicts & {"missing", "unreachable"}:
        return exits.NOT_REACHED
    return exits.FAILED if "wrong" in verdicts else exits.DONE


def _findings(settings: WorkerSettings, topics: Iterable[str]) -> Iterator[Finding]:
    values = dataclasses.asdict(settings)
    yield from (Finding("warning", sentence) for sentence in unknown_variables())
    yield Finding("ok", "settings: " + ", ".join(f"{name}={value}" for name, value in values.items()))
    try:
        database = open_database(settings)
        table = _table(database)
        yield table
        named = set(topics)
        if table.verdict == "ok":
            verify_grants(database)
            yield Finding("ok", "permissions: the worker may write marks and heartbeats")
            store = SpannerStore(database, schema.layout(database))
            working, ordered = store.topics_in_use()
            named |= working
            if ordered and not settings.pubsub_endpoint and not emulator_host(settings):
                yield _one_region(ordered)
            controls = store.discover((), ()).controls
            named |= controls.paused | controls.limits.keys()
            yield from _controls(controls)
        client = PublisherClient(transport=open_pubsub(settings))
        allowed = topic_filter(settings.allowed_topics, settings.project)
        for topic in sorted(named):
            yield _topic(client, topic, settings, allowed)
    except NotReached as error:
        yield Finding("unreachable", str(error))


def _table(database: LimitedDatabase) -> Finding:
    layout = schema.layout(database)
    wrong = schema.differences(database, schema.statements(relay_only=True, suffix=layout.suffix))
    if wrong:
        return Finding("missing", f"table: {'; '.join(wrong)}. Run `outbox schema apply`, or see docs/guide/schema.md")
    return Finding("ok", f"table: {database.name}, {layout.shards} shards")


def _one_region(topics: Iterable[str]) -> Finding:
    return Finding(
        "warning",
        f"tasks have ordering keys (topics {', '.join(sorted(topics))}), but --pubsub-endpoint is not set. Pub/Sub "
        "keeps their order only within one region, so give all workers the same regional endpoint, such as "
        "europe-west1-pubsub.googleapis.com",
    )


def _controls(controls: TopicControls) -> Iterator[Finding]:
    """Report paused topics and invalid limits in AsynchronousTaskTopics."""
    for topic in sorted(controls.paused):
        yield Finding("ok", f"topic {topic} is paused: no task is sent until `outbox resume {topic}`")
    for topic, limit in sorted(controls.limits.items()):
        if wrong := problem(limit):
            yield Finding("wrong", f"invalid limits of topic {topic} in AsynchronousTaskTopics are ignored: {wrong}")


def _topic(client: PublisherClient, topic: str, settings: WorkerSettings, allowed: Callable[[str], bool]) -> Finding:
    try:
        check_topic(topic)
    except InvalidMessage as error:
        return Finding("wrong", str(error))
    name = topic_name(topic, settings.project)
    if not allowed(name):
        return Finding("wrong", f"topic {name} matches no pattern of --allowed-topics: its tasks would become dead")
    try:
        client.get_topic(topic=name, timeout=_TOPIC_SECONDS, retry=None)
    except NotFound:
        return Finding("wrong", f"topic {name} does not exist. Create it: {create_topic_command(settings, name)}")
    except PermissionDenied:
        return Finding(
            "unknown",
            f"topic {name}: no permission to check it (pubsub.topics.get); publishing needs roles/pubsub.publisher",
        )
    except (GoogleAPICallError, GoogleAuthError) as error:
        return Finding("unreachable", f"topic {name}: {describe(error)}")
    return Finding("ok", f"topic {name}")
