"""Any score with any loss over real gloo processes equals one process on the whole batch, written without tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_helpers import run_ranks
from loss_cases import DOUBLE, brute_logits, brute_mask, gaussian, some_matches
from peak_elements import PeakElements
from torch import Tensor, nn

from prolip import measures
from prolip.gaussian import Gaussian
from prolip.losses import Matches, tiled_loss_over_ranks, transpose_over_ranks

BATCH, DIM, TILE, SAMPLES, SEED = 3, 4, 2, 3, 5
# Which processes form a group: the worlds 1..4, and one whose ranks are not 0..W-1.
GROUPS = {"1": [0], "2": [0, 1], "3": [0, 1, 2], "4": [0, 1, 2, 3], "2 of 4": [1, 3]}
Side = tuple[Tensor, ...]


class Case:
    """Leaves of a batch: rows of images and texts, scale and bias of the logit, and what a score has of its own."""

    def __init__(self, members: list[int], rows: int = BATCH, dim: int = DIM):
        def join(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts).detach().requires_grad_()

        pairs = [(gaussian(rows, dim, 2 * m), gaussian(rows, dim, 2 * m + 1)) for m in members]
        self.image, self.text = (Gaussian(*(join(list(x)) for x in zip(*side))) for side in zip(*pairs))
        matches = [some_matches(rows, m) for m in members]
        self.labels = Matches(*(torch.cat(x) for x in zip(*matches)))
        torch.manual_seed(SEED)
        self.network = nn.Sequential(nn.Linear(4 * dim, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        draws = [torch.Generator().manual_seed(100 * SEED + m) for m in members]  # a row's is the same in any world
        noise = [torch.randn(2, rows, SAMPLES, dim, generator=draw, dtype=DOUBLE) for draw in draws]
        self.noise = torch.cat(noise, 1)
        scalars = (torch.tensor(x, dtype=DOUBLE, requires_grad=True) for x in (3.0, -1.0, 2.0))
        self.scale, self.bias, self.width = scalars

    def sampled(self) -> tuple[Side, Side]:
        """Points of either side by reparameterisation, drawn before the score: ((B, J, D),) each."""
        images, texts = (
            z.mean[:, None] + (z.log_var / 2).exp()[:, None] * noise
            for z, noise in zip((self.image, self.text), self.noise)
        )
        return (images,), (texts,)

    def leaves(self) -> dict[str, Tensor]:
        sides = {"image": self.image, "text": self.text}
        rows = {f"{side}.{part}": x for side, z in sides.items() for part, x in z._asdict().items()}
        scalars = {"scale": self.scale, "bias": self.bias, "width": self.width}
        return rows | scalars | dict(self.network.named_parameters())


def by_elk(p: Gaussian, q: Gaussian) -> Tensor:
    return -measures.pairwise_elk(p, q)


def by_kl(p: Gaussian, q: Gaussian) -> Tensor:
    return -measures.pairwise_kl(p, q)


def by_samples(width: Tensor, x: Side, y: Side) -> Tensor:
    """log of the match probability, the mean over J x J distances of sigmoid(1 - width distance)."""
    distances = (x[0][:, None, :, None] - y[0][None, :, None]).square().sum(-1).sqrt()
    return F.logsigmoid(1 - width * distances).flatten(2).logsumexp(-1)


def by_network(network: nn.Module, p: Gaussian, q: Gaussian) -> Tensor:
    rows, columns = (x[:, None] for x in p), (x[None] for x in q)
    both = [x.expand(len(p.mean), len(q.mean), -1) for x in (*rows, *columns)]
    return network(torch.cat(both, -1)).squeeze(-1)


def score_of(name: str, case: Case) -> tuple[Callable, Side, Side, list[Tensor]]:
    """(score, images, texts, its own parameters)."""
    if name == "sampled":
        return lambda x, y: by_samples(case.width, x, y), *case.sampled(), [case.width]
    if name == "network":
        return lambda p, q: by_network(case.network, p, q), case.image, case.text, [*case.network.parameters()]
    score = {"csd": measures.pairwise_csd_similarity, "elk": by_elk, "kl": by_kl}[name]
    return score, case.image, case.text, []


def direct_similarity(name: str, case: Case) -> Tensor:
    """All pairs at once, through B x B x D."""
    p, q = case.image, case.text
    p_var, q_var, square = p.var[:, None], q.var[None], (p.mean[:, None] - q.mean[None]) ** 2
    one = torch.ones((), dtype=DOUBLE)
    if name == "csd":
        return brute_logits(p, q, one, 0 * one)
    if name == "elk":
        return -0.5 * (square / (p_var + q_var) + (p_var + q_var).log()).sum(-1)
    if name == "kl":
        return -0.5 * ((p_var + square) / q_var - 1 - (p_var / q_var).log()).sum(-1)
    if name == "sampled":
        return by_samples(case.width, *case.sampled())
    return by_network(case.network, p, q)


SCORES = ("csd", "elk", "kl", "sampled", "network")


def sigmoid(logits: Tensor, positive: Tensor, own: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, positive.to(logits.dtype), reduction="sum") / len(logits)


def softmax(logits: Tensor, positive: Tensor, own: Tensor) -> Tensor:
    return F.cross_entropy(logits, own)


def hinge(logits: Tensor, positive: Tensor, own: Tensor) -> Tensor:
    """VSE++: the hardest negative alone."""
    hardest = logits.masked_fill(positive, -torch.inf).amax(1)
    return (0.5 + hardest - logits.gather(1, own[:, None]).squeeze(1)).relu().mean()


def pseudo_positives(logits: Tensor, positive: Tensor, own: Tensor) -> Tensor:
    """PCME++: pairs that score higher than the row's own pair are positives, too."""
    return sigmoid(logits, positive | (logits >= logits.gather(1, own[:, None])), own)


