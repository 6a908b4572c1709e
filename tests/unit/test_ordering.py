"""The order of a key from the poll to the mark, between fakes: who goes, who waits, and for what."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from random import Random

import pytest

from publishworker import metrics as m
from publishworker.ordering import MAX_FRONT_ROWS
from publishworker.store import StoreError
from publishworker.task import NEVER, Failed, Key, Outcome, Row, Sent, TopicLimit
from tests.support.fakes import Abort, FakePublisher, serialized
from tests.support.relay_bench import Bench, SlowPublisher, overtake, times

UNKNOWN = Failed("data_loss", "no")
REFUSED = Failed("invalid_argument", "no")
TIMEOUT = Failed("deadline_exceeded", "no answer")


@pytest.fixture
def bench() -> Bench:
    """A relay between fakes, two groups of ten."""
    return Bench()


def line(bench: Bench, *ids: str, key: str = "k", topic: str = "orders", **columns: object) -> None:
    """Register tasks of a key in this order, in one transaction."""
    for sequence, id in enumerate(ids, len(bench.store.rows)):
        bench.insert(id, topic=topic, ordering_key=key, sequence=sequence, **columns)


def published(bench: Bench, *ids: str) -> list[str]:
    """Return which of these were published, in their order."""
    return [id for id in bench.publisher.ids() if id in ids]


def waits(bench: Bench, id: str) -> float | None:
    """Return the seconds until a task is due, or None if it is ready."""
    at = bench.store.rows[id].available_at
    return None if at is None else (at - bench.store.now).total_seconds()


def test_a_key_goes_out_in_its_order_in_one_request(bench: Bench) -> None:
    """Not in the order of ids or of priorities, and not one by one."""
    line(bench, "e", "c", "a", "d", "b")
    bench.store.rows["b"].priority = 100
    bench.turns()
    assert bench.publisher.requests == [["e", "c", "a", "d", "b"]]
    assert bench.unsent() == []


def test_a_later_commit_goes_after_an_earlier_one(bench: Bench) -> None:
    """CreatedAt comes before Sequence, which counts inside one transaction only."""
    at = bench.store.now - timedelta(minutes=1)
    bench.insert("later", ordering_key="k", sequence=1, created_at=at + timedelta(microseconds=1))
    bench.insert("earlier", ordering_key="k", sequence=9, created_at=at)
    bench.turns()
    assert bench.publisher.ids() == ["earlier", "later"]


def test_a_key_longer_than_a_group_goes_in_runs(bench: Bench) -> None:
    """Each run after the one before it was marked, and as long as a group may be."""
    ids = [f"{n:02}" for n in Random(7).sample(range(100), 25)]
    line(bench, *ids)
    bench.turns()
    assert bench.publisher.ids() == ids
    assert [len(request) for request in bench.publisher.requests] == [10, 10, 5]


def test_a_run_is_cut_by_bytes(bench: Bench) -> None:
    """As a group is; a task that is too large for any group goes alone."""
    for sequence, size in enumerate((4_000, 5_000, 4_000, 20_000, 10)):
        bench.store.insert(str(sequence), "orders", serialized(bytes(size)), ordering_key="k", sequence=sequence)
    bench.turns()
    assert bench.publisher.requests == [["0", "1"], ["2"], ["3"], ["4"]]


def test_keys_share_a_group_with_each_other_and_with_tasks_without_a_key() -> None:
    """A transaction for each key would be slow; the runs in it stay whole, each in a request of its own."""
    bench = Bench(size=20)
    line(bench, "a1", "a2", key="a")
    line(bench, "b1", "b2", "b3", key="b")
    bench.insert("x", "y")
    bench.turns()
    assert bench.store.claimed.total() == 7
    assert sorted(map(tuple, bench.publisher.requests)) in (
        [("a1", "a2"), ("b1", "b2", "b3"), each] for each in (("x", "y"), ("y", "x"))
    )


def test_the_same_key_in_two_topics_is_two_keys(bench: Bench) -> None:
    """A topic that fails holds back its own half."""
    line(bench, "o1", "o2")
    line(bench, "i1", "i2", topic="invoices")  # the ids differ, the ordering key does not
    bench.publisher.failing = {"o1": UNKNOWN}
    bench.turns()
    assert bench.publisher.ids() == ["i1", "i2"]


@pytest.mark.parametrize("state", ["scheduled", "retrying", "dead"])
def test_a_head_that_is_not_due_holds_back_its_key_and_nothing_else(bench: Bench, state: str) -> None:
    """What stands behind it is put off to its time, at most an hour, and looks neither failed nor dead."""
    at = NEVER if state == "dead" else bench.store.now + timedelta(seconds=90)
    line(bench, "head", "a", "b")
    bench.store.rows["head"].available_at = at
    bench.store.rows["head"].attempts = 0 if state == "scheduled" else 3
    line(bench, "other", key="l")
    bench.insert("x")
    bench.turns()
    assert sorted(bench.publisher.ids()) == ["other", "x"]
    for id in ("a", "b"):
        row = bench.store.rows[id]
        assert waits(bench, id) == pytest.approx(3600 if state == "dead" else 90, abs=1)
        assert (row.attempts, row.last_error) == (0, "parked: waits for the task head of its ordering key")
    assert bench.count(m.PARKED) == 2
    assert bench.relay.turn().polled == 0


def test_a_task_in_the_middle_that_is_not_due_ends_the_run(bench: Bench) -> None:
    """What stands before it goes; what stands behind waits for it, and goes with it."""
    line(bench, "a", "b")
    line(bench, "later", available_at=bench.store.now + timedelta(seconds=60))
    line(bench, "c")
    bench.turns()
    assert bench.publisher.ids() == ["a", "b"]
    bench.wait(60)
    bench.turns()
    assert bench.publisher.requests == [["a", "b"], ["later", "c"]]


def test_a_failing_head_gets_the_failure_and_the_others_its_time(bench: Bench) -> None:
    """One attempt is charged, to the first; then it goes alone, and the others when it has gone."""
    line(bench, "a", "b", "c")
    bench.publisher.failing = {"a": UNKNOWN}
    bench.turns()
    assert bench.publisher.ids() == []
    rows = bench.store.rows
    assert {id: rows[id].attempts for id in "abc"} == {"a": 1, "b": 0, "c": 0}
    assert rows["a"].available_at == rows["b"].available_at == rows["c"].available_at
    assert rows["a"].last_error == "data_loss: no"
    bench.publisher.failing = {}
    bench.wait(2)
    bench.turns()
    assert bench.publisher.requests == [["a", "b", "c"], ["a"], ["b", "c"]]
    assert rows["c"].last_error is None


def test_an_outage_parks_nothing(bench: Bench) -> None:
    """It is nobody's fault: the rows stay as they are, and the whole run goes when it is over."""
    line(bench, "a", "b", "c")
    bench.publisher.down = {"projects/test-project/topics/orders": Failed("unavailable", "no")}
    bench.turns()
    assert {(row.available_at, row.attempts, row.last_error) for row in bench.store.rows.values()} == {(None, 0, None)}
    assert bench.count(m.PARKED) == 0
    bench.publisher.down = {}
    for _ in range(3):
        bench.wait(10)
        bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]


