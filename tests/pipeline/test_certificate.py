"""Certificates from end to end: issued by the audit, and verified offline."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from outbox.base.values import shown
from outbox.rows.task_table import TaskTable
from outbox.table import schema
from outbox.table.states import MARKS_FINAL_AFTER, NEVER
from outbox_admin.changes import execution
from outbox_admin.tasks.selections import TaskSelection
from outbox_pipeline import cli
from outbox_pipeline.jobs.archive_windows import commit_name
from outbox_pipeline.spark.files import Folder
from publishworker.telemetry import clients
from tests.support.certificates import Place, data, new_key, payload
from tests.support.operations import changed, opened, row
from tests.support.pipeline import Case, Files, received, remove, write_lines
from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(600)
PAGE = (ROOT / "docs/pipeline/certificate.md").read_text(encoding="utf-8")
PREVIOUS = "certificate-%Y-%m-%d.json"
#: The certified days, and the day after, whose archive has the last tasks of the second one.
DAYS = [datetime(2026, 10, 20 + n, tzinfo=UTC) for n in range(4)]
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)


def prepare(case: Case, place: Place) -> None:
    """Insert tasks of two days, the last task sent after midnight, archive them, and write what was received."""
    tasks, messages = [], list[list[dict[str, Any]]]()
    for day in DAYS[:2]:
        ids = [f"{day:%d}-{n}" for n in range(5)]
        times = [day + n * HOUR for n in range(4)] + [day + timedelta(days=1) - SECOND]
        tasks += [
            row(id, Topic="orders" if n % 2 else "bills", Data=data(b"paid", kind="order", amount=str(n)),
                CreatedAt=at, SentAt=at + 5 * SECOND)
            for n, (id, at) in enumerate(zip(ids, times, strict=True))
        ]  # fmt: skip
        messages.append(
            [received(id, at + SECOND, b"paid", kind="order", amount=str(n), googclient="x")
             for n, (id, at) in enumerate(zip(ids, times, strict=True))]
        )  # fmt: skip
    case.insert(tasks)
    for day, of_day in zip(DAYS, messages, strict=False):
        folder = place.path("received") / f"{day:%Y-%m-%d}"
        folder.mkdir(parents=True)
        write_lines(folder / "1.jsonl", of_day[:3])
        write_lines(folder / "2.jsonl", of_day[3:])
    case.archive(to=place.path("archive"), since=DAYS[0], until=DAYS[3], late=True)
    for window in Files(place.path("archive")).windows():  # as if they had been read in time
        window.edit(read_timestamp=shown(datetime.fromisoformat(window["until"]) + MARKS_FINAL_AFTER))
    new_key(place.folder)


def certify(case: Case, place: Place, day: datetime, output: str, *words: str, **more: Any) -> int:
    """Audit a day and certify it. Return the exit code."""
    flags = {
        "since": day,
        "until": day + timedelta(days=1),
        "archive": str(place.path("archive")),
        "received": str(place.path("received/%Y-%m-%d/*.jsonl")),
        "output": str(case.folder / output),
        "certificate": str(place.path("certificate-%Y-%m-%d.json")),
        "key_file": str(place.path("key.pem")),
        **more,
    }
    return case.job("audit", *words, **flags)


@pytest.fixture
def place(case: Case, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(schema, "retention", lambda *_, **__: None)  # the days are long ago
    (case.folder / "evidence").mkdir()
    made = Place(case.folder / "evidence")
    prepare(case, made)
    return made


def test_days_are_certified_and_verified_offline(
    case: Case, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    client = mock.Mock()
    monkeypatch.setattr(clients, "_datadog", lambda: client)
    first, second = (place.path(f"certificate-{day:%Y-%m-%d}.json") for day in DAYS[:2])
    assert certify(case, place, DAYS[0], "one") == 0
    assert capsys.readouterr().out.startswith("COMPLETE: 5 tasks delivered\n")
    assert first.read_text().startswith('{"summary": "COMPLETE: 5 tasks delivered",\n')
    assert certify(case, place, DAYS[1], "two", previous=str(place.path(PREVIOUS))) == 0
    runs = [call.kwargs["tags"] for call in client.increment.call_args_list if "run_count" in call.args[0]]
    assert runs == [["job:audit", "result:done"], ["job:certificate", "result:done"]] * 2
    predicate = payload(second)["predicate"]
    assert predicate["counts"]["registered"] == 5
    assert {topic: counts["delivered"] for topic, counts in predicate["topics"].items()} == {"bills": 3, "orders": 2}

    capsys.readouterr()
    code = cli.main(place.verify(*place.inputs()))
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    assert "Verified 2 certificates. The first one begins the chain" in printed.out
    can_be_checked_by_hand(place, first)
    a_window_must_follow_the_one_before(case, place, first, capsys)
    has_the_same_digest_again(case, place, second, capsys)


def can_be_checked_by_hand(place: Place, certificate: Path) -> None:
    """Execute the page's commands with openssl and sha256sum, also on what was changed."""
    [by_hand] = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    script = by_hand.replace("certificate-2026-11-20.json", str(certificate))
    done = subprocess.run(["bash", "-ec", script], cwd=place.folder, capture_output=True, text=True, check=True)
    following = payload(place.path("certificate-2026-10-21.json"))["predicate"]["previous"]
    signed, summary, _, until, before, digest = done.stdout.splitlines()
    assert (signed, summary) == ("Signature Verified Successfully", "COMPLETE: 5 tasks delivered")
    assert (until, before, digest) == (shown(DAYS[1]), "null", f"{following}  payload.json")
    changed = script.replace("cat payload.json", "tr 5 6 < payload.json")
    assert subprocess.run(["bash", "-ec", changed], cwd=place.folder, capture_output=True, check=False).returncode == 1


