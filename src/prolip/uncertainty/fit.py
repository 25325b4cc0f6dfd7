"""Fit the ambiguity of texts and images to matched pairs of a frozen modelin closed form, in seconds on a CPU.

`prolip.uncertainty.targets` computes the target nats of texts; this module fits heads, score, novelty and readings.
"""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from prolip.embeddings import Pairs, check_enough
from prolip.gaussian import without_autocast
from prolip.scores import LEAST_SCALE, Side, TrueMatchScore
from prolip.uncertainty.doubt import Doubt, fit_doubt, pick_cases
from prolip.uncertainty.heads import ROWS, AmbiguityHead, Parts, VarianceHead, in_blocks, token_features
from prolip.uncertainty.novelty import FEWEST, DegenerateFeatures, Novelty, Widths, fit_novelty
from prolip.uncertainty.readings import GENERAL, SHARES, FittedReader, Readings, reader_of
from prolip.uncertainty.targets import MOST, choose_bank, marginal, match_probabilities, sample_rows, text_target

#: Ridge of the standardised features, in samples; noise over signal of the kernel, for a text with the median number
#: of matched images.
RIDGE, NOISE = 1.0, 0.8
WIDTH = 0.1  # width of the kernel over the median distance 1 - cosine between nearest texts
LEAST_LENGTH = 0.1  # least nats of a target
FEWEST_FITTED = 3  # fewest images of a general text
#: One text in HELD_OUT is held out to estimate the error on unknown texts; stored quantiles of that error.
HELD_OUT, NINE_TENTHS = 5, (0.05, 0.95)
#: Images, and texts that match none of them, whose pairs fit the match probability; most steps, last gradient.
MATCH_IMAGES, MATCH_OTHERS, MATCH_STEPS, MATCH_GRADIENT = 512, 2048, 100, 1e-12


class Fitted(NamedTuple):
    """Heads for the variances of images and texts, their score, novelty of both, and readings."""

    image: VarianceHead
    text: VarianceHead
    score: TrueMatchScore
    novelty: Novelty | None
    text_novelty: Novelty | None
    readings: Readings | None = None

    @property
    def reader(self) -> FittedReader | None:
        return reader_of(self)


def fit_variances(  # noqa: PLR0913, PLR0917 (sizes of the fit)
    pairs: Pairs, bank=2048, centres=2048, vocabulary=0, novelty_centres=512, seed=0, readings=2048
) -> Fitted:
    """Fit variances of images and texts, the score, novelty and readings to pairs of a frozen model, on the CPU.

    bank, centres, novelty_centres, readings: as in `FitOptions`; vocabulary: of the model's tokenizer, if the pairs
    have `text_ids`; else texts are compared with a bank of images. Equal arguments give equal bits. ValueError for
    fewer than 30 pairs, and for a non-finite result.
    """
    check_enough(len(pairs))
    dim, counts = pairs.image.shape[1], (len(pairs.image), len(pairs.text))
    own = {"vocabulary": vocabulary} if vocabulary else {"bank": bank}
    target, often = text_target(pairs, seed)
    text_parts = Parts(dim=dim, centres=centres, **own)
    text = as_variance(fit_text(pairs, text_parts, target, often, seed), pairs.scale, counts[0])
    swapped, image_parts = pairs.swapped, Parts(dim=dim, bank=bank)
    image_target = -match_probabilities(swapped, seed).log()
    image = as_variance(fit_text(swapped, image_parts, image_target, seed=seed), pairs.scale, counts[1])
    trace = text.trace(pairs.text.float(), pairs.text_ids if vocabulary else None)
    score = fit_true_match(pairs, trace, seed)
    of_images, of_texts = (fit_novelty_of(pairs, side, novelty_centres, seed) for side in get_args(Side))
    fitted = Fitted(image, text, score, of_images, of_texts)
    if readings:
        bounds = text_bounds(pairs, text.ambiguity, target, often, seed)
        kept = fit_readings(pairs, trace, often, readings, bounds, seed)
        fitted = fitted._replace(readings=kept)
        if (found := fit_doubt_of(pairs, fitted, trace, seed)) is not None:
            kept.doubt_numbers.copy_(torch.tensor(found.numbers, dtype=torch.float64))
            score.doubt = found
    modules = {name: part for name, part in fitted._asdict().items() if isinstance(part, torch.nn.Module)}
    numbers = {f"{part}.{name}": x for part, module in modules.items() for name, x in module.state_dict().items()}
    numbers |= {f"score.{name}": torch.tensor(x) for name, x in score.settings().items()}
    numbers |= {"trace of texts": trace, "trace of images": image.trace(pairs.image.float())}
    if lost := [name for name, x in numbers.items() if not x.isfinite().all()]:
        named = ", ".join(lost[:3])
        raise ValueError(f"the fit has numbers that are not finite ({named}): give more pairs, or more varied ones")
    return fitted


