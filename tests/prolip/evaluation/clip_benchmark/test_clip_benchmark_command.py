"""The console script's flags, files, errors and remaining files; test_clip_benchmark.py has its numbers."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import miniatures as mini
import pytest
import torch
from clip_benchmark import cli, models
from clip_benchmark.datasets import builder
from clip_benchmark.metrics import linear_probe, zeroshot_classification, zeroshot_retrieval
from clip_benchmark_runs import CLASSES, evaluate
from commands import clip_benchmark, refusal

from prolip.cli.main import clip_benchmark as alias
from prolip.evaluation.clip_benchmark import encoder


def test_mixed_precision_only_where_asked_for(folders, ours, monkeypatch):
    seen = []
    plain = encoder.GaussianEncoder.encode_image

    def spy(self, *args, **kwargs):
        seen.append(torch.is_autocast_enabled("cpu"))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(encoder.GaussianEncoder, "encode_image", spy)
    for flags, amp in (([], False), (["--amp"], True)):
        seen.clear()
        assert evaluate(folders / "few", "--model", ours, *flags)["amp"] is amp
        assert set(seen) == {amp}


def test_several_models_and_sets_go_to_files_named_after_them(folders, ours, theirs):
    root = str(folders / "{dataset}")
    arguments = ["eval", "--dataset", "wds/single", "wds/pairs", "--dataset_root", root, "--num_workers", "0"]
    models_given = ["--pretrained_model", f"{ours},", ",".join(theirs)]
    clip_benchmark([*arguments, *models_given, "--quiet"])
    names = {path.name for path in Path().glob("*.json")}
    slug = ours.replace("/", "_")
    assert names == {
        f"single__{slug}_csd_en_zeroshot_classification.json",
        f"pairs__{slug}_csd_en_zeroshot_retrieval.json",
        "single_weights.pt_ViT-mini_en_zeroshot_classification.json",
        "pairs_weights.pt_ViT-mini_en_zeroshot_retrieval.json",
    }
    stamps = {path: path.stat().st_mtime_ns for path in Path().glob("*.json")}
    clip_benchmark([*arguments, *models_given, "--quiet", "--skip_existing"])
    assert stamps == {path: path.stat().st_mtime_ns for path in Path().glob("*.json")}
    clip_benchmark(["build", *sorted(names), "--output", "table.csv"])
    assert len(Path("table.csv").read_text().splitlines()) == 5


def wrong(folders: Path, ours: str) -> dict[str, tuple[list[str], str]]:
    """Mistakes: flags after those of a good evaluation of `single`, and what the message says."""
    return {
        "model": (["--model", "ProLIP-ViT-B16"], "did you mean ProLIP-ViT-B-16"),
        "no weights": (["--model", "ProLIP-ViT-test"], "give --pretrained FILE"),
        "two weights": (["--model", ours, "--pretrained", "x"], "remove one"),
        "pairs": (["--pretrained_model", "ViT-B-32"], "use 'model,pretrained'"),
        "caption": (["--dataset_root", str(folders / "pairs"), "--task", "captioning"], "cannot write captions"),
        "task": (["--task", "zeroshot_retrieval"], "choose zeroshot_classification or linear_probe"),
        "root's field": (["--dataset_root", "{name}"], "use {dataset}, {dataset_cleaned}"),
        "output": (["--output", "{modell}.json"], "has an unknown field"),
        "classifier in a file": (["--save_clf", "run/config.json/clf.pt"], "config.json is a file"),
        "a run as model": (["--model", "local-dir:run"], "run is the folder of a run: it has no model"),
        "one file": (["--language", "en", "de", "--output", "x.json"], "would both write x.json"),
        "cache": (["--wds_cache_dir", "cache"], "use hf download"),
        "amp": (["--amp", "--no_amp"], "contradict"),
    }


@pytest.mark.parametrize("mistake", list(wrong(Path("x"), "y")))
def test_mistakes_end_in_one_line_before_any_model_is_loaded(folders, ours, mistake, capsys, monkeypatch):
    monkeypatch.setattr(cli, "load_clip", lambda *_, **__: pytest.fail("a model was loaded"))
    flags, message = wrong(folders, ours)[mistake]
    Path("run").mkdir()
    Path("run/config.json").write_text('{"method": "prolip"}')
    good = ["--dataset", "wds/single", "--dataset_root", str(folders / "single"), "--quiet"]
    model = [] if "--model" in flags else ["--model", ours]
    (line,) = refusal(capsys, clip_benchmark, "eval", *good, *model, *flags).strip().splitlines()
    assert message in line


@pytest.mark.parametrize(
    "words, message",
    [
        (["--task", "linear_probe"], "needs CUDA"),
        (["--model", "ViT-B-32", "--pretrained", "laion3b"], "or give a file, --pretrained FILE"),
        (["--dataset", "wds_single"], "Unsupported dataset: wds_single"),
    ],
)
def test_what_only_running_tells_is_one_line(folders, ours, words, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = [] if "--model" in words else ["--model", ours]
    said = refusal(capsys, lambda given: evaluate(*given), folders / "probe", *model, *words)
    assert message in said.splitlines()[-1]


def test_help_shows_our_flags_and_then_all_of_clip_benchmarks(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["clip_benchmark", "eval", "--help"])
    for shown in (cli.main, lambda: clip_benchmark(["eval", "--help"])):
        with pytest.raises(SystemExit):
            shown()
        print("\0")
    upstream, ours, _ = capsys.readouterr().out.split("\0")
    assert set(re.findall(r"--\w+", upstream)) <= set(re.findall(r"--\w+", ours))
    assert ours.index("--similarity SCORE") < ours.index("--skip_existing")


def test_clip_benchmark_is_as_it_was_after_a_command(folders, ours):
    def state():
        modules = (cli, models, builder, zeroshot_classification, zeroshot_retrieval, linear_probe)
        return [dict(vars(m)) for m in modules], list(models.MODEL_TYPES)

    before = state()
    evaluate(folders / "few", "--model", ours)
    assert state() == before
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()  # the name clip_benchmark is still the library's
    module, name = re.search(r'prolip-clip-benchmark = "([\w.]+):(\w+)', text).groups()
    assert getattr(importlib.import_module(module), name) is alias
    assert Path(cli.__file__).parent.parent.name == "site-packages"


@pytest.mark.parametrize(
    "member, data, reported, workers",
    [("png", b"x", "bad image", 1), ("png", None, "missing image", 0), ("cls", None, "missing label: members: png", 0)],
)
def test_a_damaged_sample_is_one_line_that_names_it(ours, member, data, reported, workers, capsys):
    root = mini.wds_classification(Path("set"), CLASSES, images=4, shards=1)
    samples = mini.read_split(root / "test")
    samples[2] = {name: x for name, x in {**samples[2], member: data}.items() if x is not None}
    mini.write_shards(root / "test", [(f"s{number}", sample) for number, sample in enumerate(samples)])
    said = refusal(capsys, lambda _: evaluate(root, "--model", ours, workers=workers))
    (line,) = (line for line in said.splitlines() if "error" in line or "Traceback" in line)
    assert re.search(rf"error: sample 's2' of \S*set\S*: {reported}.*Fetch this file again, ", line)
