"""A worker in the process of an application."""

import threading
from typing import Self

from publishworker import process
from publishworker.process.app import App, worker_id
from publishworker.process.worker_settings import WorkerSettings
from publishworker.telemetry.metrics import Metrics


class HostedRelay:
    """A worker on a thread of this process, between `start` and `stop` or in a `with` block.

    with HostedRelay() as relay:
        database.run_in_transaction(place_order)
        relay.wake()

    Its thread does not keep the process alive. A process that ends without `stop` is like a worker that was killed.
    """

    def __init__(self, settings: WorkerSettings | None = None, *, metrics: Metrics | None = None) -> None:
        """Connect to nothing. The default settings are those of the environment. The caller stops `metrics`."""
        self._settings = settings or WorkerSettings.read({})
        self._metrics = metrics or Metrics()
        self._app: App | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread()

    def start(self) -> Self:
        """Connect, verify the table, and begin to publish. Raises NotReached, and RuntimeError if it runs already.

        A server that forks its processes calls it in each of them, and not before: neither threads nor connections
        survive a fork.
        """
        if self._thread.is_alive():
            raise RuntimeError("the relay runs already")
        app = self._app = App(self._settings, id=worker_id(), metrics=self._metrics)
        self._stop = stop = threading.Event()
        self._thread = threading.Thread(
            target=lambda: app.until_stopped(stop, lambda _turn: False, timeout_exit_code=process.FAILED),
            name="relay",
            daemon=True,
        )
        self._thread.start()
        return self

    def wake(self) -> None:
        """Poll at once, for example after a commit. Without effect in a process that has not called `start`."""
        if self._app is not None and self._thread.is_alive():
            self._app.relay.wake()

    def stop(self) -> None:
        """Finish the in-flight batches, within the shutdown timeout, and end. Without effect if it does not run."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()
