"""The worker's side of the heartbeat file (the probe's side is `healthcheck`)."""

import logging
from pathlib import Path

_log = logging.getLogger("publishworker")


class Heartbeat:
    """Touches the heartbeat file. A failure is logged once and stops nothing."""

    def __init__(self, path: Path) -> None:
        """Touch `path` at each call."""
        self._path = path
        self._unwritable = False

    def __call__(self) -> None:
        """Touch the file."""
        try:
            self._path.touch()
        except OSError as error:
            if not self._unwritable:
                self._unwritable = True
                _log.warning(
                    "Heartbeat file %s cannot be written (%s). `publishworker healthcheck` will fail.",
                    self._path, error.strerror, extra={"action": "heartbeat"},
                )  # fmt: skip
