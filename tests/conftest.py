"""One pair of emulators for a run, and an empty database and a topic for each test, in any order.

A test that needs an emulator is skipped where there is none, and fails where CI is set.
"""

import os

# Before any Google client is created. Not multiplexed: outbox/devtools/emulators.py says why.
if not os.environ.get("TEST_SPANNER"):
    os.environ["GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW"] = "false"
# gRPC may end a process that is forked here before it becomes another program, as PySpark does it with Java:
# https://github.com/grpc/grpc/issues/43055
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# A developer's own settings must not reach a test.
for _name in [name for name in os.environ if name.startswith(("OUTBOX_", "DD_")) or name == "GOOGLE_CLOUD_PROJECT"]:
    del os.environ[_name]

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import hypothesis
import pytest
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import outbox
from outbox.devtools.emulators import Emulators
from outbox.program import terminal
from tests.support import real, spanner
from tests.support.pubsub import PubSub, Subscription

# No time limit for an example, because the machine may be busy. `make mutants` needs no smallest failing example.
hypothesis.settings.register_profile("ours", hypothesis.settings.default, deadline=None)
hypothesis.settings.register_profile(
    "mutants", deadline=None, derandomize=True, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
)
hypothesis.settings.load_profile("ours")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--long`: outages last for a minute, random histories are many more, and others each time."""
    parser.addoption(
        "--long",
        action="store_true",
        help="outages of 60 s instead of 10 s, an hour of random histories instead of minutes",
    )
    parser.addoption("--seed", type=int, default=0, help="seed of the random choices in tests/faults")
    parser.addoption("--figures", metavar="FILE", help="append the result of each trial as a line of JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests with a long form, and skip tests without another form unless `--long` is given."""
    for item in items:
        mark = item.get_closest_marker("long")
        if mark or "long" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long_form)
        if real.NAMED and (only := item.get_closest_marker("emulator_only")):
            item.add_marker(pytest.mark.skip(reason=f"needs the emulator: {only.args[0]}"))
        if mark and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason=f"--long; {mark.args[0]}"))


@pytest.fixture(autouse=True)
def _text_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test inherit the format of the lines of a program that an earlier one has started in this process."""
    monkeypatch.setattr(terminal, "as_log_line", None)


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether this run has `--long`."""
    return bool(request.config.getoption("--long"))


@pytest.fixture
def set_metrics() -> Iterator[Callable[[Any], None]]:
    yield outbox.set_metrics
    outbox.set_metrics(None)


@pytest.fixture
def counter(set_metrics: Callable[[Any], None]) -> mock.Mock:
    """The recorder of applications, which notes its calls."""
    created = mock.Mock()
    set_metrics(created)
    return created


@pytest.fixture
def outcomes(counter: mock.Mock) -> list[str]:
    """The outcomes of messages in the inbox, as they are counted."""
    counted: list[str] = []
    counter.increment.side_effect = lambda _name, _value, tags: counted.append(tags[1].partition(":")[2])
    return counted


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """A tracer provider for application, relay and subscriber, and its exported spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # the API lets it be set once only
    return exporter


@pytest.fixture(scope="session")
def emulators(request: pytest.FixtureRequest) -> Iterator[Emulators]:
    """Both emulators; the environment points to them until the end of the run."""
    with contextlib.ExitStack() as stack:
        if real.NAMED:
            os.environ["SPANNER_EMULATOR_HOST"] = stack.enter_context(real.endpoint())
        created = Emulators(*map(request.getfixturevalue, ("spanner_emulator", "pubsub_emulator")))
        variables = created.environment()
        stack.enter_context(mock.patch.dict(os.environ, variables | real.settings(variables)))
        yield created


@pytest.fixture(scope="session")
def spanner_instance(emulators: Emulators) -> Instance:
    """`test-instance` of `test-project`."""
    return spanner.instance(emulators.spanner_host)


@pytest.fixture
def empty_database(spanner_instance: Instance) -> Iterator[Database]:
    """A database without tables."""
    with spanner.fresh_database(spanner_instance) as created:
        yield created


@pytest.fixture(scope="session")
def _pool(spanner_instance: Instance) -> Iterator[spanner.Pool]:
    pool = spanner.Pool(spanner_instance)
    yield pool
    pool.drop()


@pytest.fixture
def database(_pool: spanner.Pool) -> Iterator[Database]:
    """A database with the outbox's tables, empty. The test may not change its schema."""
    with _pool.database() as lent:
        yield lent


@pytest.fixture
def own_database(spanner_instance: Instance) -> Iterator[Database]:
    """A database with the outbox's tables for a test that changes its schema."""
    with spanner.outbox_database(spanner_instance) as created:
        yield created


@pytest.fixture(scope="session")
def pubsub(emulators: Emulators) -> PubSub:
    """The admin side of the Pub/Sub emulator."""
    return PubSub.on(emulators.pubsub_host)


@pytest.fixture
def new_subscription(pubsub: PubSub) -> Callable[..., Subscription]:
    """Make further subscriptions: `new_subscription(topic, ordered=False)`."""
    return pubsub.new_subscription


@pytest.fixture
def topic(pubsub: PubSub) -> str:
    """The full name of a fresh topic."""
    return pubsub.new_topic()


@pytest.fixture
def subscription(pubsub: PubSub, topic: str) -> Subscription:
    """A pull subscription on `topic`."""
    return pubsub.new_subscription(topic)
