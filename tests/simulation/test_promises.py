"""Delays and shares that pages promise, in histories in which they matter."""

import itertools
import operator
from random import Random
from unittest import mock

import pytest

from outbox.table.states import NEVER
from tests.simulation.audit import BAD, GOOD, PAUSE_SECONDS
from tests.simulation.plan import DENSE, Plan
from tests.simulation.seeded_faults import seeded
from tests.simulation.world import Node, World, staged


@pytest.mark.parametrize(
    "intervals",
    [{}, {"poll_interval": 30.0}, {"wake": True}, {"wake": True, "idle_interval": 300.0}],
    ids=["default", "slow", "wake", "long"],
)
@pytest.mark.parametrize("suspended", [False, True])
def test_idle_workers_follow_a_pause_and_its_end(intervals: dict[str, float], suspended: bool, long: bool) -> None:
    """Within 10 s, however long they wait between polls, also at-most-once tasks, tasks with keys and due tasks.

    `suspended` is as by SIGSTOP, in the idle pause.
    """
    for seed in range(15 if long else 5):
        random = Random(seed)
        with staged(Plan(seed=seed, once=0.3, **intervals)) as world:  # type: ignore[arg-type]  # mixed

            def registrations(seconds: float, world: World = world, random: Random = random) -> None:
                world.run(seconds)
                for _ in range(8):
                    world.clockwork.spawn(world.application, lambda: world.register(random))

            def pause(*, paused: bool, world: World = world) -> None:
                for topic in world.topics:
                    world.set_paused(topic, paused=paused)

            registrations(1.0)
            world.clockwork.run(random.uniform(30.0, 70.0))  # the tasks are sent, and the pauses are long
            if suspended:
                for node in world.nodes:
                    node.process.paused_until = world.clockwork.now + 40.0
            pause(paused=True)
            before = set(world.audit.tasks)
            registrations(PAUSE_SECONDS + random.uniform(0.5, 5.0))
            world.run(60.0)
            assert not world.audit.problems, seed
            world.run(random.uniform(0.0, 60.0))
            pause(paused=False)
            world.run(10.0)
        new = [task for id, task in world.audit.tasks.items() if id not in before]
        assert (bool(new), all(task.received for task in new)) == (True, True), seed


@pytest.mark.parametrize(("refused", "once"), [(0.02, 0.0), (0.1, 1.0)])
def test_other_tasks_do_not_wait_for_refused_rows(refused: float, once: float) -> None:
    """They are sent within three seconds, and no refused task is published twice within the minute."""
    world = World(Plan(7, workers=1, batch_size=100, seconds=60.0, keys=0.0, once=once, refused=refused, rate=5.0))
    bad: set[str] = set()

    def repair() -> None:
        bad.update(world.spanner.table.refused)
        world.spanner.table.refused.clear()

    world.clockwork.after(60.0, repair)
    with mock.patch.object(world.operators, "mend"):  # which would pause topics
        audit = world.play()
    assert audit.problems == []
    assert len(bad) > 2
    good = [task for id, task in audit.tasks.items() if id not in bad]
    waits = [task.last_at - max(task.at, task.available_at) for task in good]
    assert max(waits) < 3.0
    assert audit.duplicates == 0


@pytest.mark.parametrize(("wake", "busy", "seconds"), [(False, False, 15.0), (True, False, 30.0), (True, True, 15.0)])
def test_idle_workers_take_over_the_shards_of_a_killed_one(
    wake: bool, busy: bool, seconds: float
) -> None:  # OUT-LOSS-6
    """The time counts from its last heartbeat. The killed worker was idle, or had a scheduled task.

    The change stream reports nothing to the others, as after a retry, and their clocks differ.
    """
    for seed in range(8):
        random = Random(seed)
        with staged(Plan(seed=seed, workers=4, wake=wake)) as world:
            killed, *others = world.nodes
            for node in world.nodes:
                node.process.skew = random.uniform(0, 5)
            world.run(random.uniform(60, 90))
            assert [node.membership.size for node in world.nodes] == [4] * 4
            if busy:
                shard, table = killed.membership.shards[0], world.spanner.table
                world.add(next(id for id in map(str, range(100)) if shard in table.shards_of(id)), seconds=3600)
                world.run(random.uniform(40, 60))
            killed.kill()
            age = world.spanner.table.time() - world.spanner.table.seen_at[killed.process.name]
            world.run(seconds - age.total_seconds())
        assert [node.membership.size for node in others] == [3] * 3, seed
        assert {shard for node in others for shard in node.membership.shards} == set(range(world.plan.shards))


