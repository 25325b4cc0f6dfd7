"""What a method does when training has ended: the settled model sees samples once more, and its method fits to them."""
from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from prolip.data.captioned import captioned_samples
from prolip.uncertainty.collect import Part, embed_images, embed_texts, hidden_encoder, join
from training.health.errors import explain
from training.model import Autocast, autocast_for
from training.parallel.distributed import gather_objects, share_object
from training.parallel.sharding import whole_model
from training.state import Run


def close_training(run: Run) -> None:
    """Let the method fit what it wants of settled weights, in the model and in its averaged twin; all ranks together.

    Nothing that fails here is worth the run: it is reported, and the model stays as it was trained.
    """
    trained = run.trained
    wanted = trained.objective.needs(trained.objective.config).closing_samples
    if not wanted or run.config.data.dataset_type == "synthetic":
        return
    start = time.perf_counter()
    models = [trained.objective.model] + ([trained.ema.module] if trained.ema is not None else [])
    with run.health.watchdog.pause(), torch.compiler.set_stance("force_eager"):
        problems = [problem for model in models if (problem := close_model(run, model, wanted))]
    if run.world.is_first:
        said = f"closed by the method in {time.perf_counter() - start:.0f} s"
        if problems:
            remedy = "the model is as it was trained; python -m prolip.uncertainty fits a saved one"
            said = f"warning: NOT closed by the method: {problems[0]}: {remedy}"
        run.kept.log.say(said)


def close_model(run: Run, model: Any, wanted: int) -> str:
    """Of one model; what went wrong, the same on all ranks. The images are shared out to the ranks, the first one fits,
    and all take the buffers that it has changed.
    """
    world, training = run.world, model.training
    whole = whole_model(model, world, everywhere=True).eval()
    # as the model is evaluated, not as it is trained: bfloat16's rounding of the means is no ambiguity
    autocast = autocast_for(run.config.val.val_precision, world.device)
    parts = gather_objects(embed_share(run, whole, wanted, autocast), world)
    fitted: dict[str, Tensor] = {}
    problem = next((found for _, found in parts if found), "")
    if world.is_first and not problem:
        try:
            scale, encode = whole.logit_scale.exp().item(), hidden_encoder(whole, "text", world.device, autocast)
            joined = join([Part(*part) for part, _ in parts if part])
            run.trained.objective.close(whole, embed_texts(joined, encode, run.kept.tokenizer, scale))
            fitted = {name: x.cpu() for name, x in whole.named_buffers() if name in model.added_names}
        except Exception as error:  # whatever the method or the data brings
            problem = explain(error) or f"{type(error).__name__}: {error}"
    fitted, problem = share_object((fitted, problem), world)
    if not problem:
        model.load_state_dict(fitted, strict=False)
    model.train(training)
    return problem


def embed_share(run: Run, model: Any, wanted: int, autocast: Autocast) -> tuple[tuple[Any, ...] | None, str]:
    """This rank's images, or why there are none: the other ranks must not wait for one that has failed."""
    world = run.world
    try:
        noise = run.fed.loader.noise
        samples = captioned_samples(
            run.config.data, run.kept.preprocess, wanted, world.rank, world.world_size, noise=noise
        )
        encode = hidden_encoder(model, "image", world.device, autocast)
        return tuple(embed_images(samples, encode)), ""
    except Exception as error:  # of files, object stores, decoders
        return None, explain(error) or f"{type(error).__name__}: {error}"
