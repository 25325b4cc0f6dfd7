"""Examples of a test set are chosen by the rule that the page states, and outlive their file."""

import json
import re

import pytest
import torch
from PIL import Image
from report_stand_in import write_run
from tiny_tars import saved

from prolip.corpora.emoji.report import examples, runs
from prolip.corpora.emoji.report.page import make_report
from prolip.data.faults import SampleFault
from prolip.embedder import ModelCard
from prolip.evaluation.datasets.base import Dataset, Sample
from prolip.evaluation.embed import Features
from prolip.evaluation.metrics.streaming import Relevance
from prolip.gaussian import Gaussian
from prolip.scores import MeanScore, TrueMatchScore


def encoded(i):
    return saved(Image.new("RGB", (300, 200), (20 * i % 255, 90, 10)), "png")


def features(kind="retrieval", count=10, **card):
    """Images and texts of which number i and i match; the last two images are exchanged."""
    mean = torch.eye(count + 2)[:count]
    shown = mean.clone()
    shown[[-1, -2]] = shown[[-2, -1]]
    log_var = torch.linspace(-9, -5, count)[:, None].expand(-1, count + 2)
    keys = tuple(f"k{i}" for i in range(count))

    def samples(share=None):
        return (Sample(key, encoded(i), captions=(f"text {i}",)) for i, key in enumerate(keys))

    words = tuple(f"text {i}" for i in range(count))
    dataset = Dataset("mine", kind, samples, "", "", classnames=() if kind == "retrieval" else words)
    numbers = torch.arange(count)
    text = {"captions": words, "owners": numbers} if kind == "retrieval" else {"labels": numbers}
    if kind == "multilabel":
        text = {"labels": torch.eye(count).long()}
    image = Gaussian(shown, log_var)
    return Features(dataset, ModelCard("m", "", **card), keys, image, text=Gaussian(mean, log_var), **text)


@pytest.mark.parametrize("kind", ["retrieval", "classification", "multilabel"])
def test_the_queries_with_the_largest_and_the_smallest_lead_are_shown_in_both_directions(kind):
    shown = examples.show_features(features(kind))
    assert (shown.images, shown.texts) == (10, 10) and [kind for kind, *_ in shown.found] == ["image", "text"]
    for _, best, worst in shown.found:
        assert {x.label for x in worst[:2]} == {"text 8", "text 9"} and len(best) == len(worst) == 4
        assert all(x.rank > 1 and x.answers[0].said == "wrong" for x in worst[:2])
        assert all(x.rank == 1 and x.answers[0].said == "right" for x in best)
    queries = shown.found[0][1]
    assert all(x.picture.startswith("data:image/webp;base64,") for x in queries)
    assert not any(a.picture for x in queries for a in x.answers)  # texts
    assert all(a.picture for x in shown.found[1][1] for a in x.answers)
    assert [x.label for x in shown.ends[1][2]] == [f"text {i}" for i in range(5)]  # half of ten


def test_inputs_with_a_unit_show_what_they_fit_and_points_have_no_most_certain_ones():
    score = TrueMatchScore(0.4, 0.1, images=50, texts=90).to_dict()
    (_, counts, least, _), _ = examples.show_features(features(score=score)).ends
    trace = 12 * torch.tensor(-9.0).exp()
    assert counts == "expected matches among the texts"
    assert least[0].said == examples.amount(float((trace / 0.1).exp() / 90 * 10))
    assert examples.show_features(features(probabilistic=False)).ends == []


def test_a_query_without_a_right_or_without_a_wrong_answer_is_no_example():
    right = torch.tensor([[True, False], [False, False], [True, True]])
    image, text = (Gaussian(torch.eye(3)[:n], torch.zeros(n, 3)) for n in (3, 2))
    inputs = examples.Inputs(image, "abc"), examples.Inputs(text, "xy")
    (_, best, worst), *_ = examples.show(*inputs, Relevance.from_dense(right), MeanScore(), None).found
    assert [x.label for x in best] == ["a"] and worst == []


def test_pictures_that_cannot_be_read_in_time_or_at_all_are_left_out(monkeypatch):
    dataset = features().dataset
    found = examples.pictures_of(dataset, {"k1", "k3", "gone"})
    assert set(found) == {"k1", "k3"}
    broken = lambda share=None: (Sample(f"k{i}", b"no picture" if i == 1 else encoded(i)) for i in range(4))  # noqa: E731
    with pytest.raises(SampleFault):
        list(broken())[1].open()
    assert set(examples.pictures_of(Dataset("mine", "retrieval", broken, "", ""), {"k1", "k3"})) == {"k3"}
    monkeypatch.setattr(examples, "PATIENCE", -1.0)
    assert examples.pictures_of(dataset, {"k1"}) == {}


def test_the_page_shows_what_the_file_kept_and_escapes_it(tmp_path):
    found = features()
    words = ("<b>text</b>", *found.captions[1:])
    shown = examples.show_features(Features(**{**vars(found), "captions": words}))
    folder = write_run(tmp_path / "demo")
    (folder / "examples.json").write_text(json.dumps({"my <set>": shown}))
    assert runs.read(folder).shown == {"my <set>": shown}
    text = make_report(folder).read_text()
    assert "Examples from my &lt;set&gt;" in text and "&lt;b&gt;text&lt;/b&gt;" in text and "<b>text</b>" not in text
    assert not re.search("emoji(?!})|drawing|corpus", text)
    said = " ".join(re.sub("<[^>]+>", " ", text).split())
    assert "the largest and the smallest lead of the best right answer" in said
    for title in ("Best images, with the texts found", "Worst texts, with the images found", "Least certain"):
        assert title in said
