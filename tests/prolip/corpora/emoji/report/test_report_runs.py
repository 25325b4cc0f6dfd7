"""Reading run folders, whole and in parts."""

import json

import numpy as np
import pytest
from report_stand_in import make_result, write_run

from prolip.cli.main import main
from prolip.corpora.emoji.report import runs
from prolip.corpora.emoji.report.page import corpus_headlines


def test_parts_may_be_missing(tmp_path):
    folder = write_run(tmp_path / "demo")
    assert runs.read(folder).result is None
    (folder / "config.json").unlink()
    assert runs.read(folder).config is None and len(runs.read(folder).train) == 12
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="is no run folder"):
        runs.read(folder)
    with pytest.raises(FileNotFoundError, match="is no run folder"):
        runs.read(tmp_path / "none")


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    folder = write_run(tmp_path / "demo")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 13, "lo')
    assert len(runs.read(folder).train) == 12


def test_the_last_evaluation_is_taken_from_eval_json_where_the_log_has_lost_it(tmp_path):
    folder = write_run(tmp_path / "demo")
    (folder / "eval.json").write_text('{"step": 8, "names/i2t/R@1": 0.9}')
    assert [line["step"] for line in runs.read(folder).evals] == [4, 8]
    (folder / "eval.json").write_text('{"step": 12, "names/i2t/R@1": 0.9}')
    assert runs.read(folder).evals[-1] == {"step": 12, "names/i2t/R@1": 0.9}
    (folder / "eval.json").write_text('{"step": 12, "names/i2t/R@1": "x"}')
    with pytest.raises(ValueError, match=r"eval.json: 'names/i2t/R@1' is 'x'"):
        runs.read(folder)


@pytest.mark.parametrize("text", ["[]", "5", '{"mine": 5}', '{"mine": [1, 2, [["image", [[1]], []]], []]}', "{"])
def test_examples_that_are_none_are_an_error_in_one_line(text, tmp_path, capsys):
    folder = write_run(tmp_path / "demo")
    (folder / "examples.json").write_text(text)
    refused(folder, "delete it, and the page has no examples", capsys)


LINES = """[1]
5
null
{"kind": "train"}
{"step": "x"}
{"step": true}
{"step": -1}
{"step": 2, "loss": "x"}
{"kind": "eval", "step": 1, "names/i2t/R@1": [1]}"""


@pytest.mark.parametrize("line", LINES.splitlines())
def test_a_line_that_is_none_of_a_log_is_an_error_in_one_line(line, tmp_path, capsys):
    folder = write_run(tmp_path / "demo")
    kept = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(f"{kept}{line}\n{kept}")
    refused(folder, f"line {kept.count(chr(10)) + 1} of", capsys)


CONFIGS = ("[]", "5", "null", '{"data": null}', '{"data": {"train_data": ["x"]}}', "{", "[" * 10**5)


@pytest.mark.parametrize("text", CONFIGS, ids=range(len(CONFIGS)))
def test_a_configuration_that_is_none_is_an_error_in_one_line(text, tmp_path, capsys):
    folder = write_run(tmp_path / "demo")
    (folder / "config.json").write_text(text)
    refused(folder, "config.json", capsys)


METRICS = ({}, [], {"names/i2t/R@1": "x"})
CHANGES = [{"metrics": x} for x in METRICS] + [{"info": x} for x in ({}, [], None, {"images": "x"})]


@pytest.mark.parametrize("change", [*CHANGES, "all null"])
def test_an_evaluation_that_lacks_what_the_page_shows_is_an_error_in_one_line(change, tmp_path, capsys):
    folder = write_run(tmp_path / "demo", make_result())
    path = folder / "eval/metrics.json"
    written = json.loads(path.read_text())
    if change == "all null":
        written["metrics"] = dict.fromkeys(written["metrics"])
    else:
        written |= change
    path.write_text(json.dumps(written))
    refused(folder, "", capsys)


@pytest.mark.parametrize("name", ["image_mean", "text_log_var", "token_lengths", "drawing_sizes"])
def test_embeddings_of_other_rows_than_the_corpus_are_an_error_in_one_line(name, tmp_path, capsys):
    folder = write_run(tmp_path / "demo", make_result())
    with np.load(folder / "eval/embeddings.npz") as arrays:
        kept = dict(arrays)
    np.savez(folder / "eval/embeddings.npz", **(kept | {name: kept[name][:-1]}))
    refused(folder, "", capsys)


def refused(folder, said, capsys):
    """The command ends with code 2 and a line that says it."""
    assert main(["report", str(folder)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and said in error, error
    assert not (folder / "report.html").exists()


def test_a_page_is_made_without_a_headline_that_was_not_measured(tmp_path):
    result = make_result()
    del result.metrics["names/i2t/R@1"]
    shown = [headline.words for headline in corpus_headlines(result)]
    assert shown and not any("their own name first" in words for words in shown)
