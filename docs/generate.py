"""Write the reference pages that are made of the code: `make docs`. A test holds the pages to what this returns."""

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from outbox.cli.emulators import EmulatorSettings
from outbox.cli.output import OutputSettings
from outbox.shared.settings import DatabaseSettings, Field, fields_of
from outbox_pipeline.settings import (
    ArchiveSettings,
    AuditSettings,
    DrainSettings,
    JobSettings,
    RegisterSettings,
    ReplaySettings,
)
from publishworker.healthcheck import MAX_AGE
from publishworker.pubsub.errors import REASONS, FailureKind, Reason
from publishworker.settings import RelaySettings, WorkerSettings
from publishworker.telemetry.metrics import METRICS, PIPELINE, REGISTERED, Metric

REFERENCE = Path(__file__).parent / "reference"
#: Units, descriptions and types as Datadog's API and its Terraform provider want them for each metric.
METADATA_COLUMNS = (
    "metric_name", "metric_type", "interval", "unit_name", "per_unit_name", "description", "orientation", "integration",
    "short_name", "curated_metric", "sample_tags",
)  # fmt: skip
METADATA = Path(__file__).parents[1] / "k8s" / "datadog" / "metadata.csv"

SETTINGS_INTRO = """\
# Settings

<!-- Written by `make docs` from the lists of fields in the code: change those, not this page. -->

A flag wins over its environment variable, which wins over the default. A wrong value ends the command with exit code 2
and a sentence that names where the value came from, the value, and what is allowed. An empty variable is a value, too:
unset it to get the default. `outbox` and `publishworker` report variables that begin with `OUTBOX_` and that no setting
knows.

Variables that are not ours keep their own names: [Environment of others](#environment-of-others)."""

OTHER_FLAGS = f"""\
## Flags that are no settings

| command | flag | meaning |
|---|---|---|
| `publishworker drain` | `--deadline SECONDS` | Give up after this time with exit code 4; without it, never. |
| `publishworker check` | `TOPIC ...` | Topics to look at beside those of pending rows. |
| `publishworker healthcheck` | `--heartbeat-file` (`OUTBOX_HEARTBEAT_FILE`) | The worker's file of that name. |
| `publishworker healthcheck` | `--max-age` (`OUTBOX_MAX_AGE`) | Oldest heartbeat, in seconds; default {MAX_AGE:g}. |
| `outbox-pipeline JOB` | `--json` | The summary as one line of JSON. |
| `outbox-pipeline archive` | `--purge` | Then delete the archived tasks from the table. |
| `outbox-pipeline archive` | `--read-late` | Read a window that is too old for a snapshot as of now. |
| `outbox-pipeline audit` | `--allow-empty` | Exit with code 0 if no task is in the window. |
| `outbox-pipeline drain` | `--deadline SECONDS` | As for `publishworker drain`. |
| `outbox-pipeline replay` | `--dry-run` | Count the selected tasks by topic and change nothing. |
| `outbox-pipeline replay` | `--resume ID` | Continue an interrupted replay with its own selection. |
| `outbox emulators` | `--create`, `--ddl-file`, `--topic`, `--subscription` | \
See [the emulators](../operations/worker.md#emulators). |
| `outbox schema` | `--shards`, `--retention`, `--change-stream` | See [the schema](../guide/schema.md). |

## Environment of others

| variable | who reads it | meaning |
|---|---|---|
| `SPANNER_EMULATOR_HOST`, `PUBSUB_EMULATOR_HOST` | all commands | `HOST:PORT` of an emulator, instead of the service. |
| `GOOGLE_CLOUD_PROJECT` | all commands with `--project` | The project, if neither the flag nor ours is given. |
| `GOOGLE_APPLICATION_CREDENTIALS` | Google's clients | Credentials, where no service account gives them. |
| `GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW` | the Spanner client | `false` against emulators before 1.5.38; \
the worker sets it there by itself, an application with several threads must. |
| `DD_DOGSTATSD_URL`, `DD_AGENT_HOST`, `DD_DOGSTATSD_PORT` | `publishworker`, the pipeline | Where the DogStatsD agent \
is; none of them set: no metrics. |
| `DD_ENV`, `DD_SERVICE`, `DD_VERSION` | `publishworker`, the pipeline | Tags of every metric. |
| `CLOUDSDK_ROOT_DIR`, `JAVA_HOME` | `outbox emulators`, the pipeline | Where the emulators, and Java, are. |"""

