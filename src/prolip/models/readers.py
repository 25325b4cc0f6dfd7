"""OpenCLIP's unchanged towers, each with a reader that predicts the variance of the tower's embedding.

A tower's own forward pass gives the mean. The reader attends to the input tokens of the tower's last block, because
training uses only the pooled one of its output tokens. All calls of OpenCLIP, timm and transformers are public.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.coca_model import CoCa
from open_clip.hf_model import HFTextEncoder, arch_dict
from open_clip.model import CustomTextCLIP
from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from open_clip.transformer import to_2tuple
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils.checkpoint import checkpoint

from prolip.gaussian import Gaussian
from prolip.models.config import TRANSFORMERS, ProLIPCfg, transformers_config
from prolip.models.heads import LogVarianceHead, Tokens, blank_others, layer_norm, own_words
from prolip.models.inputs import check_images, check_keep, check_texts
from prolip.uncertainty.token_stats import blocks_of, first_tokens

INNER, HEAD = 512, 64  # largest inner width of a reader, width of its heads
SQUARES = (32, 16, 14)  # sides of the squares that masked views blank: the first one that divides the image
#: Names of parameters before the blocks.
STEM = re.compile(
    r"(^|\.)(conv[123]|bn[123]|class_embedding|positional_embedding|ln_pre|token_embedding|cls_emb|embeddings"
    r"|embed_tokens|embed_positions|layernorm_embedding|shared)(\.|$)"
)
OURS = ("prolip_cfg", "method_cfg", "custom_text")  # keys of our configuration that OpenCLIP's classes do not accept
#: Words in timm's names that denote the size of a model.
SIZE = re.compile(r"_((patch|window)?\d+|so\d+m|tiny|small|medium|base|x*large|giantopt|giant|gigantic|enormous)|\d+")


def square_of(image_size: int | Sequence[int]) -> int:
    """Return the side of the squares that masked views blank; 1 if none of SQUARES divides the image."""
    return next((side for side in SQUARES if not any(length % side for length in to_2tuple(image_size))), 1)


def kinds_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kinds of the image and text tower of a complete configuration, for tables and messages."""
    vision, text = config["vision_cfg"], config["text_cfg"]
    if config["prolip_cfg"]["forward"] != "reader":
        return "ViT with [UNC]", "bidirectional with [UNC]"
    if name := vision.get("timm_model_name"):
        image = f"timm {SIZE.sub('', name)}"
    elif isinstance(vision["layers"], list):
        image = "ModifiedResNet"
    else:
        pooling = "attention" if vision.get("attentional_pool") else vision.get("pool_type", "tok")
        image = f"ViT, pooled by {pooling}"
    if name := text.get("hf_model_name"):
        return image, f"transformers' {transformers_config(name)['model_type']}"
    order = "bidirectional" if text.get("no_causal_mask") else "causal"
    return image, f"{order}, pooled by {'cls_emb' if text.get('embed_cls') else text.get('pool_type', 'argmax')}"


def openclip_model(config: Mapping[str, Any]) -> CustomTextCLIP | CoCa:
    """Build OpenCLIP's model of a complete configuration, with random weights and without downloads."""
    own = copy.deepcopy({key: value for key, value in config.items() if key not in OURS})
    own["vision_cfg"]["timm_model_pretrained"] = own["text_cfg"]["hf_model_pretrained"] = False
    if name := own["text_cfg"].get("hf_model_name"):
        bundled = TRANSFORMERS / name.rpartition("/")[2]
        own["text_cfg"]["hf_model_name"] = str(bundled) if bundled.is_dir() else name
    model: Any = (CoCa if "multimodal_cfg" in own else CustomTextCLIP)(**own)
    if "multimodal_cfg" in own:  # OpenCLIP leaves it uninitialised
        nn.init.normal_(model.text_decoder.text_projection, std=own["embed_dim"] ** -0.5)
    trunk = getattr(model.visual, "trunk", None)  # timm's, built for its own image size
    if getattr(getattr(trunk, "patch_embed", None), "img_size", None) not in (None, model.visual.image_size):
        model.visual.set_input_size(model.visual.image_size)
    return model


