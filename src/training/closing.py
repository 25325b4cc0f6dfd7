"""What a method does when training has ended: the settled model sees samples once more, and its method fits to them."""
from __future__ import annotations

import time
from typing import Any

import torch

from prolip.data.captioned import captioned_samples
from prolip.uncertainty.collect import Part, embed_images, embed_texts, encoders, join
from prolip.uncertainty.pairs import Pairs
from training.parallel.distributed import World, gather_objects, share_object
from training.parallel.sharding import whole_model
from training.state import Run


def close_training(run: Run) -> None:
    """Let the method fit what it wants of settled weights, in the model and in its averaged twin; all ranks together.

    The images are shared out to the ranks; the first one fits, and all take the buffers that it has changed.
    """
    objective, trained = run.trained.objective, run.trained
    wanted = objective.needs(objective.config).closing_samples
    if not wanted or run.config.data.dataset_type == "synthetic":
        return
    start = time.perf_counter()
    with run.health.watchdog.pause():
        for model in [objective.model] + ([trained.ema.module] if trained.ema is not None else []):
            whole = whole_model(model, run.world, everywhere=True)
            pairs = collect(run, whole, wanted)
            if run.world.is_first:
                objective.close(whole, pairs)
            fitted = {name: x.cpu() for name, x in whole.named_buffers() if name in model.added_names}
            model.load_state_dict(share_object(fitted, run.world), strict=False)
    if run.world.is_first:
        run.kept.log.say(f"closed by the method with {len(pairs):,} pairs in {time.perf_counter() - start:.0f} s")


def collect(run: Run, model: Any, count: int) -> Pairs:
    """Pairs of the training data as evaluation sees them, on every rank."""
    world: World = run.world
    training, mode = model.training, torch.compiler.set_stance("force_eager")
    with mode, run.trained.autocast():
        model.eval()
        image, text = encoders(model, world.device)
        samples = captioned_samples(run.config.data, run.kept.preprocess, count, world.rank, world.world_size)
        part = embed_images(samples, image)
        whole = join([Part(*one) for one in gather_objects(tuple(part), world)])
        scale = model.logit_scale.exp().item()
        pairs = embed_texts(whole, text, run.kept.tokenizer, scale)
        model.train(training)
    return pairs
