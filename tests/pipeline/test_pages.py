"""The Python code and the commands of the pages in docs/pipeline."""

import json
import re
import shlex
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import deltalake
import pyspark
import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database
from pyspark.errors import StreamingQueryException

from outbox.devtools.emulators import Emulators
from outbox.table import ddl
from outbox.table.states import NEVER
from outbox_admin import cli as outbox_command
from outbox_pipeline import cli, task_id
from outbox_pipeline.jobs.audit_transforms import FLAWS, OUT_OF_ORDER, STATES
from tests.support import spanner
from tests.support.avro import avro_message, write_avro
from tests.support.fakes import serialized
from tests.support.operations import insert, row, rows_of
from tests.support.processes import ROOT
from tests.support.pubsub import PubSub
from tests.support.relays import register, unsent

PAGES = ROOT / "docs" / "pipeline"
#: The paths on the pages, which the tests replace by a temporary folder.
PATHS = re.compile(r"(?<![\w/.-])(?:/tmp/outbox|(?=invoices\.jsonl|rejects\b(?!=)))/?")


@pytest.fixture(scope="module")
def of_the_pages(emulators: Emulators) -> Iterator[Database]:
    instance = spanner.instance(emulators.spanner_host, "main", "my-project")
    database = instance.database("shop", ddl_statements=ddl.statements())
    database.create().result(timeout=spanner.ADMIN_SECONDS)
    yield database
    database.drop()
    instance.delete()


@pytest.fixture
def shop(of_the_pages: Database) -> Database:
    with of_the_pages.batch() as batch:
        for table in ("AsynchronousTasks", ddl.OPERATIONS):
            batch.delete(table, KeySet(all_=True))
    return of_the_pages


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def jobs(page: str, folder: Path) -> list[list[str]]:
    lines = [line for block in blocks(page, "console") for line in block.replace("\\\n", "").splitlines()]
    words = [[PATHS.sub(f"{folder}/", word) for word in shlex.split(line.removeprefix("$ "))] for line in lines]
    return [each[1:] for each in words if each[0] == "outbox-pipeline"]


def execute(page: str, folder: Path, names: dict[str, Any], *replaced: tuple[str, str]) -> dict[str, Any]:
    for block in blocks(page, "python"):
        code = re.sub(r'(?<=")(?:/tmp/outbox/|(?=rejects"))', f"{folder}/", block)
        for old, new in replaced:
            code = code.replace(old, new)
        exec(compile(code, page, "exec"), names)
    return names


@pytest.fixture
def here(in_process: None, tmp_path: Path) -> Path:  # noqa: ARG001 - the commands use the Spark of the tests
    return tmp_path


