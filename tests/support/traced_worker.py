"""A worker that writes its steps to TRACE_FILE: `python -m tests.support.traced_worker run ...`.

With FULL_DISK, its stdout and stderr are a full disk.
"""

import json
import os
import runpy
import uuid
from pathlib import Path
from typing import Any

from publishworker.process import app
from publishworker.spanner.store import SpannerStore
from publishworker.turn.relay import Relay
from tests.specification.trace import Trace

if __name__ == "__main__":
    untraced = app.relay_of
    file = Path(os.environ["TRACE_FILE"]).open("ab", buffering=0)  # noqa: SIM115 - open until the process ends

    def relay_of(settings: Any, store: SpannerStore, *parts: Any, **more: Any) -> Relay:
        trace = Trace(lambda step: file.write(json.dumps(step).encode() + b"\n"), uuid.uuid4().hex[:12])
        traced: Any = trace.store(store)
        return trace.batches_of(untraced(settings, traced, *parts, **more))

    app.relay_of = relay_of
    if "FULL_DISK" in os.environ:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        os.dup2(full, 2)
    runpy.run_module("publishworker", run_name="__main__", alter_sys=True)
