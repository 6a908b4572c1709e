"""Registers the format `outbox` in every Spark session.

Spark imports the top-level packages named `pyspark_*` and registers the class `DefaultSource` of each:
https://spark.apache.org/docs/4.0.0/api/python/tutorial/sql/python_data_source.html
"""

from outbox_pipeline.source.datasource import OutboxDataSource as DefaultSource

__all__ = ["DefaultSource"]
