"""Tasks that are marked before they are published: a loss rather than a duplicate, and only in one window."""

import threading
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

import pytest

from outbox.states import NEVER
from publishworker.spanner.store import Decide, StoreError
from publishworker.task import Failed, Group, GroupResult, Outcome, Row, Sent, Taken
from publishworker.telemetry import metrics as m
from tests.support.fakes import Abort, FakePublisher, FakeStore
from tests.support.relay_bench import Bench, times
from tests.support.waiting import eventually

LOST = Failed("deadline_exceeded", "no answer")


class Watching(FakePublisher):
    """Notes what the table says while it publishes."""

    def __init__(self, store: FakeStore, *topics: str) -> None:
        """Look at `store`."""
        super().__init__(*topics)
        self._store = store
        self.marked: dict[str, bool] = {}

    def publish(
        self, topic: str, rows: Sequence[Row], seconds: float, singly: Collection[str] = frozenset()
    ) -> dict[str, Outcome]:
        """Note, and publish."""
        self.marked |= {row.id: self._store.rows[row.id].sent_at is not None for row in rows}
        return super().publish(topic, rows, seconds, singly)


def test_it_is_marked_before_it_is_published_in_a_group_of_its_own(bench: Bench) -> None:
    """The other tasks of the poll are not: they are published under the lock."""
    publisher = Watching(bench.store, "orders")
    bench.relay = bench.another(publisher=publisher)
    bench.insert("once", at_most_once=True)
    bench.insert("other")
    bench.turns()
    assert publisher.marked == {"once": True, "other": False}
    assert sorted(publisher.requests) == [["once"], ["other"]]
    assert bench.unsent() == []
    assert (bench.count(m.PUBLISHED), bench.count(m.IN_DOUBT)) == (2, 0)


def test_what_was_surely_not_marked_is_in_no_doubt(bench: Bench) -> None:
    """The commit of the mark is aborted, and the rows cannot be locked again: they are as they were."""
    bench.insert("once", at_most_once=True)
    commits = iter([None, Abort])

    def go_away() -> None:
        if next(commits) is Abort:
            bench.store.away = True
            raise Abort

    bench.store.before_commit = go_away
    with pytest.raises(StoreError):
        bench.turns()
    assert (bench.store.rows["once"].sent_at, bench.count(m.IN_DOUBT)) == (None, 0)
    bench.store.away, bench.store.before_commit = False, lambda: None
    bench.turns()
    assert (bench.publisher.ids(), bench.count(m.IN_DOUBT)) == (["once"], 0)


def test_a_task_that_waits_for_its_own_group_is_taken_by_no_other(bench: Bench) -> None:
    """What finds it out lands between two turns, and the poll still sees the task."""
    bench.relay = bench.another(groups=4, stragglers=3, patience=0.0)
    flights, claims, hold = bench.relay._flights, list[Sequence[str]](), threading.Event()

    def look_slowly() -> None:
        bench.store.before_commit = lambda: None
        hold.wait(10)

    claim = bench.store.claim

    def noted(ids: Sequence[str], decide: Decide) -> datetime:
        claims.append(ids)
        return claim(ids, decide)

    bench.store.before_commit = look_slowly
    bench.store.claim = noted  # type: ignore[method-assign]  # to see what is claimed
    bench.insert("once", at_most_once=True)
    eventually(lambda: bool(bench.relay.turn() and claims))
    hold.set()
    eventually(lambda: not flights._ended.empty())
    bench.turns()
    bench.relay.finish()
    assert claims == [("once",), ("once",)]
    assert (bench.publisher.ids(), bench.count(m.ALREADY_PUBLISHED)) == (["once"], 0)


def test_a_commit_that_may_have_landed_is_not_followed_by_a_publish(bench: Bench) -> None:
    """Marked or not, it is in doubt and counted; if it was not marked it is sent later, if it was it is lost."""
    for landed, published in ((True, []), (False, ["b"])):
        id = "a" if landed else "b"
        bench.insert(id, at_most_once=True)
        bench.store.failed_commits_land = landed
        commits = iter([None, StoreError("deadline exceeded")])  # of the look at it, and of the mark

        def fail_the_mark(commits: object = commits) -> None:
            if error := next(commits, None):
                raise error

        bench.store.before_commit = fail_the_mark
        bench.turns(), bench.turns()
        assert bench.publisher.ids() == published
        assert bench.unsent() == []
    assert bench.count(m.IN_DOUBT) == 2
    assert bench.count(m.UNCOMMITTED) == 0


def test_an_answer_that_does_not_come_is_not_asked_for_again(bench: Bench) -> None:
    """This is the window: it may have been published, so it stays marked."""
    bench.insert("a", at_most_once=True)
    bench.publisher.failing["a"] = LOST
    bench.turns()
    bench.publisher.failing.clear()
    for _ in range(20):
        bench.wait(10)
        bench.turns()
    assert (bench.publisher.ids(), bench.unsent()) == ([], [])
    assert bench.count(m.IN_DOUBT) == 1


