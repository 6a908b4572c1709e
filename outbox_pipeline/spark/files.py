"""Files and folders through Hadoop's file systems, so every URL that Spark supports works, and the inputs of jobs.

Refuse input files that Spark would ignore or misread without an error. Spark ignores hidden names and files of 0
bytes. It reads all data files of a table of Delta Lake, Hudi, Iceberg or Paimon, so also deleted rows, and all files of
a stream, so also those of an unfinished batch.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as f

from outbox.errors import OutboxError
from outbox_pipeline.file_names import COMPRESSED, UNREADABLE, columns_of_folders, format_of, names_format
from outbox_pipeline.spark.stack_traces import error_from, refused, spark_errors

#: The first character of a pattern, or a backslash, which escapes one.
PATTERN = re.compile(r"[*?\[{\\]")
#: What only the folder of a table contains, as a pattern and in the paths of files below.
_OF_TABLE = (
    "{_delta_log,.hoodie,_spark_metadata,metadata/*.metadata.json*,metadata/version-hint.text,snapshot/snapshot-[0-9]*}"
)
_BELOW_TABLE = re.compile(
    r"/(_delta_log|\.hoodie|_spark_metadata)/|/metadata/([^/]*\.metadata\.json[^/]*|version-hint\.text)$"
    r"|/snapshot/snapshot-\d+$"
)
#: The rule of Spark's HadoopFSUtils.
_HIDDEN = re.compile(r"/(?:\.|_(?![^/]*=))|\._COPYING_$")


def quoted(name: str) -> str:
    """Return the name of a column as SQL."""
    return f"`{name.replace('`', '``')}`"


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
        if PATTERN.search(str(self)) and not self.is_literal():
            return [each.getPath() for each in self._system.globStatus(self._path) or ()]
        return [self._system.makeQualified(self._path)] if self._system.exists(self._path) else []

    @spark_errors()
    def is_literal(self) -> bool:
        """Tell whether there is a file or folder of this name, even if the name looks like a pattern."""
        return bool(self._system.exists(self._path))

    @spark_errors()
    def qualified(self) -> str:
        return str(self._system.makeQualified(self._path).toString() if self._system else self._path)

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

    @spark_errors()
    def delete(self) -> None:
        """Delete it and all that it contains."""
        self._system.delete(self._path, True)

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


@dataclass(frozen=True)
class Input:
    """Files of one format, also in subfolders. `columns` are the names of their folders NAME=VALUE."""

    spark: SparkSession
    path: str
    files: Sequence[str]
    columns: Sequence[str] = ()
    #: The size of the largest file.
    largest: int = 0

    def reader(self) -> DataFrameReader:
        """Return a reader of the columns of the files. Spark would decode those of folders as if they were ASCII."""
        # Many clusters skip damaged and missing files without an error.
        how = {"ignoreCorruptFiles": False, "ignoreMissingFiles": False, "recursiveFileLookup": True}
        return self.spark.read.options(**how)

    def lines(self) -> DataFrame:
        """Return the lines of text files as bytes, the file, and where its part begins."""
        lines = self.reader().text(self.path, lineSep="\n")
        return lines.selectExpr(
            "CAST(value AS BINARY) AS value", "_metadata.file_path AS file", "_metadata.file_block_start AS begin"
        )

    def check_columns(self, of_files: Iterable[str]) -> None:
        """Raise OutboxError if files and folders have the same column."""
        found = {name.casefold() for name in of_files}
        if twice := [name for name in self.columns if name.casefold() in found]:
            raise OutboxError(
                f"{self.path}: column {twice[0]} is in the files and in the names of their folders. Remove it from the "
                "files, or rename the folders"
            )


def checked(spark: SparkSession, path: str, format: str, known: Collection[str] = ()) -> Input:
    """Return the files that match `path`. `known` are the columns of the job, which can come from folders of the path.

    Raises OutboxError if Spark would not read all rows, or would read deleted ones.
    """
    qualified = Folder(spark, path).qualified()
    _check_tables(spark, qualified)
    if qualified.startswith("file:"):
        _check_links(qualified.removeprefix("file:"), format)
    sizes = dict[str, int]()
    for match, file, size in Folder(spark, path).matching():
        inside = file.removeprefix(match) or f"/{file.rpartition('/')[2]}"
        if _BELOW_TABLE.search(inside):
            raise _is_table(match)
        if not _HIDDEN.search(inside):
            sizes[file] = size
        elif names_format(file, format):
            raise OutboxError(
                f"Spark would ignore {file}, because a name begins with _ or a dot, or is that of an unfinished copy. "
                "Rename it, or move it away"
            )
    if not sizes:
        raise OutboxError(f"{path} contains no file. Check the path. Spark ignores names that begin with _ or a dot")
    # Those that are on the driver's disk, without links.
    places = [Path(file.removeprefix("file:")) for file in sizes if file.startswith("file:")]
    for folder in {place.resolve().parent for place in places} - {place.parent for place in places}:
        _check_tables(spark, f"file:{folder}")
    _check_names(path, sizes, format)
    _check_readable(sizes, format)
    begin = None if Folder(spark, path).is_literal() else PATTERN.search(qualified)
    if not begin:  # a name that looks like a pattern
        path = PATTERN.sub(r"\\\g<0>", path)
    literal = qualified[: begin.start()].rpartition("/")[0] if begin else qualified
    columns = _columns(sizes, literal.count("/") + 1, {name.casefold() for name in known})
    return Input(spark, path, sorted(sizes), columns, max(sizes.values()))


def _columns(files: Iterable[str], literal: int, known: Collection[str]) -> list[str]:
    """Return the names of the columns of folders.

    The first `literal` parts of each path are not a pattern. A folder of them is a column only if its name is known.
    """
    found = dict[str, None]()
    for file in sorted(files):
        try:
            outside = [name for name in columns_of_folders(file) if name.casefold() in known]
            found |= dict.fromkeys([*outside, *columns_of_folders(file, literal)])
        except UnicodeDecodeError:
            raise OutboxError(f"A folder of {file} has escaped characters that are not UTF-8. Rename it") from None
    return [*found]


def read_all_columns(given: Input) -> DataFrame:
    """Return the rows of Parquet files with the columns of all files. Spark alone would read those of one file.

    A column that a file does not have is NULL. If two files have different types, the OutboxError names the column.
    """
    try:
        rows = given.reader().option("mergeSchema", True).parquet(given.path)
    except (PySparkException, Py4JError) as error:
        found: dict[str, tuple[str, str]] = {}
        for file in given.files:
            for column, type_ in given.spark.read.parquet(file).dtypes:
                other, where = found.setdefault(column, (type_, file))
                if other != type_:
                    raise OutboxError(
                        f"Column {column} is {other} in {where}, but {type_} in {file}. Write all files with the same "
                        # In Parquet, pandas writes a column of None as integers without a value.
                        f"types{'. If it has no value in a file, drop it there' if 'int' in (type_, other) else ''}"
                    ) from error
        raise
    given.check_columns(rows.columns)
    return rows.withColumns({name: _of_folder(name)("_metadata.file_path") for name in given.columns})


def _of_folder(name: str) -> Callable[[str], Column]:
    return f.udf(lambda path: columns_of_folders(unquote(path)).get(name), "string")


def read_table(spark: SparkSession, flag: str, name: str) -> DataFrame:
    """Return the rows of a table or view of the session's catalog. Raises SettingError if `flag` names none."""
    with refused(f"{flag} {name}"):
        return spark.table(name)


