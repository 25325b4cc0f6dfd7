"""What a method is: its config, what it adds to a model, its objective, its score; and exact gradient accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.embeddings import Pairs, Pool
from prolip.flops import EncoderPass
from prolip.gaussian import Gaussian, check_gaussian, upcast, without_autocast
from prolip.losses import Matches
from prolip.random import Draws
from prolip.scores import Score

#: Bound on a = exp(logit_scale), as OpenCLIP's.
MAX_LOGIT_SCALE = 100.0
#: Pairs of a rank among which in-batch R@1 is looked at in every step, and its name among the terms.
CANDIDATES, RECALL = 256, "batch_R@1"

Batch = dict[str, Any]
Reps = dict[str, Tensor]
Terms = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PoolNeeds:
    """That all images and texts of the training data are embedded before training begins, for `Objective.look`.

    each_epoch: and again before every epoch; texts: a file with a text a line, instead of those that came with images.
    """

    each_epoch: bool = False
    texts: str | None = None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a method asks of the run around it; by default nothing but pairs of an image and a text.

    data: settings of `prolip.data.config.DataConfig` that follow from the method, `captions`, `known_matches` and
    `unpaired`; teacher: a model to learn from, by name or address: it is loaded, frozen, and given in the `Context`;
    closing_samples: how many samples are embedded once more, as an evaluation sees them and with all their captions,
    when training has ended, for `Objective.close`; closing_changes: of these, images that are embedded under strong
    changes, too; pool: that all of the data is looked at before training.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    teacher: str | None = None
    closing_samples: int = 0
    closing_changes: int = 0
    pool: PoolNeeds | None = None


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an objective may know of the run around it.

    seed, rank, world_size: random views are functions of these and of the step; total_steps: the run's length, None
    outside of one; tokenizer: the model's, None where no text is read; teacher: the model that `Needs` asked for;
    draws: every random number of a step, which the run's augmentation shares.
    """

    seed: int = 0
    rank: int = 0
    world_size: int = 1
    total_steps: int | None = None
    tokenizer: Any = None
    teacher: nn.Module | None = None
    draws: Draws = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} ranks: give 0 <= rank < world_size")
        draws = Draws(seed=self.seed, rank=self.rank, world_size=self.world_size)
        object.__setattr__(self, "draws", draws)  # the dataclass is frozen


