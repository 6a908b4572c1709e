"""What is sent and what is written of it: publish, mark, again, errors, at most once."""

from tests.model.rules.fault import SPANNER, TURN, Fault

FAULTS = (
    # Publish
    Fault(
        "One deadline for all requests of a group.",
        "publishworker/pubsub/publisher.py",
        "timeout=remaining, metadata=header",
        "timeout=60, metadata=header",
    ),
    Fault(
        "The answer of Pub/Sub is waited for before a row is marked.",
        TURN + "delivery.py",
        "            if isinstance(outcome, Sent):\n                marks[row.id] = outcome\n",
        "            if outcome is None or isinstance(outcome, Sent):\n"
        '                marks[row.id] = outcome or Sent("")\n',
    ),
    Fault(
        "No answer is no success.",
        "publishworker/pubsub/publisher.py",
        "answer = dict.fromkeys(ids, failure_of(error, call.name))",
        'answer = dict.fromkeys(ids, Sent(""))',
    ),
    Fault(
        "What is refused as invalid goes again, in smaller requests.",
        "publishworker/pubsub/publisher.py",
        "if error.code() is grpc.StatusCode.INVALID_ARGUMENT and len(ids) > 1:",
        "if False:",
    ),
    Fault(
        "What was not tried in time is left as it was.",
        "publishworker/pubsub/publisher.py",
        "        if remaining <= least:\n",
        "        if remaining <= least:\n"
        '            call.outcomes.update(dict.fromkeys(ids, Failed("data_loss", "late")))\n',
    ),
    Fault(
        "No exception of Pub/Sub leaves the transaction function.",
        "publishworker/pubsub/publisher.py",
        "        answer = dict.fromkeys(ids, failure_of(error, call.name))",
        "        raise",
    ),
    # Mark
    Fault(
        "A sent task is clean.",
        SPANNER + "store.py",
        "others.append((row.id, COMMIT_TIMESTAMP, None, None, None, 0))",
        "others.append((row.id, COMMIT_TIMESTAMP, row.available_at, row.expires_at, None, row.attempts))",
    ),
    Fault(
        "A failure is one more than the attempts that were read under the lock.",
        TURN + "retries.py",
        "attempts = min(row.attempts + 1, MAX_ATTEMPTS)",
        "attempts = min(row.attempts, MAX_ATTEMPTS)",
    ),
    Fault(
        "`LastError` is at most 1,000 characters.",
        TURN + "retries.py",
        '{failure.error}"[:MAX_ERROR_CHARACTERS]',
        '{failure.error}"',
    ),
    Fault(
        "Only what is ours is marked.",
        TURN + "delivery.py",
        "ours = [row for row in in_order(result.group, rows) if row.id not in left]",
        "ours = in_order(result.group, rows)",
    ),
    Fault(
        "One bad task costs its group nothing.",
        "publishworker/pubsub/publisher.py",
        "            failed[row.id] = message\n",
        "            return [], {each.id: message for each in rows}\n",
    ),
    # Again
    Fault(
        "A run after an abort publishes only what was never tried.",
        TURN + "delivery.py",
        "self._publish(result, untried(ours, result.tried), locked)",
        "self._publish(result, ours, locked)",
    ),
    Fault(
        "A run after an abort writes the rest down, due or not.",
        TURN + "claims.py",
        "        elif version is not None:\n",
        "        elif False:\n",
    ),
    Fault(
        "What is published and not surely marked is remembered.",
        TURN + "doubts.py",
        "            self._entries.setdefault(id, Doubt(topic, version, now))",
        "            pass",
    ),
    Fault("It is remembered for 60 s at most.", TURN + "doubts.py", "if doubt.since >= oldest}", "if doubt}"),
    Fault(
        "No more than 10,000 are remembered.", TURN + "doubts.py", "[: max(0, len(self._entries) - MAX_TASKS)]", "[:0]"
    ),
    Fault(
        "The next turn marks what is remembered.",
        TURN + "relay.py",
        "        doubtful = self._mark_doubtful()\n",
        "        doubtful = frozenset()\n",
    ),
    Fault(
        "Only the very row that was published is marked.",
        "publishworker/task.py",
        "when = row.created_at, row.available_at",
        "when = datetime.max, row.available_at",
    ),
    Fault(
        "What an operator has asked for since is not marked.",
        "publishworker/task.py",
        "when = row.created_at, row.available_at, row.expires_at",
        "when = row.created_at, None, row.expires_at",
    ),
    Fault(
        "Nor in a run after an abort.",
        TURN + "claims.py",
        " or (version is not None and version != Version.of(row)):",
        ":",
    ),
    Fault(
        "A failure says nothing of a row that was written since.",
        TURN + "delivery.py",
        "if id in versions and versions[id] != result.versions[id]:",
        "if False:",
    ),
    # Errors
    Fault(
        "An error of the content makes a task dead at once.",
        TURN + "retries.py",
        "        if kind is Kind.CONTENT:\n            return True\n",
        "",
    ),
    Fault(
        "A topic that is missing or closed rests.",
        TURN + "breakers.py",
        "return kind is Kind.TARGET or (kind is Kind.OUTAGE and not charged)",
        "return kind is Kind.OUTAGE and not charged",
    ),
    Fault(
        "A probe has at most 10 tasks.", TURN + "breakers.py", "TARGET_PROBE_TASKS = 10", "TARGET_PROBE_TASKS = 1000"
    ),
    Fault("Each rest is twice as long.", TURN + "breakers.py", "            rest.seconds *= 2\n", ""),
    Fault(
        "Only probed tasks are charged for their topic.",
        TURN + "retries.py",
        "            return group.probe\n",
        "            return True\n",
    ),
    Fault(
        "A missing topic makes no young task dead.",
        TURN + "retries.py",
        "if kind is Kind.TARGET and now - row.created_at < timedelta(seconds=self.dead_after):",
        "if False:",
    ),
    Fault(
        "An outage costs no attempt.",
        TURN + "retries.py",
        "return id in group.suspects and works and not group.probe and not is_refused(failure.reason)",
        "return True",
    ),
    Fault(
        "A topic rests in an outage.",
        TURN + "breakers.py",
        "return kind is Kind.TARGET or (kind is Kind.OUTAGE and not charged)",
        "return kind is Kind.TARGET",
    ),
    Fault(
        "The probe of an outage is drawn at random.",
        TURN + "breakers.py",
        "self._random.choice(ready or fresh or its)",
        "(ready or fresh or its)[0]",
    ),
    Fault(
        "Who meets outages while its topic works is charged.",
        TURN + "retries.py",
        "return id in group.suspects and works and not group.probe and not is_refused(failure.reason)",
        "return False",
    ),
    Fault(
        "1,000 suspects are remembered.", TURN + "breakers.py", "[: max(0, len(self._suspects) - MAX_SUSPECTS)]", "[:0]"
    ),
    Fault(
        "The wait of a task that fails doubles.",
        TURN + "retries.py",
        "self.initial * 2.0**doublings",
        "self.initial * 1.0**doublings",
    ),
    Fault("It has jitter between half and full.", TURN + "retries.py", " * self.random.uniform(0.5, 1)", ""),
    Fault(
        "A task is dead after `--max-attempts`.",
        TURN + "retries.py",
        "return attempts >= self.max_attempts",
        "return False",
    ),
    # At most once
    Fault(
        "What is to be sent at most once is marked before.",
        TURN + "claims.py",
        'return Taken("at_most_once") if row.at_most_once and not group.at_most_once else None',
        "return None",
    ),
    Fault(
        "It is sent only once its mark is surely committed.",
        TURN + "delivery.py",
        "            result.in_doubt = list(marked) if result.unsure else []\n            return result\n",
        "            committed = result.locked_at\n",
    ),
    Fault(
        "What Pub/Sub has perhaps taken is not given back.",
        TURN + "delivery.py",
        "return outcome is None or (isinstance(outcome, Failed) and is_refused(outcome.reason))",
        "return outcome is None or isinstance(outcome, Failed)",
    ),
)
