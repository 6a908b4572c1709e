"""The files that the console serves as they are."""

import base64
import hashlib
import re
from importlib import resources

from outbox.console import visits
from outbox.console.application import routes
from outbox.table.states import STATES

STATIC = resources.files("outbox.console") / "static"
TEMPLATES = resources.files("outbox.console") / "templates"
#: Of dist/htmx.min.js in the npm package htmx.org 2.0.11 (0BSD). A new version is a new hash here.
HTMX = "1v3HXyBOa976mbab8ebUrGm4o2T3eSn0XBNHa0AA9xc="


def test_htmx_is_the_published_file() -> None:
    content = (STATIC / "htmx.min.js").read_bytes()
    assert b'version:"2.0.11"' in content
    assert base64.b64encode(hashlib.sha256(content).digest()).decode() == HTMX


def test_pages_load_nothing_from_elsewhere_and_have_no_inline_code() -> None:
    """The content security policy would block it, silently for a person without the browser's console."""
    served = {route.path for route in routes()}
    for template in TEMPLATES.iterdir():
        text = template.read_text(encoding="utf-8")
        assert not re.search(r"<(script|link|img)[^>]*(https?:)?//", text)
        assert not re.search(r"\son\w+=|\sstyle=|javascript:|<style|\|safe", text)
        assert {f"/static/{name}" for name in re.findall(r"/static/([\w.]+)", text)} <= served


def test_pages_explain_every_state() -> None:
    assert tuple(visits._ENVIRONMENT.get_template("parts.html").module.SENTENCES) == STATES  # type: ignore[attr-defined]  # set by it


def test_htmx_evaluates_no_code() -> None:
    base = (TEMPLATES / "base.html").read_text(encoding="utf-8")
    assert '"allowEval": false' in base
    assert '"includeIndicatorStyles": false' in base
