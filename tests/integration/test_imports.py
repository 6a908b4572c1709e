"""The modules that an import of the library loads."""

import json
import subprocess
import sys


def test_importing_the_library_imports_no_worker_and_no_datadog() -> None:
    """An application loads only what it needs."""
    code = "import sys, json, outbox; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert "outbox" in loaded
    assert not {"publishworker", "datadog", "pyspark", "pandas"} & set(loaded)
