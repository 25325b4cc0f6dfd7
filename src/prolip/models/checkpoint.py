"""Reading, checking, mapping and writing of weights. Loading is strict; errors report both sides of a mismatch."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from open_clip.convert import convert_state_dict, load_big_vision_weights
from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from prolip.gaussian import kind_of
from prolip.models import diagnose
from prolip.models.config import check_keys, is_reader
from prolip.models.diagnose import CONFIG_NAMES, READERS, TOKENIZER_NAMES, WEIGHT_NAMES, is_run
from prolip.models.prolip import ProLIP
from prolip.models.towers import SPECIAL_TOKENS
from prolip.utils.documents import read_json, shown
from prolip.utils.links import check_links
from prolip.utils.messages import first_few
from prolip.utils.outputs import replacing_folder

log = logging.getLogger(__name__)

CONTAINERS = ("objective", "state_dict", "model")  # keys of the weights in checkpoints: training's, OpenCLIP's, others'
WRAPPERS = ("module.", "_orig_mod.", "model.")
# Tensors of a CLIP model's TorchScript archive that are not weights.
ARCHIVE_EXTRAS = ("input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask")
IMAGE_POSITIONS, TEXT_POSITIONS = "visual.positional_embedding", "text.positional_embedding"
# LongProLIP keeps the first 20 text positions, used by nearly all training captions, and stretches the others.
KEEP_FIRST = 20
LARGEST_LOG_SCALE = 20  # bound on log a: OpenCLIP's is log 100
#: Suffixes of a method's tensors that are newer than published weights: their initial zeros change nothing.
YOUNGER = (".ambiguity.words",)
#: Keys of a preprocessing that OpenCLIP reads from a folder, its files, and ProLIP's additional blocks.
PREPROCESS = ("mean", "std", "interpolation", "resize_mode")
OPENCLIP_FILES = ("open_clip_config.json", "open_clip_model.safetensors")
OUR_BLOCKS = ("prolip_cfg", "method_cfg")
OURS = re.compile(r"(visual|text)\.tower\.")


class CheckpointError(RuntimeError):
    """A mismatch between weights and model."""

    many_lines = True


Grid = tuple[int, int]


class LoadReport(NamedTuple):
    """Parameters that kept their initial values, and tensors that were resized."""

    kept: tuple[str, ...]
    resized: tuple[str, ...]


def read_state_dict(path: str | os.PathLike, weights_only: bool = True) -> dict[str, Tensor]:
    """Read the tensors of a safetensors or torch file, without CONTAINERS of checkpoints and `module.` prefixes."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: give a .safetensors, .pt, .pth or .bin file")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*TorchScript archive")  # the error reports it
            if path.suffix == ".safetensors":
                state = load_file(str(path))
            else:
                state = torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:  # torch raises any kind for a damaged file
        raise CheckpointError(diagnose.why_no_weights(path, error)) from error
    if isinstance(state, torch.jit.ScriptModule):
        state = state.state_dict()
    return unwrap(state, path)


def unwrap(state: Any, source: object = "the checkpoint") -> dict[str, Tensor]:
    """Extract a state dict from its containers; removes prefixes that all names share."""
    while isinstance(state, Mapping):
        inner = next((name for name in CONTAINERS if isinstance(state.get(name), Mapping)), None)
        if inner is None:
            break
        state = state[inner]
    if not isinstance(state, Mapping) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        got = f"[{', '.join(sorted(map(repr, state))[:8])}]" if isinstance(state, Mapping) else type(state).__name__
        expected = f"expected name -> tensor, at the top level or under {' or '.join(CONTAINERS)}"
        raise CheckpointError(f"{source} holds no state dict: got {got}, {expected}")
    while shared := [prefix for prefix in WRAPPERS if all(key.startswith(prefix) for key in state)]:
        state = {key.removeprefix(shared[0]): value for key, value in state.items()}
    return dict(state)


