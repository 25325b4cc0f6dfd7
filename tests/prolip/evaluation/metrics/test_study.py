"""The uncertainty study of whole tasks: every figure follows from what the parts compute by themselves."""

import dense_ranking
import pytest
import torch
from embedding import similarity_scores

from prolip.evaluation.metrics import calibration, study
from prolip.evaluation.metrics import selective as refusal
from prolip.evaluation.metrics.calibration import Matching
from prolip.evaluation.metrics.ranking import both_directions
from prolip.evaluation.metrics.streaming import PairScores, Relevance
from prolip.gaussian import Gaussian
from prolip.scores import CSDScore

LOGIT = CSDScore(8.0, -2.0)


def noisy(centres, owner, seed, spread=1.2):
    """A Gaussian for every entry of owner, whose trace says how far it was moved from its centre."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.rand(len(owner), 1, generator=g) * spread + 0.01
    mean = centres[owner] + noise * torch.randn(len(owner), centres.shape[1], generator=g)
    log_var = (0.05 * noise.square()).log().expand(-1, centres.shape[1])
    return Gaussian(torch.nn.functional.normalize(mean, dim=-1), log_var.contiguous())


def retrieval_and_study(*arguments):
    """Metrics of both directions and of their study in one table."""
    pairs, relevance, *others = arguments
    (i2t,), (t2i,), found = study.study_retrieval(pairs, [relevance], *others)
    return both_directions(i2t, t2i) | found.metrics()


def studied(scores, labels, *arguments, **options):
    """The study of a classification by its matrix of scores."""
    predicted, _, found = study.study_classification(PairScores.from_matrix(scores), labels, *arguments, **options)
    assert torch.equal(predicted, scores.argmax(1))
    return found


@pytest.fixture(scope="module")
def classes():
    labels = torch.arange(90) % 6
    image, text = noisy(torch.eye(6, 8), labels, 0), noisy(torch.eye(6, 8), torch.arange(6), 1, spread=0.1)
    return similarity_scores(image, text), labels, image, text


@pytest.fixture(scope="module")
def captions():
    owner = torch.arange(60) % 20
    image, text = noisy(torch.eye(20, 24), torch.arange(20), 2, 0.8), noisy(torch.eye(20, 24), owner, 3)
    relevant = owner == torch.arange(20).unsqueeze(1)
    relevant[4, 10] = True  # many-to-many
    relevant[5] = False  # an image without any caption
    return PairScores.from_gaussians(image, text), Relevance.from_dense(relevant), relevant, image, text


def test_a_classification_is_refused_by_score_image_and_pair(classes, in_blocks):
    in_blocks(60)
    scores, labels, image, text = classes
    got = studied(scores, labels, Matching(LOGIT), image.trace, text.trace).metrics()
    chosen = scores.argmax(1)
    uncertainties = {"score": -scores.amax(1), "image": image.trace, "pair": image.trace + text.trace[chosen]}
    want = refusal.selective_metrics(chosen != labels, uncertainties)
    assert {key: value for key, value in got.items() if key in want} == pytest.approx(want, abs=1e-7)
    assert got["refusal/image/aurc"] < got["refusal/image/error"] - 0.03  # the trace predicts the errors here


def test_a_model_without_uncertainty_is_refused_by_its_scores_alone(classes, captions):
    scores, labels, *_ = classes
    got = studied(scores, labels, Matching(CSDScore(8.0))).metrics()
    assert {key.split("/")[1] for key in got if key.startswith("refusal/")} == {"score"}
    assert "calibration/confidence/ece" in got and "calibration/match/ece" not in got
    pairs, relevance, *_ = captions
    both = retrieval_and_study(pairs, relevance, Matching(CSDScore(8.0)))
    assert {key.split("/")[2] for key in both if key.startswith("refusal/")} == {"score"}
    assert not any(key.startswith("calibration") for key in both)


def test_retrieval_is_refused_in_both_directions(captions, in_blocks):
    in_blocks(100)
    pairs, relevance, relevant, image, text = captions
    scores = similarity_scores(image, text)
    (i2t,), (t2i,), found = study.study_retrieval(pairs, [relevance], Matching(LOGIT), image.trace, text.trace)
    for got, want in ((i2t, dense_ranking.rank(scores, relevant)), (t2i, dense_ranking.rank(scores.mT, relevant.mT))):
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)
    kept = relevant.any(1)
    first = scores.argmax(1)
    wrong = ~relevant[torch.arange(20), first]
    by = {"image": image.trace, "text": text.trace[first], "pair": image.trace + text.trace[first]}
    want = refusal.selective_metrics(wrong[kept], {key: u[kept] for key, u in by.items()}, "refusal/i2t")
    got = found.metrics()
    assert {key: value for key, value in got.items() if key in want} == pytest.approx(want, abs=1e-7)
    asked, item = relevant.any(0), scores.argmax(0)
    wrong = ~relevant[item, torch.arange(60)]
    by = {"text": text.trace, "image": image.trace[item], "score": -scores.amax(0)}
    want = refusal.selective_metrics(wrong[asked], {key: u[asked] for key, u in by.items()}, "refusal/t2i")
    assert {key: value for key, value in got.items() if key in want} == pytest.approx(want, abs=1e-6)
    assert got["refusal/t2i/text/auroc"] > 0.6


def test_doubt_enters_the_probabilities_and_no_ranking(classes, captions):
    g = torch.Generator().manual_seed(5)
    pairs, relevance, relevant, image, text = captions
    doubt, share = torch.rand(20, generator=g), torch.rand(60, generator=g)
    got = retrieval_and_study(pairs, relevance, Matching(LOGIT, doubt, share), image.trace, text.trace)
    bare = retrieval_and_study(pairs, relevance, Matching(LOGIT), image.trace, text.trace)
    scores = similarity_scores(image, text)
    probability = (1 - doubt[:, None]) * torch.sigmoid(8 * scores - 2) + doubt[:, None] * share
    every = calibration.reliability(probability.flatten(), relevant.flatten(), calibration.LOG_ODDS)
    assert got["calibration/match/ece"] == pytest.approx(every.ece, abs=1e-6)
    for way, item in (("i2t", scores.argmax(1)), ("t2i", scores.argmax(0))):
        rows = (torch.arange(20), item) if way == "i2t" else (item, torch.arange(60))
        first = calibration.reliability(probability[rows], relevant[rows])
        assert got[f"calibration/match_{way}/ece"] == pytest.approx(first.ece, abs=1e-6)
    kept = {key for key in bare if not key.startswith("calibration")}
    assert {k: got[k] for k in kept} == pytest.approx({k: bare[k] for k in kept}, nan_ok=True)
    scores, labels, *_ = classes
    doubt, share = torch.rand(90, generator=g), torch.rand(6, generator=g)
    got = studied(scores, labels, Matching(LOGIT, doubt, share)).metrics()
    best, right = scores.argmax(1), scores.argmax(1) == labels
    sure = (1 - doubt) * (8 * scores).softmax(1).amax(1) + doubt / 6
    assert got["calibration/confidence/ece"] == pytest.approx(calibration.reliability(sure, right).ece, abs=1e-6)
    top = (1 - doubt) * torch.sigmoid(8 * scores.amax(1) - 2) + doubt * share[best]
    assert got["calibration/match_top1/ece"] == pytest.approx(calibration.reliability(top, right).ece, abs=1e-6)
