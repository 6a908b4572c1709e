"""The rendered environment, given to the real commands on the emulators: what Kubernetes would start does its work."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import spanner

from outbox import schema
from outbox._child import LOOPBACK
from outbox.emulators import PUBSUB, SPANNER, Emulators, running_spanner
from tests.manifests.rendering import (
    OVERLAYS,
    ROOT,
    Object,
    Objects,
    container,
    environment,
    pod,
    rendered,
    the,
    worker,
)
from tests.support.processes import Process, run, started
from tests.support.spanner import ADMIN_SECONDS
from tests.support.waiting import eventually

#: Tasks that must be received: those of one order.
TASKS = 5
#: Where the image and the ConfigMap put what is here in the repository.
FOLDERS = {"/opt/examples": ROOT / "docs" / "examples", "/opt/development": OVERLAYS["development"]}


def variables(objects: Objects, deployment: Object, name: str, emulators: Emulators, scratch: Path) -> dict[str, str]:
    """Return the variables of a container; hosts, and what is mounted, are those of this machine."""
    values = environment(objects, deployment, container(deployment, name))
    here = {"emulators:9010": emulators.spanner_host, "emulators:8085": emulators.pubsub_host, "/tmp": str(scratch)}
    here |= {folder: str(path) for folder, path in FOLDERS.items()}
    for there, path in here.items():
        values = {variable: value.replace(there, path) for variable, value in values.items()}
    return values


def words(of: Object) -> list[str]:
    """Return the module and the arguments that a container runs, as the entry points of our two images have them."""
    if "command" in of:
        return list(of["command"])
    entry = [] if of["image"].startswith("publishworker-demo:") else ["publishworker"]
    return [*entry, *of["args"]]


@contextlib.contextmanager
def running(objects: Objects, deployment: Object, name: str, emulators: Emulators, scratch: Path) -> Iterator[Process]:
    """Run what a container runs for the time of the block."""
    module, *arguments = words(container(deployment, name))
    with started(module, *arguments, environment=variables(objects, deployment, name, emulators, scratch)) as process:
        yield process


def received(process: Process) -> int:
    """Return how many tasks the order service has received, by its last line."""
    return max(map(int, re.findall(r"(\d+) of \d+ received", process.stdout)), default=0)


@pytest.mark.timeout(300)
def test_development_sends_orders(emulators: Emulators, tmp_path: Path) -> None:
    """Init containers, worker and order service as they are rendered: orders are placed, their tasks are received.

    The init containers run twice, as they do when a worker starts again.
    """
    objects = rendered(OVERLAYS["development"])
    deployment, service = worker(objects), the(objects, "Deployment", "orders")
    init = [each["name"] for each in pod(deployment)["initContainers"]]
    assert init == ["prepare", "schema"]
    for name in init * 2:
        with running(objects, deployment, name, emulators, tmp_path) as process:
            assert process.wait(60) == 0
    with running(objects, deployment, "publishworker", emulators, tmp_path) as relay:
        with running(objects, service, "orders", emulators, tmp_path) as orders:
            eventually(lambda: received(orders) >= TASKS, seconds=60, message="tasks received")
            orders.stop()
            assert orders.wait() == 0
        relay.stop()
        assert relay.wait() == 0
        lines = [json.loads(line) for line in relay.stderr.splitlines()]  # OUTBOX_LOG_FORMAT
    assert {"start", "stopped"} <= {line["action"] for line in lines}


def test_the_probes_look_at_the_file_that_the_worker_touches(emulators: Emulators, tmp_path: Path) -> None:
    """1 before the worker runs, 0 while it does: both read the same variable."""
    objects = rendered(OVERLAYS["development"])
    deployment = worker(objects)
    probe = container(deployment, "publishworker")["startupProbe"]["exec"]["command"]
    given = variables(objects, deployment, "publishworker", emulators, tmp_path)
    assert run(*probe, environment=given).code == 1
    (tmp_path / "publishworker.heartbeat").touch()
    assert run(*probe, environment=given).code == 0


def test_productions_settings_pass_the_check(emulators: Emulators, tmp_path: Path) -> None:
    """`publishworker check` finds settings and table, with the placeholders as names of a database on the emulator."""
    objects = rendered(OVERLAYS["production"])
    given = variables(objects, worker(objects), "publishworker", emulators, tmp_path) | emulators.environment()
    with placeholder_database(given, emulators):
        done = run("publishworker", "check", environment=given, seconds=60)
    assert done.code == 0, done.stdout + done.stderr
    verdicts = [line.split()[0] for line in done.stdout.splitlines()]
    assert verdicts == ["ok", "ok"]
    assert f"heartbeat_file={tmp_path}/publishworker.heartbeat" in done.stdout


@contextlib.contextmanager
def placeholder_database(given: Mapping[str, str], emulators: Emulators) -> Iterator[None]:
    """Make the database that these variables name, for the time of the block."""
    project = given["OUTBOX_PROJECT"]
    with mock.patch.dict(os.environ, {"SPANNER_EMULATOR_HOST": emulators.spanner_host}):
        client = spanner.Client(project=project, credentials=AnonymousCredentials(), disable_builtin_metrics=True)
    configuration = f"projects/{project}/instanceConfigs/emulator-config"
    instance = client.instance(given["OUTBOX_INSTANCE"], configuration_name=configuration)
    instance.create().result(timeout=ADMIN_SECONDS)
    database = instance.database(given["OUTBOX_DATABASE"], ddl_statements=schema.statements())
    database.create().result(timeout=ADMIN_SECONDS)
    try:
        yield
    finally:
        database.drop()
        instance.delete()


def test_the_emulators_are_started_as_outbox_emulators_does() -> None:
    """The same programs below the SDK's root, but for the address: pods call them from outside."""
    deployment = the(rendered(OVERLAYS["development"]), "Deployment", "emulators")
    for name, program in (("spanner", SPANNER), ("pubsub", PUBSUB)):
        found = container(deployment, name)
        command = " ".join(found["command"])
        port = found["ports"][0]["containerPort"]
        wanted = " ".join([f"/google-cloud-sdk/{program.path}", *program.arguments])
        assert command.startswith(wanted.replace(LOOPBACK, "0.0.0.0").replace("{port}", str(port)))


@pytest.mark.usefixtures("emulators")  # skips where there are none
def test_an_emulator_takes_the_flags_of_its_pod() -> None:
    """Spanner's flags are not in any list of ours: it is started with them."""
    deployment = the(rendered(OVERLAYS["development"]), "Deployment", "emulators")
    flags = container(deployment, "spanner")["command"][3:]
    with running_spanner(flags=flags) as host:
        assert host
