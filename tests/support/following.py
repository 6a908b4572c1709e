"""A streaming query in a process of its own: `python -m tests.support.following DATABASE CHECKPOINT SINK`.

Follows tasks sent since 2026, twice a second, into Parquet. SIGTERM stops it as an operator would: the batch in work
is finished.
"""

import signal
import sys
import threading

from outbox_pipeline import register_source
from outbox_pipeline.spark.session import session
from tests.support.spanner import INSTANCE, PROJECT

COLUMNS = "Id,Topic,SentAt,Payload"


def main(database: str, checkpoint: str, sink: str) -> None:
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    spark = session("following", "local[2,3]")
    register_source(spark)
    tasks = (
        spark.readStream.format("outbox")
        .options(
            project=PROJECT,
            instance=INSTANCE,
            database=database,
            columns=COLUMNS,
            since="2026-01-01T00:00:00Z",
            partitions="2",
        )
        .load()
    )
    query = (
        tasks.writeStream.format("parquet")
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="500 milliseconds")
        .start(sink)
    )
    while not stopping.wait(0.1) and query.isActive:
        pass
    query.stop()
    if query.exception() is not None:
        sys.exit(str(query.exception()))
    print("stopped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
