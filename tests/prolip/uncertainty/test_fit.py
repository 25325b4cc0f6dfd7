"""Variances from matched pairs: code lengths against loops, known ambiguity found again, the logit of a true match."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from ambiguous_pairs import FITTED, ambiguous_world, few, points
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression

from prolip.embeddings import Pairs
from prolip.scores import LEAST_SCALE, TrueMatchScore
from prolip.uncertainty import fit, targets
from prolip.uncertainty.fit import fit_text, fit_true_match, fit_variances
from prolip.uncertainty.heads import Parts
from prolip.uncertainty.novelty import Widths
from prolip.uncertainty.targets import choose_bank, match_probabilities, text_target


@pytest.fixture(scope="module")
def world():
    return ambiguous_world()


def weighted() -> Pairs:
    """Twelve pairs of eight images and five texts; one of either has none."""
    g = torch.Generator().manual_seed(3)
    return Pairs(
        image=points(9, 4),
        text=points(6, 4, seed=1),
        image_of=torch.randint(8, (12,), generator=g),
        text_of=torch.cat([torch.arange(5), torch.randint(5, (7,), generator=g)]),
        scale=6.0,
        weight=torch.rand(12, generator=g) + 0.1,
    )


def by_loop(pairs: Pairs) -> np.ndarray:
    """Mean code length and probability of every text's pairs, in plain float64."""
    logits = (pairs.scale * pairs.image.double() @ pairs.text.double().T).numpy()
    of_image = np.zeros(len(pairs.image))
    for i, w in zip(pairs.image_of, pairs.weights):
        of_image[i] += w
    found = []
    for j in range(len(pairs.text)):
        p = of_image * np.exp(logits[:, j])
        mine = [(float(w), p[i] / p.sum()) for i, t, w in zip(pairs.image_of, pairs.text_of, pairs.weights) if t == j]
        total = sum(w for w, _ in mine)
        found.append(sum(w * p for w, p in mine) / np.float64(total))
    return np.array(found)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_match_probabilities_are_those_of_a_loop_for_any_blocks(monkeypatch):
    pairs = weighted()
    for block in (1 << 20, 20):
        monkeypatch.setattr(targets, "BLOCK", block)
        found = match_probabilities(pairs)
        np.testing.assert_allclose(found.numpy(), by_loop(pairs), rtol=1e-5)
    assert math.isnan(found[5])  # a text without a pair


def test_a_bank_has_the_weight_of_all_and_only_what_has_a_pair():
    pairs = weighted()
    every = choose_bank(pairs, 100, seed=0)
    assert every[0].tolist() == [0, 1, 2, 3, 4]
    some = choose_bank(pairs, 3, seed=0)
    assert len(some[0]) == 3
    for _, log_weight in (every, some):
        assert log_weight.exp().sum().item() == pytest.approx(pairs.weights.sum().item(), rel=1e-5)


def test_the_counts_that_the_regression_learns_from_leave_out_the_text_itself():
    """Texts of one word that nothing else has look, while learning, as a new text with a new word will look."""
    ids = torch.tensor([[1], [2], [3], [3], [4], [5]])
    pairs = replace(few(6), text_ids=ids)
    head = fit.AmbiguityHead(Parts(dim=6, vocabulary=7))
    _, learnt = fit._count_tokens(head, pairs, torch.arange(6))
    plain = head.features(pairs.text, ids)
    never = math.log(7.0)
    assert learnt[0, 0].item() == pytest.approx(never) and plain[0, 0].item() == pytest.approx(math.log(7 / 2))
    assert learnt[3, 0].item() == pytest.approx(math.log(7 / 2)) and head.rarity[6].item() == pytest.approx(never)


