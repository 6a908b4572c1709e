"""The DDL of the outbox, which is `schema/schema.sql` with the choices of a user, and its layouts. No client is needed.

A layout is a generated column that numbers the shards of the tasks, and the indexes that begin with it. A table has
one layout, and two while its number of shards changes (`schema reshard`). Each task is in all layouts. The first
layout has the names of schema.sql. The names of the others end with the number of shards, such as `Shard32` and
`AsynchronousTasksToSend32`. SQL is written with the first names, and `sql` changes them.

A shard ID names a shard and its layout: 0 to 999 are shards of the first layout, 32,000 to 32,031 are those of Shard32.

To compare a database with the DDL, each object, such as "table AsynchronousTasks", is cut into named parts, such as
"column Shard", with a text each.
"""

import importlib.resources
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

COLUMN = "Shard"
MAX_SHARDS = 1000
#: States of a layout in AsynchronousTaskShards.
BUILDING, POLLED, RETIRED = "building", "polled", "retired"
#: What a new database gets unless a user chooses otherwise.
DEFAULT_SHARDS, DEFAULT_RETENTION = 10, 7
#: Ten years. A row deletion policy counts days.
MAX_RETENTION_DAYS = 3650
#: Two parts that each database chooses for itself.
SHARD_COUNT, RETENTION = "shard count", "retention of sent tasks"
DELETION = "deletion of unsent tasks"
#: A part of an index, before the name of the column.
STORED = "stored column"
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
#: Tables that the relay does not need.
_NOT_OF_RELAY = (OPERATIONS, "ProcessedTasks")

CHANGE_STREAM = "AsynchronousTasksInserts"
#: For readers that want to know of new tasks: one record for each registered task, none for marks and deletions.
_CHANGE_STREAM = f"""CREATE CHANGE STREAM {CHANGE_STREAM}
  FOR AsynchronousTasks(SentAt)
  OPTIONS (
    retention_period = '7d', exclude_update = true, exclude_delete = true, exclude_ttl_deletes = true
  )"""


#: The indexes of a layout.
INDEXES = ("AsynchronousTasksToSend", "AsynchronousTasksInOrder", "AsynchronousTasksToRestore")
_NAMES = re.compile(rf"\b({COLUMN}|{'|'.join(INDEXES)})\b")


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of shards, and the end of the names: "" for the first layout. Sorted by the column's name."""

    shards: int
    suffix: str = ""

    @classmethod
    def added(cls, shards: int) -> "Layout":
        """Return the layout that a change to this number of shards adds."""
        return cls(shards, str(shards))

    @classmethod
    def recorded(cls, column: str, shards: int) -> "Layout | None":
        """Return the layout of a row of AsynchronousTaskShards, or None: any program may write anything there."""
        suffix = column.removeprefix(COLUMN)
        is_layout = 1 <= shards <= MAX_SHARDS and column == COLUMN + suffix and suffix in ("", str(shards))
        return cls(shards, suffix) if is_layout else None

    @classmethod
    def usable(cls, rows: Iterable[Sequence[Any]]) -> "Layout":
        """Return a layout that holds all tasks, by the rows of `shared_sql.LAYOUTS`. It can be used for statements."""
        return next(filter(None, (cls.recorded(column, shards) for column, shards in rows)), cls(1))

    def __lt__(self, other: "Layout") -> bool:
        return self.column < other.column

    @property
    def column(self) -> str:
        """Return the name of the column."""
        return COLUMN + self.suffix

    @property
    def ids(self) -> range:
        """Return the IDs of the shards."""
        begin = int(self.suffix or 0) * MAX_SHARDS
        return range(begin, begin + self.shards)

    def sql(self, statement: str) -> str:
        """Return a statement for this layout."""
        return _renamed(statement, self.suffix)


