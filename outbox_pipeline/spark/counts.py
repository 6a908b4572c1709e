"""What becomes of the counts that Spark tasks answer."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def totals(counts: DataFrame) -> DataFrame:
    """Return one row: the sum of each column, 0 of none."""
    return counts.select(*(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in counts.columns))
