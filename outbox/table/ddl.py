"""The DDL of the outbox, which is `schema/schema.sql` with the choices of a user. Standard library only.

To compare a database with it, each object, such as "table AsynchronousTasks", is cut into named parts, such as "column
Shard", with a text each.
"""

import importlib.resources
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from outbox.table.layouts import MAX_SHARDS, Layout

#: Min tasks a second, one in thirty years. A smaller RatePerSecond is a mistake, and could become 0 for each worker.
MIN_RATE = 1e-9
#: What a new database gets unless a user chooses otherwise.
DEFAULT_SHARDS, DEFAULT_RETENTION = 10, 7
#: Ten years. A row deletion policy counts days.
MAX_RETENTION_DAYS = 3650
#: Two parts that each database chooses for itself.
SHARD_COUNT, RETENTION = "shard count", "retention of sent tasks"
DELETION = "deletion of unsent tasks"
OWN_CHOICES = (SHARD_COUNT, RETENTION)
#: Google does not say whether a database role sees the constraints of its tables.
NOT_OF_ROLES = "constraint AsynchronousTasksOrderingKey"

#: The record of every change by an operator or by the pipeline.
OPERATIONS = "AsynchronousTaskOperations"
#: The values of its column Operation.
OPERATION_NAMES = (
    "retry", "resend", "purge", "cancel", "restore", "stop", "continue", "view", "pause", "resume", "probe",
    "controls", "replay", "reshard",
)  # fmt: skip
#: The tasks that operators have cancelled.
CANCELLED = "AsynchronousTasksCancelled"
#: Tables that the relay does not need.
_NOT_OF_RELAY = (OPERATIONS, CANCELLED, "ProcessedTasks")

CHANGE_STREAM = "AsynchronousTasksInserts"
#: For readers that want to know of new tasks: one record for each registered task, none for marks and deletions.
_CHANGE_STREAM = f"""CREATE CHANGE STREAM {CHANGE_STREAM}
  FOR AsynchronousTasks(SentAt)
  OPTIONS (
    retention_period = '7d', exclude_update = true, exclude_delete = true, exclude_ttl_deletes = true
  )"""


