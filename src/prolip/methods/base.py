"""The parts of a method: its config, its model parts, its objective, its score."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prolip.embeddings import Pairs, UnpairedEmbeddings
from prolip.flops import EncoderPass
from prolip.gaussian import Gaussian, check_gaussian, upcast, without_autocast
from prolip.losses import Matches
from prolip.random import Draws
from prolip.scores import Score

MAX_LOGIT_SCALE = 100.0  # bound on a = exp(logit_scale), as OpenCLIP's
#: Pairs of a rank for the in-batch R@1 of every step, and its name among the terms.
CANDIDATES, RECALL = 256, "batch_R@1"

Batch = dict[str, Any]
Reps = dict[str, Tensor]
Terms = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PoolNeeds:
    """Embeddings of all images and texts of the training data, before training, for `Objective.before_training`."""

    each_epoch: bool = False  # also before every epoch
    texts: str | None = None  # a file with one text a line, in place of the images' texts


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Requirements of a method on its run; by default only pairs of an image and a text."""

    #: Settings of `prolip.data.config.DataConfig` that follow from the method: captions, known_matches, unpaired.
    data: Mapping[str, Any] = field(default_factory=dict)
    teacher: str | None = None  # name or address of a model to learn from, frozen in the `Context`
    #: Samples to embed after training, with all captions, for `Objective.after_training`.
    closing_samples: int = 0
    closing_changes: int = 0  # of these, images to embed also under strong changes
    pool: PoolNeeds | None = None


@dataclass(frozen=True, kw_only=True)
class Context:
    """The run around an objective. Random views are functions of seed, rank, world_size and step."""

    seed: int = 0
    rank: int = 0
    world_size: int = 1
    total_steps: int | None = None  # none outside of a run
    tokenizer: Any = None
    teacher: nn.Module | None = None

    @cached_property
    def draws(self) -> Draws:
        """Random numbers of every step, which the run's augmentation shares."""
        return Draws(seed=self.seed, rank=self.rank, world_size=self.world_size)


class Objective(nn.Module):
    """A model with its loss; DDP wraps the whole, so that several passes of the model are one DDP forward."""

    #: Terms outside of the loss: those in the progress line, and those in metrics.jsonl only.
    statistics: tuple[str, ...] = ("scale", "bias")
    details: tuple[str, ...] = ()
    #: Representations that all micro-batches share, as they share scalars: the weights of a score.
    shared: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()  # parameters of the model that the loss does not train
    pool_state: Mapping[str, Tensor]  # the last result of `before_training`, on every rank; checkpoints store it
    model: Any  # an nn.Module
    config: Any

    def __init__(self, model: nn.Module, config: Any, context: Context | None = None):
        super().__init__()
        self.model, self.config, self.context = model, config, context or Context()
        self.pool_state = {}
        for name in self.frozen:
            getattr(model, name).requires_grad_(False)

    @classmethod
    def needs(cls, config: Any) -> Needs:
        """Return the requirements of this config on a run, before any data or model exists."""
        known = getattr(config, "known_matches", None)
        return Needs() if known is None else Needs(data={"known_matches": known})

    @classmethod
    def balances(cls, config: Any) -> bool:
        """Return True for a sigmoid loss over all pairs of the global batch, whose bias starts at -log(batch - 1)."""
        return False

    @classmethod
    def encoder_passes(cls, config: Any, rows: int, model: Any) -> list[EncoderPass]:
        """Return the passes of `embed` through the model for `rows` rows."""
        return [EncoderPass("image", rows), EncoderPass("text", rows)]

    @classmethod
    def unserved(cls, config: Any, architecture: Mapping[str, Any]) -> str:
        """Explain why the method cannot train a model of this complete configuration, and the remedy; or return ""."""
        return ""

    def notes(self, batch: int) -> tuple[str, ...]:
        """Return lines for the run's start and for each `before_training`; batch: the global batch size."""
        return ()

    def before_training(self, score: Score, pool: UnpairedEmbeddings) -> dict[str, Tensor]:
        """Return the `pool_state`, equal on all ranks, from the model's score of each rank's images and texts."""
        return {}

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Add this step's random views to the whole local batch; a function of (seed, step, global row) alone."""
        if getattr(self.config, "known_matches", False) and not {"caption_id", "caption_ids"} <= batch.keys():
            missing = f"known_matches needs caption_id and caption_ids in the batch, which has {', '.join(batch)}"
            raise ValueError(f"{missing}: read data with captions, or give --no-known-matches")
        return batch

    def matches(self, batch: Batch) -> Matches | None:
        """Return the known matches of the batch beyond its own pairs, if the config's `known_matches` is true."""
        known = getattr(self.config, "known_matches", False)
        return Matches(batch["caption_ids"], batch["caption_id"]) if known else None

    def encode(self, kind: str, inputs: Tensor, **options: Any) -> Gaussian:
        """Call `model.encode_<kind>`. Raises TypeError if it returns points (a Tensor also has a method `mean`)."""
        z = getattr(self.model, f"encode_{kind}")(inputs, **options)
        check_gaussian(z, f"the output of encode_{kind}")
        return z

    def embed(self, batch: Batch) -> Reps:
        """Run the model: rows (B, ...), scalars () and `shared`, by name; other counts of rows than B are allowed."""
        raise NotImplementedError

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        """Compute scalar terms, `loss` among them, from the representations alone, without reading parameters."""
        raise NotImplementedError

    def logged(self, reps: Reps, batch: Batch) -> Terms:
        """Return the terms, in-batch R@1, and the representations that are statistics, such as scale and bias."""
        statistics = {name: reps[name].detach() for name in self.statistics if name in reps}
        return self.terms(reps, batch) | statistics | in_batch_recall(reps)

    def means(self, batch: Batch) -> Reps:
        return {f"{side}_mean": self.encode(side, batch[side]).mean for side in ("image", "text")}

    def after_step(self) -> None:
        """Apply constraints on parameters after every optimiser step; must not wait for the device.

        Clamps a = exp(logit_scale) <= 100 in place, as OpenCLIP does: a clamp in the forward pass has a zero gradient.
        """
        if hasattr(self.model, "logit_scale"):
            with torch.no_grad():
                self.model.logit_scale.clamp_(max=math.log(MAX_LOGIT_SCALE))

    def after_training(self, model: Any, pairs: Pairs) -> None:
        """Change buffers that the method added to the trained model, or its twin, by its `pairs`, on one rank."""

    def forward(self, batch: Batch, cotangents: Mapping[str, Tensor] | None = None) -> Terms | Tensor:
        """Return the terms; for cotangents dL/d(rep) the sum of rep * cotangent, whose gradient is that of L."""
        reps = self.embed(batch)
        if cotangents is None:
            return self.logged(reps, batch)
        return torch.stack([(reps[name] * cotangent).sum() for name, cotangent in cotangents.items()]).sum()


