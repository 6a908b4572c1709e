"""Random invalid messages and tasks: the audit reads every row or counts it as unreadable."""

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from outbox.message import TASK_ID_ATTRIBUTE
from outbox_pipeline.jobs.audit.received import received

ODD = ["", "\x00", "\u2028", "é" * 300, "🎉", '"', "\\", "null", "{}", "[]", "1e999", "NaN", "\x1b[31m", "x" * 5000]
TIMES = [
    "2026-11-20T12:00:00Z", "2026-11-20 12:00:00.123456 UTC", "9999-12-31T23:59:59.999999999Z", "0001-01-01T00:00:00Z",
    "2026-02-30T00:00:00Z", "yesterday", "-1", "1e9", "", "2026-11-20T12:00:00+14:00", "+294247-01-10T04:00:54.775807Z",
]  # fmt: skip

GOOD_TIMES = {
    TIMES[0]: datetime(2026, 11, 20, 12, tzinfo=UTC),
    TIMES[1]: datetime(2026, 11, 20, 12, 0, 0, 123456, tzinfo=UTC),
    TIMES[9]: datetime(2026, 11, 19, 22, tzinfo=UTC),
}


def _text(random: Random) -> str:
    return random.choice([random.choice(ODD), "".join(chr(random.randrange(1, 0xD7FF)) for _ in range(9))])


def _json(random: Random) -> str | None:
    good = {TASK_ID_ATTRIBUTE: _text(random), _text(random): _text(random)}
    ways: list[Callable[[], str | None]] = [
        lambda: json.dumps(good),
        lambda: json.dumps(good, ensure_ascii=False),
        lambda: json.dumps(good)[: random.randrange(60)],
        lambda: json.dumps({"a": random.choice([1, None, [1], {"b": {}}, True, 1.5]), **good}),
        lambda: '{"a": "1", "a": "2"}',
        lambda: json.dumps([good]),
        lambda: '{"a": ' * random.choice([5, 2000]),
        lambda: "\ufeff" + json.dumps(good),
        lambda: None,
        lambda: _text(random),
    ]
    return random.choice(ways)()


def _body(random: Random) -> str | None:
    raw = random.randbytes(random.randrange(40))
    return random.choice([base64.b64encode(raw).decode(), base64.b64encode(raw).decode()[:-1], _text(random), None])


@pytest.mark.parametrize("base64_", [True, False], ids=["base64", "text"])
def test_every_received_row_is_read_or_counted_as_unreadable(spark: SparkSession, long: bool, base64_: bool):
    random = Random(1)
    rows: list[Any] = [
        (f"{number}" if random.random() < 0.9 else None, random.choice([*TIMES, None]), _json(random), _body(random))
        for number in range(20_000 if long else 2_000)
    ]
    messages = spark.createDataFrame(
        rows, "message_id STRING, publish_time STRING, attributes STRING, data STRING"
    ).repartition(2)
    found = received(messages, base64=base64_).withColumn("micros", f.unix_micros("publish_time")).collect()
    assert len(found) == len(rows)
    wanted = sorted(_task_id(text) or "" for _, _, text, _ in rows)
    assert sorted(each["task_id"] or "" for each in found) == wanted
    of = {each["message_id"]: each for each in found}
    good = [row for row in rows if row[0] and row[1] in GOOD_TIMES and _is_an_object_of_texts(row[2])]
    assert len(good) > 100
    for id, time, attributes, _ in good:
        assert of[id]["readable"]
        assert of[id]["micros"] == GOOD_TIMES[time].timestamp() * 1_000_000
        assert of[id]["task_id"] == _task_id(attributes)
    for id, time, _, _ in rows:
        assert id is None or time is not None or not of[id]["readable"]


def _is_an_object_of_texts(text: str | None) -> bool:
    try:
        read = json.loads(text or "")
    except (json.JSONDecodeError, RecursionError):
        return False
    return isinstance(read, dict) and all(isinstance(value, str) for value in read.values())


def _task_id(text: str | None) -> str | None:
    try:
        read = json.loads(text or "{}", strict=False)
    except (json.JSONDecodeError, RecursionError):
        return None
    return read.get(TASK_ID_ATTRIBUTE) if isinstance(read, dict) else None
