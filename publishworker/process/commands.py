"""`run`, `drain` and `check`: read the settings, run the relay in this process or look at all it needs, and report."""

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import os
import signal
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

from google.api_core.exceptions import GoogleAPICallError, NotFound, PermissionDenied
from google.auth.exceptions import GoogleAuthError
from google.cloud.spanner_v1 import KeySet
from google.pubsub_v1 import PublisherClient

from outbox.base.start import handled
from outbox.base.values import counted, listed, topic_name
from outbox.errors import InvalidMessage, NotReached
from outbox.message import check_topic
from outbox.program import logs
from outbox.program.channels import TOPIC_SECONDS, create_topic_command, emulator_host, open_pubsub
from outbox.program.settings import flag_of, unknown_variables
from outbox.program.terminal import say
from outbox.rows import backlog
from outbox.rows.task_table import TaskTable
from outbox.table import schema
from outbox.table.connection import open_database
from outbox.table.controls import NO_CONTROLS
from outbox.table.states import TASKS_TABLE
from publishworker import process
from publishworker.log import ThrottledLog, log
from publishworker.process.app import App, until_drained, worker_id
from publishworker.process.worker_settings import WorkerSettings
from publishworker.pubsub.publisher import topic_filter
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import READ_SECONDS, SpannerStore, any_to_send, topics_to_send
from publishworker.spanner.write_errors import describe
from publishworker.telemetry.clients import client
from publishworker.telemetry.metrics import Metrics
from publishworker.topics.availability import split_valid

_ONE_REGION = (
    "Pub/Sub keeps their order only within one region, so give all workers the same regional endpoint, such as "
    "europe-west1-pubsub.googleapis.com"
)
_BYPASSED = "bypasses the outbox: see docs/operations/deploy.md#let-only-the-worker-publish"
#: The roles that may publish to a topic.
_PUBLISH = ("roles/pubsub.publisher", "roles/pubsub.editor", "roles/pubsub.admin", "roles/editor", "roles/owner")
#: Seconds for the last log lines of a worker that hangs.
END_SECONDS = 10.0
#: A line of the output of `check`: `ok`, `unknown`, `warning`, `wrong`, `missing` or `unreachable`, and a text.
Finding = tuple[str, str]
#: Characters before the text of a line.
INDENT = 12


def run(options: argparse.Namespace) -> int:
    settings = WorkerSettings.read(vars(options))
    with _worker(settings) as (worker, stop):
        return worker.until_stopped(stop, lambda _turn: False, timeout_exit_code=process.FAILED)


def drain(options: argparse.Namespace) -> int:
    """Publish until a strong read finds no pending or retrying task that may be sent, and print what remains."""
    settings = WorkerSettings.read(vars(options))
    with _worker(settings) as (worker, stop):
        if options.deadline is not None:
            timer = threading.Timer(options.deadline, stop.set)
            timer.daemon = True
            timer.start()
        store = worker.store
        drained = until_drained(store, lambda: store.layouts[0].ids, settings.poll_interval)
        if (code := worker.until_stopped(stop, drained, timeout_exit_code=process.WORK_LEFT)) != process.DONE:
            return code
    work_left = any_to_send(store)
    found = backlog.read_unsent(TaskTable(store.database))
    at_least = {topic for topic, line in found.topics().items() if line.at_least}
    for (topic, state), number in sorted(found.by_topic_and_state().items()):
        say(f"{'at least ' if topic in at_least else ''}{number} {state} in topic {topic}")
    if work_left:
        why = f". The last turn failed: {worker.failure}" if worker.failure else ""
        say(f"not drained: stopped with work left{why}")
        return process.WORK_LEFT
    if any_to_send(store, misrouted=True):
        say("not drained: a topic with tasks has an invalid route, see the log")
        return process.WORK_LEFT
    say("drained")
    return process.DONE


