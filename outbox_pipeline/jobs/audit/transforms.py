"""Tasks held against the messages that subscribers received: pure.

Only ids, times, numbers and digests are shuffled. The clocks: a window and a task's times are Spanner's, a message's
time is Pub/Sub's (publish_time), and `Rules.skew` is how far the two may be apart.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from outbox.storage.task_states import NEVER
from outbox_pipeline import schemas
from outbox_pipeline.jobs.audit.digests import digest
from outbox_pipeline.spark.messages import decoded

#: What the audit reads of a task.
OF_TASKS = ("Id", "Topic", "Data", "OrderingKey", "Sequence", "CreatedAt", "AvailableAt", "SentAt")
#: Each task in the window has one of these; docs/pipeline/audit.md says what they mean.
STATES = ("delivered", "late", "lost", "arriving", "pending", "dead")
#: What may be wrong with the messages of a task, each with how often.
FLAWS = ("republished", "redelivered", "mismatched")
OUT_OF_ORDER = "out_of_order"
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Rules:
    """What is judged, and when.

    Tasks created from `since` on, None for all, and before `until`. All that was sent a `grace` before `horizon` must
    have been received by it; what was received a grace after `until` is late. `known_until` is until when published
    messages must be those of a task that was read.
    """

    since: datetime | None
    until: datetime
    horizon: datetime
    known_until: datetime
    grace: timedelta
    skew: timedelta


def sends(tasks: DataFrame, *, bodies: bool) -> DataFrame:
    """Return one row a sending, or an unsent task: `schemas.SEND`. The digest is without the data unless `bodies`."""
    key = f.when(f.col("OrderingKey").isNotNull(), f.xxhash64("Topic", "OrderingKey"))
    dead = f.coalesce(f.col("AvailableAt") >= f.lit(NEVER), f.lit(False))
    return decoded(tasks).select(
        f.col("Id").alias("task_id"),
        f.col("Topic").alias("topic"),
        key.alias("key"),
        f.col("Sequence").alias("sequence"),
        f.col("CreatedAt").alias("created_at"),
        f.col("SentAt").alias("sent_at"),
        dead.alias("dead"),
        digest(f.col("Attributes"), f.col("Payload") if bodies else f.lit(None)).alias("digest"),
    )


def judged(sendings: DataFrame, deliveries: DataFrame, rules: Rules) -> DataFrame:
    """Return `schemas.JUDGED`: a row for each sending with what came of it, and one for each id that has none.

    `sendings` are those of `sends`, `deliveries` those of `received.received`, both whole.
    """
    of_it = f.col("task_id") == f.col("received_id")
    joined = _bounded(sendings, rules).join(_by_task(deliveries), of_it, "full_outer")
    # Nearly each task was sent once: what holds for an array of one is found without a look into each.
    after, before = f.col("after"), f.col("before")
    own = f.when(after.isNull() & before.isNull(), f.col("came")).otherwise(
        f.filter("came", lambda each: _between(each["at"], after, before))
    )
    digest = f.col("digest")
    columns = {
        "task_id": f.coalesce("task_id", "received_id"),
        "first": f.when(f.col("topic").isNotNull(), after.isNull()),
        "first_at": f.array_min("own.at"),
        "deliveries": f.coalesce(f.array_size("own"), f.lit(0)).cast("long"),
        "messages": _distinct("own"),
        "mismatched": f.when((f.array_min("own.digest") == digest) & (f.array_max("own.digest") == digest), 0)
        .otherwise(_distinct(f.filter("own", lambda each: each["digest"] != digest)))
        .cast("long"),
        "known": f.when(f.col("topic").isNull(), f.exists("own", lambda each: _is_known(each["at"], rules))),
    }
    counted = joined.withColumn("own", own).withColumns(columns)
    repeats = {
        "republished": f.greatest(f.col("messages") - 1, f.lit(0)),
        "redelivered": f.col("deliveries") - f.col("messages"),
    }
    stated = counted.withColumns({"state": _state(rules), **repeats})
    return stated.select(*schemas.JUDGED.fieldNames())


def _by_task(deliveries: DataFrame) -> DataFrame:
    """Return a row for each id that was received, with its deliveries in an array: when, of which message, digest."""
    of_outbox = deliveries.where("readable AND task_id IS NOT NULL").withColumnRenamed("task_id", "received_id")
    delivery = f.struct(f.col("publish_time").alias("at"), f.xxhash64("message_id").alias("message"), "digest")
    # Side by side first: nearly each id was received once, so there is nothing to gain by grouping before that.
    side_by_side = of_outbox.repartition("received_id").sortWithinPartitions("received_id")
    return side_by_side.groupBy("received_id").agg(f.collect_list(delivery).alias("came"))


def _distinct(deliveries: Column | str) -> Column:
    """Return of how many messages some deliveries are; 0 of NULL."""
    array = f.col(deliveries) if isinstance(deliveries, str) else deliveries
    many = f.array_size(f.array_distinct(array["message"]))
    return f.coalesce(f.when(f.array_size(array) == 1, 1).otherwise(many), f.lit(0)).cast("long")


def _between(at: Column, after: Column, before: Column) -> Column:
    return (after.isNull() | (at > after)) & (before.isNull() | (at <= before))


def _bounded(sendings: DataFrame, rules: Rules) -> DataFrame:
    """Return the sendings of each id with the times between which their messages were published: `after`, `before`.

    A message is published before its task is marked, so what was published between two SentAt of an id belongs to the
    later one. The bound is a skew behind the SentAt, but never behind the middle between two of them.
    """
    of_id = Window.partitionBy("task_id").orderBy(f.col("sent_at").asc_nulls_last(), "created_at")
    micros, next_micros = f.unix_micros("sent_at"), f.unix_micros(f.lead("sent_at").over(of_id))
    middle = f.timestamp_micros(micros + f.floor((next_micros - micros) / 2))
    last = f.lead("created_at").over(of_id).isNull()
    # The least of what is not NULL: there is no middle where the next one is not sent.
    ends = sendings.withColumn("before", f.when(~last, f.least(f.col("sent_at") + f.lit(rules.skew), middle)))
    return ends.withColumn("after", f.lag("before").over(of_id))


def _is_known(at: Column, rules: Rules) -> Column:
    """Return whether a message was published when its task must have been read."""
    before = at < f.lit(rules.known_until)
    return before if rules.since is None else before & (at >= f.lit(rules.since + rules.skew))


def _state(rules: Rules) -> Column:
    created = f.col("created_at")
    inside = created < f.lit(rules.until)
    if rules.since is not None:
        inside &= created >= f.lit(rules.since)
    received = f.col("first_at")
    no_message = f.when(f.col("sent_at") >= f.lit(rules.horizon - rules.grace), f.lit("arriving")).otherwise(
        f.lit("lost")
    )
    of_task = (
        f.when(f.col("sent_at").isNull(), f.when(f.col("dead"), f.lit("dead")).otherwise(f.lit("pending")))
        .when(received.isNull(), no_message)
        .when(received >= f.lit(rules.until + rules.grace), f.lit("late"))
        .otherwise(f.lit("delivered"))
    )
    # Near the bounds a message may belong to a task that was not read.
    unknown = f.when(f.col("known"), f.lit("unknown"))
    return f.when(created.isNull(), unknown).when(inside, of_task)


def out_of_order(rows: DataFrame) -> DataFrame:
    """Return those of `judged` whose first message was published before that of an earlier task of their key.

    The order of a key is that of CreatedAt, Sequence, Id (docs/guide/ordering.md). Repeats may come at any time, so
    only the first sending that is known of a task counts, and only of tasks of the window: of an older one the first
    sending may be unknown.
    """
    before = (
        Window.partitionBy("key")
        .orderBy("created_at", f.col("sequence").asc_nulls_first(), "task_id")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    firsts = rows.where("key IS NOT NULL AND first AND first_at IS NOT NULL AND state IS NOT NULL")
    return firsts.withColumn("overtaken_at", f.max("first_at").over(before)).where("first_at < overtaken_at")


def counted(rows: DataFrame) -> DataFrame:
    """Return few rows out of many, of which `numbers` makes each number: by topic, hour, and rounded latency.

    A latency, in microseconds here, is from CreatedAt to the first publish_time of what was received; clocks that
    differ make none less than 0. Rounded to three digits.
    """
    took = f.unix_micros("first_at") - f.unix_micros("created_at")
    latency = f.when(took.isNotNull(), f.greatest(took, f.lit(0)))  # the greatest of NULL and 0 is 0
    unit = f.pow(f.lit(10), f.greatest(f.floor(f.log10(f.greatest(latency, f.lit(1)))) - 2, f.lit(0)))
    columns = {
        "latency": latency,
        "rounded": (f.round(latency / unit) * unit).cast("long"),
        "hour": f.date_trunc("hour", "created_at"),
    }
    of_window = f.col("state").isin(*STATES)
    return (
        rows.where(of_window | (f.col("state") == "unknown"))
        .withColumns(columns)
        .groupBy("topic", "hour", "rounded")
        .agg(
            f.count_if(of_window).alias("tasks"),
            *(f.count_if(f.col("state") == name).alias(name) for name in (*STATES, "unknown")),
            *(f.coalesce(f.sum(f.when(of_window, f.col(name))), f.lit(0)).alias(name) for name in ("messages", *FLAWS)),
            f.max("latency").alias("max"),
        )
    )


def numbers(counts: DataFrame, *by: str) -> DataFrame:
    """Return the numbers of the window's tasks, for each value of `by` (of `topic`, `hour`): latencies in seconds."""
    tasks = counts.where("tasks > 0")
    points = f.percentile("rounded", list(PERCENTILES.values()), f.col("tasks"))
    summed = tasks.groupBy(*by).agg(
        *(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in ("tasks", *STATES, "messages", *FLAWS)),
        points.alias("points"),
        (f.max("max") / 1e6).alias("max"),
    )
    named = [(f.col("points")[place] / 1e6).alias(name) for place, name in enumerate(PERCENTILES)]
    return summed.select("*", *named).drop("points")


def findings(rows: DataFrame, overtaken: DataFrame) -> DataFrame:
    """Return `schemas.FOUND`: a row for each thing that is not as it should be, from `judged` and `out_of_order`."""
    of_window = f.col("state").isin(*STATES)
    classes = [f.when(f.col("state") == name, f.lit(name)) for name in (*STATES[1:], "unknown")]
    classes += [f.when(of_window & (f.col(name) > 0), f.lit(name)) for name in FLAWS]
    wrong = rows.where(" OR ".join([f"state != '{STATES[0]}'", *(f"{name} > 0" for name in FLAWS)]))
    each = wrong.withColumn("class", f.explode(f.array_compact(f.array(*classes))))
    return each.unionByName(overtaken.withColumn("class", f.lit(OUT_OF_ORDER)), allowMissingColumns=True).select(
        *schemas.FOUND.fieldNames()
    )


def samples(found: DataFrame, most: int) -> DataFrame:
    """Return at most so many of each class, the first by their ids."""
    of_class = Window.partitionBy("class").orderBy("task_id", "sent_at")
    return found.withColumn("place", f.row_number().over(of_class)).where(f.col("place") <= most).drop("place")
