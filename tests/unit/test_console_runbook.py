"""Each reason of an error leads to a section of the runbook that exists."""

import re
from pathlib import Path
from typing import Any

from outbox.console.visits import _ENVIRONMENT
from publishworker.pubsub.errors import REASONS, FailureKind

PARTS: Any = _ENVIRONMENT.get_template("parts.html").module
RUNBOOK = Path(__file__).parents[2] / "docs/operations/runbook.md"


def test_every_reason_leads_to_a_section_that_exists() -> None:
    headings = re.findall(r"^#+ (.+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    sections = {reason.name: PARTS.runbook(f"{reason.name}: 404").partition("#")[2] for reason in REASONS}
    assert set(sections.values()) - {""} <= anchors
    assert {name for name, section in sections.items() if not section} == {
        reason.name for reason in REASONS if reason.kind is FailureKind.UNKNOWN
    }


def test_other_errors_lead_to_the_whole_runbook() -> None:
    for error in ("", ": x", "by hand: x"):
        assert PARTS.runbook(error).endswith("/docs/operations/runbook.md")
