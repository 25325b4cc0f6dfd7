"""Steps of up to thousands of ranks, simulated event by event: loader, towers, PPCL, gradient exchange.

    python scripts/studies/scaling/simulate_steps.py --mfu 0.4 --gpus 8 32 --steps 200
    python scripts/studies/scaling/simulate_steps.py --gpus 4096 --global-batch-size 524288 --steps 2

It takes the flags of `prolip plan` and its own, and simulates the steps of that plan. docs/benchmarks/planner.md shows
the tables and the limits of the simulation.

Every array has one entry per rank; times are seconds since the start of the simulation. All factors are lognormal with
median 1, drawn from one seed.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))

from prolip.data.config import chunks_ahead
from prolip.plan import tables
from prolip.plan.config import PlanConfig, read_flags
from prolip.plan.models import GB, INTER_DELAY, INTRA_DELAY, Cluster
from prolip.plan.phases import PairExchange, Step
from prolip.plan.plan import RunPlan, make_plan
from prolip.utils import console
from prolip.utils.fields import option
from prolip.utils.flags import FlagError, Parser, add_flags, build, check_range, flag_of

Array = np.ndarray[Any, Any]
# Largest sigma of a lognormal factor: more is no jitter, and its exponential overflows.
MOST_SIGMA = 3.0
# Warm-up of the loader, in times that it needs to fill its queues; uncounted steps before the first counted one.
HEAD_START, WARM_UP = 10, 5


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Variation of ranks, steps and images, as sigma of lognormal factors. All values are assumed."""

    steps: int = option(20, "steps to simulate, after five uncounted ones")
    rank_sigma: float = option(0.01, "sigma of lasting differences between GPUs")
    step_sigma: float = option(0.02, "sigma of one GPU between steps")
    block_sigma: float = option(0.1, "sigma of one PPCL block or message-sized piece of work")
    image_sigma: float = option(0.5, "sigma of the time to decode one image")
    open_sigma: float = option(0.8, "sigma of the time to open a shard")
    stall_chance: float = option(0.0, "chance that opening a shard stalls")
    stall_seconds: float = option(10.0, "seconds of a stall: the reader's time limit")
    seed: int = option(0, "seed of all draws")

    def __post_init__(self) -> None:
        check_range(self, "steps", least=1)
        sigmas = ("rank_sigma", "step_sigma", "block_sigma", "image_sigma", "open_sigma")
        check_range(self, *sigmas, "stall_seconds", "seed")
        for name in sigmas:
            if getattr(self, name) > MOST_SIGMA:
                raise FlagError(
                    f"{flag_of(name)} is {getattr(self, name)}: give {MOST_SIGMA:g} or less, which is a "
                    f"factor of {math.exp(MOST_SIGMA):.0f} up or down"
                )
        if not 0 <= self.stall_chance <= 1:
            raise FlagError(f"--stall-chance {self.stall_chance} must be a probability. Give 0 to 1")


class Exchange(NamedTuple):
    """Time at which each rank has its loss, and its seconds of waiting for messages, (W,)."""

    end: Array
    waited: Array


class Simulated(NamedTuple):
    """Counted steps: seconds of each (steps,), the ideal without waits, jitter and messages, and mean seconds per step
    that a rank waited, by reason."""

    steps: Array
    ideal: float
    waits: dict[str, float]

    @property
    def efficiency(self) -> float:
        """Return the ideal step over the mean one."""
        return self.ideal / float(self.steps.mean())

    def share_waited(self, what: str) -> float:
        """Return the share of the mean step spent waiting for `what`."""
        return self.waits[what] / self.steps.mean()


def factors(draws: np.random.Generator, sigma: float, *shape: int) -> Array:
    """Draw lognormal factors with median 1: exp(sigma z), z standard normal; a sigma of 0 draws nothing."""
    if sigma == 0:
        return np.ones(shape)
    return np.exp(sigma * draws.standard_normal(shape, dtype=np.float32)).astype(np.float64)


def ring_links(cluster: Cluster, step: Step) -> Array:
    """Return the seconds of one message, of texts or an accumulator, to each rank from its left neighbour, (W,).

    The link into rank r is between nodes iff r is the first of its node and there are several nodes.
    """
    crossing = (np.arange(cluster.gpus) % cluster.per_node == 0) & (cluster.nodes > 1)
    rate = np.where(crossing, cluster.sheet.inter_gbs, cluster.sheet.intra_gbs) * GB
    return step.pairs.message_bytes / rate + np.where(crossing, INTER_DELAY, INTRA_DELAY)


