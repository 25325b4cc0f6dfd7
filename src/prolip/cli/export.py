"""`prolip export` and `prolip hub`: models for other programs and other people."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from prolip.cli.command import Model, command, either, flag, output, shared
from prolip.utils.console import say
from prolip.utils.outputs import check_output

# --- hub --------------------------------------------------------------------------------------------------------------
#: The flags of a model card.
CARD = (
    flag("run", "folder of a run, or of a model", metavar="RUN"),
    flag("--name", "the model's name on its card; default: the target's"),
    flag("--license", "the model's licence, a hub identifier: mit, cc-by-4.0", metavar="ID"),
    flag("--data-license", "sentence on the licence of the training data", metavar="TEXT"),
    flag("--metrics", "metrics for the card; default: the run's eval.json", metavar="FILE"),
)
FORMATS = ("onnx", "pt2")


@command(
    "hub save",
    "runs/demo --output shared/demo --license mit",
    *CARD,
    output("folder for the model, its card and its plots", "overwrite"),
)
def save_model(args: argparse.Namespace) -> None:
    """Write a trained model and its card to a folder."""
    from prolip.hub.sharing import CardInfo, find_source, save
    from prolip.models.diagnose import is_model

    folder = Path(args.output)
    former = is_model(folder)
    info = CardInfo(args.name or folder.resolve().name, args.license, args.data_license)
    written = save(find_source(args.run, args.metrics), folder, info, overwrite=args.overwrite)
    print(f"{folder}: {', '.join(path.name for path in written)}; load it as local-dir:{folder}")
    if former:
        say(f"{folder}: the former model was replaced")


@command(
    "hub push",
    "runs/demo org/name --license mit --dry-run",
    *CARD,
    flag("repo", "repository on the hub", metavar="ORG/NAME"),
    flag("--private", "make a new repository private", action="store_true"),
    flag("--dry-run", "write all files to a temporary folder, and list them instead of sending", action="store_true"),
)
def push_model(args: argparse.Namespace) -> None:
    """Push a trained model and its card to the hub."""
    from prolip.hub.sharing import CardInfo, check_repo, find_source, push, save

    source = find_source(args.run, args.metrics)
    check_repo(args.repo)
    info = CardInfo(args.name or args.repo.split("/")[1], args.license, args.data_license)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        written = save(source, folder, info, f"hf-hub:{args.repo}")
        if not args.dry_run:
            print(f"load it as {push(folder, args.repo, args.private)}")
            return
        print(f"files for {args.repo} (not sent):")
        for path in written:
            print(f"  {path.stat().st_size:>13,} bytes  {path.name}")
        print(f"\n{(folder / 'README.md').read_text(encoding='utf-8')}")


# --- export -----------------------------------------------------------------------------------------------------------
@command(
    "export graph",
    "--model local-dir:runs/demo/model --output runs/demo/onnx",
    shared(Model, "model", "pretrained", required=["model"]),
    output("folder for the graphs of both towers"),
    flag("--format", "onnx, or PyTorch's pt2", nargs="+", choices=FORMATS, default=["onnx"]),
)
def export_graph(args: argparse.Namespace) -> int:
    """Write both towers as graphs for programs without this code. Return 1 if one differs from the model or fails."""
    from prolip.export import BATCHES, TOLERANCE, WAYS, largest_differences, load

    check_output(args.output, folder=True)
    model = load(args.model, args.pretrained)
    written = [WAYS[name](model, args.output) for name in args.format]
    equal = True
    for files in written:
        try:
            found = largest_differences(model, files)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        for name, worst in found.items():
            sizes = ", ".join(map(str, BATCHES))
            print(f"{files[name]}: differs from the model by at most {worst:.1e} (batches of {sizes})")
            equal &= worst <= TOLERANCE
    if not equal:
        print(f"error: the graphs differ from the model by more than {TOLERANCE:g}: do not use them", file=sys.stderr)
    return 0 if equal else 1


@command(
    "export checkpoint",
    "runs/demo/checkpoints/step_1750.pt --output runs/demo/step_1750",
    flag("checkpoint", "file or URL of a checkpoint: .../step_N.pt", metavar="FILE"),
    either(
        flag("--ema", "use the EMA weights", dest="average", action="store_const", const="ema"),
        flag("--swa", "use the SWA weights", dest="average", action="store_const", const="swa"),
    ),
    output("folder for the model"),
)
def export_checkpoint(args: argparse.Namespace) -> None:
    """Write the model of a checkpoint to a folder."""
    from prolip.models.diagnose import is_model
    from training.model import export_checkpoint as export

    former = is_model(Path(args.output))
    print(export(args.checkpoint, Path(args.output), args.average))
    if former:
        say(f"{args.output}: the former model was replaced")
