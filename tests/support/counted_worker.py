"""A worker that counts its requests to Spanner in a file: `python -m tests.support.counted_worker run ...`.

COUNT_FILE names the file, of eight bytes. A proxy would take CPU from the worker and from Spanner.
"""

import mmap
import os
import runpy
import struct
import threading
from pathlib import Path
from typing import Any

from google.cloud.spanner_v1.services.spanner import SpannerClient

_NUMBER = struct.Struct("<Q")
_EMPTY = bytes(_NUMBER.size)


def new_file(path: Path) -> Path:
    path.write_bytes(_EMPTY)
    return path


def count(path: Path) -> int:
    number: int = _NUMBER.unpack(path.read_bytes())[0]
    return number


def _count_calls(name: str, shared: mmap.mmap, lock: threading.Lock) -> None:
    method = getattr(SpannerClient, name)

    def counted(self: SpannerClient, *arguments: Any, **options: Any) -> Any:
        with lock:
            _NUMBER.pack_into(shared, 0, _NUMBER.unpack_from(shared)[0] + 1)
        return method(self, *arguments, **options)

    setattr(SpannerClient, name, counted)


if __name__ == "__main__":
    with Path(os.environ["COUNT_FILE"]).open("r+b") as file:
        numbers = mmap.mmap(file.fileno(), _NUMBER.size)
    one_at_a_time = threading.Lock()
    for each in ("execute_streaming_sql", "commit"):
        _count_calls(each, numbers, one_at_a_time)
    runpy.run_module("publishworker", run_name="__main__", alter_sys=True)