def _check_links(path: str, format: str) -> None:
    """Raise OutboxError if a link of the driver's disk leads nowhere, which Spark would ignore."""
    for each in map(Path, [path, *glob(path), *glob(f"{path}/**", recursive=True)]):  # noqa: PTH207 - a whole pattern
        if each.is_symlink() and not each.exists() and (format_of(each.name) or format) == format:
            raise OutboxError(
                f"Spark would ignore {each}, because it is a link to {each.readlink()}, which does not exist"
            )


def _check_tables(spark: SparkSession, path: str) -> None:
    """Raise OutboxError if the path is a table, or in one."""
    for folder in accumulate(path.rstrip("/").split("/"), "{}/{}".format):
        try:
            is_table = not folder.endswith((":", "/")) and Folder(spark, f"{folder}/{_OF_TABLE}").exists()
        except OutboxError:  # a folder above the path can be forbidden
            continue
        if is_table:
            raise _is_table(folder)


def _is_table(folder: str) -> OutboxError:
    return OutboxError(
        f"{folder} is a table of Delta Lake, Hudi, Iceberg or Paimon, or was written by a stream. Its files can have "
        "deleted or unfinished rows. Pass it as a table of Spark's catalog (--input-table, --received-table), or write "
        "its rows to new files"
    )


def _check_names(path: str, files: Collection[str], format: str) -> None:
    """Raise OutboxError if a file may be unfinished: its name continues after the extension, or others have one."""
    others = [file for file in files if format_of(file) != format]
    if wrong := [file for file in others if len(others) < len(files) or names_format(file, format)]:
        raise OutboxError(
            f"{min(wrong)} does not end with the extension of {format}. Another program may still be writing it, or it "
            f"is no input. Rename it, move it away, or pass a pattern such as {path.rstrip('/')}/*.{format}"
        )


def _check_readable(sizes: Mapping[str, int], format: str) -> None:
    """Raise OutboxError if a file cannot be decompressed, or is empty. Only JSON lines may all be empty."""
    for file in sizes if format in ("json", "csv") else ():
        endings = file.rpartition("/")[2].lower().split(".")[1:]
        compressed = [each for each in endings if each in COMPRESSED + UNREADABLE]
        if compressed[1:] or file.lower().endswith(tuple(f".{each}" for each in UNREADABLE)):
            raise OutboxError(
                f"Spark cannot read {file}, because of its compression .{'.'.join(compressed)}. Compress it once, "
                f"as {', '.join(f'.{each}' for each in COMPRESSED[:3])}, or not at all"
            )
    empty = [file for file, size in sizes.items() if not size]
    if format == "json":
        # For a partition without rows, Spark and Hadoop write an empty file of this name.
        empty = [file for file in empty if len(empty) < len(sizes) and not re.search(r"/part-[^/]*$", file)]
    if empty:
        raise OutboxError(f"{min(empty)} is empty. Write it again, or delete it if it should have no rows")


def whole_files(given: Input) -> Input:
    """Return the files, none of which Spark divides."""
    session = SparkSession(given.spark.sparkContext, given.spark._jsparkSession.cloneSession())  # noqa: SLF001 - keeps its options
    size = max(given.largest, 128 * 2**20)
    session.conf.set("spark.sql.files.maxPartitionBytes", str(size))
    session.conf.set("spark.sql.files.minPartitionNum", "1")
    return replace(given, spark=session)
