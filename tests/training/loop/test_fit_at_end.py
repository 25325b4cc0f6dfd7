"""A method's work after training: variances fitted on ranks, in shards, in the averaged twin, as by one process."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import evaluate_corpus
from safetensors.torch import load_file
from training_runs import TINY, newest
from training_runs import start as begin

import prolip
import training.hooks
from drawings import SHARDS, UNSEEN, VALIDATION
from prolip.corpora.emoji import corpus as emoji
from prolip.embedder import Embedder
from prolip.fitting.collect import embed_texts
from training.checkpoint.files import load_checkpoint
from training.health.signals import EXIT_STOPPED, STOP
from training.main import main

TRAINING = shlex.split(
    f"--method likelihood --bank 64 --centres 64 --train-data {SHARDS} --caption-sampling "
    "name:2,keywords,group --model ProLIP-ViT-test --precision fp32 --device cpu --warmup 1 --max-steps 2 "
    "--log-every-n-steps 1 --no-report --ema-decay 0.5"
)


ALONE = [*TRAINING, "--batch-size", "16", "--workers", "0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Two steps by one process without workers."""
    return begin(tmp_path_factory.mktemp("whole"), "whole", *ALONE)


@pytest.fixture(scope="module")
def runs(forked, tmp_path_factory) -> Path:
    """Two steps by one process, and by two ranks in shards: the same global batches."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {
        "one": (1, ["--batch-size", "16", "--workers", "2", *VALIDATION]),
        "shards": (2, ["--batch-size", "8", "--workers", "1", "--fsdp"]),
    }
    for name, (ranks, words) in ways.items():
        words = [*TRAINING, *words, "--output", folder, "--name", name]
        assert forked.run(*words, ranks=ranks) == 0, forked.err[-3000:]
    return folder


def traces(folder: Path) -> dict[str, torch.Tensor]:
    """Return traces and novelty of the corpus's texts and drawings, by a saved model."""
    model = prolip.create_model(f"local-dir:{folder}").eval()
    corpus, tokenize = emoji.read([UNSEEN]), prolip.get_tokenizer(f"local-dir:{folder}")
    embedder = Embedder.load(f"local-dir:{folder}")
    ids = tokenize(list(corpus.caption_table().texts[:100]))
    with torch.no_grad():
        texts = model.encode_text(ids)
    pixels = torch.stack([embedder.preprocess(drawing.image()) for drawing in corpus.drawings[:20]])
    hidden = embedder.encode_hidden(pixels)
    words = embedder.text_novelty(embedder.encode_hidden(ids, "text"))
    novelty = embedder.novelty(hidden) | {f"text {end}": nats for end, nats in words.items()}
    own = embedder.reader.evidence(hidden.z.mean)
    read = {"ambiguity": embedder.reader.ambiguity(hidden.z.mean), "doubt": embedder.score.doubts(own)}
    return {"text": texts.trace, "image": hidden.z.trace} | novelty | read


def test_ranks_and_shards_fit_what_one_process_fits(runs):
    found = {}
    for part in ("model", "model_ema"):
        whole = found[part] = traces(runs / "one" / part)
        assert all(x.unique().numel() > 5 for x in whole.values())
        for kind, values in traces(runs / "shards" / part).items():
            torch.testing.assert_close(values, whole[kind], rtol=0.05, atol=0)
    assert not any(torch.equal(x, found["model_ema"][kind]) for kind, x in found["model"].items())


def test_the_evaluation_at_the_end_ranks_by_what_was_fitted_and_says_so(runs, capsys):
    figures = json.loads((runs / "one/eval.json").read_text())
    assert figures["trace/text_spread"] > 0 and figures["refusal/names_i2t/all/aurc"] > 0
    info = json.loads((runs / "one/eval/metrics.json").read_text())["info"]
    assert info["similarity"] == "true_match" and info["score"]["images"] == 170
    again = evaluate_corpus(["--model", f"local-dir:{runs}/one/model", "--data", UNSEEN])
    assert again.metrics["captions/i2t/mAP@R"] == pytest.approx(figures["captions/i2t/mAP@R"], abs=1e-9)


