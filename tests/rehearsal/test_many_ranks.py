"""Every objective as one of 8, 512 and 4,096 ranks: what it sends in a step, and what it holds of the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from training_runs import pool

import prolip
from bench.train.collectives import Ledger, one_rank
from prolip.losses import contrastive
from prolip.losses.exchanges import row_width
from prolip.methods import METHODS
from prolip.methods.base import Context
from prolip.methods.pcme import UNIFORM_POINTS
from prolip.scores import CSDScore
from training.config import build_config
from training.loop import training_step
from training.model import distribute
from training.parallel import World
from training.run import build_trained

ROWS, DIM = 4, 32
RING = (8, 64, 512)  # of rings but ProLIP's: 4,096 ranks pass 8,190 messages each
FLOAT, ID = 4, 8
SETTINGS: dict[str, dict] = {
    "pcme": {"uniformity_weight": 1.0},
    "pcmepp": {"clip_weight": 1.0},
    "vacsr": {"pair_tile": 512},
}


class Declared(NamedTuple):
    """The expected work of a rank in the loss of a step, W ranks of B rows each."""

    counts: dict[str, int]  # collectives by kind
    sent: dict[str, float]  # bytes that a rank has for others, by kind
    #: Numbers that it holds for each row of the global batch: texts and their gradients, (B, W B) matrices; at most.
    floats: float


def worlds(method: str) -> tuple[int, int, int]:
    return RING if method in ("likelihood", "siglip") else (8, 512, 4096)


def ring(ranks: int, wanting: int = DIM + 1) -> Declared:
    """Texts go round, vectors with an offset, and gradients of `wanting` of these numbers; nothing is kept."""
    messages, sent = 2 * (ranks - 1), (ranks - 1) * ROWS * (DIM + 1 + wanting) * FLOAT
    return Declared({"send": messages, "receive": messages}, {"send": sent}, 0)


def gathered(ranks: int) -> Declared:
    """All texts come and the sums of their gradients go by a collective each; a matrix, and its sums of columns."""
    bytes_ = (ranks - 1) * ROWS * row_width(DIM) * FLOAT
    counts = {"all-gather": 1, "reduce-scatter": 1}
    return Declared(counts, dict.fromkeys(counts, bytes_), 2 * row_width(DIM) + 3 * ROWS)


def openclip_ring(ranks: int) -> Declared:
    """OpenCLIP's: texts go round, gradients go back; its graph holds the texts and logits of all ranks."""
    messages = 2 * (ranks - 1)
    counts = {"send": messages, "receive": messages}
    return Declared(counts, {"send": messages * ROWS * DIM * FLOAT}, 2 * DIM + 3 * ROWS)


def openclip_gathered(ranks: int) -> Declared:
    """OpenCLIP's softmax: images and texts come, their gradients go; two matrices of logits."""
    bytes_ = 2 * (ranks - 1) * ROWS * DIM * FLOAT
    counts = {"all-gather": 2, "reduce-scatter": 2}
    return Declared(counts, dict.fromkeys(counts, bytes_), 4 * DIM + 6 * ROWS)


def tiled(*wanting: int, given: int = 0, transposed: int = 0, matrices: float = 2) -> Callable[[int], Declared]:
    """`losses.tiled`: text tensors of so many numbers a row come, the gradients of `wanting` go.

    given: int64 numbers that come without; transposed: matrices that change from rows to columns, there and back.
    """

    def declared(ranks: int) -> Declared:
        others = (ranks - 1) * ROWS
        counts = {"all-gather": len(wanting) + given, "reduce-scatter": len(wanting), "all-to-all": transposed}
        sent = {
            "all-gather": others * (sum(wanting) * FLOAT + given * ID),
            "reduce-scatter": others * sum(wanting) * FLOAT,
            "all-to-all": transposed * others * ROWS * FLOAT,
        }
        floats = 2 * sum(wanting) + given * ID / FLOAT + matrices * ROWS
        return Declared({k: n for k, n in counts.items() if n}, {k: n for k, n in sent.items() if n}, floats)

    return declared


def and_also(first: Callable[[int], Declared], second: Callable[[int], Declared]) -> Callable[[int], Declared]:
    """Both, one after the other."""

    def declared(ranks: int) -> Declared:
        a, b = first(ranks), second(ranks)
        sent = {kind: a.sent.get(kind, 0) + b.sent.get(kind, 0) for kind in a.sent | b.sent}
        return Declared(Counter(a.counts) + Counter(b.counts), sent, max(a.floats, b.floats))

    return declared


