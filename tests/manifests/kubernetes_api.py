"""An API server of Kubernetes that keeps every object that it receives: it schedules and checks nothing."""

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.manifests.rendering import Objects


@dataclass(slots=True)
class Api:
    url: str = ""
    created: dict[str, Objects] = field(default_factory=lambda: defaultdict(list))


@contextlib.contextmanager
def api() -> Iterator[Api]:
    """Serve on a free port of this machine for the time of the block."""
    state = Api()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def keep(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.created[body["kind"]].append(body)
            given = {"uid": "1", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
            raw = json.dumps(body | {"metadata": body["metadata"] | given, "status": {"phase": "Running"}}).encode()
            self.send_response(201)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_PATCH = keep  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: object) -> None:
            """Write no access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
