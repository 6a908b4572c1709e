"""Tasks in the transactions of DB-API, SQLAlchemy and Django, which replay their statements after ABORTED."""

import enum
import itertools
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from unittest import mock

import pytest
import sqlalchemy
from google.cloud.spanner_dbapi import Cursor
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import outbox
from tests.support.drivers import STACKS, DbApi, Django, SqlAlchemy, aborting
from tests.support.processes import ROOT
from tests.support.spanner import query

# SQLAlchemy and Django end a transaction that the driver does not have: in autocommit mode, or after a failed commit.
pytestmark = pytest.mark.filterwarnings("ignore:This method is non-operational:UserWarning")


def rows(database: Database, *orders: str) -> tuple[list[str], list[str]]:
    """Return which of the orders and of the tasks with these IDs exist."""
    order, task = (
        query(database, f"SELECT {key} FROM {table} WHERE {key} IN UNNEST(@ids) ORDER BY 1", ids=list(orders))
        for table, key in (("Orders", "OrderId"), ("AsynchronousTasks", "Id"))
    )
    return [id for [id] in order], [id for [id] in task]


def test_register_refuses_the_transaction_of_a_driver(
    stack: DbApi, shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is buffered, also in the transaction of a replay. The caller's own statements are replayed."""
    for other in {"google.cloud.sqlalchemy_spanner", "django_spanner"} - {stack.module}:
        monkeypatch.delitem(sys.modules, other, raising=False)  # another test may have loaded it
    order = f"{stack.name}-refused"
    statements = itertools.count()
    with (
        aborting(lambda call: call == "execute_sql" and next(statements) == 1) as aborted,
        stack.transaction() as handle,
    ):
        for sql in ("INSERT INTO Orders (OrderId) VALUES (%s)", "UPDATE Orders SET Cents = 1 WHERE OrderId = %s"):
            stack.execute(handle, sql, order)
            transaction = stack.connection(handle).transaction_checkout()
            for name, arguments, options in (
                ("register", ("orders", b""), {}),
                ("register_once", ("orders", b""), {"task_id": order}),
                ("register_many", ([outbox.Task("orders", b"")],), {}),
            ):
                with pytest.raises(outbox.InvalidTransaction, match=rf"Use {name} of outbox\.ext\.sqlalchemy"):
                    getattr(outbox, name)(transaction, *arguments, **options)
            assert transaction._mutations == []
    assert aborted == {"execute_sql": 1}
    assert rows(shop, order) == ([order], [])


class Topic(enum.StrEnum):
    """Values that the driver has no parameter type for must arrive as well."""

    ORDERS = "orders"


class Moment(datetime):
    pass


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (b"", {}),
        (b"hell", {"attributes": {"a": "b"}, "priority": outbox.Priority.LOW, "at_most_once": True}),
        (
            PubsubMessage(data=b"\x00\xff%s@a", attributes={"k": "ü"}, ordering_key="key"),
            {
                "priority": -(2**63),
                "available_at": Moment(2040, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=-7))),
                "expires_at": datetime(2041, 1, 1, tzinfo=UTC),
            },
        ),
    ],
)
def test_a_row_equals_that_of_outbox_register(
    stack: DbApi, shop: Database, message: Any, options: dict[str, Any]
) -> None:
    """In every column and byte, whichever function writes it. CreatedAt is the time of the commit."""
    id = str(uuid.uuid4())
    columns = "* EXCEPT (CreatedAt, Sequence), CreatedAt > TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 MINUTE)"

    def written() -> list[list[Any]]:
        row = query(shop, f"SELECT {columns} FROM AsynchronousTasks WHERE Id IN UNNEST(@ids)", ids=[id])
        with shop.batch() as batch:
            batch.delete("AsynchronousTasks", KeySet(keys=[[id]]))
        return row

    with shop.batch() as batch:
        outbox.register(batch, "orders", message, task_id=id, **options)
    expected = written()
    with stack.transaction() as handle:
        assert stack.register(handle, Topic.ORDERS, message, task_id=id, **options) == id
    assert written() == expected
    with stack.transaction() as handle:
        assert stack.register_once(handle, Topic.ORDERS, message, task_id=id, **options) is True
    assert written() == expected
    assert expected[0][-1] is True


