"""The `publishworker` command.

Exit codes: 0 success, 1 failed, 2 usage, 3 a service cannot be reached, a table or permission is missing, or stdout
cannot be written, 4 a drain ended with work left; 130 and 143 after a second signal, or after the first one of `check`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from publishworker import process

_EXAMPLES = """Examples:

  publishworker run --project shop --instance main --database orders
  OUTBOX_PROJECT=shop OUTBOX_INSTANCE=main OUTBOX_DATABASE=orders publishworker drain --deadline 600
  publishworker check --project shop --instance main --database orders orders invoices
"""


#: Exit codes at a signal before the relay starts, when nothing has been claimed. Later, the commands handle signals.
_STOPPED_AT_START = {"run": process.DONE, "drain": process.WORK_LEFT}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Expected errors are printed as one sentence on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["healthcheck"]:
        from publishworker.process import healthcheck  # noqa: PLC0415 - a probe must be cheap

        return healthcheck.main(given[1:])
    from outbox.base.start import exit_on  # noqa: PLC0415 - the same

    code = _STOPPED_AT_START.get(given[0]) if given else None
    numbers = (signal.SIGTERM,) if code is None else (signal.SIGTERM, signal.SIGINT)
    try:
        with exit_on(*numbers, code=code):
            from outbox.program import logs  # noqa: PLC0415 - the same
            from outbox.program.terminal import ended, prepare_streams  # noqa: PLC0415 - the same

            prepare_streams()
            logs.begin(given, is_service=given[:1] in (["run"], ["drain"]))
            return ended("publishworker", lambda: _run(given))
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # the disk for the logs is full, and Python would exit with a code of its own, 120
            sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - Python closes it


def _run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    from outbox import __version__  # noqa: PLC0415 - see main
    from outbox.program.settings import Parser  # noqa: PLC0415 - see main
    from publishworker.process import commands  # noqa: PLC0415 - see main
    from publishworker.process.worker_settings import (  # noqa: PLC0415 - see main
        WorkerSettings,
        add_deadline,
    )

    parser = Parser(
        prog="publishworker",
        description="Publish the tasks of the outbox to Pub/Sub.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"spanner-outbox {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command = subparsers.add_parser(name, help=help, description=help)
        command.set_defaults(run=run)
        return command

    run = add("run", commands.run, "Publish tasks until SIGTERM.")
    WorkerSettings.add_flags(run)
    drain = add("drain", commands.drain, "Publish until nothing is pending or retrying; print what remains.")
    WorkerSettings.add_flags(drain)
    add_deadline(drain)
    checks = add("check", commands.check, "Check settings, database, table and topics, and say how to fix errors.")
    WorkerSettings.add_flags(checks)
    checks.add_argument(
        "topics", nargs="*", metavar="TOPIC", help="Check these topics as well as those with pending tasks."
    )
    subparsers.add_parser("healthcheck", help="Exit 0 while the worker is alive: for liveness probes.")
    return parser
