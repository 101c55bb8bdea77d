"""The key-value server over which Horovod's Gloo controllers find each other, on the job's interface alone.

Horovod's own server listens on every interface. This one speaks the same few words of HTTP: GET, PUT and DELETE of
/scope/key, 404 for a key that is not there yet.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGEST_VALUE = 1 << 20  # bytes; Horovod stores addresses of some hundred bytes


class GlooServer(ThreadingHTTPServer):
    """Serves until `stop`; `port` is free and its own."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.values: dict[str, bytes] = {}
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, name="horovod-gloo-rendezvous", daemon=True).start()

    def stop(self) -> None:
        """Close the port."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: GlooServer
    timeout = 10

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        size = self.headers.get("Content-Length", "")
        if not size.isdigit() or int(size) > LARGEST_VALUE:
            self._answer(400)
            return
        self.server.values[self.path] = self.rfile.read(int(size))
        self._answer(200)

    def do_DELETE(self) -> None:
        self._answer(200)  # every rank says so when it has read all; the values go with the server

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