def exchange(start: Array, block: float, links: Array, draws: np.random.Generator, sigma: float) -> Exchange:
    """Simulate losses.exchanges.score_ring on all ranks, in the order of its messages and computations.

    A transfer begins when both ends have requested it and finished the one before (one stream of messages per rank, as
    in NCCL). It ends for a rank when it has both sent and received.
    """
    size = len(start)
    now, waited = start.copy(), np.zeros(size)
    if size == 1:
        return Exchange(now + block * factors(draws, sigma, 1), waited)
    free = now.copy()

    def transfer(posted: Array) -> Array:
        """Return the time at which each rank's transfer is done, and advance `free`."""
        nonlocal free
        ready = np.maximum(posted, free)
        arrived = np.maximum(ready, np.concatenate((ready[-1:], ready[:-1]))) + links  # from the left neighbour
        free = np.maximum(arrived, np.concatenate((arrived[1:], arrived[:1])))  # at the right one
        return free

    def wait(until: Array) -> None:
        nonlocal now, waited
        later = np.maximum(now, until)
        waited += later - now
        now = later

    texts, home = transfer(now), None
    now = now + block / 2 * factors(draws, sigma, size)
    for index in range(1, size):
        wait(texts)
        if index < size - 1:
            texts = transfer(now)
        now = now + block * factors(draws, sigma, size)
        if home is not None:
            wait(home)
        home = transfer(now)
    now = now + block / 2 * factors(draws, sigma, size)
    if home is not None:
        wait(home)
    return Exchange(now, waited)


def collect(start: Array, pairs: PairExchange, draws: np.random.Generator, sigma: float) -> Exchange:
    """Simulate `exchanges.score_gathered`: a collective begins with the last rank, and ends for all at once."""
    texts = start.max() + pairs.message_seconds
    scored = texts + pairs.scoring / pairs.blocks * factors(draws, sigma, len(start), pairs.blocks).sum(1)
    home = scored.max() + pairs.message_seconds
    return Exchange(np.full_like(start, home), texts - start + home - scored)


class Loader:
    """Simulated loaders of all ranks: (W, K) workers, each preparing `chunks_ahead` chunks of its rank's batch.

    A step takes one chunk of every worker of its rank. The time of a chunk of n images is n / rate times a lognormal
    factor with the sigma of a mean of n images (Fenton-Wilkinson: sigma_n^2 = log(1 + (e^(sigma^2) - 1) / n)), or its
    streaming time if that is longer. If a shard ends within a chunk, the next one is opened.
    """

    def __init__(self, cluster: Cluster, config: PlanConfig, noise: Noise, local: int, draws: np.random.Generator):
        self.shape = (cluster.gpus, config.workers)
        self.images = local / config.workers
        self.config, self.noise, self.draws = config, noise, draws
        self.chunk_sigma = math.sqrt(math.log1p(math.expm1(noise.image_sigma**2) / max(1.0, self.images)))
        share = min(config.store_gbs, config.store_total_gbs / cluster.nodes) * GB / (cluster.per_node * config.workers)
        stream = min(config.stream_mbs * 1e6, share)
        self.read_seconds = self.images * config.sample_kb * 1e3 / stream
        self.left = draws.uniform(0, config.shard_samples, self.shape)
        # Begun long before the first step: all queues are full.
        ahead = chunks_ahead(config.prefetch, local)
        head_start = -HEAD_START * ahead * max(self.images / config.images_per_core, self.read_seconds)
        self.done = np.full(self.shape, head_start)
        # Time of the last batches; from then on every worker may begin another chunk.
        self.taken: deque[Array] = deque([self.done[:, 0]] * ahead, maxlen=ahead)

    def settle(self, seconds: float) -> float:
        """Return the start of the next step, after as many steps of `seconds` as chunks are ahead.

        Until then nothing limits how far workers run ahead, which hides every late shard.
        """
        now = 0.0
        for _ in range(len(self.taken)):
            now = max(now, float(self.ready().max()))
            self.taken.append(np.full(len(self.done), now))
            now += seconds
        return now

    def ready(self) -> Array:
        """Return the time at which the next batch of each rank is complete, (W,)."""
        begin = np.maximum(self.done, self.taken[0][:, None])
        self.done = begin + self.chunk_seconds()
        return self.done.max(1)

    def chunk_seconds(self) -> Array:
        """Return the seconds of one chunk of every worker."""
        # The mean of a chunk is exactly n / rate: the median-1 factor is rescaled to mean 1.
        factor = factors(self.draws, self.chunk_sigma, *self.shape) / math.exp(self.chunk_sigma**2 / 2)
        seconds = np.maximum(self.images / self.config.images_per_core * factor, self.read_seconds)
        self.left -= self.images
        opening = self.left < 0
        count = int(opening.sum())
        if count:
            wait = self.config.open_ms * 1e-3 * factors(self.draws, self.noise.open_sigma, count)
            stalled = self.draws.random(count) < self.noise.stall_chance
            seconds[opening] += wait + stalled * self.noise.stall_seconds
            self.left[opening] += self.config.shard_samples
        return seconds


