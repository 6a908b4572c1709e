"""`publishworker healthcheck`: a probe that checks the age of the heartbeat file. Standard library only, to be cheap.

"Alive" means that the loop turns, even while idle or while a service is unavailable: an outage restarts no worker.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

#: Default of --heartbeat-file; a directory that a read-only root file system mounts as an emptyDir. Each worker of a
#: machine has a file of its own, so that no other one hides that it hangs.
HEARTBEAT_FILE = "/tmp/publishworker.*.heartbeat"  # noqa: S108 - a time stamp, nothing secret, and the path is a setting
#: Max age in seconds of the heartbeat of a worker that is alive. The longest step between two heartbeats is a poll,
#: which times out after 30 s.
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
        help=f"File that the worker touches; * for all workers (env OUTBOX_HEARTBEAT_FILE; default {HEARTBEAT_FILE}).",
    )
    options = parser.parse_args(arguments)
    try:
        age = time.time() - min(each.stat().st_mtime for each in _files(options.heartbeat_file))
    except OSError as error:
        print(f"No heartbeat: {options.heartbeat_file}: {error.strerror}", file=sys.stderr)
        return 1
    if age > MAX_AGE:
        print(f"The last heartbeat is {age:.0f} s old; the limit is {MAX_AGE:g} s", file=sys.stderr)
        return 1
    return 0


def _files(given: str) -> list[Path]:
    """Return the files of running workers, or the pattern if there are none. * stands for a process ID."""
    path = Path(given)
    before, star, after = path.name.partition("*")
    found = path.parent.glob(path.name) if star else ()
    return [each for each in found if _runs(each.name.removeprefix(before).removesuffix(after))] or [path]


def _runs(process: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(process), 0)
        return True
    return False