def fit_novelty_of(pairs: Pairs, side: Side, centres: int, seed: int = 0) -> Novelty | None:
    """Fit the novelty of one side of the pairs; images with the same most frequent text form a class."""
    mean, first, rows = getattr(pairs, side), getattr(pairs, f"{side}_first"), getattr(pairs, f"{side}_first_of")
    if first is None or not centres or len(first) < FEWEST:
        return None
    classes = pairs.likeliest_text if side == "image" else None
    if rows is not None:
        mean, classes = mean[rows], None if classes is None else classes[rows]
    widths = Widths(mean=mean.shape[1], first=first.shape[1], centres=centres)
    try:
        return fit_novelty(mean, first, widths, classes, seed)
    except (DegenerateFeatures, torch.linalg.LinAlgError):
        return None


def fit_text(pairs: Pairs, parts: Parts, target: Tensor, often: Tensor | None = None, seed: int = 0) -> AmbiguityHead:
    """Fit the head of texts (of images for swapped pairs): ridge regression on the features, and a Gaussian process on
    means and words for the residual. target: (M,) nats, NaN: unknown; often: (M,) known matches.
    """
    head = AmbiguityHead(parts)
    rows = target.isfinite().nonzero().squeeze(1)
    mean = (pairs.text if len(rows) == len(pairs.text) else pairs.text[rows]).float()
    if parts.bank:
        chosen, log_weight = choose_bank(pairs.swapped, parts.bank, seed)
        head.bank[: len(chosen)] = pairs.image[chosen].float()
        head.bank_weight[: len(chosen)] = log_weight.exp()
        head.bank_scale.fill_(pairs.scale)
    ids, learnt = None, None
    if parts.vocabulary:
        ids, learnt = _count_tokens(head, pairs, rows)
        ids = ids[rows]
    plain = in_blocks(head.features, mean, ids)
    if learnt is not None:
        learnt = torch.cat([plain[:, : plain.shape[1] - learnt.shape[1]], learnt], 1)
    wanted = target[rows].clamp(min=LEAST_LENGTH).log()
    head.offset.fill_(wanted.mean().item())
    if parts.features:  # ridge regression on standardised features; constant features get no weight
        x = (plain if learnt is None else learnt).double()
        middle, std = x.mean(0), x.std(0, correction=0)
        varies = std > 1e-6 * middle.abs().clamp(min=1e-6)
        std = torch.where(varies, std, torch.ones_like(std))
        z = (x - middle) / std * varies
        ridge = z.T @ z + RIDGE * torch.eye(z.shape[1], dtype=z.dtype)
        head.feature_mean.copy_(middle)
        head.feature_std.copy_(std)
        head.weight.copy_(torch.linalg.solve(ridge, z.T @ (wanted - wanted.mean())) * varies)
    if parts.centres:
        matches = torch.ones_like(wanted) if often is None else often[rows]
        _fit_kernel(head, mean, ids, wanted - head.linear(plain).double(), matches, seed)
    return head


def text_bounds(pairs: Pairs, head: AmbiguityHead, target: Tensor, often: Tensor, seed: int = 0) -> tuple[float, ...]:
    """Return 5% and 95% quantiles of target minus nats: of texts in the fit, then of texts left out of a second fit."""
    own = target.isfinite().nonzero().squeeze(1)
    own = sample_rows(own, MOST, seed)
    apart = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(seed)) % HELD_OUT == 0]
    most, inside = math.log(len(pairs.image)), target.clone()
    if len(apart) < 2:
        return -most, most, -most, most
    inside[apart] = torch.nan
    if len(own) < len(target):
        inside[~torch.isin(torch.arange(len(target)), own)] = torch.nan
    without, out = fit_text(pairs, head.parts, inside, often, seed), list[float]()
    for one, rows in ((head, own), (without, apart)):
        ids = None if pairs.text_ids is None else pairs.text_ids[rows]
        nats = in_blocks(one, pairs.text[rows].float(), ids).double().exp().clamp(max=most)
        out += (target[rows] - nats).quantile(torch.tensor(NINE_TENTHS, dtype=torch.float64)).tolist()
    return tuple(out)


