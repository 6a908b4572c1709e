"""The rendered environment, given to the real commands on the emulators, works as in Kubernetes."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.devtools.child_process import LOOPBACK
from outbox.devtools.emulators import PUBSUB, SPANNER, Emulators, running_one
from tests.manifests.rendering import OVERLAYS, ROOT, Objects, container, environment, rendered, the, worker
from tests.support.processes import Process, run, started
from tests.support.waiting import eventually

#: Tasks that must be received: those of one order.
TASKS = 5
#: Where the image and the ConfigMap put files of the repository.
FOLDERS = {"/opt/examples": ROOT / "docs" / "examples", "/opt/development": OVERLAYS["development"]}


def variables(objects: Objects, pod: str, name: str, emulators: Emulators, scratch: Path) -> dict[str, str]:
    deployment = the(objects, "Deployment", pod)
    values = environment(objects, deployment["spec"]["template"], container(deployment, name))
    here = {"emulators:9010": emulators.spanner_host, "emulators:8085": emulators.pubsub_host, "/tmp": str(scratch)}
    here |= {folder: str(path) for folder, path in FOLDERS.items()}
    for there, path in here.items():
        values = {variable: value.replace(there, path) for variable, value in values.items()}
    return values


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_development_sends_orders(emulators: Emulators, tmp_path: Path) -> None:
    """The init containers run twice, as they do when a worker starts again. The probe finds the heartbeat file."""
    objects = rendered(OVERLAYS["development"])

    @contextlib.contextmanager
    def running(pod: str, name: str) -> Iterator[Process]:
        found = container(the(objects, "Deployment", pod), name)
        # The entry points of our two images.
        entry = [] if found["image"].startswith("publishworker-demo:") else ["publishworker"]
        module, *arguments = found.get("command") or [*entry, *found["args"]]
        with started(module, *arguments, environment=variables(objects, pod, name, emulators, tmp_path)) as process:
            yield process

    def received(process: Process) -> int:
        return max(map(int, re.findall(r"(\d+) of \d+ received", process.stdout)), default=0)

    def probe() -> int:
        command = container(worker(objects), "publishworker")["startupProbe"]["exec"]["command"]
        given = variables(objects, "publishworker", "publishworker", emulators, tmp_path)
        return run(*command, environment=given).code

    init = [each["name"] for each in worker(objects)["spec"]["template"]["spec"]["initContainers"]]
    assert init == ["prepare", "schema"]
    for name in init * 2:
        with running("publishworker", name) as process:
            assert process.wait(60) == 0
    assert probe() == 1
    with running("publishworker", "publishworker") as relay:
        with running("orders", "orders") as orders:
            eventually(lambda: received(orders) >= TASKS, seconds=60, message="tasks received")
            assert probe() == 0
            orders.stop()
            assert orders.wait() == 0
        relay.stop()
        assert relay.wait() == 0
        lines = [json.loads(line) for line in relay.stderr.splitlines()]  # OUTBOX_LOG_FORMAT
    assert {"start", "stopped"} <= {line["action"] for line in lines}


@pytest.mark.usefixtures("emulators")  # skips where there are none
def test_the_emulators_are_started_as_outbox_emulators_does() -> None:
    """The same programs below the SDK's root, but for the address: pods call them from outside; flags are known."""
    deployment = the(rendered(OVERLAYS["development"]), "Deployment", "emulators")
    for name, program in (("spanner", SPANNER), ("pubsub", PUBSUB)):
        found = container(deployment, name)
        command = " ".join(found["command"])
        port = found["ports"][0]["containerPort"]
        wanted = " ".join([f"/google-cloud-sdk/{program.path}", *program.arguments])
        assert command.startswith(wanted.replace(LOOPBACK, "0.0.0.0").replace("{port}", str(port)))
    with running_one(SPANNER, flags=container(deployment, "spanner")["command"][3:]) as host:
        assert host