# --- OpenCLIP's weights: same names without `tower` -------------------------------------------------------------------
def openclip_view(model: Any) -> Any:
    """Return a view of a model for OpenCLIP's functions."""
    towers = {"visual": model.visual.tower, "text": model.text.tower}
    return SimpleNamespace(**towers, logit_scale=model.logit_scale, logit_bias=model.logit_bias)


def from_openclip(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights of any program that OpenCLIP supports to our names; interpolates positions of another size."""
    view = openclip_view(model)
    found = convert_state_dict(view, dict(state))
    if "positional_embedding" in found:  # of OpenCLIP's first class, without a separate text tower
        found = convert_to_custom_text_state_dict(found)
    found.pop("text.transformer.embeddings.position_ids", None)  # not saved by transformers since version 4.31
    resize_pos_embed(found, view)
    # OpenCLIP skips the positions of timm's models, of ResNets, and of texts with [CLS]
    trunk = getattr(view.visual, "trunk", None)
    for name in ("visual.trunk.pos_embed", "visual.attnpool.positional_embedding"):
        old, new = found.get(name), view.visual.state_dict().get(name.removeprefix("visual."))
        if old is None or new is None or old.shape[-2] == new.shape[-2]:
            continue
        special = 1 if trunk is None else 0 if trunk.no_embed_class else trunk.num_prefix_tokens
        grid = [math.isqrt(len(new) - 1)] * 2 if trunk is None else list(trunk.patch_embed.grid_size)
        rows = resample_abs_pos_embed(old.reshape(1, -1, old.shape[-1]), grid, num_prefix_tokens=special)
        found[name] = rows.reshape(*new.shape[:-1], -1)
    name = "text.positional_embedding"
    if getattr(view.text, "cls_emb", None) is None or name not in found:
        resize_text_pos_embed(found, view)
    else:
        words = {name: found[name][:-1]}
        own = SimpleNamespace(positional_embedding=view.text.positional_embedding[:-1])
        resize_text_pos_embed(words, SimpleNamespace(text=own))
        found[name] = torch.cat([words[name], found[name][-1:]])
    return {re.sub(r"^(visual|text)\.", r"\1.tower.", name): value for name, value in found.items()}


def to_openclip(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a whole state into (tensors of OpenCLIP's model, under its names; tensors of readers and methods)."""
    theirs, ours = {}, {}
    for name, value in state.items():
        if OURS.match(name):
            theirs[name.replace("tower.", "", 1)] = value
        elif name in ("logit_scale", "logit_bias") or name.startswith("text_decoder."):
            theirs[name] = value
        else:
            ours[name] = value
    return theirs, ours


# --- loading ----------------------------------------------------------------------------------------------------------
def load_checkpoint(
    model: ProLIP,
    source: str | os.PathLike | Mapping[str, Tensor],
    weights_only: bool = True,
    image_grid: tuple[int, int] | None = None,
) -> LoadReport:
    """Load weights of the same architecture; interpolates another image size or context length, otherwise strict.

    source: a file or a state dict; with OpenCLIP's weights, readers keep their initial values. image_grid: rows and
    columns of patches in training; default: those of the model if their number agrees, else a square. With weights of
    another method, the method's parts keep their initial values, then call `ProLIP.inherit`. With older weights, whole
    new parts and YOUNGER tensors keep theirs.
    """
    reads, path = is_reader(model.config), None if isinstance(source, Mapping) else Path(source)
    if reads and path and path.suffix in (".npz", ".npy"):
        return load_archive(model, path)
    place = path or "a state dict"
    given = read_state_dict(path, weights_only) if path else unwrap(source)
    own, kept = model.state_dict(), set[str]()
    state = {key: value for key, value in given.items() if key not in ARCHIVE_EXTRAS}
    if reads and not any(OURS.match(name) for name in state):
        state = from_openclip(model, state) | (readers_beside(path) if path else {})
        kept = {name for name in own if ".reader." in name or name == "logit_bias"} - state.keys()
        state |= {name: own[name].clone() for name in kept}
    for name in ("logit_scale", "logit_bias"):
        if name in state and state[name].numel() == 1:
            state[name] = state[name].reshape(own[name].shape)
    other_method, parts = not (state.keys() - kept) & model.added_names, {name.partition(".")[0] for name in state}
    new = {
        name
        for name in model.added_names
        if other_method or name.partition(".")[0] not in parts or (name.endswith(YOUNGER) and name not in state)
    }
    new |= model.own_starts if other_method else set()
    state, kept = state | {name: own[name] for name in new}, kept | new
    # Only for weights of the same parts: with one special token less, the grid would be misread.
    resized = []
    if state.keys() == own.keys() and not reads:
        resized = fit_positions(state, own, image_grid, model.visual.grid_size, model.context_length)
    check_fit(state, own)
    check_values_of(state, own, place)
    model.load_state_dict(state)
    if other_method:
        model.inherit()
    log.info(
        "%s: loaded %d of %d tensors; new, at their initial values: %s; interpolated: %s; not used: %s",
        place,
        len(own) - len(kept),
        len(own),
        grouped(kept),
        *(", ".join(names) or "none" for names in (resized, [x for x in given if x in ARCHIVE_EXTRAS])),
    )
    return LoadReport(tuple(sorted(kept)), tuple(resized))


def grouped(names: Iterable[str]) -> str:
    """Return names of tensors by module: "logit_bias, visual.reader.* (23)"; none: no name."""
    parts = Counter(".".join(name.split(".")[:2]) for name in sorted(names))
    return ", ".join(part if count == 1 else f"{part}.* ({count})" for part, count in parts.items()) or "none"


def load_archive(model: ProLIP, source: str | os.PathLike) -> LoadReport:
    """Load a big_vision archive, the format of SigLIP's published weights, as `load_checkpoint`."""
    starts = {name: value.clone() for name, value in model.state_dict().items() if name in model.own_starts}
    try:
        load_big_vision_weights(openclip_view(model), str(source))
    except (KeyError, AttributeError, AssertionError, RuntimeError, ValueError, OSError) as error:
        remedy = "give SigLIP weights of the same size as the SigLIP model"
        raise CheckpointError(f"{source} is not a big_vision archive of this model ({error}): {remedy}") from error
    model.load_state_dict(starts, strict=False)
    model.inherit()
    return LoadReport(tuple(sorted(to_openclip(model.state_dict())[1])), ())


def readers_beside(weights: Path) -> dict[str, Tensor]:
    """Read the readers and the method's parts next to OpenCLIP's weights; empty for a folder of another program."""
    beside, config = weights.parent / READERS, weights.parent / OPENCLIP_FILES[0]
    if weights.name != OPENCLIP_FILES[1] or not config.is_file() or "prolip_cfg" not in read_config(config)[0]:
        return {}
    if not beside.is_file():
        remedy = "copy it there, or delete prolip_cfg and method_cfg to start with new readers"
        raise CheckpointError(f"{config} has a prolip_cfg, but {READERS} is not next to it: {remedy}")
    return read_state_dict(beside)


def check_values_of(state: Mapping[str, Tensor], own: Mapping[str, Tensor], place: object) -> None:
    """Raise CheckpointError for infinite values, a wrong kind of dtype, and a scale out of range."""
    if lost := [name for name, value in state.items() if not value.isfinite().all()]:
        found = f"NaN or infinite values in {len(lost)} of {len(state)} tensors ({', '.join(lost[:3])})"
        raise CheckpointError(f"{place} holds {found}: the training diverged; give an earlier checkpoint")
    if kinds := [name for name, value in own.items() if value.is_floating_point() != state[name].is_floating_point()]:
        found = f"{state[kinds[0]].dtype} in {len(kinds)} of {len(own)} tensors ({', '.join(kinds[:3])})"
        raise CheckpointError(f"{place} holds {found}, but the model {own[kinds[0]].dtype}: give weights of this model")
    if (scale := float(state.get("logit_scale", torch.zeros(())).abs().max())) > LARGEST_LOG_SCALE:
        expected = f"the logarithm of a factor, at most {LARGEST_LOG_SCALE}"
        raise CheckpointError(f"{place} has a logit_scale of {scale:g}, expected {expected}: give another checkpoint")


def fit_positions(
    state: dict[str, Tensor], own: Mapping[str, Tensor], old: Grid | None, new: Grid, context: int
) -> list[str]:
    """Interpolate positions to a new grid of patches (rows, columns) and context in place; returns lines for a log."""
    changed = []
    for name in (IMAGE_POSITIONS, TEXT_POSITIONS):
        rows, target, is_image = state.get(name), own[name], name == IMAGE_POSITIONS
        if rows is None or rows.ndim != 2 or rows.shape[1] != target.shape[1] or len(rows) <= SPECIAL_TOKENS:
            continue  # left to the strict check
        # the same number of patches in another shape
        turned = is_image and old is not None and old != new and math.prod(old) == math.prod(new)
        if len(rows) != len(target) or turned:
            state[name] = resize_image_positions(rows, new, old) if is_image else resize_text_positions(rows, context)
            changed.append(f"{name} from {len(rows)} to {len(state[name])} rows")
    return changed


def resize_image_positions(positions: Tensor, grid: tuple[int, int], old: tuple[int, int] | None = None) -> Tensor:
    """Interpolate rows [CLS], [UNC], patches to another grid, as OpenCLIP; old: a square if the number differs."""
    special, patches = positions[:SPECIAL_TOKENS], positions[SPECIAL_TOKENS:]
    if old is None or old[0] * old[1] != len(patches):
        side = math.isqrt(len(patches))
        if side * side != len(patches):
            remedy = "put the weights' configuration, with their image size, next to them as config.json"
            raise ValueError(f"{len(patches)} patch positions form no square grid: {remedy}")
        old = side, side
    image = patches.float().reshape(1, *old, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=grid, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([special, image.permute(0, 2, 3, 1).flatten(0, 2).to(patches.dtype)])


def resize_text_positions(positions: Tensor, length: int) -> Tensor:
    """Resize rows tokens, [UNC], [CLS] to `length` tokens.

    Shorter: the first rows, because texts start at the first position. Longer, as LongProLIP: the first 20 rows (a
    third if there are fewer than 60) stay; the others are interpolated linearly over the rest, both ends fixed.
    """
    tokens, special = positions[:-SPECIAL_TOKENS], positions[-SPECIAL_TOKENS:]
    if length <= len(tokens):
        return torch.cat([tokens[:length], special])
    kept = min(KEEP_FIRST, len(tokens) // 3)
    rest = tokens[kept:].float().t().unsqueeze(0)
    rest = F.interpolate(rest, size=length - kept, mode="linear", align_corners=True)[0].t()
    return torch.cat([tokens[:kept], rest.to(tokens.dtype), special])


def check_fit(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError with both sides of every mismatch of names and shapes, and the remedy."""
    missing, unexpected = [key for key in own if key not in state], [key for key in state if key not in own]
    shapes = [
        f"{key}: checkpoint {tuple(state[key].shape)}, model {tuple(value.shape)}"
        for key, value in own.items()
        if key in state and state[key].shape != value.shape
    ]
    if not (missing or unexpected or shapes):
        return
    found = {"only in the model": missing, "only in the checkpoint": unexpected, "shapes": shapes}
    lines = [f"  {title} ({len(names)}): {', '.join(names)}" for title, names in found.items() if names]
    if any(name.startswith(("text_model.", "vision_model.")) for name in unexpected):
        remedy = "these names are those of transformers' CLIP: give OpenCLIP's weights of that model"
    elif "text.unc_emb" in missing:
        remedy = "these are OpenCLIP's weights, without [UNC]: give their architecture, such as --model ViT-B-16"
        remedy += " --pretrained FILE, to keep their means and add variances"
    elif shapes and not missing and not unexpected:
        remedy = "the sizes differ: create a model with the checkpoint's sizes in its configuration"
    else:
        remedy = "create the model from the checkpoint's config.json (local-dir:<folder>) or use another checkpoint"
    raise CheckpointError("\n".join(["the weights do not match the model:", *lines, f"  {remedy}"]))


def find_in(folder: str | os.PathLike, names: tuple[str, ...], what: str) -> Path:
    """Find the first of `names` in a folder. ValueError if a file is a link out of the folder."""
    folder = Path(folder)
    for name in names:
        if (folder / name).is_file() and not is_run(folder):
            check_links(folder)
            return folder / name
    there = first_few(sorted(os.listdir(folder)), 8) if folder.is_dir() else ""
    expected = f"expected one of {', '.join(names)}, found {there or 'nothing'}"
    raise FileNotFoundError(diagnose.why_no_model(folder) or f"no {what} in {folder}: {expected}")


def read_config(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read (model configuration, preprocessing) of a config.json: ours, OpenCLIP's hub layout, or the released one."""
    path = Path(path)
    config = read_json(path)
    wrapped = isinstance(config, dict) and "model_cfg" in config
    model = config["model_cfg"] if wrapped else config
    if wrapped and isinstance(model, dict):  # OpenCLIP ignores these keys
        model = {**model, **{key: config.pop(key) for key in OUR_BLOCKS if key in config}}
    if not isinstance(model, dict):
        expected = "expected an object with embed_dim, vision_cfg and text_cfg, at the top level or under model_cfg"
        raise ValueError(f"{path} holds no model configuration: got {type(model).__name__}, {expected}")
    preprocess = (config.get("preprocess_cfg") or {}) if wrapped else {}
    if "prolip_cfg" in model and wrapped:  # for other models OpenCLIP ignores unknown keys
        check_keys(config, ("model_cfg", "preprocess_cfg"), str(path))
    if not isinstance(preprocess, dict):
        raise ValueError(f"{path}: preprocess_cfg is {shown(preprocess)}: give name -> value")
    return model, preprocess


def save_pretrained(model: ProLIP, folder: str | os.PathLike, tokenizer: Any = None) -> Path:
    """Write weights and configuration; `local-dir:<folder>` loads the same model.

    With OpenCLIP's towers, OpenCLIP also opens the folder, as a deterministic model. tokenizer: from `get_tokenizer`;
    its files replace existing ones. The folder is replaced in one step; other files in it stay.
    """
    if not hasattr(model, "state_dict"):
        raise TypeError(f"expected a ProLIP as model, got {kind_of(model)}. Load the weights into a ProLIP first")
    folder = Path(folder)
    preprocess = getattr(model.visual, "preprocess_cfg", {})
    config: dict[str, Any] = {"model_cfg": model.config, "preprocess_cfg": preprocess}
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    config_name, files = CONFIG_NAMES[0], {WEIGHT_NAMES[0]: tensors}
    if is_reader(model.config):
        theirs = {key: value for key, value in model.config.items() if key not in OUR_BLOCKS}
        kept = {name: preprocess[name] for name in PREPROCESS if name in preprocess}
        config = {"model_cfg": theirs, "preprocess_cfg": kept} | {key: model.config[key] for key in OUR_BLOCKS}
        config_name, files = OPENCLIP_FILES[0], dict(zip((OPENCLIP_FILES[1], READERS), to_openclip(tensors)))
    elif (other := folder / OPENCLIP_FILES[0]).exists():  # loading would prefer it
        raise ValueError(f"{other} belongs to another model: give another folder, or delete it")
    text = json.dumps(config, indent=2) + "\n"  # fails before the weights are written
    gone = {diagnose.FIT, *(TOKENIZER_NAMES if tokenizer is not None else ())}
    with replacing_folder(folder, kept=lambda name: name not in gone) as place:
        for name, values in files.items():
            save_file(values, place / name, metadata={"format": "pt"})
        (place / config_name).write_text(text, encoding="utf-8")
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(place)
    return folder
