"""Nats of ambiguity of texts, from matched pairs of a frozen model: the code lengths that `fit` learns from.

r_ij = -log p(i|j), p(i|j) = exp(a m_i.m_j) w_i / sum_k exp(a m_k.m_j) w_k: at the optimum of the contrastive loss, its
mean over the images that match the text is log n if the text matches n equally likely ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prolip.embeddings import Pairs
from prolip.gaussian import without_autocast

MOST, SAMPLE = 8192, 4096  # rows of the other side in a code length: all of them up to MOST, else a sample
BLOCK = 1 << 22  # numbers in a block of logits
NEIGHBOURS, ASKED = 3, 4096  # neighbours of a matched image that reveal missing labels; images to inspect


def text_target(pairs: Pairs, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the nats of ambiguity of each text, and its number c of distinct matched images, (M,) float64 each.

    The nats are log c + R (log n - log c). log n is the minimum of -log p, p the mean probability of its matches, the
    entropy of p(i|j), and log(c / q), q the share of its matches' NEIGHBOURS nearest images that also have it.
    """
    of_text, of_image = torch.stack([pairs.text_of, pairs.image_of]).unique(dim=1)
    count = of_text.bincount(minlength=len(pairs.text)).double()
    probability = match_probabilities(pairs, seed)
    text, image, hits = neighbours_have(pairs, of_text, of_image, seed)
    q = marginal(text, hits.mean(1), len(count)) / text.bincount(minlength=len(count)).clamp(min=1)
    most = torch.minimum(torch.minimum(-probability.log(), entropies(pairs, seed)), (count / q).log())
    more = missing_labels(image, hits, count[text] > 1) * (most - count.log()).clamp(min=0)
    target = (count.log() + more).clamp(max=math.log(len(pairs.image)))
    return target.where(probability.isfinite(), torch.nan), count


def missing_labels(image: Tensor, hits: Tensor, again: Tensor) -> float:
    """Return R of `text_target`: 0 if images seem to have all texts that match them, 1 if few do.

    If a neighbour lacks a text at random, it shares as many other texts with the image as one that has the text: R is
    the ratio of these two shares. again: (P,) bool, True if two or more images have the text.
    """
    row, hits = image[again].unique(return_inverse=True)[1], hits[again]
    others = row.bincount()[row].unsqueeze(1) - 1
    shared = hits.new_zeros(len(row), hits.shape[1]).index_add(0, row, hits)[row] - hits
    known, share = (others > 0).expand_as(hits), shared / others.clamp(min=1)
    having, lacking = (share[known & (hits == x)].mean() for x in (1, 0))
    ratio = float((lacking / having).nan_to_num(1.0).clamp(max=1))
    return 1 - (1 - ratio) * float(known[:, 0].sum()) / len(image)


def entropies(pairs: Pairs, seed: int = 0) -> Tensor:
    """Return the entropy of p(i|j) of every text, (M,) nats, from a sample of the images above MOST."""
    rows, log_weight = choose_bank(pairs.swapped, len(pairs.image) if len(pairs.image) <= MOST else SAMPLE, seed)
    keys, stands_for = pairs.image[rows].float(), len(pairs.image_of.unique()) / len(rows)
    found = torch.empty(len(pairs.text), dtype=torch.float64)
    with without_autocast(keys.device):
        for part in torch.arange(len(pairs.text)).split(max(1, BLOCK // len(keys))):
            logits = pairs.scale * pairs.text[part].float() @ keys.T + log_weight
            log_p = logits.log_softmax(1)
            found[part] = -(log_p.exp() * log_p).sum(1).double()
    return found + math.log(stands_for)


def neighbours_have(pairs: Pairs, of_text: Tensor, of_image: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return text and image of the P pairs of ASKED images, (P,), and which NEIGHBOURS of the image also have the text,
    (P, NEIGHBOURS) float64. of_text, of_image: all distinct pairs.
    """
    asked = sample_rows(of_image.unique(), ASKED, seed).sort().values
    near = torch.empty(len(asked), NEIGHBOURS, dtype=torch.int64)
    count = min(NEIGHBOURS, len(pairs.image) - 1)
    with without_autocast(pairs.image.device):
        for part in torch.arange(len(asked)).split(max(1, BLOCK // len(pairs.image))):
            cosine = pairs.image[asked[part]].float() @ pairs.image.float().T
            cosine[torch.arange(len(part)), asked[part]] = -torch.inf
            near[part, :count] = cosine.topk(count, 1).indices
    near[:, count:] = asked.unsqueeze(1)
    kept = torch.isin(of_image, asked)
    text, image = of_text[kept], of_image[kept]
    other = near[torch.searchsorted(asked, image)] * len(pairs.text) + text.unsqueeze(1)
    return text, image, torch.isin(other, of_image * len(pairs.text) + of_text).double()


def match_probabilities(pairs: Pairs, seed: int = 0) -> Tensor:
    """Return the mean probability exp(-r_ij) of every text's matches among all images, (M,) float64, or NaN."""
    rows, log_weight = choose_bank(pairs.swapped, len(pairs.image) if len(pairs.image) <= MOST else SAMPLE, seed)
    of_image = marginal(pairs.image_of, pairs.weights, len(pairs.image)).log()
    found, step = torch.empty(len(pairs), dtype=torch.float64), max(1, BLOCK // len(rows))
    keys = pairs.image[rows].float()
    with without_autocast(keys.device):
        for part in torch.arange(len(pairs)).split(step):
            image, text = pairs.image_of[part], pairs.text[pairs.text_of[part]].float()
            others = pairs.scale * text @ keys.T + log_weight
            others.masked_fill_(image.unsqueeze(1) == rows, -torch.inf)
            own = pairs.scale * (text * pairs.image[image].float()).sum(1) + of_image[image]
            found[part] = torch.nn.functional.softplus(others.logsumexp(1) - own).double()
    weight = pairs.weights.double()
    total = marginal(pairs.text_of, weight, len(pairs.text))
    return marginal(pairs.text_of, weight * (-found).exp(), len(pairs.text)) / total


def choose_bank(pairs: Pairs, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return at most `most` texts with a pair, a sample of more, (K,), and log weights that sum up to all."""
    weight = marginal(pairs.text_of, pairs.weights, len(pairs.text))
    rows = weight.nonzero().squeeze(1)
    rows = sample_rows(rows, most, seed).sort().values
    kept = weight[rows]
    return rows, (kept * (weight.sum() / kept.sum())).log()


def sample_rows(rows: Tensor, most: int, seed: int) -> Tensor:
    """Return at most `most` of the rows, in random order if there are more."""
    if len(rows) <= most:
        return rows
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:most]]


def marginal(rows: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return the sum of the weights of each row's pairs, (count,)."""
    return torch.zeros(count, dtype=weight.dtype).index_add(0, rows, weight)
