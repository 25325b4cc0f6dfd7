"""`prolip uncertainty` on own data: every form gives the pairs of the CSV."""

import pytest
import torch
from commands import run
from safetensors.torch import load_file

import own_data
import prolip
from prolip.models.checkpoint import save_pretrained


@pytest.fixture(scope="module")
def csv_pairs(tmp_path_factory):
    """The sources, a model, and the pairs that the CSV gives it."""
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-test", init_unc_bias=-4.0, init_unc_gain=1.0)
    folder = tmp_path_factory.mktemp("pairs")
    model, made = f"local-dir:{save_pretrained(model, folder / 'model')}", own_data.write(folder / "d", 20)
    return made, model, pairs_of(made["csv"], model, folder / "csv")


def pairs_of(address, model, place):
    place.mkdir()
    run(
        "uncertainty",
        "--model",
        model,
        "--data",
        address,
        "--novelty-centres",
        0,
        "--save-pairs",
        place / "pairs.safetensors",
        "--output",
        place / "fitted",
    )
    found = load_file(place / "pairs.safetensors")
    assert (place / "fitted/config.json").exists()
    return {name: found[name].float() for name in ("text", "image_of", "text_of", "weight", "image")}


@pytest.mark.parametrize("kind", ["jsonl", "bytes", "shards"])
def test_every_form_is_fitted_to_as_the_csv(csv_pairs, kind, tmp_path):
    made, model, expected = csv_pairs
    found = pairs_of(made[kind], model, tmp_path / "p")
    assert len(found["image"]) == 20 and len(found["weight"]) == 40
    assert torch.allclose(found["text"], expected["text"], atol=1e-5)
    order = [expected["image"].sub(row).abs().amax(1).argmin().item() for row in found["image"]]  # rows are by key
    assert sorted(order) == list(range(20))
    assert torch.allclose(found["image"], expected["image"][order], atol=1e-5)