def fit_readings(
    pairs: Pairs, trace: Tensor, often: Tensor, most: int, bounds: tuple[float, ...], seed: int = 0
) -> Readings:
    """Choose general texts by traces and known matches, (M,) each, and `most` images with their known texts."""
    readings = Readings(pairs.image.shape[1], most)
    share = (trace * (pairs.scale / 2)).exp() / len(pairs.image)
    least = max(SHARES[0], FEWEST_FITTED / len(pairs.image))
    general = ((share >= least) & (share <= SHARES[1])).nonzero().squeeze(1)
    general = general[often[general].argsort(descending=True, stable=True)][:GENERAL]
    images = sample_rows(torch.arange(len(pairs.image)), most, seed).sort().values
    kept = torch.isin(pairs.text_of, general) & torch.isin(pairs.image_of, images)
    column = torch.zeros(len(pairs.text), dtype=torch.int64)
    column[general] = torch.arange(len(general))
    readings.general[: len(general)] = pairs.text[general].float()
    readings.images[: len(images)] = pairs.image[images].float()
    readings.true[torch.searchsorted(images, pairs.image_of[kept]), column[pairs.text_of[kept]]] = True
    readings.bounds.copy_(torch.tensor(bounds))
    return readings


def fit_doubt_of(pairs: Pairs, fitted: Fitted, trace: Tensor, seed: int = 0) -> Doubt | None:
    """Fit doubt to changed images and their originals, with traces (M,); None without novelty."""
    reader, score, rows = fitted.reader, fitted.score, pairs.changed_of
    if pairs.changed is None or rows is None or not len(rows) or reader is None or reader.novelty is None:
        return None
    kinds = torch.cat([pairs.image[rows].unsqueeze(0), pairs.changed]).float()
    texts, represents = texts_of(pairs, rows, seed)
    cosine = torch.stack([kind @ pairs.text[texts].float().T for kind in kinds])
    logit = score.logit(cosine + score.trace_weight * trace[texts])
    assert logit is not None
    match = torch.isin(rows.unsqueeze(1) * len(pairs.text) + texts, pairs.image_of * len(pairs.text) + pairs.text_of)
    share = (trace[texts] / score.unit).exp().div(len(pairs.image)).clamp(max=1)
    evidence = [found for kind in kinds if (found := reader.evidence(kind)) is not None]
    return fit_doubt(pick_cases(logit, share, match, evidence, represents.float(), seed))


def as_variance(head: AmbiguityHead, scale: float, rows: int = 0) -> VarianceHead:
    found = VarianceHead(head.parts)
    found.ambiguity.load_state_dict(head.state_dict())
    found.log_unit.fill_(math.log(2 / scale))
    found.rows.fill_(rows)
    return found


