"""The first section of a model with units: its numbers are the evaluation's, its examples are chosen by rule."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from report_stand_in import make_result, with_doubt, with_units, write_run

from prolip.corpora.emoji.corpus import LEVELS
from prolip.corpora.emoji.report import examples, page, runs, uncertainty
from prolip.uncertainty.units import in_words

VOID = {"meta", "img", "br"}


class Balance(HTMLParser):
    """Fails at the first tag that closes another than the innermost open one."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


@pytest.fixture(scope="module")
def result():
    return with_units(make_result(noise=2.5, traces=[0.8, 0.4, 0.2, 0.1]))


@pytest.fixture(scope="module")
def section(result):
    return uncertainty.section(result)


@pytest.fixture(scope="module")
def html(result, tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("runs") / "demo", result)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(page.style.STYLE, "savefig.dpi", 30)
        return page.make_report(folder).read_text(), folder


def words(html):
    """The text of a page, every run of blanks one."""
    return " ".join(re.sub("<[^>]+>", " ", html).split())


def test_the_section_stands_behind_the_headlines_and_the_page_is_balanced_and_needs_nothing_else(html):
    text, folder = html
    order = [text.index(said) for said in ("own name first", 'id="uncertainty"', "<h2>Training")]
    assert order == sorted(order) and "The traces in detail" in text and "The model's uncertainty" not in text
    files = {path.stem for path in (folder / "figures").glob("*.png")}
    assert text.count('<img class="figure"') == len(files) == 9 and "expected_matches" in files
    parser = Balance()
    parser.feed(text)
    assert not parser.open
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text) and "<script" not in text and "@import" not in text
    assert "http://" not in text and "https://" not in text


@pytest.mark.parametrize("probabilistic", [True, False])
def test_a_model_without_units_has_no_such_section(probabilistic, tmp_path, monkeypatch):
    monkeypatch.setattr(page.figures, "draw_all", lambda *_: {})
    plain = make_result(traces=[0.8, 0.4, 0.2, 0.1])
    plain.info["probabilistic"] = probabilistic
    assert uncertainty.section(plain) is None
    text = page.make_report(write_run(tmp_path / "demo", plain)).read_text()
    assert 'id="uncertainty"' not in text and "bits" not in words(text)
    assert ("The model's uncertainty" in text) == probabilistic


def test_a_fitted_run_says_so_and_nothing_of_the_papers_loss(result, tmp_path):
    log = [{"step": i, "loss": 1.0, "seconds": 1.0} for i in (1, 2)]
    run = runs.RunFolder(tmp_path, {"method": "likelihood"}, train=log, result=result)
    said = page.render(run, {"learning_curves": b""})
    assert "Training learns the means only." in said
    assert not re.findall(r"PPCL|VIB|contrastive loss|pushed away|rarely matches|is a point", said)


def first_names(result):
    """Row of each drawing's first name among the names, and its probability among them."""
    names = result.text.select(result.name_texts)
    first = result.score.pairwise(result.image, names).argmax(1)
    odds = np.exp(20 * (result.image.mean @ names.mean.T).double().numpy())
    return first.numpy(), odds[np.arange(len(first)), first] / odds.sum(1)


def test_thirds_are_equal_parts_of_the_drawings_with_their_own_recall(section, html, result):
    order = np.argsort(-first_names(result)[1], kind="stable")
    right = (result.rankings["names"][0].first == 1).numpy()
    parts = [order[:8], order[8:15], order[15:]]  # of 22
    assert [third[0] for third in section["thirds"]] == [8, 7, 7]
    assert [third[1] for third in section["thirds"]] == pytest.approx([right[rows].mean() for rows in parts])
    for (_, share, shown), rows in zip(section["thirds"], parts):
        names = {result.corpus.concepts[result.corpus.drawings[i].concept].name for i in rows}
        assert len(shown) == 6 and {example.label for example, *_ in shown} <= names
        assert f'<div class="number">{page.percent(share)}</div>' in html[0]
    # drawings that are equally sure are equally right
    found = uncertainty.thirds(result, result.model_score.units, np.zeros(22), np.full(22, 0.5))
    assert [share for _, share, _ in found] == [right.mean()] * 3


