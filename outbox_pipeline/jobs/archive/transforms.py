"""The rows of the archive, and the checksum that proves that they were written."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from outbox_pipeline import schemas

_DAY = 86_400_000_000
#: Topics that are used as folder names. A file system allows 255 bytes, and each / or % becomes three bytes.
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
    stored = tasks.withColumns({"SentDate": f.date_from_unix_date(days), "TopicFolder": folder})
    return stored.select(*schemas.STORED.fieldNames())


def rebalanced(tasks: DataFrame) -> DataFrame:
    """Return the tasks with each day and topic in as few partitions as possible, so that the files are large."""
    return tasks.hint("rebalance", *schemas.ARCHIVE_PARTITIONS)


def checksum_columns() -> tuple[Column, Column]:
    """Return the number of tasks and their checksum, which tell whether two sets of archived tasks are equal."""
    whole = f.xxhash64(*schemas.ARCHIVED.fieldNames())
    return f.count(f.lit(1)).alias("rows"), f.sum(whole.cast("decimal(20,0)")).cast("string").alias("checksum")
