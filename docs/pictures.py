"""Takes the pictures of the documentation from real runs on the emulators: `make pictures`.

The terminal and the audit report are shown as they are. No Datadog account is involved: the dashboard is drawn from
`k8s/datadog/dashboard.json` with the samples that workers sent by DogStatsD, so its style is not Datadog's.
"""

import argparse
import base64
import contextlib
import html
import io
import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import matplotlib as mpl
import numpy as np
import uvicorn
from datadog.dogstatsd.base import DogStatsd
from google.cloud import pubsub_v1
from google.cloud.spanner_v1.database import Database
from matplotlib.figure import Figure
from orders import stage
from payments import demo
from PIL import Image

import outbox
import outbox_admin as admin
from outbox.rows.task_table import TaskTable
from outbox.table import ddl
from outbox_admin import console
from outbox_admin.web import visits
from outbox_admin.web.roles import EVERYTHING
from tools import incident

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
TOPICS = ("invoices", "orders", "payments")
SHARDS, WORKERS = 2, 2
#: Who looks at the console.
PERSON = "maria@example.com"
#: Seconds of the run that the dashboard shows. The topic `invoices` is missing in between.
SECONDS, MISSING_FROM, MISSING_UNTIL = 240, 60, 120
#: Seconds of a point in a graph: the workers' gauges have this interval.
BUCKET = 15
#: The groups of the dashboard that are drawn.
GROUPS = ("Health", "Backlog", "Throughput")
CHROMIUM = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
AGGREGATES: dict[str, Callable[[Any], Any]] = {"max": np.max, "avg": np.mean, "sum": np.sum}
STYLE = """
body { margin: 0; font: 14px sans-serif; background: #f4f5f7; color: #222 }
pre { white-space: pre-wrap; margin: 0;
  padding: 16px; background: #16181d; color: #e4e6ea; font: 15px/1.4 'DejaVu Sans Mono', monospace }
.sgr31 { color: #ff7b72 } .sgr33 { color: #e3b341 }
h1 { font-size: 20px; margin: 14px 16px } h2 { font-size: 15px; margin: 0 0 8px } p { margin: 0 16px 14px }
.group { margin: 0 16px 16px; background: #fff; border-radius: 6px; padding: 12px; border: 1px solid #d8dbe0 }
.grid { display: grid; grid-template-columns: repeat(12, 1fr); grid-auto-rows: 62px; gap: 8px }
.widget { border: 1px solid #e3e5e9; border-radius: 4px; padding: 6px; overflow: hidden; font-size: 12px }
.widget img { width: 100% } .value { font-size: 34px; text-align: center; padding: 14px 0; border-radius: 4px }
.white_on_green { background: #2a7e41; color: #fff } .white_on_red { background: #c0392b; color: #fff }
.white_on_yellow { background: #c98a00; color: #fff } li { margin-left: -16px; line-height: 1.6 }
"""


class Sample(NamedTuple):
    """A value that a worker or the application sent to its agent."""

    at: float
    name: str
    value: float
    type: str
    tags: dict[str, str]


def main() -> None:
    """Take all pictures, or those that are named."""
    parser = argparse.ArgumentParser(prog="docs/pictures.py", description=__doc__)
    all_names = ("worker", "audit", "console")
    parser.add_argument("names", nargs="*", default=all_names, choices=all_names)
    names = parser.parse_args().names
    stage.START_SECONDS = 120.0  # other programs may use the machine
    with tempfile.TemporaryDirectory() as folder:
        if "audit" in names:
            demo.demonstrate(3000, Path(folder))
            screenshot(Path(folder, "first-audit/report.html").as_uri(), "audit-report", 900, 1000)
        if "console" in names:
            take_console()
        if "worker" in names:
            run = Run()
            run.play()
            began = run.samples[0].at
            screenshot(write(Path(folder), dashboard(run.samples, began)).as_uri(), "dashboard", 1200, 1930)


