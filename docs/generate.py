"""Write the reference pages from the code: `make docs`. A test compares the pages with the results of `pages`."""

import ast
import csv
import io
import json
import re
import runpy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe

from outbox.program.settings import DatabaseSettings, Field, fields_of
from outbox_admin.tasks.selections import FILTERS
from outbox_admin.tasks.task_flags import flag_of
from outbox_admin.web.console_settings import ConsoleSettings
from outbox_pipeline.job_settings import ArchiveSettings, AuditSettings, JobSettings, RegisterSettings, ReplaySettings
from publishworker.process.worker_settings import RelaySettings, WorkerSettings
from publishworker.pubsub.failures import REASONS, FailureKind, Reason
from publishworker.telemetry.clients import INSTRUMENTS, unit_of
from publishworker.telemetry.metrics import APPLICATION, METRICS, PIPELINE, Metric

REFERENCE = Path(__file__).parent / "reference"
#: Unit, description and type of each metric for Datadog's API and its Terraform provider.
METADATA_COLUMNS = (
    "metric_name", "metric_type", "interval", "unit_name", "per_unit_name", "description", "orientation", "integration",
    "short_name", "curated_metric", "sample_tags",
)  # fmt: skip
#: Of the settings. A flag is above its variable.
COLUMNS = ("flag, variable", "meaning", "default", "allowed")
METADATA = Path(__file__).parents[1] / "k8s" / "datadog" / "metadata.csv"

SETTINGS_INTRO = """\
# Settings

<!-- Written by `make docs` from the settings classes. Change those, not this page. -->

A flag overrides its environment variable, and the variable overrides the default. For a wrong value the command exits
with 2 and prints the source of the value, the value and the allowed values. An empty variable is a value, so unset the
variable to get the default. `outbox` and `publishworker` report unknown variables that begin with `OUTBOX_`.

Variables of other programs keep their names: [Environment of others](#environment-of-others).
[settings.schema.json](settings.schema.json) is a JSON Schema of the variables, for example for a ConfigMap."""

OTHER_FLAGS = """\
## Other flags

| command | flag | meaning |
|---|---|---|
| `publishworker drain` | `--deadline SECONDS` | Stop after this time with exit code 4. The default is no limit. |
| `publishworker check` | `TOPIC ...` | Topics to check in addition to those of pending tasks. |
| `publishworker healthcheck` | `--heartbeat-file` (`OUTBOX_HEARTBEAT_FILE`) | The heartbeat file of the worker. |
| `outbox-pipeline JOB` | `--json` | Print the summary as one line of JSON. |
| `outbox-pipeline archive` | `--purge` | Delete the archived tasks from the table afterwards. |
| `outbox-pipeline archive` | `--read-late` | If a window is too old for a snapshot, read the current state. |
| `outbox-pipeline audit` | `--allow-empty` | Exit with code 0 if no task is in the window. |
| `outbox-pipeline certificate` | `--public-key`, `--archive`, `--received` | \
See [Certify a day](../pipeline/certificate.md). |
| `outbox-pipeline drain` | `--deadline SECONDS` | The same as for `publishworker drain`. |
| `outbox-pipeline replay` | `--dry-run` | Count the selected tasks by topic and change nothing. |
| `outbox-pipeline replay` | `--reason TEXT` | Why, for the record of operations. |
| `outbox emulators` | `--spanner-port`, `--pubsub-port`, `--create`, `--ddl-file`, `--empty`, `--topic`, \
`--subscription`, `--worker`, `--env-file` | \
See [emulators](../guide/testing.md#emulators). |
| `outbox schema` | `--shards`, `--retention`, `--change-stream` | See [the schema](schema.md). |
| `outbox verify` | `--rows`, `--keep`, `--yes`, `--json` | \
See [verify an instance](../operations/commands.md#verify-an-instance). |

## Environment of others

| variable | who reads it | meaning |
|---|---|---|
| `SPANNER_EMULATOR_HOST`, `PUBSUB_EMULATOR_HOST` | all commands | `HOST:PORT` or `[IPV6]:PORT` of an emulator to use. |
| `https_proxy`, `http_proxy`, `no_proxy` | gRPC | The proxy to Spanner and Pub/Sub. Emulators, loopback addresses and \
endpoints without TLS are reached without it. |
| `GOOGLE_CLOUD_PROJECT` | all commands with `--project` | The project without `--project` and `OUTBOX_PROJECT`. |
| `GOOGLE_APPLICATION_CREDENTIALS` | Google's clients | Credentials, if the environment has no service account. |
| `NO_COLOR` | `outbox` | If it is set, tables on a terminal have no colors. |
| `GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW` | the Spanner client | Set it to `false` for emulators before \
1.5.38 if your application has several threads. The worker sets it itself. |
| `DD_DOGSTATSD_URL`, `DD_AGENT_HOST`, `DD_DOGSTATSD_PORT` | `publishworker`, the pipeline | Address of the DogStatsD \
agent. If none is set, no metrics are sent. |
| `DD_ENV`, `DD_SERVICE`, `DD_VERSION` | `publishworker`, the pipeline | Tags of every metric. |
| `OTEL_*` | `publishworker`, the pipeline | [OpenTelemetry](../operations/monitoring.md#opentelemetry), with \
`--metrics opentelemetry`. |
| `CLOUDSDK_ROOT_DIR`, `JAVA_HOME` | `outbox emulators`, the pipeline | Folders of the Cloud SDK and of Java. |"""

