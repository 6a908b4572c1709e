"""The live workers, and where they differ."""

from starlette.responses import Response

from outbox.cli.workers import runs
from outbox.console.rendering import render
from outbox.console.visits import Visit, page


def show(visit: Visit) -> Response:
    """Show the workers of the shared status."""
    return render(visit, "workers.html", runs=runs, command=visit.command("workers"))


ROUTES = (page("/workers", show),)
