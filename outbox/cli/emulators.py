"""`outbox emulators`: run the Spanner and Pub/Sub emulators in the foreground, for a shell, a demo or tests."""

import argparse
import dataclasses
import signal
import sys
import time
from typing import Any

from outbox.cli.flags import command
from outbox.errors import OutboxError
from outbox.shared.settings import Settings, setting, whole_number

PORT = whole_number(0, 65_535)

#: Seconds between two checks that the emulators are running.
WATCH_SECONDS = 0.2

DESCRIPTION = """\
Run the Spanner and Pub/Sub emulators until Ctrl-C or SIGTERM, and print the environment
variables for clients. If SPANNER_EMULATOR_HOST or PUBSUB_EMULATOR_HOST is set, that
emulator is not started, unless you pass its port."""

WHY_NOT_MULTIPLEXED = """\
# Emulators before 1.5.38 treat a multiplexed session as a regular one, so the transactions of two threads
# close each other (404 Transaction not found). The Spanner client then needs this:"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorSettings(Settings):
    """Where the emulators listen."""

    spanner_port: int = setting("0", PORT, "Port of the Spanner emulator; 0 selects a free port.")
    pubsub_port: int = setting("0", PORT, "Port of the Pub/Sub emulator; 0 selects a free port.")


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = command(commands, "emulators", "run both emulators until Ctrl-C", DESCRIPTION)
    EmulatorSettings.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run both until a signal, then return 0. Raises OutboxError: invalid port, no emulator, or an emulator exited."""
    from outbox.devtools.emulators import running  # noqa: PLC0415 - only this command needs it

    settings = EmulatorSettings.read(vars(options))
    # Treat SIGTERM, and SIGHUP from a closed terminal, like Ctrl-C, so that both emulators are stopped.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with running(settings.spanner_port, settings.pubsub_port) as emulators:
            print(_exports(emulators.environment()), flush=True)
            if not emulators.children:
                print("outbox: nothing to start: both variables are set, and both emulators respond", file=sys.stderr)
                return 0
            print("outbox: running until Ctrl-C. All data in the emulators is lost then", file=sys.stderr)
            while (ended := emulators.ended()) is None:
                time.sleep(WATCH_SECONDS)
            raise OutboxError(ended)
    except KeyboardInterrupt:
        return 0


def _exports(environment: dict[str, str]) -> str:
    lines = [f"export {name}={value}" for name, value in environment.items()]
    return "\n".join([*lines[:-1], WHY_NOT_MULTIPLEXED, lines[-1]])