METRICS_INTRO = """\
# Metrics

<!-- Written by `make docs` from publishworker/telemetry/metrics.py. Change that, not this page. -->

If an agent is configured ([settings](settings.md#environment-of-others)), the worker sends metrics with DogStatsD. This
needs the extra `spanner-outbox[worker]`. Without an agent it sends no metrics and logs no warning. With `--metrics
opentelemetry` it sends them to a [collector](../operations/monitoring.md#opentelemetry) instead. The worker sends
counts after the commit, so a retried transaction counts once. Tags are bounded: topic, reason and phase, never an ID.

[metadata.csv](../../k8s/datadog/metadata.csv) has units, types and descriptions for Datadog.
[k8s/datadog](../../k8s/datadog/) has the dashboard and the monitors, [k8s/prometheus](../../k8s/prometheus/) the same
alerts in PromQL. In OpenTelemetry the names are the same, and [tags are
attributes](../operations/monitoring.md#opentelemetry)."""

METRICS_OUTRO = """\
## How to query them

- **Collision rate**: already published / (already published + published). It shows how often workers choose the same
  task.
- **Registered minus published** approximates the change of the backlog. It includes rolled-back registrations, and a
  task that is sent again is published twice.
- **Backlog and age** describe the whole table. Two workers send them, so that one that hangs is no gap. Query them by
  `max:`, never by `sum:`. A worker reads them at LOW priority, at most every 15 s, and spends at most a fifth of its
  time on counting.
- **Gauges of one worker** (shards, circuits): two pods with the same tags on one node overwrite each other's values.
  Query circuits by `max:`.
- **Durations** are distributions. If you enable percentiles for a metric, Datadog computes them over all pods.
- **Reasons** of failed attempts are explained in [errors](errors.md)."""

ERRORS_INTRO = """\
# Errors

<!-- Written by `make docs` from publishworker/pubsub/failures.py. Change that, not this page. -->

If an attempt to publish a task fails, the worker records a *reason*. This page lists all reasons, and what the
worker then does. You find the reason at the beginning of `LastError`, in the log, and in the tag `reason` of
`outbox.failed_task_count` and `outbox.dead_task_count`. [What happens to a task](../guide/delivery.md) explains how
the worker retries.

The column *refused* says whether the error proves that Pub/Sub did not accept the message. If it does, a retry
causes no duplicate, and an [at-most-once](../guide/register.md#at-most-once) task is retried."""

ERRORS = {
    FailureKind.CONTENT: """\
The task can never be published, so it is dead at once. The other tasks of its batch are published.""",
    FailureKind.TARGET: """\
The topic accepts no messages until you correct the cause, so the worker opens the topic's circuit. It probes the topic
with at most ten tasks after 1 s, and doubles the delay up to 5 min. Only probed tasks record a failed attempt. They are
dead after `--max-attempts`, but not before they are `--dead-after` old.""",
    FailureKind.OUTAGE: """\
The worker opens the topic's circuit and records no failed attempt. It probes the topic with one random task after 1 s,
and doubles the delay up to 10 s.

After an outage, the worker publishes each affected task in a request of its own. If the same task fails again while
other tasks of the topic are published, the task itself may be the cause. The worker then records a failed attempt,
retries the task with backoff, and it is dead after `--max-attempts`. A message never causes the errors that are
marked as refused, so the worker never records those.""",
    FailureKind.UNKNOWN: """\
All gRPC statuses that are in none of these tables, such as DATA_LOSS. Pub/Sub does not document them for a publish. The
reason is the status in lower case. The worker records a failed attempt for this task only, and retries it with backoff.
The task is dead after `--max-attempts`. Pub/Sub may have accepted the message.""",
}


