"""OpenCLIP's transformers with a second special token, [UNC], and two heads: they embed inputs as Gaussians.

Parameters have OpenCLIP's names; [UNC] and its heads have the names of the released ProLIP weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

import torch
from open_clip.transformer import TextTransformer, Transformer, VisionTransformer, to_2tuple
from torch import Tensor, nn

from prolip.gaussian import Gaussian
from prolip.models.heads import LogVarianceHead, Tokens, blank_others, layer_norm, own_words, project
from prolip.models.inputs import check_images, check_keep, check_texts

SPECIAL_TOKENS = 2


class ConvStem(nn.Sequential):
    """Stem of stride-2 3x3 convolutions to one token per patch, then a 1x1 one (Xiao et al. 2021, arXiv 2106.14881).

    (B, 3, H, W) -> (B, width, H / patch, W / patch), patch a power of two. GroupNorm keeps micro-batches exact.
    """

    def __init__(self, width: int, patch_size: int):
        depth = patch_size.bit_length() - 1
        if patch_size < 2 or 2**depth != patch_size or width % (patch_size // 2):
            needed = "a patch_size that is a power of two, and a width divisible by half of it"
            raise ValueError(f"conv_stem needs {needed}: got {patch_size} and {width}")
        channels = [3, *(width // 2 ** (depth - 1 - i) for i in range(depth))]
        layers: list[nn.Module] = []
        for before, after in zip(channels, channels[1:]):
            halve = nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1, bias=False)
            layers += [halve, nn.GroupNorm(math.gcd(8, after), after), nn.GELU()]
        super().__init__(*layers, nn.Conv2d(width, width, kernel_size=1, bias=False))

    @property
    def weight(self) -> Tensor:
        """Weight of the last projection, with the tower's dtype, as OpenCLIP's `conv1.weight`."""
        projection = self[-1]
        assert isinstance(projection, nn.Conv2d)
        return projection.weight


class SelfAttention(nn.MultiheadAttention):
    """Self-attention without PyTorch's copies of queries, keys and values on a GPU; PyTorch's own on a CPU."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **asked: Any) -> tuple[Tensor, Any]:  # type: ignore[override]
        if not query.is_cuda or key is not query or asked.keys() != {"need_weights", "attn_mask"}:
            return super().forward(query, key, value, **asked)
        return self.attend(query, asked["attn_mask"]), None

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply self-attention to x (B, L, width). mask: (L, L) or (B * heads, L, L), added to the logits."""
        packed = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = packed.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mask = mask.unflatten(0, (-1, self.num_heads)) if mask is not None and mask.ndim == 3 else mask
        z = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out_proj(z.transpose(1, 2).flatten(2))


class Probabilistic:
    """Mix-in of both towers: [UNC], its head, and the groups of parameters of a run."""

    #: Names of the [UNC] token, of its head, and of all parts before the blocks.
    unc_name: ClassVar[str]
    unc_head_name: ClassVar[str]
    stem: ClassVar[tuple[str, ...]]
    has_reader: ClassVar[bool] = False  # True: a separate block gives the log variance, as in `prolip.models.readers`
    #: A method's own head: (`Tokens`, the Gaussian of the plain heads, for texts also the ids) -> Gaussian. With
    #: `needs_penultimate_tokens` it also gets `again`, a function from another last block to its tokens;
    #: `inherit(tower)` initialises it from the tower's loaded weights.
    head: nn.Module | None
    transformer: Transformer
    width: int
    shown: Callable[..., Tokens]  # a block's tokens without [UNC]
    named_parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]]

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        for block in self.blocks:
            if type(block.attn) is nn.MultiheadAttention:
                block.attn.__class__ = SelfAttention

    @property
    def first_width(self) -> int:
        """Width of the input tokens of the first block."""
        return self.width

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer's blocks, first to last."""
        return self.transformer.resblocks

    def through_blocks(self, x: Tensor, mask: Tensor | None = None, ids: Tensor | None = None) -> tuple[Tensor, dict]:
        """Return the last tokens, and the function `again` for a head that `needs_penultimate_tokens`."""
        if not getattr(self.head, "needs_penultimate_tokens", False):
            return self.transformer(x, attn_mask=mask), {}
        first = len(self.blocks) == 1
        last, layers = self.transformer.forward_intermediates(x, attn_mask=mask, indices=[-1 if first else -2])
        before = x if first else layers[0]

        def again(block: Any) -> Tokens:
            dtype = block.mlp[0].weight.dtype
            return self.shown(block(before.to(dtype), attn_mask=None if mask is None else mask.to(dtype)), ids)

        return last, {"again": again}

    def depths(self) -> dict[str, int]:
        """Return name of a parameter -> layers from it to the tower's end: heads 0, block i of n n - i, stem n + 1."""
        blocks, found = len(self.blocks), {}
        for name, _ in self.named_parameters():
            part, *rest = name.split(".")
            inside = part == "transformer"  # transformer.resblocks.i.
            found[name] = blocks - int(rest[1]) if inside else blocks + 1 if part in self.stem else 0
        return found

    def uncertainty_parameters(self) -> list[nn.Parameter]:
        """Return the [UNC] token and the log-variance head."""
        return [getattr(self, self.unc_name), *getattr(self, self.unc_head_name).parameters()]

    def no_weight_decay(self) -> set[str]:
        """Return the names without weight decay: OpenCLIP's, and the [UNC] token."""
        return {*super().no_weight_decay(), self.unc_name}  # type: ignore[misc]

    def train_uncertainty(self, on: bool) -> None:
        """Freeze or unfreeze the uncertainty branch and a method's own head."""
        head = self.head.parameters() if self.head is not None else ()
        for parameter in [*self.uncertainty_parameters(), *head]:
            parameter.requires_grad = on

    def forward_intermediates(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: OpenCLIP assumes one special token, and this tower has two."""
        raise NotImplementedError("a tower with [UNC] returns no intermediate tokens: register hooks on tower.blocks")

    prune_intermediate_layers = forward_intermediates


class ProbabilisticVisionTransformer(Probabilistic, VisionTransformer):
    """ProLIP's image tower: [CLS], [UNC], patches -> ViT, LayerNorm -> N(L2norm(CLS @ proj), Linear(UNC)), sec. 3.1."""

    unc_name, unc_head_name = "unc_embedding", "uncertainty_proj"
    stem = ("conv1", "class_embedding", "unc_embedding", "positional_embedding", "ln_pre")
    positional_embedding: nn.Parameter
    uncertainty_proj: LogVarianceHead

    def __init__(self, *, form="paper", init_unc_bias=-10.0, init_unc_gain=0.1, conv_stem=False, **kwargs: Any):
        size, side = kwargs["image_size"], kwargs["patch_size"]
        image, patch = to_2tuple(size), to_2tuple(side)
        if any(length < own for length, own in zip(image, patch)):
            raise ValueError(f"vision_cfg.image_size {size} is below the patch_size {side}: enlarge the image")
        if conv_stem and (len(set(patch)) > 1 or any(length % patch[0] for length in image)):
            raise ValueError(f"conv_stem needs square patches that divide image_size {size}: got patch_size {side}")
        for key in ("attentional_pool", "patch_dropout"):
            if kwargs.get(key):
                remedy = "remove it, and use encode_image(x, keep=...)"
                raise ValueError(f"vision_cfg.{key} is not supported by towers with [UNC]: {remedy}")
        if kwargs.get("pool_type", "tok") not in ("tok", "avg"):
            raise ValueError(f"vision_cfg.pool_type is {kwargs['pool_type']!r}: choose tok ([CLS]) or avg (patches)")
        super().__init__(**kwargs)
        self.width = width = self.class_embedding.numel()
        self.head, self.form = None, form
        if conv_stem:
            self.conv1 = ConvStem(width, self.patch_size[0])
        self.unc_embedding = nn.Parameter(width**-0.5 * torch.randn(width))
        self.uncertainty_proj = LogVarianceHead(width, self.output_dim, init_unc_bias, init_unc_gain)
        learnt, rows = self.positional_embedding.requires_grad, self.positional_embedding.detach()
        row = width**-0.5 * torch.randn(1, width) if learnt else torch.zeros(1, width)
        self.positional_embedding = nn.Parameter(torch.cat([rows[:1], row, rows[1:]]), requires_grad=learnt)

    @property
    def num_patches(self) -> int:
        return self.grid_size[0] * self.grid_size[1]

    num_tokens = num_patches  # of the last tokens, without special ones

    def lock(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Freeze all except the last groups; the uncertainty branch belongs to the last one (the projections)."""
        super().lock(unlocked_groups, freeze_bn_stats)
        self.train_uncertainty(unlocked_groups != 0)

    def embed_patches(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return patch projections (B, N, width), or only of the patches `keep` (B, K): (B, K, width)."""
        if keep is None and (isinstance(self.conv1, ConvStem) or not x.is_cuda):  # cuDNN's takes 3% of a step
            return self.conv1(x).flatten(2).transpose(1, 2)
        if keep is not None and isinstance(self.conv1, ConvStem):
            tokens = self.conv1(blank_others(x, keep, self.grid_size, self.patch_size)).flatten(2).transpose(1, 2)
            return tokens.gather(1, keep.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        # stride = kernel: a linear map of each unfolded patch
        batch, (rows, columns), (height, width) = x.shape[0], self.grid_size, self.patch_size
        x = x[..., : rows * height, : columns * width]  # as the convolution, which ends with the last whole patch
        patches = x.reshape(batch, -1, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        sample = torch.arange(batch, device=x.device).unsqueeze(1)
        kept = patches.flatten(1, 2) if keep is None else patches[sample, keep // columns, keep % columns]
        return nn.functional.linear(kept.flatten(2), self.conv1.weight.flatten(1))

    def _embeds(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return tokens [CLS], [UNC], patches with positions (B, 2 + N or K, width) of images (B, 3, H, W)."""
        check_images(x, self.image_size, self.conv1.weight.device)
        if keep is not None:
            check_keep(keep, x.shape[0])
        x = self.embed_patches(x.to(self.conv1.weight.dtype), keep)
        positions = self.positional_embedding.to(x.dtype)
        place = positions[SPECIAL_TOKENS:] if keep is None else positions[SPECIAL_TOKENS + keep]
        learnt = self.class_embedding, self.unc_embedding
        tokens = [token.to(x.dtype).expand(x.shape[0], 1, -1) for token in learnt]
        special = torch.cat(tokens, dim=1) + positions[:SPECIAL_TOKENS]
        return self.ln_pre(torch.cat([special, x + place], dim=1))

    def pooled(self, x: Tensor) -> Tensor:
        """Return the normalised token that becomes the mean, (B, width) in float32, of tokens (B, 2 + N, width)."""
        if self.pool_type == "avg" and not self.final_ln_after_pool:
            return layer_norm(self.ln_post, x)[:, SPECIAL_TOKENS:].mean(dim=1)
        token = x[:, SPECIAL_TOKENS:].mean(dim=1) if self.pool_type == "avg" else x[:, 0]
        token = layer_norm(self.ln_post, token)
        return layer_norm(self.ln_post, token) if self.form == "released" else token

    def shown(self, x: Tensor, ids: Tensor | None = None) -> Tokens:
        """Return [CLS] and patches of x (B, 2 + N, width)."""
        return Tokens(x[:, SPECIAL_TOKENS:], pooled=x[:, 0])

    def gaussian(self, x: Tensor, normalize: bool = True) -> Gaussian:
        """Apply the heads to the last tokens x: N(L2norm(pooled @ proj), Linear(LayerNorm(UNC)))."""
        mean, unc = project(self.pooled(x), self.proj), layer_norm(self.ln_post, x[:, 1])
        mean = nn.functional.normalize(mean, dim=-1) if normalize else mean
        return Gaussian(mean, project(unc, self.uncertainty_proj))

    def forward(self, x: Tensor, keep: Tensor | None = None, normalize: bool = True) -> Gaussian:
        """Embed images as a Gaussian (B, D) in float32."""
        x, more = self.through_blocks(self._embeds(x, keep))
        z = self.gaussian(x, normalize)
        return z if self.head is None else self.head(self.shown(x), z, **more)


class ProbabilisticTextTransformer(Probabilistic, TextTransformer):
    """ProLIP's text tower: tokens, [UNC], [CLS] -> bidirectional transformer, LayerNorm -> N(L2norm(Linear(CLS)),
    Linear(UNC)), section 3.1; `positional_embedding` has [UNC] and [CLS] last.

    mask_padding: hide the padding at the end of a text from every token. form="released": compute the log variance from
    the projected mean, not from [UNC].
    """

    unc_name, unc_head_name = "unc_emb", "text_uncertainty_projection"
    stem = ("token_embedding", "cls_emb", "unc_emb", "positional_embedding")
    text_uncertainty_projection: LogVarianceHead

    def __init__(self, *, form="paper", mask_padding=False, init_unc_bias=-10.0, init_unc_gain=0.1, **kwargs: Any):
        needed = {"embed_cls": True, "no_causal_mask": True, "pool_type": "last", "proj_type": "linear"}
        for key, value in needed.items():
            if kwargs.setdefault(key, value) != value:
                raise ValueError(f"text_cfg.{key} is {kwargs[key]!r}, but ProLIP needs {value!r}: remove it")
        super().__init__(**kwargs)
        self.form, self.mask_padding = form, mask_padding
        self.unc_emb = nn.Parameter(0.01 * torch.randn(self.width))
        self.num_pos = self.context_length + SPECIAL_TOKENS
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(self.num_pos, self.width))
        inputs = self.output_dim if form == "released" else self.width
        self.head = None
        self.text_uncertainty_projection = LogVarianceHead(inputs, self.output_dim, init_unc_bias, init_unc_gain)

    def lock(self, unlocked_layers: int = 0, freeze_layer_norm: bool = True) -> None:
        """Freeze all except the last layers; the uncertainty branch belongs to the last one (the projection)."""
        super().lock(unlocked_layers, freeze_layer_norm)
        self.train_uncertainty(unlocked_layers != 0)

    def padding_mask(self, text: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask (B * heads, L + 2, L + 2): -inf for padding, else 0; [UNC] and [CLS] are never masked."""
        # only the pad ids at the end: the bundled BPE pads with 0, which is also the id of "!"
        place = torch.arange(text.shape[1], device=text.device)
        last = torch.where(text != self.pad_id, place, -1).amax(dim=1, keepdim=True)
        valid = nn.functional.pad(place <= last, (0, SPECIAL_TOKENS), value=True)
        hidden = torch.zeros(valid.shape, dtype=dtype, device=text.device).masked_fill(~valid, float("-inf"))
        length = valid.shape[1]
        return hidden[:, None, None].expand(-1, self.heads, length, -1).reshape(-1, length, length)

    def _embeds(self, text: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens, [UNC], [CLS] with positions (B, L + 2, width) of ids (B, L <= context), and any mask."""
        check_texts(text, self.context_length, self.token_embedding.weight.device)
        dtype = self.transformer.get_cast_dtype()
        x = self.token_embedding(text).to(dtype)
        special = [token.to(dtype).expand(x.shape[0], 1, -1) for token in (self.unc_emb, self.cls_emb)]
        positions = self.positional_embedding.to(dtype)
        positions = torch.cat([positions[: text.shape[1]], positions[-SPECIAL_TOKENS:]])
        mask = self.padding_mask(text, dtype) if self.mask_padding else None
        return torch.cat([x, *special], dim=1) + positions, mask

    def shown(self, x: Tensor, ids: Tensor | None = None) -> Tokens:
        """Return [CLS] and words of x (B, L + 2, width)."""
        valid = None if ids is None else own_words(ids, self.pad_id)
        return Tokens(x[:, :-SPECIAL_TOKENS], valid, pooled=x[:, -1])

    def gaussian(self, x: Tensor, normalize: bool = True) -> Gaussian:
        """Apply the heads to the last tokens x (B, L + 2, width)."""
        mean = project(layer_norm(self.ln_final, x[:, -1]), self.text_projection)
        unc = mean if self.form == "released" else layer_norm(self.ln_final, x[:, -2])
        unit = nn.functional.normalize(mean, dim=-1) if normalize else mean
        return Gaussian(unit, project(unc, self.text_uncertainty_projection))

    def forward(self, text: Tensor, normalize: bool = True) -> Gaussian:
        """Embed ids (B, L) as a Gaussian (B, D) in float32."""
        x, mask = self._embeds(text)
        x, more = self.through_blocks(x, mask, text)
        z = self.gaussian(x, normalize)
        return z if self.head is None else self.head(self.shown(x, text), z, text, **more)
