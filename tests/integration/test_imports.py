"""The modules that an import of the library and a health check load."""

import json
import subprocess
import sys
from pathlib import Path


def test_importing_the_library_imports_no_worker_and_no_datadog() -> None:
    code = "import sys, json, outbox; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert "outbox" in loaded
    assert not {"publishworker", "datadog", "pyspark", "pandas"} & set(loaded)


def test_the_health_check_imports_the_standard_library_only(tmp_path: Path) -> None:
    """A probe that imports the clients costs half a second of CPU, every few seconds, for ever."""
    code = (
        "import sys\nfrom publishworker.cli import main\n"
        f"main(['healthcheck', '--heartbeat-file', {str(tmp_path / 'none')!r}])\nprint(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = set(sys.stdlib_module_names) | {"publishworker", "__main__"}
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    foreign = {
        name for name in loaded - allowed if not name.startswith(("_", "a1_coverage", "coverage", "sitecustomize"))
    }
    assert "publishworker" in loaded
    assert not foreign