PYTHON_INTRO = """\
# Python API

<!-- Written by `make docs` from the docstrings. Change those, not this page. -->

These are the public names. The guides show how to use them: [register](../guide/register.md),
[drivers](../guide/drivers.md), [subscribe](../guide/subscribe.md), [test](../guide/testing.md),
[recipes](../guide/recipes.md). [Versions](versions.md) says what else is public."""

#: Of the page of a module.
MODULE_INTRO = """\
# {module}

<!-- Written by `make docs` from the docstrings. Change those, not this page. -->

{about}"""

DBAPI = ("register", "register_once", "register_many", "cancel", "process_once", "run_in_transaction")
#: The public names of each module, in the order of the page.
PYTHON = {
    "outbox": (
        "register", "register_once", "register_many", "cancel", "Task", "Priority", "Message", "TASK_ID_ATTRIBUTE",
        "SupportsInsert", "SupportsReadInsert", "SupportsCancel", "reader", "Reader", "SentTask", "set_metrics",
        "Recorder", "OutboxError", "InvalidMessage", "InvalidTransaction", "InvalidConsumer", "MissingTaskId",
        "PositionExpired",
    ),
    "outbox.inbox": (
        "process_once", "Handler", "BatchHandler", "Receiver", "BatchReceiver", "pushed_message", "ReceivedMessage",
        "PulledMessage", "Handle", "BatchHandle", "Transaction", "Key", "Missing",
    ),
    "outbox.aio": ("register_once", "cancel", "process_once", "run_in_transaction", "AsyncTransaction", "Transaction"),
    "outbox.ext.sqlalchemy": DBAPI,
    "outbox.ext.django": DBAPI,
    "outbox.ext.dbapi": (*DBAPI, "Options"),
    "outbox.testing": (
        "RecordingTransaction", "Mutation", "Statement", "RegisteredTask", "assert_registered",
        "RedeliveringSubscriber",
    ),
    "outbox.testing.faults": ("abort_next_commit", "delay_commits"),
    "publishworker.testing": ("OutboxRelay", "Drained", "Published", "Migrate"),
    "publishworker.hosted": ("HostedRelay",),
    "outbox.table.ddl": ("statements", "tables", "text", "cut"),
    "outbox_pipeline.cli": ("main",),
    "outbox.errors": ("NotReached",),
}  # fmt: skip


def pages() -> dict[Path, str]:
    """Return the text of each generated page by its path."""
    return {
        REFERENCE / "settings.md": _settings(),
        REFERENCE / "metrics.md": _metrics(),
        REFERENCE / "errors.md": _errors(),
        REFERENCE / "python.md": _modules(),
        **{module_page(module): _module(module) for module in PYTHON},
        REFERENCE / "settings.schema.json": _schema(),
        REFERENCE / "statements.md": runpy.run_path(str(Path(__file__).with_name("statements.py")))["page"](),
        METADATA: _metadata(),
        REFERENCE.parent / "llms.txt": _for_machines(),
    }


def _settings() -> str:
    database = list(fields_of(DatabaseSettings))
    shared = {field.name for field in database}
    parts = [
        SETTINGS_INTRO,
        "## Database",
        "For `publishworker run`, `drain`, `check`, `outbox schema apply` and [all commands of \
operators](../operations/commands.md).",
        _table(COLUMNS, map(_row, database)),
        "## Worker",
        "For `publishworker run`, `drain` and `check`. `outbox verify` reads their variables.",
        _table(
            COLUMNS,
            (_row(field) for field in fields_of(WorkerSettings) if field.name not in shared),
        ),
        "## Pipeline",
        "For `outbox-pipeline JOB`, in addition to the database settings. See [the pipeline](../pipeline/register.md).",
        *_jobs(),
        "## Console",
        "For `outbox console`.",
        _table(COLUMNS, map(_row, fields_of(ConsoleSettings))),
        "## Filters of tasks",
        "They narrow the tasks of a command, and those of a page of the console.",
        _table(("flag", "meaning", "commands"), map(_filter, (name for name in FILTERS if FILTERS[name].commands))),
        OTHER_FLAGS,
    ]
    return "\n\n".join(parts) + "\n"


def _filter(name: str) -> tuple[str, ...]:
    found = FILTERS[name]
    help = found.help.format(found.kind.allowed)
    return f"`{flag_of(name)} {found.metavar}`", f"{help}.", ", ".join(f"`{each}`" for each in found.commands)


