"""Properties of every method: full float32 outside the towers, a stream of random numbers for each use.

That no step waits for its device is in `tests/rehearsal/test_step_on_a_device.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_checks import assert_close, gradients
from torch.utils._python_dispatch import TorchDispatchMode

import prolip
from prolip.data.augment.affine import AugmentConfig, DeviceAugment
from prolip.data.augment.tokens import TokenAugment
from prolip.embeddings import UnpairedEmbeddings
from prolip.evaluation.metrics.streaming import PairScores
from prolip.gaussian import Gaussian
from prolip.measures import MEASURES
from prolip.methods import METHODS, find_score
from prolip.methods.accumulate import accumulate_backward
from prolip.methods.base import Context, Objective
from prolip.random import Draws, Stream
from prolip.scores import SCORES, CSDScore
from prolip.utils.flags import flag_of

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "dot", "mv", "_cdist_forward", "convolution", "gru")
#: Terms that are off by default.
SETTINGS: dict[str, dict] = {"pcme": {"uniformity_weight": 1.0}, "pcmepp": {"clip_weight": 1.0}}


class Products(TorchDispatchMode):
    """Notes torch's matmul precision at every product outside of the functions given to `leave_out`."""

    def __init__(self) -> None:
        super().__init__()
        self.in_tower, self.seen = 0, set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS and not self.in_tower:
            self.seen.add(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))

    def leave_out(self, function: Callable) -> Callable:
        def wrapped(*args: Any, **settings: Any) -> Any:
            self.in_tower += 1
            try:
                return function(*args, **settings)
            finally:
                self.in_tower -= 1

        return wrapped


@pytest.fixture
def lowered() -> Iterator[None]:
    """Lower the precision of products, as training with --precision fp32 does on CUDA, or a user."""
    torch.set_float32_matmul_precision("high")
    yield
    now = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert now == "high"


def gaussians(rows: int, seed: int) -> Gaussian:
    g = torch.Generator().manual_seed(seed)
    return Gaussian(F.normalize(torch.randn(rows, 32, generator=g), dim=1), torch.randn(rows, 32, generator=g) - 3)


def make_objective(method: str) -> Objective:
    torch.manual_seed(0)
    kind = METHODS[method]
    model = prolip.create_model("ProLIP-ViT-test", method_cfg=None if kind.adapts else {"name": method})
    objective = kind.objective(model, kind.config(**SETTINGS.get(method, {})), Context(seed=3))
    if kind.objective.needs(objective.config).pool is not None:
        pool = UnpairedEmbeddings(
            keys=[f"k{n}" for n in range(9)],
            image=gaussians(9, 1),
            text=gaussians(9, 2),
            text_ids=torch.ones(9, 12, dtype=torch.int64),
            image_novelty={},
            text_novelty={},
        )
        objective.pool_state = objective.before_training(CSDScore(), pool)
    return objective.train()


def make_batch() -> dict:
    place = torch.arange(8)
    return {
        "image": torch.randn(8, 3, 32, 32),
        "text": torch.ones(8, 12, dtype=torch.int64),
        "caption_id": place,
        "caption_ids": place.unsqueeze(1),
        "key": [f"k{n}" for n in range(8)],
    }


# --- settings and gradients ------------------------------------------------------------------------------------------
#: Settings out of range -> the words of the error.
REFUSED: dict[str, dict[str, Any]] = {
    "prolip": {"alpha1": -1.0, "beta": math.nan, "alpha2": math.inf, "inclusion_scale": -10.0, "inclusion_eps": 20.0}
    | {"inclusion_form": "exakt", "inclusion_reduction": "sum", "mask_fraction": 0.0, "mask_ratio": 1.0},
    "pcme": {"match_samples": 0, "match_start": 0.0, "kl_weight": -1.0, "uniformity_weight": math.inf, "head_dim": 1},
    "pcmepp": {"pseudo_weight": -1, "vib_weight": math.inf, "mix_fraction": 1.0, "size_augment": -0.1}
    | {"pseudo_positives": "some"},
    "vacsr": {"kl_weight": -1.0, "recon_weight": math.nan, "sigma_weight": math.inf, "mixture_components": 0}
    | {"adapter_hidden": 0, "pair_tile": 0, "gumbel_temperature": 0.0, "component_noise": "none"},
    "source-free": {"pair_weight": "cosine", "weight_mean": 0.0, "weight_slope": math.inf, "neighbours": 1}
    | {"margin": 3.0},
    "vse": {"margin": 2.5, "sum_steps": -1},
    "triplet-sum": {"margin": -0.1},
    "likelihood": {"pair_loss": "hinge", "captions_per_image": 0, "bank": 3, "centres": -1},
}


