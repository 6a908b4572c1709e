"""The cost page repeats what `tests.benchmarks.cost` computes."""

from dataclasses import astuple
from inspect import signature
from pathlib import Path

from publishworker.process.settings import RelaySettings
from tests.benchmarks.cost import cost

PAGE = Path(__file__).parents[2] / "docs/operations/scaling.md"


def test_full_batches_are_those_of_the_default_settings() -> None:
    default = RelaySettings.read(dict.fromkeys(("project", "instance", "database"), "my-shop"), {}).batch_size
    assert signature(cost).parameters["batch_size"].default == default
    assert f"({default} tasks of one topic, the default of `--batch-size`)" in " ".join(PAGE.read_text().split())


def test_the_cost_page_has_the_results_of_the_function() -> None:
    lines = PAGE.read_text().partition("| per million tasks |")[2].splitlines()[2:10]
    workloads: list[dict[str, int]] = [{}, {"batch_size": 1}, {"tasks_per_key": 10}, {"tasks_per_key": 1}]
    columns = [astuple(cost(1_000_000, **workload)) for workload in workloads]
    expected = [[f"{column[row]:,}" for column in columns] for row in range(len(columns[0]))]
    assert [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines] == expected
