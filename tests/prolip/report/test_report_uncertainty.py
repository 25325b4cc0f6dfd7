"""The first section of a model with units: its numbers are the evaluation's, its examples are chosen by rule."""
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from report_stand_in import make_result, with_units, write_run

from prolip.evaluation.suites.emoji import levels
from prolip.report import examples, page, runs, uncertainty
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
    return page.make_report(folder).read_text(), folder


def words(html):
    """The text of a page, every run of blanks one."""
    return " ".join(re.sub("<[^>]+>", " ", html).split())


def test_the_section_stands_behind_the_headlines_and_draws_its_figures_once(html):
    text, folder = html
    order = [text.index(said) for said in ("own name first", 'id="uncertainty"', "<h2>How it learned")]
    assert order == sorted(order) and "The traces in detail" in text and "What the model is uncertain about" not in text
    files = {path.stem for path in (folder / "figures").glob("*.png")}
    assert text.count('<img class="figure"') == len(files) == 10 and "expected_matches" in files


def test_the_page_is_balanced_and_needs_nothing_else(html):
    text, _ = html
    parser = Balance()
    parser.feed(text)
    assert not parser.open
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text) and "<script" not in text and "@import" not in text
    assert "http://" not in text and "https://" not in text


@pytest.mark.parametrize("probabilistic", [True, False])
def test_a_model_without_units_has_no_such_section(probabilistic, tmp_path):
    plain = make_result(traces=[0.8, 0.4, 0.2, 0.1])
    plain.info["probabilistic"] = probabilistic
    assert uncertainty.section(plain) is None
    text = page.make_report(write_run(tmp_path / "demo", plain)).read_text()
    assert 'id="uncertainty"' not in text and "bits" not in words(text)
    assert ("What the model is uncertain about" in text) == probabilistic
    assert ('alt="Does uncertainty warn of errors?"' in text) == probabilistic


def test_what_the_papers_loss_does_is_not_said_of_fitted_variances(result, tmp_path):
    log = [{"step": i, "loss": 1.0, "seconds": 1.0} for i in (1, 2)]
    said = page.render(runs.RunFolder(tmp_path, train=log, result=result), {"learning_curves": b""})
    assert "The loss teaches the means alone." in said
    assert not re.findall(r"PPCL|VIB|contrastive loss|pushed away|I seldom match|taught the means alone", said)


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
    assert [third.drawings for third in section.thirds] == [8, 7, 7]
    assert [third.right for third in section.thirds] == pytest.approx([right[rows].mean() for rows in parts])
    for third, rows in zip(section.thirds, parts):
        names = {result.corpus.concepts[result.corpus.drawings[i].concept].name for i in rows}
        assert len(third.examples) == 6 and {x.example.label for x in third.examples} <= names
        assert f'<div class="number">{page.percent(third.right)}</div>' in html[0]


def test_thirds_of_drawings_that_are_equally_sure_are_equally_right(result):
    alike = np.zeros(22)
    right = (result.rankings["names"][0].first == 1).numpy().mean()
    found = uncertainty.thirds(result, result.model_score.units, alike, np.full(22, 0.5))
    assert [third.right for third in found] == [right] * 3


def test_a_text_is_shown_with_what_its_trace_counts_and_what_is_true(section, html, result):
    said = words(html[0])
    for text in section.texts:
        i = result.table.texts.index(text.example.label)
        nats = float(result.text.trace[i]) / 0.1
        assert text.expected == pytest.approx(22 * np.exp(nats) / 5000, rel=1e-4)
        assert text.bits == pytest.approx(np.log2(5000) - nats / np.log(2), abs=1e-3)
        assert text.example.matches == result.text_relation[i].sum() == sum(
            answer.mark == "right" for answer in examples.text_example(result, i, "", 22).answers
        )
        share = in_words(text.expected / 22)
        assert f"fits {share} of the drawings ({examples.amount(text.expected)} of 22); " in said
        assert f"true: {text.example.matches} says {text.bits:.1f} bits" in said


def test_texts_come_from_equal_steps_of_bits_by_seed(section, result):
    bits = [text.bits for text in section.texts]
    assert bits == sorted(bits) and bits[0] < 2 and bits[-1] > 9
    shown = result.text_relation.any(1)
    everything = np.log2(5000) - result.text.trace.numpy()[shown] / 0.1 / np.log(2)
    edges = np.linspace(everything.min(), everything.max(), 7)
    steps = np.clip(np.searchsorted(edges, bits) - 1, 0, 5)
    assert len(set(steps)) == len(bits) and all(np.histogram(everything, edges)[0][steps] > 0)

    def labels(seed):
        return [text.example.label for text in uncertainty.section(result, seed).texts]

    assert labels(0) == labels(0) and any(labels(0) != labels(seed) for seed in (1, 2, 3))