def write(folder: Path, body: str) -> Path:
    """Return the file of a page with this body."""
    page = folder / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{body}", encoding="utf-8")
    return page


def screenshot(address: str, name: str, width: int, height: int) -> None:
    """Write `docs/pictures/NAME.png`, with at most 256 colors and without the empty end of the page."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "screenshot.png")
        flags = (f"--user-data-dir={folder}", f"--screenshot={file}", f"--window-size={width},{height}")
        command = [*CHROMIUM, *flags, address]
        subprocess.run(command, check=True, capture_output=True, timeout=120)  # noqa: S603 - constant arguments
        image = Image.open(file).convert("RGB")
    pixels = np.asarray(image)
    used = np.flatnonzero((pixels != pixels[-1, -1]).any(axis=(1, 2)))
    image = image.crop((0, 0, width, min(height, int(used[-1]) + 17)))
    PICTURES.mkdir(exist_ok=True)
    image.quantize(256, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)


def take_console() -> None:
    """Take a picture of each page of a console after an hour with an incident, and of `outbox status --watch`."""
    with stage.emulators():
        made = stage.make("shop", ddl.statements(SHARDS), TOPICS)
        # The pages show one moment, however long the pictures take.
        with incident.played(made, register), mock.patch.object(visits, "FRESH_SECONDS", 3_600.0):
            with served_console(made) as address:
                while b"No figures yet" in urllib.request.urlopen(address, timeout=60).read():  # noqa: S310 - of the console
                    time.sleep(1)
                take_pages(address, TaskTable(made.database))
            take_terminal(watch(made.flags))


def take_pages(address: str, table: TaskTable) -> None:
    """Take a picture of each page."""
    [operation, *_] = admin.operations.latest(table, 1)
    pages = {
        "overview": "", "topic": "topic?name=invoices", "tasks": "tasks?state=dead",
        "task": "task?id=order-31-a", "blocked": "blocked", "workers": "workers",
        "operations": f"operation?id={operation.id}", "search": "search?q=order-31",
    }  # fmt: skip
    for name, path in pages.items():
        screenshot(address + path, f"console-{name}", 1240, 2400)


def take_terminal(text: str) -> None:
    """Take the picture of `outbox status --watch`."""
    colored = re.sub("\x1b\\[(\\d+)m(.*?)\x1b\\[0m", r"<b class=sgr\1>\2</b>", html.escape(text))
    with tempfile.TemporaryDirectory() as folder:
        screenshot(write(Path(folder), f"<pre>{colored}</pre>").as_uri(), "status-watch", 1120, 900)


@contextlib.contextmanager
def served_console(made: stage.Stage) -> Iterator[str]:
    """Serve the console to PERSON for the time of the block, and give its address."""
    app = console.app(made.database, identify=lambda _request: PERSON, roles=EVERYTHING, allow_actions=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


class Run:
    """Workers under load, with an agent that keeps each sample."""

    def __init__(self) -> None:
        """Begin without samples."""
        self.samples: list[Sample] = []

    def play(self) -> None:
        """Register tasks for SECONDS, and delete a topic for some of them."""
        with self._listening(), stage.emulators():
            made = stage.make("shop", ddl.statements(SHARDS), TOPICS)
            outbox.set_metrics(DogStatsd(disable_buffering=True))
            publisher = pubsub_v1.PublisherClient()
            invoices = f"projects/{made.project}/topics/invoices"
            with stage.workers(made, WORKERS) as workers:
                workers.wait_until_polling()
                steps = (
                    (MISSING_FROM, lambda: publisher.delete_topic(topic=invoices)),
                    (MISSING_UNTIL, lambda: publisher.create_topic(name=invoices)),
                    (SECONDS, workers.stop),
                )
                began = time.monotonic()
                for at, step in steps:
                    while (second := time.monotonic() - began) < at:
                        register(made.database, 30 if SECONDS / 6 < second < SECONDS / 3 else 10)
                        time.sleep(0.9)
                    step()
            outbox.set_metrics(None)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            end.bind(("127.0.0.1", 0))
            os.environ["DD_DOGSTATSD_URL"] = f"udp://127.0.0.1:{end.getsockname()[1]}"
            listener = threading.Thread(target=self._listen, args=(end,))
            listener.start()
            try:
                yield
            finally:
                end.sendto(b"", end.getsockname())  # ends the listener
                listener.join()

    def _listen(self, end: socket.socket) -> None:
        while packet := end.recv(1 << 16):
            for line in packet.decode().splitlines():
                name, _, rest = line.partition(":")
                values, kind, *fields = rest.split("|")
                text = next((each[1:] for each in fields if each.startswith("#")), "")
                tags = dict(tag.partition(":")[::2] for tag in text.split(",") if tag)
                self.samples += [Sample(time.time(), name, float(each), kind, tags) for each in values.split(":")]


def register(database: Database, count: int) -> None:
    """Register tasks of all topics in one transaction. One of 20 is scheduled."""

    def insert(transaction: outbox.SupportsInsert) -> None:
        for number in range(count):
            later = datetime.now(UTC) + timedelta(hours=1) if number % 20 == 9 else None
            priority = outbox.Priority.HIGH if number % 5 == 0 else outbox.Priority.NORMAL
            topic = TOPICS[number % len(TOPICS)]
            outbox.register(transaction, topic, b"{}", priority=priority, available_at=later)

    database.run_in_transaction(insert)


def watch(flags: tuple[str, ...]) -> str:
    """Return the first screen of `outbox status --watch` on a terminal."""
    command = [str(Path(sys.executable).with_name("outbox")), "status", "--watch", *flags]
    ours, theirs = pty.openpty()
    wide = os.environ | {"COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=wide)  # noqa: S603 - constant arguments
    text = ""
    try:
        while text.count("\x1b[2J") < 2:  # then the first screen is whole
            text += os.read(ours, 1 << 16).decode()
    finally:
        process.terminate()
        process.wait()
    return "$ outbox status --watch\n" + text.split("\x1b[2J")[1].replace("\x1b[H", "").replace("\r", "")


@dataclass(frozen=True)
class Query:
    """A query of the dashboard: one series of buckets for each group of tags."""

    text: str

    def series(self, samples: list[Sample], began: float) -> dict[str, dict[int, float]]:
        """Return the value of each bucket by group. Template variables match everything."""
        match = re.match(r"(\w+):([\w.]+)\{([^}]*)\}(?: by \{([^}]*)\})?(\.as_rate)?", self.text)
        if match is None:
            raise ValueError(self.text)
        how, name, filters, by, rate = match.groups()
        found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        conditions = [each for each in filters.split(",") if not each.startswith("$")]
        for each in samples:
            tags = {f"{key}:{value}" for key, value in each.tags.items()}
            if each.name == name and all((c.lstrip("!") in tags) != c.startswith("!") for c in conditions):
                group = ", ".join(each.tags.get(tag, "") for tag in (by or "").split(",") if by)
                found[group][int((each.at - began) // BUCKET)].append(each.value)
        if how.startswith("p"):
            return {g: {b: float(np.percentile(v, int(how[1:]))) for b, v in its.items()} for g, its in found.items()}
        part = BUCKET if rate else 1
        return {g: {b: float(AGGREGATES[how](v)) / part for b, v in its.items()} for g, its in found.items()}


def dashboard(samples: list[Sample], began: float) -> str:
    """Return the page of the dashboard's first groups."""
    found = json.loads((ROOT / "k8s/datadog/dashboard.json").read_text(encoding="utf-8"))
    parts = [
        f"<h1>{html.escape(found['title'])}</h1><p>{SECONDS // 60} minutes of {WORKERS} workers on the emulators</p>"
    ]
    for group in (each["definition"] for each in found["widgets"]):
        if group["title"].startswith(GROUPS):
            widgets = "".join(widget(each, samples, began) for each in group["widgets"])
            parts.append(
                f"<div class=group><h2>{html.escape(group['title'])}</h2><div class=grid>{widgets}</div></div>"
            )
    return "".join(parts)


