"""Work of a method outside the steps: a pass over all data before epochs, the first bias, and a fit at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from prolip.data.sources import Captioned, captioned_samples
from prolip.embeddings import check_enough
from prolip.fitting import collect
from prolip.fitting.collect import Least, RankPart, embed_images, embed_texts, hidden_encoder
from prolip.methods import find_method, score_of
from prolip.methods.accumulate import join_reps, split_batch
from prolip.methods.base import Batch
from prolip.scores import Side
from prolip.utils.documents import text_lines
from prolip.utils.flags import FlagError
from training import parallel as ranks
from training.config import changed
from training.health.errors import explain
from training.model import autocast_for
from training.parallel import World, from_first, gathered, whole_model
from training.state import Run

T = TypeVar("T")
LARGEST_BIAS, ACCURACY = 1e4, 1e-4  # search range and accuracy of the bias


def together(work: Callable[[], T], world: World) -> T:
    """Return the result of `work` once all ranks have finished; FlagError on all ranks if it failed on any."""
    found, problem = None, ""
    try:
        found = work()
    except Exception as error:  # of files, object stores, decoders or the method
        problem = explain(error) or f"{type(error).__name__}: {error}"
    if problem := gathered(problem, partial(max, key=len), world):
        raise FlagError(problem)
    return cast(T, found)


def look_at_data(run: Run) -> None:
    """Give the method all images and texts before the first step, and before every epoch if it requires that.

    Every rank embeds its share. FlagError on all ranks if one fails.
    """
    objective, at, world, config = run.trained.objective, run.at, run.world, run.config
    pool_needs = objective.needs(objective.config).pool
    if pool_needs is None or not (at.step == 0 or (pool_needs.each_epoch and at.batch_in_epoch == 0)):
        return
    if config.data.dataset_resampled:
        raise FlagError("--dataset-resampled has no end, but this method reads all of the data first: remove it")
    start, training = time.perf_counter(), objective.model.training
    with run.health.watchdog.pause(), torch.compiler.set_stance("force_eager"):
        model: Any = whole_model(objective.model, world, everywhere=True).eval()
        # the precision of evaluations, not of training
        autocast = autocast_for(config.val.val_precision, world.device)
        points = not find_method(model.config["method_cfg"]["name"]).probabilistic
        encode = partial(collect.pool_encoder, model, device=world.device, autocast=autocast, points=points)

        def share() -> RankPart:
            path = pool_needs.texts
            texts = text_lines(Path(path).read_text(encoding="utf-8-sig")) if path is not None else []
            part = embed_images(share_of_samples(run, sys.maxsize), encode("image"))
            lines = dict.fromkeys(filter(None, texts[world.rank :: world.world_size]))
            return part if path is None else part._replace(texts=list(lines))

        part = together(share, world)
        pool = together(partial(collect.embed_pool, part, encode("text"), run.outputs.tokenizer, world.device), world)
        objective.pool_state = together(partial(objective.before_training, score_of(model), pool), world)
    objective.model.train(training)
    if world.is_first:
        said = f"epoch {at.epoch}: read the whole data in {time.perf_counter() - start:.0f} s"
        run.outputs.log.say("\n".join([said, *objective.notes(run.data.global_batch)]))


def samples_to_fit(run: Run) -> int:
    """Return the maximum number of samples of the method's fit at the end; 0 without a fit."""
    objective = run.trained.objective
    return 0 if run.config.data.synthetic else objective.needs(objective.config).closing_samples


def fit_at_end(run: Run, stopped: Callable[[int], None]) -> None:
    """Fit the method's variances to the trained model and its averaged models; failures are logged.

    stopped: called with the number of a stop signal that arrives during the fit; raises Stopped.
    """
    trained, most = run.trained, samples_to_fit(run)
    run.at.closed = not most
    if not most:
        return
    start, problem, pairs = time.perf_counter(), "", 0
    models = [trained.objective.model, *trained.averaged(run.at.step).values()]
    with run.health.watchdog.pause(), torch.compiler.set_stance("force_eager"):
        for model in models:
            try:
                pairs = fit_model(run, model, most)
            except Exception as error:  # the same on all ranks
                if stop := ranks.largest(run.world, run.health.stop.number)[0]:
                    stopped(stop)
                problem = problem or explain(error) or f"{type(error).__name__}: {error}"
    said = f"fitted variances to {pairs:,} pairs in {time.perf_counter() - start:.0f} s"
    if problem:
        remedy = "the model is saved without them; fit them later with prolip uncertainty"
        said = f"warning: variances were NOT fitted: {problem}: {remedy}"
    run.outputs.log.say(said)
    run.at.closed = True


