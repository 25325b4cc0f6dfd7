"""OpenCLIP's architectures of every combination of towers, made small: the same classes and code, fewer numbers."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import open_clip
import timm
import torch
from packaging.version import Version
from safetensors.torch import save_file
from torch import Tensor

from prolip.models import config as configuration
from prolip.models import readers

#: One name for each of the 22 combinations of an image tower and a text tower.
LISTED = """ViT-B-16 ViT-B-16-SigLIP ViTamin-B convnext_base RN50 EVA02-B-16 PE-Core-B-16 MobileCLIP2-B
swin_base_patch4_window7_224 vit_medium_patch16_gap_256 vit_relpos_medium_patch16_cls_224 ViT-H-14-worldwide
MobileCLIP-S1 ViT-H-14-CLIPA roberta-ViT-B-32 xlm-roberta-base-ViT-B-32 mt5-base-ViT-B-32 nllb-clip-base
nllb-clip-base-siglip coca_ViT-B-32 coca_base MobileCLIP2-L-14"""
NAMES = tuple(LISTED.split())
#: Other image sizes of relative positions, and passes of transformers' towers without data, need these versions.
OLD_TIMM = Version(timm.__version__) < Version("1.0.31")
OLD_TRANSFORMERS = Version(version("transformers")) < Version("5") if find_spec("transformers") else True
VIT = {"embed_dim": 64, "depth": 2, "num_heads": 2}
#: Part of a timm model's name -> what makes it small; the first that fits.
TIMM: dict[str, dict[str, Any]] = {
    "convnext": {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)},
    "swin": {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)},
    "fastvit": {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32)},
    "vitamin": {"depth": 2},
    "mci_224": {"depth": 2},
    "vit": VIT,
    "eva": VIT,
}
TOWER = {"width": 64, "layers": 2}
#: Keys of transformers' configurations -> small values, where they are there.
SIZES = {
    64: "hidden_size intermediate_size d_model d_ff encoder_ffn_dim decoder_ffn_dim",
    2: "num_attention_heads num_hidden_layers num_heads"
    " num_layers encoder_layers encoder_attention_heads decoder_attention_heads",
    1000: "vocab_size",
    32: "d_kv",
    1: "num_decoder_layers decoder_layers",
}
NARROW = {key: size for size, keys in SIZES.items() for key in keys.split()}


def small_config(name: str) -> dict[str, Any]:
    """OpenCLIP's configuration of a name with narrow, shallow towers."""
    config = copy.deepcopy(open_clip.get_model_config(name))
    config["embed_dim"] = 64  # as wide as the towers, of which some have no projection
    vision, text = config["vision_cfg"], config["text_cfg"]
    if isinstance(vision.get("layers"), list):
        vision |= {"layers": [1, 1, 1, 1], "width": 16, "head_width": 32}
    elif "timm_model_name" not in vision:
        vision |= TOWER | {"head_width": 32}
    if vision.get("attentional_pool"):
        vision |= {"attn_pooler_heads": 2, "attn_pooler_queries": 4}
    if "hf_model_name" not in text:
        text |= TOWER | {"heads": 2, "vocab_size": min(text["vocab_size"], 1000)}
    if "multimodal_cfg" in config:
        config["multimodal_cfg"] |= TOWER | {"heads": 2, "vocab_size": 1000, "attn_pooler_heads": 2}
    return config


@contextlib.contextmanager
def small_towers(folder: Path) -> Iterator[None]:
    """Let timm's and transformers' towers be small inside; folder: for the configurations of the latter."""
    real = timm.create_model

    def create(name: str, **options: Any) -> Any:
        name = name.replace("vitamin_base", "vitamin_small")
        narrow = next(values for part, values in TIMM.items() if part in name)
        return real(name, **(options | narrow))  # small already, where one is inside of another

    for place in configuration.TRANSFORMERS.iterdir():
        values = json.loads((place / "config.json").read_text())
        values |= {key: value for key, value in NARROW.items() if key in values}
        (folder / place.name).mkdir(parents=True, exist_ok=True)
        (folder / place.name / "config.json").write_text(json.dumps(values))
    with (
        patch("timm.create_model", create),
        patch.object(configuration, "TRANSFORMERS", folder),
        patch.object(readers, "TRANSFORMERS", folder),
    ):
        yield


def small_folder(name: str, folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A folder in OpenCLIP's format with random weights of a small architecture; inside of `small_towers`."""
    torch.manual_seed(0)
    config = small_config(name) if config is None else config
    folder.mkdir(parents=True)
    model = readers.openclip_model(config)
    with torch.no_grad():
        for parameter in model.parameters():  # what begins at zero would hide what it multiplies
            parameter.add_(0.02 * torch.randn_like(parameter))
    save_file(
        {key: value.contiguous().clone() for key, value in model.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    config["custom_text"] = True
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    return folder


def inputs(model: Any, rows: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Images, and texts with an end and padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 900, (rows, model.context_length), generator=generator)
    ids[:, 9], ids[:, 10:] = min(model.vocab_size, 1000) - 1, model.pad_token_id
    eos = getattr(model.text.tower, "eos_id", None)
    if eos is not None and eos < 1000:
        ids[:, 9] = eos
    return torch.randn(rows, 3, *model.image_size, generator=generator), ids
