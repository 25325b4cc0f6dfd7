"""Time of every method's training step against CLIP's (InfoNCE) on the same towers; memory of PCME's and VACSR's loss.

    python scripts/bench/train/methods.py --rounds 9    # steps, ProLIP-ViT-S-16, batch 32
    python scripts/bench/train/methods.py --memory --match-samples 8 --batch-size 128 --dim 1024
    python scripts/bench/train/methods.py --memory vacsr --batch-size 1024 --dim 512
    python scripts/bench/train/methods.py --rank 5000 25000 --dim 512 --shortlist 100  # VACSR's ranking
    python scripts/bench/train/methods.py --neighbours 5000 25000 --dim 512  # source-free's, both directions

Steps take turns within one process, as in step.py: forward, loss, backward, fused AdamW. --memory prints the peak
memory of one PCME loss with its gradients above its inputs (Linux), each in a process of its own: ours, and all pairs
of samples at once, B x B x J x J distances of torch.cdist. Memory of the coordinate differences of formula (2),
B x B x J x J x D, is computed, not measured. For VACSR: ours above the model, and all pairs through the adapter at
once, skipped above --most GiB. --rank: exact for up to --exact-images images, from which the time of all is estimated.
--neighbours: circulating blocks, by which ranks find neighbours, against whole rows of the gallery on one process;
both in turns, in one process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch
import torch.nn.functional as F

from bench.common import forget_peak, held, spread
from bench.train import step as bench_step
from prolip import ranks
from prolip.embeddings import UnpairedEmbeddings
from prolip.evaluation.metrics.streaming import PairScores, Relevance, retrieval
from prolip.gaussian import Gaussian
from prolip.losses import log_match_odds, tiled_loss_over_ranks
from prolip.methods import METHODS, source_free
from prolip.methods.vacsr import SimilarityAdapter, VACSRConfig, VACSRScore, pair_terms  # noqa: E402
from prolip.random import pair_noise
from prolip.scores import CSDScore, Score, Side, largest

OTHER: dict[Side, Side] = {"image": "text", "text": "image"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="ProLIP-ViT-S-16")
    add("--batch-size", type=int, default=32)
    fresh = [name for name, method in METHODS.items() if not method.adapts]  # others need pairs of their own
    add("--methods", nargs="+", default=[name for name in fresh if name != "clip"], choices=fresh)
    add("--rounds", type=int, default=9)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", default="cpu")
    add("--precision", default="bf16", choices=("bf16", "fp32"))
    add("--processor-time", action="store_true", help="use processor time, for a busy machine")
    add("--memory", nargs="?", const="pcme", choices=("pcme", "vacsr"), help="memory of that loss, no steps")
    add("--rank", type=int, nargs=2, metavar=("IMAGES", "TEXTS"), help="time VACSR's ranking, no steps")
    add("--neighbours", type=int, nargs=2, metavar=("IMAGES", "TEXTS"), help="time source-free's search, no steps")
    add("--block", type=int, default=ranks.BLOCK, help="rows per block of source-free's search")
    add("--shortlist", type=int, default=100)
    add("--exact-images", type=int, default=5000)
    add("--most", type=float, default=4.0)
    add("--hidden", type=int, default=VACSRConfig().adapter_hidden)
    add("--match-samples", type=int, default=8)
    add("--dim", type=int, default=1024)
    return parser.parse_args()


def make_steps(options: argparse.Namespace, device: torch.device) -> dict[str, bench_step.Step]:
    """Return a training step of each method, CLIP's first."""
    steps = {}
    batch = bench_step.make_batch(options, device)
    place = torch.arange(options.batch_size, device=device)
    batch |= {"caption_id": place, "caption_ids": place.unsqueeze(1)}
    for name in ("clip", *options.methods):
        method = METHODS[name]
        config = method.config()
        cfg: dict[str, Any] = {"name": name, "config": vars(config)}
        model = bench_step.prolip.create_model(options.model, device=device, method_cfg=cfg)
        objective = method.objective(model, config).to(device)
        own = batch
        if method.objective.needs(config).data.get("captions"):  # as the loader gives several captions
            own = batch | {"text": batch["text"].unsqueeze(1)}
        loss = lambda step, objective=objective, own=own: objective(objective.prepare(own, step))["loss"]  # noqa: E731
        steps[name] = bench_step.make_step(objective.train(), loss, options, device)
    return steps