@dataclass(frozen=True, slots=True)
class LayoutShards:
    """Some shards of one layout. `numbers` are the values of its column, `first_id` is the ID of its shard 0."""

    numbers: list[int]
    first_id: int

    def __contains__(self, shard: int) -> bool:
        return shard // MAX_SHARDS * MAX_SHARDS == self.first_id

    def sql(self, statement: str) -> str:
        """Return a statement, or a name, for this layout."""
        return _renamed(statement, str(self.first_id // MAX_SHARDS or ""))


def by_layout(shards: Iterable[int]) -> list[LayoutShards]:
    """Divide shard IDs by their layout. The IDs of a layout keep their order."""
    found: dict[int, list[int]] = defaultdict(list)
    for shard in shards:
        found[shard // MAX_SHARDS * MAX_SHARDS].append(shard % MAX_SHARDS)
    return [LayoutShards(numbers, first_id) for first_id, numbers in found.items()]


@lru_cache(maxsize=256)
def _renamed(statement: str, suffix: str) -> str:
    return _NAMES.sub(rf"\g<1>{suffix}", statement) if suffix else statement


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
    """Return the DDL of the table of tasks with this retention. Other statements stay as they are."""
    if days is None:
        return re.sub(r",\s*ROW DELETION POLICY \(OLDER_THAN\(SentAt,.+\)$", "", statement)
    return re.sub(r"(\(SentAt, INTERVAL )\d+", rf"\g<1>{days}", statement)


def columns() -> dict[str, str]:
    """Return the columns of AsynchronousTasks in order, each with its definition, such as `STRING(64) NOT NULL`."""
    _, parts = parse(statements()[0])
    return {name.removeprefix("column "): text for name, text in parts.items() if name.startswith("column ")}


def tables() -> list[str]:
    """Return the names of the tables, for example for the filter of a migration tool."""
    return re.findall(r"^CREATE TABLE (\w+)", text(), re.MULTILINE)


#: A semicolon inside quotes or a comment ends no statement. After a backslash, a quote does not end a literal, not even
#: a raw one, so prefixes such as rb do not matter.
#: https://cloud.google.com/spanner/docs/reference/standard-sql/lexical
#: Each alternative also matches without its end, so a search never goes back, and its time is linear.
_TOKEN = re.compile(
    r"""
    (?P<kept> \'{3} (?:\\.|[^\\])*? (?:\'{3}|\Z) | "{3} (?:\\.|[^\\])*? (?:"{3}|\Z)
      | ' (?:\\.|[^'\\\r\n])* '? | " (?:\\.|[^"\\\r\n])* "? | ` (?:\\.|[^`\\\r\n])* `? )
    | (?:(?<!\s)\s+)? (?: (?:\#|--) [^\r\n]* | (?P<block> /\* .*? \*/ \s* ) | (?P<end> ; ) )
    | (?P<open> /\* .* )""",
    re.DOTALL | re.VERBOSE,
)


def cut(sql: str) -> list[str]:
    """Return the statements of a file without semicolons and comments, which the emulator refuses."""

    def cleaned(token: re.Match[str]) -> str:
        return token["kept"] or token["open"] or (" " if token["block"] else "\0" if token["end"] else "")

    return [statement.strip() for statement in _TOKEN.sub(cleaned, sql).split("\0") if statement.strip()]


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
        columns = {f"{STORED} {each}": f"STORING ({each})" for each in stored.split(", ")}
        return f"index {name}", {"definition": f"ON {table} ({key})", **columns, "state": "READ_WRITE"}
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
    """Yield a sentence for each object that is missing and each part that is missing or does not serve.

    The objects are by title and the parts by name. In `found` both are `normalized`. The parts named in `free` may
    have any text. Further objects and parts are no difference, so that a table of a newer version serves this one.
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
            elif not _serves(other, text):
                yield f"{title}, {name}: the database has {other}, expected {text}"


def _serves(found: str, expected: str) -> bool:
    """Return whether a text is equivalent, or only longer values or a default are allowed in addition."""
    if "DEFAULT" not in expected.upper():
        found = re.sub(r" DEFAULT \(.*\)(?= OPTIONS|$)", "", found, flags=re.IGNORECASE | re.DOTALL)
    lengths = [re.match(r"(string|bytes)\((\d+|max)\)", each.lower()) for each in (found, expected)]
    if all(lengths):
        (kind, length), (of_kind, needed) = (each.groups() for each in lengths if each)
        if kind == of_kind and needed != "max" and (length == "max" or int(length) > int(needed)):
            found = expected[: expected.index(")")] + found[found.index(")") :]
    return normalized(found) == normalized(expected)


def missing_parts(expected: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the DDL that adds each missing column, constraint and stored column, by the title of its place.

    A column that may not be NULL and has no default is left out, because Spanner cannot add it to a table.
    """
    return {
        f"{title}, {name}": f"ALTER {title} ADD {name if kind == 'stored' else f'{name} {text}'}"
        for title, parts in expected.items()
        for name, text in parts.items()
        if (kind := name.partition(" ")[0]) in ("column", "constraint", "stored")
        if normalized(name) not in found[normalized(title)]
        if "NOT NULL" not in text or "DEFAULT" in text
    }


def normalized(text: str) -> str:
    """Return a text in lower case without spaces and parentheses, so that equivalent texts become equal."""
    return re.sub(r"[\s()]", "", text).casefold()
