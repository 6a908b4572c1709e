"""Check histories: python checker.py FILE... It needs the standard library only, and knows no code of the project.

A file has one JSON object for each line, in the order in which it happened: {"event": "commit", "task": "a"}

    register  an application registers a task in a transaction; "key" is its topic and ordering key, if it has one.
              "may_be_lost": true is for a task that is to be sent at most once
    commit    this transaction has committed, as the application knows
    rollback  it has certainly not committed
    publish   a worker knows that the message service has accepted a message of the task
    receive   a subscriber receives a message of the task; "message" is the ID of the message
    effect    the subscriber's side effect of the task is committed
    retry     an operator has the task sent once more
    delete    an operator deletes the task

Other events are ignored. A task is recovered if it was received although its commit was not acknowledged.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Numbers that must be 0.
WRONG = ("lost", "unexpected", "unpublished", "order_violations", "effects_twice", "effects_without_message")


def check(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of a history, in tasks unless noted. `problems` has an example of each wrong number."""
    seen: dict[str, set[str]] = defaultdict(set)  # the tasks of each event
    messages: dict[str, set[str]] = defaultdict(set)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    keys: dict[str, str] = {}
    queues: dict[str, list[str]] = defaultdict(list)  # the committed tasks of each key, in their order
    places: dict[str, int] = {}
    heads: Counter[str] = Counter()  # how many of the first tasks of each key are received or deleted
    wrong: dict[str, list[str]] = {name: [] for name in WRONG}
    may_be_lost: set[str] = set()
    for each in events:
        event, task = each["event"], each["task"]
        first = task not in seen[event]
        seen[event].add(task)
        counts[event][task] += 1
        if event == "register":
            keys[task] = each.get("key") or ""
            may_be_lost |= {task} if each.get("may_be_lost") else set()
        elif event == "commit" and keys.get(task):
            queue = queues[keys[task]]
            places[task] = len(queue)
            queue.append(task)
        elif event == "receive":
            messages[task].add(each["message"])
            if first and task in places and not _is_head(keys[task], places[task], queues, heads, seen):
                wrong["order_violations"].append(task)
        elif event == "effect" and task not in seen["receive"]:
            wrong["effects_without_message"].append(task)
    received, acknowledged = seen["receive"], seen["commit"]
    wrong["lost"] = sorted(acknowledged - received - seen["delete"] - may_be_lost)
    wrong["unexpected"] = sorted((received - seen["register"]) | (received & seen["rollback"]))
    wrong["unpublished"] = sorted(seen["publish"] - received)
    wrong["effects_twice"] = [task for task, count in counts["effect"].items() if count > 1]
    repeats = {task: len(ids) - 1 - counts["retry"][task] for task, ids in messages.items()}
    return {
        "attempted": len(seen["register"]),
        "acknowledged": len(acknowledged),
        "ok": len(acknowledged & received),
        "recovered": len((received & seen["register"]) - acknowledged - seen["rollback"]),
        "duplicated": sum(count > 0 for count in repeats.values()),
        "duplicate_messages": sum(count for count in repeats.values() if count > 0),
        "redelivered_messages": sum(counts["receive"].values()) - sum(map(len, messages.values())),
        "effects": dict(sorted(Counter(counts["effect"][task] for task in acknowledged).items())),  # tasks by effects
        **{name: len(tasks) for name, tasks in wrong.items()},
        "problems": {name: tasks[:3] for name, tasks in wrong.items() if tasks},
    }


def _is_head(
    key: str, place: int, queues: dict[str, list[str]], heads: Counter[str], seen: dict[str, set[str]]
) -> bool:
    """Whether all tasks before this one of its key are received or deleted."""
    while heads[key] < place and any(queues[key][heads[key]] in seen[it] for it in ("receive", "delete")):
        heads[key] += 1
    return heads[key] >= place


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    results = {name: check(read(Path(name))) for name in sys.argv[1:]}
    for name, result in results.items():
        print(json.dumps({"file": name, **result}))
    sys.exit(any(result["problems"] for result in results.values()))
