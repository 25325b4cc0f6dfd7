"""`prolip hub` and `prolip export`: a model for others, and for other programs."""
from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from prolip.cli.command import Command, Output, add


# --- hub --------------------------------------------------------------------------------------------------------------
def about_model(parser: argparse.ArgumentParser) -> None:
    """The flags of a model card."""
    add_argument = parser.add_argument
    add_argument("run", metavar="RUN", help="folder of a run, or of a model")
    add_argument("--name", help="the model's name on its card; the target's if left out")
    add_argument("--license", metavar="ID", help="the model's licence by its name on the hub: mit, cc-by-4.0")
    add_argument("--data-license", metavar="TEXT", help="a sentence on the licence of the training data")
    add_argument("--eval", metavar="FILE", help="metrics of the card; the run's eval.json if left out")


def save_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `prolip hub save`."""
    about_model(parser)
    add(parser, Output, "output", "overwrite", required=["output"], help={
        "output": "folder for the model, its card and its plots", "overwrite": "replace a README.md that ProLIP did not write"})


def push_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `prolip hub push`."""
    about_model(parser)
    parser.add_argument("repo", metavar="ORG/NAME", help="repository on the hub")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--dry-run", action="store_true", help="write all files here, and print what would be sent")


def save_model(args: argparse.Namespace) -> None:
    """Write the model with its card to a folder."""
    from prolip.hub.card import Said, find_source
    from prolip.hub.saving import save

    folder = Path(args.output)
    source, said = find_source(args.run, args.eval), Said(args.name or folder.resolve().name, args.license, args.data_license)
    written = save(source, folder, said, replace=args.overwrite)
    print(f"{folder}: {', '.join(path.name for path in written)}; load it as local-dir:{folder}")


def push_model(args: argparse.Namespace) -> None:
    """Send the model with its card to the hub, or show what would be sent."""
    from prolip.hub.card import Said, find_source
    from prolip.hub.saving import check_repo, push, save

    source = find_source(args.run, args.eval)
    check_repo(args.repo)
    said = Said(args.name or args.repo.split("/")[1], args.license, args.data_license)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        written = save(source, folder, said, f"hf-hub:{args.repo}")
        if not args.dry_run:
            print(f"load it as {push(folder, args.repo, args.private)}")
            return
        print(f"would be sent to {args.repo}:")
        for path in written:
            print(f"  {path.stat().st_size:>13,} bytes  {path.name}")
        print(f"\n{(folder / 'README.md').read_text(encoding='utf-8')}")


COMMANDS = {
    "hub": {
        "save": Command("write a trained model and its card to a folder", "prolip hub save runs/demo --output shared/demo --license mit",
                        save_flags, save_model),
        "push": Command("push a trained model and its card to the hub", "prolip hub push runs/demo org/name --license mit --dry-run",
                        push_flags, push_model),
    },
}  # fmt: skip
