"""Run a job with `python -m outbox_pipeline` or `spark-submit .../outbox_pipeline/__main__.py`."""

import sys

from outbox_pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
