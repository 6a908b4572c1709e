"""Require a line in CHANGELOG.md for a change of the public surface: `python tests/support/changelog.py BASE`.

Generated reference pages and the schema are the surface: settings of commands, metrics, functions, errors and columns.
"""

import subprocess
import sys
from collections.abc import Collection

SURFACE = ("docs/reference/", "schema/")


def missing_line(changed: Collection[str]) -> str:
    """Return the complaint about a change of these files, or nothing."""
    names = sorted(name for name in changed if name.startswith(SURFACE))
    if not names or "CHANGELOG.md" in changed:
        return ""
    return f"{', '.join(names)} changed, so users notice this change. Add a line below [Unreleased] in CHANGELOG.md."


if __name__ == "__main__":
    command = ["git", "diff", "--name-only", f"{sys.argv[1]}...HEAD"]
    sys.exit(missing_line(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()))
