"""Small files and folders of the jobs, through Hadoop's file systems, so every URL that Spark supports works."""

from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from outbox.errors import OutboxError

_ENDINGS = {"parquet": "parquet", "avro": "avro", "jsonl": "json", "ndjson": "json", "json": "json", "csv": "csv"}
#: Extensions of compressed files, which Spark decompresses by itself.
_COMPRESSED = ("gz", "bz2", "zst", "lz4", "snappy")


class Folder:
    """A folder or file, named by a path or URL of any file system that Spark supports."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        """Store the path, which does not need to exist."""
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - the only way to Hadoop's file systems
        self._spark = spark
        self._path = jvm.org.apache.hadoop.fs.Path(path)
        self._system = self._path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())  # noqa: SLF001 - the same

    def __str__(self) -> str:
        """Return the path."""
        return str(self._path.toString())

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return str(self._path.getName())

    def __truediv__(self, name: str) -> "Folder":
        """Return the child `name`."""
        return Folder(self._spark, f"{self}/{name}")

    def exists(self) -> bool:
        """Tell whether it exists."""
        return bool(self._system.exists(self._path))

    def folders(self) -> list["Folder"]:
        """Return its subfolders, sorted by name, or none if it does not exist."""
        if not self.exists():
            return []
        found = [each.getPath().getName() for each in self._system.listStatus(self._path) if each.isDirectory()]
        return [self / str(name) for name in sorted(found)]

    def read(self, name: str) -> str | None:
        """Return the text of a file in it, or None if the file does not exist. Raises OutboxError."""
        file = (self / name)._path  # noqa: SLF001 - an object of this class
        if not self._system.exists(file):
            return None
        stream = self._system.open(file)
        try:
            jvm: Any = self._spark.sparkContext._jvm  # noqa: SLF001 - see above
            return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        except Py4JJavaError as error:
            raise OutboxError(f"{file.toString()} cannot be read: {_sentence_of(error)}") from error
        finally:
            stream.close()

    def create(self, name: str, text: str) -> bool:
        """Create a file. Return False if it exists, so only one of two writers succeeds. Raises OutboxError."""
        file = (self / name)._path  # noqa: SLF001 - an object of this class
        try:
            stream = self._system.create(file, False)
            stream.write(bytearray(text.encode()))
            stream.close()  # an object store may detect only here that another writer was first
        except Py4JJavaError as error:
            if self._system.exists(file):
                return False
            raise OutboxError(f"{file.toString()} cannot be written: {_sentence_of(error)}") from error
        return True

    def delete(self) -> None:
        """Delete it with its contents."""
        self._system.delete(self._path, True)


def format_of(path: str) -> str | None:
    """Return the format of a path or glob by its extension, or None."""
    words = path.rstrip("/*").lower().rsplit("/", 1)[-1].split(".")
    ending = next((word for word in reversed(words) if word not in _COMPRESSED), "")
    return _ENDINGS.get(ending)


def _sentence_of(error: Py4JJavaError) -> str:
    return str(error.java_exception.getMessage()).partition("\n")[0]
