"""A Spanner emulator that answers gRPC and, for `gcloud`, REST: the Cloud SDK's gateway, always ended with us."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outbox.devtools import child_process
from outbox.devtools.child_process import tied
from outbox.errors import NotReached
from tests.support.waiting import eventually


@dataclass(frozen=True, slots=True)
class Gateway:
    spanner_host: str
    rest: str

    def gcloud(self, pubsub_host: str, directory: Path) -> dict[str, str]:
        return {
            "CLOUDSDK_CONFIG": str(directory),
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_SPANNER": f"http://{self.rest}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB": f"http://{pubsub_host}/",
        }


@contextlib.contextmanager
def running_gateway() -> Iterator[Gateway]:
    gcloud = shutil.which("gcloud")
    programs = Path(gcloud).resolve().parent / "cloud_spanner_emulator" if gcloud else None
    if programs is None or not (programs / "gateway_main").is_file():
        raise NotReached("no gcloud with the Spanner emulator in PATH")
    grpc_port, http_port = _free_ports(2)
    command = [
        str(programs / "gateway_main"), f"--hostname={child_process.LOOPBACK}", f"--grpc_port={grpc_port}",
        f"--http_port={http_port}", f"--grpc_binary={programs / 'emulator_main'}",
    ]  # fmt: skip
    # A process group of its own: the gateway starts the emulator and leaves it behind.
    process = subprocess.Popen(
        tied(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        hosts = [f"{child_process.LOOPBACK}:{port}" for port in (grpc_port, http_port)]
        eventually(lambda: all(map(child_process.answers, hosts)), seconds=30, message="the gateway to answer")
        yield Gateway(*hosts)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((child_process.LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