@pytest.mark.parametrize("method, name", [(method, name) for method, settings in REFUSED.items() for name in settings])
def test_settings_out_of_range_are_refused_with_what_to_give(method, name):
    value = REFUSED[method][name]
    with pytest.raises(ValueError, match=f"({flag_of(name)} {value}|{name}='{value}').*(use|give)"):
        METHODS[method].config(**{name: value})


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_equal_the_large_batch_and_all_that_learns_gets_a_gradient(method):
    whole, cut = make_objective(method).double(), make_objective(method).double()
    batch = whole.prepare(make_batch() | {"image": torch.randn(8, 3, 32, 32, dtype=torch.float64)}, 0)
    terms = accumulate_backward(whole, batch)
    assert_close(accumulate_backward(cut, batch, 3), terms, 1e-6)
    assert_close(gradients(cut), gradients(whole), 1e-6)
    assert gradients(whole).keys() == {name for name, x in whole.named_parameters() if x.requires_grad}
    assert terms["loss"].isfinite() and all(x.abs().amax() > 0 for x in gradients(whole).values())


# --- precision -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_heads_losses_and_pair_products_of_every_objective_have_full_precision(method, lowered, monkeypatch):
    """The gradients of losses do too: the forward pass computes them. Blocks and patch embedding are towers."""
    objective = make_objective(method)
    batch = objective.prepare(make_batch(), 0)
    products = Products()
    for tower in objective.model.towers().values():
        blocks = [*tower.blocks, *([tower.head.block] if hasattr(tower.head, "block") else [])]
        for place, name in [*((block, "forward") for block in blocks), (tower, "embed_patches")]:
            if hasattr(place, name):
                monkeypatch.setattr(place, name, products.leave_out(getattr(place, name)))
    with products:
        reps = objective.embed(batch)
    assert products.seen == {"highest"}
    products.seen.clear()
    with products:
        objective.terms({name: x.detach().requires_grad_() for name, x in reps.items()}, batch)
    assert products.seen == {"highest"}


@pytest.mark.parametrize("name", [*SCORES, *MEASURES, *(name for name, one in METHODS.items() if not one.adapts)])
def test_every_score_and_that_of_every_method_rank_in_full_precision(name, lowered):
    score = METHODS[name].score.of(make_objective(name).model) if name in METHODS else find_score(name)()
    image, text = gaussians(6, 1), gaussians(5, 2)
    with Products() as products:
        score.pairwise(image, text)
        scores = PairScores.from_gaussians(image, text, score)
        assert scores.image_rows(slice(2, 4)).shape == (2, 5) and scores.text_rows(slice(0, 3)).shape == (3, 6)
    assert products.seen <= {"highest"}  # samples are compared without products


# --- random numbers --------------------------------------------------------------------------------------------------
class Noting(Draws):
    """Notes every draw: (what for, at which step), and of which rows."""

    def begin(self) -> None:
        self.uses: list[tuple[Stream, int]] = []
        self.places: list[list[int]] = []

    def key(self, stream: Stream, step: int) -> int:
        self.uses.append((stream, step))
        return super().key(stream, step)

    def uniform(self, stream: Stream, step: int, rows: torch.Tensor, *columns: int) -> torch.Tensor:
        self.places.append(rows.tolist())
        return super().uniform(stream, step, rows, *columns)

    def normal(self, stream: Stream, step: int, rows: torch.Tensor, *columns: int) -> torch.Tensor:
        self.places.append(rows.tolist())
        return super().normal(stream, step, rows, *columns)


@pytest.mark.parametrize("method", METHODS)
def test_every_use_in_a_step_has_a_stream_of_its_own_and_the_rows_and_step_of_the_run(method):
    """Two uses of one stream would draw the same numbers: an image would be cut out where it is turned, say."""
    objective, draws = make_objective(method), Noting(seed=3, rank=1, world_size=2)
    object.__setattr__(objective.context, "draws", draws)
    draws.begin()
    augment = DeviceAugment(AugmentConfig(rotate=9, hue=0.1), (0.5,) * 3, (0.3,) * 3, draws=draws)
    augment.cutout = AugmentConfig(cutout=0.5)
    augment(torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), 6)
    tokens = TokenAugment((0.3, 0.1, 0.1), torch.ones(50, dtype=torch.bool), mask_id=49, pad_id=0, draws=draws)
    batch = make_batch()
    tokens(batch["text"], 6)
    objective.embed(objective.prepare(batch, 6))
    streams = [stream for stream, _ in draws.uses]
    assert len(set(streams)) == len(streams) and streams[:3] == [Stream.AUGMENT, Stream.CUTOUT, Stream.TOKENS]
    assert {step for _, step in draws.uses} == {6}
    global_rows = [1, 3, 5, 7, 9, 11, 13, 15]
    assert all(rows == global_rows[: len(rows)] for rows in draws.places)
