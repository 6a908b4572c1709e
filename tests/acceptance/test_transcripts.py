"""What commands print, and their exit codes: the transcripts here, and the console blocks of the operations pages.

`GOLDEN=write` writes the transcripts again. A file of transcripts/ has the commands, which run one after the other on
the rows that `rows` returns for it. `$ sql` and `$ worker` are no commands: they change rows, and insert the heartbeat
of a worker.
"""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.api_core.exceptions import AlreadyExists
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, JsonObject
from google.cloud.spanner_v1.database import Database

import publishworker.process.cli
from outbox.devtools.emulators import Emulators
from outbox.rows import workers
from outbox.table import ddl
from outbox_admin import cli
from tests.manifests.rendering import programs
from tests.support import fork_server
from tests.support.commands import HOUR, Commands, here, row
from tests.support.fakes import serialized
from tests.support.operations import Row, insert
from tests.support.processes import ROOT, clean_environment
from tests.support.pubsub import PubSub
from tests.support.relays import execute
from tests.support.situations import SITUATIONS, Place
from tests.support.spanner import ADMIN_SECONDS, PROJECT, instance, query

PAGES = ROOT / "docs/operations"
TOPICS = (PAGES / "topics.md").read_text(encoding="utf-8")
EVERYWHERE = [(page, title) for page, situations in SITUATIONS.items() for title in situations]
#: A command is killed after it.
COMMAND_SECONDS = 60.0
GCLOUD = {
    "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
    "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
    "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
}
TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|\+00:00)?")
UUID = r"\b[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}\b"
DURATION = re.compile(r"\b\d+(\.\d+)?( s|[smhd]( \d+[smh])?)\b")