def test_the_probe_of_an_outage_is_the_head_of_a_key(bench: Bench) -> None:
    """Any other task of the key would overtake it."""
    line(bench, "c", "b", "a")
    bench.publisher.down = {"projects/test-project/topics/orders": Failed("unavailable", "no")}
    bench.turns()
    bench.publisher.requests.clear()
    for _ in range(4):
        bench.wait(10)
        bench.turns()
    assert bench.publisher.requests == [["c"]] * 4


def test_a_missing_topic_is_charged_to_the_heads_that_probe_it(bench: Bench) -> None:
    """Not to what stands behind them, which goes in order once the topic is there."""
    line(bench, "a1", "a2", key="a", topic="missing")
    line(bench, "b1", "b2", key="b", topic="missing")
    for _ in range(4):
        bench.turns()
        bench.wait(5)
    rows = bench.store.rows
    assert rows["a1"].attempts >= 1
    assert rows["b1"].attempts >= 1
    assert (rows["a2"].attempts, rows["b2"].attempts) == (0, 0)
    bench.publisher.topics.add("projects/test-project/topics/missing")
    for _ in range(10):
        bench.wait(300)
        bench.turns()
    assert published(bench, "a1", "a2") == ["a1", "a2"]
    assert published(bench, "b1", "b2") == ["b1", "b2"]


