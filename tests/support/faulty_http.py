"""An HTTP proxy on loopback that injects faults: errors, delays and truncated answers."""

import http.client
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

FAULTS = ("503", "slow", "truncated")
_SLOW_SECONDS = 1.0
_NOT_FORWARDED = ("transfer-encoding", "connection", "content-length")


class FaultyProxy:
    """Forwards requests to a port. About `rate` of them meet a fault, up to `most`; `counts` tells which."""

    def __init__(self, port: int, *, rate: float, most: int, seed: int = 0) -> None:
        self._port, self._rate, self._most = port, rate, most
        self._rng, self._lock = np.random.default_rng(seed), threading.Lock()
        self.counts: Counter[str] = Counter()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (ConnectionError, BrokenPipeError):
                    self.close_connection = True

            def __getattr__(self, name: str) -> object:
                if name.startswith("do_"):
                    return lambda: proxy._forward(self)
                raise AttributeError(name)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the inherited name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop forwarding."""
        self._server.shutdown()
        self._server.server_close()

    def _fault(self, method: str) -> str:
        with self._lock:
            if sum(self.counts.values()) >= self._most or self._rng.random() >= self._rate:
                return ""
            fault = FAULTS[self._rng.integers(len(FAULTS))]
            if fault == "truncated" and method != "GET":
                return ""
            self.counts[fault] += 1
            return fault

    def _forward(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        fault = self._fault(request.command)
        if fault == "503":
            request.send_response(503)
            request.send_header("content-length", "0")
            request.end_headers()
            return
        if fault == "slow":
            time.sleep(_SLOW_SECONDS)
        upstream = http.client.HTTPConnection("127.0.0.1", self._port)
        upstream.request(request.command, request.path, body, dict(request.headers))
        answer = upstream.getresponse()
        content = answer.read()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _NOT_FORWARDED:
                request.send_header(name, value)
        length = answer.getheader("content-length") if request.command == "HEAD" else None
        request.send_header("content-length", length or str(len(content)))
        request.end_headers()
        request.wfile.write(content[: len(content) // 2] if fault == "truncated" else content)
        request.close_connection = fault == "truncated"
        upstream.close()
