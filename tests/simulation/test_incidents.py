"""Which alerts follow an incident, and only those: by the monitors and the rules in k8s, as alarms.md says."""

import dataclasses
import re
from collections.abc import Callable

import pytest
from grpc import StatusCode

from tests.manifests.rendering import ROOT
from tests.simulation.audit import BAD, GOOD
from tests.simulation.incidents import HEALTHY, LASTS, MINUTE, Stage, play
from tests.support.alerting import monitors

MONITORS = monitors()
#: Monitors without a rule in PromQL.
ONLY_IN_DATADOG = {"lost-metrics", "inbox-failing"}
STATUS, LATE = "outbox status", "oldest-age error-budget"


@dataclasses.dataclass(frozen=True, slots=True)
class Incident:
    """A row of alarms.md. `alerts` must alert, and `perhaps` may.

    `sentence` is the first problem of `outbox status` and the console, where `...` stands for anything, or empty.
    """

    title: str
    begin: Callable[[Stage], object]
    alerts: str
    sentence: str
    command: str = STATUS
    perhaps: str = ""
    extended: bool = True

    def row(self) -> str:
        """Return the row of the table, in which pages are bold and first, and what may follow is in brackets."""
        names = self.alerts.split()
        alerts = ", ".join(sorted(f"**`{name}`**" if severity(name) == "page" else f"`{name}`" for name in names))
        perhaps = "".join(f" (`{name}`)" for name in self.perhaps.split())
        sentence = f"*{self.sentence}*" if self.sentence else "-"
        return f"| {self.title} | {alerts + perhaps or 'none'} | {sentence} | `{self.command}` |"


def severity(name: str) -> str:
    [found] = [tag for tag in MONITORS[name]["tags"] if tag.startswith("severity:")]
    return str(found.removeprefix("severity:"))


def deploy(stage: Stage) -> None:
    """Replace both workers every four minutes."""
    first, second = stage.nodes
    stage.every(240, lambda: stage.replace(first))
    stage.clockwork.after(60, lambda: stage.every(240, lambda: stage.replace(second)))


def crash(stage: Stage) -> None:
    """Kill a worker six times."""
    stage.every(200, lambda: stage.kill(stage.nodes[0]), times=6)


SILENT = "No heartbeat since ..., of 2 workers: ..."
CHECK, WORKERS = "publishworker check orders", "outbox workers --check"
DENIED, MISSING, AWAY = StatusCode.PERMISSION_DENIED, StatusCode.NOT_FOUND, StatusCode.UNAVAILABLE
INCIDENTS = [
    Incident("A topic refuses the workers", lambda stage: stage.break_topics(DENIED, "orders"),
        f"{LATE} circuit-open", "orders: circuit open for ...: permission_denied", CHECK, "failure-rate"),
    Incident("Pub/Sub refuses the workers everywhere", lambda stage: stage.break_topics(DENIED),
        f"{LATE} backlog-stalled circuit-open", "...: circuit open for ...: permission_denied", perhaps="failure-rate",
        extended=False),
    Incident("A topic is missing", lambda stage: stage.break_topics(MISSING, "orders"),
        f"{LATE} circuit-open", "orders: circuit open for ...: not_found", CHECK, "failure-rate"),
    Incident("Pub/Sub does not answer", lambda stage: stage.break_topics(AWAY),
        f"{LATE} backlog-stalled circuit-open", "...: circuit open for ...: unavailable", perhaps="failure-rate"),
    Incident("A dead task blocks its ordering key", lambda stage: stage.line("k", head=BAD),
        "dead-tasks blocked-keys", "orders: 3 blocked tasks behind k-0 of the key k, which is dead: ...",
        "outbox list --state dead --topic orders"),
    Incident("A scheduled task has tasks of its ordering key behind it", lambda stage: stage.line("k", seconds=86_400),
        "blocked-keys", "orders: 3 blocked tasks behind k-0 of the key k, which is scheduled",
        "outbox list --state blocked --topic orders --limit 5"),
    Incident("A subscriber fails", Stage.fail_subscriber, "inbox-failing subscription-late", ""),
    Incident("A topic is paused and has a backlog", lambda stage: stage.world.set_paused("orders", paused=True),
        "paused-backlog", "orders is paused: ... pending tasks", extended=False),
    Incident("A topic is sent at its limit", lambda stage: stage.load(600, rate_per_second=0.4, burst=1),
        "", "orders is sent at its limit of 0.4 tasks a second, 1 at once: its oldest task has waited ..."),
    Incident("One worker dies", lambda stage: stage.kill(stage.nodes[0]), "", "", WORKERS),
    Incident("A worker dies again and again", crash,
        "crash-loop", "6 workers died within the hour, the last one ... ago: ...", WORKERS),
    Incident("One worker hangs", lambda stage: stage.hang(stage.nodes[0]), "", "", WORKERS),
    Incident("All workers hang", lambda stage: stage.hang(*stage.nodes),
        "no-heartbeat not-measured error-budget", SILENT, extended=False),
    Incident("No worker is left", Stage.stop,
        "no-heartbeat not-measured error-budget", "No live worker, so no task is published. Pending: ..."),
    Incident("The workers lose Spanner, applications do not", lambda stage: stage.cut("spanner"),
        "not-measured error-budget", SILENT, extended=False),
    Incident("The login of the workers expires", lambda stage: stage.refuse("all"),
        "not-measured error-budget", SILENT, "publishworker check"),
    Incident("Spanner refuses writes", lambda stage: stage.refuse("commit", "heartbeat", "record"),
        f"{LATE} backlog-stalled", SILENT, perhaps="failed-commits"),
    Incident("The clocks of the workers are set back an hour", lambda stage: setattr(stage, "behind", 3_600.0), "", ""),
    Incident("An hour with deploys", deploy, "", "", extended=False),
]  # fmt: skip


