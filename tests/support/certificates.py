"""Two certified days with their archive, received files and keys, for tests of certificates."""

import base64
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage
from pyspark.sql import SparkSession

from outbox.base.values import shown
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.program.settings import DatabaseSettings
from outbox.table.states import NEVER
from outbox_pipeline.job_settings import ArchiveSettings
from outbox_pipeline.jobs import archive
from tests.support.operations import insert, row
from tests.support.pipeline import options, write_lines

#: The certified days, and the day after, whose archive has the last tasks of the second one.
DAYS = [datetime(2026, 10, 20 + n, tzinfo=UTC) for n in range(4)]
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)


@dataclass(frozen=True)
class Place:
    """A folder with everything that an auditor gets."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("certificate-*.json"))

    def copy(self, to: Path) -> "Place":
        shutil.copytree(self.folder, to / "copy")
        return Place(to / "copy")

    def verify(self, *more: str, files: Sequence[Path] | None = None) -> list[str]:
        chosen = self.files if files is None else files
        return ["certificate", "verify", *map(str, chosen), "--public-key", str(self.path("key.pub")), *more]

    def inputs(self) -> list[str]:
        return ["--archive", str(self.path("archive")), "--received", str(self.path("received"))]


def payload(file: Path) -> dict[str, Any]:
    return dict(json.loads(base64.b64decode(json.loads(file.read_text())["payload"])))


def data(body: bytes, **attributes: str) -> bytes:
    return bytes(PubsubMessage.serialize(PubsubMessage(data=body, attributes=attributes)))


def received(id: str, at: datetime, body: bytes = b"paid", **attributes: str) -> dict[str, Any]:
    return {
        "message_id": f"of {id} at {at}",
        "publish_time": at.isoformat(),
        "data": base64.b64encode(body).decode(),
        "attributes": json.dumps({TASK_ID_ATTRIBUTE: id, **attributes}),
    }


def new_key(folder: Path, name: str = "key") -> None:
    """Create a key pair as the page for auditors does."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)


def prepare(spark: SparkSession, target: DatabaseSettings, database: Database, place: Place) -> None:
    """Insert tasks of two days, the last task sent after midnight, archive them, and write what was received."""
    tasks, messages = [], list[list[dict[str, Any]]]()
    for day in DAYS[:2]:
        ids = [f"{day:%d}-{n}" for n in range(5)]
        times = [day + n * HOUR for n in range(4)] + [day + timedelta(days=1) - SECOND]
        tasks += [
            row(id, Topic="orders" if n % 2 else "bills", Data=data(b"paid", kind="order", amount=str(n)),
                CreatedAt=at, SentAt=at + 5 * SECOND)
            for n, (id, at) in enumerate(zip(ids, times, strict=True))
        ]  # fmt: skip
        messages.append(
            [received(id, at + SECOND, kind="order", amount=str(n), googclient="x")
             for n, (id, at) in enumerate(zip(ids, times, strict=True))]
        )  # fmt: skip
    insert(database, tasks)
    for day, of_day in zip(DAYS, messages, strict=False):
        folder = place.path("received") / f"{day:%Y-%m-%d}"
        folder.mkdir(parents=True)
        write_lines(folder / "1.jsonl", of_day[:3])
        write_lines(folder / "2.jsonl", of_day[3:])
    given = options(target, archive=str(place.path("archive")), since=shown(DAYS[0]), until=shown(DAYS[3]))
    archive.run(spark, ArchiveSettings.read(given, {}), late=True)
    new_key(place.folder)


def audit(target: DatabaseSettings, place: Place, day: datetime, output: str, **more: str) -> list[str]:
    """Return the arguments that certify a day."""
    flags = {
        "since": shown(day),
        "until": shown(day + timedelta(days=1)),
        "archive": str(place.path("archive")),
        "received": str(place.path("received/%Y-%m-%d/*.jsonl")),
        "output": str(place.folder.parent / output),
        "certificate": str(place.path("certificate-%Y-%m-%d.json")),
        "key-file": str(place.path("key.pem")),
        **more,
    }
    chosen = options(target, **flags)
    return ["audit", *(f"--{name}={value}" for name, value in chosen.items() if value)]


__all__ = ["DAYS", "NEVER", "Place", "audit", "data", "new_key", "payload", "prepare", "received"]
