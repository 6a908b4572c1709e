"""`publishworker healthcheck`: a probe that checks the age of the heartbeat file. Standard library only, to be cheap.

"Alive" means that the loop turns, even while idle or while a service is unavailable: an outage restarts no worker.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

#: Default of --heartbeat-file; a directory that a read-only root file system mounts as an emptyDir.
HEARTBEAT_FILE = "/tmp/publishworker.heartbeat"  # noqa: S108 - a time stamp, nothing secret, and the path is a setting
#: Default of --max-age, seconds. The longest step between two heartbeats is a poll, which times out after 30 s.
MAX_AGE = 45.0


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the heartbeat is recent, otherwise 1 with a sentence on stderr; 2 for a wrong option."""
    parser = argparse.ArgumentParser(
        prog="publishworker healthcheck", description="Exit 0 while the worker is alive.", allow_abbrev=False
    )
    parser.add_argument(
        "--heartbeat-file",
        metavar="FILE",
        default=os.environ.get("OUTBOX_HEARTBEAT_FILE") or HEARTBEAT_FILE,
        help=f"File that the worker touches (env OUTBOX_HEARTBEAT_FILE; default {HEARTBEAT_FILE}).",
    )
    parser.add_argument(
        "--max-age",
        metavar="SECONDS",
        type=_age,
        default=os.environ.get("OUTBOX_MAX_AGE") or str(MAX_AGE),
        help=f"Max age of the file of a worker that is alive (env OUTBOX_MAX_AGE; default {MAX_AGE:g}).",
    )
    options = parser.parse_args(arguments)
    try:
        age = time.time() - Path(options.heartbeat_file).stat().st_mtime
    except OSError as error:
        print(f"No heartbeat: {options.heartbeat_file}: {error.strerror}", file=sys.stderr)
        return 1
    if age > options.max_age:
        print(f"The last heartbeat is {age:.0f} s old; --max-age is {options.max_age:g} s", file=sys.stderr)
        return 1
    return 0


def _age(text: str) -> float:
    try:
        age = float(text.encode("ascii"))  # without the digits of other scripts
    except ValueError:
        age = 0.0
    if not 0 < age < float("inf"):
        raise argparse.ArgumentTypeError(f"(or OUTBOX_MAX_AGE) {text} is not allowed. It must be seconds above 0")
    return age
