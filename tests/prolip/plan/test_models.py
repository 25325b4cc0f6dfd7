"""What the planner counts on the meta device is what the model has and does."""

from __future__ import annotations

import pytest
import torch

from prolip import create_model
from prolip.flops import FORWARD_AND_BACKWARD, count_flops, without_data
from prolip.methods import METHODS
from prolip.methods.prolip import ProLIPConfig, ProLIPObjective
from prolip.models.prolip import ProLIP
from prolip.plan.models import build, count_of_run, measure
from prolip.utils.flags import FlagError

# Reference figures for ViT-B/16: GFLOPs of a sample, forward and backward, and the parameters of the released model.
SIGLIP, PROLIP, PARAMETERS = 139.8, 147.4, 197_923_586


@pytest.mark.parametrize("method, wanted", [("siglip", SIGLIP), ("prolip", PROLIP)])
def test_flops_of_vit_b_16_are_those_known(method, wanted):
    model = count_of_run("ProLIP-ViT-B-16", method, 512)
    assert model.flops / 1e9 == pytest.approx(wanted, rel=0.02)
    assert model.parameters == PARAMETERS


def test_masked_views_cost_what_the_method_does():
    """FLOPs by shares equal those of the objective's own passes on a batch of 16, of which 2 rows are masked."""
    rows, masked, name = 16, 2, "ProLIP-ViT-test"
    network = create_model(name)
    objective = ProLIPObjective(network, ProLIPConfig())
    batch = objective.prepare(
        {"image": torch.randn(rows, 3, 32, 32), "text": torch.randint(5, 50, (rows, network.context_length))}, 0
    )
    assert len(batch["masked_image"]) == masked
    with count_flops() as counter, torch.no_grad():
        objective.embed(batch)
    model = count_of_run(name, "prolip", rows)
    assert model.flops * rows == pytest.approx(FORWARD_AND_BACKWARD * counter.get_total_flops(), rel=0.01)
    assert {part.name: part.share for part in model.passes} == {"image": 1, "masked image": 1 / 8, "text": 9 / 8}


def test_a_quarter_of_the_patches_and_both_special_tokens_pass_the_blocks_of_a_masked_image():
    image, masked, text = count_of_run("ProLIP-ViT-B-16", "prolip", 512).passes
    assert (image.tokens, masked.tokens, text.tokens) == (198, 51, 66)
    assert (image.width, image.hidden, image.layers) == (768, 3072, 12)


@pytest.mark.parametrize(
    "name, said", [("ProLIP-ViT-B16", "did you mean ProLIP-ViT-B-16"), ("RN51", "did you mean RN50")]
)
def test_a_model_that_cannot_be_planned_is_refused_with_a_remedy(name, said):
    with pytest.raises(FlagError, match=said):
        count_of_run(name, "prolip", 8)


def test_a_tower_that_looks_at_values_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setattr(ProLIP, "encode_text", lambda model, texts: bool(texts.any()))  # as transformers before 5
    measure.cache_clear()
    with pytest.raises(FlagError, match="'ProLIP-ViT-test': .* text tower, because .*transformers>=5"):
        count_of_run("ProLIP-ViT-test", "prolip", 8)


@pytest.mark.parametrize("name, method, cost", [("ViT-B-16", "prolip", 1.001), ("ViT-B-16-SigLIP", "pcme", 1.01)])
def test_readers_and_heads_cost_at_most_a_hundredth_of_the_towers(name, method, cost):
    chosen, found = METHODS[method], []
    with torch.device("meta"):
        model = build(name).twin()
        if chosen.extend:
            chosen.extend(model, chosen.config())
    model.requires_grad_(False)
    with without_data():
        image, ids = torch.empty(1, 3, *model.image_size), torch.empty(1, model.context_length, dtype=torch.int64)
        for visual, text in ((model.visual, model.text), (model.visual.tower, model.text.tower)):
            with count_flops() as counter:
                visual(image), text(ids)
            found.append(counter.get_total_flops())
    assert 1 < found[0] / found[1] <= cost