@pytest.mark.parametrize(
    ("failure", "attempts"),
    [
        (Failed("invalid_argument", "no"), 3),
        (Failed("not_found", "no topic"), 2),
        (Failed("credentials", "no token"), 2),
        (Failed("resource_exhausted", "quota"), 2),
        (Failed("unauthenticated", "who"), 2),
    ],
)
def test_what_pubsub_surely_refused_is_unsent_again(bench: Bench, failure: Failed, attempts: int) -> None:
    """A refusal is no loss: the row has what it had before, and is charged as any other task would be."""
    due_at = bench.store.now
    bench.insert("a", at_most_once=True, attempts=2, available_at=due_at, expires_at=NEVER)
    bench.publisher.failing["a"] = failure
    bench.turns()
    row = bench.store.rows["a"]
    assert (row.sent_at, row.attempts, row.expires_at) == (None, attempts, NEVER)
    assert row.available_at == (NEVER if attempts == 3 else due_at)
    assert row.last_error == f"{failure.reason}: {failure.error}"
    assert bench.count(m.IN_DOUBT) == 0
    bench.publisher.failing.clear()
    row.available_at = due_at
    bench.wait(2)
    for _ in range(5):  # a probe spares it a few times, in the hope of another task
        bench.turns()
    assert bench.publisher.ids() == ["a"]


def test_what_there_was_no_time_for_is_unsent_again(bench: Bench) -> None:
    """It was not tried, so nothing is in doubt; the next turn takes it."""
    bench.insert("late", "early", at_most_once=True)
    bench.publisher.out_of_time.add("late")
    bench.relay.turn(), bench.relay.turn(), bench.relay.turn()
    assert bench.publisher.ids() == ["early"]
    assert bench.unsent() == ["late"]
    assert (bench.store.rows["late"].attempts, bench.store.rows["late"].last_error) == (0, None)
    bench.publisher.out_of_time.clear()
    bench.turns()
    assert bench.unsent() == []
    assert bench.count(m.IN_DOUBT) == 0


def test_lost_credentials_lose_no_task(bench: Bench) -> None:
    """A minute without a token: each is sent afterwards, once."""
    bench.insert(*[str(n) for n in range(60)], at_most_once=True)
    bench.publisher.down["projects/test-project/topics/orders"] = Failed("credentials", "no token")
    for _ in range(60):
        bench.turns()
        bench.wait(1)
    assert bench.count(m.IN_DOUBT) == 0
    bench.publisher.down.clear()
    for _ in range(20):
        bench.turns()
        bench.wait(1)
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)


def test_commits_that_are_refused_make_no_busy_loop(bench: Bench) -> None:
    """A group that could not be marked is no reason to poll at once."""
    bench.insert("a", at_most_once=True)
    bench.turns()
    bench.store.rows["a"].sent_at = None
    commits = iter(range(100))

    def refuse_marks() -> None:
        if next(commits) % 2:  # the look is committed, the mark is not
            raise StoreError("no permission to update")

    bench.store.before_commit = refuse_marks
    assert sum(bench.relay.turn().made_progress for _ in range(20)) <= 1


def test_a_refusal_leaves_alone_what_somebody_has_touched_since(bench: Bench) -> None:
    """An operator has set SentAt to NULL, or another worker has sent it again: theirs."""
    bench.insert("a", at_most_once=True)
    bench.publisher.failing["a"] = Failed("not_found", "no topic")
    claim = bench.store.claim
    claims = []

    def claim_and_be_overtaken(*arguments: object) -> object:
        claims.append(arguments)
        if len(claims) == 3:  # the look, the mark, the return
            bench.store.rows["a"].sent_at = bench.store.now + timedelta(seconds=1)
        return claim(*arguments)

    bench.store.claim = claim_and_be_overtaken
    bench.turns()
    assert len(claims) == 3
    assert bench.store.rows["a"].sent_at is not None
    assert bench.store.rows["a"].attempts == 0


def test_what_cannot_be_published_at_all_is_dead_without_a_mark(bench: Bench) -> None:
    """Undecodable or expired: nothing is lost that could have been sent."""
    bench.store.insert("bad", "orders", b"\xff\xff", at_most_once=True)
    bench.insert("late", at_most_once=True, expires_at=bench.store.now)
    bench.insert("good", at_most_once=True)
    bench.turns()
    rows = bench.store.rows
    assert [rows[id].available_at == NEVER for id in ("bad", "late", "good")] == [True, True, False]
    assert rows["bad"].sent_at is rows["late"].sent_at is None
    assert bench.publisher.ids() == ["good"]
    assert bench.count(m.DEAD) == 2
    assert bench.store.claimed["bad"] == 2  # the look and the verdict: it was never marked, so nothing was taken back