# Losses of a row, and whether they are taken of columns as well.
LOSSES = {
    "sigmoid": (sigmoid, False),
    "softmax": (softmax, True),
    "hinge": (hinge, True),
    "pseudo": (pseudo_positives, False),
}
CASES = [*product(SCORES, LOSSES)]


def tiled(name: str, kind: str, case: Case, group=None, rank: int = 0, tile: int = TILE) -> Tensor:
    score, images, texts, learned = score_of(name, case)
    row_loss, both = LOSSES[kind]

    def loss(similarity: Tensor, positive: Tensor) -> Tensor:
        assert similarity.shape == positive.shape
        own = rank * len(similarity) + torch.arange(len(similarity))
        rows = row_loss(case.scale * similarity + case.bias, positive, own)
        if not both:
            return rows
        similarity, positive = (transpose_over_ranks(x, group) for x in (similarity, positive))
        return (rows + row_loss(case.scale * similarity + case.bias, positive, own)) / 2

    return tiled_loss_over_ranks(
        score, images, texts, loss, (case.scale, case.bias, *learned), case.labels, group, tile
    )


def direct(name: str, kind: str, case: Case) -> Tensor:
    row_loss, both = LOSSES[kind]
    similarity, positive = direct_similarity(name, case), brute_mask(case.labels, len(case.image.mean))
    own = torch.arange(len(similarity))
    rows, columns = (
        row_loss(case.scale * s + case.bias, m, own) for s, m in ((similarity, positive), (similarity.T, positive.T))
    )
    return (rows + columns) / 2 if both else rows


def with_gradients(loss: Tensor, case: Case) -> dict[str, Tensor]:
    leaves = case.leaves()
    gradients = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
    return {"loss": loss.detach()} | {key: x for key, x in zip(leaves, gradients) if x is not None}


def all_cases(rank: int) -> dict:
    """Every check of this file, in one spawn. All processes make all groups; only its members use one."""
    groups = {name: dist.new_group(ranks) for name, ranks in GROUPS.items()}
    groups["4"] = None
    found: dict = {}
    for world, members in GROUPS.items():
        if rank not in members:
            continue
        place, group = members.index(rank), groups[world]
        for name, kind in CASES:
            case = Case([place])
            found[world, name, kind] = with_gradients(tiled(name, kind, case, group, place), case)
        matrix = torch.arange(BATCH * len(members)) + 100.0 * (place * BATCH + torch.arange(BATCH))[:, None]
        found[world, "transpose"] = transpose_over_ranks(matrix, group)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks(4, all_cases)


