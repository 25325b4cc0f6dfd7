"""Augmentation of token ids on the device: tokens that become [MASK], others, or are left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prolip.random import Draws, Stream


class TokenAugment(nn.Module):
    """Each token of a text becomes [MASK], any other token of the vocabulary, or is left out, by three `shares`.

    These are 10%, 2% and 8% in PCME++'s code (VSE-infinity's, Chen et al. 2021). words: (V,) bool, the ids of text:
    padding and special tokens stay and are never put in, and at least one word of every text stays.
    """

    words: Tensor
    ids: Tensor

    def __init__(self, shares: Any, words: Tensor, *, mask_id: int | None, pad_id: int, draws: Draws | None = None):
        super().__init__()
        if shares[0] and mask_id is None:
            what = f"text_mask is {shares[0]} and the model's vocabulary has no [MASK]"
            raise ValueError(f"{what}: give none, or a prolip_cfg.mask_token_id in the model's config")
        self.shares, self.mask_id, self.pad_id = shares, mask_id, pad_id
        self.draws = draws or Draws()
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("ids", words.nonzero()[:, 0], persistent=False)

    @classmethod
    def for_model(cls, model: Any, tokenizer: Any, shares: tuple[float, float, float], draws: Draws) -> TokenAugment:
        """Build the augmentation for a model's texts: vocabulary, padding, [MASK] or an unused id in its place."""
        own = model.mask_token_id
        mask_id = getattr(tokenizer, "unseen_id", None) if own is None else own
        special = {model.pad_token_id, mask_id, *model.special_token_ids, *getattr(tokenizer, "all_special_ids", ())}
        words = torch.zeros(model.vocab_size, dtype=torch.bool)
        words[: getattr(tokenizer, "vocab_size", model.vocab_size)] = True
        words[list(special - {None})] = False
        return cls(shares, words, mask_id=mask_id, pad_id=model.pad_token_id, draws=draws)

    def forward(self, text: Tensor, step: int) -> Tensor:
        """Return augmented texts. text: (B, L) or (B, C, L) int64, the local rows of this step."""
        rows, tokens = len(text), text[0].numel()
        noise = self.draws.uniform(Stream.TOKENS, step, self.draws.rows(rows, text.device), 2 * tokens)
        draws, others = (half.reshape(-1, text.shape[-1]) for half in noise.split(tokens, dim=1))
        others = self.ids[(others * len(self.ids)).long().clamp_(max=len(self.ids) - 1)]
        return self.change(text.reshape(-1, text.shape[-1]), draws, others).view_as(text)

    def change(self, text: Tensor, draws: Tensor, others: Tensor) -> Tensor:
        """text, draws, others: (N, L), others the ids to put in. A token with draw u is masked for u < m, exchanged for
        u < m + r, left out for u < m + r + d; the one with the largest draw stays. No row loop, no host sync.
        """
        mask, random, delete = self.shares
        movable = self.words[text]
        column = torch.arange(text.shape[1], device=text.device)
        spared = column == draws.masked_fill(~movable, -1.0).argmax(dim=1, keepdim=True)
        draws = draws.masked_fill(~movable | spared, 2.0)  # above every uniform draw
        if self.mask_id is not None:
            text = text.masked_fill(draws < mask, self.mask_id)
        text = torch.where((draws >= mask) & (draws < mask + random), others, text)
        gone = (draws >= mask + random) & (draws < mask + random + delete)
        order = gone.to(torch.uint8).argsort(dim=1, stable=True)
        return text.gather(1, order).masked_fill(column >= text.shape[1] - gone.sum(dim=1, keepdim=True), self.pad_id)
