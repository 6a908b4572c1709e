"""The autoscaler of the simulation follows the manifest. docs/architecture/scale.md shows what it does under load."""

import itertools
from dataclasses import replace

import grpc
import pytest

from publishworker.turn.membership import HEARTBEAT_ROWS_PER_SECOND, MAX_STREAM_READERS
from tests.simulation.world import World, quiet
from tools.scale import fleets
from tools.scale.autoscaler import Autoscaler, commit_limit
from tools.scale.rates import BASE


@pytest.mark.extended
@pytest.mark.parametrize(("commit", "grown"), [(0.0, [2, 4, 8, 10]), (2 * commit_limit(), [2])])
def test_the_autoscaler_doubles_the_workers_unless_commits_are_slow(commit: float, grown: list[int]) -> None:
    """They double each minute up to the maximum. They are removed one by one, ten minutes after they were needed."""
    world = World(replace(BASE, workers=2))
    world.pubsub.broken["orders"] = grpc.StatusCode.UNAVAILABLE
    scaler = Autoscaler(world, scale=20, limit=commit_limit())
    with quiet():
        world.load(3_000)
        for _ in range(6):
            scaler.durations.commits.append(commit)
            world.clockwork.run(world.clockwork.now + 60)
        assert [workers for workers, _ in itertools.groupby(scaler.history, key=lambda each: each[2])] == grown
        world.pubsub.broken.clear()
        sent_at = world.run_until(unsent=0)
        world.clockwork.run(sent_at + 600)
        kept = scaler.replicas
        world.clockwork.run(sent_at + 800)
        world.clockwork.close()
    assert kept >= grown[-1]
    assert scaler.replicas in range(kept - 3, kept)


@pytest.mark.extended
def test_a_large_fleet_takes_over_in_time_although_it_reads_heartbeats_seldom() -> None:  # OUT-LOSS-6
    found = fleets.heartbeats(100)
    assert found["heartbeat rows read/s"] <= HEARTBEAT_ROWS_PER_SECOND * 100
    assert found["taken over after, s"] <= 15.0


@pytest.mark.extended
def test_only_some_workers_of_a_large_fleet_read_the_change_stream() -> None:
    """A task that none of them can send waits for the next poll of another worker."""
    found = fleets.wake_ups(2 * MAX_STREAM_READERS)
    assert found["records read/task"] == MAX_STREAM_READERS
    assert found["p99 ms"] <= 1_300