def test_the_task_is_committed_and_rolled_back_with_the_order(stack: DbApi, shop: Database, counter: mock.Mock) -> None:
    """Nothing is left for the next transaction, and no lock. Each call counts once, whatever becomes of it.

    An ID that is taken fails the commit with an error of the layer, such as sqlalchemy.exc.IntegrityError.
    """
    taken, lost, kept = (str(uuid.uuid4()) for _ in range(3))
    with stack.transaction() as handle:
        stack.order(handle, taken)
        stack.register(handle, "orders", b"", task_id=taken)
        assert rows(shop, taken) == ([], [])
    assert rows(shop, taken) == ([taken], [taken])

    def work(id: str) -> None:
        with stack.transaction() as handle:
            stack.order(handle, lost)
            stack.register(handle, "orders", b"", task_id=lost)
            stack.register(handle, "orders", b"a message", task_id=id)
            if id == "raise":
                raise LookupError

    for id, error in (("raise", LookupError), (taken, stack.errors.IntegrityError)):
        with pytest.raises(error) as caught:
            work(id)
        with stack.transaction() as handle:
            stack.order(handle, f"{kept}{id == 'raise'}")
    text = str(caught.value)
    assert re.search(f"{taken}.*Use another ID, or register_once", text)
    assert "YSBtZXNzYWdl" not in text, "the message is in the error"
    assert rows(shop, lost, kept) == ([], [])
    with closing(DbApi(shop)) as other:
        other.order(other._connection, lost)
        other.register(other._connection, "orders", b"", task_id=kept)
        other._connection.autocommit = True  # commits
    assert rows(shop, lost, kept) == ([lost], [kept])
    with stack.transaction() as handle:
        assert stack.register_once(handle, "orders", b"", task_id=kept) is False
        stack.order(handle, kept)
    assert rows(shop, kept) == ([kept], [kept])
    assert counter.increment.call_args_list == [mock.call("outbox.registered_task_count", 1, ["topic:orders"])] * 6


def test_every_replay_inserts_the_same_task(stack: DbApi, shop: Database) -> None:
    """Each transaction is aborted once: at its order, at its task or in its commit. Two tasks per order are committed.

    A mutation would be lost by a replay, and a statement of a replay's own would insert the task again.
    """
    orders = [str(uuid.uuid4()) for _ in range(12)]
    due: list[str] = []
    with aborting(lambda call: call in due and due.pop() == call) as aborted:
        for place, order in enumerate(orders):
            at = ("order", "task", "commit")[place % 3]
            with stack.transaction() as handle:
                due += ["execute_sql"] if at == "order" else []
                stack.order(handle, order)
                due += ["execute_sql"] if at == "task" else []
                register = stack.register_once if place % 2 else stack.register
                register(handle, "orders", order.encode(), task_id=order)
                stack.register(handle, "invoices", order.encode(), task_id=f"{order}-2")
                due += ["commit"] if at == "commit" else []
    assert aborted.total() == len(orders)
    tasks = [*orders, *(f"{order}-2" for order in orders)]
    assert rows(shop, *tasks) == (sorted(orders), sorted(tasks))


