"""The page about topic controls: its commands print its output, and its SQL does the same."""

import re
import shlex
from pathlib import Path
from typing import Any

from google.cloud.spanner_v1.database import Database

from tests.support.commands import Commands, row
from tests.support.operations import insert
from tests.support.processes import ROOT
from tests.support.relays import execute
from tests.support.spanner import query

PAGE = Path("docs/operations/topics.md")


def blocks(language: str) -> str:
    block, *_ = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_commands_of_the_page_print_its_output(outbox: Commands, database: Database):
    """One after the other on the same database; the flags that name it are the test's."""
    insert(database, [row(topic, topic=topic) for topic in ("orders", "invoices")])
    shown = re.findall(r"^\$ outbox (.*?) --project .*\n((?:[^$].*\n)*)", blocks("console"), re.MULTILINE)
    assert [words.split()[0] for words, _ in shown] == ["pause", "resume", "topics", "topics", "topics"]
    for words, expected in shown:
        done = outbox.here(*shlex.split(words))
        assert (done.code, done.stdout) == (0, expected)


def test_the_sql_of_the_page_does_the_same(database: Database):
    """Each statement of the page leaves the row that the command would leave."""
    *statements, last = [re.sub(r"--.*", "", each).strip() for each in blocks("sql").split(";")]
    left: list[Any] = []
    for statement in statements:
        execute(database, statement)
        left += query(database, last)
    assert left == [
        ["orders", False, None, None, None],
        ["orders", True, None, None, None],
        ["orders", True, 10.0, 20, None],
        ["orders", False, None, None, None],
    ]