class Reader(nn.Module):
    """Predictor of log sigma^2 of an embedding m from a tower's tokens x: one block of cross-attention, query [UNC].

    u = unc + W_o attention(W_q LN(unc); W_kv LN(x), W_m m);  u <- u + MLP(LN(u));  log sigma^2 = W LN(u) + b.
    The embedding is an additional key and value, because the tower may have pooled it from tokens that are not in x.
    """

    def __init__(self, width: int, dim: int, init_bias: float, gain: float):
        super().__init__()
        inner = min(width, INNER) // HEAD * HEAD or width
        self.heads = max(1, inner // HEAD)
        self.unc = nn.Parameter(inner**-0.5 * torch.randn(inner))
        self.norm_q, self.q = nn.LayerNorm(inner), nn.Linear(inner, inner)
        self.norm_kv, self.kv = nn.LayerNorm(width), nn.Linear(width, 2 * inner)
        self.mean_kv = nn.Linear(dim, 2 * inner)
        self.out = nn.Linear(inner, inner)
        self.norm_mlp = nn.LayerNorm(inner)
        self.mlp = nn.Sequential(nn.Linear(inner, 4 * inner), nn.GELU(), nn.Linear(4 * inner, inner))
        self.norm, self.log_var = nn.LayerNorm(inner), LogVarianceHead(inner, dim, init_bias, gain)

    def forward(self, tokens: Tensor, mean: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return log sigma^2 (B, D), float32, of tokens (B, K, W), means (B, D) and a mask of tokens (B, K) or None.

        All samples have one query q, so q . (W_k x + b_k) = (q W_k) . x + q . b_k, and W_v is applied to the weighted
        sum of tokens: W x heads products per token instead of 2 W x width.
        """
        x = self.norm_kv(tokens)
        weights, biases = (part.unflatten(0, (2, self.heads, -1)) for part in (self.kv.weight, self.kv.bias))
        query = self.q(self.norm_q(self.unc)).view(self.heads, -1) * (self.unc.numel() // self.heads) ** -0.5
        key, value = self.mean_kv(mean).unflatten(1, (2, self.heads, -1)).unbind(1)  # (B, heads, width of a head)
        scores = x @ torch.einsum("hd,hdw->wh", query, weights[0]) + (query * biases[0]).sum(1)
        if valid is not None:
            scores = scores.masked_fill(~valid[:, :, None], -torch.inf)
        scores = torch.cat([(query * key).sum(2)[:, None], scores], 1)  # (B, 1 + K, heads)
        shares = scores.softmax(1, torch.float32).to(x.dtype)
        seen = torch.einsum("bkh,bkw->bhw", shares[:, 1:], x)
        own = shares[:, 0, :, None]
        read = torch.einsum("bhw,hdw->bhd", seen, weights[1]) + (1 - own) * biases[1] + own * value
        u = self.unc + self.out(read.flatten(1))
        u = u + self.mlp(self.norm_mlp(u))
        return self.log_var(layer_norm(self.norm, u))


class ReaderTower(nn.Module):
    """A tower of OpenCLIP with its `reader` and a method's `head` or None; has the interface of `Probabilistic`."""

    unc_name, unc_head_name = "reader", "reader.log_var"
    has_reader = True
    head: nn.Module | None

    def __init__(self, tower: Any, width: int, dim: int, own: ProLIPCfg):
        super().__init__()
        self.tower, self.width, self.output_dim = tower, width, dim
        self.reader = Reader(width, dim, own.init_unc_bias, own.init_unc_gain)
        self.head = None
        self.keeps_statistics = False

    @property
    def device(self) -> torch.device:
        return self.reader.unc.device

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Blocks of a transformer or stages of a pyramid, first to last."""
        return blocks_of(self.tower)

    def gaussian(self, features: Tensor, tokens: Tokens, normalize: bool, ids: Tensor | None = None) -> Gaussian:
        """Return N(L2norm(features), reader(tokens)), after a method's head if there is one."""
        features = features.float()
        unit = F.normalize(features, dim=-1)
        z = Gaussian(unit if normalize else features, self.reader(tokens.before, unit, tokens.valid))
        return z if self.head is None else self.head(tokens, z, ids)

    def depths(self) -> dict[str, int]:
        """Return parameter -> layers from it to the tower's end: heads and reader 0, block i of n n - i, stem n + 1."""
        found = dict.fromkeys((name for name, _ in self.named_parameters()), 0)
        return found | {f"tower.{name}": depth for name, depth in tower_depths(self.tower).items()}

    def uncertainty_parameters(self) -> list[nn.Parameter]:
        return list(self.reader.parameters())

    def no_weight_decay(self) -> set[str]:
        """Return the names without weight decay: those of OpenCLIP and timm, and [UNC]."""
        inner = getattr(self.tower, "trunk", self.tower)
        names = inner.no_weight_decay() if hasattr(inner, "no_weight_decay") else ()
        place = "tower" if inner is self.tower else "tower.trunk"
        return {f"{place}.{name}" for name in names} | {"reader.unc"}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in the backward pass, also of a ResNet, which OpenCLIP does not support."""
        if not isinstance(self.tower, (ModifiedResNet, HFTextEncoder)):
            self.tower.set_grad_checkpointing(enable)
            return
        stages = isinstance(self.tower, ModifiedResNet)
        for block in (part for stage in self.blocks for part in stage.children()) if stages else self.blocks:
            vars(block).pop("forward", None)
            if enable:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def lock(self, unlocked: int = 0, *_: bool) -> None:
        """Freeze the tower and its running statistics, except the last `unlocked` layers (1: after the blocks)."""
        depths = tower_depths(self.tower)
        for name, parameter in self.tower.named_parameters():
            parameter.requires_grad = depths[name] < unlocked
        self.train(self.training)

    def keep_statistics(self) -> None:
        """Make BatchNorm use its running statistics, unchanged, also in training."""
        self.keeps_statistics = True
        self.train(self.training)

    def train(self, mode: bool = True) -> ReaderTower:
        """Set the mode as `nn.Module.train`, but keep frozen parts and statistics in evaluation mode."""
        super().train(mode)
        for part in self.tower.modules():
            learns = [parameter.requires_grad for parameter in part.parameters()]
            if (learns and not any(learns)) or (self.keeps_statistics and isinstance(part, BatchNorm)):
                part.eval()
        return self


class ReaderImageTower(ReaderTower):
    """An image tower of OpenCLIP: (B, 3, H, W) -> Gaussian (B, D)."""

    def __init__(self, tower: Any, dim: int, own: ProLIPCfg, sizes: tuple[int, int, int]):
        super().__init__(tower, sizes[1], dim, own)
        self.num_tokens, _, self.first_width = sizes
        self.square = square_of(self.image_size)

    @property
    def image_size(self) -> tuple[int, int]:
        height, width = to_2tuple(self.tower.image_size)
        return height, width

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of the squares that masked views blank."""
        return self.image_size[0] // self.square, self.image_size[1] // self.square

    @property
    def num_patches(self) -> int:
        return math.prod(self.grid_size)

    def forward(self, x: Tensor, keep: Tensor | None = None, normalize: bool = True) -> Gaussian:
        """Embed images as a Gaussian (B, D) with OpenCLIP's mean. keep: visible squares, (B, K); others are blank."""
        check_images(x, self.image_size, self.device)
        if keep is not None:
            check_keep(keep, x.shape[0])
            x = blank_others(x, keep, self.grid_size, (self.square, self.square))
        return self.gaussian(*image_parts(self.tower, x), normalize)


class ReaderTextTower(ReaderTower):
    """A text tower of OpenCLIP: token ids (B, L) -> Gaussian (B, D)."""

    def __init__(self, tower: Any, dim: int, own: ProLIPCfg, context_length: int):
        foreign = isinstance(tower, HFTextEncoder)
        key = arch_dict[tower.config.model_type]["config_names"]["width"] if foreign else ""
        super().__init__(tower, getattr(tower.config, key) if foreign else tower.width, dim, own)
        self.first_width = self.width
        most, embeddings = context_length, getattr(tower.transformer, "embeddings", None)
        if embeddings is not None:  # RoBERTa and XLM-R have learnt positions
            most = embeddings.position_embeddings.num_embeddings - embeddings.padding_idx - 1
        if context_length > most:
            found = f"text_cfg.context_length is {context_length}, but the text tower has {most} positions"
            raise ValueError(f"{found}: give at most {most} (--force-context-length)")
        self.context_length, self.vocab_size, self.pad_id = context_length, tower.vocab_size, own.pad_token_id

    def forward(self, text: Tensor, normalize: bool = True) -> Gaussian:
        """Embed ids as a Gaussian (B, D) with OpenCLIP's mean; pads ids to the context for OpenCLIP's own towers."""
        check_texts(text, self.context_length, self.device)
        if not isinstance(self.tower, HFTextEncoder):
            text = F.pad(text, (0, self.context_length - text.shape[1]), value=self.pad_id)
        return self.gaussian(*text_parts(self.tower, text, self.pad_id), normalize, text)


def reader_towers(config: Mapping[str, Any]) -> tuple[ReaderImageTower, ReaderTextTower, dict[str, nn.Module]]:
    """Build both towers of a complete configuration, and CoCa's decoder (frozen) if the model has one."""
    model, dim, own = openclip_model(config), config["embed_dim"], ProLIPCfg(**config["prolip_cfg"])
    tiny = {"context_length": 8, "vocab_size": 8, "width": 64, "heads": 1, "layers": 1}  # the text tower is not used
    with torch.device("meta"), torch.no_grad():  # the sizes of the image reader's tokens
        visual: Any = openclip_model({**config, "text_cfg": tiny}).visual.eval()
        with first_tokens(visual) as taken:
            before = image_parts(visual, torch.empty(1, 3, *to_2tuple(visual.image_size)))[1].before
    assert before is not None
    image = ReaderImageTower(model.visual, dim, own, (*before.shape[1:], taken[0].shape[2]))
    text = ReaderTextTower(model.text, dim, own, config["text_cfg"].get("context_length", 77))
    others = {name: part for name, part in model.named_children() if name not in ("visual", "text")}
    return image, text, {name: part.requires_grad_(False) for name, part in others.items()}


def image_parts(tower: Any, x: Tensor) -> tuple[Tensor, Tokens]:
    """Return embedding (B, D) and tokens of images, in one pass; without the input of a single block."""
    found = tower.forward_intermediates(x, indices=min(2, len(blocks_of(tower))), output_fmt="NCHW")
    levels = found["image_intermediates"]
    for level in levels if x.shape[0] == 1 and x.device.type == "cpu" else ():
        if level.requires_grad:  # BatchNorm of torch 2.14 misreads a single image's gradient with the strides of `mT`
            level.register_hook(torch.Tensor.contiguous)
    tokens = [level.flatten(2).mT for level in levels]
    before, last = tokens[0], tokens[-1]
    # the input of a pyramid's last stage is a larger grid of another width
    return found["image_features"], Tokens(last, before=before if before.shape == last.shape else last)


def text_parts(tower: Any, ids: Tensor, pad_id: int) -> tuple[Tensor, Tokens]:
    """Return embedding (B, D) and tokens of texts, in one pass."""
    if isinstance(tower, HFTextEncoder):
        mask = (ids != tower.config.pad_token_id).long()
        found = tower.transformer(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        levels = found.hidden_states[-2], found.last_hidden_state
        return tower.proj(tower.pooler(found, mask)), Tokens(levels[1], own_words(ids, pad_id), before=levels[0])
    found = tower.forward_intermediates(ids, indices=min(2, len(blocks_of(tower))), output_fmt="NLC")
    levels = found["text_intermediates"]
    return found["text_features"], Tokens(levels[-1], own_words(ids, pad_id), before=levels[0])


def tower_depths(tower: Any) -> dict[str, int]:
    """Return name of a parameter of OpenCLIP's tower -> layers from it to the tower's end, see `ReaderTower.depths`."""
    if isinstance(tower, TimmModel):
        return timm_depths(tower)
    blocks = blocks_of(tower)
    place = {id(parameter): len(blocks) - i for i, block in enumerate(blocks) for parameter in block.parameters()}
    before = {name for name, _ in tower.named_parameters() if STEM.search(name) and "attnpool" not in name}
    return {
        name: place.get(id(parameter), len(blocks) + 1 if name in before else 0)
        for name, parameter in tower.named_parameters()
    }


def timm_depths(tower: TimmModel) -> dict[str, int]:
    """Return name of a parameter of timm's model -> depth as in `tower_depths`, by timm's groups of layers."""
    from timm.models import group_parameters

    groups = group_parameters(tower.trunk, tower.trunk.group_matcher())
    depth = {f"trunk.{name}": max(groups) - group for group, names in groups.items() for name in names}
    block = {id(parameter) for parameter in blocks_of(tower)[-1].parameters()}
    names = {id(parameter): name for name, parameter in tower.named_parameters()}
    after = min(depth[names[parameter]] for parameter in block) == 0  # OpenCLIP adds a projection
    return {name: depth[name] + after if name in depth else 0 for name in names.values()}