def time_steps(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    bench_step.keep_freed_memory()
    clock = time.process_time if options.processor_time else time.perf_counter
    times = bench_step.measure(make_steps(options, device), options.rounds, device, clock)
    print(
        f"{options.model}, batch {options.batch_size}, {options.precision}, {options.threads} threads"
        + (", processor time" if options.processor_time else "")
    )
    print("| method | ms | step / clip |\n|---|---:|---:|")
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times["clip"])]
        print(f"| {name} | {statistics.median(values) * 1e3:.1f} | {spread(ratios)} |")


def pcme_loss(way: str, batch: int, samples: int, dim: int, pipe: Any) -> None:
    """Compute one loss with its gradients. Send the seconds and the peak MiB above its inputs."""
    v, t = (F.normalize(torch.randn(batch, samples, dim), dim=2).requires_grad_() for _ in range(2))
    label = torch.eye(batch)

    def loss(odds: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(odds, positive.to(odds.dtype), reduction="sum") / batch

    before, start = forget_peak(), time.perf_counter()
    if way == "tiles":
        odds = lambda x, y: log_match_odds(x[0], y[0], 15.0, 15.0)  # noqa: E731
        value = tiled_loss_over_ranks(odds, (v,), (t,), loss)
    else:
        value = loss(log_match_odds(v, t, 15.0, 15.0), label)
    value.backward()
    pipe.send((value.item(), time.perf_counter() - start, (held() - before) / 2**20))


def vacsr_loss(way: str, batch: int, dim: int, hidden: int, pipe: Any) -> None:
    """Compute one loss of VACSR with its gradients. Send the same numbers as `pcme_loss`."""
    config = VACSRConfig(known_matches=False, adapter_hidden=hidden)
    v, t = (F.normalize(torch.randn(batch, dim), dim=1).requires_grad_() for _ in range(2))
    adapter = SimilarityAdapter(dim, hidden, config.mixture_components)
    place = torch.arange(batch)
    weights = list(adapter.parameters())

    def sample(x: Any, y: Any) -> torch.Tensor:
        noise = pair_noise(0, x[1], y[1], dim * config.mixture_components, config.mixture_components)
        return adapter(x[0], y[0], *noise, config.gumbel_temperature)

    def loss(numbers: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        logit, divergence, log_var = numbers
        terms = pair_terms(logit, log_var, positive)
        return config.kl_weight * divergence.mean() + sum(terms.values())

    before, start = forget_peak(), time.perf_counter()
    if way == "tiles":
        value = tiled_loss_over_ranks(sample, (v, place), (t, place), loss, weights, tile=config.pair_tile)
    else:
        value = loss(sample((v, place), (t, place)), torch.eye(batch, dtype=torch.bool))
    value.backward()
    pipe.send((value.item(), time.perf_counter() - start, (held() - before) / 2**20))


def alone(target: Any, *words: Any) -> tuple[float, float, float]:
    """Return the numbers that `target` sends from a process of its own."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*words, send))
    process.start()
    found = receive.recv()
    process.join()
    return found


def measure_vacsr_memory(options: argparse.Namespace) -> None:
    batch, dim, hidden = options.batch_size, options.dim, options.hidden
    print(f"VACSR's loss, B = {batch}, D = {dim}, hidden {hidden}\n| way | MiB | s |\n|---|---:|---:|")
    # autograd keeps of each pair: the product, mean, log_var and sigma of K = 2, noise, z; both hidden layers
    mib = batch**2 * (9 * dim + 2 * hidden) * 4 / 2**20
    for way in ("tiles", "all pairs at once"):
        if way == "tiles" or mib < 1024 * options.most:
            _, seconds, most = alone(vacsr_loss, way, batch, dim, hidden)
            print(f"| {way} | {most:.0f} | {seconds:.2f} |", flush=True)
    print(f"| memory of all pairs at once, computed | {mib:,.0f} | |")


def time_ranking(options: argparse.Namespace) -> None:
    """Time the ranks of VACSR's matches in both directions, with at most five texts per image."""
    (images, texts), dim = options.rank, options.dim
    image, text = (
        Gaussian(x, torch.full_like(x, -torch.inf))
        for x in (F.normalize(torch.randn(n, dim), dim=1) for n in (images, texts))
    )
    print(
        f"VACSR's ranking, {images:,} images, {texts:,} texts, D = {dim}, hidden {options.hidden},"
        f" {options.threads} threads\n| way | images | s | us / pair | s for all |\n|---|---:|---:|---:|---:|"
    )
    for shortlist in (0, options.shortlist):
        torch.manual_seed(0)
        score = VACSRScore(dim, options.hidden, shortlist).requires_grad_(False)
        count = images if shortlist else min(images, options.exact_images)
        owners = torch.arange(texts) % count
        relevance = Relevance.from_pairs(owners, torch.arange(texts), count, texts)
        start = time.perf_counter()
        retrieval(PairScores.from_gaussians(image.select(slice(0, count)), text, score), relevance)
        seconds = time.perf_counter() - start
        way, pairs = f"the best {shortlist} again" if shortlist else "exact", 2 * count * texts
        print(
            f"| {way} | {count} | {seconds:.1f} | {1e6 * seconds / pairs:.2f} | {seconds * images / count:.0f} |",
            flush=True,
        )


def whole_rows(score: Score, pool: UnpairedEmbeddings, side: str, count: int) -> torch.Tensor:
    """Return the nearest items of each query, found by one process over the whole gallery."""
    queries, gallery = (pool.image, pool.text) if side == "image" else (pool.text, pool.image)
    block, found = max(1, source_free.CELLS // len(gallery.mean)), []
    for start in range(0, len(queries.mean), block):
        some = Gaussian(*(x[start : start + block] for x in queries))
        scores = score.pairwise(some, gallery) if side == "image" else score.pairwise(gallery, some).mT
        found.append(largest(scores, count))
    return torch.cat(found)


def products(queries: torch.Tensor, gallery: torch.Tensor) -> None:
    """Compute and drop all inner products, some queries at a time."""
    for some in queries.split(max(1, source_free.CELLS // len(gallery))):
        some @ gallery.mT


def time_neighbours(options: argparse.Namespace) -> None:
    """Time the 300 nearest texts of every image and images of every text, by the CSD of random Gaussians."""
    (images, texts), ranks.BLOCK = options.neighbours, options.block
    clock = time.process_time if options.processor_time else time.perf_counter
    device, score, config = torch.device(options.device), CSDScore(), source_free.SourceFreeConfig(neighbours=300)
    z = [
        Gaussian(
            F.normalize(torch.randn(n, options.dim, device=device), dim=1),
            torch.randn(n, options.dim, device=device) - 3,
        )
        for n in (images, texts)
    ]
    pool = UnpairedEmbeddings(
        keys=[""] * images,
        image=z[0],
        text=z[1],
        text_ids=torch.ones(texts, 1, dtype=torch.int64),
        image_novelty={},
        text_novelty={},
    )
    ways = {
        "blocks": lambda side: source_free.retrieve(score, pool, side, config).rows,
        "whole rows": lambda side: whole_rows(score, pool, side, min(300, len(pool.side(OTHER[side])[1]))),
        "products alone": lambda side: products(*(pool.side(one)[0].mean for one in (side, OTHER[side]))),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        found: dict[str, list[Any]] = {}
        for name, way in ways.items():
            start = clock()
            found[name] = [way(side) for side in OTHER]
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken[name].append(clock() - start)
        same = [(x == y).float().mean().item() for x, y in zip(found["blocks"], found["whole rows"])]
    work = 4 * options.dim * images * texts
    print(
        f"{images:,} images, {texts:,} texts, D = {options.dim}, blocks of {options.block:,},"
        f" {options.threads} threads, {work / 1e9:,.0f} GFLOP\n| way | s | GFLOP/s |\n|---|---:|---:|"
    )
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        print(f"| {name} | {middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {work / middle / 1e9:.0f} |")
    print(f"the same rows: {min(same):.4%}")


def measure_memory(options: argparse.Namespace) -> None:
    batch, samples, dim = options.batch_size, options.match_samples, options.dim
    print(f"PCME's loss, B = {batch}, J = {samples}, D = {dim}\n| way | MiB | s |\n|---|---:|---:|")
    for way in ("tiles", "all pairs at once"):
        _, seconds, mib = alone(pcme_loss, way, batch, samples, dim)
        print(f"| {way} | {mib:.0f} | {seconds:.2f} |", flush=True)
    print(f"| differences of coordinates (not run) | {batch**2 * samples**2 * dim * 4 / 2**20:,.0f} | |")


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    other = time_neighbours if options.neighbours else time_ranking if options.rank else time_steps
    ways = {"pcme": measure_memory, "vacsr": measure_vacsr_memory, None: other}
    ways[options.memory](options)


if __name__ == "__main__":
    main()