class MeansObjective(Objective):
    """A loss on the means alone. The uncertainty parameters are frozen: the loss does not reach the variances."""

    def __init__(self, model: Any, config: Any, context: Context | None = None):
        super().__init__(model, config, context)
        for parameter in model.uncertainty_parameters():
            parameter.requires_grad_(False)

    def embed(self, batch: Batch) -> Reps:
        """Return means of images and texts (B, D), with scale and bias."""
        return self.means(batch) | logit_scale_and_bias(self.model)


#: Meaning of a method's variances for the report: learned in training, fitted at its end, or none.
LEARNED = """Every image and text is a Gaussian. Training learns its variances together with its mean: a large variance
marks an ambiguous input."""
FITTED = """Every image and text is a Gaussian. Training learns the means only. After training, the variances are
fitted to the matched pairs of the training data, so that they count how many images a text matches."""
POINTS = "Every image and text is a point: training learns no variances, and the model has no uncertainty."


class Method(NamedTuple):
    """A way to train a model, and to use the trained model."""

    config: type  # the dataclass whose fields are flags
    objective: type[Objective]
    score: type[Score]
    probabilistic: bool = True  # False for points
    #: (model, config=...): adds modules to a fresh model, whose config.json then stores the config; may return
    #: the names of parameters (logit_scale, logit_bias) that it has set.
    extend: Callable[..., Any] | None = None
    adapts: bool = False  # continues a trained model of any method and keeps its method, modules and score
    variances: str = ""  # their meaning for the report, where LEARNED or POINTS are wrong

    @property
    def meaning(self) -> str:
        return self.variances or (LEARNED if self.probabilistic else POINTS)


@torch.no_grad()
def in_batch_recall(reps: Reps) -> Terms:
    """Return batch_R@1 (): share of images whose text has the highest cosine, of CANDIDATES rows of this rank."""
    if not {"image_mean", "text_mean"} <= reps.keys():
        return {}
    image, text = (upcast(reps[name][:CANDIDATES].detach()) for name in ("image_mean", "text_mean"))
    text = text[:, 0] if text.ndim == 3 else text
    with without_autocast(image.device):
        first = (image @ F.normalize(text, dim=-1).mT).argmax(1)
    return {RECALL: (first == torch.arange(len(image), device=image.device)).float().mean()}


def flat(name: str, z: Gaussian) -> Reps:
    """Flatten a Gaussian into representations; `gaussian_of` undoes it."""
    return {f"{name}_mean": z.mean, f"{name}_log_var": z.log_var}


def gaussian_of(reps: Reps, name: str) -> Gaussian:
    """Return the Gaussian of representations by `flat`, in float32."""
    return Gaussian(reps[f"{name}_mean"], reps[f"{name}_log_var"]).float()


def clip_loss(context: Context) -> nn.Module:
    """Return OpenCLIP's softmax loss of the global batch: local rows against columns gathered with gradients."""
    from open_clip.loss import ClipLoss  # imported late: takes seconds

    return ClipLoss(local_loss=True, gather_with_grad=True, rank=context.rank, world_size=context.world_size)


def logit_scale_and_bias(model: Any) -> Reps:
    """Return scale a = exp(logit_scale) and bias b as they enter the logit a * similarity + b, both ()."""
    bias = upcast(model.logit_bias).reshape(()).clone()  # a copy, as the optimiser's step would change the logged value
    return {"scale": upcast(model.logit_scale).exp().reshape(()), "bias": bias}