def _jobs() -> Iterator[str]:
    shared = {field.name for field in fields_of(DatabaseSettings)}
    for title, settings in (
        ("Every job", JobSettings),
        ("register", RegisterSettings),
        ("archive", ArchiveSettings),
        ("audit", AuditSettings),
        ("replay", ReplaySettings),
    ):
        yield f"### {title}"
        fields = [field for field in fields_of(settings) if field.name not in shared]
        yield _table(COLUMNS, map(_row, fields))
        shared |= {field.name for field in fields_of(JobSettings)}
    yield "### drain"
    own = {field.name for field in fields_of(WorkerSettings)} - {field.name for field in fields_of(RelaySettings)}
    without = " and ".join(f"`{field.flag}`" for field in fields_of(WorkerSettings) if field.name in own)
    yield f"The [worker's settings](#worker), except {without}."


def _row(field: Field) -> tuple[str, ...]:
    names = [field.flag, field.variable, *([field.fallback_variable] if field.fallback_variable else [])]
    default = "required" if field.default is None else f"`{field.default}`" if field.default else "empty"
    return "<br>".join(f"`{each}`" for each in names), field.help, default, field.kind.allowed


def _schema() -> str:
    """Return a JSON Schema of environment variables, as in the data of a ConfigMap: all values are strings."""
    settings = (ConsoleSettings, AuditSettings, ReplaySettings, ArchiveSettings, RegisterSettings, WorkerSettings)
    found = {field.variable: field for each in settings for field in fields_of(each)}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Environment variables of outbox, publishworker and outbox-pipeline",
        "$comment": "Written by `make docs` from the settings classes. The programs also check ranges.",
        "type": "object",
        "properties": {name: _property(found[name]) for name in sorted(found)},
        # Not a pattern that begins with (?!, because Helm's schemas have no such patterns.
        "propertyNames": {"anyOf": [{"enum": sorted(found)}, {"not": {"pattern": "^OUTBOX_"}}]},
        "additionalProperties": {"type": "string"},
    }
    return json.dumps(schema, indent=2) + "\n"


def _property(field: Field) -> dict[str, object]:
    kind = field.kind
    form = {"enum": [*kind.choices]} if kind.choices else {"pattern": f"^(?:{kind.pattern})$"} if kind.pattern else {}
    default = {"default": field.default} if field.default else {}
    return {"type": "string", **form, **default, "description": f"{field.help} Allowed: {kind.allowed}."}


_NAVIGATION = r"^( +)- ([^:\n]+):(?: (\S+\.md))?$"


def _for_machines() -> str:
    """Return the index of the pages in the form of https://llmstxt.org, from the navigation of the site."""
    site, project = (
        (REFERENCE.parents[1] / file).read_text(encoding="utf-8") for file in ("mkdocs.yml", "pyproject.toml")
    )
    [name], [about] = (re.findall(rf"^{key}: (.+)$", site, re.MULTILINE) for key in ("site_name", "site_description"))
    [repository] = re.findall(r'^Repository = "https://github.com/(.+)"$', project, re.MULTILINE)
    lines = [f"# {name}", "", f"> {about}", ""]
    for indent, title, page in re.findall(_NAVIGATION, site.partition("\nnav:")[2], re.MULTILINE):
        if page:
            address = f"https://raw.githubusercontent.com/{repository}/main/docs/{page}"
            lines.append(f"- [{title}]({address}): {_first_sentence(REFERENCE.parent / page)}".rstrip(": "))
        elif indent == "  ":
            lines += ["", f"## {title}", ""]
    return "\n".join(lines) + "\n"


def _first_sentence(page: Path) -> str:
    """Return the first sentence of a page, without its links."""
    paragraphs = page.read_text(encoding="utf-8").split("\n\n")
    first = next((each for each in paragraphs if re.match(r"\s*[\w*\[]", each)), "")
    sentence = re.split(r"(?<=[.:]) ", " ".join(first.split()))[0]
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", sentence)


