"""A web server and a TCP proxy that misbehave on request, for tests: all of it on loopback, in threads of the test."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

TYPE = "application/x-tar"


def closing_port() -> int:
    """Return a port on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Answer(NamedTuple):
    """The answer to a request: correct except for these faults."""

    code: int = 200  # 206 for a range, which the other codes do not heed; 0: not even a header
    data: str = "true"  # a key of Handler.bytes
    stop: float | str | None = None  # where the body ends early: a share, "edge", or bytes after its beginning
    length: int | None = 0  # bytes more than there are that the header promises; None: no length
    ranges: bool = True  # whether a range is heeded
    later: int = 0  # bytes after the requested one at which the range begins
    etag: str | None = '"1"'
    type: str = TYPE
    headers: Mapping[str, str] = {}
    then: str = ""  # after the body: reset, hang, or trickle the rest


OK, HALF = Answer(), Answer(stop=0.5)
UNMARKED, HALF_UNMARKED = OK._replace(etag=None), HALF._replace(etag=None)
PAGE = Answer(data="page", type="text/html; charset=utf-8", etag=None)
LIMITED = Answer(429, data="nothing", headers={"Retry-After": "1"})
REDIRECT = Answer(302, data="nothing")
#: Mode -> the answers to the requests of one path, the last of which is repeated.
MODES = {
    # what works
    "ok": [OK],
    "moved": [REDIRECT._replace(headers={"Connection": "close"})],  # or it would be used once more, in a race
    "redirect": [REDIRECT],
    "no-range": [Answer(ranges=False)],
    "no-length-whole": [Answer(length=None, ranges=False)],
    # what passes
    "cut-once": [HALF, OK],
    "cut-early": [Answer(stop=700), OK],
    "cut-thrice": [Answer(stop=0.2), Answer(stop=0.4), Answer(stop=0.6), OK],
    "cut-once-no-range": [Answer(stop=0.5, ranges=False), Answer(ranges=False)],
    "cut-once-no-etag": [HALF_UNMARKED, UNMARKED],
    "edge-once": [Answer(stop="edge"), OK],
    "reset-once": [HALF._replace(then="reset"), OK],
    "stall-once": [HALF._replace(then="hang"), OK],
    "chunked-once": [Answer(data="chunk", stop=0.5, length=None, headers={"Transfer-Encoding": "chunked"}), OK],
    "pieces": [Answer(data="piece")],
    "busy-twice": [Answer(503), Answer(503), OK],
    "limited-once": [LIMITED, OK],
    "html-once": [PAGE, OK],
    "flip-once": [Answer(data="flipped"), OK],
    # what does not
    "cut-always": [Answer(stop=4196)],
    "stall-always": [HALF._replace(then="hang")],
    "silent": [Answer(0, then="hang")],
    "trickle": [HALF._replace(then="trickle")],
    "slow-head": [Answer(0, then="slow head")],
    "no-length-half": [Answer(stop=0.5, length=None, ranges=False)],
    "no-length-edge": [Answer(stop="edge", length=None, ranges=False)],
    "busy": [Answer(503)],
    "missing": [Answer(404)],
    "missing-later": [HALF, Answer(404)],
    "html": [PAGE],
    "html-as-tar": [Answer(data="page")],
    "changed-etag": [HALF, Answer(etag='"2"')],
    "changed-size": [HALF_UNMARKED, UNMARKED._replace(data="longer")],
    "shrunk": [HALF_UNMARKED, UNMARKED._replace(data="short")],
    "changed-silently": [HALF_UNMARKED, UNMARKED._replace(data="other")],
    "false-range": [HALF, Answer(data="shifted")],
    "later-range": [HALF, Answer(later=512)],
    "earlier-range": [HALF, Answer(later=-512)],
    "twice": [Answer(data="twice")],
    "overlapping": [Answer(data="overlapping")],
    "sample-twice": [Answer(data="sample twice")],
    "short-length": [Answer(data="half")],
    "long-length": [Answer(length=1000, ranges=False)],
    "endless-redirect": [REDIRECT],
}


