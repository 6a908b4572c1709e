"""Run a job as `python -m outbox_pipeline`, or by `spark-submit .../outbox_pipeline/__main__.py`."""

import sys

from outbox_pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