def statements(
    shards: int = DEFAULT_SHARDS,
    retention_days: int | None = DEFAULT_RETENTION,
    *,
    change_stream: bool = False,
    relay_only: bool = False,
    layout: Layout | None = None,
) -> list[str]:
    """Return the DDL, one statement each, without comments and semicolons.

    Args:
        shards: 1 to 1,000.
        retention_days: sent and cancelled tasks are deleted when they are older, 1 to 3,650; None keeps them.
        change_stream: add the change stream AsynchronousTasksInserts.
        relay_only: leave out the tables that the relay does not need.
        layout: that of a table that has been resharded.

    Raises:
        ValueError: a number is out of range.
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise ValueError(f"shards is {shards}. It must be 1 to {MAX_SHARDS}")
    if retention_days is not None and not 1 <= retention_days <= MAX_RETENTION_DAYS:
        raise ValueError(f"retention_days is {retention_days}. It must be None or 1 to {MAX_RETENTION_DAYS}")
    table, *others = cut(text())
    if relay_only:
        others = [each for each in others if not re.search(rf" ({'|'.join(_NOT_OF_RELAY)}) \(", each)]
    table = re.sub(r"(FARM_FINGERPRINT\(.+\), )\d+(?=\)\))", rf"\g<1>{shards}", table)
    found = [*(_kept(each, retention_days) for each in (table, *others)), *([_CHANGE_STREAM] if change_stream else [])]
    return [layout.sql(each) for each in found] if layout else found


def _kept(statement: str, days: int | None) -> str:
    """Return the DDL of a table of tasks with this retention. Other statements stay as they are."""
    if days is None:
        return re.sub(r",\s*ROW DELETION POLICY \(OLDER_THAN\((SentAt|CancelledAt),.+\)$", "", statement)
    return re.sub(r"(\((?:SentAt|CancelledAt), INTERVAL )\d+", rf"\g<1>{days}", statement)


def columns() -> dict[str, str]:
    """Return the columns of AsynchronousTasks in order, each with its definition, such as `STRING(64) NOT NULL`."""
    _, parts = parse(statements()[0])
    return {name.removeprefix("column "): text for name, text in parts.items() if name.startswith("column ")}


def tables() -> list[str]:
    """Return the names of the tables, for example for the filter of a migration tool."""
    return re.findall(r"^CREATE TABLE (\w+)", text(), re.MULTILINE)


def added_layout(layout: Layout) -> list[str]:
    """Return the DDL that adds a layout to a table: its column, and its indexes."""
    table, *others = statements(layout.shards, layout=layout)
    [column] = re.findall(rf"^  ({layout.column} .+),$", table, re.MULTILINE)
    indexes = [each for each in others if re.match(r"CREATE INDEX \w+\s+ON AsynchronousTasks \(", each)]
    return [f"ALTER TABLE AsynchronousTasks ADD COLUMN {' '.join(column.split())}", *indexes]


def dropped_layout(layout: Layout, indexes: Collection[str]) -> list[str]:
    """Return the DDL that removes a layout from a table that still has these of its indexes."""
    drops = [f"DROP INDEX {each}" for each in sorted(indexes)]
    return [*drops, f"ALTER TABLE AsynchronousTasks DROP COLUMN {layout.column}"]


#: A semicolon inside quotes or a comment ends no statement. After a backslash, a quote does not end a literal, not even
#: a raw one, so prefixes such as rb do not matter.
#: https://cloud.google.com/spanner/docs/reference/standard-sql/lexical
#: Each alternative also matches without its end, so a search never goes back, and its time is linear.
_TOKEN = re.compile(
    r"""
    (?P<quoted> \'{3} (?:\\.|[^\\])*? (?:\'{3}|\Z) | "{3} (?:\\.|[^\\])*? (?:"{3}|\Z)
      | ' (?:\\.|[^'\\\r\n])* '? | " (?:\\.|[^"\\\r\n])* "? | ` (?:\\.|[^`\\\r\n])* `? )
    | (?P<line> (?:\#|--) [^\r\n]* )
    | (?P<block> /\* .*? \*/ \s* )
    | (?P<open> /\* .* )
    | (?P<end> ; )""",
    re.DOTALL | re.VERBOSE,
)


def cut(sql: str) -> list[str]:
    """Return the statements of a file without semicolons and comments, which the emulator refuses."""
    statements, begin = [""], 0
    for token in _TOKEN.finditer(sql):
        before = sql[begin : token.start()]
        if kept := token["quoted"] or token["open"]:
            statements[-1] += before + kept
        else:
            statements[-1] += before.rstrip() + (" " if token["block"] else "")
        if token["end"]:
            statements.append("")
        begin = token.end()
    statements[-1] += sql[begin:]
    return [statement.strip() for statement in statements if statement.strip()]


def text(name: str = "schema.sql") -> str:
    """Return a file of the folder schema."""
    # pyproject.toml puts schema/ into the wheel as outbox/ddl; in a checkout it is beside the package.
    installed = importlib.resources.files("outbox") / "ddl" / name
    source = installed if installed.is_file() else Path(__file__).parents[2] / "schema" / name
    return source.read_text(encoding="utf-8")


_TABLE = re.compile(
    r"CREATE TABLE (\w+) \(\n(.+)\n\) PRIMARY KEY \(([\w ,]+)\)(?:,\s+ROW DELETION POLICY \((\w+\([\w ,]+\))\))?",
    re.DOTALL,
)
_INDEX = re.compile(r"CREATE INDEX (\w+)\s+ON (\w+) \(([\w ,]+)\)\s+STORING \(([\w ,]+)\)(?:\s+WHERE \w+ IS NOT NULL)?")
_STREAM = re.compile(r"CREATE CHANGE STREAM (\w+)\s+FOR \w+\(\w+\)\s+OPTIONS \([^()]+\)")


def parse(statement: str) -> tuple[str, dict[str, str]]:
    """Return the title and the parts of the object that a statement of schema.sql creates. Raises ValueError."""
    if match := _TABLE.fullmatch(statement):
        name, elements, key, policy = match.groups()
        parts = {"primary key": key}
        for element in elements.split(",\n"):
            first, *words = element.split()
            kind, name_of = ("constraint", words.pop(0)) if first == "CONSTRAINT" else ("column", first)
            parts |= part(f"{kind} {name_of}", " ".join(words))
        if "column SentAt" in parts:
            parts |= part(DELETION, policy or "")
        return f"table {name}", parts
    if match := _INDEX.fullmatch(statement):
        name, table, key, stored = match.groups()
        definition = f"ON {table} ({key}) STORING ({', '.join(sorted(stored.split(', ')))})"
        return f"index {name}", {"definition": definition, "state": "READ_WRITE"}
    if match := _STREAM.fullmatch(statement):
        return f"change stream {match[1]}", {}  # users may choose other options
    raise ValueError(f"not a statement that schema.sql uses: {statement}")


def part(name: str, text: str) -> dict[str, str]:
    """Return a part by its name. Those that each database chooses for itself become parts of their own."""
    if re.fullmatch(r"column shard\d*", name.lower()) and (count := re.search(r"\b(\d+)(?=\W+STORED$)", text)):
        return {SHARD_COUNT: count[1], name: f"{text[: count.start()]}N{text[count.end() :]}"}
    if name == DELETION:
        days = re.fullmatch(r"older_thansentat,interval(\d+)day", normalized(text))
        # A policy on another column would delete unsent tasks, because only SentAt is NULL until a task is sent.
        return {RETENTION: f"{days[1]} days" if days else "for ever", name: "never" if days or not text else text}
    return {name: text}


def compare(
    expected: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]], free: Collection[str]
) -> Iterator[str]:
    """Yield a sentence for each object that is missing and each part that is missing or different.

    The objects are by title and the parts by name. In `found` both are `normalized`. The parts named in `free` may
    have any text.
    """
    for title, parts in expected.items():
        others = found.get(normalized(title))
        if others is None:
            yield f"{title} is missing"
            continue
        for name in [each for each in parts if each not in free]:
            other, text = others.get(normalized(name)), parts[name]
            if other is None:
                yield f"{title}, {name} is missing: expected {text}"
            elif normalized(other) != normalized(text):
                yield f"{title}, {name}: the database has {other}, expected {text}"


def missing_parts(expected: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the DDL that adds each missing column and constraint of the tables that exist, by the title of its place.

    A column that may not be NULL and has no default is left out, because Spanner cannot add it to a table.
    """
    return {
        f"{title}, {name}": f"{title} ADD {name} {text}".replace("table ", "ALTER TABLE ", 1)
        for title, parts in expected.items()
        for name, text in parts.items()
        if name.startswith(("column ", "constraint ")) and normalized(name) not in found[normalized(title)]
        if "NOT NULL" not in text or "DEFAULT" in text
    }


def normalized(text: str) -> str:
    """Return a text in lower case without spaces and parentheses, so that equivalent texts become equal."""
    return re.sub(r"[\s()]", "", text).casefold()
