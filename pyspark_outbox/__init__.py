"""The format `outbox`, which every Spark session finds by the name of this package.

Spark imports the top-level packages named `pyspark_*` in each process that plans any Python source, and registers the
class `DefaultSource` of each. So the class imports the rest of the code only when it is used:
https://spark.apache.org/docs/4.0.0/api/python/tutorial/sql/python_data_source.html
"""

from importlib import import_module
from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

__all__ = ["DefaultSource", "OutboxDataSource"]


class OutboxDataSource(DataSource):
    """The table AsynchronousTasks. docs/pipeline/source.md describes the options and columns."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "outbox"

    def _make(self, name: str, *arguments: Any) -> Any:
        return getattr(import_module("outbox_pipeline.source.datasource"), name)(self.options, *arguments)

    def schema(self) -> Any:
        """Return the columns that the options select."""
        return self._make("schema_of")

    def reader(self, schema: StructType) -> Any:
        """Return the batch reader."""
        return self._make("reader_of", schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        """Return the stream reader, which follows sent tasks."""
        return self._make("OutboxStreamReader", schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Return the batch writer, which registers rows as tasks."""
        return self._make("OutboxWriter", schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the stream writer."""
        return self._make("OutboxStreamWriter", schema, overwrite)


DefaultSource = OutboxDataSource