def test_all_tasks_of_a_transaction_are_one_statement(stack: DbApi, shop: Database) -> None:
    """Whichever functions registered them, with other columns each. The emulator accepts no second statement."""
    tasks = [outbox.Task("orders", b"", ordering_key="k" * (n % 2), task_id=str(uuid.uuid4())) for n in range(96)]
    first, last, once, again = others = [str(uuid.uuid4()) for _ in range(4)]
    ids = [str(task.task_id) for task in tasks]
    later = datetime(2040, 6, 1, tzinfo=UTC)

    def work(more: int) -> None:
        with stack.transaction() as handle:
            stack.register(handle, "orders", b"", task_id=first, at_most_once=True)
            stack.order(handle, first)
            assert stack.call("register_many", handle, tasks) == ids
            assert stack.call("register_many", handle, []) == []
            assert stack.register_once(handle, "orders", b"", task_id=once, available_at=later) is True
            assert stack.register_once(handle, "orders", b"", task_id=again) is True
            assert stack.register_once(handle, "orders", b"", task_id=again) is False
            stack.register(handle, "orders", b"", task_id=last)
            for _ in range(more):
                stack.register(handle, "orders", b"")

    with pytest.raises(stack.errors.DatabaseError, match="Register fewer tasks in one transaction of a test"):
        work(1)
    assert rows(shop, first, *ids) == ([], [])
    work(0)
    assert rows(shop, *others, *ids) == ([first], sorted([*others, *ids]))
    values = query(
        shop,
        "SELECT AtMostOnce, EXTRACT(YEAR FROM AvailableAt), OrderingKey FROM AsynchronousTasks "
        "WHERE Id IN UNNEST(@ids) ORDER BY Sequence",
        ids=[first, ids[1], once, last],
    )
    assert values == [[True, None, None], [False, None, "k"], [False, 2040, None], [False, None, None]]


def test_cancel_and_register_may_follow_one_another(stack: DbApi, shop: Database) -> None:
    """In any order, also of one key, and for a task that the same transaction has registered it says so."""
    old, new, other = (str(uuid.uuid4()) for _ in range(3))
    with stack.transaction() as handle:
        stack.register(handle, "orders", b"", task_id=old, ordering_key="key")
    with stack.transaction() as handle:
        stack.register(handle, "orders", b"", task_id=new, ordering_key="key")
        assert stack.call("cancel", handle, old) is True
        assert stack.call("cancel", handle, old) is False
        assert stack.register_once(handle, "orders", b"", task_id=other) is True
        with pytest.raises(outbox.InvalidTransaction, match="was registered by the same transaction"):
            stack.call("cancel", handle, new)
        assert stack.register_once(handle, "orders", b"again", task_id=old) is False
    assert rows(shop, old, new, other) == ([], sorted([old, new, other]))


def test_nested_blocks_of_django(shop: Database) -> None:
    """There are no savepoints: an inner block that fails takes the outer one with it, and `register` says so."""
    from django.db import transaction

    lost, kept = str(uuid.uuid4()), str(uuid.uuid4())
    with closing(Django(shop)) as stack:

        def nested(order: str, *, fails: bool) -> None:
            with stack.transaction() as handle:
                stack.order(handle, order)
                with suppress(LookupError), transaction.atomic():
                    stack.register(handle, "orders", b"", task_id=order)
                    if fails:
                        raise LookupError
                if fails:
                    with pytest.raises(outbox.InvalidTransaction, match="has failed and will be rolled back"):
                        stack.register(handle, "orders", b"")

        nested(kept, fails=False)
        nested(lost, fails=True)
    assert rows(shop, kept, lost) == ([kept], [kept])


def test_a_replay_with_another_answer_fails(stack: DbApi, shop: Database) -> None:
    """Another transaction commits the ID before the replay: `register_once` has answered True, which is now wrong.

    `run_in_transaction` runs the whole transaction again, and then the answer is right.
    """
    id, order = str(uuid.uuid4()), str(uuid.uuid4())

    def another() -> None:
        with shop.batch() as batch:
            outbox.register(batch, "orders", b"", task_id=id)

    def work() -> None:
        with stack.transaction() as handle:
            stack.order(handle, order)
            assert stack.register_once(handle, "orders", b"", task_id=id) is True

    due = ["commit"]
    failed = pytest.raises(Exception, match="could not be retried due to a concurrent modification")
    with aborting(lambda call: call in due and due.pop() == call, another), failed:
        work()
    assert rows(shop, id, order) == ([], [id])
    id, due = str(uuid.uuid4()), ["commit"]
    answers: list[bool] = []

    def again(handle: Any) -> str:
        stack.order(handle, order)
        answers.append(stack.register_once(handle, "orders", b"", task_id=id))
        return "the result"

    with aborting(lambda call: call in due and due.pop() == call, another):
        assert stack.run(again) == "the result"
    assert (answers, rows(shop, id, order)) == ([True, False], ([order], [id]))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_function_that_does_not_run_is_refused(stack: DbApi, shop: Database) -> None:
    """An async function, a generator function, and a function that only calls one. Nothing is committed."""
    order = str(uuid.uuid4())

    async def coroutine(*_handle: Any) -> None:
        """Is never run."""

    def generator(*_handle: Any) -> Iterator[None]:
        yield

    def after_an_order(handle: Any) -> Any:
        stack.order(handle, order)
        return coroutine()

    for function in (coroutine, generator, after_an_order):
        with pytest.raises(TypeError, match=r"returned a (coroutine|generator), so its work may not be done\. It must"):
            stack.run(function)
    assert rows(shop, order) == ([], [])
    assert stack.run(lambda *_: iter([order])).__next__() == order  # any other result is the caller's


