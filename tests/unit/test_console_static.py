"""The files of the console: those that it serves as they are, and its templates."""

import base64
import hashlib
import re
from importlib import resources
from pathlib import Path
from typing import Any

from outbox.console.application import files
from outbox.console.visits import _ENVIRONMENT, FILES
from outbox.table.states import STATES
from publishworker.pubsub.failures import REASONS, FailureKind

STATIC = resources.files("outbox.console") / "static"
TEMPLATES = resources.files("outbox.console") / "templates"
PARTS: Any = _ENVIRONMENT.get_template("parts.html").module
RUNBOOK = Path(__file__).parents[2] / "docs/operations/runbook.md"
#: Of dist/idiomorph.min.js in the npm package idiomorph 0.8.0 (0BSD). A new version is a new hash here.
IDIOMORPH = "TL1TXK92Y6Ue2pvOZZU3HDhPxDDVS41BTimmEWfxn5Y="


def test_idiomorph_is_the_published_file() -> None:
    content = (STATIC / "idiomorph.min.js").read_bytes()
    assert base64.b64encode(hashlib.sha256(content).digest()).decode() == IDIOMORPH


def test_pages_load_nothing_from_elsewhere_and_have_no_inline_code() -> None:
    """The content security policy would block it, silently for a person without the browser's console."""
    served = {name: path for name, (path, _) in FILES.items()}
    assert files().keys() == {*served.values()}
    for template in TEMPLATES.iterdir():
        text = template.read_text(encoding="utf-8")
        assert not re.search(r"<(script|link|img)[^>]*(https?:)?//", text)
        assert not re.search(r"\son\w+=|\sstyle=|javascript:|<style|\|safe", text)
        assert set(re.findall(r"FILES\[.([^\]]+).\]", text)) <= served.keys()
        assert "/static/" not in text


def test_pages_explain_every_state() -> None:
    assert tuple(PARTS.SENTENCES) == STATES


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
        assert PARTS.runbook(error).strip() == "operations/runbook.md"