def fit_model(run: Run, model: Any, most: int) -> int:
    """Fit one model on at most `most` samples, shared by the ranks; returns the number of pairs. Raises on all ranks.

    For N images and M texts the first rank holds at most 8 (N + M) D bytes, others 4 N D / W.
    """
    world, training, objective = run.world, model.training, run.trained.objective
    whole = whole_model(model, world, everywhere=True).eval()
    autocast = autocast_for(run.config.val.val_precision, world.device)

    def encode(side: Side, batch: Tensor) -> dict[str, Tensor]:
        if run.health.stop.number:
            raise InterruptedError("stop requested")
        return hidden_encoder(whole, side, world.device, autocast)(batch)

    def fit() -> tuple[dict[str, Tensor], int]:
        joined = collect.join(parts, image)
        image.clear()  # `joined` holds the rows in order
        check_enough(len(joined.image_of))
        scale = whole.logit_scale.exp().item()
        pairs = embed_texts(joined, partial(encode, "text"), run.outputs.tokenizer, scale)
        for caution in pairs.cautions:
            run.outputs.log.say(f"warning: {caution}")
        objective.after_training(whole, pairs)
        fitted = {name: x.cpu() for name, x in whole.named_buffers() if name in model.added_names}
        return fitted, len(joined.image_of)

    try:
        images, held = partial(encode, "image"), Least(objective.needs(objective.config).closing_changes)
        part = together(lambda: embed_images(share_of_samples(run, most), images, held=held), world)
        held.limit = gathered(held.names, partial(least_of, most=held.most), world)
        part = together(lambda: collect.embed_changed(part, held, images, run.outputs.preprocess), world)
        parts = ranks.collect_objects(part._replace(image={name: x[:0] for name, x in part.image.items()}), world)
        shapes = {name: x for found in (part, *parts) for name, x in found.image.items()}  # a rank may have no image
        counts = {name: [one.rows_of(name) for one in parts] for name in shapes}
        own = {name: part.image.get(name, x) for name, x in shapes.items()}
        image = {name: ranks.collect_rows(x, counts[name], world) for name, x in own.items()}
        fitted, count = from_first(fit, world)
        model.load_state_dict(fitted, strict=False)
    finally:
        model.train(training)
    return count


def least_of(names: list[list[tuple[int, str]]], most: int) -> tuple[int, str]:
    """Return the largest of the `most` smallest names of all ranks."""
    return max(sorted(name for own in names for name in own)[:most], default=(0, ""))


def share_of_samples(run: Run, most: int) -> Iterator[Captioned]:
    """Yield this rank's share of at most `most` training samples in random order, with the loader's noise."""
    world, loader, preprocess = run.world, run.data.loader, run.outputs.preprocess
    place = world.rank, world.world_size
    return captioned_samples(run.config.data, preprocess, most, *place, noise=loader.noise, source=loader.source)


@torch.no_grad()
def set_bias(run: Run, value: float) -> None:
    """Set the bias of the model and its averaged models."""
    for model in (run.trained.objective.model, *(average.module for average in run.trained.averages.values())):
        model.logit_bias.fill_(value)
    run.config = changed(run.config, "model", init_logit_bias=value)


def balanced_bias(run: Run, batch: Batch) -> float:
    """Return the bias at which the method's loss on the first global batch has zero slope in the bias.

    The slope, dL/db of the global batch, rises with the bias. FlagError if it has no zero.
    """
    from scipy.optimize import bisect  # slow, and most runs do not need it

    trained, world = run.trained, run.world
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    batch = trained.objective.prepare(batch, 0)
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), trained.autocast():
        with torch.no_grad():
            pieces = [trained.objective.embed(piece) for piece in split_batch(batch, trained.accum_freq)]
        reps = join_reps(pieces, trained.objective.shared)

        def slope(bias: float) -> float:
            b = torch.full_like(reps["bias"], bias, requires_grad=True)
            found = torch.autograd.grad(trained.objective.terms(reps | {"bias": b}, batch)["loss"], b)[0].double()
            if world.world_size > 1:
                dist.all_reduce(found)
            return found.item()

        if not slope(-LARGEST_BIAS) < 0 < slope(LARGEST_BIAS):
            why = "no bias balances matching and other pairs of the first batch"
            raise FlagError(f"--init-logit-bias auto: {why}; give a number such as --init-logit-bias -10")
        found = round(bisect(slope, -LARGEST_BIAS, LARGEST_BIAS, xtol=ACCURACY), 4)
        return ranks.share_object(found, world)
