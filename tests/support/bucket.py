"""The requests of Cloud Storage that a Delta log needs, on this machine: `python -m tests.support.bucket PORT`.

It is a process of its own, because deltalake holds Python's lock while it waits for an answer.
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

#: A commit whose path ends so is stored, but its first answer is lost.
LOST = "00000000000000000003.json"
_objects: dict[str, bytes] = {}
_lock = threading.Lock()


class Bucket(BaseHTTPRequestHandler):
    """The XML API: https://cloud.google.com/storage/docs/xml-api/reference-methods."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # otherwise each answer is two packets, and the second one waits for 40 ms

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        headers = {"ETag": "x", "Last-Modified": "Sat, 28 Nov 2026 01:00:00 GMT", "x-goog-generation": "1"}
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def name(self) -> str:
        return unquote(urlsplit(self.path).path)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with _lock:
            if self.headers["x-goog-if-generation-match"] != "0":
                return self.answer(400)  # no other request is atomic
            exists = self.name in _objects
            _objects.setdefault(self.name, body)
        return self.answer(412 if exists else 503 if self.name.endswith(LOST) else 200)

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" not in query:
            found = _objects.get(self.name)
            return self.answer(404) if found is None else self.answer(200, found)
        after = query.get("start-after", [""])[0]
        names = {each.removeprefix(f"{self.name.rstrip('/')}/"): body for each, body in sorted(_objects.items())}
        contents = [
            f"<Contents><Key>{name}</Key><Size>{len(body)}</Size><ETag>x</ETag>"
            "<LastModified>2026-11-28T01:00:00.000Z</LastModified></Contents>"
            for name, body in names.items()
            if name.startswith(query["prefix"][0]) and name > after
        ]
        return self.answer(200, f"<ListBucketResult>{''.join(contents)}</ListBucketResult>".encode())

    do_HEAD = do_GET  # noqa: N815 - the name that the base class looks for


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Bucket).serve_forever()
