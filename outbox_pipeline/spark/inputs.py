"""The files that users pass to jobs. Files that Spark would ignore or misread without an error are refused.

Spark ignores hidden names, subfolders and files of 0 bytes. It reads all data files of a table of Delta Lake, Hudi or
Iceberg, so also deleted rows.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession

from outbox.errors import OutboxError
from outbox_pipeline.settings import COMPRESSED, UNREADABLE, format_of
from outbox_pipeline.spark.files import PATTERN, Folder

#: What only the folder of a table contains.
_OF_TABLES = {
    "_delta_log": "Delta Lake",
    ".hoodie": "Hudi",
    "metadata/*.metadata.json*": "Iceberg",
    "metadata/version-hint.text": "Iceberg",
}
_BELOW_TABLE = re.compile(r"/(_delta_log|\.hoodie)/|/metadata/([^/]*\.metadata\.json[^/]*|version-hint\.text)$")
#: Max bytes of a compressed file without content. Its header can have a file name.
_SMALL = 512


@dataclass(frozen=True)
class Input:
    """Files of one format. `columns` are the names of their folders NAME=VALUE, which are in the folder `base`."""

    spark: SparkSession
    path: str
    files: Sequence[str]
    base: str = ""
    columns: Sequence[str] = ()
    #: Columns of folders that the user passed, and that the job does not know.
    unwanted: Sequence[str] = ()

    def reader(self) -> DataFrameReader:
        """Return a reader of the columns of files and folders."""
        return self.spark.read.option("basePath", self.base) if self.columns else self.spark.read

    def reader_of_files(self) -> DataFrameReader:
        """Return a reader of the columns of the files."""
        return self.spark.read.option("recursiveFileLookup", True)

    def check_columns(self, of_files: Iterable[str]) -> None:
        """Raise OutboxError if files and folders have the same column. Spark would read that of the folders."""
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
    visible = {}
    for match, file, size in Folder(spark, path).matching():
        inside = file.removeprefix(match) or f"/{file.rpartition('/')[2]}"
        if _BELOW_TABLE.search(inside):
            raise _is_table(match, "Delta Lake, Hudi or Iceberg")
        # The same rule as in Spark's HadoopFSUtils.
        hidden = re.search(r"/(?:\.|_(?![^/]*=))|\._COPYING_$", inside)
        if not hidden:
            visible[file] = (inside, size)
        elif size and format_of(file.removesuffix("._COPYING_")) == format:
            raise OutboxError(
                f"Spark would ignore {file}: a name begins with _ or a dot, or the file is still written. Rename it, "
                "or move it away"
            )
    if not visible:
        raise OutboxError(f"{path} contains no file. Check the path. Spark ignores names that begin with _ or a dot")
    _check_empty(spark, {file: size for file, (_, size) in visible.items()}, format)
    begin = PATTERN.search(qualified)
    literal = qualified[: begin.start()].rpartition("/")[0] if begin else qualified
    found = _in_folders(spark, path, sorted(visible), literal.count("/") + 1, known)
    nested = [file for file, (inside, _) in visible.items() if inside.count("/") > 1]
    if nested and not found.columns:
        raise OutboxError(
            f"Spark would ignore files in subfolders of {path}, such as {min(nested)}. Pass the folders that have "
            f"files, with a pattern such as {path.rstrip('/')}/*/"
        )
    return found


def read_all_columns(given: Input) -> DataFrame:
    """Return the rows of Parquet files with the columns of all files. Spark alone would read those of one file.

    A column that a file does not have is NULL. If two files have different types, the OutboxError names the column.
    """
    try:
        of_files = given.reader_of_files().option("mergeSchema", True).parquet(given.path)
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
    given.check_columns(of_files.columns)
    return given.reader().schema(of_files.schema).parquet(given.path).drop(*given.unwanted)


def _check_tables(spark: SparkSession, path: str) -> None:
    """Raise OutboxError if the path is a table, or in one."""
    parts = path.rstrip("/").split("/")
    folders = ["/".join(parts[: end + 1]) for end, part in enumerate(parts) if part and not part.endswith(":")]
    for folder in folders:
        for name, kind in _OF_TABLES.items():
            found = False
            with suppress(OutboxError):  # a folder above the path can be forbidden
                found = Folder(spark, f"{folder}/{name}").has_match()
            if found:
                raise _is_table(folder, kind)


def _is_table(folder: str, kind: str) -> OutboxError:
    return OutboxError(
        f"{folder} is a table of {kind}. Its files can have deleted rows. Read it with its own reader, and pass the "
        "DataFrame to the job or write it to new files"
    )


def _check_empty(spark: SparkSession, sizes: dict[str, int], format: str) -> None:
    """Raise OutboxError if a file is empty or cannot be decompressed. Only JSON lines may all be empty."""
    empty = []
    for file, size in sizes.items():
        endings = file.rpartition("/")[2].lower().split(".")[1:]
        if format in ("json", "csv") and endings:
            compressed = [each for each in endings if each in COMPRESSED + UNREADABLE]
            if endings[-1] in UNREADABLE or compressed[1:]:
                raise OutboxError(
                    f"Spark cannot read {file}, because of its compression .{'.'.join(compressed)}. Compress it once, "
                    f"as {', '.join(f'.{each}' for each in COMPRESSED[:3])}, or not at all"
                )
            if 0 < size <= _SMALL and endings[-1] in COMPRESSED:
                with suppress(OutboxError):  # Spark reports a damaged file
                    size = int(Folder(spark, file).has_content())  # noqa: PLW2901 - see above
        # For a partition without rows, Spark and Hadoop write an empty file of this name.
        if not size and not (format == "json" and file.rpartition("/")[2].startswith("part-")):
            empty.append(file)
    if empty and (format != "json" or len(empty) < len(sizes)):
        raise OutboxError(f"{min(empty)} is empty. Write it again, or delete it if it should have no rows")


def _in_folders(spark: SparkSession, path: str, files: Sequence[str], literal: int, known: Collection[str]) -> Input:
    """Return the input with the columns of folders. The first `literal` parts of each path are not a pattern.

    Raises OutboxError if Spark would lose a column, or the files in some folders.
    """
    kinds: dict[tuple[str, tuple[str, ...]], str] = {}
    for file in files:
        parts = file.split("/")[:-1]
        begin = next((at + 1 for at in range(len(parts) - 1, -1, -1) if "=" not in parts[at]), 0)
        for at, part in enumerate(parts[:begin]):
            if "=" in part and (at >= literal or part.partition("=")[0] in known):
                raise OutboxError(
                    f"Spark would ignore the column of the folder {part}, because {file} is in a subfolder without a "
                    "column. Move the files into the folder"
                )
        names = tuple(part.partition("=")[0] for part in parts[begin:])
        kinds.setdefault(("/".join(parts[:begin]) if names else "", names), file)
    if len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise OutboxError(
            f"{one} and {other} are not in folders with the same columns, so Spark would ignore files. Pass them in "
            "separate runs"
        )
    [(base, names)] = kinds
    begin = base.count("/") + 1
    unwanted = [name for at, name in enumerate(names) if begin + at < literal and name not in known]
    return Input(spark, path, files, base, names, unwanted)
