"""A web server and a TCP proxy that misbehave on request, for tests: all of it on loopback, in threads of the test."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TYPE = "application/x-tar"


def closing_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Handler(BaseHTTPRequestHandler):
    """GET /MODE/NAME; a mode is a method below. `number` counts the requests of one path from 1."""

    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        _, mode, name = self.path.split("/", 2)
        with self.server.lock:
            self.server.seen[self.path] += 1
            self.number = self.server.seen[self.path]
            self.server.ranges.append(self.headers.get("Range"))
        self.data = self.server.objects[name]
        self.begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.close_connection = True
        getattr(self, mode.replace("-", "_"))()

    # --- building blocks
    def head(self, code, length, *, begin=None, total=None, etag='"1"', kind=TYPE, **headers):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if code == 206:
            self.send_header("Content-Range", f"bytes {begin}-{begin + length - 1}/{total}")
        if etag:
            self.send_header("ETag", etag)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def answer(self, stop=None, data=None, ranges=True, **head):
        """A correct header for `data` from the asked byte on, then its bytes up to `stop`."""
        data = self.data if data is None else data
        begin = self.begin if ranges else 0
        if begin > len(data):
            self.send_error(416)
        else:
            self.head(206 if begin else 200, len(data) - begin, begin=begin, total=len(data), **head)
            self.send(data[begin : len(data) if stop is None else max(stop, begin)])

    def send(self, data):
        self.wfile.write(data)
        self.wfile.flush()

    def reset(self):
        time.sleep(0.05)  # or the bytes before it are lost, too
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def hang(self):
        self.server.stopping.wait(60)

    @property
    def half(self):
        return len(self.data) // 2 + 77

    @property
    def first(self):
        return self.number == 1

    # --- what works
    def ok(self):
        self.answer()

    def moved(self):
        self.head(302, 0, Location=self.server.target, Connection="close")  # or it would be used once more, in a race

    def no_range(self):
        self.answer(ranges=False)

    def no_length_whole(self):
        self.head(200, None)
        self.send(self.data)

    def redirect(self):
        self.close_connection = False
        self.send_response(302)
        self.send_header("Location", self.path.replace("redirect", "ok"))
        self.send_header("Content-Length", "0")
        self.end_headers()

    # --- what passes
    def cut_once(self):
        self.answer(self.half if self.first else None)

    def cut_thrice(self):
        self.answer(self.number * len(self.data) // 5 if self.number <= 3 else None)

    def cut_once_no_range(self):
        self.answer(self.half if self.first else None, ranges=False)

    def cut_once_no_etag(self):
        self.answer(self.half if self.first else None, etag=None)

    def edge_once(self):
        self.answer(self.server.edge if self.first else None)

    def reset_once(self):
        self.answer(self.half if self.first else None)
        if self.first:
            self.reset()

    def stall_once(self):
        self.answer(self.half if self.first else None)
        if self.first:
            self.hang()

    def chunked_once(self):
        if self.first:
            self.head(200, None, Transfer_Encoding="chunked")
            self.send(b"%x\r\n" % len(self.data) + self.data[: self.half])
        else:
            self.answer()

    def pieces(self):
        part = self.data[self.begin : self.begin + len(self.data) // 3]
        self.head(206, len(part), begin=self.begin, total=len(self.data))
        self.send(part)

    def busy_twice(self):
        self.answer() if self.number > 2 else self.send_error(503)

    def limited_once(self):
        if self.first:
            self.head(429, 0, Retry_After="1")
        else:
            self.answer()

    def html_once(self):
        self.html() if self.first else self.answer()

    def flip_once(self):
        self.answer(data=self.flipped() if self.first else None)

    def flipped(self):
        damaged = bytearray(self.data)
        damaged[self.server.edge + 512 + 5] ^= 1  # in the data of a file
        return bytes(damaged)

    # --- what does not
    def cut_always(self):
        self.answer(self.begin + 4096 + 100)

    def reset_always(self):
        self.answer(self.half)
        self.reset()

    def stall_always(self):
        self.answer(self.half)
        self.hang()

    def silent(self):
        self.hang()

    def trickle(self):
        self.answer(self.half)
        for byte in self.data[max(self.half, self.begin) :]:
            if self.server.stopping.wait(0.05):
                return
            self.send(bytes([byte]))

    def slow_head(self):
        self.send(b"HTTP/1.1 200 OK\r\nX: ")
        while not self.server.stopping.wait(0.05):
            self.send(b"x")

    def no_length_half(self):
        self.head(200, None)
        self.send(self.data[: self.half])

    def no_length_edge(self):
        self.head(200, None)
        self.send(self.data[: self.server.edge])

    def busy(self):
        self.send_error(503)

    def missing(self):
        self.send_error(404)

    def forbidden(self):
        self.send_error(403)

    def missing_later(self):
        self.answer(self.half) if self.first else self.send_error(404)

    def html(self):
        page = b"<html><body>sign in</body></html>" * 40
        self.head(200, len(page), kind="text/html; charset=utf-8", etag=None)
        self.send(page)

    def html_as_tar(self):
        self.answer(data=b"<html><body>try again</body></html>" * 40)

    def changed_etag(self):
        self.answer(self.half if self.first else None, etag=f'"{self.number}"')

    def changed_size(self):
        data = self.data if self.first else self.data + bytes(10240)
        self.answer(self.half if self.first else None, data=data, etag=None)

    def shrunk(self):
        self.answer(self.half if self.first else None, data=self.data if self.first else self.data[:100], etag=None)

    def changed_silently(self):
        other = bytes(byte ^ 255 for byte in self.data)
        self.answer(self.half if self.first else None, data=self.data if self.first else other, etag=None)

    def false_range(self):
        if self.first:
            self.answer(self.half)
        else:
            length = len(self.data) - self.begin
            self.head(206, length, begin=self.begin, total=len(self.data))
            self.send(self.data[:length])

    def later_range(self):
        if self.first:
            self.answer(self.half)
        else:
            begin = self.begin + 512
            self.head(206, len(self.data) - begin, begin=begin, total=len(self.data))
            self.send(self.data[begin:])

    def twice(self):
        self.answer(data=self.data + self.data)

    def overlapping(self):
        self.answer(data=self.data[: self.half] + self.data[self.half - 700 :])

    def sample_twice(self):
        start, end = self.server.sample
        self.answer(data=self.data[:end] + self.data[start:])

    def short_length(self):
        self.answer(data=self.data[: self.half])

    def long_length(self):
        self.head(200, len(self.data) + 1000)
        self.send(self.data)

    def flip_always(self):
        self.answer(data=self.flipped())

    def endless_redirect(self):
        self.close_connection = False
        self.send_response(302)
        self.send_header("Location", self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def chaos(self):
        """Any of it, by a generator of (name, number of the request)."""
        rng = random.Random(f"{self.path} {self.number}")
        stop = rng.randrange(self.begin, len(self.data) + 1)
        kind = rng.choice(["ok", "ok", "cut", "cut", "reset", "busy", "whole"])
        if kind == "busy":
            self.send_error(rng.choice([500, 502, 503, 429]))
        else:
            self.answer(None if kind == "ok" else stop, ranges=kind != "whole" or rng.random() < 0.5)
        if kind == "reset":
            self.reset()


class FaultyServer(ThreadingHTTPServer):
    """Serves `objects` by name. sample: where the middle sample of its shards begins (the edge) and ends."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, objects, sample=(0, 0)):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.sample, self.edge = objects, sample, sample[0]
        self.seen, self.ranges = Counter(), []
        self.lock, self.stopping = threading.Lock(), threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def url(self, mode, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{mode}/{name}"

    def handle_error(self, *_):
        pass  # clients that go away are the rule here

    def __exit__(self, *_):
        self.stopping.set()
        self.shutdown()
        self.server_close()


class CuttingProxy:
    """A TCP proxy: of the connections that answer more than `limit` bytes the first `times` are cut, or held, there."""

    def __init__(self, upstream, limit, times, hold=False):
        self.upstream, self.limit, self.times, self.hold = upstream, limit, times, hold
        self.cuts, self.lock, self.stopping = 0, threading.Lock(), threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.upstream))
            threading.Thread(target=self.upload, args=(client, server), daemon=True).start()
            threading.Thread(target=self.download, args=(server, client), daemon=True).start()

    def upload(self, client, server):
        with suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
        self.end(client, server)

    def download(self, server, client):
        passed = 0
        try:
            while data := server.recv(65536):
                if passed <= self.limit < passed + len(data) and self.may_cut():
                    client.sendall(data[: self.limit - passed])
                    if self.hold:
                        self.stopping.wait(60)
                    break
                passed += len(data)
                client.sendall(data)
        except OSError:
            pass
        self.end(client, server)

    def may_cut(self):
        with self.lock:
            cut = self.cuts < self.times
            self.cuts += cut
            return cut

    @staticmethod
    def end(*sockets):
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.listener.close()
