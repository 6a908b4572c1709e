"""Sums of the counts that Spark tasks return."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def totals(counts: DataFrame) -> DataFrame:
    """Return one row with the sum of each column, 0 if there are no rows."""
    return counts.select(*(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in counts.columns))