METRICS_INTRO = """\
# Metrics

<!-- Written by `make docs` from publishworker/telemetry/metrics.py: change that, not this page. -->

The worker sends DogStatsD if an agent is configured ([settings](settings.md#environment-of-others)); that needs the
extra `spanner-outbox[worker]`. Without an agent it sends nothing and warns of nothing. Counts are sent after a commit
has returned, so a transaction that is run again counts once. Tags are bounded: a topic, a reason, never an id.

Units, types and descriptions for Datadog are in [metadata.csv](../../k8s/datadog/metadata.csv); what to draw and when
to be released is in [k8s/datadog](../../k8s/datadog/)."""

METRICS_OUTRO = """\
## Reading them

- **Collision rate**: already published / (already published + published). It says how often workers
  meet on the same task.
- **Registered minus published** is only about the backlog: a rolled-back registration counts, a task that is sent again
  counts twice.
- **Backlog and age** are of the whole table, and sent by the worker that owns shard 0; while workers change they may
  come from two. Ask for them by `max:`, never by `sum:`. They are read at LOW priority at most every 15 s, and a count
  that takes long is made less often: it takes a fifth of the time at most.
- **Gauges of one worker** (shards, breakers): two pods on a node whose tags are the same overwrite each other. Ask for
  breakers by `max:`.
- **Durations** are distributions: Datadog computes percentiles over all pods, once they are switched on for the metric.
- **Reasons** of failed attempts are those of [the table of errors](errors.md)."""

ERRORS_INTRO = """\
# Errors

<!-- Written by `make docs` from publishworker/pubsub/errors.py: change that, not this page. -->

What a failed attempt to publish a task costs, and whom. The reason is the tag of `outbox.failed_task_count` and
`outbox.dead_task_count`, and the beginning of `LastError`. The whole story: [what happens to a
task](../guide/delivery.md). What Pub/Sub has surely not taken cannot come twice; an at-most-once task gets its row
back."""

ERRORS = {
    FailureKind.CONTENT: """\
The task itself cannot be published, now or later: it is dead at once. Its neighbours are published.""",
    FailureKind.TARGET: """\
Nothing can be published to the topic until somebody mends it: the topic rests. It is probed with at most ten tasks,
after 1 s, then twice as long each time, up to 5 min. Only probed tasks are recorded an attempt. They are dead after
`--max-attempts`, but not before they are `--dead-after` old.""",
    FailureKind.OUTAGE: """\
The topic rests, and no task is recorded an attempt. It is probed with a single task, drawn at random, after 1 s, then
twice as long each time, up to 10 s. A task that met the topic's last outage goes out in a request of its own. If it
has an outage again while the topic publishes others, it is recorded on it: backoff, then dead after
`--max-attempts`.
What no message can cause, the errors that are surely refusals, is recorded to none.""",
    FailureKind.UNKNOWN: """\
Nobody knows: the task is recorded an attempt. Backoff, then dead after `--max-attempts`. A gRPC status that is in none
of these tables counts as this.""",
}


def pages() -> dict[Path, str]:
    """Return the text of each generated page by its path."""
    return {
        REFERENCE / "settings.md": _settings(),
        REFERENCE / "metrics.md": _metrics(),
        REFERENCE / "errors.md": _errors(),
        METADATA: _metadata(),
    }