def uniformity(ranks: int) -> Declared:
    """PCME's: so many points of all ranks together, two of each at least, and the sum of each rank."""
    points = 2 * min(ROWS, max(1, UNIFORM_POINTS // (2 * ranks)))
    bytes_ = (ranks - 1) * points * DIM * FLOAT
    return Declared(
        {"all-gather": 2, "reduce-scatter": 1},
        {"all-gather": bytes_ + (ranks - 1) * FLOAT, "reduce-scatter": bytes_},
        2 * DIM,
    )


#: Known matches send the ids of texts; both ways need the columns of similarities and of positives, and return one.
BOTH_WAYS = tiled(DIM, given=1, transposed=3)
DECLARED: dict[str, Callable[[int], Declared]] = {
    "prolip": ring,
    "likelihood": partial(ring, wanting=DIM),  # whose offsets are constants
    "siglip": openclip_ring,
    "clip": openclip_gathered,
    "infonce": BOTH_WAYS,
    "vse": BOTH_WAYS,
    "triplet-sum": BOTH_WAYS,
    "source-free": BOTH_WAYS,
    "pcme": and_also(tiled(8 * DIM, given=1), uniformity),
    "pcmepp": and_also(tiled(DIM, DIM, given=1, transposed=3), openclip_gathered),
    "vacsr": tiled(DIM, given=2, matrices=4),
}


def make_batch() -> dict:
    place = torch.arange(ROWS)
    return {
        "image": torch.randn(ROWS, 3, 32, 32),
        "text": torch.ones(ROWS, 12, dtype=torch.int64),
        "caption_id": place,
        "caption_ids": place[:, None],
        "key": [f"k{n}" for n in range(ROWS)],
    }


@pytest.fixture(scope="module")
def measured() -> Callable[[str, str], dict[tuple[int, int], Ledger]]:
    """(method, exchange of losses that factor) -> what a step took on the first and last rank of each world."""
    found: dict[tuple[str, str], dict[tuple[int, int], Ledger]] = {}

    def measure(method: str, exchange: str = "ring") -> dict[tuple[int, int], Ledger]:
        if (method, exchange) not in found:
            model = model_of(method)
            with patch.object(contrastive, "choose_exchange", lambda *_: exchange):
                places = [(ranks, rank) for ranks in worlds(method) for rank in (0, ranks - 1)]
                found[method, exchange] = {place: loss_of_step(method, model, *place) for place in places}
        return found[method, exchange]

    return measure


def model_of(method: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return prolip.create_model("ProLIP-ViT-test", method_cfg=None if METHODS[method].adapts else {"name": method})


def loss_of_step(method: str, model: torch.nn.Module, ranks: int, rank: int) -> Ledger:
    """Count the loss of one rank's embeddings, forward and backward."""
    kind = METHODS[method]
    objective = kind.objective(model, kind.config(**SETTINGS.get(method, {})), Context(rank=rank, world_size=ranks))
    if kind.adapts:
        objective.pool_state = objective.before_training(CSDScore(), pool(DIM))
    batch = objective.train().prepare(make_batch(), 1)
    reps = {name: x.detach().requires_grad_() for name, x in objective.embed(batch).items()}
    with one_rank(rank, ranks), Ledger(ranks) as ledger:
        loss = objective.terms(reps, batch)["loss"]
        loss.backward()
    assert loss.isfinite() and reps["image_mean"].grad.shape == reps["image_mean"].shape
    return ledger


def check_peaks(found: dict[tuple[int, int], Ledger], declared: float) -> None:
    """Check that only memory per row of the global batch grows: from the middle world size every tile is full."""
    for last in (False, True):
        ranks = sorted({ranks for ranks, _ in found})
        small, middle, large = (found[count, (count - 1) * last].peak for count in ranks)
        floats = (large - middle) / ((ranks[2] - ranks[1]) * ROWS * FLOAT)
        assert floats <= declared
        assert floats > 0.6 * declared or (small == middle == large and declared == 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_sends_and_holds_of_the_others_what_its_loss_declares(measured, method):
    for (ranks, _), ledger in measured(method).items():
        declared = DECLARED[method](ranks)
        assert ledger.counts == declared.counts
        assert {kind: n for kind, n in ledger.sent.items() if n} == pytest.approx(declared.sent)
    check_peaks(measured(method), DECLARED[method](worlds(method)[2]).floats)


@pytest.mark.parametrize("method", ["prolip", "likelihood"])
def test_texts_that_devices_gather_take_two_collectives_of_any_number_of_ranks(measured, method):
    found = measured(method, "gather")
    for (ranks, _), ledger in found.items():
        assert (ledger.counts, ledger.sent) == (gathered(ranks).counts, pytest.approx(gathered(ranks).sent))
    check_peaks(found, gathered(worlds(method)[2]).floats)


@pytest.mark.parametrize("method,ranks", [("prolip", 8), ("infonce", 4096)])
def test_a_whole_step_adds_the_gradients_alone(method, ranks):
    """DDP's buckets, a first one of 1 MiB and others of 25, hold every trained parameter once."""
    optim = {"lr": 1e-3, "beta2": 0.95, "wd": 0.1, "warmup": 1, "grad_clip_norm": 1.0}
    sections = {"model": {"model": "ProLIP-ViT-test"}, "optim": optim, "run": {"precision": "fp32", "device": "cpu"}}
    sections["data"] = {"dataset_type": "synthetic", "train_num_samples": 8}
    config = build_config(method, sections)
    world = World(rank=ranks - 1, world_size=ranks)
    with one_rank(world.rank, ranks):
        trained = build_trained(config, world, model_of(method), (4, 4), None)
        trained.network = distribute(trained.objective, world, config.run)
        for step in range(2):
            with Ledger(ranks) as ledger:
                training_step(trained, make_batch(), step)
        assert dist.get_world_size() == ranks
    trained_numbers = sum(p.numel() for p in trained.objective.parameters() if p.requires_grad)
    counts = Counter(ledger.counts) - Counter(DECLARED[method](ranks).counts)
    assert counts == {"all-reduce": 1 + math.ceil((trained_numbers * FLOAT / 2**20 - 1) / 25)}
    assert ledger.sent["all-reduce"] == trained_numbers * FLOAT