class Objective(nn.Module):
    """A model with its loss; DDP wraps the whole, so that several passes of the model are one DDP forward.

    A method overrides `embed` and `terms`, and `prepare` when it draws random views. `model` is the network, `config`
    the method's dataclass, `context` the run around it. What it wants of that run, `needs` says.
    """

    #: Terms that are no part of the loss: those beside it in the line of progress, and those in metrics.jsonl alone.
    statistics: tuple[str, ...] = ("scale", "bias")
    details: tuple[str, ...] = ()
    #: Representations that are the same for all micro-batches, as scalars are: the weights of a score.
    shared: tuple[str, ...] = ()
    #: What `look` has returned last, on every rank; a checkpoint has it, and a run that goes on from there.
    memory: Mapping[str, Tensor]
    model: Any  # as nn.Module, whose attributes a type checker takes for tensors
    config: Any

    def __init__(self, model: nn.Module, config: Any, context: Context | None = None):
        super().__init__()
        self.model = model
        self.config = config
        self.context = context or Context()
        self.memory = {}

    @classmethod
    def needs(cls, config: Any) -> Needs:
        """What a run by this config has to give; asked before there is any data or model."""
        return Needs()

    @classmethod
    def balances(cls, config: Any) -> bool:
        """Whether the loss is a sigmoid over all pairs of the global batch, whose bias starts at -log(batch - 1)."""
        return False

    @classmethod
    def passes(cls, config: Any, rows: int, model: Any) -> list[EncoderPass]:
        """What `embed` sends through the model for `rows` rows."""
        return [EncoderPass("image", rows), EncoderPass("text", rows)]

    @classmethod
    def unserved(cls, config: Any, architecture: Mapping[str, Any]) -> str:
        """Why the method cannot train a model of this complete configuration, and what to do; empty where it can."""
        return ""

    def notes(self, batch: int) -> tuple[str, ...]:
        """Lines for the run's start and after each `look`, such as a weight in other units; batch: the global one."""
        return ()

    def look(self, score: Score, pool: Pool) -> dict[str, Tensor]:
        """Called on all ranks with the share of all images and texts that each has, and the model's score, where
        `Needs.pool` asks for that; gives the `memory`, the same on all.
        """
        return {}

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Add this step's random views to the whole local batch; a function of (seed, step, global row) alone."""
        return batch

    def encode(self, kind: str, inputs: Tensor, **options: Any) -> Gaussian:
        """`model.encode_<kind>`; TypeError where that gives points (a Tensor has a `mean`, too: a function)."""
        z = getattr(self.model, f"encode_{kind}")(inputs, **options)
        check_gaussian(z, f"what the model made of its {kind}s")
        return z

    def embed(self, batch: Batch) -> Reps:
        """Every pass of the model: rows (B, ...), scalars () and what is `shared`, by name.

        Rows of other counts than B are allowed.
        """
        raise NotImplementedError

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        """Scalar terms, `loss` among them, from the representations alone: no parameter is read here."""
        raise NotImplementedError

    def logged(self, reps: Reps, batch: Batch) -> Terms:
        """The terms, in-batch R@1, and the representations that are statistics, such as scale and bias."""
        statistics = {name: reps[name].detach() for name in self.statistics if name in reps}
        return self.terms(reps, batch) | statistics | in_batch_recall(reps)

    def means(self, batch: Batch) -> Reps:
        """Means of images and texts (B, D)."""
        return {f"{side}_mean": self.encode(side, batch[side]).mean for side in ("image", "text")}

    def after_step(self) -> None:
        """Called after every optimiser step, for constraints on parameters; must not wait for the device."""

    def close(self, model: Any, pairs: Pairs) -> None:
        """Called when training has ended, on one rank, for `Needs.closing_samples`: change buffers of what the method
        added to the trained model, or its averaged twin, by the embeddings `pairs` that it gives.
        """

    def forward(self, batch: Batch, cotangents: Mapping[str, Tensor] | None = None) -> Terms | Tensor:
        """The terms of a batch; with cotangents dL/d(rep), the sum of rep * cotangent, whose gradient is that of L."""
        reps = self.embed(batch)
        if cotangents is None:
            return self.logged(reps, batch)
        return torch.stack([(reps[name] * cotangent).sum() for name, cotangent in cotangents.items()]).sum()


class KnownMatches(Objective):
    """An objective whose `known_matches` says whether every true caption of an image in the batch is a match."""

    @classmethod
    def needs(cls, config: Any) -> Needs:
        return Needs(data={"known_matches": config.known_matches})

    def prepare(self, batch: Batch, step: int) -> Batch:
        """The batch, which has to have the captions' identities if they count."""
        self.check_captions(batch)
        return batch

    def check_captions(self, batch: Batch) -> None:
        """ValueError where known matches are asked for and the batch has no caption ids."""
        if self.config.known_matches and not {"caption_id", "caption_ids"} <= batch.keys():
            raise ValueError(
                f"known_matches wants caption_id and caption_ids in the batch, which has"
                f" {', '.join(batch)}: read data with captions, or give --no-known-matches"
            )

    def matches(self, batch: Batch) -> Matches | None:
        """What is known of the batch beyond its own pairs."""
        return Matches(batch["caption_ids"], batch["caption_id"]) if self.config.known_matches else None


class MeansObjective(Objective):
    """A loss on the means alone. The uncertainty parameters are frozen: the loss does not reach the variances.

    [UNC] itself stays in the sequence, as a constant register token.
    """

    def __init__(self, model: Any, config: Any, context: Context | None = None):
        super().__init__(model, config, context)
        for parameter in model.uncertainty_parameters():
            parameter.requires_grad_(False)

    def embed(self, batch: Batch) -> Reps:
        """Means of images and texts (B, D), with scale and bias."""
        return self.means(batch) | logit_scale_and_bias(self.model)

    def after_step(self) -> None:
        clamp_logit_scale(self.model)


