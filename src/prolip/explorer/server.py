"""The page's server: only on this machine by default, with bounded requests and JSON answers.

A page of another site can make a browser send requests, and read the answers under its own name that resolves here
(DNS rebinding). So a request must name a host of this server, and a body must come from the server's own page.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from email import errors
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import unquote, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined

from prolip.explorer.app import App, Refused
from prolip.explorer.thumbnails import Busy, Gone, turn
from prolip.utils.documents import loads

#: Bytes of a query, of an image, and of a refused body that are read so that its sender gets the answer.
JSON_BYTES, PICTURE_BYTES, DRAINED = 2**16, 2**24, 2**26
#: Seconds that a connection may be silent, that it may pause within a refused body, and of a whole request and answer.
SILENCE, LINGER, LONGEST = 30.0, 2.0, 120.0
LOOK = 0.01  # seconds between two checks for a free place
#: Connections, and large images in transfer, at a time, and seconds after which a slow one yields to another.
CONNECTIONS, SENDERS = (256, 1.0), (16, 2.0)
SMALL = 2**18  # bytes of a body below which it needs no place of SENDERS
#: Defects of a request's head that the standard library ignores.
DEFECTS = (errors.FirstHeaderLineIsContinuationDefect, errors.MissingHeaderBodySeparatorDefect)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
#: Files of the page.
ASSETS = {"explorer.js": "text/javascript; charset=utf-8", "explorer.css": "text/css; charset=utf-8"}
#: Allowed content of the page.
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' blob: data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: Headers of every answer.
ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


class Places:
    """Up to `most` connections. The one that kept the server waiting longest, over `grace` s, yields to the next.
    since: when the server began to wait for a connection, None while it works for it.
    """

    def __init__(self, most: int, grace: float):
        self.most, self.grace, self.since = most, grace, dict[socket.socket, float | None]()
        self._turn = threading.Lock()

    def enter(self, connection: socket.socket, work: str) -> None:
        """Take a place as soon as one is free. `Busy` if others also wait for one after PATIENCE seconds."""
        with turn(self._turn, work):
            while len(self.since) >= self.most:
                self.end(self.grace, 1)
                time.sleep(LOOK)
            self.since[connection] = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        self.since.pop(connection, None)

    def mark(self, connection: socket.socket, waits: bool) -> None:
        """Note that the server now waits for a connection, or works for it."""
        if connection in self.since:
            self.since[connection] = time.monotonic() if waits else None

    def end(self, seconds: float, count: int | None = None) -> None:
        """End connections that kept the server waiting for more than `seconds`, at most `count`, longest first."""
        waiting = [(since, connection) for connection, since in list(self.since.items()) if since is not None]
        late = sorted((pair for pair in waiting if pair[0] < time.monotonic() - seconds), key=lambda pair: pair[0])
        for _, connection in late[:count]:
            with suppress(OSError):  # it is already closed
                connection.shutdown(socket.SHUT_RDWR)  # its thread reads the end and finishes


class Server(ThreadingHTTPServer):
    """The explorer at a host and port (0: any free one). hosts: its names in requests."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 1024

    def __init__(self, app: App, host: str, port: int):
        own = () if is_loopback(host) else (socket.gethostname().lower(), socket.getfqdn().lower())
        self.app, self.hosts = app, {*LOOPBACK, host.lower(), *own}
        self.connections, self.senders = Places(*CONNECTIONS), Places(*SENDERS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        pages = Environment(loader=PackageLoader("prolip.explorer", "."), autoescape=True, undefined=StrictUndefined)
        self.page = pages.get_template("page.html.j2")
        self.assets = {name: files("prolip.explorer").joinpath(name).read_bytes() for name in ASSETS}
        super().__init__((host, port), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.enter(request, "connections")
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.connections.leave(request)

    def service_actions(self) -> None:
        self.connections.end(LONGEST)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def knows(self, name: str) -> bool:
        """Return whether a Host header names this server; any address does with --host, as rebinding needs a name."""
        return name in self.hosts or (not self.is_private and address_of(name) is not None)

    @property
    def is_private(self) -> bool:
        return is_loopback(str(self.server_address[0]))


class Handler(BaseHTTPRequestHandler):
    """Handler of one request: checks it and lets the `App` answer."""

    protocol_version, server_version, sys_version, timeout = "HTTP/1.1", "prolip", "", SILENCE
    server: Server
    #: Whether an unread body may follow.
    unread = True

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, work: Callable[[str], None]) -> None:
        self.unread = "Transfer-Encoding" in self.headers or self.headers.get_all("Content-Length", ["0"]) != ["0"]
        self._mark(waits=False)
        try:
            self._check_head()
            work(unquote(urlsplit(self.path).path))
        except Refused as refused:
            self._refuse(refused.status, str(refused))
        except Busy as busy:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(busy))
        except (Gone, KeyError) as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error.args[0] if error.args else error))
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:  # the page shows the error, the terminal its place
            print(f"error: {self.path}: {type(error).__name__}: {error}", file=sys.stderr)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        finally:
            self.server.senders.leave(self.connection)
        self._end()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse in JSON what the standard library refuses."""
        self._refuse(code, message or HTTPStatus(code).phrase)
        self._end()

    def _get(self, path: str) -> None:
        app, parts = self.server.app, path.strip("/").split("/")
        if path == "/":
            nonce = secrets.token_urlsafe(16)
            headers = {"Content-Security-Policy": POLICY.format(nonce=nonce), "Cache-Control": "no-store"}
            page = self.server.page.render(nonce=nonce, title=app.title)
            self._send(page.encode(), "text/html; charset=utf-8", headers)
        elif len(parts) == 2 and parts[0] == "static" and parts[1] in ASSETS:
            self._send(self.server.assets[parts[1]], ASSETS[parts[1]], {"Cache-Control": "no-cache"})
        elif len(parts) == 3 and parts[0] == "thumbnail" and parts[2].isdecimal() and len(parts[2]) < 16:
            data = app.thumbnail(parts[1], int(parts[2]))
            self._send(data, "image/webp", {"Cache-Control": "private, max-age=3600"})
        elif len(parts) == 2 and parts[0] == "api" and parts[1] in app.looks:
            self._json(app.looks[parts[1]]())
        elif parts[0] == "api" and parts[-1] in app.questions:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} requires POST")
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "page not found")

    def _post(self, path: str) -> None:
        app, parts = self.server.app, path.strip("/").split("/")
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != self.headers.get("Host", ""):
            raise Refused(HTTPStatus.FORBIDDEN, f"requests from pages of {origin} are not allowed")
        if path == "/api/upload":
            self._json(app.upload(self._body(PICTURE_BYTES, "application/octet-stream", "an image")))
        elif len(parts) == 2 and parts[0] == "api" and parts[1] in app.questions:
            data = self._body(JSON_BYTES, "application/json", "a query")
            try:
                values = loads(data.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise Refused(HTTPStatus.BAD_REQUEST, f"the query is not JSON: {error}") from error
            if not isinstance(values, dict):
                raise Refused(HTTPStatus.BAD_REQUEST, 'a query must be a JSON object, such as {"text": "a cat"}')
            self._json(app.questions[parts[1]](values))
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "page not found")

    def _check_head(self) -> None:
        if any(isinstance(defect, DEFECTS) for defect in self.headers.defects):  # a length may follow
            self.unread = True
            raise Refused(HTTPStatus.BAD_REQUEST, "the head of this request has a line that is not a header")
        try:
            name = (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "").rstrip(".")
        except ValueError:
            name = ""
        if not self.server.knows(name):
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, f"this is not the server of {name!r}: open {self.server.url}")

    def _body(self, most: int, kind: str, what: str) -> bytes:
        """Read the body, of a type that a foreign page cannot send. `Refused` for other types and longer bodies."""
        length = ",".join(self.headers.get_all("Content-Length", []))
        if not length.isdecimal() or len(length) > 15 or "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, f"{what} requires a Content-Length")
        if int(length) > most:
            why = f"{what} of {int(length):,} bytes: the limit is {most:,}"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        if self.headers.get_content_type() != kind:
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"{what} must be sent as {kind}")
        data = self._read(min(int(length), SMALL))
        if int(length) > SMALL:
            self.server.senders.enter(self.connection, "images")
            data += self._read(int(length) - SMALL)
        if len(data) < int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, f"{what} ended after {len(data):,} of {int(length):,} bytes")
        self.unread = False
        return data

    def _read(self, length: int) -> bytes:
        self._mark(waits=True)
        data = self.rfile.read(length)
        self._mark(waits=False)
        return data

    def _mark(self, waits: bool) -> None:
        for crowd in (self.server.connections, self.server.senders):
            crowd.mark(self.connection, waits)

    def _json(self, values: Any, status: int = HTTPStatus.OK) -> None:
        data = json.dumps(values, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
        self._send(data, "application/json; charset=utf-8", {"Cache-Control": "no-store"}, status)

    def _refuse(self, status: int, why: str) -> None:
        """Send the reason, if the client still listens."""
        try:
            self._json({"error": why}, status)
        except OSError:
            self.close_connection = True

    def _end(self) -> None:
        """Read an unread body, up to a bound, and end the connection: the body would count as the next request."""
        if self.unread:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                self.connection.settimeout(LINGER)
                left, end = DRAINED, time.monotonic() + SILENCE
                while left > 0 and time.monotonic() < end and (part := self.rfile.read1(min(left, 2**16))):
                    left -= len(part)
        self.unread = True

    def _send(self, data: bytes, kind: str, headers: Mapping[str, str], status: int = HTTPStatus.OK) -> None:
        self._mark(waits=True)
        self.close_connection |= self.unread
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **ALWAYS, **headers}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in a name, if it is one."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def make_server(app: App, host: str, port: int) -> Server:
    """Bind a server. ValueError with the remedy if that fails."""
    try:
        return Server(app, host, port)
    except (OSError, OverflowError) as error:
        remedy = "give another --port, or 0 for any free one, and make --host an address of this machine"
        raise ValueError(f"cannot serve at {host}:{port} ({error}): {remedy}") from error


def serve(server: Server) -> None:
    """Serve until Ctrl-C or SIGTERM, then delete a temporary index."""
    threading.Thread(target=server.app.warm_up, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also deletes a temporary index
    with suppress(KeyboardInterrupt), server.app.explored.temporary or nullcontext(), server:
        server.serve_forever()
