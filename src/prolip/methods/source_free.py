"""Source-free adaptation (Tian et al. 2024): continue a trained model on images and texts whose pairs are unknown.

The model retrieves pseudo-pairs, each weighted by its uncertainty, and a hinge loss is trained on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from prolip.data.augment.affine import to_device
from prolip.data.captions import stable_hash
from prolip.embeddings import UnpairedEmbeddings
from prolip.gaussian import Gaussian, upcast, without_autocast
from prolip.losses import Matches, both_ways, dot_products, tiled_loss_over_ranks, triplet_loss
from prolip.methods.base import Batch, Context, MeansObjective, Method, Needs, PoolNeeds, Reps, Terms
from prolip.methods.gaussians import freeze_unread
from prolip.random import Stream
from prolip.ranks import blocks, everywhere, shares
from prolip.scores import MeanScore, Score, Side, largest
from prolip.uncertainty.novelty import refusal
from prolip.utils.fields import option
from prolip.utils.flags import check_choices, check_range

PairWeight = Literal["none", "spread", "trace", "probability", "novelty"]
NEIGHBOURS = 300  # k of the paper
CELLS = 2**26  # scores in memory at once


@dataclass(kw_only=True)
class SourceFreeConfig:
    """Settings of the pseudo-pairs and their weights."""

    pair_weight: PairWeight = option(
        "spread",
        "a pair's uncertainty: spread (variance of the retrieved, the paper's), trace, probability, novelty or none",
    )
    weight_mean: float = option(1.0, "lambda: the mean weight of a pseudo-pair")
    weight_slope: float = option(1.0, "beta: weights fall by e per 1 / beta standard deviations of uncertainty")
    neighbours: int | None = option(
        None, "K, items that a query retrieves; default: the paper's 300, for spread at most 1% of the pool, at least 3"
    )
    margin: float = option(0.2, "cosine by which a pseudo-pair must be nearer than other pairs")
    renew_pairs: bool = option(False, "find the pseudo-pairs again before every epoch, with the current model")
    target_texts: str | None = option(None, "file with one text a line; default: all texts of the training data")

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "weight_mean", above=True)
        check_range(self, "weight_slope")
        check_range(self, "neighbours", least=2, remedy=": one item has no spread")
        check_range(self, "margin", most=2, remedy=" (cosines differ by no more)")


class SourceFreeObjective(MeansObjective):
    """sum over pseudo-pairs (i, j) of [m + w_i (s_ij' - s_ij)]_+ + [m + w_j (s_i'j - s_ij)]_+ over B, equation 3.

    s: cosine of means; j', i': hardest negatives of the global batch. Variances, scale and bias, and a learned score
    do not change.
    """

    statistics = ("pair_weight",)
    config: SourceFreeConfig

    def __init__(self, model: Any, config: SourceFreeConfig, context: Context | None = None):
        super().__init__(model, config, context)
        freeze_unread(model, model.parameters(), ("mean",))

    @classmethod
    def needs(cls, config: SourceFreeConfig) -> Needs:
        return Needs(data={"captions": 0}, pool=PoolNeeds(each_epoch=config.renew_pairs, texts=config.target_texts))

    def notes(self, batch: int) -> tuple[str, ...]:
        """Return K of both directions, once there is a pool."""
        if not self.pool_state:
            return ()
        sizes = {"texts": len(self.pool_state["text_ids"]), "images": len(self.pool_state["keys"])}
        near = (f"{neighbourhood(self.config, n)} of {n:,} {name}" for name, n in sizes.items())
        return (f"each query retrieves {', '.join(near)} (--neighbours)",)

    def before_training(self, score: Score, pool: UnpairedEmbeddings) -> dict[str, Tensor]:
        """Return the pseudo-pairs of a pool: image row r has the pairs start[r] to start[r + 1], each a row of text_ids
        with its weights as an image query and as a text query. 8 (2 N + L M) + 16 P bytes on every rank, P <= N + M.
        """
        (z, images), (_, texts) = pool.side("image"), pool.side("text")
        ids = [stable_hash(key, bits=63) for key in pool.keys]
        own = torch.tensor(ids, dtype=torch.int64, device=z.mean.device)
        _, keys = everywhere(images, own)
        place = keys.argsort()
        if len(twice := keys[place][1:][keys[place].diff() == 0]):
            named = [repr(key) for key, found in zip(pool.keys, own.tolist()) if found in twice.tolist()]
            which = (named or ["of a sample of another rank"])[0]
            raise ValueError(f"two images have the key {which}: give every sample of the training data its own")
        image, text, weight = pseudo_pairs(score, pool, self.config)
        row = torch.empty_like(place)
        row[place] = torch.arange(len(keys))  # images sorted by checksum, for bisection
        order = row[image].argsort(stable=True)
        start = torch.bincount(row[image], minlength=len(keys)).cumsum(0)
        return {
            "keys": keys[place],
            "start": F.pad(start, (1, 0)),
            "text": text[order],
            "weight": weight[order],
            "text_ids": everywhere(texts, pool.text_ids.to(texts.device))[1],
        }

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Add a text to each image, drawn from its pseudo-pairs in each step."""
        state, draws = self.pool_state, self.context.draws
        if not state:
            raise ValueError("there are no pseudo-pairs: set `pool_state` to the result of `before_training`")
        wanted = torch.tensor([stable_hash(key, bits=63) for key in batch["key"]])
        row = torch.searchsorted(state["keys"], wanted).clamp(max=len(state["keys"]) - 1)
        strange = (state["keys"][row] != wanted).nonzero().flatten().tolist()
        if strange:
            which = f"the sample {batch['key'][strange[0]]!r} was not there when the pseudo-pairs were made"
            raise ValueError(f"{which}: the training data has changed; start another run")
        start, end = state["start"][row], state["start"][row + 1]
        noise = draws.uniform(Stream.PSEUDO_PAIR, step, draws.rows(len(row), "cpu"), 1).flatten()
        pair = start + (noise * (end - start)).long()
        text, others = state["text"], start.unsqueeze(1) + torch.arange(int((end - start).amax()))
        known = text[others.clamp(max=len(text) - 1)].masked_fill(others >= end.unsqueeze(1), -1)
        found = {"text": state["text_ids"][text[pair]], "caption_id": text[pair], "caption_ids": known}
        found["pair_weight"] = state["weight"][pair]
        return batch | dict(zip(found, to_device(batch["image"].device, *found.values())))

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        """Return the loss, and the mean weight for the log. Texts of an image's pseudo-pairs are not its negatives."""
        image, text, weight = upcast(reps["image_mean"]), upcast(reps["text_mean"]), batch["pair_weight"]
        start = self.context.rank * len(image)

        def loss(similarity: Tensor, positive: Tensor) -> Tensor:
            own, ways = similarity.diagonal(start), zip(both_ways(similarity, positive), weight.unbind(1))
            return torch.stack([triplet_loss(*x, own, self.config.margin, weight=w) for x, w in ways]).sum()

        known = Matches(batch["caption_ids"], batch["caption_id"])
        with without_autocast(image.device):
            value = tiled_loss_over_ranks(dot_products, (image,), (text,), loss, labels=known)
        return {"loss": value, "pair_weight": weight.mean()}


