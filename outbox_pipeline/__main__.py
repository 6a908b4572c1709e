"""Run a job with `python -m outbox_pipeline` or `spark-submit .../outbox_pipeline/__main__.py`."""

import signal
import sys

from outbox.base.start import exit_on


def main() -> int:
    """Run the job of this process, and return its exit code."""
    with exit_on(signal.SIGTERM):
        with exit_on(signal.SIGINT):  # later, it is a KeyboardInterrupt
            from outbox_pipeline.cli import main as command  # noqa: PLC0415 - a signal must not be lost during the imports
        return command()


if __name__ == "__main__":
    sys.exit(main())