class Handler(BaseHTTPRequestHandler):
    """GET /MODE/NAME, or /NAME; 404 for a name that the server does not have."""

    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        mode, _, name = self.path[1:].partition("/")
        if mode not in MODES:
            mode, name = "ok", self.path[1:]
        with self.server.lock:
            self.server.seen[self.path] += 1
            number = self.server.seen[self.path]
            self.server.ranges.append(self.headers.get("Range"))
        self.data = self.server.objects.get(name)
        self.close_connection = "redirect" not in mode
        answer = Answer(404) if self.data is None else MODES[mode][min(number, len(MODES[mode])) - 1]
        if answer.code == 302:
            targets = {"moved": self.server.target, "redirect": self.path.replace("redirect", "ok")}
            answer = answer._replace(headers={**answer.headers, "Location": targets.get(mode, self.path)})
        self.give(answer)

    def bytes(self, kind, begin):
        data, half = self.data, len(self.data) // 2 + 77
        edge, end = self.server.sample
        flipped = bytearray(data)
        flipped[(edge + 512 + 5) % len(data)] ^= 1  # in the data of a file
        return {
            "true": data,
            "nothing": b"",
            "chunk": b"%x\r\n" % len(data) + data,
            "piece": data[: begin + len(data) // 3],
            "page": b"<html><body>sign in</body></html>" * 40,
            "flipped": bytes(flipped),
            "longer": data + bytes(10240),
            "short": data[:100],
            "other": bytes(byte ^ 255 for byte in data),
            "shifted": bytes(begin) + data[: len(data) - begin],
            "twice": data + data,
            "overlapping": data[:half] + data[half - 700 :],
            "sample twice": data[:end] + data[edge:],
            "half": data[:half],
        }[kind]

    def give(self, answer):
        if answer.code >= 400 and answer.data == "true":
            self.send_error(answer.code)
        elif answer.code:
            asked = int((self.headers.get("Range") or "bytes=0-")[6:-1])
            begin = asked + answer.later if asked and answer.ranges else 0
            data = self.bytes(answer.data, begin)
            if begin > len(data):
                self.send_error(416)
                return
            stop = {"edge": self.server.sample[0], None: len(data)}.get(answer.stop, answer.stop)
            stop = int(stop * len(data)) + 77 if isinstance(stop, float) else stop
            stop = max(begin, begin + stop if isinstance(answer.stop, int) else stop)
            headers = {"Content-Type": answer.type, "ETag": answer.etag, **answer.headers}
            if answer.length is not None:
                headers["Content-Length"] = str(len(data) - begin + answer.length)
            partial, total = begin or answer.data == "piece", len(self.data if answer.data == "piece" else data)
            if partial:
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{total}"
            self.send_response(206 if partial else answer.code)
            for name, value in headers.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            self.send(data[begin:stop])
            self.rest = data[stop:]
        if answer.then == "reset":
            time.sleep(0.05)  # or the bytes before it are lost, too
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif answer.then == "hang":
            self.server.stopping.wait(60)
        elif answer.then:
            parts = (bytes([byte]) for byte in (self.rest if answer.code else b"HTTP/1.1 200 OK\r\nX: " + b"x" * 9999))
            for part in parts:
                if self.server.stopping.wait(0.05):
                    return
                self.send(part)

    def send(self, data):
        self.wfile.write(data)
        self.wfile.flush()


class FaultyServer(ThreadingHTTPServer):
    """Serves `objects` by name. sample: where the middle sample of its shards begins (the edge) and ends."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, objects, sample=(0, 0)):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.sample, self.target = objects, sample, ""
        self.root = f"http://127.0.0.1:{self.server_address[1]}"
        self.seen, self.ranges = Counter(), []
        self.lock, self.stopping = threading.Lock(), threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @classmethod
    def of_folder(cls, root):
        """Serves the files below a folder."""
        return cls({str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()})

    def url(self, mode, name):
        return f"{self.root}/{mode}/{name}"

    def handle_error(self, *_):
        pass  # clients that go away are the rule here

    def __exit__(self, *_):
        self.stopping.set()
        self.shutdown()
        self.server_close()


class Relay(socketserver.BaseRequestHandler):
    """One connection through a `CuttingProxy`."""

    def handle(self):
        upstream = socket.create_connection(("127.0.0.1", self.server.upstream))
        threading.Thread(target=self.relay, args=(self.request, upstream, None), daemon=True).start()
        self.relay(upstream, self.request, self.server.limit)

    def relay(self, source, target, limit):
        passed = 0
        with suppress(OSError):
            while data := source.recv(65536):
                if limit is not None and passed <= limit < passed + len(data) and self.server.may_cut():
                    target.sendall(data[: limit - passed])
                    if self.server.hold:
                        self.server.stopping.wait(60)
                    break
                passed += len(data)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class CuttingProxy(socketserver.ThreadingTCPServer):
    """A TCP proxy: of the connections that answer more than `limit` bytes the first `times` are cut, or held, there."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, upstream, limit, times, hold=False):
        super().__init__(("127.0.0.1", 0), Relay)
        self.upstream, self.limit, self.times, self.hold = upstream, limit, times, hold
        self.port = self.server_address[1]
        self.cuts, self.lock, self.stopping = 0, threading.Lock(), threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def may_cut(self):
        with self.lock:
            cut = self.cuts < self.times
            self.cuts += cut
            return cut

    __exit__ = FaultyServer.__exit__
