"""Reads copies of the archive and of received files, without Spark. Paths are local, or URLs that PyArrow supports."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq

from outbox.errors import SettingError
from outbox.message import parsed
from outbox_pipeline.jobs.audit.attributes import sha256_of
from outbox_pipeline.jobs.certificate.document import ARCHIVE, Certificate

#: Files that are no inputs, whose names begin with a dot or _.
_IGNORED = re.compile(r"(^|/)[._][^/]*$")
_COLUMNS = ["Id", "CreatedAt", "SentAt", "Data"]
#: A file whose digest is computed in parts of this many bytes.
_PART = 1 << 20


class Evidence:
    """The files in a folder, or one file."""

    def __init__(self, path: str) -> None:
        """Open it. Raises SettingError."""
        self._system: Any = fs.LocalFileSystem()
        self.path = path
        try:
            if "://" in path:
                self._system, self.path = fs.FileSystem.from_uri(path)
            found = self._system.get_file_info(self.path)
            files = [found]
            if found.type == fs.FileType.Directory:
                files = self._system.get_file_info(fs.FileSelector(self.path, recursive=True))
        except (OSError, pa.ArrowException) as error:
            raise SettingError(f"{path} cannot be read: {error}") from None
        if found.type == fs.FileType.NotFound:
            raise SettingError(f"{path} does not exist")
        base = f"{self.path.rstrip('/')}/"
        names = {each.path.removeprefix(base): each.path for each in files if each.type == fs.FileType.File}
        self.files = {name: file for name, file in names.items() if not _IGNORED.search(name)}

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a file."""
        found = hashlib.sha256()
        with self._system.open_input_stream(self.files[name]) as stream:
            while part := stream.read(_PART):
                found.update(part)
        return found.hexdigest()

    def tasks(self, certificate: Certificate) -> list[tuple[str, str]]:
        """Return the sent tasks of a certificate's window, sorted: the ID, and the digest of the message."""
        names = [name for name in certificate.inputs(ARCHIVE) if name.endswith(".parquet")]
        found = {task for name in names for task in self._tasks_of(name, certificate)}
        return sorted(found, key=lambda task: (task[0].encode(), task[1]))

    def _tasks_of(self, name: str, certificate: Certificate) -> Iterator[tuple[str, str]]:
        with self._system.open_input_file(self.files[name]) as file:
            for batch in pq.ParquetFile(file).iter_batches(columns=_COLUMNS):
                columns: Any = batch.to_pydict()
                for id, at, sent_at, data in zip(*(columns[name] for name in _COLUMNS), strict=True):
                    if sent_at and certificate.since <= at < certificate.until:
                        message = parsed(data)
                        empty = hashlib.sha256().hexdigest()
                        yield id, empty if message is None else sha256_of(message.data, message.attributes)
