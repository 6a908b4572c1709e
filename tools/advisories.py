"""Known vulnerabilities of pinned packages, by pip-audit: `python advisories.py constraints.txt` (`make audit`).

Without its data pip-audit may find nothing and succeed. So an old version that is known to be vulnerable is checked
first: if no advisory for it is found, the audit did not run, and that is reported.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

VULNERABLE = "urllib3==1.24.1"  # CVE-2019-11324
NOT_SCANNED = "not scanned here: the advisory data cannot be reached"


def main(file: str) -> int:
    """Return 0 if no advisory is found for the packages in `file`, or if the audit cannot run; else 1."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as known:
        known.write(VULNERABLE)
        known.flush()
        looked = _audit(known.name, "--format", "json")
    try:
        found = any(each.get("vulns") for each in json.loads(looked.stdout)["dependencies"])
    except (json.JSONDecodeError, KeyError):
        found = False
    if not found:
        print(NOT_SCANNED)
        return 0
    scan = _audit(file, "--strict")
    print(scan.stdout + scan.stderr)
    return int(scan.returncode != 0)


def _audit(file: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("pip-audit")), "--disable-pip", "--no-deps", "-r", file, *flags]
    return subprocess.run(command, check=False, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
