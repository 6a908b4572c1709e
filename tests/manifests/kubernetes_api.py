"""An API server of Kubernetes that keeps every object that it receives: it schedules and checks nothing."""

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
    url: str = ""
    created: dict[str, Objects] = field(default_factory=dict)
    by_path: dict[str, Object] = field(default_factory=dict)

    def post(self, path: str, body: Object) -> tuple[int, Object]:
        self.created.setdefault(body["kind"], []).append(body)
        given = {"uid": str(len(self.by_path)), "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
        kept = body | {"metadata": body["metadata"] | given, "status": {"phase": "Running"}}
        self.by_path[f"{path.removesuffix('/' + body['metadata']['name'])}/{body['metadata']['name']}"] = kept
        return 201, kept

    def get(self, path: str) -> tuple[int, Object]:
        if path in self.by_path:
            return 200, self.by_path[path]
        if path.endswith("/pods"):
            items = [each for place, each in self.by_path.items() if place.startswith(f"{path}/")]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}


@contextlib.contextmanager
def api() -> Iterator[Api]:
    """Serve on a free port of this machine for the time of the block."""
    state = Api()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body, path = self.rfile.read(int(self.headers.get("Content-Length") or 0)), urlsplit(self.path).path
            if self.command == "GET":
                code, answer = state.get(path)
            elif self.command == "DELETE":
                code, answer = 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            else:
                code, answer = state.post(path, json.loads(body))
            raw = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = handle_one  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: object) -> None:
            """Write no access log."""

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
