"""`publishworker verify` on the emulator: what it prints and leaves behind, also if something goes wrong."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import PermissionDenied
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

from outbox.devtools.emulators import Emulators
from outbox.table.connection import open_database
from publishworker.process import cli, verify
from publishworker.process.verify import CHECKS
from tests.support.spanner import INSTANCE, PROJECT, place, query

#: Each process of the test run has one, because all share the emulators.
NAME = f"verify-{os.getpid()}"
FLAGS = ("verify", "--project", PROJECT, "--instance", INSTANCE, "--database", NAME, "--rows", "100")


@pytest.fixture(autouse=True)
def small(emulators: Emulators, spanner_instance: Instance, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tasks and short waits; afterwards no database and no topic is left, whatever a test did."""
    for name, value in emulators.environment().items():
        monkeypatch.setenv(name, value)
    for name, number in {"BATCH_SIZES": (10, 50), "SWEPT_TASKS": 50, "HELD_SECONDS": 0.5}.items():
        monkeypatch.setattr(verify, name, number)
    yield
    spanner_instance.database(NAME).drop()


def test_all_checks_run_and_nothing_is_left(spanner_instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """What the emulator cannot show is not available, and never counts as passed."""
    assert cli.main([*FLAGS, "--yes", "--json"]) == 0
    out, err = capsys.readouterr()
    found = {each["name"]: each for each in json.loads(out)["checks"]}
    assert list(found) == list(CHECKS)
    assert {name: each["verdict"] for name, each in found.items()} == {
        **dict.fromkeys(("schema", "load", "locks", "batch sizes"), "passed"),
        **dict.fromkeys(("roles", "plans", "commit delays"), "not available"),
    }
    assert found["load"]["figures"]["rows"] == 100
    assert [line.split(": ")[1] for line in err.splitlines()] == [
        f"{name} ({number} of {len(CHECKS)})" for number, name in enumerate(CHECKS, 1)
    ]
    assert not spanner_instance.database(NAME).exists()


def test_tasks_are_loaded_although_the_clock_of_this_machine_is_ahead(
    own_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = mock.Mock(now=lambda _zone: datetime.now(UTC) + timedelta(minutes=5))
    monkeypatch.setattr(verify, "datetime", clock, raising=False)
    settings: Any = place(own_database.database_id)
    verify.Scratch(settings, open_database(settings), 20).load()
    assert query(own_database, "SELECT COUNTIF(SentAt IS NOT NULL) FROM AsynchronousTasks") == [[18]]


@pytest.mark.extended
def test_a_failed_check_is_named_and_the_others_run(
    spanner_instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_scratch: object) -> Any:
        raise PermissionDenied("no spanner.databases.updateDdl")

    monkeypatch.setitem(CHECKS, "roles", missing)
    assert cli.main([*FLAGS, "--yes"]) == 1
    out = capsys.readouterr().out
    assert "failed PermissionDenied: 403 no spanner.databases.updateDdl" in " ".join(out.split())
    assert "1 failed" in out.splitlines()[-1]
    assert not spanner_instance.database(NAME).exists()


def test_a_database_that_exists_is_not_touched(spanner_instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    spanner_instance.database(NAME).create().result(30)
    assert cli.main([*FLAGS, "--yes"]) == 1
    assert capsys.readouterr().err == (
        f"publishworker: database {NAME} exists. `verify` creates a new one: omit --database\n"
    )
    assert spanner_instance.database(NAME).exists()


def test_ctrl_c_leaves_nothing(spanner_instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_scratch: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(CHECKS, "roles", interrupted)
    assert cli.main([*FLAGS, "--yes"]) == 130
    assert not spanner_instance.database(NAME).exists()


def test_it_asks_before_it_creates_anything(spanner_instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FLAGS]) == 2
    err = capsys.readouterr().err
    assert f"This creates database {NAME} in instance {INSTANCE}" in err
    assert "Not a terminal. Pass --yes to confirm" in err
    assert not spanner_instance.database(NAME).exists()
    assert cli.main([*FLAGS, "--yes", "--rows", "7"]) == 2
    assert "--rows: '7' is not allowed" in capsys.readouterr().err