def test_a_text_is_shown_with_what_its_trace_counts_and_what_is_true(section, html, result):
    said = words(html[0])
    every = uncertainty.texts(result, result.model_score.units, result.expected_matches, top=22)
    for (text, share, expected, bits), (found, *_) in zip(section["texts"], every):
        i = result.table.texts.index(text.label)
        nats = float(result.text.trace[i]) / 0.1
        assert expected == pytest.approx(22 * np.exp(nats) / 5000, rel=1e-4)
        assert bits == pytest.approx(np.log2(5000) - nats / np.log(2), abs=1e-3)
        assert text.matches == result.text_relation[i].sum()
        assert text.matches == sum(answer.said == "right" for answer in found.answers)
        assert share == in_words(expected / 22)
        assert f"matches {share} of the drawings ({examples.amount(expected)} of 22); " in said
        assert f"true: {text.matches} information {bits:.1f} bits" in said


def test_errors_by_level_are_doublings_beside_the_best_constant(section, html, result):
    expected, true, levels = result.expected_matches, result.text_relation.sum(1), result.table.text_level
    logs = np.log2(true[true > 0])
    assert np.log2(section["constant"]) == pytest.approx(logs.mean())
    assert [x[0] for x in section["errors"]] == list(LEVELS) and sum(x[1] for x in section["errors"]) == len(logs)
    said = words(html[0])
    for i, (level, texts, mean, model, constant) in enumerate(section["errors"]):
        own = (levels == i) & (true > 0)
        off = np.log2(expected[own] / true[own])
        assert model == pytest.approx((off.mean(), np.abs(off).mean())) and mean == pytest.approx(true[own].mean())
        flat = logs.mean() - np.log2(true[own])
        assert constant == pytest.approx((flat.mean(), np.abs(flat).mean()))
        row = " ".join(f"{error:+.2f} {size:.2f}" for error, size in (model, constant))
        assert f"{level} {texts} {examples.amount(mean)} {row}" in said


def test_the_ends_of_the_lists_are_numbers_of_what_an_input_fits(html, result):
    (_, counts, least, _), (_, of_texts, *_) = uncertainty.show_corpus(result).ends
    fitted = np.exp(np.sort(result.image.trace.numpy())[:6] / 0.1) / 90 * len(result.table.texts)
    assert [x.said for x in least] == [examples.amount(x) for x in fitted]
    assert (counts, of_texts) == ("expected matches among the texts", "expected matches among the images")
    assert f"Images, with {counts}" in words(html[0])
    plain = make_result(traces=[0.8, 0.4, 0.2, 0.1])
    assert uncertainty.show_corpus(plain).ends[0][2][0].said == f"{plain.image.trace.min().item():#.4g}"


def test_the_logit_is_that_of_the_score_that_ranks(result, tmp_path):
    info = result.info | {"similarity": "true_match", "score": result.info["model_score"]}
    facts = page.facts(runs.RunFolder(tmp_path, result=make_result()))
    assert facts["logit"] == "10 x similarity -5"
    facts = page.facts(runs.RunFolder(tmp_path, result=replace(make_result(), info=info)))
    assert facts["logit"] == "20 x similarity -9" and facts["ranked by"].endswith("matches the image")


def test_the_most_and_the_least_ambiguous_drawings_stand_with_the_other_ends(tmp_path):
    result = with_doubt(make_result(noise=2.5, traces=[0.8, 0.4, 0.2, 0.1]))
    *others, (kind, counts, least, most) = uncertainty.show_corpus(result).ends
    assert others == uncertainty.show_corpus(replace(result, read={})).ends
    assert (kind, counts) == ("image", "their ambiguity")
    names = [result.corpus.concepts[drawing.concept].name for drawing in result.corpus.drawings]
    order = np.argsort(result.read["ambiguity"])
    assert [x.label for x in least] == [names[i] for i in order[:6]]
    assert [x.label for x in most] == [names[i] for i in order[::-1][:6]] and most[0].said == "21.0 nats"
    pictures = dict.fromkeys(("reliability", "expected_matches"), b"")
    said = words(page.render(runs.RunFolder(tmp_path, result=result), pictures))
    assert "Images, with their ambiguity" in said and "Calibration of the match probability" in said
    assert "Thin vertical lines are intervals" in said
