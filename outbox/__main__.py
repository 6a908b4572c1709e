"""`python -m outbox` is the `outbox` command."""

import sys

from outbox.cli import main

if __name__ == "__main__":
    sys.exit(main())
