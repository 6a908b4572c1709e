"""`outbox emulators`: run the Spanner and Pub/Sub emulators in the foreground, for a shell, a demo or tests."""

import argparse
import functools
import os
import signal
import time
from typing import Any

from outbox.admin import flags
from outbox.base.values import TOPIC_ID
from outbox.errors import OutboxError, SettingError
from outbox.program.output import note
from outbox.program.settings import PREFIX, DatabaseSettings, matching, whole_number
from outbox.program.terminal import say
from outbox.table.ddl import cut

PORT = whole_number(0, 65_535)
PUBSUB_ID = matching(TOPIC_ID, "an ID that Pub/Sub allows, such as orders")

#: Seconds between two checks that the emulators are running.
WATCH_SECONDS = 0.2

DESCRIPTION = """\
Run the Spanner and Pub/Sub emulators until Ctrl-C or SIGTERM, and print the environment
variables for clients. If SPANNER_EMULATOR_HOST or PUBSUB_EMULATOR_HOST is set, that
emulator is not started, unless you pass its port.

--create creates a database with the outbox's tables, --topic a topic, and --subscription a
subscription to the topic before it. Databases, topics and subscriptions that exist are kept.

    outbox emulators
    outbox emulators --create my-project/main/shop --topic orders --subscription billing"""

WHY_NOT_MULTIPLEXED = (
    "# Emulators before 1.5.38 treat a multiplexed session as a regular one, so the transactions of two threads",
    "# close each other (404 Transaction not found). The Spanner client then needs this:",
)


PLACE = matching("[^/]+/[^/]+/[^/]+", "PROJECT/INSTANCE/DATABASE, such as my-project/main/shop")


def _of_kind(kind: str, text: str) -> tuple[str, str]:
    return kind, PUBSUB_ID.value(text, f"--{kind}")


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "emulators", "run both emulators until Ctrl-C", DESCRIPTION, run)
    for name in ("Spanner", "Pub/Sub"):
        flag = f"--{name.lower().replace('/', '')}-port"
        flags.add(parser, flag, PORT, f"Port of the {name} emulator; 0, the default, selects a free one", default=0)
    text = "Create this database with the outbox's tables"
    flags.add(parser, "--create", PLACE, text, metavar="PROJECT/INSTANCE/DATABASE")
    text = "DDL of your own tables for a new database. Each statement ends with a semicolon."
    parser.add_argument("--ddl-file", metavar="FILE", help=text)
    for kind in ("topic", "subscription"):
        # Both flags append to one list, because the order says to which topic a subscription belongs.
        parser.add_argument(
            f"--{kind}", type=functools.partial(_of_kind, kind), dest="pubsub", action="append", default=[],
            metavar="ID", help=f"Create this {kind} in the project of --create; may be repeated.",
        )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run both until a signal, then return 0. Raises OutboxError: invalid port, no emulator, or an emulator exited."""
    from outbox.devtools.emulators import running  # noqa: PLC0415 - only this command needs it

    place, ddl = _plan(options)
    # Treat SIGTERM, and SIGHUP from a closed terminal, like Ctrl-C, so that both emulators are stopped.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with running(options.spanner_port, options.pubsub_port) as emulators:
            variables = emulators.environment()
            if place:
                os.environ.update(variables)  # the clients read it
                from outbox.devtools import resources  # noqa: PLC0415 - the clients: half a second

                resources.create(place, ddl, options.pubsub)
                others = "".join(f", {kind} {id}" for kind, id in options.pubsub)
                note(f"database {options.create} with the outbox's tables{others}: ready")
                names = ("project", "instance", "database")
                variables = {PREFIX + name.upper(): getattr(place, name) for name in names} | variables
            *exports, last = (f"export {name}={value}" for name, value in variables.items())
            say(*exports, *WHY_NOT_MULTIPLEXED, last)
            if not emulators.children:
                note("nothing to start: both variables are set, and both emulators respond")
                return 0
            note("Running. Press Ctrl-C to stop the emulators, which deletes all their data")
            while (ended := emulators.ended()) is None:
                time.sleep(WATCH_SECONDS)
            raise OutboxError(ended)
    except KeyboardInterrupt:
        return 0


def _plan(options: argparse.Namespace) -> tuple[DatabaseSettings | None, list[str]]:
    """Return the database of `--create` and the statements of `--ddl-file`. Raises SettingError."""
    if options.create is None:
        if options.pubsub or options.ddl_file:
            raise SettingError("--topic, --subscription and --ddl-file need --create PROJECT/INSTANCE/DATABASE")
        return None, []
    if options.pubsub and options.pubsub[0][0] == "subscription":
        raise SettingError("--subscription needs a --topic before it")
    place = DatabaseSettings.read(
        dict(zip(("project", "instance", "database"), options.create.split("/"), strict=True))
    )
    return place, cut(flags.read_text(options.ddl_file, "--ddl-file: ") if options.ddl_file else "")
