"""The time to decode the rows of a poll or a lock query: by the client, and by the relay's own code."""

import gc
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from typing import Any

from google.cloud.spanner_v1 import PartialResultSet, TypeCode
from google.cloud.spanner_v1.streamed import StreamedResultSet

from publishworker.spanner import rows
from publishworker.types import Candidate, LockedRow
from tests.benchmarks.bench import MESSAGE, Bench, stopwatch
from tests.benchmarks.results import Plot, Section, figures
from tests.support.fakes import serialized

ROWS = 400
AT = "2026-11-21T12:00:00.123456Z"
ID = "00000000-0000-4000-8000-000000000000"
BODY = b64encode(serialized(MESSAGE)).decode()

#: Columns as the statements have them: type and value.
TEXT, NUMBER, TIME, FLAG = TypeCode.STRING, TypeCode.INT64, TypeCode.TIMESTAMP, TypeCode.BOOL
CANDIDATE = [(TEXT, ID), (TEXT, "orders"), (NUMBER, "7"), (NUMBER, "50"), (TIME, AT), (TIME, None), (TEXT, None)]
CANDIDATE += [(NUMBER, "400")]
LOCKED: list[tuple[TypeCode, Any]] = [(TEXT, ID), (TEXT, "orders"), (TypeCode.BYTES, BODY), (TEXT, None), (TIME, AT)]
LOCKED += [(TIME, None), (TIME, None), (FLAG, True), (NUMBER, "0"), (TIME, None), (FLAG, False), (FLAG, False)]
LOCKED += [(NUMBER, "0"), (TIME, AT)]

CONDITIONS = f"""\
- One answer of {ROWS} rows, parsed already, in one thread, no service: CPU until the rows are tasks. *client* decodes
  every value by its type, *relay* takes the values as they are ([rows.py](../publishworker/spanner/rows.py))."""


def answer(columns: list[tuple[TypeCode, Any]]) -> Any:
    """Return an answer of Spanner with rows that differ only in their IDs."""
    created: Any = PartialResultSet(last=True)
    for number, (code, _) in enumerate(columns):
        created._pb.metadata.row_type.fields.add(name=f"c{number}").type_.code = code
    for number in range(ROWS):
        for position, (_, value) in enumerate(columns):
            item = created._pb.values.add()
            if value is None:
                item.null_value = 0
            elif isinstance(value, bool):
                item.bool_value = value
            else:
                item.string_value = f"{value}{number}" if position == 0 else value
    return created


def microseconds(columns: list[tuple[TypeCode, Any]], decode: Callable[[Any], object], *, lazy: bool) -> float:
    whole = answer(columns)
    gc.collect()
    gc.freeze()  # as the worker does
    with stopwatch() as watch:
        for _ in range(50):
            decode(list(StreamedResultSet(iter([whole]), lazy_decode=lazy)))
    return watch.cpu_seconds / 50 / ROWS * 1e6


def created(kind: Any, found: list[list[Any]]) -> list[object]:
    columns = len(kind._fields)  # the first ones
    return [kind(*each[:columns]) for each in found]


def run(bench: Bench) -> Section:
    samples = []
    for _ in range(bench.rounds):
        for row, columns, kind, decode in (
            ("candidate", CANDIDATE, Candidate, rows.candidates),
            ("locked row", LOCKED, LockedRow, rows.locked),
        ):
            by_client = microseconds(columns, partial(created, kind), lazy=False)
            by_relay = microseconds(columns, decode, lazy=True)
            samples += [(row, "client: us", by_client), (row, "relay: us", by_relay)]
    return Section("Decoding", figures(samples), CONDITIONS, "All of it.", Plot(["client: us", "relay: us"]))
