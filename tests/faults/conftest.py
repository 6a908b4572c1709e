"""A trial for each scenario, with a seed of its own that `--seed` changes; `--figures` keeps the result."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.pubsub import PubSub
from tests.support.trial import Trial


@pytest.fixture
def trial(
    request: pytest.FixtureRequest, emulators: Emulators, database: Database, pubsub: PubSub, tmp_path: Path
) -> Iterator[Trial]:
    """A database, two topics, their subscribers, and an application; always the same random choices."""
    seed: int = request.config.getoption("--seed")
    created = Trial(emulators, database, pubsub, seed + crc32(request.node.name.encode()), tmp_path)
    yield created
    file = request.config.getoption("--figures")
    if file and created.figures:
        parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        name = parameters.get("scenario", request.node.originalname.removeprefix("test_"))
        about = {"scenario": name, "seed": seed, "long": request.config.getoption("--long")}
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(about | dataclasses.asdict(created.figures) | created.notes) + "\n")


@pytest.fixture(scope="session")
def fault_seconds(long: bool) -> float:
    return 60.0 if long else 2.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(2400 if config.getoption("--long") else 600))
