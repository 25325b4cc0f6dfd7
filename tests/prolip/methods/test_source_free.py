"""Source-free adaptation: pairs and weights by loops, the hinge by hand, micro-batches, ranks against one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_helpers import run_worlds
from method_checks import assert_is_formula

import prolip
import prolip.ranks
from prolip.embeddings import UnpairedEmbeddings
from prolip.gaussian import Gaussian
from prolip.methods.base import Context
from prolip.methods.source_free import (
    Neighbours,
    SourceFreeConfig,
    SourceFreeObjective,
    neighbourhood,
    pseudo_pairs,
    rank_weighted_variance,
    retrieve,
)
from prolip.scores import CSDScore, MatchProbabilityScore, MeanScore, TrueMatchScore

DOUBLE = torch.float64
SCORES = {
    "csd": CSDScore(10.0, -5.0),
    "mean": MeanScore(10.0, None),
    "true_match": TrueMatchScore(0.5, 0, 0, 0, 9.0),
    "match_probability": MatchProbabilityScore(5.0, 5.0),
}
WEIGHTS = ["none", "spread", "trace", "probability", "novelty"]


def make_pool(
    images: int = 30, texts: int = 20, dim: int = 8, seed: int = 0, novelty: bool = True
) -> UnpairedEmbeddings:
    g = torch.Generator().manual_seed(seed)
    z = [
        Gaussian(F.normalize(torch.randn(n, dim, generator=g), dim=1), torch.randn(n, dim, generator=g) - 2)
        for n in (images, texts)
    ]
    nats = [{"first": 5 * torch.rand(n, generator=g)} if novelty else {} for n in (images, texts)]
    return UnpairedEmbeddings(
        keys=[f"k{n:03}" for n in range(images)],
        image=z[0],
        text=z[1],
        text_ids=torch.randint(1, 1000, (texts, 12), generator=g),
        image_novelty=nats[0],
        text_novelty=nats[1],
    )


def make_objective(
    settings: dict | None = None,
    rank: int = 0,
    world_size: int = 1,
    method: str = "prolip",
    pool: UnpairedEmbeddings | None = None,
) -> SourceFreeObjective:
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": method}).double()
    context = Context(rank=rank, world_size=world_size)
    objective = SourceFreeObjective(model, SourceFreeConfig(**(settings or {})), context)
    objective.pool_state = objective.before_training(CSDScore(10.0, -5.0), pool or make_pool())
    return objective


def share_of(pool: UnpairedEmbeddings, rank: int, ranks: int) -> UnpairedEmbeddings:
    """Return a possible share of a pool for a rank: not contiguous rows, and none of a few texts."""
    images, texts = (torch.arange(n)[rank::ranks] for n in (len(pool.keys), len(pool.text_ids)))
    return UnpairedEmbeddings(
        keys=[pool.keys[row] for row in images],
        image=pool.image.select(images),
        text=pool.text.select(texts),
        text_ids=pool.text_ids[texts],
        image_novelty={name: x[images] for name, x in pool.image_novelty.items()},
        text_novelty={name: x[texts] for name, x in pool.text_novelty.items()},
        image_rows=images,
        text_rows=texts,
    )


def make_batch(rows: int) -> dict:
    g = torch.Generator().manual_seed(1)
    image = torch.randn(rows, 3, 32, 32, generator=g, dtype=DOUBLE)
    return {"image": image, "key": [f"k{7 * n % 30:03}" for n in range(rows)]}


@pytest.mark.parametrize("method", ["prolip", "pcmepp"])
def test_the_first_batch_is_checked_as_that_of_a_fresh_model(method):
    """The zeros that find the parameters of the means once counted as the first batch."""
    objective, batch = make_objective(method=method), make_batch(3)
    batch["image"][1] = torch.nan
    with pytest.raises(ValueError, match="images hold NaN or infinity"):
        objective.embed(objective.prepare(batch, 0))
    with pytest.raises(ValueError, match="expected token ids from 0 to 49408, got 99999"):
        objective.model.encode_text(torch.full((1, 12), 99999))


# --- pairs and weights -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("block", [4, 100])
def test_the_variance_is_the_papers_loop(monkeypatch, block, count):
    monkeypatch.setattr("prolip.ranks.BLOCK", block)
    monkeypatch.setattr("prolip.methods.source_free.CELLS", 3 * block)
    pool, g = make_pool(), torch.Generator().manual_seed(2)
    near = Neighbours(torch.zeros(4, count), torch.stack([torch.randperm(20, generator=g)[:count] for _ in range(4)]))
    found = rank_weighted_variance(CSDScore(), pool, "image", near)
    for query in range(4):
        x = [pool.text.mean[row].double() for row in near.rows[query].tolist()]
        w = [1 - (rank - 1) / (count - 1) if count > 1 else 1.0 for rank in range(1, count + 1)]
        middle = sum(a * b for a, b in zip(w, x)) / sum(w)
        variance = sum(a * (b - middle) ** 2 for a, b in zip(w, x)) / sum(w)
        torch.testing.assert_close(found[query], variance.mean(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("side", ["image", "text"])
def test_what_is_retrieved_is_the_order_of_the_models_own_score(score, side):
    pool = make_pool()
    near = retrieve(score, pool, side, SourceFreeConfig(neighbours=5))
    scores = score.pairwise(pool.image, pool.text)
    scores = scores if side == "image" else scores.mT
    values, rows = scores.topk(5, dim=1)
    assert torch.equal(near.rows, rows)
    torch.testing.assert_close(near.scores[:, :1] - near.scores, values[:, :1] - values, atol=1e-5, rtol=0)
    for wanted in (SourceFreeConfig(neighbours=300), SourceFreeConfig(pair_weight="probability")):
        assert retrieve(score, pool, side, wanted).rows.shape[1] == (20 if side == "image" else 30)
    assert retrieve(score, pool, side, SourceFreeConfig()).rows.shape[1] == 3


@pytest.mark.parametrize("score", [CSDScore(), MeanScore(), TrueMatchScore(0.5, 0, 0, 0)], ids=lambda score: score.name)
@pytest.mark.parametrize("side", ["image", "text"])
def test_equal_neighbours_are_retrieved_by_rising_row_whatever_the_blocks(monkeypatch, score, side):
    z = Gaussian(torch.eye(8)[torch.arange(50) % 2], torch.zeros(50, 8))
    pool = replace(make_pool(50, 50), image=z, text=z)
    monkeypatch.setattr("prolip.methods.source_free.CELLS", 350)
    monkeypatch.setattr("prolip.ranks.BLOCK", 9)
    near = retrieve(score, pool, side, SourceFreeConfig(neighbours=5))
    assert near.rows.tolist() == [list(range(row % 2, 10, 2)) for row in range(50)]


@pytest.mark.parametrize(("pool", "k"), [(2, 2), (30, 3), (475, 4), (29_000, 290), (30_000, 300), (566_435, 300)])
def test_a_neighbourhood_is_a_hundredth_of_the_pool_from_3_to_the_papers_300(pool, k):
    assert neighbourhood(SourceFreeConfig(), pool) == k
    assert neighbourhood(SourceFreeConfig(neighbours=7), pool) == min(7, pool)
    assert neighbourhood(SourceFreeConfig(pair_weight="novelty"), pool) == min(300, pool)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_pairs_are_the_nearest_both_ways_once_and_weights_belong_to_their_queries(weight):
    pool, score = make_pool(), SCORES["csd"]
    found = pseudo_pairs(score, pool, SourceFreeConfig(pair_weight=weight, neighbours=6, weight_mean=2.0))
    scores = score.pairwise(pool.image, pool.text)
    expected = {(i, int(row.argmax())) for i, row in enumerate(scores)}
    expected |= {(int(column.argmax()), j) for j, column in enumerate(scores.mT)}
    image, text, _ = found
    assert sorted(zip(image.tolist(), text.tolist())) == sorted(expected)
    for rows, weights in ((image, found[2][:, 0]), (text, found[2][:, 1])):
        of_row = {}
        for row, value in zip(rows.tolist(), weights.tolist()):
            assert of_row.setdefault(row, value) == value
        assert sum(of_row.values()) / len(of_row) == pytest.approx(2.0, rel=1e-5)
        assert (len(set(of_row.values())) == 1) == (weight == "none")


def test_weights_fall_with_what_the_model_says_of_its_answers():
    pool, score = make_pool(), SCORES["csd"]
    p = (score.scaled(score.pairwise(pool.image, pool.text))).softmax(1).amax(1)  # of all 20 texts
    novelty = torch.log1p(pool.image_novelty["first"].double().exp() / 10)
    for weight, u in {"probability": -p.double().log(), "novelty": novelty - p.double().log()}.items():
        found = pseudo_pairs(score, pool, SourceFreeConfig(pair_weight=weight, weight_slope=0.7))
        expected = torch.exp(-0.7 * u / u.std(correction=0))
        of_image = torch.zeros(30).double().scatter(0, found[0], found[2][:, 0].double())
        torch.testing.assert_close(of_image, expected / expected.mean(), rtol=1e-4, atol=1e-6)
    traces = pseudo_pairs(score, pool, SourceFreeConfig(pair_weight="trace"))
    least = pool.image.trace.argmin()
    assert traces[2][traces[0] == least, 0].amax() == traces[2][:, 0].amax()


@pytest.mark.parametrize(
    ("weight", "score", "message"),
    [
        ("novelty", SCORES["csd"], "needs a novelty of images"),
        ("trace", SCORES["csd"], "all have the same trace"),
        ("probability", MeanScore(), "requires a trained scale"),
    ],
)
def test_what_a_model_cannot_say_is_refused(weight, score, message):
    pool = make_pool(novelty=False)
    constant = Gaussian(pool.image.mean, torch.full_like(pool.image.mean, -1.0))
    with pytest.raises(ValueError, match=message):
        pseudo_pairs(score, replace(pool, image=constant), SourceFreeConfig(pair_weight=weight))


def test_a_pool_whose_keys_are_not_each_its_own_is_refused():
    pool = make_pool()
    with pytest.raises(ValueError, match="two images have the key 'k001'"):
        make_objective(pool=replace(pool, keys=["k001", *pool.keys[1:]]))


# --- ranks look together ---------------------------------------------------------------------------------------------
def tied_pool() -> UnpairedEmbeddings:
    z = Gaussian(torch.eye(8)[torch.arange(30) % 2], torch.zeros(30, 8))
    return replace(make_pool(30, 30), image=z, text=z)


def look_rank(rank: int) -> list[dict]:
    """Return each rank's memory of several pools, read in blocks that end within the ranks' shares."""
    prolip.ranks.BLOCK, world_size = 4, dist.get_world_size()
    looks = [(weight, make_pool()) for weight in WEIGHTS] + [("spread", make_pool(6, 3)), ("none", tied_pool())]
    return [
        make_objective({"pair_weight": weight}, rank, world_size, pool=share_of(pool, rank, world_size)).pool_state
        for weight, pool in looks
    ]


def test_ranks_that_hold_shares_of_a_pool_find_what_one_process_finds():
    """One rank of four has none of the three texts."""
    (one,), *several = run_worlds([1, 2, 3, 4], look_rank).values()
    for found in sum(several, []):
        for other, memory in zip(found, one):
            assert other.keys() == memory.keys()
            for name, x in memory.items():
                assert torch.equal(other[name], x) if name != "weight" else torch.allclose(other[name], x, 1e-5, 1e-6)


@pytest.mark.parametrize("block", [1, 7, 100])
def test_blocks_find_what_all_scores_at_once_find(monkeypatch, block):
    monkeypatch.setattr("prolip.ranks.BLOCK", block)
    monkeypatch.setattr("prolip.methods.source_free.CELLS", 5 * block)
    pool, config = make_pool(40, 50, seed=3), SourceFreeConfig(neighbours=11)
    scores = CSDScore().pairwise(pool.image, pool.text)
    for side, own in (("image", scores), ("text", scores.mT)):
        near, (values, rows) = retrieve(CSDScore(), pool, side, config), own.topk(11, dim=1)
        assert torch.equal(near.rows, rows)
        torch.testing.assert_close(near.scores, values)


# --- the batch -------------------------------------------------------------------------------------------------------
def test_each_image_gets_one_of_its_own_pairs_and_knows_all_of_them():
    pool, objective = make_pool(), make_objective({"neighbours": 6})
    found = pseudo_pairs(CSDScore(10.0, -5.0), pool, objective.config)
    mine = {}
    for image, text, weight in zip(*(x.tolist() for x in found)):
        mine.setdefault(pool.keys[image], {})[text] = weight
    seen = {}
    for step in range(40):
        batch = objective.prepare(make_batch(10), step)
        for row, key in enumerate(batch["key"]):
            text = batch["caption_id"][row].item()
            assert batch["pair_weight"][row].tolist() == mine[key][text]
            assert torch.equal(batch["text"][row], pool.text_ids[text])
            assert {n for n in batch["caption_ids"][row].tolist() if n >= 0} == mine[key].keys()
            seen.setdefault(key, set()).add(text)
    assert seen == {key: set(mine[key]) for key in make_batch(10)["key"]}
    assert any(len(texts) > 1 for texts in seen.values())


def test_draws_depend_on_seed_and_step_and_on_no_rank():
    one = make_objective().prepare(make_batch(8), 5)
    for rank in range(2):
        half = {name: x[rank::2] for name, x in make_batch(8).items()}
        own = make_objective(rank=rank, world_size=2).prepare(half, 5)
        assert torch.equal(own["text"], one["text"][rank::2])


def test_a_sample_that_was_not_there_and_a_missing_look_are_errors():
    objective = make_objective()
    with pytest.raises(ValueError, match="'new' was not there"):
        objective.prepare(make_batch(3) | {"key": ["k000", "new", "k003"]}, 0)
    objective.pool_state = {}
    with pytest.raises(ValueError, match="no pseudo-pairs"):
        objective.prepare(make_batch(3), 0)


# --- the loss --------------------------------------------------------------------------------------------------------
def by_hand(objective: SourceFreeObjective, batch: dict) -> torch.Tensor:
    """Equation 3, pair by pair."""
    s = objective.model.encode_image(batch["image"]).mean @ objective.model.encode_text(batch["text"]).mean.mT
    known = [set(ids) for ids in batch["caption_ids"].tolist()]
    total, rows = s.new_zeros(()), len(s)
    for i in range(rows):
        texts = [j for j in range(rows) if batch["caption_id"][j].item() not in known[i]]
        images = [k for k in range(rows) if batch["caption_id"][i].item() not in known[k]]
        for negatives, weight in (
            ([s[i, j] for j in texts], batch["pair_weight"][i, 0]),
            ([s[k, i] for k in images], batch["pair_weight"][i, 1]),
        ):
            if negatives:
                hardest = torch.stack(negatives).amax()
                total = total + (weight * (hardest - s[i, i]) + objective.config.margin).clamp(min=0)
    return total / rows


@pytest.mark.parametrize("margin", [0.2, 0.02])
def test_the_loss_and_its_gradients_are_equation_3(margin):
    make = partial(make_objective, {"margin": margin})
    assert_is_formula(make, make().prepare(make_batch(9), 0), by_hand)
