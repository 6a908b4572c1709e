"""Blocked keys: one line for each head that other tasks of its key wait for."""

from starlette.responses import Response

from outbox.console.readings import HEADS
from outbox.console.rendering import render
from outbox.console.visits import Visit, page


def show(visit: Visit) -> Response:
    """Show the blocked heads of the shared status."""
    return render(visit, "blocked.html", most=HEADS, command=visit.command("list", state="blocked"))


ROUTES = (page("/blocked", show),)
