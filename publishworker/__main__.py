"""Run the command as `python -m publishworker`."""

import sys

from publishworker.cli import main

sys.exit(main())
