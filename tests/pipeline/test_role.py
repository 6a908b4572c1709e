"""The jobs' requests to Spanner stay within the role `outbox_pipeline` of schema/roles.sql. No Spark is needed."""

from dataclasses import replace
from datetime import UTC, datetime
from unittest import mock

from google.cloud.spanner_v1 import RequestOptions
from google.cloud.spanner_v1.database import Database

from outbox.admin import operations
from outbox.program.settings import DatabaseSettings
from outbox.table.states import NEVER
from outbox_pipeline.jobs.archive.job import purge_chunk
from outbox_pipeline.jobs.audit import effects
from outbox_pipeline.jobs.register.executor import Writer
from outbox_pipeline.jobs.replay.job import ARCHIVED_COLUMNS, replay_chunk
from outbox_pipeline.source.datasource import OutboxDataSource
from outbox_pipeline.source.parts import KeyPart, cancelled
from outbox_pipeline.spanner import open_table
from tests.support import pipeline
from tests.support.operations import insert, insert_cancelled, row, rows_of
from tests.support.roles import Heard, grants, refused

SENT = datetime(2026, 6, 1, tzinfo=UTC)


def test_the_jobs_stay_within_their_role(target: DatabaseSettings, database: Database):
    insert(database, [row("sent", SentAt=SENT), *(row(f"unsent{number}") for number in range(9))])
    settings = replace(target, database_role="outbox_pipeline")
    table = open_table(settings)
    heard = Heard(table.database)
    assert table.first_ended() == SENT
    insert_cancelled(database, [row("cancelled")], SENT)
    [found] = cancelled(table, ("Id", "Data"), SENT, NEVER, table.now())
    assert found["Id"].to_pylist() == ["cancelled"]
    table.retention()
    for more in ({}, {"state": "sent", "since": "3650d"}):
        source = OutboxDataSource(pipeline.options(target, databaseRole="outbox_pipeline", **more))
        reader = source.reader(source.schema())
        assert sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)) in (1, 10)
    writer = Writer(table, table.now(), lambda *_: None)
    for id in ("new", "sent"):
        writer.add(pipeline.row(task_id=id))
    writer.flush()
    purging = operations.begin(table, "purge", {}, Tasks=0)
    assert purge_chunk(table, {"sent": SENT}, purging.id)["deleted"] == 1
    insert(database, [row("replayed", SentAt=SENT)])
    begun = operations.begin(table, "replay", {})
    names = ARCHIVED_COLUMNS
    back = {**row("back", Topic="orders"), "Data": b"", "TimesSent": 1}
    archived = {name: back[name] for name in names}
    done = replay_chunk(table, [{"Id": "replayed"}, archived], begun.started_at)
    assert (done["replayed"], done["registered"]) == (1, 1)
    operations.end(table, begun.id, Tasks=2)
    snapshot = mock.MagicMock()
    with mock.patch.object(effects, "open_database", return_value=mock.MagicMock(snapshot=lambda: snapshot)):
        assert list(effects.inbox_rows(settings, "billing", KeyPart("", ""), limit=1)) == []
    [read] = snapshot.__enter__().read.call_args_list
    assert read.kwargs["request_options"]["priority"] == RequestOptions.Priority.PRIORITY_LOW
    assert {"TaskId", "ProcessedAt"} <= grants("outbox_pipeline")["SELECT", "ProcessedTasks"]
    assert rows_of(database).keys() == {"new", "replayed", "back", *(f"unsent{number}" for number in range(9))}
    allowed, of_relays = grants("outbox_pipeline"), grants("publishworker")
    assert list(refused(allowed, heard.commits)) == []
    assert {("SELECT", name) for name in heard.tables} <= allowed.keys()
    assert heard.roles <= {"outbox_pipeline"}
    for privilege in ("INSERT", "UPDATE"):
        writes = [getattr(each, privilege.lower()) for commit in heard.commits for each in commit.mutations]
        written = {column for write in writes if write.table == "AsynchronousTasks" for column in write.columns}
        # tests/integration/test_roles.py checks the writes of `drain`.
        written |= of_relays.get((privilege, "AsynchronousTasks"), set())
        assert written == allowed[privilege, "AsynchronousTasks"], "a grant that nothing needs"
