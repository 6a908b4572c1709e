"""The order in which rows are written, and what stays together."""

import random

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_pipeline import schemas
from outbox_pipeline.transforms.tasks import in_order
from tests.support.pipeline import row


def tasks(spark: SparkSession, *given: dict[str, object]) -> DataFrame:
    """Return rows of `schemas.INPUT`, shuffled, in three partitions."""
    made = [row(**each) for each in given]
    random.Random(7).shuffle(made)
    names = schemas.INPUT.fieldNames()
    values = [tuple(each[name] for name in names) for each in made]
    return spark.createDataFrame(spark.sparkContext.parallelize(values, 3), schemas.INPUT)


def parts(ordered: DataFrame) -> list[list[dict[str, object]]]:
    """Return the rows of each partition that has some, in their order."""
    found: dict[int, list[dict[str, object]]] = {}
    for each in ordered.withColumn("part", f.spark_partition_id()).collect():
        found.setdefault(each.part, []).append(each.asDict(recursive=True))
    return [found[part] for part in sorted(found)]


def test_what_has_an_order_is_in_one_partition_and_in_it(spark: SparkSession):
    """Rows of an ordering key by their sequence, those without one first, of equal ones by their id."""
    given = [
        {"task_id": f"{(number * 7) % 40:02}", "ordering_key": f"k{number % 5}", "sequence": -3 + number // 8}
        for number in range(40)
    ]
    given += [{"task_id": "zz", "ordering_key": "k0"}, {"task_id": "zy", "ordering_key": "k0"}]
    found = parts(in_order(tasks(spark, *given), 4))
    assert sum(map(len, found)) == len(given)
    assert len(found) > 1, "there is nothing to tell"
    keys = [{each["ordering_key"] for each in part} for part in found]
    assert sum(map(len, keys)) == 5, "a key is in two partitions"
    for part in found:
        least = -(2**63)
        places = [
            (each["ordering_key"], least if each["sequence"] is None else each["sequence"], each["task_id"])
            for each in part
        ]
        assert places == sorted(places)


def test_rows_without_an_order_go_by_their_ids(spark: SparkSession):
    """And are spread over the partitions; nothing is added to them but their place."""
    given = [{"task_id": f"{number:03}"} for number in range(90)]
    ordered = in_order(tasks(spark, *given), 3)
    assert ordered.columns == schemas.INPUT.fieldNames()
    assert ordered.rdd.getNumPartitions() == 3
    found = [[each["task_id"] for each in part] for part in parts(ordered)]
    assert len(found) == 3
    assert all(part == sorted(part) for part in found)
    assert sorted(id for part in found for id in part) == [each["task_id"] for each in given]


def test_rows_of_one_id_stand_side_by_side_where_the_first_one_belongs(spark: SparkSession):
    """Whatever their sequence, and wherever they were; in an ordering key, and without one."""
    given = [{"task_id": f"{number:02}", "ordering_key": "k", "sequence": number} for number in range(30)]
    twice = {"task_id": "05", "ordering_key": "k"}
    given += [
        twice | {"sequence": 28},
        twice | {"sequence": None},
        {"task_id": "08a", "ordering_key": "k", "sequence": 8},
    ]
    given += [{"task_id": id, "ordering_key": "k", "sequence": 20} for id in ("08", "08a")]
    given += [{"task_id": "alone", "sequence": number} for number in (1, 99)] + [{"task_id": "between", "sequence": 50}]
    for spread in (given, given[::-1]):
        found = [each for part in parts(in_order(tasks(spark, *spread), 2)) for each in part]
        keyed = [each["task_id"] for each in found if each["ordering_key"]]
        assert keyed == sorted(each["task_id"] for each in given if "ordering_key" in each)
        ids = [each["task_id"] for each in found]
        assert ids.index("alone") + 1 == len(ids) - 1 - ids[::-1].index("alone")


def test_of_several_rows_with_one_id_always_the_same_one_comes_first(spark: SparkSession):
    """So that a second run, and another try of a Spark task, refuse the same ones."""
    given = [
        {"data": data, "attributes": {"a": str(number)}, "priority": number, "topic": topic}
        for data in (b"a", b"b") for number in (0, 1) for topic in ("orders", "other")
    ]  # fmt: skip
    given += [each | {"attributes": None} for each in given]
    found = []
    for spread in (given, given[::-1]):
        [part] = parts(in_order(tasks(spark, *({"task_id": "one"} | each for each in spread)), 2))
        found.append([(each["topic"], each["data"], each["attributes"], each["priority"]) for each in part])
    assert found[0] == found[1]


def test_rows_that_could_not_be_read_are_spread(spark: SparkSession):
    """They have no id and no key: not all of them belong to one Spark task."""
    lost = [{"task_id": None, "topic": None, "data": None, "reason": "x", "line": str(number)} for number in range(40)]
    assert len(parts(in_order(tasks(spark, *lost), 4))) > 1
