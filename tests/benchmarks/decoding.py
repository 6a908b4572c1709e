"""What it takes to turn a poll's or a lock query's values into tasks: by the client, and by the relay's own code."""

import gc
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from google.cloud.spanner_v1 import PartialResultSet, TypeCode
from google.cloud.spanner_v1.streamed import StreamedResultSet

from publishworker.spanner import rows
from publishworker.types import Candidate, LockedRow
from tests.benchmarks.bench import MESSAGE, Bench
from tests.benchmarks.results import Plot, Section, figures
from tests.support.fakes import serialized

ROWS = 400
AT = "2026-11-21T12:00:00.123456Z"
ID = "00000000-0000-4000-8000-000000000000"
BODY = b64encode(serialized(MESSAGE)).decode()

#: Columns as the statements have them: type and value.
CANDIDATE = [
    (TypeCode.STRING, ID),
    (TypeCode.STRING, "orders"),
    (TypeCode.INT64, "7"),
    (TypeCode.INT64, "50"),
    (TypeCode.TIMESTAMP, AT),
    (TypeCode.TIMESTAMP, None),
    (TypeCode.STRING, None),
    (TypeCode.INT64, "400"),
]
LOCKED = [
    (TypeCode.STRING, ID),
    (TypeCode.STRING, "orders"),
    (TypeCode.BYTES, BODY),
    (TypeCode.STRING, None),
    (TypeCode.TIMESTAMP, AT),
    (TypeCode.TIMESTAMP, None),
    (TypeCode.TIMESTAMP, None),
    (TypeCode.BOOL, True),
    (TypeCode.INT64, "0"),
    (TypeCode.TIMESTAMP, None),
    (TypeCode.BOOL, False),
    (TypeCode.BOOL, False),
    (TypeCode.TIMESTAMP, AT),
]

CONDITIONS = f"""\
- One answer of {ROWS} rows, parsed already, in one thread, no service: CPU until the rows are tasks. *client* decodes
  every value by its type, *relay* takes the values as they are ([rows.py](../publishworker/spanner/rows.py))."""


def answer(columns: list[tuple[TypeCode, Any]]) -> Any:
    """Return what Spanner would answer, with rows that are all alike but for their ids."""
    made: Any = PartialResultSet(last=True)
    for number, (code, _) in enumerate(columns):
        made._pb.metadata.row_type.fields.add(name=f"c{number}").type_.code = code
    for number in range(ROWS):
        for position, (_, value) in enumerate(columns):
            item = made._pb.values.add()
            if value is None:
                item.null_value = 0
            elif isinstance(value, bool):
                item.bool_value = value
            else:
                item.string_value = f"{value}{number}" if position == 0 else value
    return made


def microseconds(columns: list[tuple[TypeCode, Any]], decode: Callable[[Any], object], *, lazy: bool) -> float:
    """Return the CPU of one row."""
    whole = answer(columns)
    gc.collect()
    gc.freeze()  # as the worker does
    begin = time.process_time()
    for _ in range(50):
        decode(list(StreamedResultSet(iter([whole]), lazy_decode=lazy)))
    return (time.process_time() - begin) / 50 / ROWS * 1e6


def run(bench: Bench) -> Section:
    """Measure both kinds of rows both ways."""
    samples = []
    for _ in range(bench.rounds):
        for row, columns, kind, decode in (
            ("candidate", CANDIDATE, Candidate, rows.candidates),
            ("locked row", LOCKED, LockedRow, rows.locked),
        ):
            made_of = len(fields(kind))  # the first columns
            by_client = microseconds(
                columns, lambda found, kind=kind, n=made_of: [kind(*each[:n]) for each in found], lazy=False
            )
            by_relay = microseconds(columns, decode, lazy=True)
            samples += [(row, "client: us", by_client), (row, "relay: us", by_relay)]
    return Section("Decoding", figures(samples), [], CONDITIONS, "All of it.", Plot(["client: us", "relay: us"]))
