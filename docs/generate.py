"""Write the reference pages from the code: `make docs`. A test compares the pages with the results of `pages`."""

import csv
import io
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import python_reference
from python_reference import PYTHON, REFERENCE, table

from outbox.program.settings import DatabaseSettings, Field, fields_of, flag_of
from outbox_admin.tasks.selections import FILTERS
from outbox_admin.web.console_settings import ConsoleSettings
from outbox_pipeline.job_settings import ArchiveSettings, AuditSettings, JobSettings, RegisterSettings, ReplaySettings
from publishworker.process.worker_settings import RelaySettings, WorkerSettings
from publishworker.pubsub.failures import REASONS, FailureKind, Reason
from publishworker.telemetry.clients import INSTRUMENTS, unit_of
from publishworker.telemetry.metrics import APPLICATION, METRICS, PIPELINE, Metric

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
| `outbox-pipeline replay` | `--to TOPIC` | Publish to this topic instead, and change no task. |
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
with one task after 1 s, and doubles the delay up to 5 min. Only probed tasks record a failed attempt. They are
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


def pages() -> dict[Path, str]:
    """Return the text of each generated page by its path."""
    return {
        REFERENCE / "settings.md": _settings(),
        REFERENCE / "metrics.md": _metrics(),
        REFERENCE / "errors.md": _errors(),
        REFERENCE / "python.md": python_reference.modules(),
        **{python_reference.module_page(module): python_reference.page_of(module) for module in PYTHON},
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
        table(COLUMNS, map(_row, database)),
        "## Worker",
        "For `publishworker run`, `drain` and `check`. `outbox verify` reads their variables.",
        table(
            COLUMNS,
            (_row(field) for field in fields_of(WorkerSettings) if field.name not in shared),
        ),
        "## Pipeline",
        "For `outbox-pipeline JOB`, in addition to the database settings. See [the pipeline](../pipeline/register.md).",
        *_jobs(),
        "## Console",
        "For `outbox console`.",
        table(COLUMNS, map(_row, fields_of(ConsoleSettings))),
        "## Filters of tasks",
        "They narrow the tasks of a command, and those of a page of the console.",
        table(("flag", "meaning", "commands"), map(_filter, (name for name in FILTERS if FILTERS[name].commands))),
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
        yield table(COLUMNS, map(_row, fields))
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
        table(columns, map(row, METRICS)),
        "## Pipeline",
        "If an agent is configured, the driver of a job sends them at the end of the job.",
        table(columns, map(row, PIPELINE)),
        "## Application",
        "Applications and subscribers send them through the client passed to \
[`outbox.set_metrics`](../guide/register.md#metrics).",
        table(columns, map(row, APPLICATION)),
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
            parts.append(table(("reason", "source", "meaning", "refused"), rows))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (REFERENCE / "python").mkdir(exist_ok=True)
    for module in PYTHON:
        python_reference.module_page(module).touch()  # the list for machines reads each page
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