def widget(found: dict[str, Any], samples: list[Sample], began: float) -> str:
    """Return one widget in its place."""
    place, drawn = found["layout"], found["definition"]
    kinds = {"query_value": value, "timeseries": graph}
    body = kinds[drawn["type"]](drawn, samples, began) if drawn["type"] in kinds else monitors()
    area = f"grid-area: {place['y'] + 1} / {place['x'] + 1} / span {place['height']} / span {place['width']}"
    return f'<div class=widget style="{area}">{html.escape(drawn["title"])}{body}</div>'


def monitors() -> str:
    """Return the names of the monitors, which only Datadog can evaluate."""
    names = sorted(path.stem for path in (ROOT / "k8s/datadog/monitors").glob("*.json"))
    return f"<ul>{''.join(f'<li>{name}</li>' for name in names)}</ul>"


def value(drawn: dict[str, Any], samples: list[Sample], began: float) -> str:
    """Return a number, with the color of the first condition that holds."""
    request = drawn["requests"][0]
    query = request["queries"][0]
    points = next(iter(Query(query["query"]).series(samples, began).values()), {0: 0.0})
    by: dict[str, Callable[[Any], Any]] = {"last": lambda its: its[-1], "avg": np.mean, "sum": np.sum, "max": np.max}
    number = float(by[query["aggregator"]]([points[bucket] for bucket in sorted(points)]))
    compare = {">=": np.greater_equal, ">": np.greater, "<": np.less, "<=": np.less_equal}
    conditions = request["formulas"][0].get("conditional_formats", [])
    color = next((c["palette"] for c in conditions if compare[c["comparator"]](number, c["value"])), "")
    return f'<div class="value {color}">{number:,.{drawn.get("precision", 0)}f}</div>'