def a_window_must_follow_the_one_before(case: Case, place: Place, first: Path, capsys: Any) -> None:
    capsys.readouterr()
    for since, sentence in ((DAYS[1] + HOUR, "a gap between"), (DAYS[1] - HOUR, "an overlap between")):
        assert certify(case, place, DAYS[1], "none", since=since, previous=str(first)) == 1
        assert sentence in capsys.readouterr().err
    damaged = place.folder.parent / "damaged.json"
    damaged.write_text("{}")
    assert certify(case, place, DAYS[1], "none", previous=str(damaged)) == 1
    assert "is not a certificate" in capsys.readouterr().err


def has_the_same_digest_again(case: Case, place: Place, second: Path, capsys: Any) -> None:
    """Although tasks were retried and deleted since. With another setting, it is another certificate."""
    before = second.read_bytes()
    with case.database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), [("21-0", DAYS[3]), ("21-1", None)])
    case.database.execute_partitioned_dml("DELETE FROM AsynchronousTasks WHERE Id = '21-2'")
    previous = {"previous": str(place.path(PREVIOUS))}
    assert certify(case, place, DAYS[1], "three", **previous) == 0
    assert second.read_bytes() == before
    capsys.readouterr()
    assert certify(case, place, DAYS[1], "four", grace="11m", **previous) == 1
    assert "exists, and is another certificate" in capsys.readouterr().err


def test_a_file_without_a_folder_is_in_the_working_directory(spark: SparkSession):
    assert Folder(spark, "certificate.json").qualified() == f"file:{Path.cwd()}/certificate.json"