def broken_limited_topic(stage: Stage) -> None:
    stage.load(100, rate_per_second=0.4, burst=1)
    stage.break_topics(DENIED, "orders")


def one_that_cannot_count(stage: Stage) -> None:
    stage.cannot_count.add(min(node.process.name for node in stage.nodes))


#: What the page does not show: the exceptions hide nothing else.
OTHERS = [
    dataclasses.replace(INCIDENTS[0], title="a limited topic refuses the workers", begin=broken_limited_topic),
    Incident("a worker cannot count the backlog", one_that_cannot_count, "", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    "incident",
    [
        pytest.param(each, id=each.title, marks=[pytest.mark.extended] if each.extended else [])
        for each in (*INCIDENTS, *OTHERS)
    ],
)
def test_an_incident_is_followed_by_its_alerts_and_no_others(incident: Incident) -> None:
    """Both systems, within 20 minutes. Before it, and in an hour with deploys, there is no alert."""
    played = play(incident.begin, minutes=60 if incident.begin is deploy else LASTS)
    wanted, perhaps = {*incident.alerts.split()}, {*incident.perhaps.split()}
    for alerts, without in ((played.datadog, set[str]()), (played.prometheus, ONLY_IN_DATADOG)):
        before, within = (
            {name for minute, names in alerts.items() if minute <= HEALTHY + most for name in names} for most in (0, 20)
        )
        assert (before, wanted - within) == (set(), wanted & without)
        assert set().union(*alerts.values()) <= wanted | perhaps
    texts = [problem.text for problem in played.problems] or [""]
    assert re.fullmatch(".*".join(map(re.escape, incident.sentence.split("..."))), texts[0], re.DOTALL), texts


def test_dead_tasks_alert_until_none_is_dead() -> None:
    def begin(stage: Stage) -> None:
        stage.line("k", head=BAD)
        stage.clockwork.after(
            14 * MINUTE, lambda: stage.table.change("k-0", data=GOOD, available_at=None, attempts=0, last_error=None)
        )

    played = play(begin)
    for alerts in (played.datadog, played.prometheus):
        minutes = [minute - HEALTHY for minute, names in alerts.items() if "dead-tasks" in names]
        assert minutes == [*range(min(minutes), max(minutes) + 1)]
        assert (min(minutes) <= 2, 14 <= max(minutes) <= 20) == (True, True)
    assert played.problems == []


PAGE = (ROOT / "docs/operations/alarms.md").read_text(encoding="utf-8")


def test_the_page_shows_the_incidents() -> None:
    """If this fails, copy the rows to the page."""
    rows = [incident.row() for incident in INCIDENTS]
    assert [line for line in PAGE.splitlines() if line in rows] == rows, "\n".join(rows)


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.title)
def test_an_alert_says_the_first_command(incident: Incident) -> None:
    messages = [MONITORS[name]["message"].replace("{{topic.name}}", "orders") for name in incident.alerts.split()]
    assert not messages or any(f"\n{incident.command}\n" in message for message in messages)


def test_each_alert_has_its_answer_to_missing_data() -> None:
    rows = re.findall(r"^\| (`[\w-]+`(?:, `[\w-]+`)*) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    answers = {name: answer for names, answer in rows for name in re.findall(r"[\w-]+", names)}
    assert answers.keys() == MONITORS.keys()
