"""ProLIP (Chun et al. 2025): PPCL, inclusion losses and VIB on Gaussians, equation 6."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from prolip import views
from prolip.flops import EncoderPass
from prolip.losses import inclusion_loss, ppcl_over_ranks, vib
from prolip.measures.paired import INCLUSION_FORMS
from prolip.methods.base import Batch, Context, Method, Objective, Reps, Terms, flat, gaussian_of, logit_scale_and_bias
from prolip.random import Stream
from prolip.scores import CSDScore
from prolip.utils.fields import option
from prolip.utils.flags import check_choices, check_range

REDUCTIONS = ("dim", "pair")


@dataclass(kw_only=True)
class ProLIPConfig:
    """Weights and constants of the ProLIP loss; symbols as in the paper's equations 5 and 6."""

    #: Flags of the released code and of OpenCLIP, and their replacements.
    retired: ClassVar[Mapping[str, str]] = {
        "alpha": "use --alpha1 (images in texts) and --alpha2 (inputs in their masked views)",
        "force-patch-dropout": "masked views drop patches: use --mask-fraction and --mask-ratio",
    }

    alpha1: float = option(1e-7, "weight of the inclusion of images in their texts (eq. 6)")
    alpha2: float = option(1e-3, "weight of the inclusion of inputs in their masked views (eq. 6); 0: no views")
    beta: float = option(1e-4, "weight of the information bottleneck VIB (eq. 6)")
    inclusion_scale: float = option(10.0, "c of the inclusion loss (eq. 5); the paper's main runs use 1000")
    inclusion_eps: float = option(-10.0, "eps, exponent of the factor on 1/sigma^2 in H; the paper's main runs use -20")
    inclusion_form: str = option(
        "exact", "inclusion test as derived in A.4 (exact) or as printed in eq. 3 (printed)", choices=INCLUSION_FORMS
    )
    inclusion_reduction: str = option(
        "dim", "log-sigmoid per dimension, then mean (dim), or of the sum over dimensions (pair)", choices=REDUCTIONS
    )
    mask_fraction: float = option(0.125, "share of each batch that gets masked views")
    mask_ratio: float = option(0.75, "share of patches dropped, and probability that a token becomes [MASK]")
    known_matches: bool = option(False, "count every true caption of an image in the batch as a positive")

    def __post_init__(self) -> None:
        check_range(self, "alpha1", "alpha2", "beta", "inclusion_scale")
        check_range(self, "inclusion_eps", least=-math.inf, most=0, remedy=", such as -10")
        check_range(self, "mask_fraction", most=1, above=True, remedy=", or --alpha2 0 for no masked views")
        check_range(self, "mask_ratio", most=1, above=True, below=True, remedy=", such as 0.75")
        check_choices(self)