def sections(page: str) -> dict[str, str]:
    """Return the text below each second-level heading that shows commands."""
    parts = re.split(r"^## (.+)\n", (PAGES / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title: text for title, text in zip(parts[1::2], parts[2::2], strict=True) if "```console" in text}


def shown(text: str) -> list[tuple[str, list[str]]]:
    """Return each command of the text's console blocks, with the lines that the page shows below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def normal(line: str) -> str:
    """Return a line without times, durations, UUIDs and the width of columns, which differ from run to run."""
    line = re.sub(r"\.{3,}", "...", line)  # a dot for each second that gcloud waits
    return re.sub(r" +", " ", DURATION.sub("DURATION", TIME.sub("TIME", re.sub(UUID, "OPERATION", line)))).strip()


def matches(lines: list[str], expected: list[str]) -> bool:
    """Compare; a line `...` of the page stands for any number of lines."""
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(normal(line)) + r"\n" for line in expected)
    return re.fullmatch(pattern, "".join(normal(line) + "\n" for line in lines)) is not None


@pytest.fixture(scope="module")
def places(emulators: Emulators, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Place]:
    """A database for each situation, arranged at once."""
    programs("gcloud")
    found = {}
    pubsub = PubSub.on(emulators.pubsub_host)
    for number, (page, title) in enumerate(EVERYWHERE):
        project = f"runbook-{number}"
        directory = tmp_path_factory.mktemp(project)
        environment = clean_environment() | emulators.environment() | GCLOUD
        environment |= {
            "PATH": os.pathsep.join(
                (str(fork_server.scripts()), str(Path(sys.executable).parent), environment["PATH"])
            ),
            "CLOUDSDK_CONFIG": str(directory),
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB": f"http://{emulators.pubsub_host}/",
            # An endpoint instead of PUBSUB_EMULATOR_HOST, so that `check` advises as for Google Cloud.
            "OUTBOX_PUBSUB_ENDPOINT": f"http://{emulators.pubsub_host}",
            "OUTBOX_PROJECT": project,
            "OUTBOX_INSTANCE": "main",
            "OUTBOX_DATABASE": "shop",
            "OUTBOX_HEARTBEAT_FILE": str(directory / "heartbeat"),
            "LOGNAME": "jane",
            "PYTHONUNBUFFERED": "1",  # both streams in the order in which they were written
        }
        database = instance(emulators.spanner_host, "main", project).database("shop", ddl_statements=ddl.statements())
        database.create().result(timeout=ADMIN_SECONDS)
        found[page, title] = place = Place(project, database, pubsub, directory, environment)
        for step in SITUATIONS[page][title]:
            step(place)
    return found


def in_spanner(command: str, place: Place) -> list[str]:
    """Do what a command of `gcloud spanner` would do, which does not reach the emulator."""
    options = dict(word.split("=", 1) for word in shlex.split(command) if "=" in word)
    if statement := options.get("--sql"):
        count = execute(place.database, statement)
        return [f"Statement modified {count} row{'s' * (count != 1)}"]
    place.database.update_ddl([options["--ddl"]]).result(timeout=ADMIN_SECONDS)
    return ["Schema updating...", ".....done."]


def run(command: str, place: Place) -> list[str]:
    if command.startswith("gcloud spanner"):
        return in_spanner(command, place)
    done = subprocess.run(
        ["bash", "-c", command], env=place.environment, cwd=place.directory, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_SECONDS, check=False, text=True,
    )  # fmt: skip
    return done.stdout.replace(place.project, "my-project").replace(socket.gethostname(), "laptop").splitlines()


@pytest.mark.extended
@pytest.mark.xdist_group("runbook")
@pytest.mark.parametrize("page", SITUATIONS)
def test_every_section_with_commands_has_a_situation(page: str):
    """A new section needs one in which its commands are run, and no situation is without its section."""
    assert set(sections(page)) == set(SITUATIONS[page])


@pytest.mark.extended
@pytest.mark.xdist_group("runbook")
@pytest.mark.parametrize(("page", "title"), EVERYWHERE)
def test_the_commands_of_a_section_print_its_output(page: str, title: str, places: dict[tuple[str, str], Place]):
    """One after the other, as a person on call would."""
    for command, expected in shown(sections(page)[title]):
        printed = run(command, places[page, title])
        assert matches(printed, expected), f"$ {command}\n" + "\n".join(printed)


FOLDER = Path(__file__).parent / "transcripts"
KEYED: dict[str, Any] = {"OrderingKey": "customer-7", "Priority": 90, "ExpiresAt": datetime(2090, 1, 1, tzinfo=UTC)}
JSON = serialized(b'{"order": {"cents": 1999}}', attributes={"kind": "order"})
SENT: dict[str, Any] = {"age": timedelta(minutes=5), "Data": serialized(b"x")}
PROGRAMS: dict[str, Any] = {"outbox": cli.main, "publishworker": publishworker.process.cli.main}
#: What commands print and take.
PRINTED = {"OPERATION": UUID, "CURSOR": r"(?<=--after )\S+(?= for)"}


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
            # The names of databases have many lengths, so the lines of `check` with settings end at other places.
            printed += [stable(each, database) + "\n" for each in lines if not each.startswith(" " * 12 + "--")]
    if os.environ.get("GOLDEN") == "write":
        file.write_text("".join(printed), encoding="utf-8")
    assert "".join(printed) == file.read_text(encoding="utf-8")


def stable(line: str, database: Database) -> str:
    """Return a line without what differs from run to run, which includes the width of columns."""
    if line.startswith("  ") and not re.match(" +(since |by |[$] |[^ ]+ is late)", line):  # of a message, or a number
        return re.sub(" +$", "", line)
    for name, pattern in (PRINTED | {"HOST:PORT": r"127\.0\.0\.1:\d+"}).items():
        line = re.sub(pattern, name, line)
    line = line.replace(str(database.database_id), "shop").replace(f"on {socket.gethostname()}", "on laptop")
    text = normal(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", line))
    return f"  {text}" if line.startswith("  ") else text


def test_show_has_every_column(database: Database) -> None:
    statement = "SELECT column_name FROM information_schema.columns WHERE table_name = 'AsynchronousTasks'"
    text = (FOLDER / "show.txt").read_text(encoding="utf-8")
    assert {name for [name] in query(database, statement)} <= {*re.findall(r"^\w+", text, re.MULTILINE)}


def test_the_commands_at_the_top_of_the_page_about_topics_print_its_output(outbox: Commands, database: Database):
    """One after the other on the same database; the flags that name it are the test's."""
    insert(database, [row(topic, topic=topic) for topic in ("orders", "invoices")])
    found = shown(TOPICS.partition("\n## ")[0])
    assert len(found) == 5
    for command, expected in found:
        done = outbox.here(*shlex.split(command.partition(" --project")[0])[1:])
        assert (done.code, done.stdout.splitlines()) == (0, expected)


def test_the_sql_of_the_page_does_the_same(database: Database):
    """Each statement of the page leaves the row that the command would leave."""
    [block] = re.findall(r"^```sql\n(.*?)^```", TOPICS, re.MULTILINE | re.DOTALL)
    *statements, last = [re.sub(r"--.*", "", each).strip() for each in block.split(";")]
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
