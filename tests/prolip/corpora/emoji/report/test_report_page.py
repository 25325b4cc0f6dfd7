"""The page: self-contained, honest about what it shows, whole with parts missing."""

import math
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest
import report_stand_in
import torch
from report_stand_in import make_result, write_run

from prolip.cli.main import main
from prolip.corpora.emoji.report import page, runs, uncertainty
from prolip.methods import METHODS
from prolip.utils.console import STEERING


@pytest.fixture(scope="module")
def result():
    return make_result(traces=[0.8, 0.4, 0.2, 0.1])


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without figures, which take seconds."""
    monkeypatch.setattr(page.figures, "draw_all", lambda *_: {})


@pytest.fixture(scope="module")
def html(result, tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("runs") / "demo", result)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page.figures, "draw_all", lambda *_: {})
        return page.make_report(folder).read_text(), folder


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(page.figures, "draw_all", lambda *_: pytest.fail("drawn"))
    folder = write_run(tmp_path / "demo")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write to .*file/page.html .*file is a file.: give another path"):
        page.make_report(folder, out=tmp_path / "file/page.html")
    (folder / "figures").touch()
    with pytest.raises(ValueError, match="figures is a file: give a folder"):
        page.make_report(folder)


def test_odd_names_are_shown_escaped(tmp_path, monkeypatch):
    names = ("$\\frac{$", "a\nb", "a\x1b[31mred", "a\u202eb", "x" * 300, "caf\udce9", "\0", "costs $5 or $6")
    plain = report_stand_in.make_corpus

    def odd():
        corpus = plain()
        concepts = [replace(concept, name=f"{names[i % len(names)]} {i}") for i, concept in enumerate(corpus.concepts)]
        return replace(corpus, concepts=tuple(concepts))

    monkeypatch.setattr(report_stand_in, "make_corpus", odd)
    monkeypatch.setattr(page.figures, "draw_all", lambda run, seed: {"pca": page.figures.pca(run.result, seed)})
    folder = write_run(tmp_path / "run\x1b\udce9", make_result(traces=[0.8, 0.4, 0.2, 0.1]))
    text = page.make_report(folder).read_text(encoding="utf-8")
    assert not STEERING.search(text) and r"<title>ProLIP: run\x1b\udce9</title>" in text
    for shown in (r"a\x1b[31mred 2", r"a\u202eb 3", r"caf\udce9 5", r"\x00 6", "costs $5 or $6 7"):
        assert shown in text


def test_headlines_are_the_metrics(html, result):
    text, _ = html
    for key in ("names/i2t/R@1", "names/t2i/R@1", "captions/i2t/mAP@R"):
        assert f'<div class="number">{page.percent(result.metrics[key])}</div>' in text
    assert "22 drawings get their own name first, out of 24 names" in text and "chance 4.2%" in text


@pytest.mark.parametrize("name", METHODS)
def test_the_page_says_of_every_method_what_its_variances_mean(name, tmp_path):
    said = page.render(runs.RunFolder(tmp_path, {"method": name}), {})
    method = METHODS[name]
    assert escape(" ".join(method.meaning.split())).replace("&#x27;", "&#39;") in said
    fitted = name == "likelihood"
    assert ("variances are fitted" in said) == fitted and ("is a point" in said) == (not method.probabilistic)
    assert ("Training learns its variances" in said) == (method.probabilistic and not fitted)


def test_designers_are_credited_as_the_corpus_has_it():
    licences = (Path(__file__).parents[5] / "data/emoji/LICENSES/README.md").read_text()
    styles = {}
    for line in licences.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if "`" in line and len(cells) > 5:
            styles |= dict.fromkeys(re.findall(r"`([\w-]+)\.tar`", cells[1]), cells[4])
    assert set(styles) == set(page.CREDITS)
    assert all(page.CREDITS[style].endswith(f", {licence}") for style, licence in styles.items())
    shown = make_result()
    shown.info["styles"] = ["emojione", "noto", "noto-v1", "mine"]
    text = page.render(runs.RunFolder(Path("run"), result=shown), {})
    assert "Drawings: EmojiOne 2, CC-BY-4.0; Noto Emoji, Google, Apache-2.0; mine (" in text
    assert "thing &lt;b&gt;0&lt;/b&gt;" in text and "thing <b>0" not in text


def test_a_run_without_evaluation_says_how_to_make_one(tmp_path):
    text = page.make_report(write_run(tmp_path / "demo")).read_text()
    assert "No evaluation in this run" not in text  # it has two in its log
    (tmp_path / "demo/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    text = page.make_report(tmp_path / "demo").read_text()
    assert "No evaluation in this run" in text and text.count('<img class="figure"') == 1
    assert "Most and least certain" not in text and not re.search("emoji(?!})|drawing|corpus", text)


def test_an_evaluation_asked_for_by_name_must_be_there(result, tmp_path, capsys, undrawn):
    result.save(tmp_path / "eval")
    assert main(["report", str(tmp_path), "--eval", "evla"]) == 2
    assert (
        f"no evaluation evla in {tmp_path}: write one with prolip eval emoji --output {tmp_path}/evla"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "report.html").exists()
    assert main(["report", str(tmp_path), "--eval", "eval"]) == 0 and (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("damaged", ["metrics.json", "embeddings.npz"])
def test_a_damaged_evaluation_is_named_with_what_to_do(damaged, result, tmp_path, capsys):
    path = write_run(tmp_path / "demo", result) / "eval" / damaged
    path.write_bytes(path.read_bytes()[:50])
    assert main(["report", str(tmp_path / "demo")]) == 2
    said = capsys.readouterr().err
    assert str(path.parent) in said and "write it again" in said


def test_the_corpus_examples_lead_by_most_and_by_least_with_complete_labels():
    result = make_result(noise=2.5)
    shown = uncertainty.show_corpus(result)
    assert (shown.images, shown.texts) == (22, len(result.table.texts))
    (kind, best, worst), (other, *_) = shown.found
    assert (kind, other) == ("image", "text") and len(best) == len(worst) == 4
    scores = result.score.pairwise(result.image, result.text)
    right = torch.from_numpy(result.text_relation.T)
    lead = torch.where(right, scores, -9).amax(1) - torch.where(right, -9, scores).amax(1)
    names = [result.corpus.concepts[drawing.concept].name for drawing in result.corpus.drawings]
    order = [names[i] for i in lead.argsort(descending=True)]
    assert [x.label for x in best] == order[:4] and [x.label for x in worst] == order[::-1][:4]
    for example in best + worst:
        row = names.index(example.label)
        true = {result.table.texts[i] for i in np.flatnonzero(result.text_relation[:, row])}
        assert [a.said == "right" for a in example.answers] == [a.label in true for a in example.answers]
        assert example.matches == len(true) and example.picture.startswith("data:image/webp")


@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ([0.8, 0.4, 0.2, 0.1], "the order that the paper predicts"),
        ([0.1, 0.2, 0.4, 0.8], "reverse of the paper's order"),
        ([0.1, 0.4, 0.2, 0.8], "neither the paper's order"),
        ([0.2, 0.2, 0.2, 0.2], "hardly differ"),
    ],
)
def test_the_order_of_levels_is_reported_as_it_came_out(traces, words):
    result = make_result(traces=traces)
    assert words in uncertainty.read_all(result)["levels"]


READINGS = [
    ("modality", "trace/text_over_image", 1.01, "about equally uncertain"),
    ("modality", "trace/text_over_image", 2.0, "texts are more uncertain than drawings, 2 times"),
    ("modality", "trace/text_over_image", 0.5, "drawings are 2 times as uncertain"),
    ("length", "spearman/trace_tokens", 0.4, "longer texts are more uncertain"),
    ("length", "spearman/trace_tokens", -0.4, "shorter texts are more uncertain"),
    ("length", "spearman/trace_tokens", 0.05, "no clear relation"),
    ("matches", "spearman/trace_true_matches", 0.4, "+0.40 over all texts"),
    ("matches", "spearman/trace_true_matches", 0.4, "widely applicable texts are more uncertain"),
    ("matches", "spearman/trace_true_matches", -0.4, "rarely applicable texts are more uncertain"),
    ("matches", "spearman/trace_true_matches", math.nan, "undefined (constant)"),
]


@pytest.mark.parametrize(("read", "key", "value", "said"), READINGS)
def test_a_reading_says_what_its_figure_says(read, key, value, said):
    result = make_result()
    assert key in result.metrics
    result.metrics[key] = value
    assert said in uncertainty.read_all(result)[read]


def test_the_verdict_counts_what_holds():
    assert "meet all three expectations" in uncertainty.read_all(make_result(traces=[0.8, 0.4, 0.2, 0.1]))["verdict"]
    reversed_order = make_result(traces=[0.001, 0.002, 0.004, 0.008])
    said = uncertainty.read_all(reversed_order)["verdict"]
    assert "none of three" in said and "does not measure" in said
    assert said.endswith("Do not compare traces where the answer is no: first fit variances (prolip uncertainty).")
    assert "drawings are" in uncertainty.read_all(reversed_order)["modality"]
    means = make_result()
    means.info["similarity"] = "mean"
    assert "not by the traces" in uncertainty.read_all(means)["verdict"]


def test_numbers_are_printed_for_people(tmp_path):
    assert [page.percent(x) for x in (0.372, 0.0006, 0.0, float("nan"))] == ["37.2%", "0.06%", "0.0%", "–"]
    for seconds, said in ((65, "1 min 05 s"), (7260, "2 h 01 min")):
        assert page.facts(runs.RunFolder(tmp_path, train=[{"step": 1, "seconds": seconds}]))["training time"] == said