#: What the variances of a method mean, as the report says it: learned in training, fitted at its end, or none.
LEARNED = """Every image and text is a Gaussian. Training learns its variances together with its mean: a large variance
says that the input could mean many things."""
FITTED = """Every image and text is a Gaussian. Training learns the means alone. Its end fits the variances to the
matched pairs of the training data, so that they count how many images a text fits."""
POINTS = "Every image and text is a point: training learns no variances, and the model states no uncertainty."


class Method(NamedTuple):
    """A way to train a model, and to read what it has learnt.

    config: the dataclass that the command line shows; objective: the loss that it configures; score: how trained models
    compare, `score.of(model)`; probabilistic: whether their variances mean something, or inputs are points; extend: a
    function of a fresh model and `config=`, which adds modules; the model's config.json then has a copy of the config.
    adapts: it goes on with a trained model of any method, which stays one of that method, with its modules and score.
    variances: what they mean, in sentences for the report, where LEARNED or POINTS do not say it.
    """

    config: type
    objective: type[Objective]
    score: type[Score]
    probabilistic: bool = True
    extend: Callable[..., None] | None = None
    adapts: bool = False
    variances: str = ""

    @property
    def meaning(self) -> str:
        """What the report says of the variances."""
        return self.variances or (LEARNED if self.probabilistic else POINTS)


@torch.no_grad()
def in_batch_recall(reps: Reps) -> Terms:
    """batch_R@1 (): how often, of the first CANDIDATES rows of this rank, an image's own text has the highest cosine.

    The first of several texts of an image counts. Nothing where `reps` has no means of both sides.
    """
    if not {"image_mean", "text_mean"} <= reps.keys():
        return {}
    image, text = (upcast(reps[name][:CANDIDATES].detach()) for name in ("image_mean", "text_mean"))
    text = text[:, 0] if text.ndim == 3 else text
    with without_autocast(image.device):
        first = (image @ F.normalize(text, dim=-1).mT).argmax(1)
    return {RECALL: (first == torch.arange(len(image), device=image.device)).float().mean()}


def clip_loss(context: Context) -> nn.Module:
    """OpenCLIP's softmax loss of the global batch: local rows against columns gathered with gradients."""
    from open_clip.loss import ClipLoss  # late: it takes seconds

    return ClipLoss(local_loss=True, gather_with_grad=True, rank=context.rank, world_size=context.world_size)


def logit_scale_and_bias(model: Any) -> Reps:
    """Scale a = exp(logit_scale) and bias b as they enter the logit a * similarity + b, both ()."""
    bias = upcast(model.logit_bias).reshape(()).clone()  # or the log would see it change with the optimiser's step
    return {"scale": upcast(model.logit_scale).exp().reshape(()), "bias": bias}


