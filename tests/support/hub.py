"""A local HTTP server that imitates what the Hugging Face hub answers for files, and can break off.

Files: `/{org}/{repo}/resolve/{revision}/{file}` for HEAD and GET, with etag, size, commit and byte ranges.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RANGE = re.compile(r"^bytes=(\d+)-(\d*)$")
_PATH = re.compile(r"^/(?P<repo>[^/]+/[^/]+)/resolve/[^/]+/(?P<file>.+)$")


@dataclass
class Hub:
    """`files` by `ORG/REPO/FILE`. `cut_after`: bytes after which each of the next answers breaks off."""

    url: str
    files: dict[str, bytes]
    cut_after: list[int] = field(default_factory=list)
    etags: dict[str, str] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)
    """The Range header of every GET, "" where there was none."""
    statuses: list[int] = field(default_factory=list)
    """Answers to give instead, first come first served."""
    ignore_ranges: bool = False

    def etag(self, name: str) -> str:
        return self.etags.get(name) or hashlib.sha256(self.files[name]).hexdigest()


@contextmanager
def run_hub(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            hub.ranges.append(self.headers.get("Range", ""))
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            match = _PATH.match(self.path.partition("?")[0])
            name = f"{match['repo']}/{match['file']}" if match else ""
            if with_body and hub.statuses:
                return self._refuse(hub.statuses.pop(0))
            if name not in hub.files:
                return self._refuse(404, "EntryNotFound")
            data = hub.files[name]
            wanted = _RANGE.match(self.headers.get("Range", ""))
            start, end = 0, len(data)
            if wanted and not hub.ignore_ranges:
                start = int(wanted[1])
                end = min(int(wanted[2]) + 1, len(data)) if wanted[2] else len(data)
            partial = wanted is not None and not hub.ignore_ranges
            self.send_response(206 if partial else 200)
            self.send_header("ETag", f'"{hub.etag(name)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(end - start))
            if partial:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            self.end_headers()
            if not with_body:
                return None
            body = data[start:end]
            if hub.cut_after:
                self.wfile.write(body[: hub.cut_after.pop(0)])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
            else:
                self.wfile.write(body)
            return None

        def _refuse(self, status: int, code: str = "") -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}", files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
