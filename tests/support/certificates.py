"""What an auditor of certificates gets: a folder with certificates, archive, received files and keys."""

import base64
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.pubsub_v1.types import PubsubMessage


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


def new_key(folder: Path, name: str = "key") -> None:
    """Create a key pair as the page for auditors does."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
