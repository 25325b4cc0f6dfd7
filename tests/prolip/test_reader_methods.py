"""Every method on every combination of OpenCLIP's towers: two steps, in which all that is read learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_towers import NAMES, inputs, small_config, small_folder, small_towers

import prolip
from prolip.embeddings import UnpairedEmbeddings
from prolip.gaussian import Gaussian
from prolip.methods import FURTHER, METHODS, find_method, score_of
from prolip.methods.base import Context
from prolip.models.config import complete

ROWS = 4
#: Methods whose heads make means of their own.
HEADS = ("pcme", "pcmepp", "vacsr")
#: In the default profile: all methods of one combination, of others those with heads (their tokens differ).
WHOLE, FEW = "ViT-B-16-SigLIP", ("convnext_base", "xlm-roberta-base-ViT-B-32")


def cells(*few):
    """(combination, method), most of them slow; few: further combinations whose heads are tried by default."""
    quick = {(WHOLE, method) for method in METHODS} | {(name, method) for name in few for method in HEADS}
    return [
        pytest.param(name, method, marks=[] if (name, method) in quick else pytest.mark.slow)
        for name in NAMES
        for method in METHODS
    ]


@pytest.fixture(autouse=True)
def seeded():
    """No loss is zero by chance."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Function from a combination to its small model, in OpenCLIP's format."""
    place, made = tmp_path_factory.mktemp("small"), {}
    with small_towers(place / "transformers"):
        yield lambda name: made.get(name) or made.setdefault(name, small_folder(name, place / name))


def batch_of(model, method):
    """Images, and texts with an end and padding, as a run with the method hands them over."""
    images, ids = inputs(model, ROWS)
    text = {"source-free": {}, "likelihood": {"text": ids[:, None]}}.get(method, {"text": ids})
    return {"image": images, "key": [f"k{i}" for i in range(ROWS)], **text}, ids


def look(objective, model, batch, ids):
    """Let source-free find its pairs among the batch."""
    with torch.no_grad():
        images, texts = (
            Gaussian(z.mean, torch.zeros_like(z.mean))
            for z in (model.encode_image(batch["image"]), model.encode_text(ids))
        )
    nothing = {"image_novelty": {}, "text_novelty": {}}
    pool = UnpairedEmbeddings(keys=batch["key"], image=images, text=texts, text_ids=ids, **nothing)
    objective.pool_state = objective.before_training(score_of(model), pool)


def settings_of(method, **more):
    """Without captions that are known to match, which these batches have not."""
    kind = find_method(method).config
    return kind(**({"known_matches": False} if "known_matches" in kind.__dataclass_fields__ else {}), **more)


def objective_of(folder, method, **more):
    chosen, config = find_method(method), settings_of(method, **more)
    own = {"name": method} | ({"config": vars(config)} if chosen.extend else {})
    model = prolip.create_model(f"local-dir:{folder}", **({} if chosen.adapts else {"method_cfg": own}))
    return chosen.objective(model, config, Context(total_steps=2))


@pytest.mark.parametrize("name, method", cells(*FEW))
def test_two_steps_of_a_method_move_all_that_it_reads(folders, name, method):
    objective = objective_of(folders(name), method)
    model = objective.model
    batch, ids = batch_of(model, method)
    if method == "source-free":
        look(objective, model, batch, ids)
    before = {name: x.clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        optimizer.zero_grad(set_to_none=True)
        loss = objective(objective.prepare(dict(batch), step))["loss"]
        loss.backward()
        assert loss.isfinite()
        assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        optimizer.step()
        objective.after_step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert {"visual.tower", "text.tower"} <= {".".join(name.split(".")[:2]) for name in moved}


@pytest.mark.parametrize("name, method", cells())
def test_means_begin_as_openclips_or_the_log_says_that_they_are_new(folders, name, method):
    """Heads that are told to keep the means keep them, and say nothing."""
    plain = prolip.create_model(f"local-dir:{folders(name)}").eval()
    batch, ids = batch_of(plain, method)
    for pooled in (True, False) if method in HEADS else (None,):
        more = {} if pooled is None else {"pooled_heads": pooled}
        objective = objective_of(folders(name), method, **more)
        model = objective.model.eval()
        with torch.no_grad():
            pairs = (
                (model.encode_image(batch["image"]).mean, plain.encode_image(batch["image"]).mean),
                (model.encode_text(ids).mean, plain.encode_text(ids).mean),
            )
        furthest = max((own - theirs).abs().max() for own, theirs in pairs)
        said = [line for line in objective.notes(ROWS) if "--no-pooled-heads" in line]
        assert (furthest > 1e-2, len(said)) == (True, 1) if pooled else (furthest < 1e-5, len(said)) == (True, 0)


@pytest.mark.parametrize("name", [WHOLE, "RN50"])
def test_looking_for_what_is_read_leaves_running_statistics_alone(folders, name):
    model = prolip.create_model(f"local-dir:{folders(name)}")
    before = {name: x.clone() for name, x in model.named_buffers()}
    find_method("source-free").objective(model, settings_of("source-free"))
    assert all(torch.equal(before[name], x) for name, x in model.named_buffers()) and model.training


def test_at_most_a_tenth_of_the_table_is_refused():
    configs = [complete(small_config(name)) for name in NAMES]
    reasons = [method.objective.unserved(method.config(), config) for config in configs for method in METHODS.values()]
    assert sum(map(bool, reasons)) <= len(reasons) / 10


def test_scale_and_bias_are_openclips_where_the_means_are(folders):
    own = prolip.create_model(f"local-dir:{folders(WHOLE)}")
    kept = objective_of(folders(WHOLE), "pcmepp", pooled_heads=False)
    assert torch.equal(kept.model.logit_scale, own.logit_scale) and kept.balances(kept.config)
    new = objective_of(folders(WHOLE), "pcmepp")
    assert new.model.logit_bias.item() == -5 and not new.balances(new.config)


def test_a_method_that_cannot_train_such_a_model_says_so_before_anything_is_built(tmp_path):
    """Masked views of images that no square divides."""
    from prolip.utils.flags import FlagError
    from training.config import build_config
    from training.model import build_model

    values = {"model": {"model": "RN50", "force_image_size": 225}, "data": {"train_data": "x.tar"}}
    with pytest.raises(FlagError, match=r"--method prolip does not train --model RN50 \(ModifiedResNet; causal.*224"):
        build_model(build_config("prolip", values), torch.device("cpu"))


def test_a_head_of_ones_own_sees_the_tokens_of_openclips_towers(folders, monkeypatch):
    """The documented example, whose head knows nothing of kinds of towers."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "methods"))
    monkeypatch.setenv(FURTHER, "near_method")
    objective = objective_of(folders("convnext_base"), "near")
    batch, _ = batch_of(objective.model, "near")
    objective(objective.prepare(batch, 0))["loss"].backward()
    shifts = [tower.head.shift.weight.grad for tower in objective.model.towers().values()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in shifts)
