"""What a method does with the data besides training: a look at all of it before epochs, and a fit when it has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from prolip.data.sources import Captioned, captioned_samples
from prolip.embeddings import LEAST, check_enough
from prolip.fitting.collect import (
    Least,
    Part,
    Rows,
    embed_changed,
    embed_images,
    embed_pool,
    embed_texts,
    hidden_encoder,
    join,
    pool_encoder,
)
from prolip.methods import find_method, score_of
from prolip.methods.base import PoolNeeds
from prolip.scores import Side
from prolip.utils.documents import text_lines
from prolip.utils.flags import FlagError
from training.health.errors import explain
from training.model import autocast_for
from training.parallel.distributed import World, collect_objects, collect_rows, from_first, gathered, largest
from training.parallel.sharding import whole_model
from training.state import Run

T = TypeVar("T")


def together(work: Callable[[], T], world: World) -> T:
    """What `work` gives, once it is done on all ranks; FlagError on all where it failed on any. Work that itself asks
    other ranks for something has to fail on all of them, or those wait until a collective's time-out.
    """
    found, problem = None, ""
    try:
        found = work()
    except Exception as error:  # of files, object stores, decoders, or whatever the method brings
        problem = words_of(error)
    if problem := gathered(problem, partial(max, key=len), world):
        raise FlagError(problem)
    return cast(T, found)


def words_of(error: Exception) -> str:
    """A line on what went wrong."""
    return explain(error) or f"{type(error).__name__}: {error}"


def look_at_data(run: Run) -> None:
    """Let the method look at all images and texts where it is due: before the first step, and before every epoch if it
    wants that; all ranks together. FlagError on all of them where that cannot be done, as nothing can be trained then.
    """
    objective, at = run.trained.objective, run.at
    wanted = objective.needs(objective.config).pool
    if wanted is None or not (at.step == 0 or (wanted.each_epoch and at.batch_in_epoch == 0)):
        return
    start, model = time.perf_counter(), objective.model
    training = model.training
    with run.health.watchdog.pause(), torch.compiler.set_stance("force_eager"):
        objective.pool_state = look_with(run, wanted, whole_model(model, run.world, everywhere=True).eval())
    model.train(training)
    if run.world.is_first:
        said = f"epoch {at.epoch}: looked at the whole data in {time.perf_counter() - start:.0f} s"
        run.kept.log.say("\n".join([said, *objective.notes(run.fed.global_batch)]))


def look_with(run: Run, wanted: PoolNeeds, model: Any) -> dict[str, Tensor]:
    """What the method keeps of the data, the same on all ranks. Each embeds its share and keeps it, texts as images."""
    world, config = run.world, run.config
    if config.data.dataset_resampled:
        raise FlagError("--dataset-resampled has no end, and all of the data is to be looked at: leave it out")
    # as the model is evaluated, not as it is trained
    autocast = autocast_for(config.val.val_precision, world.device)
    points = not find_method(model.config["method_cfg"]["name"]).probabilistic
    encode = partial(pool_encoder, model, device=world.device, autocast=autocast, points=points)

    def share() -> Part:
        texts = text_lines(Path(wanted.texts).read_text(encoding="utf-8-sig")) if wanted.texts is not None else []
        part = embed_images(share_of_samples(run, sys.maxsize), encode("image"))
        lines = dict.fromkeys(filter(None, texts[world.rank :: world.world_size]))
        return part if wanted.texts is None else part._replace(texts=list(lines))

    part = together(share, world)
    pool = together(partial(embed_pool, part, encode("text"), run.kept.tokenizer, world.device), world)
    return together(partial(run.trained.objective.before_training, score_of(model), pool), world)


def samples_to_close(run: Run) -> int:
    """At most so many samples the method fits something to when training ends; 0: it fits nothing."""
    objective = run.trained.objective
    return 0 if run.config.data.synthetic else objective.needs(objective.config).closing_samples


def warn_of_few_samples(run: Run) -> None:
    """Say before the first step that the fit at the end may find too few pairs; a sample may have several captions."""
    wanted, held = samples_to_close(run), run.fed.loader.dataset_samples
    if wanted and min(wanted, held) < LEAST:
        few = f"{min(wanted, held)} samples are few: the fit at the end takes {LEAST} pairs of an image and a caption"
        run.kept.log.say(f"warning: {few} or more, and the model gets no variances from fewer")


def close_training(run: Run) -> int:
    """Let the method fit what it wants of settled weights, in the model and in its averaged twins; all ranks together.

    Nothing that fails here is worth the run: it is reported, and the model stays as it was trained. Returns the number
    of the signal that asked to stop before it was done, on all ranks; 0: it is done.
    """
    trained, wanted = run.trained, samples_to_close(run)
    if not wanted:
        return 0
    start, problem, pairs = time.perf_counter(), "", 0
    models = [trained.objective.model, *trained.averaged(run.at.step).values()]
    with run.health.watchdog.pause(), torch.compiler.set_stance("force_eager"):
        for model in models:
            try:
                pairs = close_model(run, model, wanted)
            except Exception as error:  # the same on all ranks
                if stop := largest(run.world, run.health.stop.number)[0]:
                    return stop
                problem = problem or words_of(error)
    said = f"fitted variances to {pairs:,} pairs in {time.perf_counter() - start:.0f} s"
    if problem:
        remedy = "the model is as it was trained; prolip uncertainty fits a saved one"
        said = f"warning: variances were NOT fitted: {problem}: {remedy}"
    run.kept.log.say(said)
    return 0


def encoder(run: Run, model: Any, side: Side) -> Callable[[Tensor], dict[str, Tensor]]:
    """A tower as it is evaluated, not as it is trained: bfloat16's rounding of the means is no ambiguity.
    InterruptedError once this rank was asked to stop.
    """
    device = run.world.device
    encode = hidden_encoder(model, side, device, autocast_for(run.config.val.val_precision, device))

    def unless_stopped(batch: Tensor) -> dict[str, Tensor]:
        if run.health.stop.number:
            raise InterruptedError("asked to stop")
        return encode(batch)

    return unless_stopped


def close_model(run: Run, model: Any, wanted: int) -> int:
    """Of one model: to how many pairs it was fitted. The images are shared out to the ranks, the first one fits, and
    all take the buffers that it has changed. What goes wrong is raised on all ranks.

    For N images, at most as many as the method wants, and their M texts the first rank holds 8 (N + M) D bytes at most
    beside the first tokens of a sample; the others hold what they embed, 4 N D / W.
    """
    world, training = run.world, model.training
    whole = whole_model(model, world, everywhere=True).eval()

    def fit() -> tuple[dict[str, Tensor], int]:
        joined = join(parts, image)
        image.clear()  # which is held in order now
        check_enough(len(joined.image_of))
        pairs = embed_texts(joined, encoder(run, whole, "text"), run.kept.tokenizer, whole.logit_scale.exp().item())
        if pairs.caution:
            run.kept.log.say(f"warning: {pairs.caution}")
        run.trained.objective.after_training(whole, pairs)
        fitted = {name: x.cpu() for name, x in whole.named_buffers() if name in model.added_names}
        return fitted, len(joined.image_of)

    try:
        objective, encode = run.trained.objective, encoder(run, whole, "image")
        held = Least(objective.needs(objective.config).closing_changes)
        part = together(lambda: embed_images(share_of_samples(run, wanted), encode, held=held), world)
        held.limit = gathered(held.names, partial(least_of, most=held.most), world)
        part = together(lambda: embed_changed(part, held, encode, run.kept.preprocess), world)
        parts, image = collect_part(part, world)
        fitted, count = from_first(fit, world)
        model.load_state_dict(fitted, strict=False)
    finally:
        model.train(training)
    return count


def least_of(names: list[list[tuple[int, str]]], most: int) -> tuple[int, str]:
    """Return the largest of the `most` smallest names of all ranks."""
    return max(sorted(name for own in names for name in own)[:most], default=(0, ""))


def collect_part(part: Part, world: World) -> tuple[list[Part], Rows]:
    """The parts of all ranks on rank 0, without their images' rows, and these, one rank's after the other's."""
    parts = collect_objects(part._replace(image={name: x[:0] for name, x in part.image.items()}), world)
    shapes = {name: x for found in (part, *parts) for name, x in found.image.items()}  # a rank may have no image
    counts = {name: [one.rows_of(name) for one in parts] for name in shapes}
    return parts, {name: collect_rows(part.image.get(name, x), counts[name], world) for name, x in shapes.items()}


def share_of_samples(run: Run, most: int) -> Iterator[Captioned]:
    """This rank's share of at most so many samples of the training data, with the loader's noise: rows of a random
    permutation, or the first of shards in random order, which go through the loader's shuffle buffer.
    """
    world, loader = run.world, run.fed.loader
    return captioned_samples(
        run.config.data,
        run.kept.preprocess,
        most,
        world.rank,
        world.world_size,
        noise=loader.noise,
        source=loader.source,
    )
