"""FLOPs of a sample are those of the passes that an objective really takes; peaks go by CUDA's names of devices."""

from __future__ import annotations

import pytest
import torch
from small_towers import OLD_TRANSFORMERS, small_folder, small_towers

from prolip import create_model
from prolip.flops import FORWARD_AND_BACKWARD, EncoderPass, count_flops, flops_per_sample, peak_of
from prolip.methods import METHODS

ROWS = 16


@pytest.mark.parametrize(
    "method, settings",
    [
        ("prolip", {}),
        ("prolip", {"mask_fraction": 0.5, "mask_ratio": 0.25}),
        ("prolip", {"alpha2": 0.0}),
        ("siglip", {}),
    ],
)
def test_what_an_objective_declares_is_what_it_computes(method, settings):
    config, kind = METHODS[method][:2]
    objective = kind(create_model("ProLIP-ViT-test"), config(**settings))
    texts = torch.randint(5, 50, (ROWS, objective.model.context_length))
    batch = {"image": torch.randn(ROWS, 3, 32, 32), "text": texts}
    with count_flops() as counter, torch.no_grad():
        objective.embed(objective.prepare(batch, 0))
    passes = objective.encoder_passes(objective.config, ROWS, objective.model)
    counted = flops_per_sample(objective.model, passes, ROWS)
    assert counted * ROWS == pytest.approx(FORWARD_AND_BACKWARD * counter.get_total_flops(), rel=0.01)
    assert all(p.device.type == "cpu" and p.requires_grad for n, p in objective.named_parameters() if "resblocks" in n)


def test_peaks_go_by_the_names_of_devices():
    assert peak_of("NVIDIA H100 80GB HBM3") == 989.4e12 and peak_of("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_of("Some other device") is None


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.adapts])
def test_the_heads_of_a_method_count(method):
    """Against the model itself, whose heads run; and every weight matrix of a head multiplies each row at least once.

    Recurrence counts by another rule on other devices, so it is left some room.
    """
    model = create_model("ProLIP-ViT-test", method_cfg={"name": method}).requires_grad_(False)
    got = {
        kind: flops_per_sample(model, [EncoderPass(kind, 1)], 1) / FORWARD_AND_BACKWARD for kind in ("image", "text")
    }
    inputs = {"image": torch.randn(1, 3, 32, 32), "text": torch.randint(5, 50, (1, model.context_length))}
    plain = create_model("ProLIP-ViT-test")
    for (kind, x), tower in zip(inputs.items(), (model.visual, model.text)):
        with count_flops() as counter:
            getattr(model, f"encode_{kind}")(x)
        assert got[kind] == pytest.approx(counter.get_total_flops(), rel=0.03)
        head = [] if tower.head is None else [p for p in tower.head.parameters() if p.ndim == 2]
        more = got[kind] - flops_per_sample(plain, [EncoderPass(kind, 1)], 1) / FORWARD_AND_BACKWARD
        assert more >= 2 * sum(p.numel() for p in head)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers before 5 looks at the values of a mask")
def test_a_step_of_openclips_towers_costs_three_forward_passes(tmp_path):
    """The first layers are an exception: their inputs have no gradient. The counter overcounts grouped convolutions."""
    with small_towers(tmp_path / "transformers"):
        model = create_model(f"local-dir:{small_folder('nllb-clip-base-siglip', tmp_path / 'small')}")
        objective = METHODS["prolip"].objective(model, METHODS["prolip"].config())
        texts = torch.randint(3, 900, (ROWS, model.context_length))
        batch = objective.prepare({"image": torch.randn(ROWS, 3, *model.image_size), "text": texts}, 0)
        with count_flops() as counter:
            objective(batch)["loss"].backward()
        passes = objective.encoder_passes(objective.config, ROWS, objective.model)
        counted = ROWS * flops_per_sample(objective.model, passes, ROWS)
    assert 0.85 < counter.get_total_flops() / counted < 1.02
