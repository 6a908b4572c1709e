"""The code of an older version, out of the history."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT

#: The commit that settled the schema. Workers of older commits refuse an index that stores BlockedBy.
OLDER = "1fa3e38"


def older_version(folder: Path) -> Path:
    """Write the older version to `folder` and return it. Skip the test if the clone is shallow."""
    archive = subprocess.run(
        ["git", "archive", OLDER, "outbox", "publishworker", "schema"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"the history does not reach back to {OLDER}: {archive.stderr.decode()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder
