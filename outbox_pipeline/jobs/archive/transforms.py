"""What is written to the archive, and what proves that it is there."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from outbox_pipeline import schemas

_DAY = 86_400_000_000
#: Topics that are the names of their folders: a file system takes 255 bytes, and each / or % becomes three of them.
_SHORT = r"^[A-Za-z][A-Za-z0-9._~+%/-]{0,71}$"


def archivable(tasks: DataFrame) -> DataFrame:
    """Return sent tasks with the columns of `schemas.STORED`."""
    # In UTC, whatever the session's time zone is.
    micros = f.unix_micros("SentAt")
    days = ((micros - f.pmod(micros, f.lit(_DAY))) / _DAY).cast("int")
    plain = f.substring(f.regexp_replace("Topic", "[^A-Za-z0-9]", "-"), 1, 48)
    folder = f.when(f.col("Topic").rlike(_SHORT), f.col("Topic")).otherwise(
        f.concat(f.lit("~"), plain, f.lit("~"), f.hex(f.xxhash64("Topic")))
    )
    made = tasks.withColumns({"SentDate": f.date_from_unix_date(days), "TopicFolder": folder})
    return made.select(*schemas.STORED.fieldNames())


def together(tasks: DataFrame) -> DataFrame:
    """Return the same, with the tasks of a day and topic in as few partitions as they fit: large files."""
    return tasks.hint("rebalance", *schemas.ARCHIVE_PARTITIONS)


def proof() -> tuple[Column, Column]:
    """Return what tells whether two sets of archived tasks are the same: their number, and a sum of hashes."""
    whole = f.xxhash64(*schemas.ARCHIVED.fieldNames())
    return f.count(f.lit(1)).alias("rows"), f.sum(whole.cast("decimal(20,0)")).cast("string").alias("checksum")
