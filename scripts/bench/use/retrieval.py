"""Time and peak memory of COCO 5K, COCO 1K, CxC and ECCV Caption on one score matrix: ours against eccv_caption.

    PYTHONPATH=src OMP_NUM_THREADS=1 python scripts/bench/use/retrieval.py              # 5,000 images x 25,000 captions
    PYTHONPATH=src python scripts/bench/use/retrieval.py --large 100000 --dim 64        # N x N, embeddings to metrics

Needs `pip install eccv_caption`. Each way runs in a new process: the same scores of random embeddings in which captions
lie near their images, then the metrics. Time is from scores to metrics, without computing the scores: wall-clock, and
processor time, which is fairer on a busy machine. Memory is the process's peak (VmHWM): all of it, and without Python,
PyTorch and the annotations before any scores exist. A matrix of scores counts, 500 MB.

- package: eccv_caption. Rank every row and column (NumPy's argsort, int32, in blocks), then compute its metrics,
  R-Precision and recalls, in the two calls that its reporting needs.
- matrix: ours, from the same matrix.
- function: ours, from the embeddings without a matrix, so rounding of the scores differs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import numpy as np
import torch
import torch.nn.functional as F

from bench.common import held
from prolip.evaluation.datasets import coco_labels as coco
from prolip.evaluation.metrics import streaming as large
from prolip.evaluation.metrics.streaming import PairScores, Relevance
from prolip.gaussian import Gaussian

WAYS = ("package", "matrix", "function")


def embeddings(annotations: coco.Annotations, dim: int, seed: int) -> tuple[list[int], list[int], Gaussian, Gaussian]:
    """Return ids, and random Gaussians in which a caption lies near its image."""
    image_ids, caption_ids = list(annotations.coco.captions_of), list(annotations.captions)
    generator = torch.Generator().manual_seed(seed)
    place = {key: i for i, key in enumerate(image_ids)}
    owner = torch.tensor([place[annotations.coco.images_of[c][0]] for c in caption_ids])
    image = torch.randn(len(image_ids), dim, generator=generator)
    text = image[owner] + 1.5 * torch.randn(len(caption_ids), dim, generator=generator)
    log_var = [torch.randn(len(x), dim, generator=generator) * 0.3 - 8 for x in (image, text)]
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    return image_ids, caption_ids, Gaussian(image, log_var[0]), Gaussian(text, log_var[1])


def make_matrix(scores: PairScores) -> torch.Tensor:
    """Compute all scores, row block by row block."""
    out = torch.empty(scores.images, scores.texts)
    for rows, block in large.row_blocks(scores.image_rows, scores.images, scores.texts):
        out[rows] = block
    return out


def order_of(scores: np.ndarray, ids: np.ndarray, block: int = 256) -> np.ndarray:
    """Return the gallery ids of every row, best first, ties by position: int32."""
    out = np.empty(scores.shape, dtype=np.int32)
    for start in range(0, len(scores), block):
        out[start : start + block] = ids[np.argsort(-scores[start : start + block], axis=1, kind="stable")]
    return out


def by_package(matrix: np.ndarray, image_ids: list[int], caption_ids: list[int]) -> dict[str, float]:
    """Return the metrics of eccv_caption, under our names."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        from eccv_caption import Metrics

        found = Metrics()
        found.set_i2t_retrieved_items(dict(zip(image_ids, order_of(matrix, np.array(caption_ids, dtype=np.int32)))))
        found.set_t2i_retrieved_items(dict(zip(caption_ids, order_of(matrix.T, np.array(image_ids, dtype=np.int32)))))
        recalls = found.compute_all_metrics(
            target_metrics=["coco_1k_recalls", "coco_5k_recalls", "cxc_recalls", "eccv_recalls"]
        )
        eccv = found.compute_all_metrics(target_metrics=["eccv_map_at_r", "eccv_rprecision"])
    out: dict[str, float] = {}
    for name, both in (recalls | eccv).items():
        task, figure = name.rsplit("_", 1) if "_r" in name and name[-1].isdigit() else ("eccv", name)
        figure = {"eccv_map_at_r": "mAP@R", "eccv_rprecision": "R-Precision"}.get(figure, f"R@{figure[1:]}")
        out |= {f"{task}/{way}/{figure}": float(value) for way, value in both.items()}
    return out


