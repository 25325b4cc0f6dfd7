"""Answers of a model that knows how far not to trust itself, against the formulas by hand."""

from __future__ import annotations

import pytest
import torch
from fitted_models import fitted_model
from PIL import Image
from squares import COLOURS

from prolip.embedder import Embedder
from prolip.search.index import Part, SearchIndex
from prolip.search.query import Meaning, Query, ask, confidences, embed
from prolip.uncertainty.units import range_in_words

TEXTS = ["a red square", "green", "blue sky", "something yellow"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return Embedder.load(fitted_model(tmp_path_factory.mktemp("doubting"), doubts=True))


def indexed(folder, embedder, keys, z, side) -> SearchIndex:
    index = SearchIndex.create(folder / side, embedder.score, z.mean.shape[1], side=side, card=embedder.card)
    index.append("all", [Part([{"key": key} for key in keys], z, len(keys))])
    return index


@pytest.fixture(scope="module")
def images(embedder, tmp_path_factory) -> SearchIndex:
    """The squares, as the command indexes them."""
    z = embedder.embed_images([Image.new("RGB", (32, 32), colour) for colour in COLOURS])
    return indexed(tmp_path_factory.mktemp("images"), embedder, COLOURS, z, "image")


@pytest.fixture(scope="module")
def texts(embedder, tmp_path_factory) -> SearchIndex:
    return indexed(tmp_path_factory.mktemp("texts"), embedder, TEXTS, embedder.embed_texts(TEXTS), "text")


def doubt_by_hand(embedder, image, gallery=None):
    evidence = embedder.reader.evidence(image)
    doubt = embedder.score.doubt
    weights = doubt.alone if gallery is None else doubt.among
    total = weights[0] + weights[1] * evidence.novelty.log1p() + weights[2] * evidence.nearest
    if gallery is not None:
        total = total + weights[3] * embedder.reader.evidence(gallery).nearest.mean()
    return total.sigmoid()


@pytest.mark.parametrize("top", [2, 12])
def test_texts_get_images_with_the_doubt_of_the_images_however_many_are_asked_for(images, embedder, top):
    replies, means, *_ = ask(images, [Query(text) for text in TEXTS], embedder, top)
    asked, z = embedder.embed_texts(TEXTS), images.gaussians(range(12))
    d, share = doubt_by_hand(embedder, z.mean, z.mean), embedder.score.units.share(asked.trace)
    ambiguity = embedder.reader.ambiguity(z.mean)
    logit = embedder.score.logit(embedder.score.pairwise(z, asked)).T
    low, high = embedder.reader.shares(asked.trace, asked.mean)
    for i, answers in enumerate(replies):
        rows = [COLOURS.index(answer.item["key"]) for answer in answers]
        want = (1 - d[rows]) * logit[i, rows].sigmoid() + d[rows] * share[i]
        assert len(rows) == top and [answer.probability for answer in answers] == pytest.approx(want.tolist(), rel=1e-4)
        assert [answer.ambiguity for answer in answers] == pytest.approx(ambiguity[rows].tolist())
        assert all(answer.share_range is None for answer in answers)
        assert means[i].share_range == (float(low[i]), float(high[i])) and means[i].ambiguity is None
        assert means[i].share == pytest.approx(float(share[i]), rel=1e-5)


@pytest.mark.parametrize("more_general", [None, True])
def test_a_fit_without_meaning_gives_no_bits_shares_and_ambiguity(images, embedder, monkeypatch, more_general):
    questions = [Query(text) for text in TEXTS]
    before, meant, *_ = ask(images, questions, embedder, 2, more_general)
    monkeypatch.setattr(embedder, "caution", "in its fit, the model was at chance")
    replies, means, *_ = ask(images, questions, embedder, 2, more_general)
    assert means == [Meaning()] * len(TEXTS) and Meaning() not in meant
    for answer, former in zip(sum(replies, []), sum(before, []), strict=True):
        assert (answer.bits, answer.share, answer.share_range, answer.ambiguity) == (None,) * 4
        assert answer.words == [] and former.words and answer.similarity == former.similarity
        assert (answer.probability, answer.trace) == (former.probability, former.trace)


def test_pictures_get_texts_with_their_own_doubt_and_the_share_of_each_text(texts, embedder, photos):
    paths = [str(path) for path in sorted(photos.rglob("*.png"))[:3]]
    questions = [Query(None, path) for path in paths]
    replies, means, *_ = ask(texts, questions, embedder, 3)
    asked, z = embed(questions, embedder).z, embedder.embed_texts(TEXTS)
    d, share = doubt_by_hand(embedder, asked.mean), embedder.score.units.share(z.trace)
    logit = embedder.score.logit(embedder.score.pairwise(asked, z))
    low, high = embedder.reader.shares(z.trace, z.mean)
    for i, answers in enumerate(replies):
        rows = [TEXTS.index(answer.item["key"]) for answer in answers]
        want = (1 - d[i]) * logit[i, rows].sigmoid() + d[i] * share[rows]
        assert [answer.probability for answer in answers] == pytest.approx(want.tolist(), rel=1e-4)
        assert [answer.share_range for answer in answers] == [(float(low[row]), float(high[row])) for row in rows]
        assert f"matches {range_in_words(*answers[0].share_range)} images" in str(answers[0])
        assert means[i].ambiguity == pytest.approx(float(embedder.reader.ambiguity(asked.mean)[i]))


def test_a_doubted_code_length_is_that_of_pictures_alone(texts, embedder, photos):
    path = str(next(photos.rglob("*.png")))
    asked = embed([Query(None, path), Query("a red square")], embedder)
    found = texts.search(asked.z, 3)
    plain = confidences(texts, asked, found)
    sure = confidences(texts, asked, found, [True, False], embedder.reader)
    d = float(doubt_by_hand(embedder, asked.z.mean)[0])
    p = torch.from_numpy(plain["log probability"]).exp()
    want = [float((1 - d) * p[0] + d / len(TEXTS)), float(p[1])]
    torch.testing.assert_close(torch.from_numpy(sure["log probability"]).exp().tolist(), want, rtol=1e-5, atol=0)
    assert all((sure[name] == plain[name]).all() for name in ("similarity", "lead", "certainty", "familiarity"))
    none = confidences(texts, asked, found._replace(rows=found.rows * 0 - 1), [True, True], embedder.reader)
    assert (none["log probability"] == -float("inf")).all()