class ProLIPObjective(Objective):
    """The loss of ProLIP's equation 6 on one batch of images and texts.

    L = PPCL + alpha1 I(image in text) + alpha2 [I(image in masked image) + I(text in masked text)]
        + beta [VIB(image) + VIB(text)].
    No gradient is stopped: as in the paper, an inclusion may narrow the inner Gaussian as well as widen the outer one.
    """

    statistics = ("scale", "bias", "trace_image", "trace_text")
    details = ("trace_masked_image", "trace_masked_text")
    config: ProLIPConfig

    def __init__(self, model: Any, config: ProLIPConfig, context: Context | None = None):
        super().__init__(model, config, context)
        self.masks_texts = config.alpha2 > 0 and model.mask_token_id is not None
        if config.alpha2 > 0 and not (self.masks_texts or model.text.has_reader):
            remedy = "give prolip_cfg.mask_token_id in the model's config, or alpha2=0"
            raise ValueError(f"alpha2 > 0 requires a [MASK] token, and the model's vocabulary has none: {remedy}")

    def notes(self, batch: int) -> tuple[str, ...]:
        """Return a note if the vocabulary of OpenCLIP's tower has no token for masked texts."""
        if self.config.alpha2 == 0 or self.masks_texts:
            return ()
        return ("no masked texts: the model's vocabulary has no [MASK] (prolip_cfg.mask_token_id); images are masked",)

    @classmethod
    def balances(cls, config: ProLIPConfig) -> bool:
        return True

    @classmethod
    def unserved(cls, config: ProLIPConfig, architecture: Mapping[str, Any]) -> str:
        """Explain if masked views cannot blank squares in images of OpenCLIP's towers; empty if they can."""
        from prolip.models.config import is_reader  # imported late: these take seconds
        from prolip.models.readers import SQUARES, square_of

        if config.alpha2 == 0 or not is_reader(architecture) or square_of(architecture["vision_cfg"]["image_size"]) > 1:
            return ""
        size = architecture["vision_cfg"]["image_size"]
        squares = f"masked views blank squares of {SQUARES} pixels, and none of these sizes divides {size}"
        return f"{squares}: give --force-image-size 224, or --alpha2 0"

    @classmethod
    def encoder_passes(cls, config: ProLIPConfig, rows: int, model: Any) -> list[EncoderPass]:
        """Count masked views: images cost their kept patches; without [MASK], no text is masked."""
        if config.alpha2 == 0:
            return super().encoder_passes(config, rows, model)
        masked = views.count_masked_rows(rows, config.mask_fraction)
        kept = views.count_kept_patches(model.num_patches, config.mask_ratio)
        texts = rows if model.mask_token_id is None else rows + masked
        return [EncoderPass("image", rows), EncoderPass("image", masked, kept), EncoderPass("text", texts)]

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Add masked views of the first M rows, M = max(1, floor(mask_fraction * B)).

        masked_image (M, 3, H, W), a view of `image` with the patches to keep in `keep` (M, K), and masked_text (M, L).
        """
        image, text, ratio = batch["image"], batch["text"], self.config.mask_ratio
        model, draws = self.model, self.context.draws
        if len(image) != len(text):
            raise ValueError(f"{len(image)} images and {len(text)} texts in a batch: give pairs")
        batch = super().prepare(batch, step)
        if self.config.alpha2 == 0:
            return batch
        rows, patches = views.count_masked_rows(len(image), self.config.mask_fraction), model.num_patches
        places = draws.rows(rows, image.device)
        patch_noise = draws.uniform(Stream.IMAGE_MASK, step, places, patches)
        keep = views.keep_patches(patch_noise, views.count_kept_patches(patches, ratio))
        batch = batch | {"masked_image": image[:rows], "keep": keep}
        if not self.masks_texts:
            return batch
        token_noise = draws.uniform(Stream.TEXT_MASK, step, places, text.shape[1])
        special = model.mask_token_id, model.pad_token_id, model.special_token_ids
        return batch | {"masked_text": views.mask_text(text[:rows], token_noise, *special, ratio)}

    def embed(self, batch: Batch) -> Reps:
        """Return Gaussians of images and texts (B, D) and masked views (M, D), as flat entries, with scale and bias."""
        image = self.encode("image", batch["image"])
        reps = flat("image", image) | logit_scale_and_bias(self.model)
        if self.config.alpha2 == 0:
            return reps | flat("text", self.encode("text", batch["text"]))
        if "masked_image" not in batch:
            raise ValueError("the batch has no masked views and alpha2 is not 0: call objective.prepare(batch, step)")
        rows, masked = len(batch["text"]), [batch["masked_text"]] if self.masks_texts else []
        texts = self.encode("text", torch.cat([batch["text"], *masked]))
        if len(batch["masked_image"]):
            masked_image = self.encode("image", batch["masked_image"], keep=batch["keep"])
        else:  # a micro-batch may hold no masked row
            masked_image = image.select(slice(0, 0))
        reps = reps | flat("text", texts.select(slice(None, rows))) | flat("masked_image", masked_image)
        return reps | flat("masked_text", texts.select(slice(rows, None))) if self.masks_texts else reps

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        config = self.config
        views = [view for view in ("image", "text", "masked_image", "masked_text") if f"{view}_mean" in reps]
        settings = {name: getattr(config, f"inclusion_{name}") for name in ("scale", "eps", "form", "reduction")}
        inclusion: Callable[..., torch.Tensor] = partial(inclusion_loss, **settings)
        z = {view: gaussian_of(reps, view) for view in views}
        terms = {
            "ppcl": ppcl_over_ranks(z["image"], z["text"], reps["scale"], reps["bias"], self.matches(batch)),
            "inclusion_image_text": inclusion(z["image"], z["text"]),
            "vib_image": vib(z["image"]),
            "vib_text": vib(z["text"]),
        }
        for masked in views[2:]:  # masked views are of the leading rows
            whole = masked.removeprefix("masked_")
            leading = z[whole].select(slice(None, len(z[masked].mean)))
            terms[f"inclusion_{whole}"] = inclusion(leading, z[masked])
        weights = {"ppcl": 1.0, "inclusion_image_text": config.alpha1, "inclusion_image": config.alpha2}
        weights |= {"inclusion_text": config.alpha2, "vib_image": config.beta, "vib_text": config.beta}
        # Terms without weight are only logged: outside of the sum, they cannot bring a non-finite gradient.
        loss = torch.stack([weights[name] * term for name, term in terms.items() if weights[name] > 0]).sum()
        return {"loss": loss} | terms | {f"trace_{view}": z[view].detach().trace.mean() for view in views}


METHODS = {"prolip": Method(ProLIPConfig, ProLIPObjective, CSDScore)}
