"""The command line: which flags there are, what help says, and how every wrong input is answered."""

from __future__ import annotations

import json
import os
import shlex
import tarfile
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from prolip.data.faults import SampleFault
from training.health.errors import NonFiniteError, explain
from training.main import build_parser, main, parse

SHARD = "data/emoji/noto.tar"
TINY = ["--model", "ProLIP-ViT-test", "--precision", "fp32", "--workers", "0", "--batch-size", "8", "--warmup", "1"]

# Frozen: other people's scripts type these. Add freely; rename or remove only with an entry in flags.RETIRED.
PUBLIC_FLAGS = """
--accum-freq --alpha1 --alpha2 --aspect --aug-cfg --batch-size --best-lowest --best-metric --beta --beta1 --beta2
--brightness --caption-sampling --caption-template-shares --caption-templates --checkpoint-dir --checkpoint-policy
--coco-test --config --contrast --csv-caption-key --csv-img-key --csv-quoting --csv-separator --cutout --cutout-prob
--dataset-resampled --dataset-type --dct-scaled-decoding --decay-fraction --deterministic --device --device-augment
--draws --ema-decay --epochs --eps --erase-prob --fill --force-context-length --force-image-size --fsdp
--global-batch-size --grad-checkpointing --grad-clip-norm --greyscale-prob --help --hue --image-freeze-epochs
--image-lr-mult --image-resize-mode --image-root --imagenet-val --inclusion-eps --inclusion-form --inclusion-reduction
--inclusion-scale --init-logit-bias --init-logit-scale --init-unc-bias --init-unc-gain --jitter-prob
--keep-checkpoints --keep-every-steps --known-matches --layer-decay --ledger --lock-image --lock-image-unlocked-groups
--lock-text --lock-text-unlocked-layers --log-every-n-steps --log-every-seconds --logit-lr-mult --lr --lr-milestones
--lr-min-ratio --lr-scheduler --lr-step-factor --mask-fraction --mask-padding --mask-ratio --max-bad-fraction
--max-nonfinite --max-samples --max-steps --method --model --momentum --name --noise-ratio --noise-seed
--openclip-transform --opt --output --overwrite --peak-tflops --precision --prefetch --pretrained --profile
--read-retries --read-timeout --renewed-addresses --report --resume --rotate --saturation --save-every-minutes
--save-every-samples --save-every-steps --save-frequency --seed --select --shard-index --shift --shuffle-buffer
--split --stall-seconds --swa-epochs --text-delete --text-freeze-epochs --text-lr-mult --text-mask --text-random
--tokenizer --torchcompile --traceback --train-data --train-data-upsampling-factors --train-num-samples --train-split
--unfreeze-warmup-epochs --val-batch-size --val-data --val-every-steps --val-frequency --val-names --val-precision
--val-select --val-split --wandb-project --warmup --wd --word-drop --workers --zoom
""".split()  # noqa: SIM905  easier to read


def flags(method: str = "prolip") -> set[str]:
    return {flag for flag in build_parser(method).flags() if not flag.startswith("--no-")}


def test_the_public_flags_are_frozen():
    assert sorted(flags()) == sorted(PUBLIC_FLAGS)


@pytest.mark.parametrize("method", ["prolip", "siglip", "clip"])
def test_torchrun_takes_no_flag_of_ours_for_one_of_its_own(method):
    theirs = [word for action in get_args_parser()._actions for word in action.option_strings]
    taken = {
        flag: word
        for flag in build_parser(method).flags()
        for word in theirs
        if word.startswith(flag) and flag not in ("--help", "-h")
    }
    assert taken == {}