def test_novelty_moves_a_drawing_back_and_leaves_its_probability(section, result):
    wrong = np.flatnonzero(result.rankings["names"][0].first != 1)
    assert len(wrong) > 12  # more than are shown
    row = wrong[np.argmax(first_names(result)[1][wrong])]
    label = result.corpus.concepts[result.corpus.drawings[row].concept].name
    new = uncertainty.section(replace(result, novelty={"mean": np.where(np.arange(22) == row, 50.0, 0.5)}))
    assert section.wrong[0].example.label == label
    assert label not in {x.example.label for x in new.wrong + new.thirds[0].examples}
    assert new.said == section.said


def test_the_surest_errors_are_the_wrong_drawings_of_the_largest_probabilities(section, result):
    wrong = (result.rankings["names"][0].first != 1).numpy()
    largest = -np.sort(-first_names(result)[1][wrong])[:12]
    np.testing.assert_allclose([x.sure for x in section.wrong], largest, rtol=1e-4)
    assert section.wrong and all(x.example.answers[0].mark != "right" and x.example.rank > 1 for x in section.wrong)


def test_what_is_said_of_first_names_stands_beside_how_many_are_right(section, html, result):
    right, sure = (result.rankings["names"][0].first == 1).numpy(), first_names(result)[1]
    said = words(html[0])
    assert sum(x.drawings for x in section.said) == len(sure) and len(section.said) > 1
    for x in section.said:
        own = (sure >= x.low) & (sure < x.high)
        assert (x.drawings, x.sure, x.right) == (own.sum(), pytest.approx(sure[own].mean()), right[own].mean())
        row = f"{page.percent(x.low, 0)} to {page.percent(x.high, 0)} {x.drawings}"
        assert f"{row} {page.percent(x.sure)} {page.percent(x.right)}" in said


def test_the_worst_counts_are_those_of_the_largest_factors(section, html, result):
    expected, true = result.expected_matches, result.text_relation.sum(1)
    shown = true > 0
    factors = np.sort(expected[shown] / true[shown])
    np.testing.assert_allclose([x.expected / x.true for x in section.too_few], factors[factors < 1][:6])
    np.testing.assert_allclose([x.expected / x.true for x in section.too_many], factors[factors > 1][::-1][:6])
    said = words(html[0])
    for x in section.too_many + section.too_few:
        assert f"{x.level} {examples.amount(x.expected)} {x.true}" in said


def test_the_table_of_groups_is_the_evaluations(section, html, result):
    assert section.groups == levels.by_expected(result.expected_matches, result.text_relation.sum(1))
    said = words(html[0])
    for group in section.groups:
        name = f"{group.low:g} to {group.high:g}" if group.low else "less than 1"
        row = f"{name} {group.texts} {examples.amount(group.expected)} {examples.amount(group.true)}"
        assert row in said


def test_traces_that_are_all_alike_do_not_stop_the_section():
    flat = with_units(make_result())
    flat.text = flat.text._replace(log_var=torch.full_like(flat.text.log_var, -6.0))
    found = uncertainty.section(flat)
    assert len(found.texts) == 1 and len(found.groups) == 1


def test_the_ends_of_the_lists_are_numbers_of_what_an_input_fits(html, result):
    drawings, *_ = examples.extremes(result, pictures=3)
    fitted = np.exp(np.sort(result.image.trace.numpy())[:3] / 0.1) / 90 * len(result.table.texts)
    assert [x.said for x in drawings.least] == [examples.amount(x) for x in fitted]
    assert "how many drawings a text is expected to fit" in words(html[0])
    plain = make_result(traces=[0.8, 0.4, 0.2, 0.1])
    assert examples.extremes(plain)[0].least[0].said == f"{plain.image.trace.min().item():#.4g}"


def test_the_logit_is_that_of_the_score_that_ranks(result, tmp_path):
    info = result.info | {"similarity": "true_match", "score": result.info["model_score"]}
    facts = page.facts(runs.RunFolder(tmp_path, result=make_result()))
    assert facts["logit"] == "10 x similarity -5"
    own = make_result()
    own.info |= info
    facts = page.facts(runs.RunFolder(tmp_path, result=own))
    assert facts["logit"] == "20 x similarity -9" and facts["ranked by"].endswith("weighted trace of the text")


def test_amounts_are_printed_for_people():
    assert [examples.amount(x) for x in (0.049, 0.82, 1.0, 3.44, 9.96, 248.7, 1234.5)] == [
        "0.05", "0.82", "1.0", "3.4", "10", "249", "1,234"
    ]  # fmt: skip
