"""What a statement on the tasks or operations reads: a range of an index, single rows, or everything."""

import re

#: The table in a statement that reads or changes rows, with its hint and its alias.
_TABLE = re.compile(
    r"\b(?:FROM|JOIN(?:@\{[^}]*\})?|UPDATE) AsynchronousTask(?:s|Operations)(?:@\{[^}]*\})?(?: AS (?!OF)(\w+))?(?!\w)"
)
_INNERMOST = re.compile(r"\([^()]*\)")


def scans(statement: str) -> list[str]:
    """Return each part of a statement that reads the table or an index without a condition on its first column.

    That column is Id or OperationId, or the number of the shard.
    """
    statement = " ".join(re.sub(r"--[^\n]*", "", statement).split())
    found = []
    for table in _TABLE.finditer(statement):
        scope = _own(statement[table.end() :])
        alias = rf"{table[1]}\." if table[1] else r"(?<![.\w])"
        if not re.search(rf"{alias}(?:Shard\d*|(?:Operation)?Id) (?:=|>=|IN\b|BETWEEN\b)|= {alias}Id\b", scope):
            found.append(table[0] + scope)
    return found


def unbounded(statement: str) -> list[str]:
    """Return each part of a statement that reads more of an index than its limit.

    It has no limit, or it drops rows before the limit, by a condition that the key of the index does not begin with.
    """
    statement = " ".join(statement.split())
    found = []
    for table in _TABLE.finditer(statement):
        scope = _own(statement[table.end() :])
        if re.search(r"Id (?:=|IN\b|(?:BETWEEN|>=).* LIMIT @)|= \w+\.Id\b", scope):
            continue  # single rows, or those at the beginning of a range of IDs
        conditions = scope.partition(" ORDER BY ")[0]
        columns = r"\b(?:Attempts|BlockedBy|LastError|ExpiresAt|CreatedAt)\b|STRPOS|STARTS_WITH"
        dropped = re.search(columns if "InOrder" in table[0] else f"{columns}|@topic", conditions)
        if dropped or not re.search(r"\bLIMIT (?:@\w+|1)$", scope.strip()):
            found.append(table[0] + scope)
    return found


def _own(text: str) -> str:
    """Return a text up to the end of its query, without what is in parentheses."""
    while (shorter := _INNERMOST.sub("_", text)) != text:
        text = shorter
    return re.split(r"\)|;|\bUNION\b", text, maxsplit=1)[0]
