"""The ProLIP model: image and text towers that embed inputs as Gaussians in one space; the logit's scale and bias."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transformer import LayerNorm, LayerNormFp32, QuickGELU, TextTransformer, VisionTransformer
from torch import Tensor, nn

from prolip.gaussian import Gaussian
from prolip.models.config import ProLIPCfg, complete
from prolip.models.heads import LogVarianceHead
from prolip.models.inputs import TOKENISE, check_images, check_indices, check_keep, check_pixels, check_texts
from prolip.models.readers import reader_towers
from prolip.models.towers import ProbabilisticTextTransformer, ProbabilisticVisionTransformer
from prolip.uncertainty.readings import ambiguity_of

# Parameters of OpenCLIP's towers, which are also keys of its configurations.
VISION_KEYS, TEXT_KEYS = signature(VisionTransformer).parameters.keys(), signature(TextTransformer).parameters.keys()


class ProLIPOutput(NamedTuple):
    """Both Gaussians (None without an input), and the scalars a and b of the logit a s + b."""

    image: Gaussian | None
    text: Gaussian | None
    scale: Tensor
    bias: Tensor


def build_towers(config: Mapping[str, Any], low_precision: bool) -> tuple[Any, Any]:
    """Build both towers of a complete configuration. low_precision: norms compute in float32 for any input."""
    vision, text = CLIPVisionCfg(**config["vision_cfg"]), CLIPTextCfg(**config["text_cfg"])
    own = ProLIPCfg(**config["prolip_cfg"])
    shared = {"form": own.forward, "init_unc_bias": own.init_unc_bias, "init_unc_gain": own.init_unc_gain}
    shared |= {"output_dim": config["embed_dim"]}
    image_side = {key: value for key, value in vars(vision).items() if key in VISION_KEYS} | shared
    image_side |= {"heads": vision.width // vision.head_width, "conv_stem": own.conv_stem}
    text_side = {key: value for key, value in config["text_cfg"].items() if key in TEXT_KEYS} | shared
    text_side |= {"mask_padding": own.mask_padding, "pad_id": own.pad_token_id}
    for side, cfg in ((image_side, vision), (text_side, text)):
        side["norm_layer"] = partial(LayerNormFp32 if low_precision else LayerNorm, **(cfg.norm_kwargs or {}))
        side["act_layer"] = QuickGELU if config["quick_gelu"] else partial(nn.GELU, **(cfg.act_kwargs or {}))
    return ProbabilisticVisionTransformer(**image_side), ProbabilisticTextTransformer(**text_side)


class ProLIP(nn.Module):
    """The model of ProLIP, section 3. config: OpenCLIP's layout with `prolip_cfg`, see `prolip/models/configs`.

    `logit_scale` is log a, as in OpenCLIP; `logit_bias` is b. `ProLIP(model.config)` builds the model again.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: Mapping[str, Any], low_precision: bool = False):
        super().__init__()
        self.config: dict[str, Any] = complete(config)
        self.output_dict = False  # part of fingerprints
        self.visual: Any
        self.text: Any
        if self.config["prolip_cfg"]["forward"] == "reader":
            self.visual, self.text, others = reader_towers(self.config)
            for name, part in others.items():
                self.add_module(name, part)
        else:
            self.visual, self.text = build_towers(self.config, low_precision)
        self.logit_scale = nn.Parameter(torch.tensor(self.config["init_logit_scale"]))
        self.logit_bias = nn.Parameter(torch.tensor(self.config["init_logit_bias"]))
        own = ProLIPCfg(**self.config["prolip_cfg"])
        self.embed_dim: int = self.config["embed_dim"]
        self.num_patches: int = self.visual.num_patches
        self.context_length: int = self.text.context_length
        self.vocab_size: int = self.text.vocab_size
        self.pad_token_id: int = own.pad_token_id
        self.mask_token_id: int | None = own.mask_token_id
        self.special_token_ids: tuple[int, ...] = own.special_token_ids
        self.set_pixel_statistics(OPENAI_DATASET_MEAN, OPENAI_DATASET_STD)
        self._checked: set[str] = set()
        self._extension: Callable[[ProLIP], Any] | None = None
        self.added_names: frozenset[str] = frozenset()  # names in the state dict added by `extend`
        self.own_starts: frozenset[str] = frozenset()  # names that `extend` initialises

    def extend(self, add: Callable[[ProLIP], Any]) -> None:
        """Add a method's modules, once. add: returns the names of parameters that it initialises itself, or None."""
        before = self.state_dict()
        own = add(self) or ()
        after = self.state_dict()
        self._extension, self.added_names = add, frozenset(after.keys() - before.keys())
        self.own_starts = frozenset([*own, *(name for name in before if before[name].shape != after[name].shape)])

    def widen(self, dim: int | None) -> None:
        """Set the Gaussians' dimensions, for methods with heads for the means; None: the towers' dimensions."""
        if dim in (None, self.embed_dim):
            return
        self.embed_dim = dim
        for tower in (self.visual, self.text):
            old = tower.get_submodule(tower.unc_head_name)
            tower.set_submodule(tower.unc_head_name, LogVarianceHead(old.in_features, dim, old.init_bias, old.gain))

    def inherit(self) -> None:
        """Initialise a method's heads from the towers' weights, if a head supports it."""
        for tower in (self.visual, self.text):
            if hasattr(tower.head, "inherit"):
                tower.head.inherit(tower)

    def set_pixel_statistics(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Set the normalisation of uint8 images; `create_model_and_transforms`' transforms normalise on the CPU."""
        for name, values in (("pixel_mean", mean), ("pixel_std", std)):
            channels = torch.tensor(values, dtype=torch.float32, device=self.logit_scale.device)
            self.register_buffer(name, channels.reshape(1, -1, 1, 1), persistent=False)

    def ambiguity(self, image: Tensor) -> Tensor:
        """Return the ambiguity of images in nats (B,); the model needs fitted variances."""
        return ambiguity_of(self, image)

    def encode_image(self, image: Tensor, keep: Tensor | None = None, normalize: bool = True) -> Gaussian:
        """Embed images (B, 3, H, W), normalised floats or raw uint8, as a Gaussian (B, D) with unit means, float32.

        keep: (B, K) int64, indices of the patches to keep per image; the others are not computed.
        """
        check_images(image, self.visual.image_size, self.pixel_mean.device, raw=True)
        if image.dtype == torch.uint8:
            image = (image / 255 - self.pixel_mean) / self.pixel_std
        elif self._checks("image"):
            check_pixels(image)
        if keep is not None:
            check_keep(keep, image.shape[0])
            if self._checks("keep"):
                check_indices("keep", keep, self.num_patches, "Number the patches row by row, as keep_patches does")
        return self.visual(image, keep=keep, normalize=normalize)

    def encode_text(self, text: Tensor, normalize: bool = True) -> Gaussian:
        """Embed token ids (B, L <= context) as a Gaussian (B, D) with unit means, float32."""
        check_texts(text, self.context_length, self.pixel_mean.device)
        if self._checks("text"):
            check_indices("token ids", text, self.vocab_size, TOKENISE)
        return self.text(text, normalize=normalize)

    def _checks(self, kind: str) -> bool:
        """Return True to check an input's values: never during tracing, once per kind in training, otherwise always."""
        making = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if making or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return False
        if self.training and kind in self._checked:
            return False
        if self.training:
            self._checked.add(kind)
        return True

    def forward(self, image: Tensor | None = None, text: Tensor | None = None, keep: Tensor | None = None):
        """Return both Gaussians with the logit's scale and bias, a `ProLIPOutput`."""
        z = None if image is None else self.encode_image(image, keep)
        w = None if text is None else self.encode_text(text)
        return ProLIPOutput(z, w, self.logit_scale.exp(), self.logit_bias)

    def uncertainty_parameters(self) -> list[nn.Parameter]:
        """Return the [UNC] tokens and log-variance heads of both towers."""
        return [*self.visual.uncertainty_parameters(), *self.text.uncertainty_parameters()]

    @property
    def image_size(self) -> int | tuple[int, int]:
        """Height and width of images, in pixels."""
        return self.visual.image_size

    def towers(self) -> dict[str, Any]:
        """Return modality -> tower, each with its transformer's `blocks`, first to last."""
        return {"image": self.visual, "text": self.text}

    def logit_parameters(self) -> set[str]:
        """Return the full names of scale and bias."""
        return {"logit_scale", "logit_bias"}

    def backbones(self) -> dict[str, set[str]]:
        """Return tower -> full names of the backbone's parameters: all except [UNC], its head, and a method's parts."""
        new = {id(parameter) for parameter in self.uncertainty_parameters()}
        found: dict[str, set[str]] = {}
        for kind, tower in self.towers().items():
            old = {id(parameter) for parameter in tower.parameters()} - new
            found[kind] = {name for name, p in self.named_parameters() if id(p) in old} - self.added_names
        return found

    def depths(self) -> dict[str, int]:
        """Return full name of a parameter -> layers from it to the tower's end: heads 0, the last block 1, ..."""
        towers = (("visual", self.visual), ("text", self.text))
        return {f"{side}.{name}": depth for side, tower in towers for name, depth in tower.depths().items()}

    def no_weight_decay(self) -> set[str]:
        """Return the full names of parameters without weight decay: positions, special tokens, scale and bias."""
        towers = (("visual", self.visual), ("text", self.text))
        names = {f"{side}.{name}" for side, tower in towers for name in tower.no_weight_decay()}
        return names | self.logit_parameters()

    def twin(self) -> ProLIP:
        """Build a model of the same configuration and preprocessing, on the default device, with initial weights."""
        other = ProLIP(self.config)
        if self._extension is not None:
            other.extend(self._extension)
        if hasattr(self.visual, "preprocess_cfg"):  # the factory sets it
            other.visual.preprocess_cfg = self.visual.preprocess_cfg
        for name in ("pixel_mean", "pixel_std"):
            setattr(other, name, getattr(self, name).to(other.logit_scale.device, copy=True))
        return other

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass."""
        for tower in self.towers().values():
            tower.set_grad_checkpointing(enable)

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Freeze the image tower, as OpenCLIP."""
        self.visual.lock(unlocked_groups, freeze_bn_stats)

    def lock_text_tower(self, unlocked_layers: int = 0, freeze_layer_norm: bool = True) -> None:
        """Freeze the text tower, as OpenCLIP."""
        self.text.lock(unlocked_layers, freeze_layer_norm)


def cast_to(model: ProLIP, dtype: torch.dtype, pure: bool = False) -> ProLIP:
    """Store the blocks' weights in `dtype`, except norms and (unless `pure`) token and position embeddings."""
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    depths = model.depths()
    for name, parameter in model.named_parameters():
        embedding = any(part in name for part in ("embedding", "cls_emb", "unc_emb"))
        if id(parameter) not in norms and depths.get(name, 0) > 0 and (pure or not embedding):
            parameter.data = parameter.data.to(dtype)
    return model