class Neighbours(NamedTuple):
    """Results of a rank's queries, nearest first: scores (Q, K), rows of the gallery (Q, K)."""

    scores: Tensor
    rows: Tensor


def neighbourhood(config: SourceFreeConfig, size: int) -> int:
    """Return K in a pool of `size`: the setting, or the paper's 300; for spread min(300, max(3, size / 100))."""
    spread = config.pair_weight == "spread"
    return min(size, config.neighbours or (min(NEIGHBOURS, max(3, size // 100)) if spread else NEIGHBOURS))


def pseudo_pairs(score: Score, pool: UnpairedEmbeddings, config: SourceFreeConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Pair every image with its nearest text and every text with its nearest image, by the model's own score. All ranks
    must call it and get equal results: rows of images and texts, (P,) int64, and `weigh`ts of both as queries, (P, 2).
    """
    nearest, weight = [], []
    for side in get_args(Side):
        near, (_, rows) = retrieve(score, pool, side, config), pool.side(side)
        uncertain = UNCERTAINTY[config.pair_weight](score, pool, side, near).to(rows.device)
        _, first, u = everywhere(rows, near.rows[:, 0], uncertain)
        nearest.append(first)
        weight.append(weigh(u, config))
    (images, texts), (text, image) = (torch.arange(len(x)) for x in nearest), nearest
    # pairs that are found both ways are one
    image, text = torch.stack([torch.cat([images, image]), torch.cat([text, texts])]).unique(dim=1)
    return image, text, torch.stack([weight[0][image], weight[1][text]], 1)


def weigh(uncertainty: Tensor, config: SourceFreeConfig) -> Tensor:
    """Return lambda exp(-beta u) / mean exp(-beta u), u in standard deviations over all queries: (Q,) float32."""
    u = uncertainty.double()
    spread = u.std(correction=0)
    u = (u - u.amin()) / spread if spread > 0 else torch.zeros_like(u)
    weight = torch.exp(-config.weight_slope * u)
    return (config.weight_mean * weight / weight.mean()).float()


@torch.no_grad()
def retrieve(score: Score, pool: UnpairedEmbeddings, side: Side, config: SourceFreeConfig) -> Neighbours:
    """Retrieve the `neighbourhood` nearest texts of every image of this rank, or images of every text.

    Exact; equal scores rank by rising row, on every device and for any number of ranks. n queries of a rank take 12 K n
    bytes, its share, a block and 10 CELLS numbers.
    """
    (queries, _), (gallery, rows) = pool.side(side), pool.side("text" if side == "image" else "image")
    size = sum(shares(rows))
    count = neighbourhood(config, size)
    best = queries.mean.new_full((len(queries.mean), count), -torch.inf)
    found = torch.full(best.shape, size, device=rows.device)  # a row after all others, until one is found
    for mean, log_var, of in blocks(*gallery, rows):
        block = Gaussian(mean, log_var)
        step = max(1, CELLS // len(of))
        for start in range(0, len(best), step):
            part = slice(start, start + step)
            some = Gaussian(*(x[part] for x in queries))
            scores = score.pairwise(some, block) if side == "image" else score.pairwise(block, some).mT
            near = largest(scores, count)
            names, order = torch.cat([found[part], of[near]], 1).sort(dim=1)
            both = torch.cat([best[part], scores.gather(1, near)], 1).gather(1, order)
            both, order = both.sort(dim=1, descending=True, stable=True)
            best[part], found[part] = both[:, :count], names.gather(1, order[:, :count])
    return Neighbours(best, found)


def rank_weighted_variance(score: Score, pool: UnpairedEmbeddings, side: Side, near: Neighbours) -> Tensor:
    """Compute V = mean over d of sum_i w_i (x_id - mu_d)^2 / sum_i w_i, w_i = 1 - (r_i - 1) / (K - 1), (1) and (2).

    x_i: the mean retrieved at rank r_i of K; V = (sum_i w_i |x_i|^2 / sum_i w_i - |mu|^2) / D, so that no tensor of
    Q x K x D is made.
    """
    gallery, rows = pool.side("text" if side == "image" else "image")
    queries, count = near.rows.shape
    step = max(1, CELLS // count)
    weight = torch.linspace(1, 0, count, dtype=torch.float64, device=rows.device) if count > 1 else rows.new_ones(1)
    weight = (weight / weight.sum()).double()
    sums = torch.zeros((queries, gallery.mean.shape[1] + 1), dtype=torch.float64, device=rows.device)
    for mean, of in blocks(gallery.mean, rows):
        mean = mean.double()
        moments = torch.cat([mean, mean.square().sum(1, keepdim=True)], 1)
        for wanted, total in zip(near.rows.split(step), sums.split(step)):
            place = torch.searchsorted(of, wanted).clamp(max=len(of) - 1)
            query, rank = (of[place] == wanted).nonzero(as_tuple=True)  # those in this block
            if len(query):
                begin = torch.searchsorted(query, torch.arange(len(wanted), device=rows.device))
                there = place[query, rank]
                total += F.embedding_bag(there, moments, begin, mode="sum", per_sample_weights=weight[rank])
    return (sums[:, -1] - sums[:, :-1].square().sum(1)) / gallery.mean.shape[1]


def own_trace(score: Score, pool: UnpairedEmbeddings, side: Side, near: Neighbours) -> Tensor:
    """Return the score's uncertainty of an input, its trace. ValueError if all traces are equal."""
    z, rows = pool.side(side)
    own = score.uncertainty(z)
    _, found = everywhere(rows, own)
    if not found.isfinite().all() or not found.std() > 1e-6 * found.abs().mean():
        remedy = "use a model with variances (prolip uncertainty fits them), or --pair-weight spread"
        raise ValueError(f"--pair-weight trace, but the {side}s of this model all have the same trace: {remedy}")
    return own


def code_length(score: Score, pool: UnpairedEmbeddings, side: Side, near: Neighbours) -> Tensor:
    """Return -log p of the nearest among the retrieved, by the score's trained scale or its match probability."""
    if (scaled := score.scaled(near.scores)) is not None:
        return scaled.double().logsumexp(1) - scaled[:, 0]
    if (matches := score.match_probability(near.scores[:, 0].double())) is not None:
        return -matches.log()
    missing = f"the score {score.name!r} of this model has none: use --pair-weight spread"
    raise ValueError(f"--pair-weight probability requires a trained scale, and {missing}")


def strangeness(score: Score, pool: UnpairedEmbeddings, side: Side, near: Neighbours) -> Tensor:
    """Return -log P(the input is familiar and its nearest right), by `prolip.uncertainty.novelty.refusal`."""
    novelty = pool.image_novelty if side == "image" else pool.text_novelty
    if not novelty:
        remedy = "fit it with `prolip uncertainty`, or use --pair-weight spread"
        raise ValueError(f"--pair-weight novelty needs a novelty of {side}s, and this model has none: {remedy}")
    code = code_length(score, pool, side, near)
    return refusal(code, {name: nats.to(code.device) for name, nats in novelty.items()})


#: (score, pool, side of the queries, their neighbours) -> (Q,), larger: less certain.
UNCERTAINTY: dict[str, Callable[[Score, UnpairedEmbeddings, Side, Neighbours], Tensor]] = {
    "none": lambda score, pool, side, near: torch.zeros(len(near.rows)),
    "spread": rank_weighted_variance,
    "trace": own_trace,
    "probability": code_length,
    "novelty": strangeness,
}

METHODS = {"source-free": Method(SourceFreeConfig, SourceFreeObjective, MeanScore, adapts=True)}
