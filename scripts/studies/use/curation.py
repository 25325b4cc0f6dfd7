"""Measure whether curation finds wrong captions and whether training on the kept samples helps.

    python scripts/studies/use/curation.py --out runs/curation --write docs/studies/curation.md
    python scripts/studies/use/curation.py --out runs/curation-icons --corpus icons --write docs/studies/curation.md

All captions of 30% of the samples are exchanged, by shard. A model by SigLIP's loss, trained on other designers'
drawings, scores them (`prolip curate`). The rule keeps pairs that score higher than an average pair of their batch, and
does not use the share of 30%. That model is then fine-tuned on all samples, on the kept ones, and on the correct ones
only, for each seed, and evaluated on an unseen designer. Finished runs are kept.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import numpy as np
from sklearn.metrics import roc_auc_score

import sweep
from prolip.cli.main import main as prolip_command
from prolip.curate.rules import MEANINGS
from prolip.curate.select import SELECTION
from prolip.curate.tables import read_table
from prolip.data.captions import Selector
from prolip.data.reading.shards import expand_source
from prolip.data.reading.tar import read_shard
from prolip.data.samples import json_record, suffixes_of
from prolip.utils.documents import read_yaml
from studies import tables
from studies.methods import study

WRONG = 0.3
RULE = "mismatch: normalised_score < 0"
#: Exchanged fields: every text of a sample.
TEXTS = ("name", "keywords", "subgroup", "group")
#: Rows of the table -> training shards, in the folder of the study.
VARIANTS = {"all": "noisy", "kept": "kept", "right": "right"}
KEYS = ("names/rsum", "captions/i2t/mAP@R", "captions/t2i/mAP@R")
MARK = "curation {}"


def exchange(folder: Path, shards: str, select: str | None, wrong: float, seed: int = 0) -> None:
    """Write the selected samples to noisy/, with all captions of a share exchanged, and the unchanged ones to right/.

    The JSON of an exchanged sample has "wrong": true.
    """
    chosen = Selector.parse(select)
    for url in expand_source(shards):
        samples = [raw for raw in read_shard(url) if chosen is None or chosen(json_record(raw))]
        generator = random.Random(f"{seed} {Path(url).name}")
        rows = sorted(generator.sample(range(len(samples)), round(wrong * len(samples))))
        moved = dict(zip(rows, derangement(rows, generator)))
        for name in ("noisy", "right"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        with (
            tarfile.open(folder / "noisy" / Path(url).name, "w") as noisy,
            tarfile.open(folder / "right" / Path(url).name, "w") as right,
        ):
            for row, raw in enumerate(samples):
                own, given = json_record(raw), json_record(samples[moved.get(row, row)])
                record = own | {name: given[name] for name in TEXTS if name in given} | {"wrong": row in moved}
                image = next(suffix for suffix in suffixes_of(raw) if suffix not in ("txt", "json"))
                files = {image: raw[image], "txt": record["name"].encode(), "json": json.dumps(record).encode()}
                for tar in (noisy, *([] if row in moved else [right])):
                    for suffix, data in files.items():
                        member = tarfile.TarInfo(f"{raw['__key__']}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))


def derangement(rows: Sequence[int], generator: random.Random) -> list[int]:
    """Return the rows in a random order in which none keeps its place (a random cycle)."""
    order = list(rows)
    generator.shuffle(order)
    following = dict(zip(order, order[1:] + order[:1]))
    return [following[row] for row in rows]


class Curation:
    """The study in its folder. options: from `parse`."""

    def __init__(self, options: argparse.Namespace):
        self.folder, self.corpus, self.seeds = options.out.resolve(), options.corpus, options.seeds
        self.steps, self.jobs, self.flags = options.steps, options.jobs, options.flags
        self.recipe = study.RECIPES[self.corpus]
        self.select = read_yaml(ROOT / self.recipe)["data"].get("select")
        words = [
            "--out",
            str(self.folder),
            "--corpus",
            self.corpus,
            "--methods",
            "siglip",
            "--noise",
            "0",
            "--backbone-flags",
            options.backbone_flags,
        ]
        self.backbone = study.Runs(study.parse(words)).backbone

    @property
    def model(self) -> Path:
        """Return the folder of the model that scores and is fine-tuned."""
        return self.folder / f"{study.BACKBONE}-s0" / "model"

    def curate(self) -> None:
        """Exchange captions, score the samples, and select those with a good score."""
        data, scores = self.folder / "noisy", self.folder / "curated"
        if not data.exists():
            exchange(self.folder, study.DESIGNERS[self.corpus][1], self.select, WRONG)
        commands = [
            ["score", "--data", str(data), "--model", f"local-dir:{self.model}", "--output", str(scores)],
            ["select", str(scores), "--drop", RULE, "--yes"],
            ["write", str(scores), "--output", str(self.folder / "kept")],
            ["report", str(scores)],
        ]
        for command in commands:
            if prolip_command(["curate", *command]):
                sys.exit("error: curation failed. See the message above")

    @property
    def trainings(self) -> dict[str, Any]:
        """Return the study as a sweep."""
        start = f"--pretrained {self.model} --method siglip --warmup {max(1, self.steps // 8)} --save-frequency 0"
        flags = f"--max-steps {self.steps} {start} {study.FINE_TUNING} {self.flags}"
        variants = {name: f"--train-data {self.folder / place}" for name, place in VARIANTS.items()}
        return {"recipe": self.recipe, "seeds": self.seeds, "flags": flags, "variants": variants}

    def train(self) -> None:
        """Train all missing runs."""
        sweep.train_all(self.backbone, [study.BACKBONE], self.folder, 1)
        self.curate()
        sweep.train_all(self.trainings, list(VARIANTS), self.folder, self.jobs)

    def found(self) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Return masks of samples with a wrong caption and of kept samples, and every signal."""
        wrong, kept = [], []
        figures: dict[str, list[np.ndarray]] = {name: [] for name in MEANINGS}
        for path in sorted((self.folder / "curated/scores").glob("*.parquet")):
            wrong += [json_record(raw)["wrong"] for raw in read_shard(read_table(path).note["shard"])]
            kept.append(read_table(self.folder / "curated" / SELECTION / path.name, ["copies"]).columns["copies"] > 0)
            names = [name for name in read_table(path).kinds if name in figures]
            for name, values in read_table(path, names).columns.items():
                figures[name].append(values)
        return np.array(wrong), np.concatenate(kept), {k: np.concatenate(v) for k, v in figures.items() if v}

    def tables(self) -> list[str]:
        """Return the AUROC of every signal, and the gains of training."""
        wrong, kept, figures = self.found()
        rows = [
            [f"`{name}`", f"{roc_auc_score(~wrong, values):.3f}"]
            for name, values in figures.items()
            if name not in ("width", "height")
        ]
        dropped = ~kept
        gone, found = dropped.sum(), (wrong & dropped).sum()
        said = (
            f"{len(wrong):,} samples, {wrong.sum():,} with wrong captions. The rule drops {gone:,}, of which"
            f" {100 * found / max(gone, 1):.1f}% are wrong: {100 * found / max(wrong.sum(), 1):.1f}% of these."
        )
        lines = [said, "", *tables.markdown(["metric", "AUROC of right captions"], rows), ""]
        runs = {
            name: [
                study.load(path)
                for seed in self.seeds
                if (path := self.folder / f"{name}-s{seed}" / "eval").joinpath("metrics.json").exists()
            ]
            for name in VARIANTS
        }
        each = {name: [tables.statistics(result) for result in results] for name, results in runs.items()}
        rows = []
        for name, results in runs.items():
            gain = tables.gain(each["all"], each[name], KEYS[:1])[KEYS[0]] if name != "all" else ""
            cells = [tables.cell([100 ** (key != KEYS[0]) * x.metrics[key] for x in results]) for key in KEYS]
            rows.append([name, *cells, gain])
        heads = ["trained on", "names RSUM", "captions mAP@R i2t", "t2i", "names RSUM: gain over all"]
        return lines + tables.markdown(heads, rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the study")
    add("--corpus", choices=list(study.RECIPES), default="emoji")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    add("--steps", type=int, default=300, help="steps of every training (default: %(default)s)")
    add("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    add("--flags", default="", help="additional flags of every training, as one text")
    add("--backbone-flags", default="", help="additional flags of the backbone's training")
    add("--tables-only", action="store_true", help="train nothing")
    add("--write", type=Path, metavar="PAGE", help="page whose table to replace; default: print it")
    options = parser.parse_args(arguments)
    if options.jobs < 1 or options.steps < 2:
        parser.error("give --jobs of 1 or more and --steps of 2 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the missing runs, then write the table."""
    options = parse(arguments)
    curation = Curation(options)
    if not options.tables_only:
        curation.train()
    lines = curation.tables()
    if options.write:
        tables.write(options.write, {MARK.format(curation.corpus): lines}, "studies/use/curation")
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    from prolip.utils import console

    console.command(main)
