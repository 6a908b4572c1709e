"""Check histories: python checker.py FILE... It needs the standard library only, and knows no code of the project.

A file has one JSON object for each line, in the order in which it happened: {"event": "commit", "task": "a"}

    register  an application registers a task in a new transaction; "key" is its topic and ordering key, if it has one.
              "may_be_lost": true is for a task that is to be sent at most once
    commit    this transaction has committed, as the application knows; tasks of a key in their commit order. A task is
              not to be received before "due", which is a time as "at"
    rollback  it has certainly not committed
    publish   a worker knows that the message service has accepted a message of the task
    receive   a subscriber receives a message of the task; "message" is the ID of the message
    effect    the subscriber's side effect of the task is committed
    retry     an operator has the task sent once more
    ready     an operator has an unsent task sent without waiting for its time
    delete    an operator deletes or cancels the task
    restore   an operator puts it back
    row       at the end, "state" of the row is sent, cancelled or unsent

Other events are ignored. A task is recovered if it was received although its commit was not acknowledged.
"""

import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EVENTS = (
    "register", "commit", "rollback", "publish", "receive", "effect", "retry", "ready", "delete", "restore", "row",
)  # fmt: skip
#: Numbers that must be 0.
WRONG = (
    "lost", "unexpected", "unpublished", "early", "order_violations", "effects_twice", "effects_without_message",
    "unsent", "sent_without_message",
)  # fmt: skip


class Checker:
    """Has a method for each event, and what the events so far say."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = defaultdict(set)  # the tasks of each event
        self.messages: dict[str, set[str]] = defaultdict(set)
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.repeats: Counter[str] = Counter()  # the duplicates of each task
        self.keys: dict[str, str] = {}
        self.places: dict[str, int] = {}  # the number of the event that commits the task, or that registers it
        self.waiting: dict[str, dict[str, int]] = defaultdict(dict)  # committed tasks of each key, until received
        self.wrong: dict[str, list[str]] = {name: [] for name in WRONG}
        self.retried: dict[str, int] = {}  # how often each task was received before its last retry
        self.due: dict[str, float] = {}
        self.may_be_lost, self.unexpected = set[str](), set[str]()

    def note(self, number: int, each: dict[str, Any]) -> None:
        event, task = each["event"], each["task"]
        self.seen[event].add(task)
        self.counts[event][task] += 1
        if handle := getattr(self, event, None):
            handle(number, task, each)
        if event in ("retry", "ready", "restore"):
            self.due.pop(task, None)
        if event == "restore":
            self.seen["delete"].discard(task)
        if event == "effect" and task not in self.seen["receive"]:
            self.wrong["effects_without_message"].append(task)
        if event in ("receive", "delete"):
            self.waiting[self.keys.get(task, "")].pop(task, None)

    def register(self, number: int, task: str, each: dict[str, Any]) -> None:
        self.keys[task], self.places[task] = each.get("key") or "", self.places.get(task, number)
        self.may_be_lost |= {task} if each.get("may_be_lost") else set()

    def commit(self, number: int, task: str, each: dict[str, Any]) -> None:
        if self.counts["commit"][task] > 1:  # the ID is used again
            self.counts["retry"][task] += 1
            self.retry(number, task, each)
        key, self.due[task] = self.keys.get(task), each.get("due", 0.0)
        if key:
            self.places[task] = number
        if key and not (self.counts["receive"][task] or self.counts["delete"][task]):
            self.waiting[key][task] = number

    def receive(self, number: int, task: str, each: dict[str, Any]) -> None:
        self.messages[task].add(each["message"])
        repeats = len(self.messages[task]) - 1 - self.counts["retry"][task]
        self.repeats[task] = max(self.repeats[task], repeats)
        if self.counts["register"][task] <= self.counts["rollback"][task]:
            self.unexpected.add(task)
        first = next(iter(self.waiting[self.keys.get(task, "")].values()), number)
        if self.counts["receive"][task] == 1 and first < self.places.get(task, 0):
            self.wrong["order_violations"].append(task)
        if "at" in each and each["at"] < self.due.get(task, 0.0) - 0.001:
            self.wrong["early"].append(task)

    def retry(self, _number: int, task: str, _each: dict[str, Any]) -> None:
        self.retried[task] = self.counts["receive"][task]

    def row(self, _number: int, task: str, each: dict[str, Any]) -> None:
        if each["state"] == "unsent":
            self.wrong["unsent"].append(task)
        elif each["state"] == "sent" and task not in self.seen["receive"] | self.may_be_lost:
            self.wrong["sent_without_message"].append(task)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the history, in tasks unless noted. `problems` has examples of each wrong number."""
        received, acknowledged, counts, wrong = self.seen["receive"], self.seen["commit"], self.counts, self.wrong
        again = {task for task, count in self.retried.items() if counts["receive"][task] == count}
        wrong["lost"] = sorted((acknowledged - received | again) - self.seen["delete"] - self.may_be_lost)
        not_committed = {
            task for task in received - acknowledged if counts["register"][task] <= counts["rollback"][task]
        }
        wrong["unexpected"] = sorted(self.unexpected | not_committed)
        wrong["unpublished"] = sorted(self.seen["publish"] - received)
        wrong["effects_twice"] = [task for task, count in counts["effect"].items() if count > 1]
        return {
            "attempted": len(self.seen["register"]),
            "acknowledged": len(acknowledged),
            "ok": len(acknowledged & received),
            "recovered": len(received - acknowledged - {*wrong["unexpected"]}),
            "duplicated": sum(count > 0 for count in self.repeats.values()),
            "duplicate_messages": self.repeats.total(),
            "redelivered_messages": counts["receive"].total() - sum(map(len, self.messages.values())),
            "effects": dict(sorted(Counter(counts["effect"][task] for task in acknowledged).items())),  # by effects
            **{name: len(tasks) for name, tasks in wrong.items()},
            "problems": {name: tasks[:3] for name, tasks in wrong.items() if tasks},
        }


def check(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    checker = Checker()
    for number, each in enumerate(each for each in events if each["event"] in EVENTS):
        checker.note(number, each)
    return checker.numbers()


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
