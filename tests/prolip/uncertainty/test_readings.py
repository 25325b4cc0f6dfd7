"""Statistics of its training that a model keeps: ambiguity by hand, valid intervals, old states, models with them."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from ambiguous_pairs import few, points
from fitted_models import likely_model, likely_pairs
from scipy.stats import entropy

import prolip
from prolip.embeddings import Pairs
from prolip.gaussian import Gaussian
from prolip.methods.likelihood import LikelihoodConfig, LikelihoodObjective, LikelihoodScore, adopt
from prolip.uncertainty.fit import fit_readings, fit_variances
from prolip.uncertainty.openclip import FittedCLIP, with_variances
from prolip.uncertainty.readings import FEWEST, NEAREST, SHARES, reader_of
from prolip.uncertainty.units import range_in_words


@pytest.fixture(scope="module")
def model():
    return likely_model()


def test_the_ambiguity_of_an_image_is_the_mean_of_two_entropies(model):
    pairs, fitted = model
    readings, images = fitted.readings, points(5, 16, seed=3)
    texts = readings.general[readings.general.any(1)].double().numpy()
    stored = readings.images[readings.images.any(1)].double().numpy()
    assert len(texts) >= FEWEST and len(stored) == 64
    wanted = []
    for x in images.double().numpy():
        logits = 0.5 * pairs.scale * texts @ x
        near = (-stored @ x).argsort()[:NEAREST]
        share = np.exp(8 * stored[near] @ x) @ readings.true[near, : len(texts)].double().numpy()
        wanted.append((entropy(np.exp(logits)) + entropy(share)) / 2)
    np.testing.assert_allclose(fitted.reader.ambiguity(images).numpy(), wanted, rtol=1e-4)


def test_general_texts_are_those_that_fit_many_images_but_not_nearly_all():
    pairs = likely_pairs()
    share = torch.linspace(0.001, 0.6, len(pairs.text))
    trace = (share * len(pairs.image)).log() * 2 / pairs.scale
    often = torch.arange(len(pairs.text)).double()
    kept = fit_readings(pairs, trace, often, 50, (0.0, 1.0, 0.0, 1.0))
    inside = ((share >= max(SHARES[0], 3 / len(pairs.image))) & (share <= SHARES[1])).nonzero().squeeze(1)
    assert torch.equal(kept.general[0], pairs.text[inside[-1]]) and int(kept.general.any(1).sum()) == len(inside)
    row = int((kept.images @ pairs.image.T).argmax(1)[4])
    true = pairs.text_of[pairs.image_of == row]
    columns = (kept.general[: len(inside)] @ pairs.text.T).argmax(1)
    assert {int(columns[k]) for k in kept.true[4].nonzero().flatten()} == {int(j) for j in true if j in inside}


def test_too_few_general_texts_say_nothing():
    alone = few(60, dim=40)  # each text has an image of its own, far from the others
    fitted = fit_variances(alone, bank=32, centres=60, readings=32)
    found = fitted.reader.ambiguity(points(3, 40))
    assert int(fitted.readings.general.any(1).sum()) < FEWEST and found.isnan().all()


@pytest.mark.parametrize("seed", range(3))
def test_nine_in_ten_texts_lie_in_their_intervals_seen_or_not(seed):
    """Texts true of the nearest n images, two thirds of which were fitted to."""
    g = torch.Generator().manual_seed(seed)
    image = points(400, 12, seed=seed)
    n = 2 ** torch.randint(0, 7, (900,), generator=g)
    near = (image[torch.randint(400, (900,), generator=g)] @ image.T).argsort(1, descending=True)
    text = torch.nn.functional.normalize(torch.stack([image[row[:k]].mean(0) for row, k in zip(near, n)]), dim=1)
    pairs = Pairs(
        image=image,
        text=text[:600],
        image_of=torch.cat([row[:k] for row, k in zip(near[:600], n)]),
        text_of=torch.arange(600).repeat_interleave(n[:600]),
        scale=12.0,
    )
    fitted = fit_variances(pairs, bank=200, centres=600, readings=64)
    low, high = fitted.reader.shares(fitted.text.trace(text), text)
    inside = (low * 400 <= n + 1e-3) & (n - 1e-3 <= high * 400)
    assert inside[:600].float().mean() > 0.8 and inside[600:].float().mean() > 0.75
    width = (high / low).log()
    assert width[600:].mean() > width[:600].mean() and (high <= 1).all() and (low > 0).all()


def test_the_interval_of_a_known_text_holds_the_error_of_its_count_and_that_of_an_unknown_one_does_not(model):
    reader = model[1].reader
    readings = copy.deepcopy(reader.readings)
    readings.bounds.copy_(torch.tensor([0.0, 0.0, -1.0, 2.0]))
    reader = reader._replace(readings=readings, images=10_000)
    n = torch.from_numpy(np.random.default_rng(0).poisson(30, 4000)).float().clamp(min=1)
    known, other = reader.text.centres[:1].expand(4000, -1), points(4000, 16, seed=9)
    low, high = (10_000 * x for x in reader.shares(n.log() * reader.unit, known))
    torch.testing.assert_close(low, n * (-1.645 / n.sqrt()).exp())
    torch.testing.assert_close(high, n * (1.645 / n.sqrt()).exp())
    assert ((low <= 30) & (high >= 30)).float().mean() == pytest.approx(0.9, abs=0.02)
    low, high = (10_000 * x for x in reader.shares(n.log() * reader.unit, other))
    torch.testing.assert_close((low, high), (n * math.exp(-1), n * math.exp(2)))


def test_a_share_and_its_interval_in_words():
    assert range_in_words(1 / 900, 1 / 60) == "about 1 in 900 to 1 in 60"
    assert range_in_words(0.01, 0.01001) == "about 1 in 100"
    assert range_in_words(0.4, 1.0) == "about 2 in 5 to nearly all"


def test_readings_of_a_model_of_ours_are_kept_and_an_old_state_has_none(tmp_path):
    model = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "likelihood"}).eval()
    dim = model.embed_dim
    pairs = likely_pairs(dim=dim, ids=True)
    images = torch.randn(2, 3, *model.image_size)
    with pytest.raises(ValueError, match="has no ambiguity of images: fit it with prolip uncertainty"):
        model.ambiguity(images)
    old = model.state_dict()
    fitted = fit_variances(pairs, 2048, 2048, model.vocab_size, 0, 0, 2048)
    adopt(model, fitted)
    found = model.ambiguity(images)
    assert found.shape == (2,) and found.isfinite().all()
    torch.testing.assert_close(found, fitted.reader.ambiguity(model.encode_image(images).mean.detach()))
    again = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "likelihood"}).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.ambiguity(images), found)
    for name in [name for name in old if name.startswith("readings.") or name.endswith("ambiguity.words")]:
        del old[name]
    other = prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "likelihood"}).eval()
    other.load_state_dict(old)
    assert reader_of(other) is None and LikelihoodScore.of(other).doubt is None


def test_a_head_from_before_there_were_words_gives_what_it_gave():
    pairs = likely_pairs(ids=True)
    head = fit_variances(pairs, 64, 200, 500, 0).text
    state = {name: x for name, x in head.state_dict().items() if not name.endswith("words")}
    other = type(head)(head.ambiguity.parts)
    other.load_state_dict(state)
    a = other.ambiguity
    kernel = ((pairs.text @ a.centres.T - 1) / a.kernel_width).exp()
    by_hand = a.linear(a.features(pairs.text, pairs.text_ids)) + kernel @ a.kernel_weight
    torch.testing.assert_close(a(pairs.text, pairs.text_ids), by_hand)


def test_an_openclip_model_keeps_them_beside_its_weights(tmp_path, model):
    _, fitted = model
    inner = torch.nn.Linear(16, 16)
    inner.encode_image = lambda x: x
    kept = FittedCLIP(inner, *fitted)
    kept.save(tmp_path)
    again = with_variances(inner, tmp_path)
    x = points(3, 16)
    assert torch.equal(again.ambiguity(x), kept.ambiguity(x)) and again.score.doubt == fitted.score.doubt
    bare = FittedCLIP(inner, *fitted[:5])
    bare.save(tmp_path)
    assert with_variances(inner, tmp_path).readings is None


def test_the_method_asks_for_changed_images_only_where_something_takes_them():
    needs = LikelihoodObjective.needs
    assert needs(LikelihoodConfig()).closing_changes == 400
    for off in ({"readings": 0}, {"novelty_centres": 0}, {"changed_images": 0}):
        assert needs(LikelihoodConfig(**off)).closing_changes == 0


def score_on(device: str, model) -> tuple[LikelihoodScore, Gaussian, Gaussian]:
    """The model's score with a reader there, its images and texts."""
    pairs, fitted = model
    reader, score = fitted.reader, copy.deepcopy(fitted.score)
    score.reader = reader._replace(
        readings=copy.deepcopy(reader.readings).to(device),
        text=copy.deepcopy(reader.text).to(device),
        novelty=copy.deepcopy(reader.novelty).to(device),
    )
    sides = ((pairs.image.float(), fitted.image), (pairs.text.float(), fitted.text))
    return score, *(Gaussian(mean, head.log_var(mean)) for mean, head in sides)


def numbers_of(score, images, texts) -> list[torch.Tensor]:
    own = score.reader.evidence(images.mean)
    return [score.probability(images, texts, images), score.doubts(own), *score.reader.shares(texts.trace, texts.mean)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kept", ["cpu", "cuda"])
@pytest.mark.parametrize("asked", ["cpu", "cuda"])
def test_on_cuda_numbers_are_those_of_the_cpu(kept, asked, model):
    score, *sides = score_on("cpu", model)
    wanted = [*numbers_of(score, *sides), score.reader.ambiguity(sides[0].mean)]
    score = score_on(kept, model)[0]
    sides = [Gaussian(z.mean.to(asked), z.log_var.to(asked)) for z in sides]
    found = [*numbers_of(score, *sides), score.reader.ambiguity(sides[0].mean)]
    assert {x.device.type for x in found} == {asked}
    torch.testing.assert_close([x.cpu() for x in found], wanted, rtol=1e-4, atol=1e-5)
