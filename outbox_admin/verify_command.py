"""`outbox verify`: check an instance on a scratch database."""

from typing import Any

import outbox_admin as admin
from outbox.program.settings import whole_number
from outbox_admin import flags

DESCRIPTION = """\
Verify plans, locks, roles and commit delays on a scratch database. The command asks, creates
a database with a new name or that of --database, loads tasks, runs the checks and drops it.
It changes no other database, and publishes nothing.

    outbox verify --project my-project --instance main"""


def add(commands: Any) -> None:
    title = "check an instance on a scratch database"
    run: Any = lambda options: admin.verify.verify(options)  # noqa: E731, PLW0108 - it loads the relay, when it runs
    parser = flags.command(commands, "verify", title, DESCRIPTION, run)
    text = "Tasks to load: {} (default 100000)"
    flags.add(parser, "--rows", whole_number(100, 10**9), text, metavar="N", default=100_000)
    flags.switch(parser, "--keep", "Keep the database for inspection")
    flags.switch(parser, "--yes", "Create the database without confirmation")
    flags.switch(parser, "--json", "Print the result and the query plans as JSON")
