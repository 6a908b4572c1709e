"""The one insert of `outbox.register_many`, and its refusals."""

import dataclasses
import inspect
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest

import outbox
from outbox import registration
from outbox.testing import RecordingTransaction

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WHOLE: dict[str, Any] = {
    "priority": 7, "ordering_key": "k", "available_at": NOW, "expires_at": NOW + timedelta(hours=1), "task_id": "t",
}  # fmt: skip


def test_a_task_has_the_arguments_of_register() -> None:
    arguments = list(inspect.signature(outbox.register).parameters.values())[1:]
    assert list(inspect.signature(outbox.Task).parameters.values()) == arguments


def test_many_tasks_are_one_insert_of_the_rows_of_register() -> None:
    """The IDs are those of the tasks in their order, and so is the sequence."""
    single, many = RecordingTransaction(), RecordingTransaction()
    tasks = [outbox.Task("orders", b"1", {"a": "b"}, **WHOLE), outbox.Task("invoices", b"2", at_most_once=True)]
    for task in tasks:
        outbox.register(single, **{field.name: getattr(task, field.name) for field in dataclasses.fields(task)})
    ids = outbox.register_many(many, tasks)
    [(table, columns, rows)] = many.inserts
    assert (table, tuple(columns)) == ("AsynchronousTasks", registration.COLUMNS)
    assert ids == [task.id for task in many.tasks]
    first, second = many.tasks
    assert first == single.tasks[0]
    assert (second.topic, second.message.data, second.at_most_once) == ("invoices", b"2", True)
    assert (first.ordering_key, second.ordering_key) == ("k", "")
    assert rows[0][5] < rows[1][5]


def test_columns_with_their_default_are_not_written() -> None:
    transaction = RecordingTransaction()
    outbox.register_many(transaction, [outbox.Task("orders", b"", priority=0)] * 2)
    [(_, columns, rows)] = transaction.inserts
    assert columns == ("Id", "Topic", "Data", "Priority", "Sequence", "CreatedAt")
    assert len(rows) == 2


def test_no_task_is_no_insert() -> None:
    transaction = RecordingTransaction()
    assert outbox.register_many(transaction, []) == []
    assert transaction.inserts == []


@pytest.mark.parametrize(
    ("bad", "kind", "sentence"),
    [
        (outbox.Task("x", b""), outbox.InvalidMessage, r"tasks\[1\]: topic 'x' is not a name"),
        (outbox.Task("orders", 7), TypeError, r"tasks\[1\]: message is int"),  # type: ignore[arg-type]  # wrong on purpose
        (("orders", b""), TypeError, r"tasks\[1\] is tuple\. It must be an outbox\.Task"),
        (outbox.Task("invoices", b"", task_id="t"), outbox.InvalidMessage, r"tasks\[1\]: .* 't' is .* of tasks\[0\]"),
    ],
)
def test_one_refused_task_refuses_all(
    bad: Any, kind: type[Exception], sentence: str, set_metrics: Callable[[Any], None]
) -> None:
    """The error names the task; nothing is buffered, counted or remembered."""
    counter = mock.Mock()
    set_metrics(counter)
    transaction = RecordingTransaction()
    with pytest.raises(kind, match=sentence):
        outbox.register_many(transaction, [outbox.Task("orders", b"", task_id="t"), bad])
    assert transaction.inserts == []
    counter.increment.assert_not_called()
    assert outbox.register_once(transaction, "orders", b"", task_id="t")


@pytest.mark.parametrize("wrong", [iter([]), (task for task in ()), map(str, []), outbox.Task("orders", b""), None])
def test_tasks_that_a_second_attempt_would_not_find_are_refused(wrong: Any) -> None:
    """A transaction function that runs again after ABORTED would register nothing, without an error."""
    with pytest.raises(TypeError, match=r"^tasks is [\w.]+\. It must be a list .* An iterator has no tasks left"):
        outbox.register_many(RecordingTransaction(), wrong)


def test_tasks_are_counted_by_topic_and_known_to_register_once(set_metrics: Callable[[Any], None]) -> None:
    counter = mock.Mock()
    set_metrics(counter)
    transaction = RecordingTransaction()
    outbox.register_many(transaction, [outbox.Task(topic, b"") for topic in ("orders", "invoices", "orders")])
    calls = [mock.call("outbox.registered_task_count", n, [f"topic:{t}"]) for t, n in (("orders", 2), ("invoices", 1))]
    assert counter.increment.call_args_list == calls
    outbox.register_many(transaction, [outbox.Task("orders", b"", task_id="t")])
    assert outbox.register_once(transaction, "orders", b"", task_id="t") is False
