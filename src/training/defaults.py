"""Values of `auto` settings, resolved once data, weights and device are known, and saved with the run."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from prolip.data.config import BATCH_SIZES, fitting_workers
from prolip.methods import find_method
from prolip.models.diagnose import json_of
from prolip.models.registry import find_weights, get_model_config
from prolip.utils.fields import AUTO
from prolip.utils.flags import FlagError
from prolip.utils.threads import cores
from training.config import DEFAULT_EPOCHS, LEAST_STEPS, Config, changed
from training.model_options import BASE, SMALL
from training.parallel import World, from_first, largest

#: Values of the optimiser's `auto` settings: for random weights (B.1), and for trained ones (docs/studies/defaults.md).
SCRATCH: dict[str, Any] = {"lr": 5e-4, "beta2": 0.95, "grad_clip_norm": None}
FINE_TUNING = {"beta2": 0.98, "grad_clip_norm": 1.0}


def settle_model(config: Config, world: World) -> Config:
    """Return the config with a model: the base model on a GPU, else the small one, whose tokenizer is bundled."""
    if config.model.model != AUTO:
        return config
    name, found = (BASE, "a") if world.device.type == "cuda" else (SMALL, "no")
    if world.is_first:
        print(f"--model auto: {name}, as there is {found} GPU", flush=True)
    return changed(config, "model", model=name)


def settle_workers(config: Config, world: World, rows: int, folder: Path) -> Config:
    """Return the config with the number of workers, equal on all ranks: of the resumed run, or from the cores."""
    data = config.data
    if data.workers is not None:
        return config
    batch = AUTO if rows == AUTO else rows // config.run.accum_freq
    saved = from_first(partial(json_of, folder / "config.json"), world) if config.run.resume else {}
    most = saved.get("data", {}).get("workers")
    most = -largest(world, -(cores() if most is None else most))[0]
    batch_size: Any = AUTO if config.run.global_batch_size is not None else data.batch_size
    workers = fitting_workers(batch, most, data.unpaired)
    return changed(config, "data", workers=workers, batch_size=batch_size)


def settle(config: Config, steps_per_epoch: int, rows: int, ranks: int) -> Config:
    """Return the config with numbers in place of `auto`, None and shares. rows: samples per step and rank.

    A bias that the first batch determines stays `auto`. FlagError if that batch is one pair.
    """
    trained = find_weights(config.model.model, config.model.pretrained) is not None
    own = SCRATCH
    if trained:  # the study's rate for 192 dimensions, lower for wider models as in muP with Adam (2203.03466)
        rate = float(f"{1.5e-4 * 192 / get_model_config(config.model.model)[0]['embed_dim']:.2g}")
        own = FINE_TUNING | {"lr": min(SCRATCH["lr"], rate)}
    config = changed(config, "optim", **{k: v for k, v in own.items() if getattr(config.optim, k) == AUTO})
    if not (config.run.epochs or config.run.max_steps or config.run.max_samples):
        config = changed(config, "run", epochs=max(DEFAULT_EPOCHS, -(-LEAST_STEPS // steps_per_epoch)))
    if isinstance(config.optim.warmup, str):
        steps = total_steps(config, steps_per_epoch, rows * ranks)
        config = changed(config, "optim", warmup=round(float(config.optim.warmup[:-1]) / 100 * steps))
    if config.data.batch_size == AUTO:
        config = changed(config, "data", batch_size=rows // config.run.accum_freq)
    if config.model.init_logit_bias != AUTO:
        return config
    if not find_method(config.method).objective.balances(config.objective):
        return changed(config, "model", init_logit_bias=None)
    if rows * ranks < 2:
        remedy = "give --batch-size 2 or more, or a number such as --init-logit-bias -10"
        raise FlagError(f"--init-logit-bias auto needs pairs that do not match, but the batch is 1: {remedy}")
    return config if trained else changed(config, "model", init_logit_bias=round(math.log(1 / (rows * ranks - 1)), 4))


def rows_per_rank(config: Config, world_size: int) -> Any:
    """Return samples per step and rank, or `auto` (the loader chooses); FlagError for an indivisible batch."""
    accum, total = config.run.accum_freq, config.run.global_batch_size
    if total is None:
        if config.data.batch_size == AUTO:
            return AUTO if accum == 1 else BATCH_SIZES[0] * accum
        return config.data.batch_size * accum
    parts = world_size * accum
    if total % parts:
        near = " or ".join(str(size) for size in (total // parts * parts, (total // parts + 1) * parts) if size)
        shares = f"{world_size} ranks" + (f" x {accum} micro-batches" if accum > 1 else "")
        raise FlagError(f"batch {total} is not divisible by {shares}: use {near}")
    return total // world_size


def total_steps(config: Config, steps_per_epoch: int, global_batch: int) -> int:
    """Return the length of the run in steps; FlagError if the warm-up is not shorter."""
    run = config.run
    if run.max_steps is not None:
        steps = run.max_steps
    elif run.max_samples is not None:
        steps = -(-run.max_samples // global_batch)
    else:
        steps = (run.epochs or 0) * steps_per_epoch  # `settle` has set it
    if not isinstance(config.optim.warmup, str) and config.optim.warmup >= steps:
        remedy = "give --warmup 5%, or train longer (--epochs, --max-steps, --max-samples)"
        what = f"the warm-up of {config.optim.warmup} steps is longer than the run of {steps} steps"
        raise FlagError(f"{what}: {remedy}")
    return steps