def gradients(step: Step, ranks: int, start: Array, end: Array) -> Array:
    """Return the time at which each rank has all gradients, (W,). Bucket b of n is ready when every rank is (b + 1)/n
    through [start, end]; buckets travel one after the other."""
    if ranks == 1:
        return end
    at = 0.0
    for bucket in range(1, step.buckets + 1):
        at = max(at, float((start + (end - start) * (bucket / step.buckets)).max())) + step.reduce / step.buckets
    return np.full_like(end, at)


def simulate(cluster: Cluster, step: Step, config: PlanConfig, noise: Noise) -> Simulated:
    """Simulate `noise.steps` steps after a few uncounted ones.

    A step: wait for the batch; forward pass; PPCL; backward pass, during which gradients travel by bucket and reach
    all ranks together; optimiser. FSDP2's begin in the forward pass, DDP's in the last micro-batch's backward pass.
    The host is assumed to run ahead of the device, so a late batch delays the step only when the device needs it.
    """
    local = config.global_batch_size // cluster.gpus
    draws, links = np.random.default_rng(noise.seed), ring_links(cluster, step)
    lasting = factors(draws, noise.rank_sigma, cluster.gpus)
    loader = Loader(cluster, config, noise, local, draws)
    begins = loader.settle(step.seconds)
    now, ends = np.full(cluster.gpus, begins), [begins]
    waits = dict.fromkeys(("data", "texts", "gradients"), 0.0)
    for index in range(WARM_UP + noise.steps):
        begin = np.maximum(now, loader.ready())
        loader.taken.append(begin)
        pace = lasting * factors(draws, noise.step_sigma, cluster.gpus)
        start = begin + step.forward * pace
        if step.pairs.exchange == "gather":
            loss = collect(start, step.pairs, draws, noise.block_sigma)
        else:
            loss = exchange(start, step.pairs.scoring / step.pairs.blocks, links, draws, noise.block_sigma)
        own = loss.end + step.backward * pace
        first = begin if config.fsdp else own - (own - loss.end) / config.accum_freq
        together = gradients(step, cluster.gpus, first, own)
        if index >= WARM_UP:
            waits["data"] += float((begin - now).mean())
            waits["texts"] += float(loss.waited.mean())
            waits["gradients"] += float((together - own).mean())
        now = together + step.optimiser * lasting
        ends.append(float(now.max()))
    seconds = np.diff(ends)[WARM_UP:]
    computing = step.forward + step.backward + step.optimiser + step.pairs.scoring
    return Simulated(seconds, computing, {name: total / noise.steps for name, total in waits.items()})


#: First column, and how a plan and its simulation are shown.
ROWS: list[tuple[str, Callable[[RunPlan, Simulated], str]]] = [
    ("step without waits", lambda _, s: tables.span(s.ideal)),
    ("step by formula", lambda p, _: tables.span(p.seconds)),
    ("step, mean", lambda _, s: tables.span(float(s.steps.mean()))),
    ("step, median", lambda _, s: tables.span(float(np.median(s.steps)))),
    ("step, 95th percentile", lambda _, s: tables.span(float(np.percentile(s.steps, 95)))),
    ("step, longest", lambda _, s: tables.span(float(s.steps.max()))),
    ("efficiency", lambda _, s: f"{s.efficiency:.1%}"),
    ("waiting for data", lambda _, s: f"{s.share_waited('data'):.1%}"),
    ("waiting for texts", lambda _, s: f"{s.share_waited('texts'):.1%}"),
    ("waiting for gradients", lambda _, s: f"{s.share_waited('gradients'):.1%}"),
]


def build_parser() -> Parser:
    """Build the parser: the flags of the simulation, then those of a plan."""
    about = "Simulate the steps of a planned run, event by event; see docs/benchmarks/planner.md."
    parser = Parser(prog="simulate_steps.py", description=about)
    for section, config in {"noise": Noise, "plan": PlanConfig}.items():
        add_flags(parser, section, config)
    return parser


def play(given: dict[str, Any]) -> None:
    """Print the table."""
    own = {name.removeprefix("noise."): value for name, value in given.items() if name.startswith("noise.")}
    config, noise = read_flags(given), build(Noise, "noise", own)
    plans = [make_plan(config, gpus) for gpus in config.gpus]
    played = [simulate(p.cluster, p.step, config, noise) for p in plans]
    cells: list[Sequence[str]] = [["simulation", *(tables.column(p.gpus) for p in plans)]]
    cells += [[name, *(show(p, s) for p, s in zip(plans, played))] for name, show in ROWS]
    print(f"{max(plans, key=lambda p: p.cluster.per_node).heading}\n\n{tables.align(cells)}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return 0, or 2 after `error: ...`."""
    try:
        play(vars(build_parser().parse_strictly(sys.argv[1:] if arguments is None else arguments)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    console.command(main)
