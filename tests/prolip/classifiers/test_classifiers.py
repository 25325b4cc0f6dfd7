"""Zero- and few-shot classifiers: the model's own figures, scikit-learn's habits, and refusal."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from fitted_models import fitted_model, openclip_model
from PIL import Image
from scipy.special import softmax
from scipy.stats import binom
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.utils.estimator_checks import check_estimator

import prolip
from prolip.classifiers import FewShotClassifier, ZeroShotClassifier
from prolip.classifiers.base import class_logits
from prolip.embedder import Embedder
from prolip.gaussian import Gaussian
from prolip.measures.chance import OwnFirst, warn_once
from prolip.models.checkpoint import save_pretrained
from prolip.uncertainty.novelty import refusal

NAN = float("nan")
NAMES = ["food vegetable", "plant flower", "transport air"]


def test_zero_shot_gives_the_models_own_probabilities_of_all_kinds_of_input(small, small_model, drawings, tmp_path):
    pictures = drawings[0][:5]
    (tmp_path / "a.webp").write_bytes(pictures[1])
    streams = [io.BytesIO(one) for one in pictures]
    given = [pictures[0], tmp_path / "a.webp", streams[2], Image.open(streams[3]), pictures[4]]
    found = ZeroShotClassifier(small_model, NAMES).fit()
    p = found.predict_proba(given)
    z = small.encode_image(torch.stack([small.preprocess(prolip.open_image(one)) for one in pictures]))
    texts = small.embed_texts(NAMES)
    logits = small.score.scale * small.score.pairwise(z, texts)
    np.testing.assert_allclose(p, softmax(logits.numpy(), 1), atol=1e-6)
    assert found.classes_.tolist() == NAMES
    assert found.predict(pictures).tolist() == np.array(NAMES)[p.argmax(1)].tolist()
    np.testing.assert_allclose(found.predict_proba(z), p, atol=1e-5)
    rows = found.embed(pictures)
    assert rows.shape == (5, 2 * z.mean.shape[1] + 2) and rows.dtype == np.float32
    np.testing.assert_allclose(found.predict_proba(rows), p, atol=1e-5)
    np.testing.assert_allclose(np.exp(found.predict_log_proba(np.array(pictures, dtype=object))), p, atol=1e-5)


def test_classes_have_synonyms_templates_and_labels_of_any_kind(small):
    found = ZeroShotClassifier(small, {7: ["plane", "jet"], 3: "rose"}, "a drawing of {}").fit()
    assert found.classes_.tolist() == [3, 7]
    prompts = small.embed_texts(["a drawing of plane", "a drawing of jet"])
    torch.testing.assert_close(found.texts_.var[1], prompts.var.mean(0))
    many = ZeroShotClassifier(small, ["a", "b"], "openai").fit().texts_
    listed = ZeroShotClassifier(small, ["a", "b"], __import__("open_clip").OPENAI_IMAGENET_TEMPLATES).fit().texts_
    torch.testing.assert_close(many.mean, listed.mean)


def test_confidence_is_the_answers_probability_and_that_the_image_is_of_the_kind(small, drawings):
    found = ZeroShotClassifier(small, NAMES).fit()
    pictures = drawings[0][:4]
    pixels = torch.stack([small.preprocess(prolip.open_image(one)) for one in pictures])
    novelty = small.novelty(small.encode_hidden(pixels))
    sure = found.predict_proba(pictures).max(1)
    wanted = np.exp(-refusal(torch.from_numpy(-np.log(sure)), novelty).numpy())
    np.testing.assert_allclose(found.confidence(pictures), wanted, rtol=1e-4)
    z = Gaussian(*(torch.from_numpy(x) for x in np.split(found.embed(pictures)[:, :-2], 2, 1)))
    np.testing.assert_allclose(found.confidence(z), sure, rtol=1e-4)


def test_a_doubted_image_gets_less_sure_answers_in_the_same_order_unless_labels_were_given(drawings, tmp_path):
    model = fitted_model(tmp_path, doubts=True)
    embedder, pictures = Embedder.load(model), drawings[0][:9]
    found = ZeroShotClassifier(embedder, NAMES).fit()
    z = embedder.embed_images(pictures)
    doubt = embedder.score.doubts(embedder.reader.evidence(z.mean)).unsqueeze(1).numpy()
    plain = softmax(embedder.score.scale * embedder.score.pairwise(z, embedder.embed_texts(NAMES)).numpy(), 1)
    wanted = (1 - doubt) * plain + doubt / len(NAMES)
    np.testing.assert_allclose(found.predict_proba(pictures), wanted, rtol=1e-4)
    assert (found.predict_proba(pictures).argmax(1) == plain.argmax(1)).all() and doubt.max() > 0.01
    labelled = ZeroShotClassifier(embedder, NAMES).fit(pictures, drawings[1][:9])
    weighed = labelled.sharpness_.logits(labelled._parts(labelled._look(pictures)), labelled._uncertainty(z))
    after = labelled.predict_proba(pictures)
    np.testing.assert_allclose(after, softmax(weighed, 1), rtol=1e-4)
    assert (after.argmax(1) == plain.argmax(1)).all()
    own = np.arange(9), np.searchsorted(NAMES, drawings[1][:9])
    assert np.log(after[own]).mean() > np.log(found.predict_proba(pictures)[own]).mean()


def test_few_shots_learn_what_names_do_not_say(small_model, drawings):
    """Random weights know no names, but colours distinguish designers."""
    small = Embedder.load(small_model.replace("fitted", "plain"))
    pictures, _, styles = drawings
    found = FewShotClassifier(small, classes={"noto": "one", "fluent-emoji-high-contrast": "other"})
    rows = found.embed(pictures)
    train, test, known, asked = train_test_split(rows, styles, test_size=0.5, random_state=0, stratify=styles)
    zero = ZeroShotClassifier(small, found.classes).fit()
    assert found.fit(train, known).score(test, asked) > 0.7 > zero.score(test, asked) + 0.1
    assert found.texts_ is not None and len(found.sharpness_.weights) == 2
    alone = FewShotClassifier(small, text=False).fit(train, known)
    assert alone.texts_ is None and alone.score(test, asked) > 0.7
    p = found.predict_proba(test)
    assert p.max(1).mean() == pytest.approx(found.score(test, asked), abs=0.15)


def test_one_shot_of_each_class_goes_by_the_names(small, drawings):
    rows = ZeroShotClassifier(small, NAMES).fit().embed(drawings[0])
    first = [drawings[1].index(name) for name in NAMES]
    found = FewShotClassifier(small).fit(rows[first], NAMES)
    np.testing.assert_allclose(found.predict_proba(rows), ZeroShotClassifier(small, NAMES).fit().predict_proba(rows))


def test_scikit_learns_checks_of_an_estimator_of_features():
    """ZeroShotClassifier takes none of them: it has no default model and classes, and learns nothing from X."""
    check_estimator(FewShotClassifier())


def test_they_are_cloned_searched_and_pickled_like_any_estimator(small, small_model, drawings):
    pictures, _, styles = drawings
    found = FewShotClassifier(small_model, text=False)
    rows = found.embed(pictures)
    search = GridSearchCV(FewShotClassifier(small, text=False), {"seed": [0, 1]}, cv=2).fit(rows, styles)
    assert search.best_params_["seed"] in (0, 1) and search.best_score_ > 0.65
    again = pickle.loads(pickle.dumps(found.fit(rows, styles)))
    assert "_loaded" not in vars(again)
    np.testing.assert_array_equal(again.predict_proba(rows[:3]), found.predict_proba(rows[:3]))
    copied = clone(ZeroShotClassifier(small_model, NAMES, "simple"))
    assert copied.get_params()["templates"] == "simple" and "model=" in repr(copied)
    assert copy.deepcopy(ZeroShotClassifier(small, NAMES)).model is small
    with pytest.raises(NotFittedError):
        copied.predict(rows)


def points(n, seed):
    """Unit vectors about three directions, unevenly far: some are hard; with the Gaussians of the classes."""
    random = np.random.default_rng(seed)
    labels = random.integers(3, size=n)
    x = np.eye(3, 8)[labels] + random.normal(size=(n, 8)) * random.uniform(0.1, 1.0, size=(n, 1))
    mean = torch.nn.functional.normalize(torch.from_numpy(x).float(), dim=1)
    return Gaussian(mean, torch.full_like(mean, -9.0)), labels


class Eyes(torch.nn.Module):
    """A model whose texts "0", "1", "2" are three directions."""

    def __init__(self):
        super().__init__()
        self.logit_scale, self.logit_bias = torch.tensor(5.0).log(), torch.tensor(-1.0)

    def encode_text(self, ids):
        mean = torch.eye(3, 8)[(ids[:, 0] % 3)]
        return Gaussian(mean, torch.full_like(mean, -9.0))


@pytest.fixture
def eyes():
    return Embedder("eyes", Eyes(), None, lambda texts: torch.tensor([[ord(text[-1:] or "0")] for text in texts]))


def test_few_answers_are_wrong_at_any_risk(eyes):
    """Over draws, the answers' true error is above the risk in a share delta of them at most, as is promised."""
    world, truth = points(5_000, 99)
    found = ZeroShotClassifier(eyes, {0: "0", 1: "1", 2: "2"}).fit()
    assert 0.15 < (found.predict(world) != truth).mean() < 0.5
    broken, answered = 0, []
    for seed in range(40):
        found.calibrate_risk(*points(300, seed))
        predicted = found.predict(world, risk=0.1, delta=0.2)
        assert isinstance(predicted, np.ma.MaskedArray)
        answered.append(1 - predicted.mask.mean())
        wrong = np.ma.filled((predicted != truth).mean(), 0.0)  # of none at all
        broken += float(wrong) > 0.1
        assert (found.refuse(world, 0.1, 0.2) == predicted.mask).all()
    assert broken <= binom.ppf(0.999, 40, 0.2) and np.mean(answered) > 0.3
    assert "at most 10% of new answers are wrong" in str(found.risk_threshold(0.1))
    found.calibrate_risk(*points(50, 0)[:1], np.full(50, 8))  # of no class: all wrong
    assert found.risk_wrong_.all() and found.refuse(world, 0.1).all()


