"""What the commands of the examples share: how they end, and the flag that says how many tasks."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence

from google.api_core.exceptions import GoogleAPIError

from outbox.errors import NotReached, OutboxError, SettingError
from outbox.program.settings import argparse_type, whole_number

DONE, FAILED, USAGE, NOT_REACHED, INTERRUPTED = 0, 1, 2, 3, 130


def run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    demonstrate: Callable[[argparse.Namespace], int],
) -> int:
    """Run a demo and return its exit code; an expected fault is one sentence on stderr."""
    # The demo prints one sentence instead of what the clients log while a service stops.
    for name in ("google", "py4j"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # SIGTERM, and SIGHUP from a closed terminal, are Ctrl-C: everything is stopped on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return demonstrate(parser.parse_args(arguments))
    except KeyboardInterrupt:
        # Everything is stopped. A later signal, such as the SIGHUP of Spark's Python daemon to its process group, must
        # not change the exit code.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        print("demo: interrupted; what it had started is stopped", file=sys.stderr)
        return INTERRUPTED
    except GoogleAPIError as error:
        print(f"demo: an emulator failed: {str(error).splitlines()[0]}", file=sys.stderr)
        return FAILED
    except OutboxError as error:
        print(f"demo: {error}", file=sys.stderr)
        return {SettingError: USAGE, NotReached: NOT_REACHED}.get(type(error), FAILED)


def add_tasks(parser: argparse.ArgumentParser, default: int, help: str) -> None:
    """Add `--tasks` to a parser; its value is a whole number that was looked at."""
    parser.add_argument(
        "--tasks",
        type=argparse_type("--tasks", whole_number(1, 1_000_000)),
        default=default,
        metavar="N",
        help=f"{help} (default {default})",
    )
