"""The tutorial as written: its files and commands in an empty folder, each program a process of its own."""

import json
import os
import re
import shlex
import sys
import urllib.request
from pathlib import Path

import pytest

from outbox.devtools.emulators import PUBSUB, SPANNER, check_installed
from outbox.errors import NotReached
from tests.support.processes import ROOT, run, started
from tests.support.spanner import client, query
from tests.support.waiting import eventually

PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ (.+)$", PAGE.replace("\\\n", ""), re.MULTILINE)]


def command(*begin: str) -> list[str]:
    """Return the command of the page that begins with these words."""
    [found] = [words for words in COMMANDS if words[: len(begin)] == list(begin)]
    return found


def test_the_page_has_the_error_of_a_terminal_without_variables() -> None:
    """The first words of what the command prints; the page says what to do then."""
    error = run("outbox", "status").stderr
    assert f"`{re.findall('outbox: (.+?) [(]', error)[0]}`" in PAGE


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    try:
        check_installed(SPANNER, PUBSUB)
    except NotReached as error:  # emulators that a variable names are not enough
        pytest.skip(str(error))
    for text in re.findall(r"^```(?:python|sql|ini)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / re.findall(r"\A(?:#|--) (\S+)\n", text)[0]).write_text(text)
    environment = {"PYTHONPATH": str(ROOT), "SPANNER_DISABLE_BUILTIN_METRICS": "true"}
    environment |= {"OUTBOX_HEARTBEAT_FILE": str(tmp_path / "heartbeat")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # as in the activated environment
    with started(*command("outbox", "emulators"), environment=environment, directory=tmp_path) as emulators:
        emulators.wait_for_text("Uvicorn running", seconds=90)
        exports = (tmp_path / "shop.env").read_text()
        environment |= dict(re.findall(r"^export (\w+)=(.+)$", exports, re.MULTILINE))
        shop = client(environment["SPANNER_EMULATOR_HOST"], "my-project").instance("main").database("shop")
        [*_, url] = command("curl")
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
            order = json.loads(answer.read())
        status = run(*command("outbox", "status"), environment=environment)
        assert re.search(r"^all +1 ", status.stdout, re.MULTILINE), status.stdout
        [[task_id]] = query(shop, "SELECT Id FROM AsynchronousTasks")
        with (
            started(*command("publishworker", "run"), environment=environment) as worker,
            started(command("python", "billing.py")[1].removesuffix(".py"), environment=environment, directory=tmp_path)
            as billing,
        ):  # fmt: skip
            billing.wait_for_text(f"order {order['order_id']}: invoice written")
            eventually(lambda: task_id in run(*command("outbox", "list"), environment=environment).stdout, seconds=20)
            again = [task_id if word == "THE-ID" else word for word in command("outbox", "retry")]
            assert run(*again, environment=environment).code == 0
            eventually(lambda: query(shop, "SELECT TimesSent FROM AsynchronousTasks") == [[2]], seconds=20)
            worker.end()
            billing.end()
        assert query(shop, "SELECT OrderId, Cents FROM Invoices") == [[order["order_id"], 1999]]
        _, *pytest_words = command("python", "-m", "pytest")
        with started(*pytest_words[1:], "-q", environment=environment, directory=tmp_path) as testing:
            assert testing.wait() == 0, testing.stdout
            testing.wait_for_text("1 passed")
        emulators.stop()
        assert emulators.wait() in (0, 143)  # uvicorn raises its signal again when it has shut down
        emulators.wait_for_text("Finished server process")
