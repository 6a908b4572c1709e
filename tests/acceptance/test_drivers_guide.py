"""The guide to drivers runs as written: migrations and registrations with Alembic, Django and DB-API."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from outbox.table import ddl, schema
from tests.support.processes import ROOT
from tests.support.spanner import ADMIN_SECONDS, instance, query

#: The database that the page names is also that of other pages, on the same emulator.
pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture
def empty_shop(emulators: Emulators) -> Iterator[Database]:
    main = instance(emulators.spanner_host, "main", "my-project")
    database = main.database("shop")
    database.create().result(timeout=ADMIN_SECONDS)
    yield database
    database.drop()
    main.delete()


def run(line: str, directory: Path, environment: dict[str, str]) -> None:
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
    run("python -m pytest -c pytest.ini test_orders.py", folder, environment)


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
            run(line, tmp_path, environment)
    written = query(empty_shop, orders)
    tasks = query(empty_shop, "SELECT Topic, Id FROM AsynchronousTasks")
    assert [topic for topic, _ in tasks] == ["orders"] * len(written)
    of_alembic = [["order-1", 1999], ["order-3", 700]]
    assert written == (of_alembic if "DB-API" in sections else [["order-2", 500]])
    assert schema.differences(empty_shop, ddl.statements()) == []
    if "SQLAlchemy" in sections:
        run_the_migrations_in_the_fixture(tmp_path, environment)
