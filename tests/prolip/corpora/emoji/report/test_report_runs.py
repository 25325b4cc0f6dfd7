"""Reading run folders, whole and in parts."""

import json

import numpy as np
import pytest
from report_stand_in import make_result, write_run

from prolip.cli.main import main
from prolip.corpora.emoji.report import runs
from prolip.corpora.emoji.report.page import headlines


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "demo")


def test_parts_may_be_missing_and_a_line_cut_by_a_kill_is_left_out(folder, tmp_path):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 13, "lo')
    assert runs.read(folder).result is None and runs.read(folder).config
    (folder / "config.json").unlink()
    assert runs.read(folder).config is None and len(runs.read(folder).train) == 12
    (folder / "metrics.jsonl").unlink()
    for none in (folder, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="is not a run folder"):
            runs.read(none)


def test_the_last_evaluation_is_taken_from_eval_json_where_the_log_has_lost_it(folder):
    (folder / "eval.json").write_text('{"step": 8, "names/i2t/R@1": 0.9}')
    assert [line["step"] for line in runs.read(folder).evals] == [4, 8]
    (folder / "eval.json").write_text('{"step": 12, "names/i2t/R@1": 0.9}')
    assert runs.read(folder).evals[-1] == {"step": 12, "names/i2t/R@1": 0.9}
    (folder / "eval.json").write_text('{"step": 12, "names/i2t/R@1": "x"}')
    with pytest.raises(ValueError, match=r"eval.json: 'names/i2t/R@1' is 'x'"):
        runs.read(folder)


LINES = """[1]
null
{"kind": "train"}
{"step": "x"}
{"step": true}
{"step": -1}
{"step": 2, "loss": "x"}
{"kind": "eval", "step": 1, "names/i2t/R@1": [1]}"""
EXAMPLES = ("[]", '{"mine": 5}', '{"mine": [1, 2, [["image", [[1]], []]], []]}', "{")
CONFIGS = ("[]", "null", '{"data": null}', '{"data": {"train_data": ["x"]}}', "{", "[" * 10**5)
DAMAGES = [
    *[("examples.json", text, "Delete it for a page without examples") for text in EXAMPLES],
    *[("metrics.jsonl", f'{{"step": 1}}\n{line}\n{{"step": 3}}\n', "line 2 of") for line in LINES.splitlines()],
    *[("config.json", text, "config.json") for text in CONFIGS],
]


@pytest.mark.parametrize(("file", "text", "said"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_file_that_is_none_of_a_run_is_an_error_in_one_line(file, text, said, folder, capsys):
    (folder / file).write_text(text)
    assert said in refused(folder, capsys)


METRICS = [{"metrics": x} for x in ({}, [], {"names/i2t/R@1": "x"})]
INFOS = [{"info": x} for x in ({}, [], None, {"images": "x"})]
ROWS = ("image_mean", "text_log_var", "token_lengths", "drawing_sizes")


@pytest.mark.parametrize("change", [*METRICS, *INFOS, "all null", *ROWS])
def test_an_evaluation_that_lacks_what_the_page_shows_is_an_error_in_one_line(change, tmp_path, capsys):
    folder = write_run(tmp_path / "demo", make_result())
    path, arrays = folder / "eval/metrics.json", folder / "eval/embeddings.npz"
    if change in ROWS:
        with np.load(arrays) as found:
            kept = dict(found)
        np.savez(arrays, **(kept | {change: kept[change][:-1]}))
    else:
        written = json.loads(path.read_text())
        change = {"metrics": dict.fromkeys(written["metrics"])} if change == "all null" else change
        path.write_text(json.dumps(written | change))
    refused(folder, capsys)


def refused(folder, capsys):
    """The line that the command ends with, and code 2."""
    assert main(["report", str(folder)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and not (folder / "report.html").exists()
    return error


def test_a_page_is_made_without_a_headline_that_was_not_measured(tmp_path):
    result = make_result()
    del result.metrics["names/i2t/R@1"]
    shown = [words for _, words, _ in headlines(runs.RunFolder(tmp_path, result=result))]
    assert shown and not any("their own name first" in words for words in shown)
