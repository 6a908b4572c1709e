"""A client of Spark Connect: python -m tests.support.connect_client URL FOLDER OPTION=VALUE... Prints its results."""

import json
import sys
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import outbox_pipeline

url, folder = sys.argv[1], Path(sys.argv[2])
options = dict(each.split("=", 1) for each in sys.argv[3:])
spark = SparkSession.builder.remote(url).getOrCreate()

rows = spark.range(20).select(f.col("id").cast("string").alias("task_id"), f.lit("orders").alias("topic"))
rejected = f.when(f.col("task_id") != "7", f.lit("data"))
done = outbox_pipeline.register(
    rows.withColumn("data", rejected), rejects=str(folder / "rejects"), max_rows_per_second=1000, **options
)
rows.select(f.concat("task_id", f.lit(" written")).alias("task_id"), "topic", f.lit("x").alias("data")).write.format(
    "outbox"
).options(**options).mode("append").save()
tasks = spark.read.format("outbox").options(**options, columns="Id,State,Payload").load()
sent = spark.readStream.format("outbox").options(**options, columns="Id,Topic", since="2026-01-01T00:00:00Z").load()
query = sent.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
stream = query.format("parquet").start(str(folder / "sent"))
stream.awaitTermination()
(folder / "in").mkdir()
(folder / "in" / "lines.json").write_text('{"task_id": "of a stream", "topic": "orders", "data": "x"}\n')
lines = spark.readStream.schema("task_id string, topic string, data string").json(str(folder / "in"))
if pyspark.__version__ >= "4.1":  # Spark 4.0 writes no stream to the outbox
    query = lines.writeStream.option("checkpointLocation", str(folder / "of sink")).trigger(availableNow=True)
    query.format("outbox").options(**options).start().awaitTermination()
print(
    json.dumps(
        {
            "registered": done.registered,
            "rejected": [row.reason for row in spark.read.json(str(folder / "rejects" / "*")).collect()],
            "read": sorted(row.Id for row in tasks.where("State = 'pending' AND Payload = 'data'").collect()),
            "streamed": sorted(row.Id for row in spark.read.parquet(str(folder / "sent")).collect()),
            "archived": sorted(
                row.Id for row in outbox_pipeline.read_archive(spark, str(folder / "archive")).collect()
            ),
        }
    )
)