def compare(got: list[dict[str, Tensor]], want: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Rows of all ranks are those of one process times W, all else is its mean."""
    assert all(g.keys() == want.keys() for g in got)
    for key, whole in want.items():
        parts = [g[key] for g in got]
        if key.startswith(("image", "text")):
            together, whole = torch.cat(parts), whole * len(got)
        else:
            together = torch.stack(parts).mean(0)
        told = partial("{}: {}".format, key)
        torch.testing.assert_close(together, whole, rtol=tolerance, atol=tolerance, msg=told)


@pytest.mark.parametrize("world", GROUPS)
@pytest.mark.parametrize("name,kind", CASES)
def test_ranks_match_one_process_without_tiles_in_value_and_every_gradient(found, world, name, kind):
    whole = Case(list(range(len(GROUPS[world]))))
    ranks = [found[rank][world, name, kind] for rank in GROUPS[world]]
    compare(ranks, with_gradients(direct(name, kind, whole), whole))


@pytest.mark.parametrize("world", GROUPS)
def test_the_transpose_over_ranks_holds_the_columns_of_the_whole_matrix(found, world):
    size = BATCH * len(GROUPS[world])
    whole = torch.arange(size) + 100.0 * torch.arange(size)[:, None]
    assert torch.equal(torch.cat([found[rank][world, "transpose"] for rank in GROUPS[world]]), whole.T)


@pytest.mark.parametrize("tile", [1, 2, 3, 100])
def test_the_result_does_not_depend_on_the_tile(tile):
    case = Case([0, 1])
    got, want = tiled("network", "hinge", case, tile=tile), direct("network", "hinge", case)
    compare([with_gradients(got, case)], with_gradients(want, case))


@pytest.mark.parametrize("name", ["elk", "network"])
def test_a_score_of_several_numbers_of_each_pair_equals_all_pairs_at_once(name):
    def numbers_of(similarity: Tensor) -> Tensor:
        return torch.stack([similarity, (similarity / 3).sin(), similarity.square()])

    def loss(numbers: Tensor, positive: Tensor) -> Tensor:
        first, second, third = numbers
        assert first.shape == positive.shape
        return sigmoid(case.scale * first, positive, positive) + (second * first.softmax(1)).sum() + third.mean()

    case = Case([0, 1])
    score, images, texts, learned = score_of(name, case)
    got = tiled_loss_over_ranks(
        lambda x, y: numbers_of(score(x, y)), images, texts, loss, (case.scale, *learned), case.labels, tile=TILE
    )
    want = loss(numbers_of(direct_similarity(name, case)), brute_mask(case.labels, len(case.image.mean)))
    compare([with_gradients(got, case)], with_gradients(want, case))
    with pytest.raises(ValueError, match=r"is \(1, 1, 2, 2\), expected \(2, 2\): one number for each pair, or C"):
        tiled_loss_over_ranks(lambda x, y: score(x, y)[None, None], images, texts, loss, (case.scale, *learned), tile=2)


@pytest.mark.parametrize("needed", ["image.log_var", "text.mean", "scale", "0.weight"])
def test_the_one_gradient_that_is_needed_is_given(needed):
    case = Case([0, 1])
    want = with_gradients(direct("network", "softmax", case), case)[needed]
    for key, leaf in case.leaves().items():
        leaf.requires_grad_(key == needed)
    (got,) = torch.autograd.grad(tiled("network", "softmax", case), case.leaves()[needed])
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_half_precision_rows_are_scored_in_float32_under_autocast():
    low = [gaussian(4, 8, seed, torch.bfloat16) for seed in (0, 1)]
    high = [Gaussian(*(x.detach().float().requires_grad_() for x in z)) for z in low]

    def loss(similarity: Tensor, positive: Tensor) -> Tensor:
        assert similarity.dtype == torch.float32
        return sigmoid(similarity, positive, positive)

    want = tiled_loss_over_ranks(measures.pairwise_csd_similarity, *high, loss)
    with torch.autocast("cpu", torch.bfloat16):
        got = tiled_loss_over_ranks(measures.pairwise_csd_similarity, *low, loss)
    assert torch.equal(got, want)
    gradients = [torch.autograd.grad(x, z[0].log_var)[0] for x, z in ((got, low), (want, high))]
    assert gradients[0].dtype == torch.bfloat16 and torch.equal(gradients[0], gradients[1].bfloat16())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("forgotten", ["scale", "0.weight"])
def test_a_tensor_that_would_be_left_without_its_gradient_is_refused(forgotten, frozen):
    case = Case([0])
    score, images, texts, _ = score_of("network", case)
    for x in (*images, *texts) if frozen else ():
        x.requires_grad_(False)
    own = [case.scale, *case.network.parameters()]
    listed = [] if frozen else [x for x in own if x is not case.leaves()[forgotten]]

    def loss(similarity: Tensor, positive: Tensor) -> Tensor:
        return (case.scale * similarity).mean()

    with pytest.raises(ValueError, match="requires a gradient and is not in parameters"):
        tiled_loss_over_ranks(score, images, texts, loss, listed)


def test_what_does_not_fit_is_refused():
    z, longer = gaussian(3, 4, 0), gaussian(4, 4, 1)
    score, mean = measures.pairwise_csd_similarity, lambda similarity, positive: similarity.mean()
    for words, given, more in (
        ("images are a Tensor.*expected a Gaussian or a tuple", (score, z.mean, z, mean), {}),
        ("give a text for each image", (score, z, longer, mean), {}),
        ("tile=0", (score, z, z, mean), {"tile": 0}),
        (r"texts have shapes \(3, 4\), \(4, 4\)", (score, z, (z.mean, longer.mean), mean), {}),
        (r"a tile is \(3, 1\), expected \(3, 3\)", (lambda p, q: p.trace[:, None], z, z, mean), {}),
        (r"loss is \(3,\), expected one number", (score, z, z, lambda similarity, positive: similarity.mean(1)), {}),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            tiled_loss_over_ranks(*given, **more)


def test_a_score_that_factors_holds_nothing_of_all_pairs_times_the_width():
    rows, dim = 512, 64
    sides = [gaussian(rows, dim, seed, torch.float32) for seed in (0, 1)]
    with PeakElements() as count:
        score = measures.pairwise_csd_similarity
        tiled_loss_over_ranks(score, *sides, lambda s, positive: sigmoid(s, positive, positive)).backward()
    assert count.peak <= 1.3 * (8 * rows * rows + 8 * rows * dim) < rows * rows * dim
