"""What the operators' commands print, and their exit codes, as files: `GOLDEN=write` writes the outputs again.

A file of transcripts/ has the commands, which run one after the other on the rows that `rows` returns for it.
`$ sql` and `$ worker` are no commands: they change rows, and insert the heartbeat of a worker.
"""

import contextlib
import json
import os
import re
import shlex
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.api_core.exceptions import AlreadyExists
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, JsonObject
from google.cloud.spanner_v1.database import Database

import publishworker.process.cli
from outbox import cli
from outbox.admin import workers
from tests.acceptance.test_runbook import normal
from tests.support.commands import HOUR, Commands, here, row
from tests.support.fakes import serialized
from tests.support.operations import Row, insert
from tests.support.pubsub import PubSub
from tests.support.relays import execute
from tests.support.spanner import PROJECT, query

FOLDER = Path(__file__).parent / "transcripts"
KEYED: dict[str, Any] = {"OrderingKey": "customer-7", "Priority": 90, "ExpiresAt": datetime(2090, 1, 1, tzinfo=UTC)}
JSON = serialized(b'{"order": {"cents": 1999}}', attributes={"kind": "order"})
SENT: dict[str, Any] = {"age": timedelta(minutes=5), "Data": serialized(b"x")}
PROGRAMS: dict[str, Any] = {"outbox": cli.main, "publishworker": publishworker.process.cli.main}
#: What commands print and take.
PRINTED = {"OPERATION": r"\b[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}\b", "CURSOR": r"(?<=--after )\S+(?= for)"}


def rows(now: datetime) -> dict[str, list[Row]]:
    expired: dict[str, Any] = {"LastError": "expired: late", "ExpiresAt": now - HOUR}
    return {
        "list": [
            row("young"), row("old", age=3 * HOUR), row("low", Priority=0, age=9 * HOUR),
            row("high", Priority=100, AvailableAt=now - timedelta(minutes=1)), row("again", "retrying"),
            row("later", "scheduled"), row("behind", "blocked"), row("dead", "dead"),
            row("dead-3", "dead", age=3 * HOUR), row("dead-5", "dead", age=5 * HOUR),
            row("other", "dead", topic="invoices", age=3 * HOUR, LastError="too_large: 11 MB"),
            *(row(f"sent-{n}", "sent", age=n * HOUR) for n in (3, 1, 2)),
        ],
        "show": [
            row("json", Data=JSON, **KEYED), row("binary", Data=serialized(bytes(range(256)))),
            row("text", Data=serialized("first\nzweite — 三".encode())), row("garbage", Data=b"\xff" * 3),
        ],
        "status": [
            row("a"), row("b", age=2 * HOUR), row("p", topic="paused", age=9 * HOUR), row("d", "dead"),
            row("e", "dead", topic="paused"), row("r", "retrying"), row("k", "blocked", LastError="internal: 500"),
        ],
        "retry": [
            *(row(f"a{n}", "dead", LastError="not_found: no topic") for n in range(3)),
            row("b", "dead", topic="invoices", LastError="internal: 500"), row("expired", "dead", **expired),
            row("a-pending-task"), row("head", "dead", OrderingKey="key"), row("next", "blocked", BlockedBy="head"),
        ],
        "check": [row("pending", topic="billing"), row("missing", topic="pending-and-missing")],
        "purge": [row("sent-now", "sent", age=timedelta(0))],
        "restore": [row("again"), *(row(each, each) for each in ("pending", "retrying", "scheduled", "dead", "sent"))],
        "resend": [
            row("a", "sent", **SENT), row("b", "sent", **SENT), row("broken", "sent", Data=b"\xff"),
            row("other", "sent", topic="mails", **SENT), row("pending"),
        ],
        "workers": [row("a")],
        "topics": [
            *(row(name, topic=name) for name in ("orders", "invoices", "limited")),
            row("dead", "dead"),
            *(row(f"of {name}", topic=f"projects/{name}/topics/invoices") for name in (PROJECT, "other")),
        ],
    }  # fmt: skip


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: str(file.stem))
def test_the_commands_of_a_transcript_print_its_output(
    outbox: Commands, database: Database, pubsub: PubSub, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    """Lines of stderr begin with `2>`. OPERATION and CURSOR are the last ones that were printed, and NOW is a time."""
    monkeypatch.setenv("LOGNAME", "jane")
    monkeypatch.setattr(workers, "TAKE_OVER", timedelta())  # earlier tests may just have had workers in this database
    now, printed, output = datetime.now(UTC), list[str](), ""
    insert(database, rows(now)[file.stem])
    with contextlib.suppress(AlreadyExists):
        pubsub.publisher.create_topic(name=f"projects/{PROJECT}/topics/billing")
    for line in re.findall(r"^(?:\n?#.*|\$ .*)\n", file.read_text(encoding="utf-8"), re.MULTILINE):
        printed.append(line)
        if line.startswith("$ sql "):
            execute(database, line.removeprefix("$ sql "))
        elif line.startswith("$ worker "):
            id, info = line.removeprefix("$ worker ").split(maxsplit=1)
            columns = ("WorkerId", "StartedAt", "SeenAt", "LivenessTimeoutSeconds", "Info")
            values = (id, now, COMMIT_TIMESTAMP, 600, JsonObject(json.loads(info)))
            with database.batch() as batch:
                batch.insert_or_update("AsynchronousTaskWorkers", columns, [values])
        elif line.startswith("$ "):
            name, command = line.removeprefix("$ ").replace("NOW", now.isoformat()).split(maxsplit=1)
            for each in PRINTED.keys() & command.split():
                command = command.replace(each, re.findall(PRINTED[each], output)[-1])
            done = here(*shlex.split(command), environment=outbox.environment, program=PROGRAMS[name])
            output += done.stdout + done.stderr
            lines = [*done.stdout.splitlines(), *(f"2> {each}" for each in done.stderr.splitlines())]
            lines += [f"[exit code {done.code}]"] * bool(done.code)
            printed += [shown(each, database) + "\n" for each in lines]
    if os.environ.get("GOLDEN") == "write":
        file.write_text("".join(printed), encoding="utf-8")
    assert "".join(printed) == file.read_text(encoding="utf-8")


def shown(line: str, database: Database) -> str:
    """Return a line without what differs from run to run, which includes the width of columns."""
    if line.startswith("  "):  # a part of a message, or a number of tasks
        return re.sub(" +$", "", line)
    for name, pattern in (PRINTED | {"HOST:PORT": r"127\.0\.0\.1:\d+"}).items():
        line = re.sub(pattern, name, line)
    line = line.replace(str(database.database_id), "shop").replace(f"on {socket.gethostname()}", "on laptop")
    line = re.sub(r"(ok +settings: .*batch_size=\d+).*", r"\1, ...", line)
    return normal(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", line))


def test_show_has_every_column(database: Database) -> None:
    statement = "SELECT column_name FROM information_schema.columns WHERE table_name = 'AsynchronousTasks'"
    text = (FOLDER / "show.txt").read_text(encoding="utf-8")
    assert {name for [name] in query(database, statement)} <= {*re.findall(r"^\w+", text, re.MULTILINE)}
