"""PCME++: loss and heads by hand, micro-batches and ranks against one process, a run from flags to evaluation."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from method_checks import assert_is_formula, captioned

import prolip
from prolip.methods.accumulate import split_batch
from prolip.methods.base import Context
from prolip.methods.pcmepp import PCMEppConfig, PCMEppObjective
from prolip.models.heads import Tokens
from prolip.random import Draws, Stream

DOUBLE = torch.float64
SETTINGS = {
    "full": {},
    "first": {"pseudo_positives": "first", "pseudo_weight": 1.0},
    "alone": {"pseudo_weight": 0.0, "vib_weight": 0.0, "known_matches": False},
    "with clip": {"clip_weight": 0.5, "pseudo_weight": 0.3},
}


def make_objective(settings: dict | None = None, rank: int = 0, world_size: int = 1) -> PCMEppObjective:
    torch.manual_seed(0)
    own = {"size_augment": 0.0, "mix_fraction": 0.0} | (settings or {})
    model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "pcmepp", "config": own}).double()
    return PCMEppObjective(model, PCMEppConfig(**own), Context(rank=rank, world_size=world_size))


def make_batch(rows: int, mixed: bool = True) -> dict[str, torch.Tensor]:
    """A prepared batch: rows i and i + 1 of each four are mixed."""
    batch, place = captioned(rows), torch.arange(rows)
    share = torch.where(place % 4 < 2, torch.rand(rows, generator=torch.Generator().manual_seed(2)), 1.0)
    return batch | ({"share": share, "partner": place ^ 1} if mixed else {})


def by_hand(objective: PCMEppObjective, batch: dict) -> torch.Tensor:
    """Equation 3, pair by pair, with the paper's a and b of the distance."""
    config, model = objective.config, objective.model
    image, text = model.encode_image(batch["image"]), model.encode_text(batch["text"])
    rows = len(image.mean)
    a = model.logit_scale.exp() / 2
    b = model.logit_bias + 2 * a
    csd = (image.mean[:, None] - text.mean).square().sum(-1) + (image.var[:, None] + text.var).sum(-1)
    logit = -a * csd + b
    match = torch.eye(rows, dtype=DOUBLE)
    if config.known_matches:
        for i, ids in enumerate(batch["caption_ids"].tolist()):
            for j, own in enumerate(batch["caption_id"].tolist()):
                match[i, j] = float(i == j or own in ids)
    label = batch["share"][:, None] * match + (1 - batch["share"][:, None]) * match[batch["partner"]]
    bce = lambda x, y: F.binary_cross_entropy(x.sigmoid(), y)  # noqa: E731

    def pseudo(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        places = range(len(x))
        if config.pseudo_positives == "first":
            firsts = [row.index(max(row)) for row in y.tolist()]
            near = [[x[i, j] >= x[i, firsts[i]] for j in places] for i in places]
            return torch.tensor([[y[i, firsts[i]] if near[i][j] else y[i, j] for j in places] for i in places])
        rows = [[max(y[i, k] for k in places if x[i, k] <= x[i, j]) for j in places] for i in places]
        return torch.stack([torch.stack(row) for row in rows]).to(DOUBLE)

    loss = 2 * bce(logit, label)
    if config.pseudo_weight:
        loss = loss + config.pseudo_weight * (bce(logit, pseudo(logit, label)) + bce(logit.T, pseudo(logit.T, label.T)))
    for z in (image, text):
        loss = loss + config.vib_weight * (z.mean**2 + z.var - z.log_var - 1).mean() / 2
    if config.clip_weight:
        cosine = 2 * a * image.mean @ text.mean.T
        diagonal = torch.eye(rows, dtype=torch.bool)
        clip = -(cosine.log_softmax(1)[diagonal] + cosine.log_softmax(0)[diagonal]).mean() / 2
        loss = loss + config.clip_weight * clip
    return loss


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_loss_and_its_gradients_are_equation_3_pair_by_pair(settings):
    _, other = assert_is_formula(partial(make_objective, settings), make_batch(6), by_hand, 1e-10)
    assert other.model.logit_scale.exp().item() / 2 == pytest.approx(5.0)  # a and b of the paper
    assert (other.model.logit_bias + other.model.logit_scale.exp()).item() == pytest.approx(5.0)


def test_prepare_mixes_as_the_step_says_and_both_kinds_come():
    objective = make_objective({"mix_fraction": 0.9})
    batch = make_batch(16, mixed=False)
    kinds = set()
    for step in range(12):
        one, again = (objective.prepare(batch, step) for _ in range(2))
        assert torch.equal(one["image"], again["image"]) and one["share"].shape == (16,)
        i = int((one["share"] < 1).nonzero()[0])
        sources = batch["image"][i], batch["image"][one["partner"][i]]
        kinds.add(bool(((one["image"][i] == sources[0]) | (one["image"][i] == sources[1])).all()))  # pasted or blended
        assert torch.equal(one["image"][one["share"] == 1], batch["image"][one["share"] == 1])
    assert kinds == {True, False} and make_objective({"mix_fraction": 0.0}).prepare(batch, 0) is batch
    with pytest.raises(ValueError, match="known_matches needs caption_id and.*--no-known-matches"):
        objective.prepare({name: batch[name] for name in ("image", "text")}, 0)


def test_heads_pool_the_last_tokens_and_those_of_another_last_block():
    model = make_objective().model.eval()
    image, text = make_batch(3)["image"], make_batch(3)["text"]
    for tower, inputs in ((model.visual, image), (model.text, text)):
        head = tower.head
        x = tower._embeds(inputs)
        x = x[0] if isinstance(x, tuple) else x
        for block in tower.blocks[:-1]:
            x = block(x)
        last, again = tower.blocks[-1](x), head.block(x)
        for row in range(3):
            found = {}
            for part, tokens in (("mean", last), ("log_var", again)):
                if tower is model.visual:
                    kept = tokens[row, [0, *range(2, tokens.shape[1])]]
                else:
                    kept = tokens[row, [tokens.shape[1] - 1, *range(8)]]  # [CLS] and eight words, no padding, no [UNC]
                features = head.projections[part](head.norms[part](kept))
                found[part] = head.pools[part](features[None])[0]
            z = tower(inputs)
            torch.testing.assert_close(z.mean[row], F.normalize(found["mean"], dim=0), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(z.log_var[row], found["log_var"], rtol=1e-4, atol=1e-5)
    assert not torch.equal(head.block.mlp[0].weight, tower.blocks[-1].mlp[0].weight)


def test_a_tower_of_one_block_and_checkpointed_activations_give_the_same():
    model = make_objective().model.eval()
    image = make_batch(3)["image"]
    expected = model.encode_image(image)
    model.set_grad_checkpointing(True)
    torch.testing.assert_close(model.encode_image(image).log_var, expected.log_var)
    small = copy.deepcopy(model)
    small.visual.transformer.resblocks = small.visual.transformer.resblocks[:1]
    before = small.visual._embeds(image)
    block = small.visual.head.block
    again = small.visual.through_blocks(before)[1]["again"](block)
    torch.testing.assert_close(again.last, block(before)[:, 2:])
    torch.testing.assert_close(again.pooled, block(before)[:, 0])


def test_size_augment_loses_tokens_in_training_alone_and_the_first_stays(monkeypatch):
    objective = make_objective({"size_augment": 0.5, "mix_fraction": 0.0})
    batch, head = make_batch(4), objective.model.visual.head
    plain, again = (objective.eval().embed(objective.prepare(batch, step))["image_mean"] for step in (1, 2))
    assert torch.equal(plain, again) and head.noise is None
    one, other, same = (objective.train().embed(objective.prepare(batch, step))["image_mean"] for step in (1, 2, 1))
    assert not torch.equal(one, other) and not torch.equal(one, plain) and torch.equal(one, same)
    with pytest.raises(ValueError, match=r"call objective\.prepare"):
        objective.embed(batch)
    seen = []
    monkeypatch.setattr(head, "pooled", lambda part, x, valid: seen.append(valid) or x[:, 0])
    padded = torch.tensor([[True, True, False, False, False]] * 2)
    for tokens, noise in (
        (Tokens(torch.zeros(4000, 20, 1)), Draws().uniform(Stream.IMAGE_SIZE, 5, torch.arange(4000), 21)),
        (Tokens(torch.zeros(2, 5, 1), padded), torch.rand(2, 6)),
    ):
        head.noise = noise
        head(tokens, None, again=lambda block, tokens=tokens: tokens)
    valid, only = seen[0], seen[2]
    lost = (~valid).float().mean(1)
    assert valid[:, 0].all() and (lost == 0).float().mean() == pytest.approx(0.5, abs=0.05)
    assert lost[lost > 0].mean() == pytest.approx(0.5 * 0.75 * 19 / 20, abs=0.03)  # s times the mean of u in (s, 1)
    assert not only[:, 2:].any()


@pytest.mark.parametrize("world_size", [2, 3])
def test_size_augment_loses_the_same_tokens_on_ranks_and_in_micro_batches_as_in_one_process(world_size):
    """Once every rank drew from the global generator, whose seed all ranks share: the same places on each."""
    settings, batch = {"size_augment": 0.8, "mix_fraction": 0.0}, make_batch(12)
    objective = make_objective(settings).train()
    prepared = objective.prepare(batch, 4)
    whole = objective.embed(prepared)
    for rank in range(world_size):
        own = {name: x[rank::world_size] for name, x in batch.items()}
        other = make_objective(settings, rank, world_size).train()
        reps = other.embed(other.prepare(own, 4))
        for name in ("image_mean", "text_mean", "text_log_var"):
            torch.testing.assert_close(reps[name], whole[name][rank::world_size])
    pieces = [objective.embed(piece)["text_mean"] for piece in split_batch(prepared, 5)]
    torch.testing.assert_close(torch.cat(pieces), whole["text_mean"])
