"""Small files and folders of the jobs, through Hadoop's file systems, so every URL that Spark supports works."""

from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from outbox.errors import OutboxError
from outbox_pipeline.spark.errors import error_from, spark_errors


class Folder:
    """A folder or file, named by a path or URL of any file system that Spark supports."""

    @spark_errors()
    def __init__(self, spark: SparkSession, path: str) -> None:
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

    @spark_errors()
    def exists(self) -> bool:
        """Tell whether it exists."""
        return bool(self._system.exists(self._path))

    @spark_errors()
    def folders(self) -> list["Folder"]:
        """Return its subfolders, sorted by name, or none if it does not exist."""
        if not self.exists():
            return []
        found = [each.getPath().getName() for each in self._system.listStatus(self._path) if each.isDirectory()]
        return [self / str(name) for name in sorted(found)]

    @spark_errors()
    def read(self, name: str) -> str | None:
        """Return the text of a file in it, or None if the file does not exist. Raises OutboxError."""
        file = self / name
        if not file.exists():
            return None
        stream = self._system.open(file._path)  # noqa: SLF001 - an object of this class
        try:
            jvm: Any = self._spark.sparkContext._jvm  # noqa: SLF001 - see above
            return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
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
            # After another error, such as a full disk, the file can exist too, but is not complete.
            if "FileAlreadyExistsException" in str(error):
                return False
            raise OutboxError(f"{file.toString()} cannot be written. {error_from(str(error))}") from error
        return True

    @spark_errors()
    def delete(self) -> None:
        """Delete it with its contents."""
        self._system.delete(self._path, True)


def check_files(spark: SparkSession, path: str) -> None:
    """Raise OutboxError if Spark would silently read no file, or not the files in subfolders."""
    read = set(spark.read.text(path).inputFiles())
    ignored = set(spark.read.option("recursiveFileLookup", True).text(path).inputFiles()) - read
    if ignored:
        raise OutboxError(
            f"Spark would ignore files in subfolders of {path}, such as {min(ignored)}. Pass the folders that have "
            f"files, with a pattern such as {path.rstrip('/')}/*/"
        )
    if not read:
        raise OutboxError(f"{path} contains no file. Check the path. Spark ignores names that begin with _ or a dot")


def read_all_columns(spark: SparkSession, path: str) -> DataFrame:
    """Return the rows of Parquet files with the columns of all files. Spark alone would read those of one file.

    A column that a file does not have is NULL. If two files have different types, the OutboxError names the column.
    """
    try:
        return spark.read.option("mergeSchema", True).parquet(path)
    except (PySparkException, Py4JError) as error:
        found: dict[str, tuple[str, str]] = {}
        for file in sorted(spark.read.parquet(path).inputFiles()):
            for column, type_ in spark.read.parquet(file).dtypes:
                other, where = found.setdefault(column, (type_, file))
                if other != type_:
                    raise OutboxError(
                        f"Column {column} is {other} in {where}, but {type_} in {file}. Write all files with the same "
                        "types"
                    ) from error
        raise
