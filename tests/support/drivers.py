"""DB-API, SQLAlchemy and Django on one database, behind one interface, and aborts by force."""

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from google.api_core.exceptions import Aborted
from google.cloud import spanner_dbapi
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.transaction import Transaction
from google.rpc.error_details_pb2 import RetryInfo

from outbox.ext import dbapi

ORDERS = "CREATE TABLE Orders (OrderId STRING(64) NOT NULL, Cents INT64) PRIMARY KEY (OrderId)"
ACCOUNTS = "CREATE TABLE Accounts (AccountId STRING(36) NOT NULL, Cents INT64 NOT NULL) PRIMARY KEY (AccountId)"


class DbApi:
    """The driver itself, and the base of the others."""

    name, module = "dbapi", "google.cloud.spanner_dbapi"
    #: Where an application finds the errors, such as IntegrityError for an ID that exists.
    errors: Any = spanner_dbapi

    def __init__(self, database: Database) -> None:
        self._database = database
        self._client = database._instance._client
        self._instance_id, self._database_id = database._instance.instance_id, database.database_id
        self._open()

    def _open(self) -> None:
        self._connection = spanner_dbapi.connect(self._instance_id, self._database_id, client=self._client)

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """Yield the first argument of `register`. Commit at the end of the block, roll back on its exception."""
        try:
            yield self._connection
        except BaseException:
            self._connection.rollback()
            raise
        self._connection.commit()

    def run(self, work: Callable[[Any], Any]) -> Any:
        """Call `work` with what `transaction` yields, by `run_in_transaction` of the driver's module."""
        return dbapi.run_in_transaction(self._connection, work)

    def connection(self, of: Any) -> Any:
        """Return the DB-API connection of the transaction."""
        return of

    def execute(self, of: Any, sql: str, *parameters: Any) -> None:
        of.cursor().execute(sql, parameters)

    def order(self, of: Any, order: str) -> None:
        """Insert a business row."""
        self.execute(of, "INSERT INTO Orders (OrderId) VALUES (%s)", order)

    def call(self, function: str, of: Any, *arguments: Any, **options: Any) -> Any:
        """Call this function of the driver's module in outbox.ext."""
        called = getattr(importlib.import_module(f"outbox.ext.{self.name}"), function)
        return called(*arguments, **options) if self.name == "django" else called(of, *arguments, **options)

    def register(self, of: Any, *arguments: Any, **options: Any) -> Any:
        return self.call("register", of, *arguments, **options)

    def register_once(self, of: Any, *arguments: Any, **options: Any) -> Any:
        return self.call("register_once", of, *arguments, **options)


class SqlAlchemy(DbApi):
    """Sessions of SQLAlchemy's ORM."""

    name, module = "sqlalchemy", "google.cloud.sqlalchemy_spanner"

    def _open(self) -> None:
        import sqlalchemy.exc

        self.errors = sqlalchemy.exc
        self.engine = sqlalchemy.create_engine(
            f"spanner+spanner:///{self._database.name}", connect_args={"client": self._client}
        )

    def close(self) -> None:
        self.engine.dispose()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        from sqlalchemy.orm import Session

        with Session(self.engine) as session, session.begin():
            yield session

    def run(self, work: Callable[[Any], Any]) -> Any:
        from outbox.ext.sqlalchemy import run_in_transaction

        return run_in_transaction(self.engine, work)

    def connection(self, of: Any) -> Any:
        return of.connection().connection.dbapi_connection

    def execute(self, of: Any, sql: str, *parameters: Any) -> None:
        of.connection().exec_driver_sql(sql, parameters)


class Django(DbApi):
    """The connection "default" of Django."""

    name, module = "django", "django_spanner"

    def _open(self) -> None:
        import django
        from django.conf import settings

        if not settings.configured:
            settings.configure(DATABASES={"default": {"ENGINE": "django_spanner"}}, USE_TZ=True)
            django.setup()
        from django import db
        from django.db import connections
        from google.api_core.datetime_helpers import DatetimeWithNanoseconds

        importlib.import_module(self.module)
        # Django's driver replaces it, in the whole process, with a method that is true for None and other types.
        if "__eq__" in vars(DatetimeWithNanoseconds):
            del DatetimeWithNanoseconds.__eq__

        self.errors = db
        wrapper = connections["default"]
        project = self._client.project
        wrapper.settings_dict |= {
            "PROJECT": project,  # of its spans; it connects to that of GOOGLE_CLOUD_PROJECT, or of the options
            "INSTANCE": self._instance_id,
            "NAME": self._database_id,
            "OPTIONS": {"client": self._client, "project": project},
        }

    def close(self) -> None:
        from django.db import connections

        connections["default"].close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        from django.db import connections, transaction

        with transaction.atomic():
            yield connections["default"]

    def run(self, work: Callable[[Any], Any]) -> Any:
        from django.db import connections

        from outbox.ext.django import run_in_transaction

        return run_in_transaction(work, connections["default"])

    def connection(self, of: Any) -> Any:
        return of.connection

    def execute(self, of: Any, sql: str, *parameters: Any) -> None:
        with of.cursor() as cursor:
            cursor.execute(sql, parameters)


STACKS = {each.name: each for each in (DbApi, SqlAlchemy, Django)}


class _Cause:
    """The part of an ABORTED that the client reads: retry at once."""

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return [("google.rpc.retryinfo-bin", RetryInfo().SerializeToString())]


@contextlib.contextmanager
def aborting(decide: Callable[[str], bool], meanwhile: Callable[[], None] = lambda: None) -> Iterator[Counter[str]]:
    """Abort the calls of the client for which `decide` returns true; it gets "commit" or "execute_sql". Count them.

    `meanwhile` is called before the client retries.
    """
    aborted: Counter[str] = Counter()

    def abort_or(call: Any) -> Any:
        def called(transaction: Transaction, *arguments: Any, **options: Any) -> Any:
            if decide(call.__name__):
                aborted[call.__name__] += 1
                if transaction._transaction_id:
                    transaction.rollback()
                meanwhile()
                raise Aborted("aborted by the test", errors=[_Cause()])
            return call(transaction, *arguments, **options)

        return called

    with contextlib.ExitStack() as patches:
        for name in ("commit", "execute_sql"):
            patches.enter_context(mock.patch.object(Transaction, name, abort_or(getattr(Transaction, name))))
        yield aborted