def test_a_dead_head_blocks_until_an_operator_acts_then_all_goes_at_once(bench: Bench) -> None:
    """The parked tasks do not wait for their time, also if there are more of them than a run holds."""
    tail = [f"t{n:02}" for n in range(35)]
    line(bench, "head", *tail)
    bench.publisher.failing = {"head": REFUSED}
    bench.turns()
    for _ in range(3):
        bench.wait(3600)
        bench.turns()
    assert bench.publisher.ids() == []
    assert bench.store.rows["head"].available_at == NEVER
    assert {bench.store.rows[id].attempts for id in tail} == {0}
    bench.publisher.failing = {}
    head = bench.store.rows["head"]
    head.available_at, head.attempts = None, 0
    bench.turns()
    assert bench.publisher.ids() == ["head", *tail]


def parked_behind(bench: Bench, tasks: int) -> list[str]:
    """Park so many tasks behind a head that is then retried by hand; return all in their order."""
    ids = ["head", *(f"t{n:02}" for n in range(tasks))]
    line(bench, *ids)
    bench.store.rows["head"].available_at = NEVER
    bench.turns()
    bench.store.rows["head"].available_at = None
    return ids


def test_any_worker_goes_on_with_parked_tasks_whose_head_has_gone(bench: Bench) -> None:
    """The commit that marks a run makes the next parked task ready: whoever polls finds the key by it."""
    ids = parked_behind(bench, 35)
    bench.relay.turn()
    assert bench.publisher.ids() == ids[:10]
    assert [row.id for row in bench.store.rows.values() if row.sent_at is None and row.available_at is None] == ["t09"]
    assert (bench.store.rows["t09"].last_error, bench.store.rows["t09"].attempts) == (None, 0)
    bench.relay = bench.another()
    bench.turns()
    assert bench.publisher.ids() == ids


def test_a_commit_that_fails_delays_what_is_parked_by_a_turn(bench: Bench) -> None:
    """The poll has seen the head as unsent, then it is marked, and the front shows what follows."""
    ids = parked_behind(bench, 25)
    bench.store.before_commit = times(1, lambda: StoreError("no"))
    assert bench.relay.turn().uncommitted == 10
    bench.turns()
    assert bench.publisher.ids() == ids


def test_parked_tasks_that_nobody_wakes_go_when_their_time_comes(bench: Bench) -> None:
    """Or with the next task of their key."""
    first, second = parked_behind(bench, 25)[1:], ["u1", "u2"]
    del bench.store.rows["head"]
    bench.turns()
    assert bench.publisher.ids() == []
    bench.wait(3600)
    bench.turns()
    assert bench.publisher.ids() == first
    line(bench, "head", *second, key="l")
    bench.store.rows["head"].available_at = NEVER
    bench.turns()
    del bench.store.rows["head"]
    line(bench, "u3", key="l")
    bench.turns()
    assert bench.publisher.ids() == [*first, "u1", "u2", "u3"]


def test_nothing_is_woken_behind_a_failure(bench: Bench) -> None:
    """Nor behind an outage: the next task stays parked until its head has gone."""
    ids = parked_behind(bench, 15)
    for failure in (UNKNOWN, TIMEOUT):
        bench.publisher.failing = {"head": failure}
        bench.turns()
        assert waits(bench, ids[-1]) == pytest.approx(3600, abs=10)
        bench.wait(4)
    assert bench.publisher.ids() == []


def test_a_run_that_had_no_time_wakes_its_own_rest(bench: Bench) -> None:
    """Parked tasks of the run that were not tried any more would be seen by nobody."""
    ids = parked_behind(bench, 5)
    bench.store.rows["t02"].attempts = 1  # in a request of its own
    bench.publisher.out_of_time = {"t02"}
    bench.relay.turn()
    assert bench.publisher.ids() == ids[:3]
    assert [waits(bench, id) is None for id in ids[3:]] == [True, False, False]
    bench.publisher.out_of_time = set()
    bench.turns()
    assert bench.publisher.ids() == ids


