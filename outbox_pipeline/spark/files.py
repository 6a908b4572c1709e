"""Small files and folders of the jobs, through Hadoop's file systems, so every URL that Spark supports works."""

import re
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from outbox.errors import OutboxError
from outbox_pipeline.spark.stack_traces import error_from, spark_errors

#: The first character of a pattern.
PATTERN = re.compile(r"[*?\[{]")


def is_connect(spark: SparkSession) -> bool:
    """Tell whether this is a session of Spark Connect, which has no JVM."""
    return not hasattr(spark, "sparkContext")


class Folder:
    """A folder or file, named by a path or URL of any file system that Spark supports.

    A session of Spark Connect has no file systems, so there it is only a path.
    """

    @spark_errors()
    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self._path: Any = path.rstrip("/")
        self._system: Any = None
        if is_connect(spark):
            return
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - the only way to Hadoop's file systems
        self._path = jvm.org.apache.hadoop.fs.Path(path)
        self._system = self._path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())  # noqa: SLF001 - the same

    def __str__(self) -> str:
        """Return the path. Hadoop's text of the working directory is empty."""
        return str(self._path.toString() if self._system else self._path) or "."

    def __truediv__(self, name: str) -> "Folder":
        """Return the child `name`."""
        return Folder(self._spark, f"{self}/{name}")

    @spark_errors()
    def exists(self) -> bool:
        """Tell whether it exists, or anything matches it as a pattern."""
        return bool(self._matches())

    @spark_errors()
    def matching(self) -> list[tuple[str, str, int]]:
        """Return the files that match it as a pattern, or are below a match: the path of the match, path and size."""
        found = []
        for match in self._matches():
            files = self._system.listFiles(match, True)
            while files.hasNext():
                file = files.next()
                found.append((str(match), str(file.getPath()), int(file.getLen())))
        return found

    def _matches(self) -> list[Any]:
        """Return the paths that match it as a pattern. A path without a pattern may have a colon."""
        if PATTERN.search(str(self)):
            return [each.getPath() for each in self._system.globStatus(self._path) or ()]
        return [self._system.makeQualified(self._path)] if self._system.exists(self._path) else []

    @spark_errors()
    def qualified(self) -> str:
        """Return its whole URL."""
        return str(self._system.makeQualified(self._path).toString() if self._system else self._path)

    @spark_errors()
    def sha256(self) -> str:
        """Return the SHA-256 of the file, in hexadecimal digits."""
        stream = self._system.open(self._path)
        try:
            jvm: Any = self._spark.sparkContext._jvm  # noqa: SLF001 - the same
            return str(jvm.org.apache.commons.codec.digest.DigestUtils.sha256Hex(stream))
        finally:
            stream.close()

    @spark_errors()
    def read(self) -> str | None:
        """Return the text of the file, or None if it does not exist. Raises OutboxError."""
        if not self.exists():
            return None
        stream = self._system.open(self._path)
        try:
            jvm: Any = self._spark.sparkContext._jvm  # noqa: SLF001 - the same
            return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def create(self, text: str) -> bool:
        """Create the file. Return False if it exists, so only one of two writers succeeds. Raises OutboxError."""
        try:
            stream = self._system.create(self._path, False)
            stream.write(bytearray(text.encode()))
            stream.close()  # an object store may detect only here that another writer was first
        except Py4JJavaError as error:
            # After another error, such as a full disk, the file can exist too, but is not complete.
            if "FileAlreadyExistsException" in str(error):
                return False
            raise OutboxError(f"{self} cannot be written. {error_from(str(error))}") from error
        return True