def test_the_page_of_the_source(shop: Database, here: Path, capsys: pytest.CaptureFixture[str]):
    """Each sent task is in the Delta table once, though the query fails in its first batch, when it has written."""
    begin, write = datetime.now(UTC) - timedelta(days=7), deltalake.write_deltalake

    def written_and_failed(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        raise OSError("killed")

    insert(shop, [row("dead", AvailableAt=NEVER), row("unsent")])
    insert(shop, [row(f"{n:02d}", SentAt=begin + timedelta(hours=n)) for n in range(24)])
    few = ('"100000")', '"20").option("partitions", "2")')
    with (
        mock.patch.object(deltalake, "write_deltalake", written_and_failed),
        pytest.raises(StreamingQueryException, match="killed"),
    ):
        execute("source.md", here, {}, few)
    assert re.search(r"\|orders\|\s+1\|", capsys.readouterr().out)
    for _ in range(1 + (pyspark.__version__ < "4.2")):  # before, a run ends after the unfinished batch
        execute("source.md", here, {}, few)
    found = deltalake.DeltaTable(here / "sent").to_pyarrow_table()["Id"].to_pylist()
    assert sorted(found) == sorted(rows_of(shop).keys() - {"dead", "unsent"})


def test_the_page_of_register(shop: Database, here: Path, capsys: pytest.CaptureFixture[str]):
    lines = [{"customer": f"c-{n}", "month": "2026-12", "data": {"cents": n}} for n in (3, 4)]
    (here / "invoices.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    [command] = jobs("register.md", here)
    assert cli.main(command) == 0
    assert cli.main(command) == 0
    (here / "events").mkdir()
    (here / "events" / "one.json").write_text('{"data":"placed","ordering_key":"c-1"}')
    execute("register.md", here, {}, ('"database": "copy"', '"database": "shop"'))
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "2 0", "{'outbox': Row(registered=0, existing=1, repeated=0, rejected=0)}"
    ]  # fmt: skip
    # A notebook has no other commands.
    text = (PAGES.parent / "operations/pipeline-platforms.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[-1]
    exec(compile(code.replace("/tmp/outbox", str(here)), "notebook", "exec"), {})
    assert "registered=1, existing=0" in capsys.readouterr().out
    ids = {task_id("invoices", f"c-{n}", "2026-12") for n in (1, 2, 3, 4)}
    others = rows_of(shop).keys() - ids  # an event, and that of the notebook
    assert rows_of(shop).keys() - others == ids
    assert [rows_of(shop)[each]["OrderingKey"] for each in others] == ["c-1", "c-1"]


def test_the_page_of_the_drain(shop: Database, here: Path, pubsub: PubSub, capsys: pytest.CaptureFixture[str]):
    topic = f"invoices-{uuid.uuid4().hex}"
    pubsub.publisher.create_topic(name=f"projects/my-project/topics/{topic}")
    register(shop, topic, 20)
    [command] = jobs("drain.md", here)
    assert cli.main([*command, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert unsent(shop) == []
    counted = (PAGES / "drain.md").read_text(encoding="utf-8").partition("## Counts")[2]
    named = [name for line in counted.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)]
    assert {"job", "seconds", *named} >= done.keys()


def test_the_pages_of_the_archive_and_of_replaying(shop: Database, here: Path, capsys: pytest.CaptureFixture[str]):
    now = datetime.now(UTC)
    message = {"data": b'{"cents": 1200}', "attributes": {"kind": "paid"}}
    insert(shop, [row("a", SentAt=now, Data=serialized(**message)), row("b", SentAt=now)])
    # Two days ago, because a row that is inserted now is not in a snapshot of one minute after the last midnight.
    insert(shop, [row("purged", SentAt=now - timedelta(days=2), Data=serialized(**message))])
    [command] = jobs("archive.md", here)
    assert cli.main([*command, "--read-late", "--purge"]) == 0
    assert rows_of(shop).keys() == {"a", "b"}
    names = execute("archive.md", here, {})
    assert names["sent"].fetchall() == [("orders", 1)]
    text = (PAGES / "archive.md").read_text(encoding="utf-8")
    shown = re.findall(r"^    ARCHIVE/(.*)$", text, re.MULTILINE)
    assert len(shown) == 2
    for path in shown:
        pattern = re.sub(r"\d{8}T\d{6}Z|(?<==)[\da-f-]{10,12}(?=/)", "*", path)
        assert list((here / "archive").glob(pattern.replace("....", "*."))), path
    statement = blocks("archive.md", "sql")[0].replace("DATABASE shop", f"DATABASE `{shop.database_id}`")
    shop.update_ddl([statement]).result(timeout=spanner.ADMIN_SECONDS)

    dry, replay = jobs("replay.md", here)
    capsys.readouterr()
    assert cli.main(dry) == 0
    said = capsys.readouterr().out
    assert re.search(r"^selected +1\n(.*\n)*topics +1  orders\nsample +purged  orders  \S+Z$", said, re.MULTILINE)
    assert cli.main(replay) == 0
    assert {id for id, each in rows_of(shop).items() if each["SentAt"] is None} == {"purged"}
    shown = re.search(r"^    outbox (operations .*)", (PAGES / "replay.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert shown is not None
    capsys.readouterr()
    place = ("--project", "my-project", "--instance", "main", "--database", "shop")
    assert outbox_command.main([*shown[1].split(), *place]) == 0
    [found] = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["selection"]["archive"], found["tasks"]) == (str(here / "archive"), 1)
    assert found["finished_at"]


def test_the_page_of_the_audit(shop: Database, here: Path):
    at = datetime.now(UTC) - timedelta(hours=2)
    insert(shop, [row("a", CreatedAt=at, SentAt=at), row("b", CreatedAt=at, SentAt=at)])
    (here / "received").mkdir()
    write_avro(here / "received" / "1.avro", [avro_message("1", at, {"asynchronous_task_id": "a"})])
    command, effects = jobs("audit.md", here)
    assert cli.main(command) == 1
    with shop.batch() as batch:
        columns = ("Consumer", "TaskId", "ProcessedAt")
        batch.insert("ProcessedTasks", columns, [("billing", "a", COMMIT_TIMESTAMP)])
    assert cli.main([word.replace("databases/billing", "databases/shop") for word in effects]) == 1
    assert json.loads((here / "effects/summary.json").read_text(encoding="utf-8"))["applied_late"] == 1
    [file] = (here / "audit").glob("findings/class=lost/*.json")
    assert json.loads(file.read_text(encoding="utf-8"))["task_id"] == "b"
    named = set(re.findall(r"`(\w+)`", (PAGES / "audit.md").read_text(encoding="utf-8")))
    assert named >= {*STATES, *FLAWS, OUT_OF_ORDER, "unknown", "foreign", "unreadable"}