def test_a_limited_run_wakes_the_task_behind_it(bench: Bench) -> None:
    """The topic's rate lets three go at a time: the fourth must be seen by the next poll."""
    bench.store.limits["orders"] = TopicLimit(rate=0.5, burst=3)
    ids = parked_behind(bench, 9)
    for _ in range(5):
        bench.turns()
        bench.wait(6)
    assert [len(request) for request in bench.publisher.requests[:3]] == [3, 3, 3]
    assert bench.publisher.ids() == ids


def test_parked_tasks_wait_while_their_topic_is_paused(bench: Bench) -> None:
    """And go on when it is resumed."""
    ids = parked_behind(bench, 25)
    bench.relay.turn()
    bench.store.paused.add("orders")
    bench.turns()
    assert bench.publisher.ids() == ids[:10]
    bench.store.paused.clear()
    bench.relay.turn()
    bench.turns()
    assert bench.publisher.ids() == ids


def test_a_dead_head_is_passed_over_if_so_wished() -> None:
    """Those behind it go at once, also if it dies in their midst; tried later it comes late."""
    bench = Bench(pass_dead=True)
    line(bench, "dead", "a", "bad", "b", "worse", "c")
    bench.store.rows["dead"].available_at = NEVER
    bench.publisher.failing = {"bad": REFUSED, "worse": REFUSED}
    bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]
    assert bench.count(m.PARKED) == 0
    assert bench.count(m.DEAD) == 2


def test_a_failing_head_is_not_passed_over_before_it_is_dead() -> None:
    """Its order is kept as long as it may still be sent."""
    bench = Bench(pass_dead=True, retries={"max_attempts": 2})
    line(bench, "a", "b")
    bench.publisher.failing = {"a": UNKNOWN}
    bench.turns()
    assert bench.publisher.ids() == []
    bench.wait(2)
    bench.turns()
    assert bench.store.rows["a"].available_at == NEVER
    bench.wait(2)
    bench.turns()
    assert bench.publisher.ids() == ["b"]


@pytest.mark.parametrize("pass_dead", [False, True])
def test_an_expired_head_never_blocks(pass_dead: bool) -> None:
    """Whether it expired when it was due, while it was retried, or long ago."""
    bench = Bench(pass_dead=pass_dead)
    past = bench.store.now - timedelta(seconds=1)
    line(bench, "dead", available_at=NEVER, expires_at=past, attempts=1)
    line(bench, "retrying", available_at=bench.store.now + timedelta(hours=1), expires_at=past, attempts=1)
    line(bench, "due", expires_at=past)
    line(bench, "a")
    line(bench, "between", expires_at=past)
    line(bench, "b")
    bench.turns()
    assert bench.publisher.requests == [["a", "b"]]
    assert [bench.store.rows[id].available_at for id in ("due", "between")] == [NEVER, NEVER]


def test_what_another_worker_put_off_meanwhile_ends_the_run_under_the_lock(bench: Bench) -> None:
    """The snapshot showed it as ready; the row under the lock is the truth."""
    line(bench, "a", "b", "c")
    later = bench.store.now + timedelta(seconds=30)
    bench.relay.turn()
    line(bench, "d", "e", "f")
    overtake(bench, lambda: setattr(bench.store.rows["e"], "available_at", later))
    bench.relay.turn()
    assert published(bench, *"abcdef") == ["a", "b", "c", "d"]
    bench.turns()
    assert waits(bench, "f") == pytest.approx(30, abs=1)


def test_what_another_worker_sent_or_somebody_deleted_is_passed_over(bench: Bench) -> None:
    """Under the lock, between the snapshot and now."""
    line(bench, "a", "b", "c", "d")
    bench.turns()
    bench.publisher.published.clear()
    line(bench, "e", "f", "g", "h")

    def act() -> None:
        bench.store.rows["e"].sent_at = bench.store.now
        del bench.store.rows["g"]

    overtake(bench, act)
    bench.relay.turn()
    assert bench.publisher.ids() == ["f", "h"]