@pytest.mark.parametrize(
    ("workers", "defect"), [(2, None), (4, None), (2, "a worker that cannot write takes over no shards")]
)
def test_workers_keep_their_shards_while_spanner_refuses_writes(workers: int, defect: str | None) -> None:
    """All heartbeats become old in this minute, and the shards that a worker took over would be published again.

    A further worker starts during the outage, and polls nothing until it can write. When it then gets its shards, it
    may be quicker than those that mark their tasks.
    """
    plan = Plan(5, workers=workers, shards=10, batch_size=20, concurrency=8, rate=5.0, seconds=80.0)
    with seeded(defect), staged(plan) as world:
        world.run(15.0)
        world.clockwork.spawn(world.application, world.applications)
        world.run(5.0)
        world.troubles.append(("writes", 1.0, "refused"))
        world.run(20.0)
        world.nodes.append(Node(world, workers))
        world.run(40.0)
        world.troubles.clear()
        world.run(40.0)
        assert [node.membership.size for node in world.nodes] == [workers + 1] * (workers + 1)
        assert all(task.received for task in world.audit.tasks.values())
    assert (world.audit.duplicates > 10) is bool(defect), world.audit.duplicates


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_stops_finishes_its_batches(seed: int) -> None:  # OUT-LOSS-5
    """No other worker publishes their tasks again."""
    assert World(DENSE["stops"](seed)).play().problems == []


@pytest.mark.parametrize("seed", range(3))
def test_keys_keep_their_order(seed: int) -> None:  # OUT-ORDER-1
    """Requests fail, answers are lost, and tasks have failed attempts."""
    assert World(DENSE["keys"](seed)).play().problems == []


def seconds_beside_a_slow_topic(seed: int, tasks: int, priority: int) -> float:
    """Send two backlogs, one of a topic whose publishes take 3 s; return the seconds until the other is received."""
    with staged(Plan(seed, workers=1, concurrency=8, rate=1e-9)) as world:
        world.pubsub.slow_topics["orders"] = 3.0
        world.run(15.0)
        world.load(1_000)
        world.load(tasks, "invoices", priority)
        fast = [task for task in world.audit.tasks.values() if task.topic == "invoices"]
        world.run(120.0, lambda: all(task.received for task in fast))
    return max(task.last_at - task.at for task in fast)


@pytest.mark.parametrize(
    ("tasks", "priority", "defect"),
    [
        (600, 50, None),
        (600, 50, "a topic gets at most half of the places while another waits"),
        (60, 0, None),
        (60, 0, "a topic leaves a place to another of a lower priority"),
    ],
)
def test_a_slow_topic_leaves_places_to_another(tasks: int, priority: int, defect: str | None) -> None:  # OUT-DELAY-2
    """Half of the places, or one to a lower priority."""
    with seeded(defect):
        slowest = max(seconds_beside_a_slow_topic(seed, tasks, priority) for seed in range(2))
    assert (slowest > 4.0) is bool(defect), slowest


def priorities_are_kept(seed: int) -> bool:
    """Tell whether urgent tasks pass a backlog, and two lower priorities share a tenth of the batches meanwhile."""
    with staged(Plan(seed, workers=1, shards=40, concurrency=1, rate=1e-9)) as world:
        world.run(15.0)
        world.load(1_500, priority=0)
        world.run(1.0)
        of_a_late_shard = (id for id in map(str, range(10_000)) if world.spanner.table.shards_of(id) == (35,))
        urgent = [world.add(id, priority=100) for id in itertools.islice(of_a_late_shard, 3)]
        world.run(1.0)
        passed = all(task.received for task in urgent) and world.spanner.table.unsent_count > 500
        world.run_until(unsent=0)
        low = [world.add(f"low-{number}", priority=0) for number in range(25)]
        world.load(1_500, priority=50)
        world.load(1_500, priority=100)
        world.run(600.0, lambda: all(task.received for task in low))
        urgent_sent = sum(row.sent_at is not None and row.priority == 100 for row in world.spanner.table.rows.values())
        return passed and 300 < urgent_sent < 1_000


