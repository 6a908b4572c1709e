"""The outbox on Spark: a data source for the table, and jobs that register, drain, archive, audit and replay tasks.

    shop = {"project": "shop", "instance": "main", "database": "orders"}
    tasks = spark.read.format("outbox").options(**shop).load()
    invoices.write.format("outbox").options(**shop, topic="invoices").mode("append").save()

Needs the extra `spanner-outbox[spark]` and Java 17 or newer.
"""

from typing import TYPE_CHECKING

from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox_pipeline.jobs.archive_files import read_archive
    from outbox_pipeline.jobs.register import Registered, register, register_stream
    from outbox_pipeline.rows.texts import task_id
    from outbox_pipeline.source.datasource import decoded

__all__ = ["Registered", "decoded", "read_archive", "register", "register_stream", "task_id"]

# The first use of a name imports PySpark, so a command can report that PySpark is missing.
__getattr__ = importer(
    __name__,
    {
        "jobs.archive_files": "read_archive",
        "jobs.register": "Registered register register_stream",
        "rows.texts": "task_id",
        "source.datasource": "decoded",
    },
)