def test_help_lists_every_flag_under_its_group(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help", "--method", "prolip"])
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert stop.value.code == 0
    for flag in PUBLIC_FLAGS:
        assert flag in text
    for title in ("model:", "data:", "augment:", "optim:", "run:", "objective:"):
        assert title in text
    assert "peak learning rate; auto: 5e-4, from trained weights 1.5e-4 x 192/D (default: auto)" in words
    assert text.index("model:") < 1000  # not after a list of all flags
    assert "default: 2,048 samples" in words


def test_flags_override_a_config_file_and_take_back_its_length(tmp_path):
    path = tmp_path / "run.json"
    saved = {"method": "siglip", "run": {"epochs": 3, "seed": 5}, "data": {"batch_size": 8, "workers": 2}}
    path.write_text(json.dumps(saved))
    config = parse(["--config", str(path), "--max-steps", "7", "--global-batch-size", "32"])
    assert (config.method, config.run.seed, config.run.epochs, config.run.max_steps) == ("siglip", 5, None, 7)
    assert config.run.global_batch_size == 32 and config.data.workers == 2
    assert parse(["--config", str(path)]).run.epochs == 3


def refused(capsys, *words: str) -> str:
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "ProLIP-ViT-B16"], "unknown model 'ProLIP-ViT-B16': did you mean ProLIP-ViT-B-16"),
        (["--modle", "x"], "unknown flag --modle: did you mean --model"),
        (["--logs", "x"], "--logs is not a flag here: use --output"),
        (["--method", "siglp"], "--method 'siglp' is unknown: did you mean siglip"),
        (["--precision", "amp_fp16"], "amp_fp16 needs CUDA, but the device is cpu: use amp_bf16 or fp32"),
        (["--global-batch-size", "9", "--accum-freq", "2"], "batch 9 is not divisible by 1 ranks x 2 micro-batches"),
        (["--batch-size", "9", "--workers", "2"], "9 is not divisible by 2 workers: use --batch-size 8 or 10"),
        (["--batch-size", "4096"], "samples are fewer than one global batch of 4096"),
        (["--train-data", "data/emoji/notto.tar"], "Did you mean noto.tar"),
        (["--warmup", "10", "--max-steps", "10"], "warm-up of 10 steps is longer than the run of 10 steps"),
        (["--pretrained", "no.pt"], "--pretrained 'no.pt' does not exist"),
        (["--tokenizer", "nowhere"], "no tokenizer at nowhere"),
        (["--resume", "no.pt"], "--resume no.pt does not exist"),
        (["--resume", "latest", "--name", "absent"], "holds no run"),
        (["--force-image-size", "4"], "image_size 4 is below the patch_size 8: enlarge the image"),
        (["--aug-cfg", "scales=1"], "--aug-cfg scales=1: unknown setting; use scale, ratio"),
        (["--aug-cfg", "scale=(0.9,0.8)"], "give two shares of the image, the smaller first, such as (0.8,1.0)"),
        (["--aug-cfg", "color_jitter_prob=3"], "--aug-cfg color_jitter_prob=3 is not a probability"),
        (["--opt", "adahessian"], "--opt adahessian needs second derivatives"),
        (["--output", "setup.py"], "cannot be written ([Errno 20] Not a directory: 'setup.py/x'): give another"),
        (["--report-to", "wandb"], "use --wandb-project for W&B"),
        (["--val-data", f"emoji:{SHARD}", "--val-select", "group=nothing"], "no group 'nothing' in the corpus"),
        (["--device", "cuda"], "0 CUDA devices"),
    ],
)
def test_wrong_input_is_answered_with_a_remedy(capsys, tmp_path, words, message):
    if words[0] == "--device" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    device = [] if "--device" in words else ["--device", "cpu"]
    base = [*TINY, "--train-data", SHARD, "--max-steps", "2", "--output", tmp_path, *device]
    if "--output" in words:
        words = [*words, "--name", "x"]
    if "--global-batch-size" in words:
        base = [word for word in base if word not in ("--batch-size", "8")]
    assert message in refused(capsys, *base, *words)
    assert not (tmp_path / "model").exists()


def test_a_tokenizer_without_files_says_how_to_get_them(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    words = ["--model", "ProLIP-ViT-B-16", "--train-data", SHARD, "--output", tmp_path]
    assert "--tokenizer <folder>" in refused(capsys, *words)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_too_many_broken_images_end_the_run_without_a_trace(capsys, tmp_path, workers):
    """A shard with 8 drawings, every second of them broken."""
    path, count = tmp_path / "damaged.tar", 0
    with tarfile.open(SHARD) as source, tarfile.open(path, "w") as target:
        for member in source:
            content, image = source.extractfile(member), member.name.endswith("webp")
            count += image
            if count > 8:
                break
            if image and count % 2:
                member.size = 40
            target.addfile(member, content)
    words = f"--workers {workers} --batch-size 2 --train-data {path} --epochs 3 --output {tmp_path} --device cpu"
    text = refused(capsys, *TINY, *shlex.split(words))
    assert "bad image" in text and "--max-bad-fraction" in text


def test_an_error_in_a_loaders_worker_is_reported_in_one_line():
    text = (
        "Caught FileNotFoundError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\n'
        "FileNotFoundError: shard a.tar is gone"
    )
    assert explain(FileNotFoundError(text)) == "shard a.tar is gone"


def test_expected_errors_are_reported_and_bugs_are_not():
    assert explain(NonFiniteError("step 3: loss")) == "step 3: loss"
    assert explain(SampleFault("bad image", "x")) == "bad image: x"
    assert "--accum-freq" in (explain(torch.OutOfMemoryError("CUDA out of memory. Tried")) or "")
    assert explain(RuntimeError("shape mismatch")) is None
    assert explain(KeyError("x")) is None


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if name in os.environ:
            monkeypatch.delenv(name)