def test_a_model_of_points_has_its_softmax_and_rows_of_means(drawings, tmp_path):
    name, weights = openclip_model(tmp_path)
    found = ZeroShotClassifier(name, NAMES, "simple", pretrained=weights).fit()
    rows = found.embed(drawings[0][:6])
    assert rows.shape == (6, 16)
    network = Embedder.load(name, weights)
    scale, text = network.logit_scale, found.texts_.mean.numpy()
    np.testing.assert_allclose(found.predict_proba(drawings[0][:6]), softmax(scale * rows @ text.T, 1), atol=1e-5)
    np.testing.assert_allclose(found.confidence(rows), found.predict_proba(rows).max(1))
    assert FewShotClassifier(network).fit(rows, NAMES * 2).sharpness_.slope == 0
    with pytest.raises(ValueError, match="5 features.* 16"):
        found.predict(rows[:, :5])


def test_probabilities_of_a_match_become_those_of_classes(drawings, tmp_path):
    """PCME's score is a probability by samples: of three classes, one of which it is, p_c / sum of p."""
    torch.manual_seed(0)
    folder = save_pretrained(prolip.create_model("ProLIP-ViT-test", method_cfg={"name": "pcme"}), tmp_path)
    found = ZeroShotClassifier(f"local-dir:{folder}", NAMES).fit()
    rows = found.embed(drawings[0][:4])
    z = Gaussian(*map(torch.from_numpy, np.split(rows, 2, 1)))
    p = Embedder.load(f"local-dir:{folder}").score.pairwise(z, found.texts_).double().numpy()
    np.testing.assert_allclose(found.predict_proba(rows), p / p.sum(1, keepdims=True), rtol=1e-4)