@pytest.mark.extended
def test_a_verifier_imports_neither_spark_nor_spanner(tmp_path: Path):
    (tmp_path / "key.pub").write_text("")
    program = (
        "import sys; from outbox_pipeline import cli; "
        "from outbox_pipeline.certificate import document; "
        f"cli.main(['certificate', 'verify', 'none', '--public-key', {str(tmp_path / 'key.pub')!r}]); "
        "print(sorted({'pyspark', 'google.cloud.spanner_v1', 'google.cloud.kms', 'pyarrow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def _cut(place: Place) -> None:
    file = place.path("received/2026-10-20/2.jsonl")
    file.write_text(file.read_text()[:-40])


def _swap(place: Place) -> None:
    """Replace a file of the archive by one with as many other tasks."""
    file = min(place.path("archive").glob("window=20261020*/run*/*/*.parquet"))
    tasks = pyarrow.parquet.ParquetFile(file).read()
    field = tasks.schema.get_field_index("Id")
    others = pyarrow.array([f"{each}-other" for each in tasks.column(field).to_pylist()])
    remove(file)
    pyarrow.parquet.write_table(tasks.set_column(field, tasks.schema.field(field), others), file)


def _commit(version: int) -> Callable[[Place], None]:
    return lambda place: remove(place.path("archive") / commit_name(version))


NOTHING: Callable[[Place], object] = lambda _: None  # noqa: E731 - one of the changes
REFUSED: dict[str, tuple[Callable[[Place], object], dict[str, str], str]] = {
    "a window of the archive has no commit": (_commit(2), {}, "is missing|cannot be read"),
    "the last window has no commit": (_commit(3), {"since": "2026-10-21", "until": "2026-10-22"}, "is open"),
    "a window of the archive has other tasks": (_swap, {}, "are not those that were archived"),
    "the archive begins later": (NOTHING, {"since": "2026-10-19"}, "The archive begins at 2026-10-20"),
    "the window is open": (NOTHING, {"since": "2026-10-22", "until": "2026-10-23"}, "is open: the archive must reach"),
    "a received file ends early": (_cut, {}, "has 1 unreadable line, as a file that ends early"),
    "there is no key": (NOTHING, {"key_file": ""}, "needs --archive, --received, and either --key-file or --kms-key"),
    "the one before is missing": (NOTHING, {"previous": "none.json"}, "--previous none.json does not exist"),
}


def says_losses_in_its_first_line(case: Case, place: Place, capsys: Any) -> None:
    file = place.path("received/2026-10-20/1.jsonl")
    _, one, two = map(json.loads, file.read_text().splitlines())
    other = received("20-2", DAYS[0] + 2 * HOUR + SECOND, b"paid twice", kind="order", amount="2")
    assert two["message_id"] == other["message_id"]
    write_lines(file, [one, other])
    unsent = {"CreatedAt": DAYS[0] + HOUR, "Data": data(b"paid")}
    case.insert([row("waits", **unsent), row("dead", AvailableAt=NEVER, LastError="too large", **unsent)])
    assert certify(case, place, DAYS[0], "one") == 1
    line = "INCOMPLETE: 1 lost and 1 received with other content and 1 pending and 1 dead of 7 tasks"
    assert capsys.readouterr().out.startswith(f"{line}\n")
    [certificate] = place.files
    assert certificate.read_text().startswith(f'{{"summary": "{line}",\n')
    listed = {each["task_id"]: each["outcome"] for each in payload(certificate)["predicate"]["not_delivered"]}
    assert listed == {"20-0": "lost", "20-2": "mismatched", "waits": "pending", "dead": "dead"}
    assert cli.main(place.verify(*place.inputs()[:2])) == 0
    assert f": {line}\n" in capsys.readouterr().out


def test_losses_are_certified_and_incomplete_inputs_are_not(case: Case, place: Place, capsys: Any):
    for number, (name, (change, flags, sentence)) in enumerate(REFUSED.items()):
        (case.folder / str(number)).mkdir()
        copy = place.copy(case.folder / str(number))
        change(copy)
        given = {key: f"{text}T00:00:00Z" if key in {"since", "until"} else text for key, text in flags.items()}
        code = certify(case, copy, DAYS[0], f"out-{number}", **given)
        error = capsys.readouterr().err
        assert code in {1, 2}, name
        assert re.search(sentence, error), (name, error)
        assert copy.files == [], name
        assert not (case.folder / f"out-{number}").exists(), "it cannot be certified with this --output"
    says_losses_in_its_first_line(case, place, capsys)
    case.insert([row("late", Data=data(b"paid"), CreatedAt=DAYS[0] + HOUR, SentAt=DAYS[0] + 2 * HOUR)])
    assert certify(case, place, DAYS[0], "lacks") == 1
    assert "archive lacks 1 task of the window, sent or cancelled before" in capsys.readouterr().err


def test_a_day_whose_tasks_were_purged_before_the_archive_read_them_is_not_complete(
    case: Case, capsys: pytest.CaptureFixture[str]
):
    """Three of ten tasks are lost. Without the record of the purge, the other seven would be all that is known.

    All tasks of the next day are lost.
    """
    place = Place(case.folder)
    new_key(place.folder)
    tasks = [row(f"{n}", Data=data(b"paid"), CreatedAt=DAYS[0] + HOUR, SentAt=DAYS[0] + HOUR) for n in range(10)]
    case.insert(tasks)
    (place.path("received") / f"{DAYS[0]:%Y-%m-%d}").mkdir(parents=True)
    messages = [received(each["Id"], DAYS[0] + HOUR, b"paid") for each in tasks[3:]]
    write_lines(place.path(f"received/{DAYS[0]:%Y-%m-%d}/1.jsonl"), messages)
    table = TaskTable(opened(case.database))
    selection = TaskSelection(state="sent", ids=tuple(each["Id"] for each in tasks[:3]))
    assert len(changed(execution.change(table, "purge", selection))) == 3
    case.archive(to=place.path("archive"), since=DAYS[0], until=DAYS[3], late=True)
    assert certify(case, place, DAYS[0], "one") == 1
    line, *_ = capsys.readouterr().out.splitlines()
    [purge] = case.operations()
    assert line.startswith("UNCERTAIN: 7 tasks delivered. A loss may be hidden: 1 purge may have deleted tasks before")
    assert f"such as operation {purge['OperationId']} at " in line
    assert "; the archive read the tasks sent from 2026-10-20T00:00:00.000000Z" in line
    assert cli.main(place.verify(*place.inputs())) == 0
    capsys.readouterr()
    everything = {"received": str(place.path("received/*/*.jsonl"))}
    assert certify(case, place, DAYS[1], "two", "--allow-empty", **everything) == 1
    assert capsys.readouterr().out.startswith("UNCERTAIN: 0 tasks delivered. A loss may be hidden: 1 purge may have")
