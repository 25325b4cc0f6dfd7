"""Hand a trained model on: its files with a model card of its figures, to a folder or to the hub.

    python -m prolip.hub save runs/demo shared/demo --license mit
    python -m prolip.hub push runs/demo org/name --license mit --dry-run
    python -m prolip.hub push runs/demo org/name --license mit --private

The first word is a run's folder, whose configuration and eval.json the card is made of, or a model's. What is pushed
is loaded as hf-hub:org/name, what is saved as local-dir:FOLDER.
"""
from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub.errors import HFValidationError

from prolip.hub.card import Said, find_source
from prolip.hub.saving import check_repo, push, save
from prolip.models.weights.checkpoint import CheckpointError
from prolip.utils import console


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m prolip.hub", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, target, meaning in (
        ("save", "folder", "where model, card and figures go"), ("push", "repo", "org/name on the hub"),
    ):  # fmt: skip
        one = commands.add_parser(command, help=f"to a {target}")
        one.add_argument("source", metavar="RUN", help="folder of a run, or of a model")
        one.add_argument(target, help=meaning)
        one.add_argument("--name", help="the model's name on its card (default: the target's)")
        one.add_argument("--license", metavar="ID", help="the model's licence in the hub's words: mit, cc-by-4.0")
        one.add_argument("--data-license", metavar="TEXT", help="a sentence on the licence of what it was trained on")
        one.add_argument("--eval", metavar="FILE", help="figures of the card (default: the run's eval.json)")
        if command == "save":
            one.add_argument("--replace", action="store_true", help="overwrite a README.md that is no card of ours")
        else:
            one.add_argument("--private", action="store_true", help="for a repository that is made now")
            one.add_argument("--dry-run", action="store_true", help="write all of it here, say what would be sent")
    return parser.parse_args(arguments)


@console.ends_in_one_line(OSError, ValueError, ImportError, HFValidationError, CheckpointError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Save, or save and push; 2 with one line where it cannot be."""
    args = parse(arguments)
    source = find_source(args.source, args.eval)
    if args.command == "save":
        said = Said(args.name or Path(args.folder).resolve().name, args.license, args.data_license)
        written = save(source, Path(args.folder), said, replace=args.replace)
        print(f"{args.folder}: {', '.join(path.name for path in written)}; load it as local-dir:{args.folder}")
        return 0
    check_repo(args.repo)
    said = Said(args.name or args.repo.split("/")[1], args.license, args.data_license)
    with tempfile.TemporaryDirectory() as folder:
        written = save(source, Path(folder) / "model", said, f"hf-hub:{args.repo}")
        if args.dry_run:
            print(f"would be sent to {args.repo}:")
            for path in written:
                print(f"  {path.stat().st_size:>13,} bytes  {path.name}")
            print(f"\n{(Path(folder) / 'model/README.md').read_text(encoding='utf-8')}")
            return 0
        print(f"load it as {push(Path(folder) / 'model', args.repo, args.private)}")
    return 0


def script() -> None:
    """`prolip-hub`."""
    console.command(main)


if __name__ == "__main__":
    console.command(main)
