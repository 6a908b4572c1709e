"""Topics that do not work, and what they cost the others. Real workers on the emulators.

The emulator runs one transaction at a time in a database, so a batch that waits for Pub/Sub delays the others here, for
as long as `--publish-timeout`. Spanner does not.
"""

from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from publishworker.turn.breakers import LONGEST_OUTAGE_REST
from tests.support.outages import charged, hang, is_sent, lasting, register_beside, seconds_until, told
from tests.support.pubsub_server import accept, pubsub_server, refuse
from tests.support.relays import register, unsent, worker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


def test_topics_that_do_not_work_hold_up_no_other(
    emulators: Emulators, database: Database, outage_seconds: float
) -> None:
    """One topic is silent, one fails: their tasks wait, without failed attempts. A third one's are sent in seconds."""
    answers = {"silent": hang, "failing": refuse(grpc.StatusCode.UNAVAILABLE)}

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        return answers.get(request.topic.rpartition("/")[2], accept)(request, context)

    waits: list[float] = []
    options = ("--group-size", "20", "--publish-timeout", "0.5")
    with (
        pubsub_server() as server,
        worker(emulators, database, *options, PUBSUB_EMULATOR_HOST=server.address) as process,
    ):
        server.publish = answer
        bad = {topic: register(database, topic, 60) for topic in answers}
        for topic in bad:
            eventually(lambda about=topic: told(process, "topic_rests", f"{about} rests"), message=f"{topic} rests")

        def send_one() -> None:
            one = register_beside(database, "good", 1)
            waits.append(seconds_until(lambda: is_sent(database, one), 10, "a task of the good topic sent"))

        lasting(outage_seconds / 2, send_one)
        assert len(unsent(database)) == 120
        assert charged(database) == 0
        server.publish = accept
        recovered = seconds_until(lambda: not unsent(database), LONGEST_OUTAGE_REST + 20, "all tasks sent")
        assert charged(database) == 0
        assert [told(process, "topic_back", f"{topic} works") for topic in bad] == [1, 1]
    print(
        f"{len(waits)} good tasks sent after {max(waits):.1f} s at most; all the others {recovered:.1f} s after the end"
    )
