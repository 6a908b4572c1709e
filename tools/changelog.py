"""Require a line in CHANGELOG.md for a change of the public surface: `python tools/changelog.py BASE`.

The surface is the generated reference pages (settings of commands, metrics, functions, errors), the schema, and the
flags of commands.
"""

import subprocess
import sys
from collections.abc import Collection

SURFACE = ("docs/reference/", "schema/")
#: Files of the packages in which a changed line has a flag, such as "--newest".
FLAGS = ("-G", '"--[a-z]', "--", "outbox", "publishworker", "outbox_admin", "outbox_pipeline")


def missing_line(changed: Collection[str], flags: Collection[str] = ()) -> str:
    """Return the complaint about a change of these files, or an empty text. `flags` are those that change a flag."""
    names = sorted({*(name for name in changed if name.startswith(SURFACE)), *flags})
    if not names or "CHANGELOG.md" in changed:
        return ""
    return f"{', '.join(names)} changed, so users notice this change. Add a line below [Unreleased] in CHANGELOG.md."


def changed_since(base: str, *options: str) -> list[str]:
    """Return the names of files that differ from where the branch left `base`."""
    command = ["git", "diff", "--name-only", f"{base}...HEAD", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    complaint = missing_line(changed_since(sys.argv[1]), changed_since(sys.argv[1], *FLAGS))
    sys.exit(complaint or 0)  # the exit code of an empty text would be 1