def test_an_abort_publishes_nothing_twice(bench: Bench) -> None:
    """Publishing begins when the transaction has ended."""
    bench.insert("a", "b", at_most_once=True)
    bench.store.before_commit = times(5, Abort)
    bench.turns()
    assert sorted(bench.publisher.ids()) == ["a", "b"]
    assert bench.unsent() == []


def test_an_outage_takes_few_of_them(bench: Bench) -> None:
    """The group that met it, and one for each probe; the others wait unmarked."""
    bench.insert(*[str(n) for n in range(60)], at_most_once=True)
    bench.publisher.down["projects/test-project/topics/orders"] = LOST
    for _ in range(30):
        bench.turns()
        bench.wait(1)
    lost = bench.count(m.IN_DOUBT)
    assert lost <= 2 * 10 + 8  # two groups in flight, probes after 1, 2, 4, 8, 10 s
    bench.publisher.down.clear()
    for _ in range(12):
        bench.turns()
        bench.wait(1)
    assert bench.unsent() == []
    assert len(bench.publisher.ids()) == 60 - lost


def test_after_a_stop_nothing_is_marked_any_more(bench: Bench) -> None:
    """It would be marked and perhaps not published."""
    bench.insert("a", at_most_once=True)
    bench.relay.turn()
    stop = iter([False, True])
    bench.relay.turn(lambda: next(stop, True))
    bench.relay.finish()
    assert bench.unsent() == ["a"]


def test_a_refusal_that_cannot_be_written_leaves_the_task_in_doubt(bench: Bench) -> None:
    """It stays marked, and is counted."""
    bench.insert("a", at_most_once=True)
    bench.publisher.failing["a"] = Failed("not_found", "no topic")
    commits = iter([None, None, StoreError("deadline exceeded")])  # the look, the mark, the return

    def fail_the_return() -> None:
        if error := next(commits, None):
            raise error

    bench.store.before_commit = fail_the_return
    bench.turns()
    assert bench.unsent() == []
    assert bench.count(m.IN_DOUBT) == 1


def test_what_another_worker_marked_between_two_runs_is_not_published(bench: Bench) -> None:
    """The second run decides, not the first."""
    bench.insert("theirs", "ours", at_most_once=True)
    runs = []

    def be_overtaken_once() -> None:
        runs.append(1)
        if len(runs) == 2:  # the first is the look
            bench.store.rows["theirs"].sent_at = bench.store.now
            raise Abort

    bench.store.before_commit = be_overtaken_once
    bench.turns()
    assert bench.publisher.ids() == ["ours"]
    assert bench.count(m.IN_DOUBT) == 0


def test_it_is_not_marked_while_its_topic_rests(bench: Bench) -> None:
    """The other tasks of its first group found the topic down: it waits, and is sent when that works again."""
    bench.insert("once", at_most_once=True)
    bench.insert("other")
    bench.publisher.down["projects/test-project/topics/orders"] = LOST
    bench.turns()
    assert sorted(bench.unsent()) == ["once", "other"]
    assert bench.count(m.IN_DOUBT) == 0
    bench.publisher.down.clear()
    for _ in range(4):
        bench.wait(1)
        bench.turns()
    assert bench.unsent() == []


def test_what_was_charged_before_and_after_the_mark_is_counted(bench: Bench) -> None:
    """One has expired, so it was not marked; another was marked, refused, and unsent again: two dead tasks."""
    bench.insert("late", at_most_once=True, expires_at=bench.store.now)
    bench.insert("bad", at_most_once=True)
    bench.publisher.failing["bad"] = Failed("invalid_argument", "no")
    bench.turns()
    assert [row.available_at for row in bench.store.rows.values()] == [NEVER, NEVER]
    assert bench.count(m.DEAD) == 2


def test_a_result_has_the_group_of_those_that_wait_for_one() -> None:
    """With their keys, if any has one; not behind one of their key that failed, whatever happens to others."""
    once = Taken("at_most_once")

    def waits(outcomes: dict[str, Outcome], *keys: str | None) -> Group | None:
        group = Group("orders", tuple(outcomes), keys=keys, bytes=800)
        return GroupResult(group, tried=outcomes, outcomes=outcomes).at_most_once()

    keyed = {"failed": LOST, "behind": once, "alone": LOST, "once": once, "sent": Sent("1"), "next": once}
    assert waits(keyed | {"gone": Taken("gone")}, "bad", "bad", None, None, "good", "good", "other") == Group(
        "orders", ("once", "next"), at_most_once=True, keys=(None, "good"), bytes=800
    )
    # A group has keys if one of its tasks has.
    for keys in ((), ("key", None, None)):
        got = waits({"sent": Sent("1"), "once": once, "other": once}, *keys)
        assert got == Group("orders", ("once", "other"), at_most_once=True, bytes=800)
    assert waits({"a": Sent("1"), "gone": Taken("gone")}) is None
