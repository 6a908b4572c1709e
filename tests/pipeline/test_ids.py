"""Ids that are made of keys: the same in Python and in Spark, for any text."""

import random
from uuid import UUID, uuid5

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from outbox_pipeline.ids import NAMESPACE, as_uuid5, named, task_id
from outbox_pipeline.transforms.tasks import prepared

#: Texts of which one more way of counting or of encoding goes wrong.
TEXTS = (
    "", " ", "a", "1", "-", "0:", "1:a", "order-4711", "äöüß", "日本語", "😀", "👩‍👩‍👧", "e\u0301", "\u00e9",
    "\x00", "\x00\x01\x1f\x7f", "\t\r\n", "\ufeff", "\uffff", "\U0010ffff", '"\\/', "'`$", "x" * 5000, "é" * 300,
)  # fmt: skip


def test_the_id_of_a_key_never_changes():
    """Whoever has registered with an older version of this package gets the same ids again."""
    assert task_id("orders", "4711") == str(uuid5(UUID("3b0c7e0e-9b50-5d3c-8f43-6d6e2a6d1c55"), "6:orders4:4711"))
    assert task_id("orders", "4711") == "46618fde-581f-5fd8-ad68-d583d85b0fd5"
    assert task_id("orders") != task_id("orders", "")


def test_keys_that_look_alike_have_ids_of_their_own():
    """Where one value ends and the next begins is part of the name, and so is their order."""
    keys = [("a", "bc"), ("ab", "c"), ("abc",), ("abc", ""), ("", "abc"), ("c", "ab"), ("1:a", "bc"), ("a", "b", "c")]
    keys += [("e\u0301",), ("\u00e9",), ("a:bc",), ("-",), ()]
    assert len({task_id("orders", *key) for key in keys} | {task_id("other", "a", "bc")}) == len(keys) + 1


def test_spark_makes_the_same_ids_as_python(spark: SparkSession):
    """For keys of one and of two texts, and for whole numbers, dates and truth values as Spark writes them."""
    dice = random.Random(4711)
    letters = "".join(map(chr, [*range(256), *range(0x2000, 0x2070), *range(0x1F600, 0x1F640)]))
    texts = [*TEXTS, *("".join(dice.choices(letters, k=dice.randrange(40))) for _ in range(300))]
    given = [(text, texts[-number]) for number, text in enumerate(texts)]
    names = [f.col("one"), f.col("two")]
    made = spark.createDataFrame(given, "one string, two string").select(
        "one", "two", as_uuid5(named(names)).alias("both"), as_uuid5(named(names[:1])).alias("first")
    )
    found = made.collect()
    assert len(found) == len(texts)
    for each in found:
        assert each.both == task_id(each.one, each.two), (each.one, each.two)
        assert each.first == task_id(each.one), each.one
        assert UUID(each.both).version == 5


def test_the_key_of_a_row_makes_its_id(spark: SparkSession):
    """With the topic of the row, or the one for all; columns of keys may have any names and several types."""
    given = spark.sql(
        "SELECT 'x' AS data, topic, `a.b`, `c``d`, _topic, whole, day, yes FROM VALUES "
        "('orders', 'é', 'q', 't', 7, DATE'2026-11-21', true), "
        "(NULL, '', '\\n', 'u', -7L, DATE'0001-01-01', false) "
        "AS t(topic, `a.b`, `c``d`, _topic, whole, day, yes)"
    )
    key = ["a.b", "c`d", "_topic", "whole", "day", "yes"]
    found = prepared(given, topic="usual", key=key).select("topic", "task_id").collect()
    assert {tuple(each) for each in found} == {
        ("orders", task_id("orders", "é", "q", "t", "7", "2026-11-21", "true")),
        ("usual", task_id("usual", "", "\n", "u", "-7", "0001-01-01", "false")),
    }


def test_null_is_a_name_of_its_own(spark: SparkSession):
    """Neither the empty text nor the one that stands for NULL in the name."""
    given = spark.createDataFrame([(None, "a"), ("", "a"), ("-", "a"), ("a", None)], "one string, two string")
    found = given.select(named([f.col("one"), f.col("two")]).alias("name")).collect()
    assert [each.name for each in found] == ["-1:a", "0:1:a", "1:-1:a", "1:a-"]
    assert str(uuid5(NAMESPACE, "1:a")) == task_id("a")
