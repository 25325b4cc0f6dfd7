"""What the tests of prolip eval clip-benchmark share: small models, small test sets, one evaluation in this process."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import torch
import wds_folders as wds
from commands import clip_benchmark

import prolip
from prolip.models.checkpoint import save_pretrained

WIDE = {"init_unc_bias": -4.0, "init_unc_gain": 1.0}
TINY_CLIP = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def save_model(folder: Path, seed: int) -> str:
    """A small random model whose traces differ, as --model wants it."""
    torch.manual_seed(seed)
    return f"local-dir:{save_pretrained(prolip.create_model('ProLIP-ViT-test', **WIDE), folder)}"


def save_openclip(folder: Path) -> tuple[str, str]:
    """(name, weights file) of a small random OpenCLIP model."""
    (folder / "ViT-tiny-for-tests.json").write_text(json.dumps(TINY_CLIP))
    open_clip.add_model_config(folder / "ViT-tiny-for-tests.json")
    torch.manual_seed(6)
    torch.save(open_clip.create_model("ViT-tiny-for-tests", pretrained="").state_dict(), folder / "weights.pt")
    return "ViT-tiny-for-tests", str(folder / "weights.pt")


def write_sets(root: Path) -> Path:
    """single (6 classes), few (3), multi (several classes per image), pairs (3 captions each), probe (3 splits)."""
    wds.classification(root / "single")
    wds.classification(root / "few", images=7, shards=1, classes=wds.CLASSES[:3], first=50)
    wds.multilabel(root / "multi")
    wds.retrieval(root / "pairs")
    for split, images, first in (("train", 12, 300), ("val", 12, 330), ("test", 9, 360)):
        wds.classification(root / "probe", images, 1, split=split, first=first)
    return root


def evaluate(folder: Path | str, *flags: str, workers: int = 0) -> dict:
    """The whole result file of one evaluation by our command."""
    common = ["--dataset", f"wds/{Path(folder).name}", "--dataset_root", str(folder), "--output", "result.json"]
    arguments = ["eval", *common, "--batch_size", "5", "--num_workers", str(workers), "--quiet", *flags]
    clip_benchmark(arguments)
    return json.loads(Path("result.json").read_text())
