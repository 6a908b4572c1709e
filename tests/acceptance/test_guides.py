"""The tutorial, the guides to drivers and to tests, and the site, as written: files and commands in an empty folder."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from outbox.table import ddl, schema
from tests.support.processes import ROOT, run, started
from tests.support.spanner import ADMIN_SECONDS, client, instance, query
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
    [begin] = re.findall("^outbox: (.+?, or set ).+$", error)
    assert f"`{begin}...`" in PAGE


@pytest.mark.extended
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("installed")
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
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


@pytest.fixture
def empty_shop(emulators: Emulators) -> Iterator[Database]:
    main = instance(emulators.spanner_host, "main", "my-project")
    database = main.database("shop")
    database.create().result(timeout=ADMIN_SECONDS)
    yield database
    database.drop()
    main.delete()


def run_line(line: str, directory: Path, environment: dict[str, str]) -> None:
    """Run a line after a prompt; `export` sets variables for the later ones."""
    command, *words = shlex.split(line)
    if command == "export":
        environment |= dict(word.split("=", 1) for word in words)
        return
    assert command == "python"
    done = subprocess.run(
        [sys.executable, *words], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_the_migrations_in_the_fixture(folder: Path, environment: dict[str, str]) -> None:
    """With the conftest of the page about tests, and an engine for the database that the variables name."""
    page = (ROOT / "docs/guide/testing.md").read_text(encoding="utf-8")
    [conftest] = re.findall(r"^```python\n# conftest.py, with Alembic\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (folder / "conftest.py").write_text(conftest)
    url = '"spanner+spanner:///projects/{OUTBOX_PROJECT}/instances/{OUTBOX_INSTANCE}/databases/{OUTBOX_DATABASE}"'
    orders = (folder / "orders.py").read_text()
    fixed = '"spanner+spanner:///projects/my-project/instances/main/databases/shop"'
    (folder / "orders.py").write_text(orders.replace(fixed, f"{url}.format(**__import__('os').environ)"))
    (folder / "test_orders.py").write_text(
        "from outbox.testing import assert_registered\n\n"
        "def test_an_order(outbox_database):\n    from orders import place_order\n\n    place_order('order-1', 1)\n"
        "    assert_registered(outbox_database, topic='orders')\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\n")
    run_line("python -m pytest -c pytest.ini test_orders.py", folder, environment)


@pytest.mark.xdist_group("spark")
@pytest.mark.extended
@pytest.mark.parametrize(
    ("sections", "orders"),
    [
        (("SQLAlchemy", "DB-API"), "SELECT OrderId, Cents FROM Orders ORDER BY 1"),
        (("Django",), "SELECT order_id, cents FROM shop_order ORDER BY 1"),
    ],
)
def test_the_guide_to_drivers(
    emulators: Emulators, empty_shop: Database, tmp_path: Path, sections: tuple[str, ...], orders: str
) -> None:
    """Each block is the file that its first line names. The migrations create tables that a worker accepts.

    `alembic check` fails if the next `--autogenerate` would drop one of them.
    """
    page = (ROOT / "docs/guide/drivers.md").read_text(encoding="utf-8")
    parts = {part.partition("\n")[0]: part for part in re.split(r"^## ", page, flags=re.MULTILINE)}
    environment = {**os.environ, **emulators.environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    environment["SPANNER_DISABLE_BUILTIN_METRICS"] = "true"
    for section in sections:
        for name, code in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", parts[section], re.MULTILINE | re.DOTALL):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(code)
            if section == "Django":  # which ignores migrations in a namespace package
                ((tmp_path / name).parent / "__init__.py").touch()
        for line in re.findall(r"^\$ (.+)$", parts[section], re.MULTILINE):
            run_line(line, tmp_path, environment)
    written = query(empty_shop, orders)
    tasks = query(empty_shop, "SELECT Topic, Id FROM AsynchronousTasks")
    assert [topic for topic, _ in tasks] == ["orders"] * len(written)
    of_alembic = [["order-1", 1999], ["order-3", 700]]
    assert written == (of_alembic if "DB-API" in sections else [["order-2", 500]])
    assert schema.differences(empty_shop, ddl.statements()) == []
    if "SQLAlchemy" in sections:
        run_the_migrations_in_the_fixture(tmp_path, environment)


def test_the_tests_of_the_page_pass(emulators: Emulators, tmp_path: Path) -> None:
    page = (ROOT / "docs/guide/testing.md").read_text(encoding="utf-8")
    for text in re.findall(r"^```(?:python|sql|ini)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        head = re.match(r"(?:#|--) ([\w.]+)(.*)", text)
        if not head or head[2] == ", with Alembic":  # without a name, it is a unit test
            continue
        with (tmp_path / head[1]).open("a", encoding="utf-8") as file:
            file.write(text)
    words = (str(tmp_path), "-c", str(tmp_path / "pytest.ini"), "-q")
    done = run("pytest", *words, environment=emulators.environment(), seconds=90)
    assert (done.code, "5 passed" in done.stdout) == (0, True), done.stdout


@pytest.mark.extended
def test_the_working_tree_is_built_strictly(tmp_path: Path) -> None:
    """The pages as they are have no warning; with a link to nowhere the build fails and names it."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)

    def build() -> subprocess.CompletedProcess[str]:
        without_npm = {**os.environ, "PATH": ""}  # so that nothing is downloaded
        command = [sys.executable, "docs/site.py"]
        return subprocess.run(command, cwd=tmp_path, env=without_npm, capture_output=True, text=True, check=False)

    done = build()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build/site/tutorial/index.html").exists()
    assert (tmp_path / "build/site/llms.txt").exists()
    with (tmp_path / "docs/tutorial.md").open("a", encoding="utf-8") as page:
        page.write("\n[broken](nowhere.md)\n")
    done = build()
    assert done.returncode != 0
    assert "tutorial.md" in done.stdout + done.stderr
