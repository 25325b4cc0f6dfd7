"""Explore what a model makes of a gallery, on a page of this machine: ask, walk, look at the map, try rules.

    prolip-explore runs/demo --data images:photos
    prolip-explore runs/index
    prolip-explore features:kept/features

`python -m prolip.explorer` is the same. docs/explorer.md.
"""
from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from prolip.evaluation.model import PRECISIONS
from prolip.explorer.app import App
from prolip.explorer.asking import MOST
from prolip.explorer.captions import TEXTS, Captions
from prolip.explorer.gallery import Gallery
from prolip.explorer.opening import Opened, open_source
from prolip.explorer.server import Server, make_server
from prolip.models.weights.checkpoint import CheckpointError
from prolip.search.answers import calibrate, read_questions
from prolip.search.risk import Threshold
from prolip.search.sources import lines_of
from prolip.utils import console
from prolip.utils.messages import at_least

PORT = 8571


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("prolip-explore", description=__doc__, formatter_class=form)
    add = parser.add_argument
    about = "an index of prolip-search; kept features; or, with --data, a run, a model's folder or a model's name"
    add("source", metavar="RUN_OR_FEATURES", help=about)
    add("--data", metavar="SOURCE", help="what a model embeds: images:FOLDER, shards:TARS or texts:FILE")
    add("--index", metavar="FOLDER", help="keep what was embedded, and go on with it (default: a temporary folder)")
    add("--skip-damaged", action="store_true", help="leave out what cannot be read, and say what it was")
    add("--model", help="of an index or of features that name none: what made them")
    add("--pretrained", help="weights file or OpenCLIP's tag")
    add("--tokenizer", help="another tokenizer than the model's")
    add("--device", default="cpu")
    add("--precision", default="fp32", choices=PRECISIONS)
    add("--scores", metavar="FOLDER", help="of python -m prolip.curate score: try rules on all of its samples")
    add("--captions", type=int, default=TEXTS, help=f"distinct captions that are embedded at most (default: {TEXTS:,})")
    add("--texts", metavar="FILE", help="further texts for paths, and to name pictures by: one per line")
    add("--risk", type=float, help="say what would be refused, so that at most this share of first answers is wrong")
    add("--calibrate", metavar="FILE", help="questions with answers for --risk, as prolip-search takes them")
    add("--confidence", type=float, default=0.9, help="that the risk is kept (default: 0.9)")
    add("--allow-private-hosts", action="store_true", help="for http(s) images that --calibrate names")
    add("--host", default="127.0.0.1", help="another address opens the page to others (default: this machine alone)")
    add("--port", type=int, default=PORT, help=f"0: any that is free (default: {PORT})")
    add("--open", action="store_true", help="open it in a browser")
    return parser.parse_args(arguments)


def threshold_of(args: argparse.Namespace, found: Opened) -> Threshold | None:
    """The refusal that --risk and --calibrate ask for."""
    if (args.risk is None) != (args.calibrate is None):
        raise ValueError("--risk and --calibrate belong together: how much is risked, and questions with known answers")
    if args.risk is None:
        return None
    if found.embedder is None:
        raise ValueError("--calibrate asks questions, and there is no model to embed them: give --model")
    asked, right = read_questions(args.calibrate, args.allow_private_hosts)
    search = partial(found.index.search, k=MOST + 1)  # as the page asks
    return calibrate(found.index, asked, right, found.embedder, args.risk, 1 - args.confidence, search)


def make_app(args: argparse.Namespace) -> App:
    """All that is shown."""
    at_least(args, 1, "captions")
    at_least(args, 0, "port")
    if args.port > 65535:
        raise ValueError(f"--port {args.port}: give 0 to 65535")
    further = [] if args.texts is None else lines_of(args.texts)
    found = open_source(args)
    captions = Captions(Gallery(found.index), found.embedder, args.captions, further)
    scores = None if args.scores is None else Path(args.scores)
    return App(found, Path(args.source).name or args.source, captions, scores, threshold_of(args, found))


def announce(server: Server, app: App) -> None:
    """Where it is, what it lacks, and who can see it."""
    print(f"{len(app.gallery.index):,} items at {server.url}  (Ctrl-C ends it)", flush=True)
    for line in app.opened.lacks:
        print(f"note: {line}", file=sys.stderr)
    if not server.is_private:
        host, port = str(server.server_address[0]), server.server_address[1]
        print(f"warning: --host {host} opens this to every machine that reaches this one: whoever"
              " does sees all items, captions and pictures, and has texts and pictures embedded here. There is no"
              " password, and nothing is encrypted. For one other machine leave --host out, and type there:"
              f" ssh -L {port}:127.0.0.1:{port} THIS_MACHINE", file=sys.stderr)  # fmt: skip


def warm_up(app: App, over: threading.Event) -> None:
    """Have what takes longest ready before it is asked for; once all is `over` its index is gone, and it may fail."""
    try:
        app.warm_up()
    except Exception:
        if not over.is_set():
            raise


@console.ends_in_one_line(OSError, ValueError, KeyError, CheckpointError)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: what the user can mend ends in one line and exit code 2."""
    args = parse(arguments)
    app = make_app(args)
    server = make_server(app, args.host, args.port)
    announce(server, app)
    over = threading.Event()
    threading.Thread(target=warm_up, args=(app, over), daemon=True).start()
    if args.open:
        webbrowser.open(server.url)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a temporary index goes then, too
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("ended", file=sys.stderr)
    finally:
        over.set()
        server.server_close()
        if app.opened.temporary is not None:
            app.opened.temporary.cleanup()
    return 0


def script() -> NoReturn:
    """`main` as a process of its own, whose output may die.

    It ends without the interpreter's own clearing up: a thread that still embeds would abort beneath it.
    """
    torch.set_grad_enabled(False)
    try:
        console.command(main)
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 0)


if __name__ == "__main__":
    script()
