"""Compare the defaults of training on little data: learning rate, warm-up, clipping, beta2 and bias.

It writes the tables of docs/studies/defaults.md.

    python scripts/studies/methods/defaults.py --out runs/defaults --part 1/8  # trains an eighth of what is missing
    python scripts/studies/methods/defaults.py --out runs/defaults --tables-only

On 50, 300 and 3,000 drawings of two corpora, from random weights and from a model of the other corpus, three seeds:
the defaults, and each setting changed by itself. Where data/icons is not built (scripts/corpora/build_icons.py), the
second corpus is the emoji's line drawings. Runs are trained one at a time; one that has ended is not trained again, so
the same command goes on where it was broken off. From trained weights a run goes on with the other corpus's model by
the defaults on 3,000 drawings and seed 0, which is trained first where it is missing.
Cells: R@1 of names for drawings by a designer that no model has seen, the mean over seeds, each seed in brackets; below
it the gains over the defaults with 95% intervals, by bootstrap over concepts, the seeds averaged in every draw. A table
for random weights, one for trained ones, and one of what is left of R@1 on the corpus that these had learnt.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import sys
import tarfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import sweep
from prolip.cli.main import main as prolip
from prolip.corpora.emoji.result import load
from prolip.data.reading.shards import expand_shards
from prolip.utils.outputs import replacing
from studies.tables import cell, gain, markdown, statistics, value_of, write

#: Corpus -> whose drawings are learnt from, and whose are held out.
EMOJI = ("data/emoji/{noto,noto-v1,twemoji,fluent-emoji-flat,fluent-emoji}.tar", "data/emoji/emojione.tar")
ICONS = ("data/icons/{tabler,mdi,lucide,phosphor-regular,unicons-line}.tar", "data/icons/remixicon-line.tar")
LINES = ("data/emoji/fluent-emoji-high-contrast.tar", "data/emoji/emojione.tar")
SIZES, STARTS, SEEDS = (50, 300, 3000), ("scratch", "trained"), (0, 1, 2)
#: Name -> flags: the defaults, and one setting at a time.
COMMON = {
    "defaults": "",
    "warmup-0": "--warmup 0%",
    "warmup-10": "--warmup 10%",
    "beta2-0.999": "--beta2 0.999",
    "bias-10": "--init-logit-bias -10",
}
VARIANTS = {
    "scratch": COMMON
    | {"lr-0.2": "--lr 1.5e-4", "lr-2": "--lr 1e-3", "beta2-0.98": "--beta2 0.98", "clip-1": "--grad-clip-norm 1"},
    "trained": COMMON
    | {
        "lr-0.1": "--lr 1.5e-5",
        "lr-0.3": "--lr 5e-5",
        "lr-3": "--lr 5e-4",
        "beta2-0.95": "--beta2 0.95",
        "no-clip": "--grad-clip-norm none",
    },
}
KEY = "names/i2t/R@1"
#: Folder of a run with the evaluation on the corpus of the weights that it began with.
KEPT = "eval_before"


class Case(NamedTuple):
    """One training but its seed."""

    corpus: str
    size: int
    start: str
    variant: str

    @property
    def name(self) -> str:
        """Of its runs, without their seed."""
        return "-".join(map(str, self))


def corpora() -> dict[str, tuple[str, str]]:
    """The two corpora that are there."""
    there = (ROOT / ICONS[1]).exists()
    return {"emoji": EMOJI, "icons" if there else "lines": ICONS if there else LINES}


def subset(folder: Path, corpus: str, size: int, seed: int) -> Path:
    """A shard with so many drawings of a corpus, or all of fewer; another draw for every seed."""
    path = folder / "data" / f"{corpus}-{size}-s{seed}.tar"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    members: dict[str, list[tuple[tarfile.TarFile, tarfile.TarInfo]]] = {}
    with contextlib.ExitStack() as held:
        for source in expand_shards(str(ROOT / corpora()[corpus][0])):
            shard = held.enter_context(tarfile.open(source.url))
            for member in shard.getmembers():
                members.setdefault(member.name.partition(".")[0], []).append((shard, member))
        chosen = random.Random(seed).sample(sorted(members), min(size, len(members)))
        with replacing(path) as temporary, tarfile.open(temporary, "w") as out:
            for shard, member in (pair for key in chosen for pair in members[key]):
                out.addfile(member, shard.extractfile(member))
    return path


def training(folder: Path, case: Case, seed: int, flags: str) -> dict[str, Any]:
    """As a sweep: one run. The recipe names a model and a method, all else is left to the defaults."""
    recipe = folder / "defaults.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text("method: prolip\nmodel: {model: ProLIP-ViT-XS-16}\nrun: {save_frequency: 0}\n", encoding="utf-8")
    data = subset(folder, case.corpus, case.size, seed)
    words = f"--train-data {data} --val-data emoji:{corpora()[case.corpus][1]} --workers 1 --no-report {flags}"
    if case.start == "trained":
        words += f" --pretrained {folder / f'{started_from(case).name}-s{SEEDS[0]}' / 'model'}"
    variants = {case.name: VARIANTS[case.start][case.variant]}
    return {"recipe": str(recipe), "seeds": [seed], "flags": words, "variants": variants}


def started_from(case: Case) -> Case:
    """Whose model a run goes on with."""
    other = next(corpus for corpus in corpora() if corpus != case.corpus)
    return Case(other, max(SIZES), "scratch", "defaults")


def train(folder: Path, case: Case, seed: int, flags: str) -> None:
    """One run and what it goes on from, where they are missing; their checkpoints are deleted."""
    if case.start == "trained":
        train(folder, started_from(case), SEEDS[0], flags)
    run = folder / f"{case.name}-s{seed}"
    sweep.train_all(training(folder, case, seed, flags), [case.name], folder, 1)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    if case.start == "trained" and (run / "model").exists() and not (run / KEPT).exists():
        held = ROOT / corpora()[started_from(case).corpus][1]
        words = ["--model", f"local-dir:{run / 'model'}", "--data", str(held), "--output", str(run / KEPT)]
        with contextlib.redirect_stdout(io.StringIO()):
            if code := prolip(["eval", "emoji", *words]):
                raise SystemExit(code)


def cases(options: argparse.Namespace) -> list[Case]:
    """All that were asked for."""
    return [
        Case(corpus, size, start, variant)
        for corpus, size, start in product(corpora(), options.sizes, options.starts)
        for variant in VARIANTS[start]
        if not options.variants or variant in options.variants
    ]


def results(folder: Path, case: Case, seeds: Sequence[int], evaluation: str = "eval") -> list:
    """Of the seeds that have ended."""
    runs = [folder / f"{case.name}-s{seed}" / evaluation for seed in seeds]
    return [statistics(load(run)) for run in runs if (run / "metrics.json").exists()]


def tables(folder: Path, wanted: Sequence[Case], seeds: Sequence[int]) -> dict[str, list[str]]:
    """Name -> table of a start, and of what its runs keep; a row for a variant, a column for so much of a corpus."""
    found: dict[str, list[str]] = {}
    for start in dict.fromkeys(case.start for case in wanted):
        columns = list(dict.fromkeys((case.corpus, case.size) for case in wanted))
        heads = ["setting", *(f"{corpus} {size:,}" for corpus, size in columns)]
        rows, left = list[list[str]](), list[list[str]]()
        for variant, flags in VARIANTS[start].items():
            kinds = [Case(corpus, size, start, variant) for corpus, size in columns]
            there = [case if case in wanted and results(folder, case, seeds) else None for case in kinds]
            if any(there):
                label = f"`{flags}`" if flags else variant
                rows.append([label, *(outcome(folder, case, seeds) if case else "" for case in there)])
                left.append([label, *(kept(folder, case, seeds) if case else "" for case in there)])
        found[start] = markdown(heads, rows)
        if start == "trained":
            bases = [results(folder, started_from(Case(*column, start, "")), SEEDS[:1]) for column in columns]
            before = ["before", *(cell([100 * value_of(one[KEY]) for one in base]) for base in bases)]
            found["kept"] = markdown(heads, [before, *(row for row in left if any(row[1:]))])
    return found


def outcome(folder: Path, case: Case, seeds: Sequence[int]) -> str:
    """R@1 of the defaults, the gain of what is changed."""
    found = results(folder, case, seeds)
    if case.variant == "defaults":
        return cell([100 * value_of(one[KEY]) for one in found])
    return gain(results(folder, case._replace(variant="defaults"), seeds), found, [KEY])[KEY]


def kept(folder: Path, case: Case, seeds: Sequence[int]) -> str:
    """R@1 on the corpus that the weights had learnt."""
    found = [100 * value_of(one[KEY]) for one in results(folder, case, seeds, KEPT)]
    return cell(found) if found else ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the runs")
    add("--part", default="1/1", metavar="I/N", help="train only part I of N (default: %(default)s, all)")
    add("--sizes", nargs="+", type=int, choices=SIZES, default=SIZES, metavar="SIZE")
    add("--starts", nargs="+", choices=STARTS, default=STARTS, metavar="START", help="scratch, trained")
    add("--variants", nargs="+", metavar="VARIANT", help="default: all")
    add("--seeds", nargs="+", type=int, default=SEEDS, metavar="SEED")
    add("--flags", default="", help="further flags of every training, as one text")
    add("--tables-only", action="store_true", help="train nothing")
    add("--write", type=Path, metavar="PAGE", help="page whose tables are replaced; without, they are printed")
    options = parser.parse_args(arguments)
    part, _, parts = options.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        parser.error(f"--part {options.part}: give I/N, such as 1/8")
    known = {name for variants in VARIANTS.values() for name in variants}
    if unknown := set(options.variants or ()) - known:
        parser.error(f"no variant {', '.join(sorted(unknown))}: there are {', '.join(sorted(known))}")
    options.part = int(part), int(parts)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing of the part, then print the table of all that is there."""
    options = parse(arguments)
    folder, wanted, (part, parts) = options.out.resolve(), cases(options), options.part
    if not options.tables_only:
        try:
            for seed, case in list(product(options.seeds, wanted))[part - 1 :: parts]:
                train(folder, case, seed, options.flags)
        except KeyboardInterrupt:
            sys.exit("interrupted: the same command goes on with the runs that are missing")
    made = tables(folder, wanted, options.seeds)
    if options.write:
        write(options.write, made, "studies/methods/defaults")
    else:
        print("\n\n".join("\n".join(table) for table in made.values()))


if __name__ == "__main__":
    from prolip.utils import console

    console.command(main)