@pytest.mark.parametrize(
    "defect",
    [None, "urgent tasks go first", "lower priorities have a share", "a poll reads lower priorities when owed"],
)
def test_priorities_decide_and_lower_ones_keep_their_share(defect: str | None) -> None:  # OUT-ORDER-3
    with seeded(defect):
        assert all(map(priorities_are_kept, range(2))) is not bool(defect)


@pytest.mark.parametrize("defect", [None, "the size of a poll follows the backlog"])
def test_a_backlog_of_one_shard_is_sent_as_fast_as_others(defect: str | None) -> None:
    """A poll reads as many rows of the only range with tasks as of all ranges together."""
    with seeded(defect), staged(Plan(1, workers=1, shards=10, concurrency=8, rate=1e-9)) as world:
        world.run(15.0)
        for id in [id for id in map(str, range(6_000)) if world.spanner.table.shards_of(id) == (0,)]:
            world.add(id)
        seconds = world.run_until(unsent=0) - 15.0
    assert (seconds > 2.0) is bool(defect), seconds


def work_of_backlogs() -> tuple[int, int, int]:
    """Send a backlog of one shard, one of all shards, and one of a topic with a limit.

    Return the polls and the rows that they return for the second one, and the transactions for the third one.
    """
    with staged(Plan(1, workers=1, shards=10, concurrency=8, rate=1e-9)) as world:
        spanner, ids = world.spanner, map(str, range(20_000))
        spanner.work = lambda kind, rows: rows if kind == "rows" else 0
        spanner.table.control("refunds", rate_per_second=50.0, burst=50)
        world.run(15.0)
        for id in [id for id in ids if spanner.table.shards_of(id) == (0,)]:
            world.add(id)
        world.run_until(unsent=0)
        polls, rows = spanner.requests["poll"], spanner.worked
        world.load(1_500)
        world.load(1_500, "invoices")
        world.run_until(unsent=0)
        polls, rows = spanner.requests["poll"] - polls, round(spanner.worked - rows)
        locks = spanner.requests["lock"]
        world.load(300, "refunds")
        world.run_until(unsent=0)
        return polls, rows, spanner.requests["lock"] - locks


@pytest.mark.parametrize(
    "defect",
    [
        None,
        "a turn waits for all batches that it has started",
        "a poll that was too large is halved",
        "tasks of a limited topic start together",
    ],
)
def test_backlogs_take_few_reads_and_transactions(defect: str | None) -> None:
    """Of 3,000 tasks of two topics, and of 300 tasks of a topic that may send 50 a second, in batches of 10."""
    with seeded(defect):
        work = work_of_backlogs()
    assert any(map(operator.gt, work, (80, 9_000, 50))) is bool(defect), work


@pytest.mark.parametrize("defect", [None, "turns that inserts start have a pause between them"])
def test_many_inserts_start_few_polls(defect: str | None) -> None:
    """Each insert wakes all workers."""
    with seeded(defect), staged(Plan(1, workers=8, shards=10, rate=60.0, seconds=20.0, keys=0.0, wake=True)) as world:
        world.run(15.0)
        world.spanner.requests.clear()
        world.clockwork.spawn(world.application, world.applications)
        world.run(6.0)
        polls = world.spanner.requests["poll"] / len(world.audit.tasks)
    assert (polls > 1.8) is bool(defect), polls


@pytest.mark.parametrize("defect", [None, "deferrals leave places to other tasks"])
def test_blocked_keys_delay_no_other_topic(defect: str | None) -> None:  # OUT-DELAY-1
    """Most of its tasks are sent before the 2,000 tasks that wait for the heads of their keys are deferred."""
    with seeded(defect), staged(Plan(1, workers=1, shards=10, concurrency=4, rate=1e-9)) as world:
        world.run(15.0)
        for number in range(2_200):
            world.add(str(number), key=f"key {number % 200}", seconds=0.0 if number >= 200 else 3_600.0)
        others = [world.add(f"other {number}", "invoices") for number in range(200)]
        world.run(60.0, lambda: all(task.received for task in others))
        longest = max(task.last_at - task.at for task in others)
    assert (longest > 3.0) is bool(defect), longest


