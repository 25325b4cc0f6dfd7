"""A web server whose files are for those with a signed address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

#: What an address must end with.
SIGNED = "?sig=SECRET"


class Handler(SimpleHTTPRequestHandler):
    """403 without the signature."""

    def do_GET(self):
        if self.path.endswith(SIGNED):
            super().do_GET()
        else:
            self.send_error(403)

    def log_message(self, *_):
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def files_with_secrets(folder: Path) -> list[Path]:
    """Files below a folder that hold the signature."""
    return [path for path in folder.rglob("*") if path.is_file() and b"SECRET" in path.read_bytes()]