def test_bad_input_is_refused_in_words_and_a_diverged_model_gives_no_answer(small, drawings):
    found = ZeroShotClassifier(small, NAMES).fit()
    rows = found.embed(drawings[0][:4])
    width = rows.shape[1]
    for bad, error, words in (
        (rows[:, :5], ValueError, f"5 features.*{width - 2} or {width}"),
        (drawings[0][0], TypeError, "give a list"),
        (Gaussian(*torch.zeros(2, 3, 5)), ValueError, "5 features"),
        (np.full_like(rows, np.nan), ValueError, "NaN"),
        (["no/such.png"], FileNotFoundError, "no/such.png"),
        ([], ValueError, "array"),
    ):
        with pytest.raises(error, match=words):
            found.predict(bad)
    few = FewShotClassifier
    for use, words in (
        (lambda: found.predict(rows, risk=0.1), "calibrate_risk"),
        (lambda: found.fit(rows, NAMES), "4 images and 3 labels"),
        (lambda: found.fit(rows, ["plant flowers"] * 4), "'plant flowers' is not a class: did you mean plant flower"),
        (lambda: found.fit(rows), "give both, or neither"),
        (lambda: few(small).fit(rows, ["a"] * 4), "two or more classes"),
        (lambda: few(small, classes=["a", "b", "c"]).fit(rows, ["a", "a", "b", "b"]), "no image of 'c'"),
        (lambda: few(small, classes=["a", "c"]).fit(rows, ["a", "a", "b", "b"]), "'b' is not a class.*text=False"),
        (lambda: ZeroShotClassifier(3, NAMES).fit(), "model=3"),
    ):
        with pytest.raises(ValueError, match=words):
            use()

    def diverged(batch):
        return Gaussian(*torch.full((2, len(batch), 192), NAN))

    blind, mute = copy.copy(small), copy.copy(small)
    blind.encode_image, blind.novelty, mute.encode_text = diverged, None, diverged
    with pytest.raises(ValueError, match="embeddings of X has NaN or infinite numbers in 3 of 3 rows"):
        ZeroShotClassifier(blind, NAMES).fit().predict(drawings[0][:3])
    with pytest.raises(ValueError, match="embeddings of the classes has NaN"):
        ZeroShotClassifier(mute, NAMES).fit()


