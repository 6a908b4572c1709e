"""The dashboard and the monitors as documents: what Datadog's API takes, and what a person on call needs."""

import argparse
import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from datadog_api_client.model_utils import (
    ModelComposed,
    ModelNormal,
    OpenApiModel,
    UnparsedObject,
    validate_and_convert_types,
)

from outbox import cli as outbox_cli
from outbox.errors import SettingError
from publishworker import cli as publishworker_cli
from tests.manifests.datadog_queries import KNOWN, UNITS, complaints_about, complaints_about_alarm, metrics_in

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s" / "datadog"
#: What each message says, in this order.
PARTS = ("**What it means:**", "**What users feel:**", "**Do first:**", "**Runbook:**")


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return _read(FOLDER / "dashboard.json")


def monitors() -> dict[str, dict[str, Any]]:
    """Return the monitors by the names of their files."""
    return {file.stem: _read(file) for file in sorted((FOLDER / "monitors").glob("*.json"))}


def _read(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def complaints_of_api(document: Mapping[str, Any], model: type[OpenApiModel]) -> Iterator[str]:
    """Yield what the API's model does not know: the client itself takes unknown values and fields without a word."""
    try:
        parsed = validate_and_convert_types(document, (model,), [model.__name__], True, True)
    except (TypeError, ValueError, AttributeError) as error:
        yield f"{type(error).__name__}: {error}"
        return
    yield from _unknown(parsed, model.__name__)


def _unknown(value: object, path: str) -> Iterator[str]:
    """Walk through what was parsed; a model that has an unparsed part is unparsed itself, so the deepest is named."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _unknown(each, f"{path}[{index}]")
    elif isinstance(value, UnparsedObject):
        yield f"{path} is nothing that the API knows"
    elif isinstance(value, ModelComposed):
        for each in value._composed_instances:
            yield from _unknown(each, path)
    elif isinstance(value, ModelNormal):
        for name, each in value._data_store.items():
            if name not in value.openapi_types:
                yield f"{path}.{name} is no field of {type(value).__name__}"
            yield from _unknown(each, f"{path}.{name}")
    elif isinstance(value, OpenApiModel) and value._unparsed:
        yield f"{path} has a value that the API does not know: {value}"


def leaves(widgets: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the definitions of widgets that are no groups."""
    for widget in widgets:
        definition = widget["definition"]
        if definition["type"] == "group":
            yield from leaves(definition["widgets"])
        else:
            yield definition


def requests(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the title of the graph and the request, for all requests of the dashboard."""
    for definition in leaves(document["widgets"]):
        for request in definition.get("requests", []):
            yield definition["title"], request


def complaints_of_dashboard(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with what the dashboard asks for and how it shows it."""
    variables = {each["name"] for each in document["template_variables"]}
    used: set[str] = set()
    for title, request in requests(document):
        queries = {query["name"]: query["query"] for query in request["queries"]}
        for expression in queries.values():
            used |= {part.lstrip("$") for query in metrics_in(expression) for part in query.scope if part[0] == "$"}
            yield from (f"{title}: {each}" for each in complaints_about(expression, variables))
        yield from (f"{title}: {each}" for each in _about_formulas(request["formulas"], queries))
    yield from (f"nothing looks at ${variable}" for variable in sorted(variables - used))
    yield from _about_places("dashboard", document["widgets"])


def _about_formulas(formulas: list[dict[str, Any]], queries: Mapping[str, str]) -> Iterator[str]:
    named = {name for each in formulas for name in re.findall(r"[a-z]\w*", each["formula"])} - {"default_zero"}
    yield from (f"no query is named {name}" for name in sorted(named - set(queries)))
    yield from (f"no formula shows {name}" for name in sorted(set(queries) - named))
    for each in formulas:
        unit = each.get("number_format", {}).get("unit", {})
        if unit.get("unit_name") not in UNITS:
            yield f"{each['formula']} has no unit of Datadog's"
        for query in metrics_in(queries.get(each["formula"], "")):  # shown as it is, so its unit is that of the table
            expected = (KNOWN[query.name].unit if query.name in KNOWN else None, "as_rate" in query.calls)
            if (unit.get("unit_name"), unit.get("per_unit_name") == "second") != expected:
                yield f"{query.name} is shown in {unit}"


def _about_places(where: str, widgets: list[dict[str, Any]]) -> Iterator[str]:
    """In a dashboard of fixed places every widget has one, inside of 12 columns and of its own."""
    taken: set[tuple[int, int]] = set()
    for widget in widgets:
        place, title = widget["layout"], widget["definition"].get("title") or "a widget without a title"
        columns = range(place["x"], place["x"] + place["width"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["height"])}
        if columns.stop > 12 or cells & taken:
            yield f"{where}: {title} is where others are, or outside"
        taken |= cells
        if widget["definition"]["type"] == "group":
            yield from _about_places(title, widget["definition"]["widgets"])


def complaints_of_monitor(monitor: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the query, the options and the message of a monitor."""
    yield from complaints_about_alarm(monitor["query"], monitor["options"])
    yield from _about_message(monitor)
    severity = "page" if monitor["priority"] <= 2 else "warn"
    if f"severity:{severity}" not in monitor["tags"]:
        yield f"priority {monitor['priority']} is not tagged severity:{severity}"
    scopes = {part for query in metrics_in(monitor["query"]) for part in query.scope}
    if not scopes <= set(monitor["tags"]):
        yield f"the monitor looks at {sorted(scopes)}, and is tagged {monitor['tags']}"


def _about_message(monitor: Mapping[str, Any]) -> Iterator[str]:
    message = monitor["message"]
    places = [message.find(part) for part in PARTS]
    if -1 in places or places != sorted(places):
        yield f"the message does not have the parts {', '.join(PARTS)}"
    groups = {tag for query in metrics_in(monitor["query"]) for tag in query.by}
    named = set(re.findall(r"\{\{(\w+)\.name\}\}", message + monitor["name"]))
    yield from (f"the monitor has no {{{{{tag}.name}}}}" for tag in sorted(named - groups))
    links = re.findall(r"docs/[\w/-]+\.md#[\w-]+", message)
    if not links:
        yield "the message links to no heading"
    for link in links:
        page, _, heading = link.partition("#")
        if heading not in headings(page):
            yield f"{link} is no heading"
    commands = [line for block in re.findall(r"```\n(.*?)```", message, re.DOTALL) for line in block.splitlines()]
    if not commands:
        yield "the message has no command"
    yield from (each for line in commands for each in complaints_of_command(line))


@cache
def headings(page: str) -> frozenset[str]:
    """Return what a link may name in a page: its headings outside of blocks of code, as they are in links."""
    file = ROOT / page
    if not file.is_file():
        return frozenset()
    text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in found)


@cache
def _parsers() -> dict[str, argparse.ArgumentParser]:
    return {"outbox": outbox_cli._parser(), "publishworker": publishworker_cli._parser()}


def complaints_of_command(line: str) -> Iterator[str]:
    """Yield why a command of a message would not run: its own parser says so, or the runbook does not know it."""
    program, *arguments = shlex.split(re.sub(r"\{\{(\w+)\.name\}\}", r"\1", line))
    if program not in _parsers():
        yield f"{line!r} is none of our commands"
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _parsers()[program].parse_args(arguments)
    except (SystemExit, SettingError) as error:
        yield f"{line!r}: {error} {said.getvalue()}"
        return
    runbook = (ROOT / "docs/operations/runbook.md").read_text(encoding="utf-8")
    if not re.search(rf"^\$ {program} {arguments[0]}\b", runbook, re.MULTILINE):
        yield f"the runbook does not use `{program} {arguments[0]}`"
