"""The `outbox` command: a module for each subject, with `add(commands)`.

Exit codes: 0 done, 1 failed, 2 usage, 3 a service, the table or a permission is missing; 130 when Ctrl-C ended
what has no other end.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from outbox._version import __version__
from outbox.cli import emulators, removal, retry, schema, status, tasks, topics
from outbox.errors import NotReached, OutboxError, SettingError

DONE, FAILED, USAGE, NOT_REACHED, INTERRUPTED = 0, 1, 2, 3, 130

COMMANDS = (emulators, schema, status, tasks, retry, removal, topics)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Expected faults are one sentence on stderr."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has enough, as `head` has. What is still buffered would fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SettingError as error:
        print(f"outbox: {error}", file=sys.stderr)
        return USAGE
    except NotReached as error:
        print(f"outbox: {error}", file=sys.stderr)
        return NOT_REACHED
    except OutboxError as error:
        print(f"outbox: {error}", file=sys.stderr)
        return FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outbox", description="The transactional outbox for Spanner and Pub/Sub.")
    parser.add_argument("--version", action="version", version=f"spanner-outbox {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    return parser