def test_a_task_that_was_moved_to_another_key_is_not_sent_with_its_old_one(bench: Bench) -> None:
    """It goes with the next poll, in its new place."""
    line(bench, "a", "b")
    bench.turns()
    bench.publisher.published.clear()
    line(bench, "c", "d", "e")
    overtake(bench, lambda: setattr(bench.store.rows["d"], "ordering_key", "other"))
    bench.relay.turn()
    assert bench.publisher.ids() == ["c", "e"]
    bench.turns()
    assert bench.publisher.ids() == ["c", "e", "d"]


def test_a_failure_is_remembered_when_the_transaction_is_run_again(bench: Bench) -> None:
    """Nothing behind it goes out in the second run, though it was never tried."""
    line(bench, "a", "b", "c")
    bench.publisher.failing = {"b": REFUSED}

    def abort_once_and_mend() -> None:
        if bench.publisher.failing:
            bench.publisher.failing = {}
            raise Abort

    bench.store.before_commit = abort_once_and_mend
    bench.turns()
    assert bench.publisher.ids() == ["a"]
    assert bench.store.rows["b"].available_at == NEVER
    assert waits(bench, "c") == pytest.approx(3600, abs=1)


def test_what_there_was_no_time_for_stays_as_it_was(bench: Bench) -> None:
    """Neither failed nor parked: the next turn goes on there."""
    line(bench, "a", "b", "c")
    bench.store.rows["b"].attempts = 1  # in a request of its own
    bench.publisher.out_of_time = {"b"}
    bench.relay.turn()
    bench.relay.turn()
    assert bench.publisher.ids() == ["a"]
    assert [bench.store.rows[id].available_at for id in "bc"] == [None, None]
    bench.publisher.out_of_time = set()
    bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]


def test_a_key_in_flight_waits_for_its_answer() -> None:
    """One request of a key at a time; the other topic's tasks do not wait for it."""
    publisher = SlowPublisher("orders", "invoices")
    bench = Bench(publisher=publisher, groups=4)
    bench.publisher = publisher
    publisher.hanging = {"orders"}
    line(bench, *(f"{n:02}" for n in range(25)))
    bench.relay.turn()
    for _ in range(3):
        bench.relay.turn()
    assert bench.store.claimed.total() == 10
    bench.insert("i", topic="invoices")
    while "i" not in publisher.ids():
        bench.relay.turn()
    publisher.release.set()
    bench.turns()
    assert published(bench, *(f"{n:02}" for n in range(25))) == [f"{n:02}" for n in range(25)]


def test_a_doubtful_task_makes_its_key_wait(bench: Bench) -> None:
    """Its commit is in doubt: it is marked first, and only then is the next one sent."""
    line(bench, "a", "b")
    bench.store.before_commit = times(1, lambda: StoreError("no"))
    bench.relay.turn()
    bench.relay.turn()
    assert bench.publisher.ids() == ["a", "b"]
    line(bench, "c")
    bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]
    assert bench.unsent() == []


def test_a_head_is_put_off_behind_nothing(bench: Bench) -> None:
    """It was retried between the poll and the lock: the tasks behind it stay ready."""
    line(bench, "head", "a")
    bench.store.rows["head"].available_at = bench.store.now + timedelta(hours=1)
    bench.relay.turn()
    overtake(bench, lambda: setattr(bench.store.rows["head"], "available_at", None))
    bench.relay.turn()
    assert bench.store.rows["a"].available_at is None
    bench.turns()
    assert bench.publisher.ids() == ["head", "a"]


def test_a_scheduled_task_behind_a_head_keeps_its_own_time(bench: Bench) -> None:
    """Parking never makes a task due earlier than it asked for."""
    line(bench, "head", "a")
    line(bench, "later", available_at=bench.store.now + timedelta(hours=9))
    bench.store.rows["head"].available_at = bench.store.now + timedelta(seconds=9)
    bench.turns()
    assert waits(bench, "later") == pytest.approx(9 * 3600, abs=1)


