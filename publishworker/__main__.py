"""Run the command as `python -m publishworker`."""

import sys

from publishworker.process.cli import main

sys.exit(main())
