"""`prolip explore`: a page to explore an index, a run with data, or features."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prolip.cli.command import COMPUTE, Data, Model, command, flag, output, shared
from prolip.cli.search import REFUSAL, check_risk, given, reading
from prolip.utils import console

if TYPE_CHECKING:
    from prolip.explorer.app import App

DATA = "data to embed: images:FOLDER, csv:FILE, shards:TARS, texts:FILE, ..."
EXPOSED = """warning: --host {host} opens this page to every machine that reaches this one. Their users see all items, \
captions and images, and can embed texts and images here, without password or encryption. For one other machine, \
remove --host and type there: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE"""


def make_app(args: argparse.Namespace) -> App:
    if args.port > 65535:
        raise ValueError(f"--port {args.port}: give 0 to 65535")
    check_risk(args)
    settings = reading(args)
    from prolip.explorer.app import App, open_source, resolved
    from prolip.explorer.gallery import Captions, Gallery
    from prolip.explorer.query import MOST
    from prolip.search.query import calibrate, read_queries
    from prolip.search.sources import lines_of
    from prolip.search.store import holds_index

    further = [] if args.texts is None else lines_of(args.texts)
    if holds_index(args.source):
        console.say(f"opening {args.source}")
    else:  # checks the data before the model is loaded
        address, model = resolved(args.source, args.data)
        args.model = model or args.model
        console.say(f"reading {address}" if model is None else f"embedding {address} with {args.model}")
    explored = open_source(args.source, given(args), args.data, args.output, **settings)
    index, embedder, threshold = explored.index, explored.embedder, None
    if explored.changes:
        print(explored.changes, file=sys.stderr)
    captions = Captions(Gallery(index, embedder), embedder, args.max_captions, further)
    if args.risk is not None:
        if embedder is None:
            raise ValueError("--calibrate needs a model to embed its queries: give --model")
        search, known = partial(index.search, k=MOST + 1), read_queries(args.calibrate, args.allow_private_hosts)
        threshold = calibrate(index, known, embedder, args.risk, 1 - args.confidence, search)  # as on the page
    return App(explored, Path(args.source).name or args.source, captions, args.scores and Path(args.scores), threshold)


@command(
    "explore",
    "runs/demo --data shards:data/emoji/emojione.tar --output runs/index",
    flag("source", "an index, saved features, or (with --data) a run or a model", metavar="SOURCE"),
    flag("--scores", "folder of prolip curate score, to try rules on all of its samples", metavar="FOLDER"),
    flag("--max-captions", "distinct captions to embed", default=2000, least=1),
    flag("--texts", "more texts for paths and names of images, one per line", metavar="FILE"),
    flag("--host", "address to listen on; other machines reach all but 127.0.0.1", default="127.0.0.1"),
    flag("--port", "port to listen on; 0: any free port", default=8571, least=0),
    flag("--open", "open the page in a browser", action="store_true"),
    REFUSAL,
    shared(Data, "data", "skip_damaged", "allow_private_hosts", help={"data": DATA}),
    output("folder to save or resume the index in (default: a temporary one)", required=False),
    shared(Model, help={"model": "model of the features, or new address of the index's model"}),
    COMPUTE,
)
def explore(args: argparse.Namespace) -> None:
    """Explore an index, a run with data, or saved features on a local page."""
    app = make_app(args)
    from prolip.explorer.server import make_server, serve

    server = make_server(app, args.host, args.port)
    print(f"{len(app.gallery.index):,} items at {server.url}  (stop with Ctrl-C)", flush=True)
    for line in app.explored.limitations:
        print(f"note: {line}", file=sys.stderr)
    if not server.is_private:
        host, port = str(server.server_address[0]), server.server_address[1]
        print(EXPOSED.format(host=host, port=port), file=sys.stderr)
    if args.open:
        webbrowser.open(server.url)
    serve(server)
    print("stopped", file=sys.stderr)
    os._exit(console.finished(0))  # a thread that still embeds would abort during the interpreter's cleanup
