"""What the names of files and folders say: the format, the compression, and columns."""

from urllib.parse import unquote

FORMATS = ("parquet", "json", "csv")
_ENDINGS = {"parquet": "parquet", "avro": "avro", "jsonl": "json", "ndjson": "json", "json": "json", "csv": "csv"}
#: Extensions of compressed files, which Spark decompresses by itself, except in UNREADABLE. Those of LZ4 and Snappy can
#: end its JVM, because it takes any four bytes for the size of a buffer.
COMPRESSED = ("gz", "bz2", "zst", "deflate")
UNREADABLE = (
    "lz4", "snappy", "sz", "zip", "xz", "lzma", "br", "lzo", "z", "7z", "tar", "tgz", "tbz2", "gzip", "bzip2", "zstd",
)  # fmt: skip
#: The value of a folder for NULL, which Hive has chosen.
_NULL = "__HIVE_DEFAULT_PARTITION__"


def format_of(path: str) -> str | None:
    """Return the format of a path or glob by its extension, or None."""
    words = path.rstrip("/*").lower().rsplit("/", 1)[-1].split(".")
    ending = next((word for word in reversed(words) if word not in COMPRESSED + UNREADABLE), "")
    return _ENDINGS.get(ending)


def names_format(path: str, format: str) -> bool:
    """Tell whether the name of a file has an extension of the format, also before others such as .tmp."""
    words = path.lower().rsplit("/", 1)[-1].split(".")[1:]
    return format in map(_ENDINGS.get, words) and words[-1] != "crc"  # Hadoop's checksum of a file


def columns_of_folders(path: str, begin: int = 0) -> dict[str, str | None]:
    """Return the columns of the folders NAME=VALUE of a file, without the first `begin` folders of its path.

    Programs escape characters in such names as in URLs. Raises UnicodeDecodeError if they are not UTF-8.
    """
    parts = (part.partition("=") for part in path.split("/")[begin:-1])
    values = {name: value for name, equals, value in parts if name and equals}
    return {
        unquote(name, errors="strict"): unquote(value, errors="strict") if value not in ("", _NULL) else None
        for name, value in values.items()
    }
