"""Check histories: python checker.py FILE... It needs the standard library only, and knows no code of the project.

A file has one JSON object for each line, in the order in which it happened: {"event": "commit", "task": "a"}

    register  an application registers a task in a new transaction; "key" is its topic and ordering key, if it has one.
              "may_be_lost": true is for a task that is to be sent at most once
    commit    this transaction has committed, as the application knows; tasks of a key in their commit order
    rollback  it has certainly not committed
    publish   a worker knows that the message service has accepted a message of the task
    receive   a subscriber receives a message of the task; "message" is the ID of the message
    effect    the subscriber's side effect of the task is committed
    retry     an operator has the task sent once more
    delete    an operator deletes the task

Other events are ignored. A task is recovered if it was received although its commit was not acknowledged.
"""

import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EVENTS = ("register", "commit", "rollback", "publish", "receive", "effect", "retry", "delete")
#: Numbers that must be 0.
WRONG = ("lost", "unexpected", "unpublished", "order_violations", "effects_twice", "effects_without_message")


def check(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of a history, in tasks unless noted. `problems` has an example of each wrong number."""
    seen: dict[str, set[str]] = defaultdict(set)  # the tasks of each event
    messages: dict[str, set[str]] = defaultdict(set)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    keys: dict[str, str] = {}
    places: dict[str, int] = {}  # the number of the event that commits the task, or that registers it
    waiting: dict[str, dict[str, int]] = defaultdict(dict)  # the committed tasks of each key, until they are received
    wrong: dict[str, list[str]] = {name: [] for name in WRONG}
    retried: dict[str, int] = {}  # how often each task was received before its last retry
    may_be_lost, unexpected = set[str](), set[str]()
    for number, each in enumerate(each for each in events if each["event"] in EVENTS):
        event, task = each["event"], each["task"]
        seen[event].add(task)
        counts[event][task] += 1
        if event == "register":
            keys[task] = each.get("key") or ""
            places.setdefault(task, number)
            may_be_lost |= {task} if each.get("may_be_lost") else set()
        elif event == "commit" and keys.get(task):
            places[task] = number
            if not (counts["receive"][task] or counts["delete"][task]):
                waiting[keys[task]][task] = number
        elif event == "receive":
            messages[task].add(each["message"])
            unexpected |= {task} if counts["register"][task] <= counts["rollback"][task] else set()
            first = next(iter(waiting[keys.get(task, "")].values()), number)
            if counts[event][task] == 1 and first < places.get(task, 0):
                wrong["order_violations"].append(task)
        if event in ("receive", "delete"):
            waiting[keys.get(task, "")].pop(task, None)
        elif event == "retry":
            retried[task] = counts["receive"][task]
        elif event == "effect" and task not in seen["receive"]:
            wrong["effects_without_message"].append(task)
    received, acknowledged = seen["receive"], seen["commit"]
    unsent = (acknowledged - received) | {task for task, count in retried.items() if counts["receive"][task] == count}
    wrong["lost"] = sorted(unsent - seen["delete"] - may_be_lost)
    unexpected |= {task for task in received - acknowledged if counts["register"][task] <= counts["rollback"][task]}
    wrong["unexpected"] = sorted(unexpected)
    wrong["unpublished"] = sorted(seen["publish"] - received)
    wrong["effects_twice"] = [task for task, count in counts["effect"].items() if count > 1]
    repeats = {task: len(ids) - 1 - counts["retry"][task] for task, ids in messages.items()}
    return {
        "attempted": len(seen["register"]),
        "acknowledged": len(acknowledged),
        "ok": len(acknowledged & received),
        "recovered": len(received - acknowledged - unexpected),
        "duplicated": sum(count > 0 for count in repeats.values()),
        "duplicate_messages": sum(count for count in repeats.values() if count > 0),
        "redelivered_messages": sum(counts["receive"].values()) - sum(map(len, messages.values())),
        "effects": dict(sorted(Counter(counts["effect"][task] for task in acknowledged).items())),  # tasks by effects
        **{name: len(tasks) for name, tasks in wrong.items()},
        "problems": {name: tasks[:3] for name, tasks in wrong.items() if tasks},
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Read a file, which may be compressed."""
    data = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("Pass the files to check")
    results = {name: check(read(Path(name))) for name in sys.argv[1:]}
    for name, result in results.items():
        print(json.dumps({"file": name, **result}))
    sys.exit(any(result["problems"] or not result["attempted"] for result in results.values()))