def test_a_new_fit_forgets_the_calibration_of_risk_and_labels_of_another_type_do_not_calibrate(eyes):
    z, labels = points(300, 0)
    texts = {0: "0", 1: "1", 2: "2"}
    few = FewShotClassifier(eyes, classes=texts)
    for found in (ZeroShotClassifier(eyes, texts).fit(), few.fit(z, labels)):
        found.calibrate_risk(z, labels)
        assert not found.refuse(z, 0.5).all()
        found.fit(z, labels)
        with pytest.raises(ValueError, match="calibrate_risk"):
            found.predict(z, risk=0.5)
    few.calibrate_risk(z, labels)
    with pytest.raises(ValueError, match="one class"):
        few.fit(z, np.zeros(len(labels)))
    with pytest.raises(NotFittedError):
        few.predict(z, risk=0.5)
    z, labels = points(40, 0)
    found = ZeroShotClassifier(eyes, {0: "0", 1: "1", 2: "2"}).fit()
    for bad in (labels.astype(str), [None] * 40, np.where(labels == 1, NAN, labels)):
        with pytest.raises(ValueError, match="give labels of their type"):
            found.calibrate_risk(z, np.array(bad, dtype=object))
    assert found.calibrate_risk(z, labels.astype(float)).risk_wrong_.tolist() == (found.predict(z) != labels).tolist()


def test_thresholds_are_of_the_confidence_that_refuses(small, drawings):
    """This includes novelty: the probability of the answer alone is another number."""
    found = ZeroShotClassifier(small, NAMES).fit().calibrate_risk(*drawings[:2])
    np.testing.assert_allclose(found.risk_confidence_, found.confidence(drawings[0]), rtol=1e-6)
    assert (found.risk_confidence_ < found.predict_proba(drawings[0]).max(1) - 1e-6).any()
    assert found.risk_by_ == ("mean", "first")
    z = Gaussian(*(torch.from_numpy(x) for x in np.split(found.embed(drawings[0][:4])[:, :-2], 2, 1)))
    with pytest.raises(ValueError, match="both"):
        found.predict(z, risk=0.5)


