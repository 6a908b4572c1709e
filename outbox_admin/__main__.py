"""`python -m outbox_admin` is the `outbox` command."""

import signal
import sys

from outbox.base.start import exit_on


def main() -> int:
    """Run the command of this process, and return its exit code."""
    with exit_on(signal.SIGTERM):
        with exit_on(signal.SIGINT):  # later, it is a KeyboardInterrupt
            from outbox_admin.cli import main as command  # noqa: PLC0415 - a signal must not be lost during the imports
        return command()


if __name__ == "__main__":
    sys.exit(main())
