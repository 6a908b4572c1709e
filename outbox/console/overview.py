"""The overview: is the outbox healthy, and if not, where."""

from starlette.responses import Response

from outbox.console.charts import sparkline
from outbox.console.rendering import render
from outbox.console.visits import Visit, page


def show(visit: Visit) -> Response:
    """Show the shared status."""
    status = visit.status().value
    topics = sorted({*status.backlog.topics(), *status.controls}) if status else []
    sparklines = {topic: sparkline(visit.console.history.of(topic, status.backlog.as_of)) for topic in topics if status}
    return render(visit, "overview.html", topics=topics, sparklines=sparklines, command=visit.command("status"))


ROUTES = (page("/", show),)
