"""`outbox emulators` as users run it: the real emulators, signals, exit codes, nothing left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools import child_process
from outbox.devtools.emulators import PUBSUB, SPANNER, Emulators
from outbox.table.ddl import statements
from outbox_admin.emulators_command import WRITTEN
from tests.support.commands import TRACE, here
from tests.support.processes import children, gone, run, started
from tests.support.proxy import silent_port
from tests.support.pubsub import PubSub
from tests.support.relays import register
from tests.support.spanner import instance, variables
from tests.support.waiting import eventually

linux = pytest.mark.skipif(sys.platform != "linux", reason="the processes are read from /proc")


@pytest.mark.usefixtures("installed")
class TestWhereTheyAreInstalled:
    """These start emulators of their own, so those that a variable names are not enough."""

    @pytest.mark.parametrize("whole", [True, False], ids=["running", "starting"])
    @linux
    def test_a_killed_command_leaves_no_emulator(self, whole: bool) -> None:
        """Even SIGKILL, at any moment, leaves no process that holds a port or memory."""
        with started("outbox", "emulators") as process:
            if whole:
                process.wait_for_text("MULTIPLEXED_SESSIONS_FOR_RW=false")
            pids = eventually(lambda: children(process.pid), seconds=30)
            process.stop(signal.SIGKILL)
            assert process.wait(10) == -signal.SIGKILL
            eventually(lambda: all(gone(pid) for pid in pids), seconds=10)

    @linux
    def test_an_emulator_that_ends_ends_the_command(self) -> None:
        """A crashed emulator is a message and exit code 1, and the other one does not stay alone."""
        with started("outbox", "emulators") as process:
            process.wait_for_text("MULTIPLEXED_SESSIONS_FOR_RW=false")
            hosts = re.findall(r"^export (?:SPANNER|PUBSUB)_EMULATOR_HOST=(\S+)$", process.stdout, re.MULTILINE)
            assert len(hosts) == 2
            os.kill(children(process.pid)[0], signal.SIGKILL)
            assert process.wait(10) == 1
            assert re.search(r"outbox: the \S+ emulator was killed by SIGKILL", process.stderr)
            assert not any(map(child_process.answers, hosts))

    @linux
    @pytest.mark.extended
    def test_a_command_that_never_ran_has_not_succeeded(self) -> None:
        """A signal while the emulators start."""
        with started("outbox", "emulators", "--", sys.executable, "-c", "print('ran')") as process:
            eventually(lambda: children(process.pid), seconds=30)
            process.stop()
            assert (process.wait(10), process.stdout) == (130, "")

    @pytest.mark.parametrize("flag", ["--spanner-port", "--pubsub-port"])
    def test_a_taken_port_is_refused(self, flag: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            done = here("emulators", flag, str(port), environment={SPANNER.variable: "", PUBSUB.variable: ""})
        assert (done.code, done.stdout) == (3, "")
        assert re.fullmatch(
            rf"outbox: the \S+ emulator cannot use 127.0.0.1:{port}: Address already in use\n", done.stderr
        )


def test_running_emulators_are_reported(emulators: Emulators, tmp_path: Path) -> None:
    """With both variables set there is nothing to start: the command says so, prints them, and ends. It stops none."""
    done = here("emulators", environment=emulators.environment())
    assert done.code == 0
    assert f"export SPANNER_EMULATOR_HOST={emulators.spanner_host}\n" in done.stdout
    assert "nothing to start" in done.stderr
    with started("outbox", "emulators", "--env-file", str(tmp_path / "env"), environment=emulators.environment()) as it:
        it.wait_for_text("Running. Press Ctrl-C to stop\n")  # and not: which deletes all their data


@pytest.mark.parametrize(
    ("code", "ends"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 15)", 143)]
)
def test_a_command_gets_the_variables_and_its_exit_code_is_ours(
    emulators: Emulators, tmp_path: Path, code: str, ends: int
) -> None:
    """Words after -- belong to the command, and stdout is its own. The file for other terminals has the same lines."""
    project, file = f"c-{uuid.uuid4().hex[:8]}", tmp_path / "shop.env"
    show = "import os, sys; print(sys.argv[1:], os.environ['SPANNER_EMULATOR_HOST'], os.environ['OUTBOX_PROJECT'])"
    copy = f"import shutil; shutil.copy({str(file)!r}, {str(tmp_path / 'copy')!r})"
    words = ("--create", f"{project}/main/shop", "--env-file", str(file), "--")
    program = f"{show}; {copy}; sys.stdout.flush(); {code}"
    child = (sys.executable, "-c", program, "--", "--topic")
    done = run("outbox", "emulators", *words, *child, environment=emulators.environment())
    assert (done.code, done.stdout) == (ends, f"['--', '--topic'] {emulators.spanner_host} {project}\n")
    assert not file.exists()
    sourced = ["/bin/sh", "-c", f". {tmp_path / 'copy'}; echo $OUTBOX_DATABASE $PUBSUB_EMULATOR_HOST"]
    assert subprocess.check_output(sourced, text=True) == f"shop {emulators.pubsub_host}\n"


@pytest.mark.extended  # the quick start of the README ends with SIGTERM, too
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_gets_the_signal_and_ends_before_the_worker(
    emulators: Emulators, tmp_path: Path, number: signal.Signals
) -> None:
    """It can finish its work, and the worker is still there. Nothing stays."""
    name = f"w-{uuid.uuid4().hex[:8]}/main/shop"
    finish = "lambda *_: (print('finished', flush=True), sys.exit(5))"
    handle = f"import signal, sys; signal.signal({int(number)}, {finish})"
    program = f"{handle}; print('handles it', flush=True); signal.pause()"
    words = ("--create", name, "--topic", "orders", "--worker", "--", sys.executable, "-c", program)
    variables = emulators.environment() | {"OUTBOX_HEARTBEAT_FILE": str(tmp_path / "heartbeat")}
    with started("outbox", "emulators", *words, environment=variables) as process:
        process.wait_for_text("handles it", seconds=60)
        process.wait_for_text(f"relaying {name}", seconds=60)
        family = children(process.pid)
        process.stop(number)
        assert process.wait() == 5
        assert process.stdout.endswith("finished\n")
        assert "stopped" in process.stderr
        assert all(map(gone, family))


@pytest.mark.extended
def test_a_worker_that_ends_ends_the_command(emulators: Emulators) -> None:
    variables = emulators.environment() | {"OUTBOX_BATCH_SIZE": "none"}
    create = ("--create", f"e-{uuid.uuid4().hex[:8]}/main/shop", "--worker")
    child = (sys.executable, "-c", "import signal; signal.pause()")
    done = run("outbox", "emulators", *create, "--", *child, environment=variables)
    assert (done.code, "outbox: the worker ended with exit code 2" in done.stderr) == (1, True), done


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--", "no-such-program"), "command not found: 'no-such-program'"),
        (("--worker",), "--worker need --create"),
        (("--create", "project/main/shop", "--empty", "--worker"), "--worker needs the outbox's tables"),
        (("--env-file", "shop.env"), "was not written by this command. Choose another name"),
        (("--env-file", "no/folder/shop.env"), "cannot be written: No such file"),
        (("--env-file", "running.env"), f"that runs as process {os.getppid()}. Stop it, or choose another name"),
    ],
)
def test_what_is_wrong_with_a_command_is_said(
    emulators: Emulators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sentence: str
) -> None:
    """And the user's own file stays, and that of another `outbox emulators`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "running.env").write_text(WRITTEN.format(os.getppid()))
    (tmp_path / "shop.env").write_text("SECRET=1")
    done = here("emulators", *words, environment=emulators.environment())
    assert (done.code, sentence in done.stderr, TRACE in done.stderr) == (2, True, False), done
    assert (tmp_path / "shop.env").read_text() == "SECRET=1"
    assert (tmp_path / "running.env").exists()


