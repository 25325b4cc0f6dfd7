"""Masked views: random patch subsets and [MASK]ed texts, ProLIP section 3.3, functions of uniform noise."""
from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

_WORD = 0xFFFF_FFFF_FFFF_FFFF


def count_masked_rows(batch_size: int, fraction: float) -> int:
    """M = max(1, floor(fraction * B)), the leading rows of a local batch that get a masked view."""
    return max(1, int(fraction * batch_size + 1e-9))  # 0.29 * 100 is 28.999...: a row too few without the margin


def count_kept_patches(patches: int, ratio: float) -> int:
    """K = max(1, round((1 - ratio) * P)) patches stay of P when `ratio` of them are dropped."""
    return max(1, round((1 - ratio) * patches))


def keep_patches(noise: Tensor, keep: int) -> Tensor:
    """A uniformly random subset of patches per sample: the places of the `keep` smallest draws, ascending.

    noise: (M, P), uniform and independent; returns (M, K) int64 with K = `keep`.
    """
    if noise.ndim != 2 or not 1 <= keep <= noise.shape[1]:
        raise ValueError(f"cannot keep {keep} patches with noise {tuple(noise.shape)}: give (M, P) and 1 <= keep <= P")
    return noise.topk(keep, dim=1, largest=False, sorted=False).indices.sort(dim=1).values


def mask_text(
    text: Tensor, noise: Tensor, mask_id: int, pad_id: int, special_ids: Collection[int] = (), ratio: float = 0.75
) -> Tensor:
    """Replace every maskable token by [MASK] with probability `ratio`, and at least one per text that has any.

    Maskable is what is neither padding nor special: start and end tokens say nothing, masking them hides nothing.
    SigLIP's tokenizers pad with the end token, so their end token is excluded as padding. The forced token is the one
    with the smallest draw, which is masked anyhow unless all draws are above `ratio`. No row loop, no host sync.

    text: (M, L) int64; noise: (M, L), uniform and independent; returns (M, L).
    """
    if noise.shape != text.shape or text.ndim != 2:
        raise ValueError(f"noise {tuple(noise.shape)} does not fit texts {tuple(text.shape)}: give two (M, L) tensors")
    maskable = text != pad_id
    for special in special_ids:
        maskable = maskable & (text != special)
    draws = noise.masked_fill(~maskable, 2.0)  # above every uniform draw
    column = torch.arange(text.shape[1], device=text.device)
    forced = column == draws.argmin(dim=1, keepdim=True)
    return text.masked_fill(maskable & ((draws < ratio) | forced), mask_id)


#: Who draws random numbers within a step; two users of one stream would draw the same ones.
IMAGE_STREAM, TEXT_STREAM, AUGMENT_STREAM, CUTOUT_STREAM, TOKEN_STREAM = 1, 2, 3, 4, 5


def draw_noise(
    rows: int, cols: int, seed: int, step: int, stream: int, rank: int, world_size: int, device: torch.device | str
) -> Tensor:
    """This rank's rows [rank::W] of uniform noise that is drawn for all `rows` global rows: (rows // W, cols) float32.

    The numbers are a function of (seed, step, stream), so W ranks make together what one process makes; `stream` tells
    apart the uses within a step. They are drawn on `device`, without a host sync: all ranks need the same kind of
    device, and a CPU draws other numbers than a GPU. Raises ValueError if the rows do not divide among the ranks.
    """
    if rows % world_size:
        raise ValueError(f"{rows} masked rows do not divide among {world_size} ranks: give all the same batch size")
    generator = torch.Generator(device=device).manual_seed(mix_seed(seed, step, stream))
    return torch.rand((rows, cols), generator=generator, device=device)[rank::world_size]


def mix_seed(*parts: int) -> int:
    """One well-mixed 63-bit seed from several integers, each absorbed by a round of splitmix64 (Steele et al. 2014).

    A plain sum would give step 1 of seed 0 the noise of step 0 of seed 1; torch's CPU generator, too, looks only at
    the low 32 bits of its seed, so these have to depend on everything.
    """
    state = 0
    for part in parts:
        state = (state + (part & _WORD) + 0x9E37_79B9_7F4A_7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D0_49BB_1331_11EB) & _WORD
        state ^= state >> 31
    return state >> 1
