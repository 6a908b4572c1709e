"""Compares tasks with received messages, and with the records of a subscriber's inbox.

Only IDs, times, numbers and digests are shuffled. The window and a task's times are by Spanner's clock, publish_time is
by Pub/Sub's clock, and CLOCK_SKEW is the max difference between the two.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from outbox.table.states import MARKS_FINAL_AFTER, RANGES
from outbox_pipeline import schemas
from outbox_pipeline.jobs.audit_inputs import digest

#: The columns of tasks that the audit reads: of the data source, or of the archive with `decoded`.
OF_TASKS = (
    "Id", "Topic", "Attributes", "Payload", "OrderingKey", "Sequence", "CreatedAt", "AvailableAt", "AtMostOnce",
    "TimesSent", "SentAt", "CancelledBy",
)  # fmt: skip
#: Each task of the window is in one of these states, described in docs/pipeline/audit.md.
STATES = ("delivered", "late", "lost", "arriving", "pending", "dead", "cancelled")
#: Possible flaws of a task's messages. A column of this name counts each of them.
FLAWS = ("republished", "redelivered", "mismatched", "cancelled_after_publish")
OUT_OF_ORDER = "out_of_order"
#: Each record or received task is in at most one of these classes.
APPLIED, NOT_APPLIED, APPLIED_LATE, UNREGISTERED = EFFECTS = ("applied", "not_applied", "applied_late", "unregistered")
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
#: The counts of a group of tasks, and all numbers of it: also the latencies in seconds.
COUNTS = ("tasks", *STATES, "messages", *FLAWS)
NUMBERS = (*COUNTS, *PERCENTILES, "max")
#: Max difference between the clocks of Spanner and Pub/Sub.
CLOCK_SKEW = timedelta(seconds=1)
#: The columns of a sending with its outcome. If no task has the ID, the task's columns are NULL. `state` is NULL
#: outside the window. `first` is true if no earlier sending of the ID is known.
JUDGED = (
    "task_id", "topic", "key", "sequence", "created_at", "sent_at", "cancelled_at", "state", "first_at", "messages",
    *FLAWS, "first",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rules:
    """The window and the deadlines of an audit.

    The window contains the tasks created from `since` on (None: from the first task on) and before `until`. A task sent
    more than `grace` before `horizon` must have been received by `horizon`. A task received more than `grace` after
    `until` is late. A message published before `known_until` must belong to a task that was read.
    """

    since: datetime | None
    until: datetime
    horizon: datetime
    known_until: datetime
    grace: timedelta


def sends(tasks: DataFrame, *, bodies: bool, certified: bool = False) -> DataFrame:
    """Return a row for each sending, unsent or cancelled task with OF_TASKS.

    A cancelled task has `cancelled_at` instead of `sent_at`. With `bodies`, the digest covers the data. With
    `certified`, it is the digest of certificates.
    """
    key = f.when(f.col("OrderingKey").isNotNull(), f.xxhash64("Topic", "OrderingKey"))
    dead = f.coalesce(f.expr(RANGES["dead"][0]), f.lit(False))
    return tasks.select(
        f.col("Id").alias("task_id"),
        f.col("Topic").alias("topic"),
        key.alias("key"),
        f.col("Sequence").alias("sequence"),
        f.col("CreatedAt").alias("created_at"),
        f.when(f.col("CancelledBy").isNull(), f.col("SentAt")).alias("sent_at"),
        f.when(f.col("CancelledBy").isNotNull(), f.col("SentAt")).alias("cancelled_at"),
        f.coalesce("TimesSent", f.lit(0)).alias("times_sent"),
        f.col("AtMostOnce").alias("at_most_once"),
        dead.alias("dead"),
        digest(f.col("Attributes"), f.col("Payload") if bodies else f.lit(None), certified=certified).alias("digest"),
    )


def once(sendings: DataFrame) -> DataFrame:
    """Return the sendings of several sources, each once: an archived task can still be in the table.

    A cancelled task is not counted if it was restored: a later row has the same ID and CreatedAt.
    """
    of_id = Window.partitionBy("task_id").orderBy("created_at", _ended().asc_nulls_last())
    is_same = f.col("cancelled_at").isNotNull() | _ended().eqNullSafe(f.lead(_ended()).over(of_id))
    is_followed = (f.lead("created_at").over(of_id) == f.col("created_at")) & is_same
    return sendings.withColumn("followed", is_followed).where("followed IS NOT TRUE").drop("followed")


def judged(sendings: DataFrame, deliveries: DataFrame, rules: Rules) -> DataFrame:
    """Return JUDGED: a row for each sending with its outcome, and a row for each received ID without a task.

    `sendings` come from `sends`, and `deliveries` from `audit_inputs.received`.
    """
    of_it = f.col("task_id") == f.col("received_id")
    joined = _bounded(sendings).join(_by_task(deliveries), of_it, "full_outer")
    # Almost every task was sent once, so the common case avoids the slow functions on array elements.
    after, before = f.col("after"), f.col("before")

    def between(each: Column) -> Column:
        return (after.isNull() | (each["at"] > after)) & (before.isNull() | (each["at"] <= before))

    own = f.when(after.isNull() & before.isNull(), f.col("received")).otherwise(f.filter("received", between))
    digest = f.col("digest")
    columns = {
        "task_id": f.coalesce("task_id", "received_id"),
        "first": f.when(f.col("topic").isNotNull(), after.isNull()),
        "first_at": f.array_min("own.at"),
        "deliveries": f.coalesce(f.array_size("own"), f.lit(0)).cast("long"),
        "messages": _distinct(f.col("own")),
        "mismatched": f.when((f.array_min("own.digest") == digest) & (f.array_max("own.digest") == digest), 0)
        .otherwise(_distinct(f.filter("own", lambda each: each["digest"] != digest)))
        .cast("long"),
        "known": f.when(f.col("topic").isNull(), f.exists("own", lambda each: _is_known(each["at"], rules))),
    }
    counted = joined.withColumn("own", own).withColumns(columns)
    repeats = {
        "republished": f.greatest(f.col("messages") - 1, f.lit(0)),
        "redelivered": f.col("deliveries") - f.col("messages"),
        # Without all earlier sendings of a task that was retried, the message can be of one of them.
        "cancelled_after_publish": (
            f.col("cancelled_at").isNotNull() & (f.col("messages") > 0) & (f.col("place") > f.col("times_sent"))
        ).cast("long"),
    }
    stated = counted.withColumns({"state": _state(rules), **repeats})
    return stated.select(*JUDGED)


def _by_task(deliveries: DataFrame) -> DataFrame:
    """Return a row for each received ID with an array of its deliveries: publish time, message and digest."""
    of_outbox = deliveries.where("readable AND task_id IS NOT NULL").withColumnRenamed("task_id", "received_id")
    delivery = f.struct(f.col("publish_time").alias("at"), f.xxhash64("message_id").alias("message"), "digest")
    # Shuffle and sort first. Almost every ID was received once, so a partial aggregation before the shuffle saves
    # nothing.
    adjacent = of_outbox.repartition("received_id").sortWithinPartitions("received_id")
    return adjacent.groupBy("received_id").agg(f.collect_list(delivery).alias("received"))


def _distinct(deliveries: Column) -> Column:
    """Return the number of distinct messages of an array of deliveries, 0 if it is NULL."""
    many = f.array_size(f.array_distinct(deliveries["message"]))
    return f.coalesce(f.when(f.array_size(deliveries) == 1, 1).otherwise(many), f.lit(0)).cast("long")


def _bounded(sendings: DataFrame) -> DataFrame:
    """Add `after` and `before` to the sendings: the times between which the messages of a sending were published.

    A task is marked after its message was published, so a message published between two SentAt of an ID belongs to the
    later one. The bound is SentAt plus the clock skew, but at most the middle between this SentAt and the next. An
    at-most-once task is marked first, and published until its mark is final. A cancelled task can be published until
    its worker notices the cancel.
    """
    of_id = Window.partitionBy("task_id").orderBy(_ended().asc_nulls_last(), "created_at")
    micros, next_micros = f.unix_micros(_ended()), f.unix_micros(f.lead(_ended()).over(of_id))
    middle = f.timestamp_micros(micros + f.floor((next_micros - micros) / 2))
    last = f.lead("created_at").over(of_id).isNull()
    # `least` ignores NULL: there is no middle if the next sending is not sent.
    longer = f.col("at_most_once") | f.col("cancelled_at").isNotNull()
    slack = f.when(longer, f.lit(CLOCK_SKEW + MARKS_FINAL_AFTER)).otherwise(f.lit(CLOCK_SKEW))
    ends = sendings.withColumn("before", f.when(~last, f.least(_ended() + slack, middle)))
    return ends.withColumns({"after": f.lag("before").over(of_id), "place": f.row_number().over(of_id)})


def _ended() -> Column:
    return f.coalesce("sent_at", "cancelled_at")


def _is_known(at: Column, rules: Rules) -> Column:
    """Return whether a message was published at a time for which all tasks were read."""
    before = at < f.lit(rules.known_until)
    # An at-most-once task is marked first, and published until its mark is final.
    return before if rules.since is None else before & (at >= f.lit(rules.since + CLOCK_SKEW + MARKS_FINAL_AFTER))


def _state(rules: Rules) -> Column:
    created = f.col("created_at")
    inside = created < f.lit(rules.until)
    if rules.since is not None:
        inside &= created >= f.lit(rules.since)
    received = f.col("first_at")
    is_due = f.col("sent_at") < f.lit(rules.horizon - rules.grace)
    of_task = (
        f.when(f.col("cancelled_at").isNotNull(), f.lit("cancelled"))
        .when(f.col("sent_at").isNull(), f.when(f.col("dead"), f.lit("dead")).otherwise(f.lit("pending")))
        .when(received.isNull(), f.when(is_due, f.lit("lost")).otherwise(f.lit("arriving")))
        .when(received >= f.lit(rules.until + rules.grace), f.lit("late"))
        .otherwise(f.lit("delivered"))
    )
    # Near the bounds, a message can belong to a task that was not read.
    unknown = f.when(f.col("known"), f.lit("unknown"))
    return f.when(created.isNull(), unknown).when(inside, of_task)


def out_of_order(rows: DataFrame) -> DataFrame:
    """Return the rows of `judged` whose first message was published before the first message of an earlier task.

    The order of a key is CreatedAt, Sequence, Id (docs/guide/ordering.md). Republished messages can have any order, so
    only the first known sending of a task counts. Only tasks of the window are compared, because the first sending of
    an older task may not be known.
    """
    before = (
        Window.partitionBy("key")
        .orderBy("created_at", f.col("sequence").asc_nulls_first(), "task_id")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    firsts = rows.where("key IS NOT NULL AND first AND first_at IS NOT NULL AND state IS NOT NULL")
    return firsts.withColumn("overtaken_at", f.max("first_at").over(before)).where("first_at < overtaken_at")


def counted(rows: DataFrame) -> DataFrame:
    """Count by topic and rounded latency. `numbers` computes every number of the report from these few rows.

    The latency in microseconds is the time from CreatedAt to the first publish_time, at least 0 despite clock skew,
    rounded to three significant digits.
    """
    took = f.unix_micros("first_at") - f.unix_micros("created_at")
    latency = f.when(took.isNotNull(), f.greatest(took, f.lit(0)))  # greatest(NULL, 0) is 0
    unit = f.pow(f.lit(10), f.greatest(f.floor(f.log10(f.greatest(latency, f.lit(1)))) - 2, f.lit(0)))
    columns = {
        "latency": latency,
        "rounded": (f.round(latency / unit) * unit).cast("long"),
    }
    of_window = f.col("state").isin(*STATES)
    return (
        rows.where(of_window | (f.col("state") == "unknown"))
        .withColumns(columns)
        .groupBy("topic", "rounded")
        .agg(
            f.count_if(of_window).alias("tasks"),
            *(f.count_if(f.col("state") == name).alias(name) for name in (*STATES, "unknown")),
            *(f.coalesce(f.sum(f.when(of_window, f.col(name))), f.lit(0)).alias(name) for name in ("messages", *FLAWS)),
            f.max("latency").alias("max"),
        )
    )


def numbers(counts: DataFrame) -> DataFrame:
    """Return the counts, and the latencies in seconds, of the window's tasks: of each topic, and `is_total` of all.

    Only the total has `unknown`.
    """
    points = f.percentile("rounded", list(PERCENTILES.values()), f.col("tasks"))
    summed = counts.rollup("topic").agg(
        f.grouping("topic").cast("boolean").alias("is_total"),
        *(f.sum(name).alias(name) for name in (*COUNTS, "unknown")),
        points.alias("points"),
        (f.max("max") / 1e6).alias("max"),
    )
    named = {name: f.col("points")[place] / 1e6 for place, name in enumerate(PERCENTILES)}
    # A message of an unknown ID has no topic.
    return summed.where("tasks > 0 OR is_total").withColumns(named).drop("points")


def findings(rows: DataFrame, overtaken: DataFrame) -> DataFrame:
    """Return `schemas.FOUND`: a row for each finding, from `judged` and `out_of_order`."""
    of_window = f.col("state").isin(*STATES)
    classes = [f.when(f.col("state") == name, f.lit(name)) for name in (*STATES[1:], "unknown")]
    classes += [f.when(of_window & (f.col(name) > 0), f.lit(name)) for name in FLAWS]
    wrong = rows.where(" OR ".join([f"state != '{STATES[0]}'", *(f"{name} > 0" for name in FLAWS)]))
    each = wrong.withColumn("class", f.explode(f.array_compact(f.array(*classes))))
    both = each.unionByName(overtaken.withColumn("class", f.lit(OUT_OF_ORDER)), allowMissingColumns=True)
    return both.withColumn("processed_at", f.lit(None).cast("timestamp")).select(*schemas.FOUND.fieldNames())


def effects(rows: DataFrame, inbox: DataFrame, rules: Rules) -> DataFrame:
    """Return `schemas.FOUND`: a row for each class that a task of `judged`, or a record, is in.

    A task is judged by all of its sendings together. A record of a message ID belongs to no task.
    """
    earliest = [f.min(name).alias(name) for name in ("topic", "state", "sent_at", "cancelled_at", "first_at")]
    tasks = rows.groupBy("task_id", "created_at").agg(
        *earliest, f.sum("messages").alias("messages"), f.lit(True).alias("judged")
    )
    of_tasks = inbox.where(~f.col("task_id").rlike("^[0-9a-f]{8}-message-"))
    at, received = f.col("processed_at"), f.col("first_at")
    applied = f.col("state").isin(*STATES) & at.isNotNull()
    due = f.col("state").isin(*STATES) & (received < f.lit(rules.horizon - rules.grace))
    # Earlier records can belong to tasks that were not read.
    alone = f.col("judged").isNull()
    if rules.since is not None:
        alone &= at >= f.lit(rules.since + rules.grace)
    found = (
        f.when(applied & (at > received + f.lit(rules.grace)), APPLIED_LATE)
        .when(applied, APPLIED)
        .when(due & at.isNull(), NOT_APPLIED)
        .when((at < f.lit(rules.known_until)) & (alone | (f.col("state") == "unknown")), UNREGISTERED)
    )
    joined = tasks.join(of_tasks, "task_id", "full_outer").withColumns({"class": found, "overtaken_at": f.lit(None)})
    return joined.where("class IS NOT NULL").select(
        *(f.col(field.name).cast(field.dataType) for field in schemas.FOUND)
    )


def samples(found: DataFrame, count: int) -> DataFrame:
    """Return at most `count` findings of each class, sorted by ID."""
    of_class = Window.partitionBy("class").orderBy("task_id", "sent_at")
    return found.withColumn("place", f.row_number().over(of_class)).where(f.col("place") <= count).drop("place")
