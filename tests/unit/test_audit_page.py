"""The audit's report: it shows the whole summary, it is well-formed for any data, and it loads nothing else."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from outbox.program.terminal import escaped
from outbox_pipeline.jobs import audit_transforms as audit
from outbox_pipeline.jobs.audit import page

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
CLASSES = (*audit.STATES, *audit.FLAWS, "messages", "out_of_order", "unknown", "foreign", "unreadable")
HOSTILE = (
    "<script>alert(1)</script>",
    '\' onload="x" &amp; $x^2$ ]]> <!-- </table>',
    "nul \x00 bell \x07 escape \x1b[31m turned \u202e half \ud800 none \uffff",
    "n" * 3000,
    "#0a0b0c",
)
LATENCY = {"p50": 0.0312, "p95": 2.5, "p99": 44.25, "max": 1234.5}


def row(topic: str, tasks: int, **numbers: int) -> dict[str, Any]:
    """Return a line of the summary: so many tasks of a topic, all delivered but those that `numbers` say."""
    others = dict.fromkeys((*audit.STATES, *audit.FLAWS), 0) | numbers
    delivered = tasks - sum(others[name] for name in audit.STATES)
    came = delivered + others["late"]
    seconds = LATENCY if came else dict.fromkeys(LATENCY)
    counts = {"tasks": tasks, **others, "delivered": delivered, "messages": came}
    return {"topic": topic, **counts, **seconds}


def summary(*lines: dict[str, Any], **others: Any) -> dict[str, Any]:
    counts = ("tasks", *audit.STATES, "messages", *audit.FLAWS)
    topics: dict[str, dict[str, Any]] = {}
    for line in lines:
        known = topics.setdefault(line["topic"], {**line, **dict.fromkeys(counts, 0)})
        known.update({name: known[name] + line[name] for name in counts})
    times = {"known_until": "2026-11-20T14:59:59.000000Z", "horizon": "2026-11-20T15:00:00.500000Z"}
    return {
        "job": "audit", "database": HOSTILE[0], "tasks_from": "table and archive", "received_from": HOSTILE[1], **times,
        "data_compared": True, "grace_seconds": 600.0, "since": NOON,
        "until": NOON + timedelta(hours=2), **{name: sum(line[name] for line in lines) for name in counts},
        "out_of_order": 0, "unknown": 0, "foreign": 0, "unreadable": 0, "report": "gs://bucket/audit/report.html",
        "latency": LATENCY if lines else dict.fromkeys(LATENCY),
        "by_topic": sorted(topics.values(), key=lambda line: str(line["topic"])),
        "samples": {}, **others,
    }  # fmt: skip


def rich() -> dict[str, Any]:
    """Return a summary in which every number is another one, and every class has samples."""
    lines = [
        row("orders", 31_000, lost=101, late=23, dead=37, republished=431),
        row("orders", 29_001, pending=59, arriving=67, redelivered=173, mismatched=83),
        row("refunds", 713),
        *(row(name, 11) for name in HOSTILE),
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    for place, name in enumerate((*audit.STATES[1:], *audit.FLAWS, "out_of_order", "unknown")):
        known = {"topic": HOSTILE[place % 5], "created_at": f"2026-11-20T12:{place:02}:01.000001Z"}
        known |= {"sent_at": NOON + timedelta(minutes=place, microseconds=7)}
        known |= {"overtaken_at": f"2026-11-20T12:{place:02}:59.000000Z"} if name == "out_of_order" else {}
        own = {} if name == "unknown" else known
        found[name] = [{"task_id": f"{name} {HOSTILE[place % 5]}", **own, "first_at": NOON, "messages": 7_000 + place}]
    return summary(*lines, out_of_order=89, unknown=97, foreign=1_103, unreadable=109, samples=found)


@pytest.fixture(scope="module")
def rich_page() -> str:
    return page(rich())


def test_the_page_shows_the_numbers_and_the_samples(rich_page: str) -> None:
    data = rich()
    [body] = ET.fromstring(rich_page).iter("body")
    shown_text = " ".join(" ".join(body.itertext()).split())
    for name in CLASSES:
        assert re.search(rf"\b{data[name]:,} +{name.replace('_', ' ')}\b", shown_text), name
    for text in (HOSTILE[0], HOSTILE[1], "table and archive", "10m"):
        assert text in shown_text
    for time in ("12:00:00.000000Z", "14:00:00.000000Z", "14:59:59.000000Z", "15:00:00.500000Z"):
        assert f"2026-11-20T{time}".replace(".000000Z", "Z") in shown_text
    for name, rows in data["samples"].items():
        for value in rows[0].values():
            shown = value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else value
            shown = f"{shown:,}" if isinstance(shown, int) else escaped(shown).replace(".000000Z", "Z")
            assert " ".join(shown.split()) in shown_text, name
    assert "Further messages of a task, after its first. Delivery is at least once." in shown_text
    assert "outbox retry ID" in shown_text


@pytest.mark.parametrize(
    ("data", "kind", "headline"),
    [
        (summary(row("orders", 9, mismatched=3), unknown=2), "good", "\u2713 No task is lost"),
        (summary(row("orders", 9, lost=1)), "bad", "\u2717 1 task is lost"),
        (summary(row("orders", 9_000, lost=2_000)), "bad", "\u2717 2,000 tasks are lost"),
        (summary(since=None), "none", "No task was created in the window"),
    ],
)
def test_the_headline_says_whether_anything_is_lost(data: dict[str, Any], kind: str, headline: str) -> None:
    """Words and a sign say so, not only a color. Other faults are named with a link to their samples."""
    verdict = next(ET.fromstring(page(data | {"samples": {"unknown": [{"task_id": "x"}]}})).iter("header"))
    assert verdict.attrib["class"] == f"verdict {kind}"
    assert verdict.findtext("h1") == headline
    faults = "Other findings: 3 mismatched, 2 unknown." in "".join(verdict.itertext())
    assert faults is bool(data["unknown"])
    assert [link.attrib["href"] for link in verdict.iter("a")] == ["#unknown"] * faults


def test_the_page_loads_nothing_and_runs_no_script(rich_page: str) -> None:
    root = ET.fromstring(rich_page)
    ids = [each.attrib["id"] for each in root.iter() if "id" in each.attrib]
    assert len(ids) == len(set(ids))
    for each in root.iter():
        assert each.tag not in {"script", "link", "img", "image", "iframe", "object", "form", "base"}
        for name, value in each.attrib.items():
            assert not name.startswith("on")
            assert "src" not in name
            if name.endswith("href"):
                assert value[0] == "#"
                assert value[1:] in ids
            assert all(part[0] == "#" and part[1:] in ids for part in re.findall(r"url\(([^)]*)\)", value))
    styles = "".join("".join(each.itertext()) for each in root.iter() if each.tag.endswith("style"))
    assert not re.search(r"url|@import|//", styles)
    [policy] = [each.attrib["content"] for each in root.iter("meta") if "http-equiv" in each.attrib]
    assert policy.startswith("default-src 'none'")


def test_hostile_text_is_escaped(rich_page: str) -> None:
    root = ET.fromstring(rich_page)
    assert root.findtext("head/title") == f"Audit of {HOSTILE[0]}"
    cells = {"".join(each.itertext()) for each in root.iter("td")}
    assert {escaped(text) for text in HOSTILE} <= cells
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", rich_page)