def measure(way: str, dim: int, seed: int) -> dict:
    """Return seconds, peak MB and metrics of one way, in this process."""
    annotations = coco.load_annotations()
    image_ids, caption_ids, image, text = embeddings(annotations, dim, seed)
    before = held() / 1e6
    scores = PairScores.from_gaussians(image, text)
    if way != "function":
        matrix = make_matrix(scores)
        scores = PairScores.from_matrix(matrix)
    started, processor = time.perf_counter(), time.process_time()
    if way == "package":
        figures = by_package(matrix.numpy(), image_ids, caption_ids)
    else:
        figures = coco.label_set_metrics(scores, image_ids, caption_ids, annotations)
    seconds = {"seconds": time.perf_counter() - started, "processor": time.process_time() - processor}
    return seconds | {"peak": held() / 1e6, "before": before, "figures": figures}


def measure_large(size: int, dim: int, seed: int) -> dict:
    """Measure N x N retrieval in both directions, one match each."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(size, dim, generator=generator)
    other = mean + 2 * torch.randn(size, dim, generator=generator)
    log_var = torch.full((size, dim), -8.0)
    image, text = (Gaussian(F.normalize(x, dim=-1), log_var) for x in (mean, other))
    relevance = Relevance.from_pairs(torch.arange(size), torch.arange(size), size, size)
    inputs, started = held() / 1e6, time.perf_counter()
    figures = large.retrieval(PairScores.from_gaussians(image, text), relevance)
    return {"seconds": time.perf_counter() - started, "peak": held() / 1e6, "before": inputs, "figures": figures}


def in_child(args: argparse.Namespace, *words: str) -> dict:
    """Run one measurement in a new process."""
    command = [sys.executable, __file__, "--dim", str(args.dim), "--seed", str(args.seed), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def report_ways(args: argparse.Namespace) -> None:
    """Print the table, and the differences between the metrics."""
    found = {way: in_child(args, "--measure", way) for way in WAYS}
    print("| way | seconds | processor seconds | package's over it | peak MB | for scores and metrics, MB |")
    print("|---|---|---|---|---|---|")
    for way, result in found.items():
        ratio = found["package"]["processor"] / result["processor"]
        times = f"{result['seconds']:.2f} | {result['processor']:.2f} | {ratio:.1f}"
        print(f"| {way} | {times} | {result['peak']:.0f} | {result['peak'] - result['before']:.0f} |")
    theirs = found["package"]["figures"]
    print("\n| metric | package | matrix | function |\n|---|---|---|---|")
    for key in theirs:
        print(f"| {key} | " + " | ".join(f"{found[way]['figures'][key]:.6f}" for way in WAYS) + " |")
    for way in WAYS[1:]:
        apart = max(abs(value - found[way]["figures"][key]) for key, value in theirs.items())
        print(f"largest difference to the package, {way}: {apart:.1e} over {len(theirs)} metrics")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=64, help="width of the embeddings (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", type=int, metavar="N", help="measure N x N with our streaming, instead of comparing")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.dim, args.seed)))
    elif args.large:
        result = measure_large(args.large, args.dim, args.seed)
        keys = ("i2t/R@1", "i2t/median_rank", "t2i/R@1", "t2i/median_rank", "rsum")
        print(
            f"{args.large} x {args.large}, D={args.dim}: {result['seconds']:.2f} s, peak {result['peak']:.0f} MB, "
            f"{result['before']:.0f} MB of it before"
        )
        print("  ".join(f"{key} {result['figures'][key]:.4f}" for key in keys))
    else:
        threads = torch.get_num_threads()
        print(f"torch {torch.__version__}, {threads} threads, scores of D={args.dim}, seed {args.seed}\n")
        report_ways(args)


if __name__ == "__main__":
    main()