def test_what_fails_at_the_end_is_reported_and_costs_no_model(tmp_path, monkeypatch, capsys):
    def gone(*args, **kwargs):
        raise OSError("the object store is gone")

    monkeypatch.setattr("training.hooks.captioned_samples", gone)
    folder = begin(tmp_path, "gone", *ALONE, *VALIDATION)
    said = capsys.readouterr().out
    assert "warning: variances were NOT fitted: the object store is gone" in said
    assert load_file(folder / "model/model.safetensors")["match.values"].abs().sum() == 0
    assert json.loads((folder / "eval.json").read_text())["names/i2t/R@1"] >= 0


def drawings_as_csv(folder: Path, rows: int) -> Path:
    lines = ["filepath\ttitle"]
    for row, drawing in enumerate(emoji.read([UNSEEN]).drawings[:rows]):
        drawing.image().convert("RGB").save(folder / f"{row}.png")
        lines.append(f"{folder / f'{row}.png'}\tnumber {row}")
    (folder / "some.csv").write_text("\n".join(lines))
    return folder / "some.csv"


@pytest.mark.parametrize("rows", [29, 30])
def test_a_run_on_few_pairs_saves_its_means_and_says_before_the_first_step_what_it_will_lack(
    tmp_path, capsys, caplog, rows
):
    data = drawings_as_csv(tmp_path, rows)
    words = f"few --method likelihood --bank 32 --train-data {data} --batch-size 1 --max-steps 2 --warmup 1"
    folder = begin(tmp_path, *words.split(), "--caption-sampling", "title")
    said = capsys.readouterr().out
    fitted = rows >= 30
    assert (Embedder.load(f"local-dir:{folder}/model").score.units is not None) is fitted
    assert ("in its fit, 30 images and 30 texts are few: variances and prob" in caplog.text) is fitted
    assert ("fitted variances to" in said) is fitted and ("30 pairs of 30 images" in said) is fitted
    if not fitted:
        assert said.index(f"warning: {rows} samples are too few") < said.index("step 1/2")
        assert f"warning: variances were NOT fitted: {rows} pairs" in said
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


def test_a_run_that_is_stopped_in_the_fit_saves_its_last_step_and_fits_when_it_goes_on(whole, tmp_path, monkeypatch):
    """SIGTERM comes with the first batch of texts that is embedded at the end."""

    def encoder(model, side, *rest, honest=training.hooks.hidden_encoder):
        encode = honest(model, side, *rest)
        return encode if side != "text" else lambda batch: (os.kill(os.getpid(), signal.SIGTERM), encode(batch))[1]

    folder = tmp_path / "stopped"
    STOP.install()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("training.hooks.embed_texts", partial(embed_texts, batch_size=32))
            patch.setattr("training.hooks.hidden_encoder", encoder)
            assert main([*TINY, *ALONE, "--output", str(tmp_path), "--name", "stopped"]) == EXIT_STOPPED
    finally:
        STOP.number = 0
        STOP.release()
    state = load_checkpoint(newest(folder))
    assert state["step"] == 2 and not state["closed"] and not state["objective"]["model.match.values"].any()
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped" and not (folder / "model").exists()
    begin(tmp_path, "stopped", *ALONE, "--resume", "latest")
    state = load_checkpoint(newest(folder))  # taken after the fit
    assert state["closed"] and state["objective"]["model.match.values"].any()
    one, other = (load_file(run / "model/model.safetensors") for run in (folder, whole))
    for name, x in one.items():
        torch.testing.assert_close(x, other[name], rtol=1e-4, atol=1e-5)


def test_a_run_that_is_closed_is_not_closed_again_unless_it_is_made_longer(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/status.json").write_text('{"state": "stopped"}')
    begin(tmp_path, "run", *ALONE, "--resume", "latest")
    assert "fitted variances" not in capsys.readouterr().out
    begin(tmp_path, "run", *ALONE, "--resume", "latest", "--max-steps", "3")
    assert "fitted variances to" in capsys.readouterr().out
