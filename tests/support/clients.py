"""`outbox.aio`, or a stand-in with a client that has no AsyncClient yet, as in the run `floor` of tools/versions.py."""

from typing import Any
from unittest import mock

aio: Any
try:
    from outbox import aio
except ModuleNotFoundError:
    aio = mock.Mock()
