"""A worker whose clock is wrong by SHIFTED_CLOCK_SECONDS: `python -m tests.support.shifted_clock run ...`."""

import os
import runpy
import time
from types import SimpleNamespace
from typing import Any

import grpc._channel
import time_machine

if __name__ == "__main__":
    # gRPC's core keeps the machine's clock, and would see Python's time limits as long past.
    of_machine: Any = SimpleNamespace(**vars(time) | {"time": time_machine.escape_hatch.time.time})
    grpc._channel.time = of_machine  # type: ignore[attr-defined]  # a module of gRPC's own
    with time_machine.travel(time.time() + float(os.environ["SHIFTED_CLOCK_SECONDS"])):
        runpy.run_module("publishworker", run_name="__main__", alter_sys=True)
