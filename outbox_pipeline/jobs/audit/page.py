"""The report of an audit as one page of HTML that needs nothing else: no script, no network, no other file."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from outbox.cli.output import cell
from outbox.shared.times import spoken
from outbox_pipeline.jobs.audit.plots import STATES, latencies, tasks_per_hour

#: Rows of the table of topics, and plots of topics; summary.json has them all.
MOST_ROWS, MOST_PLOTS = 200, 8

#: Each number of the summary, in groups, with what it means.
_GROUPS = {
    "Tasks of the window": {
        "delivered": "Received in time.",
        "late": "Received, but first published a grace or more after the window had ended.",
        "lost": "Marked as sent, given the grace to arrive, and not received.",
        "arriving": "Sent less than a grace before the messages end; not received yet.",
        "pending": "Not sent yet.",
        "dead": "Given up by the relay: not sent, and will not be.",
    },
    "Their messages": {
        "messages": "Messages of the window's tasks that were received, repeats of one message left out.",
        "republished": "Messages of a task beyond its first: at least once, as is promised.",
        "redelivered": "Deliveries of a message beyond its first: Pub/Sub's own repeats.",
        "mismatched": "Messages whose attributes, or data where the files have it, are not those of their task.",
        "out_of_order": "Tasks that were published before an earlier task of their ordering key.",
    },
    "Other messages": {
        "unknown": "Ids in messages that no task has.",
        "foreign": "Deliveries that are none of the outbox: without a task's id.",
        "unreadable": "Deliveries without a message id, a publish time or attributes that can be read.",
    },
}
#: Those that should be 0, the worst first.
_WRONG = ("lost", "mismatched", "unknown", "out_of_order", "dead", "unreadable")
#: What to do about the samples of each class, in the order of the page. Parts between ` are code.
_ADVICE = {
    "lost": "Look first whether the files have the topic at all: where all of a topic is lost, its subscription is "
    "missing from the export. Then send them again: `outbox retry ID`, or all by `jq .task_id "
    "findings/class=lost/*.json | outbox retry --ids-file -`. A task that was purged is registered anew, from the "
    "archive.",
    "mismatched": "The body was changed on its way, or the row after it was sent, or something else publishes with "
    "this id. Compare `outbox show ID` with what the subscriber has. All are in `findings/class=mismatched`.",
    "unknown": "Something published an id that is not in the tasks: rows that were deleted without the archive, a "
    "publisher beside the outbox, another database on the same topic. All are in `findings/class=unknown`.",
    "out_of_order": "Is ordering switched on for the subscription, and does one database alone publish to the key? "
    "overtaken_at is when the earlier task came. All are in `findings/class=out_of_order`.",
    "dead": "See why: `outbox list --state dead`. When the reason is mended, `outbox retry --state dead`; "
    "`outbox discard` deletes them.",
    "late": "They came, so nothing is to be sent again; see in the plots when, and what the workers did then. All are "
    "in `findings/class=late`.",
    "republished": "Subscribers must take repeats: by task_id, once. Many of them tell of workers that are killed "
    "or of commits that take long. All are in `findings/class=republished`.",
    "redelivered": "Subscribers must take repeats. Many of them tell of acknowledgements that come too late. All are "
    "in `findings/class=redelivered`.",
    "pending": "Nothing, if workers run: `outbox status` has the backlog and its age.",
    "arriving": "Nothing: an audit with a later `--until` judges them.",
}
_SAMPLED = ("task_id", "topic", "created_at", "sent_at", "first_at", "overtaken_at", "messages")
_LATENCIES = ("p50", "p95", "p99", "max")

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2128; --soft: #59636e; --line: #d1d9e0; --well: #f6f8fa;
  --good: #116329; --good-well: #dafbe1; --bad: #a40e26; --bad-well: #ffebe9; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --well: #151b23;
    --good: #56d364; --good-well: #12261e; --bad: #ff7b72; --bad-well: #2d1517; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 75rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 60rem; }
a { color: inherit; }
code { font-size: .9em; background: var(--well); padding: .1em .3em; border-radius: .25rem; }
.kind, .note, figcaption { color: var(--soft); font-size: .875rem; }
.verdict { margin: .5rem 0 1.5rem; padding: 1rem 1.25rem; border: 1px solid var(--line); border-left: .6rem solid;
  border-radius: .5rem; background: var(--well); }
.verdict.good { border-color: var(--good); background: var(--good-well); }
.verdict.bad { border-color: var(--bad); background: var(--bad-well); }
.verdict.good h1 { color: var(--good); }
.verdict.bad h1 { color: var(--bad); }
.facts, .numbers { display: grid; gap: .75rem 1.5rem; margin: 0; grid-template-columns: repeat(auto-fill,
  minmax(min(100%, 17rem), 1fr)); }
.facts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
.numbers { gap: .75rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; }
.number { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; break-inside: avoid; }
.number b { font-size: 1.4rem; font-variant-numeric: tabular-nums; margin-right: .3rem; }
.number p { color: var(--soft); font-size: .85rem; line-height: 1.35; margin: .15rem 0 0; }
.number.zero, .number.zero b { color: var(--soft); font-weight: 400; }
.number.wrong { border: 2px solid var(--bad); }
.number.wrong b { color: var(--bad); }
.plots { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; break-inside: avoid; min-width: 0; }
.plots figure { max-width: 36rem; }
figure.wide { overflow-x: auto; }
figure.wide svg { min-width: 34rem; }
figcaption { color: var(--ink); }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; }
.table { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { padding: .35rem .5rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { background: var(--well); vertical-align: bottom; overflow-wrap: normal; }
td { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.text { white-space: normal; min-width: 11rem; }
.right { text-align: right; }
td.zero { color: var(--soft); }
td.wrong { color: var(--bad); font-weight: 700; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .table { overflow: visible; border: 0; }
  table { font-size: 6.5pt; }
  th, td { padding: .15rem .25rem; }
  td.text { min-width: 6rem; }
  figure.wide svg { min-width: 0; }
  .plots { grid-template-columns: 1fr 1fr; }
  tr { break-inside: avoid; } }
"""


