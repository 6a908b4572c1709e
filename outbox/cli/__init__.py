"""The `outbox` command. Each module adds its commands with `add(commands)`.

Exit codes: 0 done, 1 failed, 2 usage, 3 a service, the table or a permission is missing, 130 interrupted by Ctrl-C.
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
    """Run one command and return its exit code. Print an expected error on stderr, as one line."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Flushing the buffer at exit would fail again.
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
