"""The worker touches the heartbeat file. `healthcheck` reads its age."""

import logging
from pathlib import Path

_log = logging.getLogger("publishworker")


class HeartbeatFile:
    """Touches a file at each call. A failure is logged once and stops nothing."""

    def __init__(self, path: Path) -> None:
        """Touch `path`."""
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
