"""Write tests/fixtures/before: files of small models, runs, indexes and tables, as this commit writes them.

    python scripts/dev/write_fixtures.py
    python scripts/dev/write_fixtures.py --source ../other-commit/src --output /tmp/before

`tests/test_files_from_before.py` and `tests/prolip/evaluation/test_frozen_metrics.py` read them. Only commands write
the files, so --source takes the `src` folder of any commit. Rewrite them only to add a format: files of earlier commits
must stay readable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = [ROOT / "tests", ROOT / "tests/helpers/evaluation"]
GROUPS = ("animal bird", "animal marine", "food fruit", "food sweet", "transport air", "sport")
PER_GROUP = 8
#: Words of the miniature test sets; the words of the drawings are added.
WORDS = (
    "a an the this is of on in photo picture red car green tree blue sea small dog old house snow night sky friend cat"
    " sits runs grass under boat two people ocean music egypt run person kind race gender age toxic man woman black"
    " white indian asian 0 1 2 3 4 5 6 7 8 9 10 11 12 thing key bird bench beach ball wall"
)
TOWERS = {
    "embed_dim": 16,
    "init_logit_scale": 2.302585092994046,
    "init_logit_bias": -3.0,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 16, "layers": 1, "head_width": 8},
}
TEXT = {"context_length": 10, "width": 16, "heads": 2, "layers": 1}
TRAINING = [
    "--precision",
    "fp32",
    "--device",
    "cpu",
    "--batch-size",
    "16",
    "--workers",
    "0",
    "--warmup",
    "2",
    "--lr",
    "3e-3",
    "--log-every-n-steps",
    "1",
    "--log-every-seconds",
    "none",
    "--save-frequency",
    "0",
    "--keep-checkpoints",
    "1",
    "--lr-scheduler",
    "const",
    "--no-report",
    "--device-augment",
    "--seed",
    "3",
    "--caption-sampling",
    "name:2,keywords,subgroup",
    "--train-data",
    "drawings.tar",
]
METHODS = ("prolip", "likelihood", "pcme", "pcmepp", "vacsr", "siglip")
SMALL_FIT = ["--bank", "32", "--centres", "16", "--novelty-centres", "8", "--readings", "32", "--changed-images", "16"]
CPU = ["--device", "cpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="src folder whose commands to run")
    parser.add_argument("--output", type=Path, default=ROOT / "tests/fixtures/before")
    options = parser.parse_args()
    sys.path[:0] = [str(options.source.resolve()), *map(str, TESTS)]
    os.environ["PYTHONPATH"] = str(options.source.resolve())
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_files()
        shutil.rmtree("models/siglip")  # its features replace the model
        for folder in ("models", "run", "indexes", "curated", "features"):
            pack(Path(folder), output / f"{folder}.zip")
        for file in ("drawings.tar", "prompts.json"):
            shutil.copyfile(file, output / file)
        import before

        before.record(output)


def write_files() -> None:
    """Write all files to the working directory."""
    words = write_drawings(Path("drawings.tar"))
    write_towers(Path("towers"), words)
    for method in METHODS:
        train(method, "runs", method, 120, *(SMALL_FIT if method == "likelihood" else []))
        shutil.copytree(f"runs/{method}/model", f"models/{method}")
    fit = ["--data", "shards:drawings.tar", "--caption-sampling", "name,keywords,subgroup", *SMALL_FIT, *CPU]
    command("uncertainty", "--model", "local-dir:models/prolip", *fit, "--output", "models/fitted")
    write_openclip(Path("openclip"), words)
    command("uncertainty", "--model", "local-dir:openclip", *fit, "--output", "models/openclip")
    for folder, steps in (("whole", 6), (".", 4)):
        train("prolip", folder, "run", steps, "--model", "local-dir:models/prolip")
    shutil.rmtree("run/tensorboard")
    for kind in ("flat", "ivf", "hnsw", "pq"):
        own = ["--index-type", kind, *(["--lists", "4"] if kind in ("ivf", "pq") else [])]
        model = ["--model", "local-dir:models/fitted", *CPU]
        command("search", "build", f"indexes/{kind}", "--data", "shards:drawings.tar", *own, *model)
    scored = ["--data", "shards:drawings.tar", "--caption-sampling", "name", "--output", "curated", *CPU]
    command("curate", "score", *scored, "--model", "local-dir:models/fitted")
    write_features()


def train(method: str, folder: str, name: str, steps: int, *more: str) -> None:
    """Train the small towers."""
    words = ["--model", "local-dir:towers", "--method", method, "--max-steps", str(steps)]
    run("training.main", *TRAINING, *words, *more, "--output", folder, "--name", name)


def write_features() -> None:
    """Write features of miniature test sets: one model evaluates all, the others two."""
    import frozen_sets

    sets = frozen_sets.write(Path("sets"))
    few_sets = {model: [sets["pairs"], sets["classes"]] for model in ("openclip", *METHODS[1:])}
    few_sets["vacsr"].pop()  # its score has parameters, which are saved with every task
    for model, specs in {"fitted": [*sets.values()], **few_sets}.items():
        few = ["--model", f"local-dir:models/{model}", *CPU, "--workers", "0"]
        kept = ["--save-features", f"features/{model}"]
        command("eval", "tasks", "--data", *specs, *few, *kept)
        if model == "fitted":
            for rule in frozen_sets.STORED_RULES:
                command("eval", "tasks", "--data", sets["classes"], "--prompts", rule, *few, *kept)
    coco = ["--data", frozen_sets.write_coco(Path("coco5k")), "--model", "local-dir:models/fitted", *CPU]
    command("eval", "tasks", *coco, "--save-features", "features/coco5k")
    pool = ["--data", sets["pool"], "--rule", "bprw:3,alpha=1.5"]
    command("prompts", "fit", *pool, "--model", "local-dir:models/fitted", *CPU, "--output", "prompts.json")


# --- inputs of the commands ------------------------------------------------------------------------------------------
def write_drawings(path: Path) -> list[str]:
    """Write some drawings of the corpus as a shard, and return the words of their texts."""
    counts = dict.fromkeys(GROUPS, 0)
    words: list[str] = []
    with tarfile.open(ROOT / "data/emoji/noto.tar") as every, tarfile.open(path, "w") as few:
        members = {member.name: member for member in every}
        for name in [name for name in members if name.endswith(".json")]:
            record = json.load(every.extractfile(members[name]))  # type: ignore[arg-type]
            if counts.get(record["subgroup"], PER_GROUP) >= PER_GROUP:
                continue
            counts[record["subgroup"]] += 1
            words += " ".join([record["name"], *record["keywords"], record["subgroup"], record["group"]]).split()
            stem = name.removesuffix(".json")
            for member in [members[other] for other in members if other.partition(".")[0] == stem]:
                few.addfile(member, every.extractfile(member))
    return words


def write_tokenizer(folder: Path, words: list[str], pad: int = 0) -> int:
    """Write a tokenizer of whole words, and return the size of its vocabulary."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    ends = {"<pad>": pad, "<unk>": 1, "<mask>": 2}
    known = {word: 3 + row for row, word in enumerate(sorted({word.lower() for word in [*words, *WORDS.split()]}))}
    end = 3 + len(known)  # the largest id, which marks the end for OpenCLIP's text tower
    raw = Tokenizer(models.WordLevel(ends | known | {"</s>": end}, unk_token="<unk>"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(str(folder))
    return end + 1


def write_towers(folder: Path, words: list[str]) -> None:
    """Write random weights of our small towers with their tokenizer."""
    folder.mkdir()
    size = write_tokenizer(folder, words)
    text = TEXT | {
        "vocab_size": size,
        "no_causal_mask": True,
        "embed_cls": True,
        "pool_type": "last",
        "proj_bias": True,
    }
    own = {
        "forward": "paper",
        "init_unc_bias": -4.0,
        "init_unc_gain": 1.0,
        "mask_padding": False,
        "pad_token_id": 0,
        "mask_token_id": 2,
        "special_token_ids": [1, size - 1],
    }
    (folder / "config.json").write_text(json.dumps(TOWERS | {"text_cfg": text, "prolip_cfg": own}))
    import torch

    import prolip

    torch.manual_seed(0)
    made = prolip.create_model(f"local-dir:{folder}", load_weights=False)
    prolip.save_pretrained(made, folder, tokenizer=prolip.get_tokenizer(f"local-dir:{folder}"))


def write_openclip(folder: Path, words: list[str]) -> None:
    """Write random weights of OpenCLIP's architecture in its own format."""
    import open_clip
    import torch

    folder.mkdir()
    size = write_tokenizer(folder, words)
    text = TEXT | {"vocab_size": size, "hf_tokenizer_name": "words", "pad_id": 0}
    config = {key: TOWERS[key] for key in ("embed_dim", "vision_cfg")} | {"text_cfg": text}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    torch.manual_seed(1)
    weights = open_clip.CLIP(**config).state_dict()
    for name in ("visual.conv1.weight", "token_embedding.weight"):
        weights[name] *= 10  # so that images and texts differ
    torch.save(weights, folder / "open_clip_pytorch_model.bin")


# --- commands --------------------------------------------------------------------------------------------------------
def command(*words: str) -> None:
    run("prolip", *words)


def run(module: str, *words: str) -> None:
    """Run a command of the source folder, and print its output if it fails."""
    done = subprocess.run([sys.executable, "-m", module, *words], text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{module} {' '.join(words)}\n{done.stdout}\n{done.stderr}")


def pack(folder: Path, path: Path) -> None:
    """Pack a named folder as a zip file whose bytes depend only on its content."""
    from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

    with ZipFile(path, "w") as archive:
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            archive.writestr(ZipInfo(str(file)), file.read_bytes(), ZIP_DEFLATED, 9)


if __name__ == "__main__":
    main()
