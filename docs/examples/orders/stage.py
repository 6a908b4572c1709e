"""What the demo plays on: a database, topics and subscriptions on the emulators, and worker processes."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1, spanner
from google.cloud.spanner_v1.database import Database

from outbox.devtools.child_process import tied
from outbox.devtools.emulators import Emulators, running
from outbox.errors import OutboxError

#: Where two transactions meet, Spanner lets one wait and the emulator aborts one: in a fifth of the cases the one that
#: came first, which may be a relay's that has published already. With 0 it is always the one that came second.
EMULATOR_FLAGS = ("--abort_current_transaction_probability", "0")
#: Seconds until a started worker has done its first poll, and seconds from SIGTERM to its end.
START_SECONDS, STOP_SECONDS = 30.0, 40.0
#: Seconds for a call that makes something; the emulators take milliseconds.
ADMIN_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """The names, and the database."""

    project: str
    database: Database
    subscriptions: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags with which a worker finds the database."""
        instance = self.database.name.split("/")[3]
        return ("--project", self.project, "--instance", instance, "--database", self.database.database_id)


@contextlib.contextmanager
def emulators() -> Iterator[Emulators]:
    """Run the emulators, or find those that the variables name, and let this process and its children use them."""
    with running(spanner_flags=() if os.environ.get("SPANNER_EMULATOR_HOST") else EMULATOR_FLAGS) as found:
        os.environ.update(found.environment())
        yield found


def make(name: str, ddl: Sequence[str], topics: Sequence[str], *, ordered: bool = False) -> Stage:
    """Make database, topics and subscriptions in a project of its own, so that nothing is in the way.

    All of it ends with the emulators.
    """
    project = f"{name}-demo-{uuid.uuid4().hex[:8]}"
    client = spanner.Client(project=project, credentials=AnonymousCredentials(), disable_builtin_metrics=True)
    instance = client.instance("demo", configuration_name=f"projects/{project}/instanceConfigs/emulator-config")
    instance.create().result(timeout=ADMIN_SECONDS)
    database = instance.database(name, ddl_statements=ddl)
    database.create().result(timeout=ADMIN_SECONDS)
    publisher, subscriber = pubsub_v1.PublisherClient(), pubsub_v1.SubscriberClient()
    subscriptions = tuple(f"projects/{project}/subscriptions/{topic}" for topic in topics)
    for topic, subscription in zip(topics, subscriptions, strict=True):
        full = f"projects/{project}/topics/{topic}"
        publisher.create_topic(name=full, timeout=ADMIN_SECONDS)
        wanted = {"name": subscription, "topic": full, "enable_message_ordering": ordered}
        subscriber.create_subscription(request=wanted, timeout=ADMIN_SECONDS)
    return Stage(project, database, subscriptions)


def serve_console(stage: Stage) -> None:
    """Serve the console of this database until Ctrl-C."""
    command = [
        sys.executable,
        "-m",
        "outbox_admin",
        "console",
        "--bind",
        "127.0.0.1:0",
        "--allow-actions",
        "--show-data",
    ]
    print("\nThe console of this run, until Ctrl-C:", flush=True)
    with (
        contextlib.suppress(KeyboardInterrupt),
        subprocess.Popen(tied([*command, *stage.flags]), process_group=0) as process,  # noqa: S603 - the command is ours
    ):
        try:
            process.wait()
        finally:
            process.terminate()


class Workers:
    """`publishworker run` several times, until the `with` block ends."""

    def __init__(self, stage: Stage, count: int, directory: Path) -> None:
        """Start `count` workers; what they write goes to files in `directory`."""
        self._heartbeats = [directory / f"worker-{number}.heartbeat" for number in range(1, count + 1)]
        self._logs = [path.with_suffix(".log") for path in self._heartbeats]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked_to_stop = False
        command = [sys.executable, "-m", "publishworker", "run", *stage.flags]
        logging = ("--log-format", "text", "--log-level", "warning")
        for heartbeat, log in zip(self._heartbeats, self._logs, strict=True):
            with log.open("wb") as output:
                self._processes.append(
                    subprocess.Popen(  # noqa: S603 - the command is ours
                        tied([*command, *logging, "--heartbeat-file", str(heartbeat)]),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        process_group=0,  # Ctrl-C on the terminal is for us; a second signal would kill a worker
                    )
                )

    def wait_until_polling(self) -> None:
        """Return when every worker has begun to poll. Raises OutboxError."""
        deadline = time.monotonic() + START_SECONDS
        while not all(path.exists() for path in self._heartbeats):
            if ended := self.ended():
                raise OutboxError(ended)
            if time.monotonic() > deadline:
                raise OutboxError(f"the workers did not begin to poll within {START_SECONDS:g} s\n{self.log()}")
            time.sleep(0.05)

    def ended(self) -> str | None:
        """Return how a worker ended by itself, or None while all run."""
        for number, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                return f"worker {number} ended with exit code {process.returncode}\n{self.log()}"
        return None

    def stop(self) -> list[str]:
        """Ask the workers to stop, as Kubernetes does; return a sentence for each that did not do it well.

        To be called again does and returns nothing.
        """
        faults: list[str] = []
        if self._asked_to_stop:
            return faults
        self._asked_to_stop = True
        for process in self._processes:
            process.terminate()
        for number, process in enumerate(self._processes, start=1):
            try:
                code = process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                faults.append(f"worker {number} did not stop within {STOP_SECONDS:g} s")
            else:
                unborn = code == -signal.SIGTERM and not self._heartbeats[number - 1].exists()
                if code and not unborn:
                    faults.append(f"worker {number} stopped with exit code {code} instead of 0")
        return faults

    def log(self) -> str:
        """Return the last lines that each worker wrote; the workers log nothing below a warning."""
        lines = [f"  {path.stem}: {line}" for path in self._logs for line in path.read_text().splitlines()[-10:]]
        return "\n".join(lines)

    def kill(self) -> None:
        """End what is left."""
        for process in self._processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def workers(stage: Stage, count: int) -> Iterator[Workers]:
    """Run `count` workers for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="orders-demo-") as directory:
        made = Workers(stage, count, Path(directory))
        try:
            yield made
        finally:
            try:
                for fault in made.stop():
                    print(f"demo: {fault}", file=sys.stderr)
            finally:  # also when a second Ctrl-C cuts the wait short
                made.kill()