def test_a_parking_that_fails_is_told_and_tried_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was parked, and nothing was sent out of order."""
    line(bench, "head", "a", "b")
    bench.store.rows["head"].available_at = bench.store.now + timedelta(hours=1)
    bench.store.before_commit = times(1, lambda: StoreError("not now"))
    bench.turns()
    assert "was not committed (0 were published): not now" in caplog.text
    bench.turns()
    assert bench.publisher.ids() == []
    assert bench.count(m.PARKED) == 2


def test_a_limited_topic_sends_the_beginning_of_a_run(bench: Bench) -> None:
    """Three at once are allowed: the first three of the key."""
    bench.store.limits["orders"] = TopicLimit(rate=0.001, burst=3)
    line(bench, "e", "d", "c", "b", "a")
    bench.turns()
    assert bench.publisher.requests == [["e", "d", "c"]]


def test_an_urgent_task_makes_its_key_urgent(bench: Bench) -> None:
    """What stands before it goes first, ahead of other keys."""
    bench = Bench(size=2, groups=1)
    line(bench, "x1", "x2", key="x", priority=50)
    line(bench, "a", priority=0)
    line(bench, "b", priority=100)
    bench.turns()
    assert bench.publisher.requests == [["a", "b"], ["x1", "x2"]]


def test_at_most_once_with_a_key_keeps_its_place(bench: Bench) -> None:
    """`register` refuses the two together; a row of another writer is marked first, alone, and then the next may go."""
    line(bench, "a")
    line(bench, "once", at_most_once=True)
    line(bench, "b")
    bench.turns()
    assert bench.publisher.requests == [["a"], ["once"], ["b"]]
    assert bench.unsent() == []


class CountedFronts(Bench):
    """Keeps what the fronts were asked for."""

    def __init__(self) -> None:
        """Count."""
        super().__init__(size=100, groups=8)
        self.asked: list[tuple[int, int]] = []
        fronts = self.store.fronts

        def counted(keys: Collection[Key], per_key: int, *, pass_dead: bool) -> object:
            self.asked.append((len(keys), per_key))
            return fronts(keys, per_key, pass_dead=pass_dead)

        self.store.fronts = counted  # type: ignore[method-assign,assignment]


def test_fronts_are_read_as_far_as_there_is_something_to_take() -> None:
    """A run, and one row more; never more than a bound over all keys."""
    bench = CountedFronts()
    for n in range(5):
        line(bench, f"k{n}", key=str(n))
    line(bench, "a", "b", "c", key="long")
    bench.turns()
    assert bench.asked == [(6, 101)]
    many = MAX_FRONT_ROWS // 10
    bench = CountedFronts()
    for n in range(many):
        line(bench, f"k{n}", key=str(n))
    line(bench, *(f"l{n}" for n in range(100)), key="long")
    bench.turns(30)
    assert all(keys * (rows - 1) <= MAX_FRONT_ROWS for keys, rows in bench.asked)


def test_without_ordered_tasks_no_front_is_read() -> None:
    """Who needs no order pays nothing for it."""
    bench = CountedFronts()
    bench.insert("a", "b")
    bench.turns()
    assert bench.asked == []


class OneByOne(FakePublisher):
    """Fails if a key is published while another request of it is on its way."""

    def __init__(self, *topics: str) -> None:
        """Nothing is on its way."""
        super().__init__(*topics)
        self.flying: set[str | None] = set()

    def publish(
        self, topic: str, rows: Sequence[Row], seconds: float, singly: Collection[str] = frozenset()
    ) -> dict[str, Outcome]:
        """Note the keys, and publish."""
        keys = {row.ordering_key for row in rows} - {None}
        assert not keys & self.flying
        self.flying |= keys
        outcomes = super().publish(topic, rows, seconds, singly)
        assert all(isinstance(each, Sent) for each in outcomes.values())
        self.flying -= keys
        return outcomes


def test_many_keys_over_many_turns_each_in_its_order() -> None:
    """Interleaved registrations, groups in parallel: the order of each key is that of its registration."""
    publisher = OneByOne("orders", "invoices")
    bench = Bench(publisher=publisher, size=7, groups=4)
    bench.publisher = publisher
    random = Random(3)
    expected: dict[str, list[str]] = {}
    for n, id in enumerate(random.sample(range(10_000), 400)):
        key = f"key {random.randrange(12)}"
        bench.insert(str(id), ordering_key=key, sequence=n, priority=random.choice((0, 50, 100)))
        expected.setdefault(key, []).append(str(id))
        if n % 40 == 0:
            bench.relay.turn()
    bench.turns(200)
    assert bench.unsent() == []
    for ids in expected.values():
        assert published(bench, *ids) == ids