def _settings() -> str:
    database = list(fields_of(DatabaseSettings))
    shared = {field.name for field in database}
    parts = [
        SETTINGS_INTRO,
        "## Database",
        "For `publishworker run`, `drain`, `check`, `outbox schema apply` and [all commands of \
operators](../operations/commands.md).",
        _table(("flag", "variable", "default", "allowed", "meaning"), map(_row, database)),
        "## Worker",
        "For `publishworker run`, `drain` and `check`.",
        _table(
            ("flag", "variable", "default", "allowed", "meaning"),
            (_row(field) for field in fields_of(WorkerSettings) if field.name not in shared),
        ),
        "## Pipeline",
        "For `outbox-pipeline JOB`, plus the settings of the database. See [its pages](../pipeline/register.md).",
        *_jobs(),
        "## Emulators",
        "For `outbox emulators`.",
        _table(("flag", "variable", "default", "allowed", "meaning"), map(_row, fields_of(EmulatorSettings))),
        "## Output",
        "For all commands of `outbox`.",
        _table(("flag", "variable", "default", "allowed", "meaning"), map(_row, fields_of(OutputSettings))),
        OTHER_FLAGS,
    ]
    return "\n\n".join(parts) + "\n"


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
        yield _table(("flag", "variable", "default", "allowed", "meaning"), map(_row, fields))
        shared |= {field.name for field in fields_of(JobSettings)}
    yield "### drain"
    own = {field.name for field in fields_of(WorkerSettings)} - {field.name for field in fields_of(RelaySettings)}
    without = " and ".join(f"`{field.flag}`" for field in fields_of(WorkerSettings) if field.name in own)
    yield f"And [those of a worker](#worker), but for {without}."
    shared |= {field.name for field in fields_of(RelaySettings)}
    fields = [field for field in fields_of(DrainSettings) if field.name not in shared]
    yield _table(("flag", "variable", "default", "allowed", "meaning"), map(_row, fields))


def _row(field: Field) -> tuple[str, ...]:
    variables = [field.twin, *([field.variable] if field.variable else [])]
    default = "required" if field.default is None else f"`{field.default}`"
    return (
        f"`{field.flag}`",
        " or ".join(f"`{each}`" for each in variables),
        default,
        field.kind.allowed,
        field.help,
    )


def _metrics() -> str:
    columns = ("name", "type", "unit", "tags", "meaning")

    def row(metric: Metric) -> tuple[str, ...]:
        tags = ", ".join(f"`{tag}`" for tag in metric.tags) or "none"
        return (f"`{metric.name}`", metric.type, metric.unit, tags, metric.meaning)

    parts = [
        METRICS_INTRO,
        "## Of the worker",
        _table(columns, map(row, METRICS)),
        "## Of the pipeline",
        "Sent by the driver of a job at its end, if an agent is configured there.",
        _table(columns, map(row, PIPELINE)),
        "## Of the application",
        "Through the client given to [`outbox.set_metrics`](../guide/register.md#metrics).",
        _table(columns, [row(REGISTERED)]),
        METRICS_OUTRO,
    ]
    return "\n\n".join(parts) + "\n"


def _metadata() -> str:
    """Return the file in the form of Datadog's own integrations, so that their tools take it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(METADATA_COLUMNS)
    for metric in (REGISTERED, *METRICS, *PIPELINE):
        short = metric.name.removeprefix("outbox.").replace("_", " ")
        tags = ",".join(metric.tags)
        writer.writerow(
            (metric.name, metric.type, "", metric.unit, "", metric.meaning, metric.better, "outbox", short, "", tags)
        )
    return text.getvalue()


def _errors() -> str:
    def row(reason: Reason) -> tuple[str, ...]:
        return (f"`{reason.name}`", reason.source, reason.meaning, "yes" if reason.refused else "not known")

    parts = [ERRORS_INTRO]
    for kind, text in ERRORS.items():
        rows = (row(each) for each in REASONS if each.kind is kind)
        parts += [
            f"## {kind.value.capitalize()}",
            text,
            _table(("reason", "from", "meaning", "surely not taken"), rows),
        ]
    return "\n\n".join(parts) + "\n"


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(_lines(columns, rows))


def _lines(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
