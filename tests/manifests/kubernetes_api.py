"""An API server of Kubernetes that takes and keeps whatever it is given: what do programs make?

with api() as server:
    subprocess.run(["spark-submit", "--master", f"k8s://{server.url}", ...])
    pod = server.made["Pod"][0]

It schedules nothing, checks nothing and reports no events: all pods are said to run.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.manifests.rendering import Object, Objects


@dataclass(slots=True)
class Api:
    """What was made, by kind and by path, and where it is done."""

    url: str = ""
    made: dict[str, Objects] = field(default_factory=dict)
    by_path: dict[str, Object] = field(default_factory=dict)

    def keep(self, path: str, body: Object) -> Object:
        """Keep an object as it came, and return it as a cluster would."""
        self.made.setdefault(body["kind"], []).append(body)
        given = {"uid": str(len(self.by_path)), "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
        kept = body | {"metadata": body["metadata"] | given, "status": {"phase": "Running"}}
        name = body["metadata"]["name"]
        self.by_path[path if path.endswith(f"/{name}") else f"{path}/{name}"] = kept
        return kept


@contextlib.contextmanager
def api() -> Iterator[Api]:
    """Serve on a free port of this machine for the time of the block."""
    state = Api()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Keep."""
            length = int(self.headers.get("Content-Length") or 0)
            path = urlsplit(self.path).path
            self._answer(201, state.keep(path, json.loads(self.rfile.read(length))))

        do_PATCH = do_PUT = do_POST  # noqa: N815 - names of http.server

        def do_GET(self) -> None:
            """Return what is kept at this path, or a list of what is kept below it."""
            path = urlsplit(self.path).path
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
            if path in state.by_path:
                self._answer(200, state.by_path[path])
            elif path.endswith("/pods"):
                items = [each for place, each in state.by_path.items() if place.startswith(f"{path}/")]
                self._answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})
            else:
                self._answer(404, missing)

        def do_DELETE(self) -> None:
            """Agree."""
            self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def _answer(self, code: int, body: Object) -> None:
            raw = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
