"""The counts of OpenCLIP's towers with readers, without data, equal what they compute and keep."""

from __future__ import annotations

import pytest
import torch
from small_towers import NAMES, OLD_TRANSFORMERS, small_config, small_folder, small_towers
from test_memory import saved_bytes

from prolip import create_model
from prolip.flops import FORWARD_AND_BACKWARD, count_flops, flops_per_sample
from prolip.methods import find_method
from prolip.plan.config import FLOAT
from prolip.plan.models import activations, count_of_run

#: A kind of image tower and one of text tower each, that differ in how they are counted.
FEW = ("ViT-B-16-SigLIP", "swin_base_patch4_window7_224", "mt5-base-ViT-B-32", "coca_ViT-B-32")
OLD = pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers before 5 looks at the values of a mask")
EACH = [
    pytest.param(
        name,
        marks=[
            *([] if name in FEW else [pytest.mark.slow]),
            *([OLD] if "hf_model_name" in small_config(name)["text_cfg"] else []),
        ],
    )
    for name in NAMES
]
ROWS = 8


@pytest.fixture(scope="module", params=EACH)
def folder(request, tmp_path_factory):
    """A small model of a combination, in OpenCLIP's format."""
    place = tmp_path_factory.mktemp("counted")
    with small_towers(place / "transformers"):
        yield small_folder(request.param, place / request.param)


def objective_of(folder, method="prolip"):
    """A method on a small model, with a batch of its own."""
    chosen = find_method(method)
    objective = chosen.objective(create_model(f"local-dir:{folder}", method_cfg={"name": method}), chosen.config())
    model = objective.model
    texts = torch.randint(3, 900, (ROWS, model.context_length))
    return objective, {"image": torch.randn(ROWS, 3, *model.image_size), "text": texts}


def test_a_sample_costs_what_a_step_computes(folder):
    """Masked views are whole images, blanked; no text is masked, as no vocabulary of OpenCLIP's has a [MASK]."""
    objective, batch = objective_of(folder)
    objective.requires_grad_(False)
    with count_flops() as counter:
        objective.embed(objective.prepare(batch, 0))
    passes = objective.encoder_passes(objective.config, ROWS, objective.model)
    assert [part.rows for part in passes] == [ROWS, 1, ROWS]
    counted = flops_per_sample(objective.model, passes, ROWS)
    # relpos makes its bias of positions once a pass, which is counted for each row
    near = 0.03 if "relpos" in folder.name else 0.01
    assert counted * ROWS == pytest.approx(FORWARD_AND_BACKWARD * counter.get_total_flops(), rel=near)
    planned = count_of_run(f"local-dir:{folder}", "prolip", ROWS)
    assert planned.flops == pytest.approx(counted, rel=1e-6)
    assert planned.parameters == sum(p.numel() for p in objective.model.parameters())


def test_the_activations_are_nearly_what_autograd_keeps(folder):
    """The formula is a transformer's: of blocks of another form it says no more than the magnitude."""
    model = create_model(f"local-dir:{folder}")
    parts = {part.name: part for part in count_of_run(f"local-dir:{folder}", "siglip", ROWS).passes}
    for kind, part in parts.items():
        kept = (saved_bytes(model, kind, 3, FLOAT) - saved_bytes(model, kind, 1, FLOAT)) / 2
        assert 0.3 < activations(part, 1, "none", FLOAT) / kept < 2.5, kind
