"""No plan of a statement depends on the optimizer.

The emulator shows no plans. So each statement has to force the index or the primary key of AsynchronousTasks and the
form of its joins, and to order the rows of an index by the whole key of this index.
"""

import itertools
import re
import runpy
from collections.abc import Iterator

from outbox.table.shared_sql import IN_ORDER_ORDER, TO_SEND_ORDER
from outbox.table.states import CANCELLED, STATES, UNSENT
from tests.support.processes import ROOT
from tests.support.statements import scans

#: The tables with one row for each controlled topic, worker or operation are read as a whole.
SMALL = ("AsynchronousTaskTopics", "AsynchronousTaskWorkers", "AsynchronousTaskShards")
#: Statements that sort a bounded number of rows: the result of a list, a window of sent tasks, one page of IDs.
SORTED = {"SentAt DESC, CreatedAt DESC, Id DESC", "SentAt, CreatedAt, Id", "Id", "StartedAt DESC, OperationId"}
#: The names of parameters that narrow a selection.
NARROWED = ((), ("topic", "since", "until", "error"), ("ordering_key", "id_prefix"), ("unexpired",))


def problems(statement: str) -> Iterator[str]:
    """Yield what leaves the plan of a statement to the optimizer."""
    for table, hint in re.findall(r"\b(AsynchronousTask\w+)(@\{FORCE_INDEX=\w+\})?", statement):
        if not hint and table not in SMALL:
            yield f"no index is forced for {table}"
    for join in re.findall(r"\bJOIN\b(?!@\{[^}]*JOIN_METHOD=APPLY_JOIN)[^,]{0,40}", statement):
        if "UNNEST" not in join:
            yield f"the form is not forced of {join}"
    yield from (f"a scan: {part}" for part in scans(statement))
    for hint, order in re.findall(
        r"FROM AsynchronousTasks@\{FORCE_INDEX=(\w+)\}[^()]*?ORDER BY ([\w ,]+?) LIMIT", statement
    ):
        whole = {"AsynchronousTasksToSend": TO_SEND_ORDER, "AsynchronousTasksInOrder": IN_ORDER_ORDER}.get(hint, order)
        if order.removesuffix(", Id") != whole.removesuffix(", Id") and order not in SORTED:
            yield f"{order} is not the key of {hint}"


def test_no_plan_depends_on_the_optimizer() -> None:
    """Of the statements on the page, with and without each narrowing condition."""
    page, statements = runpy.run_path(str(ROOT / "docs/statements.py"))["page"], set[str]()
    for state, names, newest in itertools.product((*STATES, CANCELLED), NARROWED, (False, True)):
        states = [state] if state in UNSENT else ["dead"]
        given = {
            "state": state,
            "states": states,
            "names": names,
            "newest": newest,
            "cancelled": newest,
            "by_key": newest,
        }
        page.__globals__["EXAMPLES"] |= given | {"attempts": not newest}
        blocks = re.findall(r"^```sql\n(.*?)^```", page(), re.MULTILINE | re.DOTALL)
        statements |= {" ".join(each.split()) for each in blocks}
    assert len(statements) > 100
    assert {statement: found for statement in statements if (found := list(problems(statement)))} == {}


def test_every_statement_on_tasks_is_on_the_page() -> None:
    """Apart from that of `publishworker verify`, which the role must be refused."""
    files = [
        file for package in ("outbox", "publishworker", "outbox_pipeline") for file in (ROOT / package).rglob("*.py")
    ]
    writers = {file.name for file in files if re.search(r"(FROM|JOIN|UPDATE) AsynchronousTask", file.read_text())}
    assert writers - {"checks.py"} == {"relay_sql.py", "shared_sql.py", "operator_sql.py"}