def test_the_functions_of_the_guide(stack: DbApi, shop: Database) -> None:
    """Those of the style that uses this driver. The others are run with the guide to registering."""
    page = (ROOT / "docs/guide/drivers.md").read_text(encoding="utf-8")
    begin = rf"import outbox\nfrom outbox\.ext import {stack.name}\b"
    [block] = re.findall(rf"^```python\n({begin}.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "page", "exec"), names)

    def call(function: str, argument: Any) -> Any:
        return stack.run(lambda handle: names[function](*([] if stack.name == "django" else [handle]), argument))

    order = f"o-{uuid.uuid4()}"
    assert [call("remind_once", order) for _ in range(2)] == [True, False]
    call("remind_later", order)
    where = f"STARTS_WITH(Id, '{order}/') ORDER BY Id"
    found = query(shop, f"SELECT Id, CancelledBy IS NULL FROM AsynchronousTasks WHERE {where}")
    assert found == [[f"{order}/1", False], [f"{order}/2", True]]
    message = PubsubMessage(attributes={outbox.TASK_ID_ATTRIBUTE: order})
    assert [call("receive", message) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("function", ["register_once", "cancel"])
def test_a_lost_answer_is_an_error(stack: DbApi, function: str) -> None:
    """The driver's `fetchall` returns no rows if it fails, which would look like an ID that exists, or a sent task."""
    arguments = ("orders", b"") if function == "register_once" else ()
    error = pytest.raises(stack.errors.OperationalError, match="Roll back and run the transaction again")
    with mock.patch.object(Cursor, "fetchall", return_value=[]), error, stack.transaction() as handle:
        stack.call(function, handle, *arguments, task_id=str(uuid.uuid4()))


@pytest.mark.parametrize("stack_class", STACKS.values())
def test_a_missing_table_is_named(empty_database: Database, stack_class: type[DbApi]) -> None:
    calls: dict[str, tuple[tuple[Any, ...], dict[str, str]]] = {
        "register": (("orders", b""), {}),
        "register_once": (("orders", b""), {"task_id": "t"}),
        "register_many": (([outbox.Task("orders", b"")],), {}),
        "cancel": ((), {"task_id": "t"}),
        "process_once": ((PubsubMessage(attributes={"asynchronous_task_id": "t"}),), {"consumer": "billing"}),
    }
    with closing(stack_class(empty_database)) as stack:
        for function, (arguments, options) in calls.items():
            table = "ProcessedTasks" if function == "process_once" else "AsynchronousTasks"
            error = stack.errors.DatabaseError if function in ("register", "register_many") else outbox.OutboxError
            missing = pytest.raises(error, match=f"table {table} is missing.*`outbox schema apply`")
            with missing, stack.transaction() as handle:
                stack.call(function, handle, *arguments, **options)


def test_the_layer_above_the_driver_sees_each_statement(shop: Database) -> None:
    """SQLAlchemy's echo and events, and Django's wrappers and log of queries."""
    from django.db import connections

    seen: list[str] = []

    def see_and_run(execute: Any, sql: str, *arguments: Any) -> Any:
        seen.append(sql)
        return execute(sql, *arguments)

    for kind in (SqlAlchemy, Django):
        seen.clear()
        with closing(kind(shop)) as stack, ExitStack() as watching:
            if isinstance(stack, SqlAlchemy):
                event.listen(stack.engine, "before_cursor_execute", lambda *arguments: seen.append(arguments[2]))
            else:
                watching.enter_context(connections["default"].execute_wrapper(see_and_run))
            with stack.transaction() as handle:
                assert stack.call("cancel", handle, "unknown") is False
                stack.register(handle, "orders", b"")
        assert [re.split(r"\s", sql)[0] for sql in seen] == ["@{LOCK_SCANNED_RANGES=exclusive}", "INSERT"]


def refused(register: Callable[[], object], sentence: str) -> None:
    with pytest.raises(outbox.InvalidTransaction, match=re.escape(sentence)):
        register()


def test_sessions_and_connections_of_sqlalchemy(shop: Database) -> None:
    """Sessions, scoped sessions and connections with an open transaction; each wrong use is one clear error."""
    first, second, third = ids = sorted(str(uuid.uuid4()) for _ in range(3))
    with closing(SqlAlchemy(shop)) as stack:

        def register(session: Any, id: str = "") -> None:
            stack.register(session, "orders", b"", task_id=id or None)

        with stack.engine.begin() as connection:
            register(connection, first)
        scoped = scoped_session(sessionmaker(stack.engine))
        with scoped.begin():
            register(scoped, second)
        scoped.remove()
        with stack.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
            refused(lambda: register(connection), "the connection has no open transaction")
            connection.exec_driver_sql("SELECT 1").all()
            register(connection, third)
            connection.commit()
        refused(lambda: register(connection), "the connection is closed")
        for options, sentence in (
            ({"isolation_level": "AUTOCOMMIT"}, "the connection is in autocommit mode"),
            ({"read_only": True}, "the connection has the execution option read_only"),
        ):
            with stack.engine.connect().execution_options(**options) as connection, connection.begin():
                refused(lambda: register(connection), sentence)
        with stack.engine.connect() as connection:
            connection.begin()
            connection.invalidate()
            refused(lambda: register(connection), "the connection is closed or invalidated")
        with Session(stack.engine) as session:
            refused(lambda: register(session), "the session has no open transaction")
            session.begin()
        refused(lambda: register(session), "the session has no open transaction")
        other = sqlalchemy.create_engine("sqlite://")
        foreign = pytest.raises(TypeError, match=r"connection is sqlite3\.Connection\. It must")
        with other.begin() as connection, foreign:
            register(connection)
        other.dispose()
    assert rows(shop, *ids) == ([], ids)


def test_a_session_that_failed_is_refused(shop: Database) -> None:
    """Until it is rolled back. SQLAlchemy marks a session as failed if a flush fails."""

    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "Orders"
        OrderId: Mapped[str] = mapped_column(primary_key=True)

    with closing(SqlAlchemy(shop)) as stack, Session(stack.engine) as session:
        session.add(Order(OrderId="x" * 65))
        with pytest.raises(DBAPIError):
            session.flush()
        refused(lambda: stack.register(session, "orders", b""), "the session's transaction has failed")
        session.rollback()


def test_wrong_uses_of_django(shop: Database) -> None:
    from django.db import connections, transaction
    from django.utils.connection import ConnectionDoesNotExist

    from outbox.ext import django

    with closing(Django(shop)) as stack:
        refused(lambda: django.register("orders", b""), "database 'default' has no atomic block")
        refused(lambda: django.register_once("orders", b"", task_id="t"), "database 'default' has no atomic block")
        with pytest.raises(ConnectionDoesNotExist):
            django.register("orders", b"", using="other")
        with transaction.atomic():
            connections["default"].close()
            refused(lambda: django.register("orders", b""), "has failed and will be rolled back")
        connections["default"].settings_dict["ALLOW_TRANSACTIONS_IN_AUTO_COMMIT"] = False
        try:
            with stack.transaction() as handle:
                refused(lambda: stack.register(handle, "orders", b""), "the connection is in autocommit mode")
        finally:
            del connections["default"].settings_dict["ALLOW_TRANSACTIONS_IN_AUTO_COMMIT"]
