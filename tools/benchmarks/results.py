"""Figures as data: the measurements of a section, when and how it ran. Kept as JSON, so that sections may run apart."""

import dataclasses
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outbox.devtools import emulators

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "benchmarks" / "results.json"

PACKAGES = ("google-cloud-spanner", "google-cloud-pubsub", "grpcio", "protobuf", "pyspark", "pyarrow")


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    row: str
    column: str
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """The bound of a figure, `at_least` or at most."""

    what: str
    value: float
    limit: float
    at_least: bool

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """The result of one section; its conditions are a list in Markdown."""

    title: str
    figures: list[Figure]
    conditions: str
    transfers: str
    bars: list[Bar] = dataclasses.field(default_factory=list)
    ran: dict[str, str] = dataclasses.field(default_factory=dict)

    def value(self, row: str, column: str) -> float:
        return next(figure.median for figure in self.figures if (figure.row, figure.column) == (row, column))

    def at_least(self, what: str, value: float, limit: float) -> None:
        self.bars.append(Bar(what, value, limit, at_least=True))

    def at_most(self, what: str, value: float, limit: float) -> None:
        self.bars.append(Bar(what, value, limit, at_least=False))


def figures(samples: Iterable[tuple[str, str, float]]) -> list[Figure]:
    found: dict[tuple[str, str], list[float]] = {}
    for row, column, value in samples:
        found.setdefault((row, column), []).append(float(f"{value:.5g}"))  # as much as is kept
    return [Figure(row, column, values) for (row, column), values in found.items()]


def load(file: Path = FILE) -> dict[str, Section]:
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: _section(data) for name, data in kept.items()}


def save(sections: dict[str, Section], file: Path = FILE) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    data = {name: dataclasses.asdict(section) for name, section in sections.items()}
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _section(data: dict[str, Any]) -> Section:
    created = {"figures": [Figure(**each) for each in data["figures"]], "bars": [Bar(**each) for each in data["bars"]]}
    return Section(**{**data, **created})


def circumstances() -> dict[str, str]:
    versions = [f"{package} {version(package)}" for package in PACKAGES]
    return {
        "machine": f"{os.cpu_count()} cores ({_processor()}), {platform.system()} {platform.release().split('-')[0]}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "commit": _commit(),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "emulators": _emulators(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _emulators() -> str:
    program = emulators._executable(emulators.SPANNER)
    version = program.parents[2] / "VERSION" if program else None
    sdk = f" of Cloud SDK {version.read_text(encoding='utf-8').strip()}" if version and version.exists() else ""
    return f"emulators{sdk} on the same machine"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "publishworker", "outbox", "outbox_admin", "outbox_pipeline"
    )
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" and changes" if changed else "")