@contextlib.contextmanager
def _worker(settings: WorkerSettings) -> Iterator[tuple[App, threading.Event]]:
    """Configure this process. Yield the worker, and an event that a signal sets; until then, it ends the process."""
    logs.configure(settings.log_format, settings.log_level)
    for sentence in unknown_variables():
        log.warning("%s", sentence, extra={"action": "unknown_variable"})
    id = worker_id()
    metrics = Metrics(client(settings.metrics, id))
    with contextlib.ExitStack() as stack:
        stack.callback(metrics.stop)
        path = Path(settings.heartbeat_file.replace("*", str(os.getpid())))
        if "*" in settings.heartbeat_file:
            stack.callback(path.unlink, missing_ok=True)  # a later process may have the same ID
        touch_file = heartbeat_file(path)
        worker = App(settings, id=id, metrics=metrics, touch_file=touch_file, on_stall=end_soon)
        collect_garbage_rarely()
        with stop_on_signals() as stop, stack.pop_all():
            yield worker, stop


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets. A second one ends the process with code 128 + signal.

    The default handlers are not enough, because a process with ID 1, as in a container, has none.
    """
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        name = signal.Signals(number).name
        log.info("%s: stopping. A second signal ends the process at once.", name, extra={"action": "stopping"})

    with handled((signal.SIGTERM, signal.SIGINT), on_signal):
        yield stop


def heartbeat_file(path: Path) -> Callable[[], None]:
    """Return a function that touches the file whose age `healthcheck` reads. A failure is logged and stops nothing."""
    throttled_log = ThrottledLog()

    def touch() -> None:
        try:
            path.touch()
        except OSError as error:
            reason = f"Heartbeat file {path} cannot be written ({error.strerror})"
            throttled_log.log("heartbeat", "", f"{reason}. `publishworker healthcheck` will fail.")

    return touch


def end_soon() -> None:
    """End the process with code 1 in END_SECONDS, even if its last log lines or its exit block."""
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - the file is in use until the end
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=nowhere)


def collect_garbage_rarely() -> None:
    """Let the garbage collector skip the objects of start-up, whose scan takes 30 ms of CPU, and run rarely."""
    gc.freeze()
    gc.set_threshold(50_000)


def check(options: argparse.Namespace) -> int:
    """Print the findings. Return 0 if all is well, 3 if something is missing or not reached, otherwise 1."""
    settings = WorkerSettings.read(vars(options))
    verdicts = set()
    for verdict, text in _findings(settings, options.topics):
        verdicts.add(verdict)
        say(f"{verdict:<{INDENT}}{text}")
    if verdicts & {"missing", "unreachable"}:
        return process.NOT_REACHED
    return process.FAILED if "wrong" in verdicts else process.DONE


def _findings(settings: WorkerSettings, topics: Iterable[str]) -> Iterator[Finding]:
    yield from (("warning", sentence) for sentence in unknown_variables())
    flags = " ".join(f"{flag_of(name)}={value}" for name, value in dataclasses.asdict(settings).items())
    lines = textwrap.wrap(f"settings: {flags}", 80 - INDENT, break_long_words=False, break_on_hyphens=False)
    yield from zip(("ok", *("",) * len(lines)), lines, strict=False)
    try:
        found = set(topics)
        yield from _database(settings, found)
        publisher = PublisherClient(transport=open_pubsub(settings))
        allowed = topic_filter(settings.allowed_topics, settings.project)
        for topic in sorted(found):
            yield _topic(publisher, topic, settings, allowed)
            yield from _publishers(publisher, topic_name(topic, settings.project))
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
    with store.reading() as snapshot:
        if not list(
            snapshot.read(TASKS_TABLE, ("Id",), KeySet(all_=True), limit=1, **store.request("outbox-any", READ_SECONDS))
        ):
            yield "warning", f"{TASKS_TABLE} of this database has no task. If the application runs, it {_BYPASSED}"
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


def _publishers(publisher: PublisherClient, topic: str) -> Iterator[Finding]:
    """Warn if the policy of the topic itself lets several members publish. Most workers may not read it."""
    with contextlib.suppress(GoogleAPICallError, GoogleAuthError):
        policy = publisher.get_iam_policy({"resource": topic}, timeout=TOPIC_SECONDS, retry=None)
        members = {member for each in policy.bindings if each.role in _PUBLISH for member in each.members}
        if len(members) > 1:
            yield (
                "warning",
                f"topic {topic}: {listed(sorted(members))} may publish. An application that does so {_BYPASSED}",
            )


def _topic(publisher: PublisherClient, topic: str, settings: WorkerSettings, allowed: Callable[[str], bool]) -> Finding:
    try:
        check_topic(topic)
    except InvalidMessage as error:
        return "wrong", str(error)
    name = topic_name(topic, settings.project)
    if not allowed(name):
        return "wrong", f"topic {name} matches no pattern of --allowed-topics: its tasks would become dead"
    try:
        found = publisher.get_topic(topic=name, timeout=TOPIC_SECONDS, retry=None)
    except NotFound as error:
        create = create_topic_command(settings, name)
        return "wrong", f"topic {name} does not exist. Create it: {create}. Pub/Sub: {describe(error)}"
    except PermissionDenied as error:
        needed = "no permission to check it (pubsub.topics.get); publishing needs roles/pubsub.publisher"
        return "unknown", f"topic {name}: {needed}. Pub/Sub: {describe(error)}"
    except (GoogleAPICallError, GoogleAuthError) as error:
        return "unreachable", f"topic {name}: {describe(error)}. Check the network and the endpoint of Pub/Sub"
    used = [each for each in found.message_transforms if not each.disabled]
    transforms = ", ".join(each.javascript_udf.function_name or "without a name" for each in used)
    effect = "one that drops messages loses tasks, and the inbox refuses messages without their attributes"
    warning = "warning", f"topic {name} has message transforms ({transforms}): {effect}"
    return warning if used else ("ok", f"topic {name}")