def target_by_loop(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Compute `text_target` image by image and text by text."""
    image, text = pairs.image.double().numpy(), pairs.text.double().numpy()
    of_image = np.bincount(pairs.image_of, weights=pairs.weights, minlength=len(image))
    given = {(int(i), int(j)) for i, j in zip(pairs.image_of, pairs.text_of)}
    near = {i: [k for k in (-image @ image[i]).argsort(kind="stable") if k != i][:3] for i in {i for i, _ in given}}
    probability = by_loop(pairs)
    missing = missing_by_loop(given, near)
    target, count = [], []
    for j in range(len(text)):
        own = [i for i, k in given if k == j]
        p = of_image * np.exp(pairs.scale * image @ text[j])
        p = p[p > 0] / p.sum()
        share = np.mean([(k, j) in given for i in own for k in near[i]]) if own else 0
        most = min(-math.log(probability[j]), -(p * np.log(p)).sum(), math.log(len(own) / share) if share else math.inf)
        nats = math.log(len(own)) + missing * max(most - math.log(len(own)), 0) if own else math.nan
        target.append(min(nats, math.log(len(image))))
        count.append(len(own))
    return np.array(target), np.array(count)


def missing_by_loop(given: set[tuple[int, int]], near: dict[int, list[int]]) -> float:
    """Compute `missing_labels` neighbour by neighbour."""
    often = Counter(j for _, j in given)
    shares: dict[bool, list[float]] = {True: [], False: []}
    said = 0
    for i, j in given:
        others = {k for n, k in given if n == i and k != j and often[k] > 1}
        if often[j] > 1 and others:
            said += 1
            for n in near[i]:
                shares[(n, j) in given].append(sum((n, k) in given for k in others) / len(others))
    having, lacking = (np.mean(shares[x]) if shares[x] else math.nan for x in (True, False))
    ratio = min(lacking / having, 1) if having > 0 and lacking >= 0 else 1
    return 1 - (1 - ratio) * said / len(given)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("block", [1 << 20, 20])
def test_what_a_text_leaves_open_is_that_of_a_loop_whatever_the_blocks(monkeypatch, block):
    monkeypatch.setattr(targets, "BLOCK", block)
    again, twice = weighted(), torch.tensor([*range(12), 0, 1, 2])
    pairs = replace(again, **{name: getattr(again, name)[twice] for name in ("image_of", "text_of", "weight")})
    nats, count = target_by_loop(pairs)
    found = text_target(pairs)
    np.testing.assert_allclose(found[0].numpy(), nats, rtol=1e-5)
    assert found[1].tolist() == count.tolist() and math.isnan(found[0][5])


def labelled(share: float, noise: float = 0.1, seed: int = 0) -> Pairs:
    """Forty clusters of five images with eight texts each, some of them of two clusters, of which a share is known."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.arange(40).repeat_interleave(5)
    image = torch.nn.functional.normalize(points(40, 16)[kind] + noise * points(200, 16, seed=1), dim=1)
    true = torch.cat([kind.unsqueeze(1) * 4 + torch.arange(4), 160 + kind.unsqueeze(1) // 2 * 4 + torch.arange(4)], 1)
    known = torch.rand(true.shape, generator=g) < share
    rows = torch.arange(200).unsqueeze(1).expand_as(true)
    return Pairs(image=image, text=points(240, 16, seed=2), image_of=rows[known], text_of=true[known], scale=0.1)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
def test_labels_that_are_missing_are_counted_and_those_that_are_not_are_not(share):
    """The scale of .1 makes the model say nothing: labels and neighbours alone count."""
    pairs = labelled(share)
    target, count = text_target(pairs)
    true = torch.where(torch.arange(240) < 160, 5.0, 10.0)
    kept = count > 1
    found = (target.exp() / true)[kept].median()
    assert 0.75 < found < 1.35 and (count / true)[kept].median() == pytest.approx(share, abs=0.12)


def test_words_tell_texts_of_one_mean_apart():
    """Six texts of the same mean, whose words say which of them fit many images."""
    image, mean = points(60, 8), points(1, 8, seed=1)
    ids = torch.tensor([[2 + j, 9] for j in range(6)] + [[20 + j, 30 + j] for j in range(20)])
    text = torch.cat([mean.expand(6, 8), points(20, 8, seed=2)])
    nats = torch.tensor([3.0, 0.5, 3.0, 0.5, 3.0, 0.5] + [1.0] * 20, dtype=torch.float64)
    pairs = Pairs(image=image, text=text, image_of=torch.arange(26), text_of=torch.arange(26), scale=9.0, text_ids=ids)
    head = fit_text(pairs, Parts(dim=8, vocabulary=64, centres=26), nats, torch.full((26,), 4.0))
    found = head(text, ids).exp()
    assert found[0:6:2].min() > 1.3 * found[1:6:2].max()
    alone = fit_text(pairs, Parts(dim=8, centres=26), nats, torch.full((26,), 4.0))(text, ids).exp()
    torch.testing.assert_close(alone[0], alone[1])


def test_texts_with_many_matches_are_kept_as_they_are_and_rare_ones_shrunk():
    pairs = few(40)
    nats = torch.ones(40, dtype=torch.float64)
    nats[::2] = 3.0
    often = torch.ones(40, dtype=torch.float64)
    often[:20] = 50
    head = fit_text(pairs, Parts(dim=6, centres=40), nats, often)
    apart = (head(pairs.text).exp() - nats).abs()
    assert apart[:20].mean() < 0.5 * apart[20:].mean()


@pytest.mark.parametrize("sampled", [False, True])
def test_known_ambiguity_is_found_for_texts_that_were_fitted_and_for_others(monkeypatch, world, sampled):
    """Exact with a centre for each text, and with fewer centres than texts."""
    fitted = fit_variances(world.pairs, bank=400, centres=60 if sampled else 400)
    nats = fitted.score.units.nats(fitted.text.trace(world.pairs.text))
    true = world.log_n.clamp(min=0)
    assert spearmanr(nats[:FITTED], true[:FITTED])[0] > (0.8 if sampled else 0.9)
    assert world.correlation(nats) > 0.8
    factor = (nats[:FITTED] - true[:FITTED]).abs().exp()
    assert float((factor <= 2).float().mean()) > 0.5


def test_two_fits_are_equal_to_the_bit_and_do_not_touch_the_random_state(world):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, two = (fit_variances(world.pairs, bank=100, centres=100, seed=1) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for a, b in ((one.image, two.image), (one.text, two.text)):
        for (name, x), y in zip(a.state_dict().items(), b.state_dict().values()):
            assert torch.equal(x, y), name
            assert x.isfinite().all(), name  # a file of weights is refused for anything else
    assert one.score.to_dict() == two.score.to_dict()


def test_the_logit_of_a_true_match_is_that_of_a_logistic_regression():
    """40 images and 30 texts need no random sample."""
    g = torch.Generator().manual_seed(0)
    image, text, trace = points(40, 3), points(30, 3, seed=1), torch.rand(30, generator=g)
    logit = 4 * image @ text.T + 3 * trace - 3
    true = torch.rand(40, 30, generator=g) < torch.sigmoid(logit)
    image_of, text_of = true.nonzero(as_tuple=True)
    found = fit_true_match(Pairs(image=image, text=text, image_of=image_of, text_of=text_of, scale=9.0), trace)
    x = np.stack([(image @ text.T).flatten().numpy(), trace.expand(40, 30).flatten().numpy()], 1)
    wanted = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(x, true.flatten().numpy())
    got = [found.scale, found.scale * found.trace_weight, found.bias]
    np.testing.assert_allclose(got, [*wanted.coef_[0], wanted.intercept_[0]], rtol=1e-3)


def test_novelty_takes_first_tokens_and_enough_images(world):
    pairs = replace(world.pairs, image_first=torch.randn(600, 10, generator=torch.Generator().manual_seed(0)).half())
    found = fit.fit_novelty_of(pairs, "image", centres=64)
    assert found.fitted and found.widths == Widths(mean=36, first=10, centres=64)
    assert fit.fit_novelty_of(pairs, "image", centres=0) is None
    assert fit.fit_novelty_of(world.pairs, "image", centres=64) is None
    assert fit.fit_novelty_of(few(19, image_first=torch.zeros(19, 4)), "image", centres=64) is None


def test_novelty_of_texts_takes_the_rows_whose_first_tokens_were_kept(world):
    rows = torch.arange(0, len(world.pairs.text), 2)
    first = torch.randn(len(rows), 10, generator=torch.Generator().manual_seed(0)).half()
    found = fit.fit_novelty_of(replace(world.pairs, text_first=first, text_first_of=rows), "text", centres=64)
    alone = fit.fit_novelty(world.pairs.text[rows], first, Widths(mean=36, first=10, centres=64))
    assert all(torch.equal(x, y) for x, y in zip(found.buffers(), alone.buffers()))


def test_tokens_that_are_not_there_are_asked_for():
    for ids, words in ((None, "no text_ids"), (torch.full((30, 2), 9), "from 9 to 9, and the vocabulary has 5")):
        with pytest.raises(ValueError, match=words):
            fit_text(replace(few(), text_ids=ids), Parts(dim=6, vocabulary=5), torch.ones(30, dtype=torch.float64))


@pytest.mark.parametrize("pairs", [1, 2, 5, 29])
def test_fewer_than_thirty_pairs_are_refused(pairs):
    with pytest.raises(ValueError, match=f"{pairs} pairs of an image and a caption, but .* needs 30"):
        fit_variances(few(pairs), bank=32, centres=8)


@pytest.mark.parametrize("seed", range(4))
def test_thirty_pairs_give_finite_traces_and_no_text_more_than_all_images(seed):
    """This includes texts far from the fitted ones, where a straight line would give any number."""
    image = points(30, 6, seed=seed)
    ids = torch.randint(3, (30, 4), generator=torch.Generator().manual_seed(seed))
    pairs = Pairs.in_rows(image, points(30, 6, seed=seed + 50), 10.0, text_ids=ids)
    fitted = fit_variances(pairs, bank=32, centres=8, vocabulary=50_000)
    far = torch.tensor([[49_999] * 4, [0] * 4, [0, 1, 49_000, 2]])
    found = {"images": fitted.text.trace(points(3, 6, seed=9), far), "texts": fitted.image.trace(-image)}
    units = fitted.score.units
    for of, trace in found.items():
        assert trace.isfinite().all() and float(units.nats(trace).max()) <= math.log(30) + 1e-5
        assert float(units.matches(trace, 30, of).max()) <= 30


@pytest.mark.parametrize(
    ("image_of", "text_of", "images", "texts"),
    [
        ([0] * 60, range(60), 1, 60),  # one image with 60 captions
        (range(60), range(60), 60, 60),  # the same image 60 times, see `alike`
        (range(60), [0] * 60, 60, 1),
        ([0, 1] * 30, [1, 0] * 30, 2, 2),
    ],
)
@pytest.mark.parametrize("alike", [False, True])
def test_pairs_that_say_next_to_nothing_give_finite_numbers(image_of, text_of, images, texts, alike):
    image = points(1, 6).expand(images, 6).contiguous() if alike else points(images, 6)
    firsts = {"image_first": torch.full((images, 8), 0.1).half(), "text_first": torch.randn(texts, 8)}
    rows = {"image_of": torch.tensor([*image_of]), "text_of": torch.tensor([*text_of])}
    pairs = Pairs(image=image, text=points(texts, 6, seed=1), scale=10.0, **rows, **firsts)
    fitted = fit_variances(pairs, bank=32, centres=8)
    assert fitted.novelty is None and abs(fitted.score.trace_weight) < 1e3
    for trace in (fitted.text.trace(points(9, 6, seed=2)), fitted.image.trace(points(9, 6, seed=3))):
        assert trace.isfinite().all()


def test_pairs_that_a_line_separates_and_traces_that_are_alike_end_the_search_for_a_logit():
    """The scale of the first has no finite optimum, the weight of the second no meaning."""
    same = Pairs.in_rows(torch.eye(40), torch.eye(40), 100.0)
    found = fit_true_match(same, torch.rand(40, generator=torch.Generator().manual_seed(0)))
    assert math.isfinite(found.trace_weight) and found.scale + found.bias > 5 > -5 > found.bias
    alike = fit_true_match(few(60), torch.full((60,), 0.3) + 1e-9 * torch.rand(60))
    assert alike.trace_weight == 0


@pytest.mark.parametrize("part", ["match", "head"])
def test_a_fit_that_is_not_finite_is_not_handed_on(monkeypatch, part):
    if part == "match":
        monkeypatch.setattr(fit, "fit_true_match", lambda *args: TrueMatchScore(math.nan, 1.0, 30, 30, 1.0, 0.0))
    else:
        monkeypatch.setattr(fit, "nearest_distance", lambda *args: math.inf)
    with pytest.raises(ValueError, match="not finite .*(score.trace_weight|text.ambiguity.kernel_width)"):
        fit_variances(few(30), bank=32, centres=8)


def test_cosines_against_the_pairs_leave_every_pair_as_probable_as_any():
    image, text = points(60, 5), points(60, 5, seed=1)
    far = (image @ text.T).argmin(1)  # the texts that are least like the images
    pairs = Pairs(image=image, text=text, image_of=torch.arange(60), text_of=far, scale=9.0)
    found = fit_true_match(pairs, torch.rand(60))
    assert (found.scale, found.trace_weight) == (LEAST_SCALE, 0.0)
    assert 1 / (1 + np.exp(-found.bias)) == pytest.approx(1 / 60, rel=1e-3)
