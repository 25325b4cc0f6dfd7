"""Messages of a run: errors name the typed flag, and the log names the initial weights."""

import io
import logging
import re
import shlex
import tarfile
from pathlib import Path

import pytest

import prolip
from prolip.models.checkpoint import save_pretrained
from training.evaluate import open_validation
from training.main import main, parse
from training.parallel import World

ROOT = Path(__file__).resolve().parents[3]
DRAWINGS = "drawings.tar"
NAME = "ProLIP-ViT-test"


@pytest.fixture
def bad(tmp_path, monkeypatch):
    """A folder of wrong data, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("page.tar").write_text("<!DOCTYPE html><html>404</html>")
    for name, members in (
        ("empty.tar", {}),
        ("plain.tar", {"a.webp": b"x", "a.txt": b"x"}),
        ("lists.tar", {"a.webp": b"x", "a.json": b"[1]"}),
        ("other.tar", {"a.webp": b"x", "a.json": b'{"name": "x"}'}),
    ):
        with tarfile.open(name, "w") as tar:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    with tarfile.open(ROOT / "data/emoji/emojione.tar") as every, tarfile.open(DRAWINGS, "w") as few:
        members = [every.next() for _ in range(60)]
        keys = list(dict.fromkeys(member.name.split(".")[0] for member in members))[:12]
        for member in members:
            if member.name.split(".")[0] in keys:
                few.addfile(member, every.extractfile(member))
    Path("cut.tar").write_bytes(Path(DRAWINGS).read_bytes()[:30_000])
    Path("sets/wds_a/test").mkdir(parents=True)
    Path("sets/wds_a/test/nshards.txt").write_text("1")
    Path("pictures/train/n01440764").mkdir(parents=True)
    Path("table.csv").write_text("a,b\n1,2\n")
    return tmp_path


def refused(capsys, run) -> str:
    try:
        code = run()
    except SystemExit as left:
        code = left.code
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("usage")]
    assert code == 2 and len(lines) == 1, lines
    assert lines[0].startswith("error: "), lines
    return lines[0].removeprefix("error: ")


def not_opened(*flags) -> str:
    with pytest.raises((ValueError, OSError)) as refused:
        val = parse([*COMMON, "--dataset-type", "synthetic", "--train-num-samples", "8", *flags])
        open_validation(val, None, None, World())
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_run_that_cannot_open_its_test_sets_ends_in_one_line(bad, capsys):
    assert refused(capsys, lambda: start("--val-data", "wds:sets")).startswith("--val-data")
    assert not Path("runs").exists()


#: Flags of a run with a wrong value each; the flag must begin the message, and no other data flag may be named.
CORPUS_MISTAKES = shlex.split("page.tar empty.tar lists.tar other.tar cut.tar sets {a,b *.tgz s3s://b/x.tar")


@pytest.mark.parametrize("value", CORPUS_MISTAKES)
@pytest.mark.parametrize("flag", ["--val-data", "--val-names"])
def test_errors_about_the_corpus_to_evaluate_on_name_its_flag(bad, flag, value):
    given = ["--val-data", f"emoji:{value if flag == '--val-data' else DRAWINGS}"]
    given += [flag, value] if flag == "--val-names" else []
    said = not_opened(*given)
    assert said.startswith((f"{flag} ", f"{flag}:")), said
    assert "train" not in said.replace(str(bad), "") and "Traceback" not in said


@pytest.mark.parametrize(
    "given",
    [
        ("--val-select", "group=cars"),
        ("--val-select", "grop=objects"),
        ("--val-data", "wds:sets"),
        ("--val-data", "none"),
        ("--val-data", "imagenet:pictures"),
        ("--val-data", "flickr:a.json"),
        ("--val-data", "cub:a,b"),
        ("--imagenet-val", "nowhere"),
        ("--imagenet-val", "pictures"),
        ("--coco-test", "a.json"),
        ("--coco-test", "a.json,b"),
    ],
    ids=" ".join,
)
def test_errors_about_test_sets_name_their_flag(bad, given):
    more = ("--val-data", f"emoji:{DRAWINGS}") if given[0] == "--val-select" else ()
    said = not_opened(*more, *given)
    assert said.startswith(given[0]) and "--train-data" not in said and "train_data" not in said, said


@pytest.mark.parametrize(
    "given",
    [
        ("--train-data", "page.tar"),
        ("--train-data", "{a,b"),
        ("--train-data", "nowhere"),
        ("--train-data", "table.csv"),
        ("--train-data", "sets"),
        ("--batch-size", "0"),
        ("--workers", "-1"),
        ("--max-bad-fraction", "2"),
        ("--csv-separator", ", "),
        ("--read-timeout", "0"),
        ("--select", "group"),
        ("--caption-sampling", "a:b"),
        ("--train-data-upsampling-factors", "2"),
        ("--shard-index", "none.json"),
        ("--dataset-resampled", "--train-data", "pictures"),
    ],
    ids=" ".join,
)
def test_errors_about_the_training_data_name_the_flag_as_it_is_typed(bad, capsys, given):
    said = refused(capsys, lambda: main([*COMMON, "--train-data", DRAWINGS, *given]))
    assert said.startswith(given[0]) and not re.search(r"\b(train_data|[a-z]+_[a-z_]+ is)\b", said), said


COMMON = shlex.split(
    f"--model {NAME} --batch-size 4 --workers 0 --max-steps 1 --warmup 0 --precision fp32 --name r --output runs"
)


def start(*flags):
    return main([*COMMON, "--dataset-type", "synthetic", "--train-num-samples", "8", *flags])


def test_the_log_of_a_run_says_which_weights_it_begins_with(bad, capsys, caplog):
    save_pretrained(prolip.create_model(NAME), "m")
    with caplog.at_level(logging.INFO):
        assert start("--pretrained", "m/model.safetensors", "--force-image-size", "64") == 0
    assert "loaded" not in caplog.text  # `prolip train` prints the root logger
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  weights")]
    assert said.startswith("  weights    m/model.safetensors: loaded 59 of 59 tensors")
    assert "new, at their initial values: none" in said and "interpolated: visual.positional_embedding from 18" in said
    assert start("--overwrite") == 0
    assert "\n  weights" not in capsys.readouterr().out  # none were loaded
