"""Files that an earlier commit wrote are read, resumed and searched, and say what they said."""

import json

import pytest

import before

WANTED = json.loads((before.BEFORE / "answers.json").read_text())
#: The kernels of another CPU sum in another order: embeddings part by some of their last digits.
TOLERANCE = 1e-4


@pytest.mark.parametrize("question", before.QUESTIONS, ids=lambda question: question.__name__)
def test_files_say_what_they_said(question, tmp_path):
    found = before.with_recorded_names(json.loads(json.dumps(before.answer(question, tmp_path))))
    assert not list(before.differences(found, WANTED[question.__name__], tolerance=TOLERANCE))


def test_features_are_used_again_for_the_same_images_and_model(tmp_path, monkeypatch):
    before.unpack(tmp_path, "features", "models", "drawings.tar")
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "features/fitted"
    files = {path: path.read_bytes() for part in ("images", "texts") for path in (kept / part).iterdir()}
    before.command("data", "emoji", "--data", "drawings.tar", "--output", "sets/drawn/wds_emoji")
    evaluate = ["eval", "tasks", "--data", "wds:sets/drawn/wds_emoji", *before.FITTED, "--workers", "0"]
    before.command(*evaluate, "--save-features", kept)
    assert files == {path: path.read_bytes() for part in ("images", "texts") for path in (kept / part).iterdir()}
