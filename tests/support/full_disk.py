"""A worker whose stdout and stderr are a full disk: `python -m tests.support.full_disk run ...`."""

import os
import runpy

if __name__ == "__main__":
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)
    runpy.run_module("publishworker", run_name="__main__", alter_sys=True)