def test_a_pickle_is_refused_by_another_model_of_its_name(drawings, tmp_path):
    """A folder that was trained into again, and an embedder that is put in the place of another."""
    torch.manual_seed(1)
    model = prolip.create_model("ProLIP-ViT-test")
    folder = save_pretrained(model, tmp_path / "model")
    rows = (zero := ZeroShotClassifier(f"local-dir:{folder}", NAMES).fit()).embed(drawings[0])
    few = FewShotClassifier(f"local-dir:{folder}").fit(rows, drawings[1])
    kept = [pickle.dumps(found) for found in (zero, few)]
    np.testing.assert_array_equal(pickle.loads(kept[0]).predict(rows), zero.predict(rows))
    with torch.no_grad():
        model.logit_scale += 0.5
        model.visual.conv1.weight += 0.01
    save_pretrained(model, folder)
    for found in map(pickle.loads, kept):
        for use in (found.predict, found.confidence, lambda x: found.calibrate_risk(x, drawings[1])):  # noqa: B023
            with pytest.raises(ValueError, match=r"is not the model of fit.* fingerprint .* logit_scale .* fit again"):
                use(rows)
        assert len(found.fit(rows, drawings[1]).predict(rows)) == len(rows)
    with pytest.raises(ValueError, match="is not the model of fit"):
        zero.set_params(model=Embedder.load("ProLIP-ViT-test", "random")).predict(rows)
    with pytest.raises(ValueError, match="fit had no model"):
        FewShotClassifier().fit(rows, drawings[1]).set_params(model=zero.model).predict(rows)


def test_the_score_of_fit_counts_until_the_next_fit(small, drawings):
    found = ZeroShotClassifier(small, NAMES).fit()
    rows = found.embed(drawings[0][:5])
    log_p = found.predict_log_proba(rows)
    np.testing.assert_array_equal(found.set_params(similarity="kl").predict_log_proba(rows), log_p)
    assert np.abs(found.fit().predict_log_proba(rows) - log_p).max() > 0.5
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(found)).predict_proba(rows), found.predict_proba(rows))


def test_odd_classes_templates_and_similarities_are_taken_or_refused_in_words(small):
    for classes in ("cat", ["cat"], None, ["cat", "cat"], {"a": 3, "b": "b"}, {"a": [], "b": "b"}):
        with pytest.raises(ValueError, match="give|class"):
            ZeroShotClassifier(small, classes).fit()
    for labels in ({("a", 1): "a", ("b", 2): "b"}, {0: "a", "1": "b"}, {NAN: "a", 1.0: "b"}, {None: "a", "b": "b"}):
        with pytest.raises(ValueError, match="all texts or all numbers"):
            ZeroShotClassifier(small, labels).fit()
    with pytest.raises(TypeError, match="similarity is a int.*give the name"):
        ZeroShotClassifier(small, NAMES, similarity=5).fit()
    called, listed = (ZeroShotClassifier(small, NAMES, t).fit() for t in (lambda c: f"one {c}", ["one {}"]))
    assert torch.equal(called.texts_.mean, listed.texts_.mean)


def test_classes_that_a_model_does_not_know_are_named_once(small, drawings, caplog):
    pictures, labels = drawings[0][:60], np.array(drawings[1][:60])
    mixed = np.random.default_rng(0).permutation(labels)
    z = small.embed_images(pictures)
    for _ in range(2):
        warn_once.cache_clear() if not caplog.messages else None
        ZeroShotClassifier(small, NAMES).fit(z, mixed)
    logits, own = class_logits(small.score, z, small.embed_texts(NAMES)), np.searchsorted(NAMES, mixed)
    own = OwnFirst.of(torch.from_numpy(logits), torch.from_numpy(own))
    assert own.at_chance and caplog.messages == [f"{own} (captions: the class names)"]