@torch.no_grad()
def clamp_logit_scale(model: Any) -> None:
    """Keep a = exp(logit_scale) <= 100 by clamping the parameter in place, as OpenCLIP does.

    A clamp in the forward pass would give a parameter beyond the bound a zero gradient and leave it there for good.
    """
    model.logit_scale.clamp_(max=math.log(MAX_LOGIT_SCALE))


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Cut a prepared batch into micro-batches.

    Tensors are views and are cut along their first dimension, lists likewise; scalars and other values go to every
    part. Entries with fewer rows (masked views) are cut evenly on their own, so some parts may hold none of them.
    Raises ValueError when an image or text would be left without rows.
    """
    if parts < 1:
        raise ValueError(f"{parts} micro-batches: give 1 or more")
    rows = max((len(value) for value in batch.values() if _has_rows(value)), default=0)
    if rows < parts:
        raise ValueError(f"{parts} micro-batches of a batch of {rows}: give at most {rows}, or a larger batch")
    pieces: list[Batch] = [{} for _ in range(parts)]
    for name, value in batch.items():
        for piece, share in zip(pieces, _cut(value, parts)):
            piece[name] = share
    return pieces


def join_reps(pieces: list[Reps], shared: Collection[str] = ()) -> Reps:
    """Undo the cut for representations: rows are joined, scalars and what is shared are taken once."""
    return {
        name: value if value.ndim == 0 or name in shared else torch.cat([piece[name] for piece in pieces])
        for name, value in pieces[0].items()
    }


def split_cotangents(cotangents: Reps, pieces: list[Reps], shared: Collection[str] = ()) -> list[Reps]:
    """The cotangents of every micro-batch, whose representations are `pieces`; of what is taken once even parts."""
    shares: list[Reps] = [{} for _ in pieces]
    for name, value in cotangents.items():
        if value.ndim == 0 or name in shared:
            split = [value / len(pieces)] * len(pieces)
        else:
            split = list(value.split([len(piece[name]) for piece in pieces]))
        for share, part in zip(shares, split):
            share[name] = part
    return shares


def accumulate_backward(
    objective: nn.Module,
    batch: Batch,
    parts: int = 1,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    scale_loss: Callable[[Tensor], Tensor] | None = None,
) -> Terms:
    """Add the gradients of one prepared batch, in `parts` micro-batches, to the parameters; return the detached terms.

    The loss may compare any rows of the batch, so it is taken once on all representations: embed every micro-batch
    without a graph, differentiate the loss to the representations, then backpropagate each micro-batch with its share
    of these cotangents (the chain rule; Gao et al. 2021, section 3). Values and gradients equal those of `parts=1`;
    only one micro-batch has a graph at a time, and the price is a second forward pass. Random layers repeat
    in the second pass what they drew in the first.

    objective: an Objective or its DDP wrapper, whose ranks synchronise with the last micro-batch only.
    autocast: makes a context for the forward passes; call this function outside of it.
    scale_loss: loss -> the scalar to differentiate, such as `GradScaler.scale`.
    """
    scale_loss = scale_loss or (lambda loss: loss)
    if parts == 1:
        with autocast():
            terms = objective(batch)
        scale_loss(terms["loss"]).backward()
        return {name: value.detach() for name, value in terms.items()}
    bare = unwrap(objective)
    pieces = split_batch(batch, parts)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    on_cpu, on_devices = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    with torch.no_grad(), autocast():
        reps = [bare.embed(piece) for piece in pieces]
    # Before torch's pull request 165068 (2025) weights cast without a graph stayed for as long as an outer autocast.
    torch.clear_autocast_cache()
    whole = {name: value.detach().requires_grad_() for name, value in join_reps(reps, bare.shared).items()}
    with autocast():
        terms = bare.logged(whole, batch)
    scaled = scale_loss(terms["loss"])
    gradients = torch.autograd.grad(scaled, list(whole.values()), allow_unused=True, materialize_grads=True)
    shares = split_cotangents(dict(zip(whole, gradients)), reps, bare.shared)
    del whole, gradients, reps
    unsynchronised = getattr(objective, "no_sync", nullcontext)
    with torch.random.fork_rng(devices):  # draws again what the first pass drew
        torch.set_rng_state(on_cpu)
        for device, state in zip(devices, on_devices):
            torch.cuda.set_rng_state(state, device)
        for place, (piece, share) in enumerate(zip(pieces, shares)):
            with unsynchronised() if place < parts - 1 else nullcontext():
                with autocast():
                    surrogate = objective(piece, cotangents=share)
                surrogate.backward()
    return {name: value.detach() for name, value in terms.items()}


def unwrap(objective: nn.Module) -> Objective:
    """The Objective inside DDP and torch.compile wrappers."""
    inner = objective
    while not isinstance(inner, Objective):
        wrapped = getattr(inner, "_orig_mod", getattr(inner, "module", None))
        if wrapped is None:
            raise TypeError(f"{type(inner).__name__} holds no Objective: give an Objective or its DDP wrapper")
        inner = wrapped
    return inner


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _cut(value: Any, parts: int) -> list[Any]:
    if not _has_rows(value):
        return [value] * parts
    if isinstance(value, Tensor):
        return list(value.tensor_split(parts))
    return [[value[row] for row in rows] for rows in torch.arange(len(value)).tensor_split(parts)]