def graph(drawn: dict[str, Any], samples: list[Sample], began: float) -> str:
    """Return a graph of all its requests."""
    width = 11.4 if "Registered" in drawn["title"] else 5.6
    figure = Figure(figsize=(width, 1.75), layout="constrained")
    axis = figure.subplots()
    for request in drawn["requests"]:
        by_name = {each["name"]: Query(each["query"]).series(samples, began) for each in request["queries"]}
        groups = sorted({group for its in by_name.values() for group in its})
        for formula in request["formulas"]:
            for group in groups:
                points = evaluated(formula["formula"], {name: its.get(group, {}) for name, its in by_name.items()})
                times = [bucket * BUCKET for bucket in points]
                label = group or formula.get("alias", formula["formula"])
                if request["display_type"] == "bars":
                    axis.bar(times, list(points.values()), BUCKET * 0.7, label=label, alpha=0.5)
                else:
                    axis.plot(times, list(points.values()), ".-", label=label)
    axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axis.set_xlim(0, SECONDS)
    axis.grid(color="0.9")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper left", frameon=False, ncols=4)
    written = io.BytesIO()
    figure.savefig(written, format="svg")
    return f'<img src="data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}">'


def evaluated(formula: str, series: dict[str, dict[int, float]]) -> dict[int, float]:
    """Return the formula of each bucket: a name, or a difference of names with `default_zero`."""
    names = re.findall(r"\w+", formula.replace("default_zero", ""))
    buckets = sorted({bucket for name in names for bucket in series[name]})
    zero = "default_zero" in formula
    first, *others = [{b: series[name].get(b, 0.0) for b in buckets if zero or b in series[name]} for name in names]
    return {b: first[b] - sum(each[b] for each in others) for b in first}


if __name__ == "__main__":
    if not shutil.which("chromium"):
        sys.exit("Chromium is missing. On Debian: apt-get install chromium")
    mpl.rcParams.update({"font.size": 8, "svg.fonttype": "none"})
    main()