def page(summary: Mapping[str, Any]) -> str:
    """Return the page of a summary, as the audit writes it; times may be texts of RFC 3339 or datetimes.

    It is well-formed as XML, too. Latencies in the summary are seconds.
    """
    database = _text(summary["database"])
    parts = [
        f'<p class="kind">Audit of the outbox in {database}</p>',
        _verdict(summary),
        _facts(summary),
        *(_numbers(title, meanings, summary) for title, meanings in _GROUPS.items()),
        _plots(summary),
        _topics(summary),
        _samples(summary["samples"]),
    ]
    body = "\n".join(part for part in parts if part)
    # What is in a row can load nothing, even if it were not escaped.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="{policy}"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>Audit of {database}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _verdict(summary: Mapping[str, Any]) -> str:
    lost, tasks = summary["lost"], summary["tasks"]
    if lost:
        kind, words = "bad", f"\u2717 {lost:,} {'task is' if lost == 1 else 'tasks are'} lost"
    elif tasks:
        kind, words = "good", "\u2713 Nothing is lost"
    else:
        kind, words = "none", "No task was created in the window"
    states = ", ".join(f"{summary[name]:,} {name}" for name in STATES if summary[name])
    said = f"{tasks:,} {'task was' if tasks == 1 else 'tasks were'} judged: {states}." if tasks else "Nothing to judge."
    others = [f"{summary[name]:,} {_link(name, summary)}" for name in _WRONG if summary[name] and name != "lost"]
    also = f"<p>Not as it should be, {'too' if lost else 'all the same'}: {', '.join(others)}.</p>" if others else ""
    return f'<header class="verdict {kind}"><h1>{words}</h1><p>{said}</p>{also}</header>'


def _link(name: str, summary: Mapping[str, Any]) -> str:
    """Return the name of a class, linked to its samples if there are any."""
    words = _words(name)
    return f'<a href="#{name}">{words}</a>' if summary["samples"].get(name) else words


def _facts(summary: Mapping[str, Any]) -> str:
    since = _time(summary["since"]) if summary["since"] else "the first task"
    facts = {
        "Database": _text(summary["database"]),
        "Tasks created": f"from {since}<br/>before {_time(summary['until'])}",
        "Tasks and messages are known until": _time(summary["horizon"]),
        "Unknown ids are judged of messages before": _time(summary["known_until"]),
        "Grace": spoken(summary["grace_seconds"]),
        "Clock skew": spoken(summary["clock_skew_seconds"]),
        "Tasks read from": _text(summary["tasks_from"]),
        "Messages read from": _text(summary["received_from"]),
        "Compared": "data and attributes" if summary["data_compared"] else "attributes: the messages are without data",
        "The audit took": spoken(summary["seconds"]),
    }
    pairs = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{pairs}</dl>'


def _numbers(title: str, meanings: Mapping[str, str], summary: Mapping[str, Any]) -> str:
    numbers = []
    for name, meaning in meanings.items():
        mark = "! " if summary[name] and name in _WRONG else ""  # for those who do not see the colour
        words = f"<b>{mark}{summary[name]:,}</b> {_link(name, summary)}"
        numbers.append(f'<div class="number{_tone(name, summary[name])}">{words}<p>{meaning}</p></div>')
    return f'<h2>{title}</h2><div class="numbers">{"".join(numbers)}</div>'


def _tone(name: str, number: int) -> str:
    return " zero" if not number else " wrong" if name in _WRONG else ""


