"""The row contract of docs/reference/schema.md: its SQL and its golden rows are what `outbox.register` writes."""

import base64
import json
import re
from datetime import datetime
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet, param_types
from google.cloud.spanner_v1.database import Database
from google.protobuf.json_format import ParseDict

import outbox
from outbox.message import RawPubsubMessage
from outbox.registration import COLUMNS
from outbox.testing import RecordingTransaction, assert_registered
from tests.support.processes import ROOT
from tests.support.spanner import query

PAGE = (ROOT / "docs/reference/schema.md").read_text(encoding="utf-8")
GOLDEN = json.loads((ROOT / "docs/reference/row-contract.json").read_text(encoding="utf-8"))
HELLO, WHOLE = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TYPES = {
    "Data": param_types.BYTES, "Priority": param_types.INT64, "Sequence": param_types.INT64,
    "AvailableAt": param_types.TIMESTAMP, "ExpiresAt": param_types.TIMESTAMP, "AtMostOnce": param_types.BOOL,
}  # fmt: skip

#: `register` does not write a column that has its default.
DEFAULTS = {"OrderingKey": None, "AvailableAt": None, "ExpiresAt": None, "AtMostOnce": False}

each_row = pytest.mark.parametrize("golden", GOLDEN["rows"], ids=lambda golden: golden["name"])


def arguments(golden: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `register`, from JSON."""
    times = {name: datetime.fromisoformat(value) for name, value in golden["arguments"].items() if name.endswith("_at")}
    return golden["arguments"] | {"message": base64.b64decode(golden["arguments"]["message"])} | times


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its message decoded, and without the two columns that differ from row to row."""
    times = {name: row[name] and datetime.fromisoformat(str(row[name])) for name in ("AvailableAt", "ExpiresAt")}
    message = RawPubsubMessage.FromString(base64.b64decode(row["Data"]))
    same = {name: value for name, value in row.items() if name not in ("Sequence", "CreatedAt")}
    return same | times | {"Data": message}


@each_row
def test_register_writes_the_golden_rows(golden: dict[str, Any]) -> None:
    transaction = RecordingTransaction()
    outbox.register(transaction, **arguments(golden))
    [(_, columns, [values])] = transaction.inserts
    row, written = golden["row"], DEFAULTS | dict(zip(columns, values, strict=True))
    assert comparable(written) == comparable(row)
    assert comparable(row)["Data"] == ParseDict(golden["message"], RawPubsubMessage())
    assert (written["CreatedAt"], row["CreatedAt"]) == (COMMIT_TIMESTAMP, COMMIT_TIMESTAMP)
    assert list(row) == list(COLUMNS)


@each_row
def test_the_statement_writes_the_row_of_register(database: Database, golden: dict[str, Any]) -> None:
    """In every column, also in those that neither of them names."""

    def insert(transaction: Any) -> None:
        params = {name: value for name, value in golden["row"].items() if name != "CreatedAt"}
        types = {name: TYPES.get(name, param_types.STRING) for name in params}
        assert transaction.execute_update(WHOLE, params=params, param_types=types) == 1

    def stored() -> dict[str, Any]:
        with database.snapshot() as snapshot:
            result = snapshot.execute_sql("SELECT * FROM AsynchronousTasks")
            [row] = result.to_dict_list()
        return comparable(row)

    database.run_in_transaction(insert)
    inserted = stored()
    with database.batch() as batch:
        batch.delete("AsynchronousTasks", KeySet(all_=True))
    database.run_in_transaction(lambda transaction: outbox.register(transaction, **arguments(golden)))
    assert inserted == stored() | {"Bytes": inserted["Bytes"]}
    assert inserted["Bytes"] == len(base64.b64decode(golden["row"]["Data"]))


def test_the_short_statement_writes_a_whole_task(database: Database) -> None:
    database.run_in_transaction(lambda transaction: transaction.execute_update(HELLO))
    [task] = assert_registered(database, topic="orders")
    assert (task.message.data, task.priority, task.at_most_once) == (b"hello", outbox.Priority.NORMAL, False)


def test_the_page_names_every_column(database: Database) -> None:
    """The columns to write are those of `register`, and the page has the version of the golden rows."""
    write, omit = (re.split(r"^### .*\n", PAGE, flags=re.MULTILINE)[n] for n in (1, 2))
    named = {
        column for line in re.findall(r"^\| (`[^|]*)\|", omit, re.MULTILINE) for column in re.findall(r"\w+", line)
    }
    columns = "SELECT COLUMN_NAME FROM INFORMATION_SCHEMA.COLUMNS WHERE TABLE_NAME = 'AsynchronousTasks'"
    assert sorted(re.findall(r"^\| `(\w+)`", write, re.MULTILINE)) == sorted(COLUMNS)
    assert named == {name for [name] in query(database, columns)} - set(COLUMNS)
    assert f"version {GOLDEN['version']} of the contract" in PAGE
