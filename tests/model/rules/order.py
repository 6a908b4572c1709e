"""The order of keys, and what waits behind a head."""

from tests.model.rules.fault import TURN, Fault

FAULTS = (
    # Order
    Fault(
        "The poll gives keys, not tasks.",
        TURN + "ordering.py",
        "        keys = {key: tasks for key, tasks in seen.items() if key not in flying}\n",
        "        return Fronts([each for each in found.candidates if each.id not in doubtful])\n",
    ),
    Fault(
        "A key is as urgent as the most urgent of its tasks.",
        TURN + "ordering.py",
        "most_urgent = min(tasks, key",
        "most_urgent = max(tasks, key",
    ),
    Fault(
        "A row that is not due ends the run.",
        TURN + "ordering.py",
        "may_go = [*takewhile(lambda each: each.may_go, front)]",
        "may_go = [each for each in front if each.may_go]",
    ),
    Fault(
        "Never a range under the lock.",
        TURN + "delivery.py",
        "            ours = self._ours(result, rows, now)\n            result.tried |= {row.id: expired(row) for",
        "            from publishworker.task import Key\n"
        "            keys = {Key(row.topic, row.ordering_key) for row in rows if row.ordering_key}\n"
        "            self._store.fronts(keys, 1, pass_dead=False)\n"
        "            ours = self._ours(result, rows, now)\n            result.tried |= {row.id: expired(row) for",
    ),
    Fault(
        "Under the lock, what is not due stops its key.",
        TURN + "claims.py",
        "                stopped.add(key)",
        "                pass",
    ),
    Fault(
        "The next request of a key goes only after the answer to the one before.",
        "publishworker/pubsub/messages.py",
        "        Lane(deque(request for piece in pieces for request in requests(topic, piece)), ordered=True)\n"
        "        for pieces in by_key.values()\n",
        "        Lane(deque([request]), ordered=True)\n"
        "        for pieces in by_key.values() for piece in pieces for request in requests(topic, piece)\n",
    ),
    Fault(
        "What is no success stops its key.",
        "publishworker/pubsub/publisher.py",
        "[lane] if lane.requests and all(isinstance(each, Sent) for each in answer.values()) else []",
        "[lane] if lane.requests else []",
    ),
    Fault(
        "So does what has failed in a run before.",
        TURN + "claims.py",
        "if outcome is None and row.ordering_key not in failed:",
        "if outcome is None:",
    ),
    Fault(
        "What stands behind a failed task gets its `AvailableAt`.",
        TURN + "delivery.py",
        "                    marks[row.id] = result.parked[row.id] = parked",
        "                    pass",
    ),
    Fault(
        "It gets no attempt.",
        TURN + "delivery.py",
        "                    marks[row.id] = result.parked[row.id] = parked",
        "                    marks[row.id] = Charged(row.attempts + 1, parked.available_at, row.expires_at, None)",
    ),
    Fault(
        "A dead head blocks its key, with `block`.",
        TURN + "claims.py",
        "return row.is_expired(now) or (pass_dead and is_dead)",
        "return row.is_expired(now) or is_dead",
    ),
    Fault(
        "A dead head is passed over, with `skip`.",
        TURN + "claims.py",
        "return row.is_expired(now) or (pass_dead and is_dead)",
        "return row.is_expired(now)",
    ),
    Fault(
        "An expired head is always passed over.",
        TURN + "claims.py",
        "return row.is_expired(now) or (pass_dead and is_dead)",
        "return pass_dead and is_dead",
    ),
    # Held tails
    Fault(
        "A tail is parked no longer than the longest backoff.",
        TURN + "retries.py",
        "until = min(available_at, now + timedelta(seconds=self.longest))",
        "until = available_at",
    ),
    Fault(
        "A tail is parked only behind a head that is not due under the lock.",
        TURN + "delivery.py",
        'if reasons.get(row.id) == Taken("held") and row.is_due(now)]',
        "if row.id != group.ids[0] and row.sent_at is None]",
    ),
    Fault(
        "A tail is awake when its head is sent.",
        TURN + "delivery.py",
        "awake = woken(group, rows, marks, now, pass_dead=self._pass_dead) if group.keys else ()",
        "awake = ()",
    ),
    Fault(
        "Outages park nothing.",
        TURN + "delivery.py",
        "        if charged is None or charged.available_at is None:\n            return None\n",
        "        if charged is None or charged.available_at is None:\n"
        "            return Parked(head.created_at.replace(year=9000), head.id)\n",
    ),
)
