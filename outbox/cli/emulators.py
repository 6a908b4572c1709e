"""`outbox emulators`: the Spanner and Pub/Sub emulators in the foreground, for a shell, a demo or a test run."""

import argparse
import dataclasses
import os
import signal
import sys
import time
from typing import Any

from outbox.errors import OutboxError
from outbox.shared.settings import fields_of, setting, whole_number

PORT = whole_number(0, 65_535)

#: Seconds between two looks at whether the emulators still run.
WATCH_SECONDS = 0.2

DESCRIPTION = """Run the Spanner and the Pub/Sub emulator until Ctrl-C or SIGTERM, and print the variables that point
to them. One that SPANNER_EMULATOR_HOST or PUBSUB_EMULATOR_HOST names is used as it is, unless its port is given."""

WHY_NOT_MULTIPLEXED = """\
# Emulators before 1.5.38 treat a multiplexed session as an ordinary one: the transactions of two threads
# close one another (404 Transaction not found). The Spanner client then needs this:"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorSettings:
    """Where the emulators listen."""

    spanner_port: int = setting("0", PORT, "Port of the Spanner emulator; 0 takes a free one.")
    pubsub_port: int = setting("0", PORT, "Port of the Pub/Sub emulator; 0 takes a free one.")


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser("emulators", help="run both emulators until Ctrl-C", description=DESCRIPTION)
    for field in fields_of(EmulatorSettings):
        parser.add_argument(field.flag, dest=field.name, metavar=field.metavar, help=field.help_text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run both until a signal, then return 0. Raises OutboxError: a wrong port, no emulator, one that ended."""
    from outbox.devtools.emulators import running  # noqa: PLC0415 - starts processes: nothing for the other commands

    flags = vars(options)
    values = {field.name: field.value(flags[field.name], os.environ) for field in fields_of(EmulatorSettings)}
    settings = EmulatorSettings(**values)
    # SIGTERM, and SIGHUP from a closed terminal, are Ctrl-C: both emulators are stopped on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with running(settings.spanner_port, settings.pubsub_port) as emulators:
            print(_exports(emulators.environment()), flush=True)
            if not emulators.children:
                print("outbox: nothing to start: both variables are set, and both emulators answer", file=sys.stderr)
                return 0
            print("outbox: running until Ctrl-C; what the emulators hold is gone then", file=sys.stderr)
            while (ended := emulators.ended()) is None:
                time.sleep(WATCH_SECONDS)
            raise OutboxError(ended)
    except KeyboardInterrupt:
        return 0


def _exports(environment: dict[str, str]) -> str:
    lines = [f"export {name}={value}" for name, value in environment.items()]
    return "\n".join([*lines[:-1], WHY_NOT_MULTIPLEXED, lines[-1]])