def _count_tokens(head: AmbiguityHead, pairs: Pairs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Fill the head's rarities; return all ids, and the features of `rows`, each without the count of its own text."""
    if pairs.text_ids is None:
        raise ValueError("the head reads tokens, and the pairs have no text_ids: keep them, or set vocabulary=0")
    ids, vocabulary = pairs.text_ids, head.parts.vocabulary
    if ids.amax() >= vocabulary or ids.amin() < 0:
        raise ValueError(f"text_ids go from {ids.amin()} to {ids.amax()}, and the vocabulary has {vocabulary} tokens")
    weight = marginal(pairs.text_of, pairs.weights, len(pairs.text))[rows]
    order = ids[rows].sort(dim=1, stable=True)
    new = torch.ones_like(ids[rows], dtype=torch.bool)
    new[:, 1:] = order.values[:, 1:] != order.values[:, :-1]
    first = torch.zeros_like(new).scatter(1, order.indices, new)  # occurrence of each token in its row
    count = torch.zeros(vocabulary)
    count.index_add_(0, ids[rows].flatten(), (weight.unsqueeze(1) * first).flatten())
    whole = weight.sum() + 1
    head.rarity.copy_((whole / (count + 1)).log())
    without = (count[ids[rows]] - weight.unsqueeze(1)).clamp(min=0)
    return ids, token_features(ids[rows], (whole / (without + 1)).log(), head.rarity.amax())


def _fit_kernel(  # noqa: PLR0913, PLR0917
    head: AmbiguityHead, mean: Tensor, ids: Tensor | None, rest: Tensor, often: Tensor, seed: int
) -> None:
    """Fit a Gaussian process on means (M, D) and words to the residual (M,); its noise falls with the matches (M,).

    With more texts than centres, the texts with most matches are inducing points (Nystroem),
    (K_cm S^-1 K_mc + K_cc) u = K_cm S^-1 rest with the noise S.
    """
    count = min(head.parts.centres, len(mean))
    mixed = torch.randperm(len(mean), generator=torch.Generator().manual_seed(seed))
    chosen = mixed[often[mixed].argsort(descending=True, stable=True)][:count]
    if count == len(mean):
        chosen = torch.arange(count)
    head.centres[:count] = mean[chosen]
    own = None if ids is None else ids[chosen]
    if head.parts.signs:
        head.words[:count] = in_blocks(lambda _, x: head.signs(x), mean[chosen], own)
    head.kernel_width.fill_(max(WIDTH * nearest_distance(mean[chosen]), 1e-4))
    noise = NOISE * often.median() / often
    among = in_blocks(head.kernel, mean[chosen], own)[:, :count].double()
    if count == len(mean):
        left, right = among + noise.diag(), rest
    else:
        left, right = among + 1e-6 * torch.eye(count, dtype=among.dtype), torch.zeros_like(among[0])
        for rows in torch.arange(len(mean)).split(ROWS):
            block = head.kernel(mean[rows], None if ids is None else ids[rows])[:, :count].double()
            weighted = (block / noise[rows].unsqueeze(1)).T
            left += weighted @ block
            right += weighted @ rest[rows]
    head.kernel_weight[:count] = torch.linalg.solve(left, right).float()


def nearest_distance(mean: Tensor, most: int = 2048) -> float:
    """Return the median over rows (at most `most`) of 1 - cosine to the nearest other row that is not a copy."""
    rows = mean[torch.linspace(0, len(mean) - 1, min(len(mean), most)).long().unique()]
    cosines = rows @ rows.T
    cosines.fill_diagonal_(-1.0)
    return float((1 - cosines.masked_fill(cosines > 1 - 1e-5, -1.0).amax(1)).median())


def fit_true_match(pairs: Pairs, text_trace: Tensor, seed: int = 0) -> TrueMatchScore:
    """Fit logistic regression of "is a pair" on cosine and trace of the text (M,), over some images with all their
    texts and a weighted sample of other texts. Uninformative cosines give both no weight.
    """
    from scipy.optimize import minimize

    images = sample_rows(torch.arange(len(pairs.image)), MATCH_IMAGES, seed)
    texts, represents = texts_of(pairs, images, seed)
    matched = torch.isin(pairs.image_of, images)
    with without_autocast(pairs.image.device):
        cosine = pairs.image[images].float() @ pairs.text[texts].float().T
    trace = text_trace[texts].double()
    middle, width = float(trace.mean()), float(trace.std(correction=0))
    width = width if width > 1e-6 * middle else math.inf
    rows = pairs.image_of[matched] * len(pairs.text) + pairs.text_of[matched]
    label = torch.isin(images.unsqueeze(1) * len(pairs.text) + texts, rows).double()
    inputs = torch.broadcast_tensors(cosine.double(), (trace - middle) / width, torch.ones_like(trace))
    weight = (represents / (represents.sum() * len(images))).expand(label.shape).flatten()
    features, label, start = torch.stack(inputs).flatten(1), label.flatten(), [pairs.scale, 0.0, -pairs.scale]

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        z = torch.from_numpy(theta) @ features
        value = weight.dot(torch.nn.functional.softplus(z) - label * z)
        return value.item(), (features @ (z.sigmoid_().sub_(label).mul_(weight))).numpy()

    def curvature(theta: np.ndarray) -> np.ndarray:
        p = (torch.from_numpy(theta) @ features).sigmoid_()
        return (features * (weight * p * (1 - p)) @ features.T).numpy()

    limits = {"gtol": MATCH_GRADIENT, "maxiter": MATCH_STEPS}
    found = minimize(loss, np.array(start), method="trust-exact", jac=True, hess=curvature, options=limits)
    scale, by_trace, bias = map(float, found.x)
    by_trace /= width
    trace_weight, bias = by_trace / max(scale, LEAST_SCALE), bias - by_trace * middle
    if scale <= LEAST_SCALE:
        scale, trace_weight, bias = LEAST_SCALE, 0.0, label.dot(weight).logit(1e-9).item()
    return TrueMatchScore(trace_weight, 2 / pairs.scale, len(pairs.image), len(pairs.text), scale, bias)


def texts_of(pairs: Pairs, images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return all texts of these images and a sample of the others, and the number of texts each represents, float64."""
    own = pairs.text_of[torch.isin(pairs.image_of, images)].unique()
    rest = torch.arange(len(pairs.text))[~torch.isin(torch.arange(len(pairs.text)), own)]
    others = sample_rows(rest, MATCH_OTHERS, seed)
    represents = torch.ones(len(own) + len(others), dtype=torch.float64)
    represents[len(own) :] = len(rest) / max(len(others), 1)
    return torch.cat([own, others]), represents