def test_what_an_application_needs_is_created(emulators: Emulators, pubsub: PubSub, tmp_path: Path) -> None:
    """Database with both schemas, topics, and subscriptions to the topic before each; a second call changes nothing.

    The DDL file may contain tables of the outbox, as in a user's own migrations. What it leaves out is added.
    """
    project, ddl = f"create-{uuid.uuid4().hex[:8]}", tmp_path / "shop.sql"
    own = "CREATE TABLE A (K INT64, B STRING(9) DEFAULT (';')) PRIMARY KEY (K)", "CREATE INDEX C ON A (K)"
    ddl.write_text(";\n".join([*own, *statements()[:3]]))
    words = ("--topic", "orders", "--subscription", "billing", "--subscription", "stock", "--topic", "mails")
    create = ("emulators", "--create", f"{project}/main/shop", "--ddl-file", str(ddl), *words)
    for _ in range(2):
        done = here(*create, environment=emulators.environment())
        assert done.code == 0, done
    assert f"export OUTBOX_PROJECT={project}\nexport OUTBOX_INSTANCE=main\nexport OUTBOX_DATABASE=shop\n" in done.stdout
    assert "topic orders, subscription billing, subscription stock, topic mails: ready" in done.stderr
    assert f"database {project}/main/shop exists, so {ddl} was not executed" in done.stderr
    database = instance(emulators.spanner_host, "main", project).database("shop")
    assert {"A", "AsynchronousTasks", "AsynchronousTaskWorkers"} <= {table.table_id for table in database.list_tables()}
    found = pubsub.subscriber.list_subscriptions(project=f"projects/{project}")
    assert sorted((each.name.rpartition("/")[2], each.topic, each.enable_message_ordering) for each in found) == [
        (name, f"projects/{project}/topics/orders", True) for name in ("billing", "stock")
    ]
    topics = pubsub.publisher.list_topics(project=f"projects/{project}")
    assert {each.name.rpartition("/")[2] for each in topics} == {"orders", "mails"}


def test_a_database_for_migrations_is_empty(emulators: Emulators) -> None:
    project = f"m-{uuid.uuid4().hex[:8]}"
    done = here("emulators", "--create", f"{project}/main/shop", "--empty", environment=emulators.environment())
    assert (done.code, f"{project}/main/shop without the outbox's tables: ready" in done.stderr) == (0, True), done
    assert list(instance(emulators.spanner_host, "main", project).database("shop").list_tables()) == []


def test_a_proxy_is_not_used_for_emulators(emulators: Emulators, database: Database, topic: str):
    """A proxy that does not answer stops no command, and no client that has the printed variables."""
    register(database, topic, 1)
    with silent_port() as proxy:
        names = dict.fromkeys(("grpc_proxy", "https_proxy", "http_proxy", "HTTP_PROXY"), f"http://{proxy}")
        environment = emulators.environment() | variables(database.database_id) | names
        create = ("emulators", "--create", f"p-{uuid.uuid4().hex[:8]}/main/shop", "--topic", "orders")
        commands = [("outbox", *create), ("outbox", "status"), ("publishworker", "check"), ("publishworker", "drain")]
        done = [run(*words, environment=environment) for words in commands]
    assert [each.code for each in done] == [0, 0, 0, 0], done
    assert "export no_grpc_proxy=127.0.0.1\n" in done[0].stdout