def _plots(summary: Mapping[str, Any]) -> str:
    hours, lines, latency = summary["by_hour"], summary["by_hour_and_topic"], summary["latency"]
    if not hours:
        return ""
    drawn = tasks_per_hour(hours)
    parts = [
        f"<h2>Tasks per hour of their creation</h2>{_missing(hours, summary)}",
        f'<figure class="wide">{drawn}</figure>',
    ]
    largest = sorted(summary["by_topic"], key=lambda row: (-row["tasks"], row["topic"]))
    received = [row["topic"] for row in largest if row["max"] is not None]
    shown = received[:MOST_PLOTS]
    if shown:
        total = ", ".join(f"{name} {_seconds(latency[name])} s" for name in _LATENCIES)
        parts.append("<h2>Latency</h2><p>From the creation of a task to its first message, by the hour of creation.")
        parts.append(f"All topics: {total}.</p>")
        if len(received) > len(shown):
            note = f"The {MOST_PLOTS} largest of {len(received):,} topics; the table has more."
            parts.append(f'<p class="note">{note}</p>')
        figures = latencies(lines, shown)
        pairs = zip(shown, figures, strict=True)
        plots = "".join(f"<figure><figcaption>{_text(name)}</figcaption>{svg}</figure>" for name, svg in pairs)
        parts.append(f'<div class="plots">{plots}</div>')
    return "\n".join(parts)


def _missing(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return a note if these lines of the summary are not all that there were."""
    told = sum(line["tasks"] for line in lines)
    if told == summary["tasks"]:
        return ""
    note = f"The summary has no more than {len(lines):,} lines of them: {told:,} of {summary['tasks']:,} tasks."
    return f'<p class="note">{note}</p>'


def _topics(summary: Mapping[str, Any]) -> str:
    rows = sorted(summary["by_topic"], key=lambda row: (-row["lost"], -row["tasks"], row["topic"]))
    if not rows:
        return ""
    counts = ("tasks", *STATES, "mismatched")
    heads = ["topic", *counts, "duplicates per 1,000 tasks", *(f"{name},\u00a0s" for name in _LATENCIES)]
    lines = []
    for row in rows[:MOST_ROWS]:
        cells = [f'<td class="text">{_text(row["topic"])}</td>']
        cells += [f'<td class="right{_tone(name, row[name])}">{row[name]:,}</td>' for name in counts]
        duplicates = 1000 * (row["republished"] + row["redelivered"]) / row["tasks"]
        cells.append(f'<td class="right">{duplicates:,.1f}</td>')
        cells += [f'<td class="right">{_seconds(row[name])}</td>' for name in _LATENCIES]
        lines.append("".join(cells))
    note = "Those with lost tasks come first, then the largest. Duplicates are republished and redelivered."
    if len(rows) > MOST_ROWS:
        note += f" {MOST_ROWS} of {len(rows):,} topics; summary.json has the others."
    return f'<h2>Topics</h2>{_missing(rows, summary)}<p class="note">{note}</p>{_table(heads, lines, 1)}'


def _samples(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    parts = []
    for name, advice in _ADVICE.items():
        if not (rows := samples.get(name)):
            continue
        heads = [head for head in _SAMPLED if any(row.get(head) is not None for row in rows)]
        lines = ["".join(_sampled(head, row.get(head)) for head in heads) for row in rows]
        parts.append(f'<h3 id="{name}">{_words(name).capitalize()}</h3><p>{_code(advice)}</p>')
        parts.append(_table(heads, lines, len(heads)))
    if not parts:
        return ""
    clocks = "created_at and sent_at are Spanner's times; first_at is when Pub/Sub took the first message."
    return f'<h2>Samples</h2><p class="note">{clocks}</p>' + "\n".join(parts)


def _sampled(head: str, value: Any) -> str:
    return f"<td>{_time(value)}</td>" if head.endswith("_at") else f'<td class="text">{_text(value)}</td>'


def _table(heads: Sequence[str], lines: Sequence[str], texts: int) -> str:
    """Return a table of rows of cells; the first columns are texts, the others numbers."""
    kinds = ["text"] * texts + ["right"] * (len(heads) - texts)
    cells = "".join(f'<th class="{kind}">{head}</th>' for kind, head in zip(kinds, heads, strict=True))
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table><thead><tr>{cells}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _code(text: str) -> str:
    """Return a text of this module with its parts between ` as code."""
    parts = text.split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _seconds(value: float | None) -> str:
    if value is None:
        return "\u2013"
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _text(value: object) -> str:
    """Return a value from the data as HTML: nothing in it is markup or a control character."""
    return escape(cell(value))


def _time(value: str | datetime | None) -> str:
    return _text(value).replace(".000000Z", "Z")
