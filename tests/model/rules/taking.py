"""What is taken, and by whom: workers, window, sample, claim; idle and stopping."""

from tests.model.rules.fault import SPANNER, TURN, Fault

FAULTS = (
    # Workers
    Fault(
        "The living divide the shards among them.",
        TURN + "fleet.py",
        "self._all if self._shared else divide(living, self._all)[self._worker]",
        "self._all",
    ),
    Fault(
        "A worker that is silent for its lease loses its shards.",
        SPANNER + "sql.py",
        "SILENT_SECONDS = 13",
        "SILENT_SECONDS = 1300",
    ),
    Fault(
        "More workers than shards share a shard.",
        TURN + "fleet.py",
        "(1, 0) if len(shards) >= len(workers) else (0, 1)",
        "(1, 0)",
    ),
    # Window
    Fault(
        "A poll reads a bounded number of rows from each range.",
        SPANNER + "sql.py",
        "ORDER BY {order} LIMIT @per_range",
        "ORDER BY {order}",
    ),
    Fault(
        "Priority is global over what was read.",
        TURN + "sampling.py",
        "    pieces.sort(key=lambda piece: -piece[0].priority)",
        "    pieces.sort(key=lambda piece: 0)",
    ),
    Fault(
        "New and due tasks get half of the turn each.",
        TURN + "sampling.py",
        "which = 0 if piles[0] and (not piles[1] or given[0] <= given[1]) else 1",
        "which = 0 if piles[0] else 1",
    ),
    Fault(
        "A share of the turn goes to lower priorities.",
        TURN + "fairness.py",
        "earned = self._share * groups",
        "earned = 0.0",
    ),
    Fault(
        "What is in flight is no candidate.",
        TURN + "relay.py",
        "self._poller.poll(self._fair.below, in_flight, held",
        "self._poller.poll(self._fair.below, frozenset(), held",
    ),
    Fault(
        "A key in flight is no candidate.",
        TURN + "ordering.py",
        "for key, tasks in seen.items() if key not in flying}",
        "for key, tasks in seen.items()}",
    ),
    Fault(
        "What was marked since the poll is no candidate.",
        TURN + "ordering.py",
        "if each.ordering_key is None and each.id not in doubtful]",
        "if each.ordering_key is None]",
    ),
    # Sample
    Fault(
        "A group holds one topic.",
        TURN + "sampling.py",
        "group = open_group.get(task.topic)",
        "group = packed[-1] if packed else None",
    ),
    Fault(
        "A group has no more than `--group-size` tasks.",
        TURN + "sampling.py",
        "return len(self.ids) + task.tasks <= limits.group_size and ",
        "return ",
    ),
    Fault(
        "A group has no more than `--group-bytes`.",
        TURN + "sampling.py",
        " and self.bytes + task.bytes <= limits.group_bytes",
        "",
    ),
    Fault(
        "A topic has at most half of the groups while others wait.",
        TURN + "sampling.py",
        "half = -(-most // 2)",
        "half = most",
    ),
    Fault("Slices of equal priority are shuffled.", TURN + "sampling.py", "    random.shuffle(pieces)\n", ""),
    # Claim
    Fault("The lock query locks exclusively.", SPANNER + "sql.py", "@{{LOCK_SCANNED_RANGES=exclusive}}\n", ""),
    Fault(
        "What another worker has sent meanwhile is dropped.",
        TURN + "claims.py",
        "elif row.sent_at is not None or (",
        "elif (",
    ),
    Fault("What is gone is dropped, and counted.", TURN + "claims.py", 'outcomes[id] = Taken("gone")', "continue"),
    Fault(
        "What is no longer due is dropped.",
        TURN + "claims.py",
        "if not (row.is_due(now) or (row.ordering_key is not None and row.parked)):",
        "if False:",
    ),
    Fault(
        "Times are computed from the database's time.",
        SPANNER + "rows.py",
        "now = now or _time(current)",
        "now = now or datetime.now(UTC)",
    ),
    # Idle and stopping
    Fault(
        "The poll interval doubles while there is nothing to do.",
        "publishworker/worker.py",
        "self._next = nominal * 2",
        "self._next = nominal",
    ),
    Fault(
        "It has jitter.", "publishworker/worker.py", "return nominal * self._random.uniform(0.85, 1)", "return nominal"
    ),
    Fault(
        "A turn that has made progress means to poll again at once.",
        "publishworker/worker.py",
        "            if turn.made_progress:\n",
        "            if False:\n",
    ),
    Fault(
        "Once it is told to stop, nothing more is taken.",
        TURN + "relay.py",
        "if not (full or stopping()):",
        "if not full:",
    ),
    Fault("What is in flight is finished.", "publishworker/worker.py", "        self._relay.finish()\n", ""),
    Fault(
        "A second signal kills.",
        "publishworker/stopping.py",
        "            os._exit(128 + number)\n",
        "            return\n",
    ),
    Fault(
        "It ends within `--drain-timeout`.",
        "publishworker/stopping.py",
        "    thread.join(drain_timeout)\n",
        "    thread.join()\n",
    ),
)