def seconds_beside_messages(seed: int, *, slow: float) -> float:
    """Send 200 tasks behind three messages that cannot be sent; return the seconds until all others are received.

    Pub/Sub refuses the three if it is `slow`. Otherwise their requests fail as in an outage.
    """
    with staged(Plan(seed, workers=1, shards=1, concurrency=1, rate=1e-9)) as world:
        world.pubsub.slow = slow
        world.run(15.0)
        world.load(203)
        bad, good = [*world.audit.tasks][:3], [*world.audit.tasks.values()][3:]
        if slow:
            for id in bad:
                world.spanner.table.change(id, data=BAD)
        else:
            world.pubsub.poison = frozenset(bad)
        world.run(300.0, lambda: all(task.received for task in good))
    return max((task.last_at if task.received else 1e9) - task.at for task in good)


@pytest.mark.parametrize(
    ("slow", "most", "defect"),
    [
        (0.0, 30.0, None),
        (0.0, 30.0, "a probe in an outage is drawn at random"),
        (0.0, 30.0, "a task that met an outage shares no request"),
        (3.0, 120.0, None),
        (3.0, 120.0, "a refused request that there was no time to split is remembered"),
    ],
)
def test_messages_that_cannot_be_sent_delay_no_others(
    slow: float, most: float, defect: str | None
) -> None:  # OUT-DELAY-1
    """A request takes longer than half of the publish timeout if Pub/Sub is slow."""
    with seeded(defect):
        longest = max(seconds_beside_messages(seed, slow=slow) for seed in range(2))
    assert (longest > most) is bool(defect), longest


@pytest.mark.parametrize(
    ("fails", "max_new", "max_due"), [(0.0, 0.5, 2.0), pytest.param(0.1, 3.0, 5.0, marks=pytest.mark.extended)]
)
def test_idle_workers_send_new_and_due_tasks_soon(fails: float, max_new: float, max_due: float) -> None:  # OUT-LOSS-2
    """Each insert wakes all workers, mostly in vain, and most tasks are the first of their topic for some seconds.

    `fails` is the part of the claims and commits that Spanner refuses. `max_new` are seconds from the commit to the
    receipt. In the simulation, the stream reports an insert after up to 0.15 s. `max_due` are seconds from the time at
    which a scheduled task becomes due.
    """
    for seed in range(2):
        with staged(Plan(seed, workers=4, shards=10, rate=0.5, seconds=300.0, keys=0.0, wake=True)) as world:
            world.troubles += [("lock", fails, "refused"), ("commit", fails, "refused")]
            world.clockwork.spawn(world.application, world.applications)
            world.run(330.0)
        tasks = world.audit.tasks.values()
        new = [task.last_at - task.at for task in tasks if task.available_at == task.at]
        due = [task.last_at - task.available_at for task in tasks if task.available_at > task.at]
        assert (len(new) > 50, len(due) > 10, all(task.received for task in tasks)) == (True, True, True)
        assert (max(new) < max_new, max(due) < max_due) == (True, True), (seed, max(new), max(due))


def requests_of_idle_workers(workers: int, *, dead: bool) -> float:
    """Return the requests a minute of idle workers, perhaps of a topic that has a dead task."""
    with staged(Plan(1, workers=workers, shards=10, rate=1e-9, wake=workers > 1)) as world:
        world.run(5.0)
        if dead:
            table = world.spanner.table
            table.insert("dead", "orders", GOOD, created_at=table.commit_time(), available_at=NEVER)
        world.run(35.0)
        before = sum(world.spanner.requests.values())
        world.run(600.0)
    return (sum(world.spanner.requests.values()) - before) / 10


@pytest.mark.parametrize(
    ("workers", "dead", "most", "defect"),
    [
        (1, False, 75.0, None),
        (1, True, 145.0, None),
        (1, True, 145.0, "a topic with only dead tasks is discovered less and less often"),
        (4, False, 31.0, None),
        (4, False, 31.0, "idle workers send few heartbeats"),
    ],
)
def test_idle_workers_send_few_requests(workers: int, dead: bool, most: float, defect: str | None) -> None:
    """Several are woken by a change stream, whose own requests do not count here."""
    with seeded(defect):
        requests = requests_of_idle_workers(workers, dead=dead)
    assert (requests > most) is bool(defect), requests
