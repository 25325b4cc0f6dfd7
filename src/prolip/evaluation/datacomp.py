"""The 38 tasks of DataComp and its two face sets: one model, one command, the paper's tables.

    python -m prolip.evaluation.datacomp --model local-dir:runs/b16/model --data-dir data/datacomp --output runs/b16/dc
    python -m prolip.evaluation.datacomp --model ViT-B-16 --pretrained openai --data-dir hf-hub --tasks cars vtab
    torchrun --nproc-per-node 8 -m -- prolip.evaluation.datacomp --model ... --data-dir ... --output ...
    python -m prolip.evaluation.datacomp --tables-of runs/b16/dc runs/l16/dc --output comparison

Processes with one --output share the tasks, and a later run goes on where one was broken off.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from prolip.data.reading.table import show_counts
from prolip.evaluation.loading import RANDOM
from prolip.evaluation.model import PRECISIONS
from prolip.evaluation.suites.datacomp.places import HUB
from prolip.evaluation.suites.datacomp.published import PUBLISHED, published_report
from prolip.evaluation.suites.datacomp.run import Outcome, listing, run
from prolip.evaluation.suites.datacomp.tasks import BY_KEY
from prolip.models.weights.checkpoint import CheckpointError
from prolip.utils import console


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m prolip.evaluation.datacomp", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--model", help="local-dir:FOLDER, hf-hub:NAME, or a name of ours or OpenCLIP's with --pretrained")
    add("--pretrained", help=f"weights file or OpenCLIP's tag; {RANDOM} for untrained weights")
    add("--tokenizer", help="another tokenizer than the model's: a folder of its files, or bpe")
    add("--data-dir", help=f"the folder or URL that holds the datasets' folders, or {HUB}: over the network")
    add("--tasks", nargs="+", metavar="TASK", help="keys, names or tags (imagenet, shift, vtab, retrieval, wilds, "
        "fairness; counted: the 38 of the average); default: all 40")  # fmt: skip
    add("--similarity", nargs="+", action="extend", help="csd, mean or measures (default: the method's own score)")
    add("--prompts", nargs="+", default=[], metavar="FILE", help="weights of prompts by python -m prolip.prompts fit, "
        "each of the task whose classes and prompts it has")  # fmt: skip
    add("--output", default="datacomp", metavar="DIR", help="for results.jsonl and tables.* (default: datacomp)")
    add("--save-features", metavar="DIR", help="keep embeddings here, and take those that are here already")
    add("--allow-missing", action="store_true", help="evaluate what is there; averages that lack a task are left out")
    add("--skip-damaged", action="store_true", help="leave out damaged samples; the tables mark such tasks")
    add("--no-uncertainty", action="store_true", help="without the figures of refusal and calibration")
    add("--plots", action="store_true", help="draw refusal and calibration of every task: OUTPUT/plots/TASK/*.png")
    add("--shard", metavar="I/N", help="this process's part of the tasks, I from 0")
    add("--published", nargs="+", metavar="NAME", help="published rows in the tables: parts of their names, all, none"
        " (default: the paper's and OpenCLIP's ViT-B-16 on DataComp-1B)")  # fmt: skip
    add("--tables-of", nargs="+", metavar="DIR", help="evaluate nothing: tables of the results in these folders")
    add("--device", default="auto", help="cuda: the GPU of this process (torchrun, srun); auto: that, or the CPU")
    add("--precision", default="fp32", choices=PRECISIONS)
    add("--batch-size", type=int, default=256)
    add("--workers", type=int, help="threads that decode images (default: cores - 1, at most 16)")
    add("--list", action="store_true", help="show all tasks and what to fetch for them")
    add("--list-published", action="store_true", help="show published rows and which of their averages do not follow")
    args = parser.parse_args(arguments)
    if not (args.list or args.list_published or args.tables_of or (args.model and args.data_dir)):
        parser.error("give --model and --data-dir (or --tables-of DIR, or --list)")
    args.similarity = args.similarity or [None]
    return args


@console.exits_in_one_line(OSError, ValueError, CheckpointError)
def main(arguments: Sequence[str] | None = None) -> Outcome | None:
    """The command: what the user can mend ends in a line and exit code 2; tasks that failed in exit code 1."""
    show_counts()
    args = parse(arguments)
    if args.list or args.list_published:
        print(listing() if args.list else published_report(PUBLISHED))
        return None
    outcome = run(args, lambda text: print(text, flush=True))
    for key, reason in outcome.failed.items():
        print(f"error: {BY_KEY[key].name} failed: {reason}", file=sys.stderr)
    if outcome.failed:
        raise SystemExit(1)
    return outcome


if __name__ == "__main__":
    console.guard()  # what is printed stands in files as well
    main(sys.argv[1:])
