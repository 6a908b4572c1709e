"""Another service inserts rows by SQL, with the columns of the article only.

Promised: nothing lost, they are sent as all others, with their ids, and nothing twice.
"""

import base64
import uuid
from typing import Any

from google.cloud.spanner_v1.param_types import BYTES, STRING

from outbox.message import RawPubsubMessage
from tests.support.trial import Trial

INSERT = """
INSERT INTO AsynchronousTasks (Id, Topic, Data, Priority, CreatedAt)
VALUES (@id, @topic, @data, 50, PENDING_COMMIT_TIMESTAMP())"""


def test_rows_of_another_service(trial: Trial, long: bool) -> None:
    """Beside those of `outbox.register`, under load."""
    message = RawPubsubMessage(data=b"another", attributes={"kind": "paid"})
    types = {"id": STRING, "topic": STRING, "data": BYTES}

    def insert(transaction: Any, id: str) -> None:
        values = {"id": id, "topic": trial.topic, "data": base64.b64encode(message.SerializeToString())}
        transaction.execute_update(INSERT, values, types)

    with trial.workers(2):
        with trial.load():
            for _ in range(200 if long else 20):
                id = str(uuid.UUID(int=trial.random.getrandbits(128)))
                trial.database.run_in_transaction(insert, id, default_retry_delay=0.02)
                trial.ledger.committed.add(id)
        trial.settle()
    assert trial.audit(duplicates=0).kept()
