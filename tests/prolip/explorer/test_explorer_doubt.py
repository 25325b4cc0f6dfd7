"""The page of a model with doubt, against the formulas by hand."""

from __future__ import annotations

import math

import pytest
from explored import make_app
from fitted_models import fitted_model, fitted_openclip
from squares import picture

from prolip.uncertainty.units import range_in_words


@pytest.fixture(scope="module")
def doubting(shard, tmp_path_factory):
    folder = tmp_path_factory.mktemp("doubting")
    return make_app([fitted_model(folder, doubts=True), "--data", shard, "--output", str(folder / "index")])


def uploaded(app) -> dict:
    return {"upload": app.upload(picture("cyan"))["upload"]}


def test_a_text_is_answered_with_the_doubt_of_each_item_and_fits_a_range(doubting):
    found, embedder = doubting.search({"text": "a red square"}), doubting.explored.embedder
    asked, z, own = embedder.embed_texts(["a red square"]), doubting.gallery.index.gaussians(range(12)), embedder.score
    evidence = embedder.reader.evidence(z.mean)
    d, share = own.doubts(evidence, evidence), own.units.share(asked.trace)
    want = (1 - d) * own.logit(own.pairwise(z, asked)[:, 0]).sigmoid() + d * share
    for item in found["answers"]:
        assert item["probability"] == pytest.approx(float(want[item["row"]]), rel=1e-4)
    first = found["answers"][0]["probability"]
    assert math.exp(-found["verdict"]["parts"][0]["nats"]) == pytest.approx(first, rel=1e-4)
    low, high = embedder.reader.shares(asked.trace, asked.mean)
    assert found["question"]["fits"] == range_in_words(float(low), float(high))
    assert "beyond" not in found["question"]


def test_a_fit_without_meaning_gives_no_bits_shares_and_ambiguity(shard, tmp_path):
    made = make_app([fitted_openclip(tmp_path), "--data", shard, "--output", str(tmp_path / "index")])
    caution = made.explored.embedder.caution
    assert made.about()["units"] is None and caution
    assert f"{caution}. The page hides bits, shares and ambiguity." in made.about()["lacks"][-1]
    for values in ({"text": "a red square"}, uploaded(made), {"row": 0}):
        found = made.search(values)
        assert (found["question"]["bits"], found["question"]["fits"]) == (None, None)
        assert found["question"].get("ambiguity") is None and found["question"]["uncertainty"] is not None
        assert {(item["bits"], item["fits"]) for item in found["answers"] + found["said"]} == {(None, None)}


def test_a_picture_is_answered_with_its_own_doubt_and_has_an_ambiguity(doubting, monkeypatch):
    values, own, reader = uploaded(doubting), doubting.gallery.own, doubting.explored.embedder.reader
    found, asked = doubting.search(values), doubting.asker.read(values)
    d, (_, z) = own.doubts(reader.evidence(asked.z.mean)), doubting.captions.found()
    want = (1 - d) * own.logit(own.pairwise(asked.z, z)[0]).sigmoid() + d * own.units.share(z.trace)
    assert found["said"][0]["probability"] == pytest.approx(float(want[own.pairwise(asked.z, z)[0].argmax()]), rel=1e-4)
    nats = own.units.code_length(asked.z.mean @ z.mean.T, d).min()
    assert found["verdict"]["parts"][0]["nats"] == pytest.approx(float(nats), rel=1e-4)
    ambiguity = float(reader.ambiguity(asked.z.mean)[0])
    assert found["question"]["ambiguity"] == (None if math.isnan(ambiguity) else pytest.approx(ambiguity, rel=1e-4))
    for nearest, beyond in ((-1e9, False), (1e9, True)):
        monkeypatch.setattr(own, "doubt", own.doubt._replace(least=(0.0, nearest), most=(1e9, 1e9)))
        assert doubting.search(values)["question"]["beyond"] is beyond
