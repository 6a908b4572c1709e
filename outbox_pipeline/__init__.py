"""The outbox on Spark: a data source for the table, and jobs that register, drain, archive, audit and replay tasks.

    outbox_pipeline.register_source(spark)
    tasks = spark.read.format("outbox").options(project="shop", instance="main", database="orders").load()

Needs the extra `spanner-outbox[spark]` and Java 17 or newer.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox_pipeline.jobs.archive.windows import read_archive
    from outbox_pipeline.jobs.register.ids import task_id
    from outbox_pipeline.jobs.register.job import Registered, register
    from outbox_pipeline.source.datasource import decoded, register_source

__all__ = ["Registered", "decoded", "read_archive", "register", "register_source", "task_id"]

#: The module of each name. The first use of a name imports PySpark, so a command can report that PySpark is missing.
_MODULES = {
    "Registered": "jobs.register.job",
    "decoded": "source.datasource",
    "read_archive": "jobs.archive.windows",
    "register": "jobs.register.job",
    "register_source": "source.datasource",
    "task_id": "jobs.register.ids",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - only this function needs it

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