def _metrics() -> str:
    columns = ("name", "meaning", "type and unit", "tags", "OpenTelemetry")

    def row(metric: Metric) -> tuple[str, ...]:
        tags = ", ".join(f"`{tag}`" for tag in metric.tags) or "none"
        instrument = f"{INSTRUMENTS[metric.type]}, `{unit_of(metric)}`"
        return (f"`{metric.name}`", metric.meaning, f"{metric.type}, {metric.unit}", tags, instrument)

    parts = [
        METRICS_INTRO,
        "## Worker",
        _table(columns, map(row, METRICS)),
        "## Pipeline",
        "If an agent is configured, the driver of a job sends them at the end of the job.",
        _table(columns, map(row, PIPELINE)),
        "## Application",
        "Applications and subscribers send them through the client passed to \
[`outbox.set_metrics`](../guide/register.md#metrics).",
        _table(columns, map(row, APPLICATION)),
        METRICS_OUTRO,
    ]
    return "\n\n".join(parts) + "\n"


def _metadata() -> str:
    """Return the file in the format of Datadog's own integrations, which their tools read."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(METADATA_COLUMNS)
    for metric in (*APPLICATION, *METRICS, *PIPELINE):
        short, tags = metric.name.removeprefix("outbox.").replace("_", " "), ",".join(metric.tags)
        about = ("", metric.meaning, metric.orientation)
        writer.writerow((metric.name, metric.type, "", metric.unit, *about, "outbox", short, "", tags))
    return text.getvalue()


def _errors() -> str:
    def row(reason: Reason) -> tuple[str, ...]:
        return (f"`{reason.name}`", reason.source, reason.meaning, "yes" if reason.refused else "unknown")

    parts = [ERRORS_INTRO]
    for kind, text in ERRORS.items():
        parts += [f"## {kind.value.capitalize()}", text]
        if rows := [row(each) for each in REASONS if each.kind is kind]:
            parts.append(_table(("reason", "source", "meaning", "refused"), rows))
    return "\n\n".join(parts) + "\n"


def public() -> Iterator[tuple[str, str, griffe.Object]]:
    """Yield module, name and definition of each public name, from the source, without importing it."""
    search = [Path(__file__).parents[1]]
    packages = {name: griffe.load(name, search_paths=search) for name in ("outbox", "publishworker", "outbox_pipeline")}
    for module, names in PYTHON.items():
        package, _, path = module.partition(".")
        for name in names:
            found = packages[package][f"{path}.{name}".removeprefix(".")]
            yield module, name, _source(found)


def _source(found: griffe.Object | griffe.Alias) -> griffe.Object:
    """Return the definition; a class of the Spanner client stays an alias, because its source is not read."""
    try:
        return found.final_target if isinstance(found, griffe.Alias) else found
    except griffe.AliasResolutionError:
        return found  # type: ignore[return-value]  # only its `target_path` is read


def module_page(module: str) -> Path:
    """Return the path of the page of a module."""
    return REFERENCE / "python" / f"{module.replace('.', '-')}.md"


def _modules() -> str:
    """Return the page with one line for each module."""
    rows = []
    for module, names in PYTHON.items():
        shown = ", ".join(f"`{name}`" for name in names)
        rows.append((f"[{module}](python/{module_page(module).name})", _about(module), shown))
    return f"{PYTHON_INTRO}\n\n{_table(('module', 'about', 'names'), rows)}\n"


def _about(module: str) -> str:
    """Return the first sentence of a module's docstring, without what only a Python shell needs."""
    docstring = ast.get_docstring(ast.parse(_file(module).read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").replace("|", "")


def _file(module: str) -> Path:
    path = Path(__file__).parents[1] / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _module(module: str) -> str:
    parts = [MODULE_INTRO.format(module=module, about=_about(module))]
    shown = examples()
    for _, name, found in (each for each in public() if each[0] == module):
        # The module is in each heading, because a search shows headings.
        parts += [f"## {module}.{name}", *_definition(found, module)]
        if (module, name) in shown:
            parts.append(shown[module, name])
    return "\n\n".join(parts) + "\n"


def _definition(found: griffe.Object, module: str) -> Iterator[str]:
    if isinstance(found, griffe.Alias):
        yield f"The class of the Spanner client, for type hints: `{found.target_path}`."
        return
    if isinstance(found, griffe.Function):
        yield from _signature(found, module)
    elif isinstance(found, griffe.Attribute):
        yield _comment(found)
        yield _code(f"{found.name} = {found.value}")
    yield from _docstring(found)
    if not isinstance(found, griffe.Class):
        return
    methods = [each for each in found.members.values() if isinstance(each, griffe.Function) and each.docstring]
    if not methods and found.attributes:  # a dataclass, an enum or a typed dictionary
        yield _code("\n".join(each.source.strip() for each in found.members.values() if each.is_attribute))
    for method in methods:
        if method.name == "__init__":
            yield from _signature(method, module, name=found.name, return_type=False)
        elif method.name == "__call__" or method.is_public:
            yield from _signature(method, module, name=f"{found.name}.{method.name}")
        else:
            continue
        yield from _docstring(method)


def _signature(function: griffe.Function, module: str, **options: Any) -> Iterator[str]:
    """Yield the signature, and links to the public types in it."""
    text = function.signature(**options)
    yield _code(f"{'async ' if 'async' in function.labels else ''}{text}")
    places = {name: of for of in reversed(PYTHON) for name in PYTHON[of]} | dict.fromkeys(PYTHON[module], module)
    used = sorted({name for name in re.findall(r"\b[A-Z]\w+", text) if name in places})
    links = [f"[{name}]({module_page(places[name]).name}#{_anchor(f'{places[name]}.{name}')})" for name in used]
    if links:
        yield f"Types: {' · '.join(links)}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


#: How the pages call a module. The others they call by its name.
_NAMES = {
    "outbox_sqlalchemy": "outbox.ext.sqlalchemy", "outbox_django": "outbox.ext.django", "dbapi": "outbox.ext.dbapi",
    "inbox": "outbox.inbox", "aio": "outbox.aio", "faults": "outbox.testing.faults", "ddl": "outbox.table.ddl",
}  # fmt: skip
#: The modules whose names the pages import.
_BY_NAME = ("outbox.testing", "outbox_pipeline.cli")


def examples() -> dict[tuple[str, str], str]:
    """Return the first use of each public name on the pages, whose code tests run, by module and name."""
    found: dict[tuple[str, str], str] = {}
    guide = sorted((REFERENCE.parent / "guide").glob("*.md"), key=lambda page: page.name != "register.md")
    for page in (*guide, REFERENCE.parent / "operations/pipeline-platforms.md"):
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            prose = re.sub(r"^```.*?^```", "", text[: block.start()], flags=re.MULTILINE | re.DOTALL)
            heading = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)[-1]
            link = f"[{heading}](../../{page.parent.name}/{page.name}#{_anchor(heading)})"
            for module, name, code in _uses(re.sub(r"^%.*", "", block[1], flags=re.MULTILINE)):
                found.setdefault((module, name), f"Example, from {link}:\n\n```python\n{code}\n```")
    return found


def _uses(code: str) -> Iterator[tuple[str, str, str]]:
    """Yield module, name and the function or the statement of each use of a public name."""
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        first = min(statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", [])), 10**9)
        text = "\n".join(code.splitlines()[first - 1 : statement.end_lineno])
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = _NAMES.get(node.value.id, node.value.id)
                if node.attr in PYTHON.get(module, ()):
                    yield module, node.attr, text
            elif isinstance(node, ast.Name):
                yield from ((module, node.id, text) for module in _BY_NAME if node.id in PYTHON[module])


def _comment(found: griffe.Attribute) -> str:
    """Return the line above a constant or a type, which begins with `#:`."""
    lines = Path(str(found.filepath)).read_text(encoding="utf-8").splitlines()
    return lines[(found.lineno or 0) - 2].removeprefix("#: ")


def _code(text: str) -> str:
    """Return a block of code, where a long signature has one line for each parameter."""
    if len(text) > 100 and "\n" not in text:
        text = re.sub(r", (?=[*/]|\w+: )", ",\n    ", text.replace("(", "(\n    ", 1))
        text = re.sub(r"\)( -> [^)]*)?$", r",\n)\1", text)
    return f"```text\n{text}\n```"


def _docstring(found: griffe.Object) -> Iterator[str]:
    for section in griffe.parse_google(found.docstring, warnings=False) if found.docstring else ():
        if isinstance(section, griffe.DocstringSectionText):
            yield section.value
        elif isinstance(section, griffe.DocstringSectionParameters):
            yield _table(("argument", "meaning"), ((f"`{each.name}`", _line(each)) for each in section.value))
        elif isinstance(section, griffe.DocstringSectionRaises):
            yield _table(
                ("raises", "if"), ((f"`{str(each.annotation).strip('()')}`", _line(each)) for each in section.value)
            )
        else:
            raise TypeError(f"{found.path} has a section of the kind {section.kind}: use text, Args and Raises")


def _line(item: griffe.DocstringElement) -> str:
    return " ".join(item.description.split())


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(_lines(columns, rows))


def _lines(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    (REFERENCE / "python").mkdir(exist_ok=True)
    for module in PYTHON:
        module_page(module).touch()  # the list for machines reads each page
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
