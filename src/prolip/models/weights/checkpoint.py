"""Reading, checking, mapping and writing weights. Loading is strict; a mismatch is reported from both sides."""
from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from prolip.gaussian import kind_of
from prolip.models.config import check_keys, is_reader
from prolip.models.prolip import ProLIP
from prolip.models.towers import SPECIAL_TOKENS
from prolip.models.weights.openclip import (
    BIG_VISION, completed, is_openclip, load_big_vision, to_openclip,
)
from prolip.models.weights.unreadable import (
    CONFIG_NAMES,
    READERS,
    TOKENIZER_NAMES,
    WEIGHT_NAMES,
    is_run,
    why_no_weights,
    why_not_in,
)
from prolip.utils.documents import read_json, shown
from prolip.utils.links import check_links
from prolip.utils.outputs import replacing_folder

log = logging.getLogger(__name__)

# Where checkpoints keep the weights: those of `training`, of OpenCLIP, of others.
CONTAINERS = ("objective", "state_dict", "model")
WRAPPERS = ("module.", "_orig_mod.", "model.")
# A plain CLIP checkpoint keeps the text tower's parts at its top level.
PLAIN_TEXT = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.", "text_projection")
# What a TorchScript archive of a CLIP model holds besides its weights.
ARCHIVE_EXTRAS = ("input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask")
IMAGE_POSITIONS, TEXT_POSITIONS = "visual.positional_embedding", "text.positional_embedding"
# LongProLIP keeps the first 20 text positions, which nearly every training caption reached, and stretches the others.
KEEP_FIRST = 20
#: Logarithm of a scale of similarities: OpenCLIP bounds it by log 100.
LARGEST_LOG_SCALE = 20


#: What of a preprocessing OpenCLIP reads from a folder, its files, and our blocks beside its own.
PREPROCESS = ("mean", "std", "interpolation", "resize_mode")
OPENCLIP_FILES = ("open_clip_config.json", "open_clip_model.safetensors")
OUR_BLOCKS = ("prolip_cfg", "method_cfg")


class CheckpointError(RuntimeError):
    """Weights and model do not fit."""

    many_lines = True


class LoadReport(NamedTuple):
    """What a load did besides copying: parameters that kept their initial values, and tensors that were resized."""

    kept: tuple[str, ...]
    resized: tuple[str, ...]


def read_state_dict(path: str | os.PathLike, weights_only: bool = True) -> dict[str, Tensor]:
    """The tensors of a safetensors or torch file, out of the CONTAINERS of checkpoints and `module.` prefixes."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: give a .safetensors, .pt, .pth or .bin file")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*TorchScript archive")  # the error says it
            if path.suffix == ".safetensors":
                state = load_file(str(path))
            else:
                state = torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:  # a damaged file makes torch raise whatever its bytes happen to mean
        raise CheckpointError(why_no_weights(path, error)) from error
    if isinstance(state, torch.jit.ScriptModule):
        state = state.state_dict()
    return unwrap(state, path)


def unwrap(state: Any, source: object = "the checkpoint") -> dict[str, Tensor]:
    """Take a state dict out of its containers, and off its names the prefixes that all of them share."""
    while isinstance(state, Mapping):
        inner = next((name for name in CONTAINERS if isinstance(state.get(name), Mapping)), None)
        if inner is None:
            break
        state = state[inner]
    if not isinstance(state, Mapping) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        got = f"[{', '.join(sorted(map(repr, state))[:8])}]" if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(f"{source} holds no state dict: got {got}, want name -> tensor, at the top level or under"
                              f" {' or '.join(CONTAINERS)}")
    state = dict(state)
    while True:
        shared = [p for p in WRAPPERS if all(key.startswith(p) for key in state)]
        if not shared:
            return state
        state = {key.removeprefix(shared[0]): value for key, value in state.items()}


def load_checkpoint(
    model: ProLIP,
    source: str | os.PathLike | Mapping[str, Tensor],
    init_uncertainty: bool = False,
    weights_only: bool = True,
    image_grid: tuple[int, int] | None = None,
) -> LoadReport:
    """Load weights of the same architecture; another image size or context length is interpolated, all else is strict.

    source: a file or a state dict. init_uncertainty: these are weights of a deterministic OpenCLIP model; what ProLIP
    adds to it keeps its initial values ([UNC] tokens with their positions, log-variance heads, the text's [CLS] with
    its position, the text projection's bias, rows of a larger vocabulary, and scale and bias if the checkpoint has no
    bias). Nothing else may be missing. image_grid: rows and columns of patches that the weights were trained with,
    which their positions do not tell; without, those of the model if there are as many, else a square. What the
    model's method adds keeps its initial values where the weights have none of it, as they are of another method (and
    so do scale and bias, where the method has a start of its own for them), or none of a whole part beside the towers,
    as they are older than that. Of another method, heads begin with what `ProLIP.inherit` gives them.
    Raises `CheckpointError` naming every mismatch.
    """
    reads = is_reader(model.config)
    if reads and not isinstance(source, Mapping) and Path(source).suffix in BIG_VISION:
        return load_big_vision(model, source)
    given = unwrap(source) if isinstance(source, Mapping) else read_state_dict(source, weights_only)
    own = model.state_dict()
    kept: set[str] = set()
    moved = PLAIN_TEXT if "token_embedding.weight" in given else ()  # OpenCLIP's CustomTextCLIP has them under text.
    state = {f"text.{key}" if key.startswith(moved) else key: value for key, value in given.items()
             if key not in ARCHIVE_EXTRAS}  # fmt: skip
    if reads and is_openclip(state):
        state, kept = completed(model, given, {} if isinstance(source, Mapping) else readers_beside(Path(source)))
    for name in ("logit_scale", "logit_bias"):
        if name in state:
            state[name] = state[name].reshape(own[name].shape) if state[name].numel() == 1 else state[name]
    other_method, parts = not (state.keys() - kept) & model.added_names, {name.partition(".")[0] for name in state}
    added = {name: own[name] for name in model.added_names if other_method or name.partition(".")[0] not in parts}
    if other_method:
        added |= {name: own[name] for name in model.own_starts}
    if init_uncertainty and not reads:
        state, kept = from_deterministic(state, {name: value for name, value in own.items() if name not in added})
    state, kept = state | added, kept | added.keys()
    # Positions are fitted only to weights of the same parts: with one special token less their grid would be misread.
    same_parts = state.keys() == own.keys() and not reads
    grids = (image_grid, model.visual.grid_size)
    resized = fit_positions(state, own, grids, model.context_length) if same_parts else []
    check_fit(state, own, init_uncertainty)
    place = "a state dict" if isinstance(source, Mapping) else source
    if lost := [name for name, value in state.items() if not value.isfinite().all()]:
        raise CheckpointError(f"{place} holds NaN or infinite values in {len(lost)} of {len(state)} tensors"
                              f" ({', '.join(lost[:3])}): what trained it had diverged, give an earlier checkpoint")
    check_values_of(state, own, place)
    model.load_state_dict(state)
    if other_method:
        model.inherit()
    report = LoadReport(tuple(sorted(kept)), tuple(resized))
    aside = {*ARCHIVE_EXTRAS, *(["logit_scale"] if "logit_scale" in kept else [])}
    log.info("%s: %s", place, load_report(report, own, [name for name in given if name in aside]))
    return report


def readers_beside(weights: Path) -> dict[str, Tensor]:
    """What a folder of ours has beside OpenCLIP's weights; nothing where it is another's.

    CheckpointError where its configuration says that there are readers, and their file is gone.
    """
    beside, config = weights.parent / READERS, weights.parent / OPENCLIP_FILES[0]
    if weights.name != OPENCLIP_FILES[1] or not config.is_file() or "prolip_cfg" not in read_config(config)[0]:
        return {}
    if not beside.is_file():
        raise CheckpointError(f"{config} has a prolip_cfg, and the file with what it speaks of, {READERS}, is not beside"
                              " it: copy it there, or delete prolip_cfg and method_cfg from the file to begin with new"
                              " readers")  # fmt: skip
    return read_state_dict(beside)


def check_values_of(state: Mapping[str, Tensor], own: Mapping[str, Tensor], place: object) -> None:
    """CheckpointError for numbers of another kind than the model's, which a copy would cast; for an absurd scale."""
    kinds = [name for name, value in own.items() if value.is_floating_point() != state[name].is_floating_point()]
    if kinds:
        raise CheckpointError(
            f"{place} holds {state[kinds[0]].dtype} in {len(kinds)} of {len(own)} tensors ({', '.join(kinds[:3])}), "
            f"the model {own[kinds[0]].dtype}: give its own weights"
        )
    scale = state.get("logit_scale")
    if scale is not None and scale.abs().max() > LARGEST_LOG_SCALE:
        raise CheckpointError(
            f"{place} has a logit_scale of size {scale.abs().max():g}, whose exponential scales similarities: no "
            f"trained model has one beyond {LARGEST_LOG_SCALE}, give another checkpoint"
        )


def load_report(report: LoadReport, own: Mapping[str, Tensor], unused: Sequence[str]) -> str:
    """What was loaded and what is new, for the log. own: the model's state; unused: the checkpoint's, left aside."""
    new = [name for name in report.kept if name in own]
    rows = [name for name in report.kept if name not in own]  # name[rows] of tensors that are loaded otherwise
    parts: dict[str, list[int]] = {}
    for name in own:
        counts = parts.setdefault(name.split(".")[0] if "." in name else "logit", [0, 0])
        counts[0] += name not in new
        counts[1] += 1
    shares = ", ".join(f"{part} {loaded} of {every}" for part, (loaded, every) in parts.items())
    lines = [f"loaded {len(own) - len(new)} of {len(own)} tensors ({shares})"]
    lines += [f"{title}: {', '.join(names) or 'none'}" for title, names in (
        ("new, at their initial values", new), *([("new rows", rows)] if rows else []),
        *([("interpolated", report.resized)] if report.resized else []), ("not used", unused),
    )]  # fmt: skip
    return "; ".join(lines)


def from_deterministic(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], set[str]]:
    """A deterministic OpenCLIP model's weights in ProLIP's layout, completed with initial values; their names.

    own: the model's fresh state. Positions are brought to the model's size here, since the special rows are new.
    """
    state, kept = dict(state), set()
    has_cls = "text.cls_emb" in state
    added = {
        "visual.unc_embedding", "visual.uncertainty_proj.weight", "visual.uncertainty_proj.bias", "text.unc_emb",
        "text.text_uncertainty_projection.weight", "text.text_uncertainty_projection.bias", "text.text_projection.bias",
    }
    if any(name in state for name in ("visual.unc_embedding", "text.unc_emb")):
        raise CheckpointError("these weights have [UNC] tokens already: load them without init_uncertainty")
    if "text.text_projection" in state and "text.text_projection.weight" in own:  # a matrix (width, D), a Linear
        state["text.text_projection.weight"] = state.pop("text.text_projection").t().contiguous()
    if "logit_bias" not in state:  # a softmax loss's scale means nothing to a sigmoid loss
        state.pop("logit_scale", None)
        added |= {"logit_scale", "logit_bias"}
    for name in added if has_cls else {*added, "text.cls_emb"}:
        if name not in state and name in own:
            state[name] = own[name].clone()
            kept.add(name)
    kept |= _insert_special_rows(state, own, has_cls)
    return state, kept


def _insert_special_rows(state: dict[str, Tensor], own: Mapping[str, Tensor], has_cls: bool) -> set[str]:
    """Give positions the rows of new special tokens, and the vocabulary its new ids, from the fresh model."""
    kept = set()
    old, new = state.get(IMAGE_POSITIONS), own[IMAGE_POSITIONS]
    if old is not None and old.shape[1:] == new.shape[1:]:
        state[IMAGE_POSITIONS] = torch.cat([old[:1], new[1:2].to(old), old[1:]])
        kept.add(f"{IMAGE_POSITIONS}[1] ([UNC])")
    old, new = state.get(TEXT_POSITIONS), own[TEXT_POSITIONS]
    if old is not None and old.shape[1:] == new.shape[1:]:
        tokens = old[:-1] if has_cls else old
        cls = old[-1:] if has_cls else new[-1:].to(old)
        state[TEXT_POSITIONS] = torch.cat([tokens, new[-2:-1].to(old), cls])
        kept.add(f"{TEXT_POSITIONS}[-2] ([UNC])")
        kept |= set() if has_cls else {f"{TEXT_POSITIONS}[-1] ([CLS])"}
    name = "text.token_embedding.weight"
    old, new = state.get(name), own[name]
    if old is not None and old.shape[1:] == new.shape[1:] and len(old) < len(new):
        state[name] = torch.cat([old, new[len(old):].to(old)])
        kept.add(f"{name}[{len(old)}:{len(new)}] (ids new to the vocabulary)")
    return kept


def fit_positions(
    state: dict[str, Tensor],
    own: Mapping[str, Tensor],
    grids: tuple[tuple[int, int] | None, tuple[int, int]],
    context: int,
) -> list[str]:
    """Interpolate positions of another image size or context length in place; returns what was changed.

    grids: rows and columns of patches in the checkpoint, None where unknown, and in the model.
    """
    changed = []
    before, now = grids
    for name, resize in (
        (IMAGE_POSITIONS, lambda x: resize_image_positions(x, now, before)),
        (TEXT_POSITIONS, lambda x: resize_text_positions(x, context)),
    ):
        old, new = state.get(name), own[name]
        if old is None or old.ndim != 2 or old.shape[1] != new.shape[1] or len(old) <= SPECIAL_TOKENS:
            continue  # left to the strict check
        # As many patches may lie in another shape.
        turned = name == IMAGE_POSITIONS and before not in (None, now) and math.prod(before) == math.prod(now)
        if len(old) != len(new) or turned:
            state[name] = resize(old)
            changed.append(f"{name} from {len(old)} to {len(state[name])} rows, the {SPECIAL_TOKENS} special ones kept")
    return changed


def resize_image_positions(
    positions: Tensor, grid: tuple[int, int], old: tuple[int, int] | None = None
) -> Tensor:
    """Rows [CLS], [UNC], patches -> the same for another grid; the special rows are untouched.

    Bicubic, antialiased, as OpenCLIP does it. old: rows and columns of the patches, a square if these are not as many.
    """
    special, patches = positions[:SPECIAL_TOKENS], positions[SPECIAL_TOKENS:]
    if old is None or old[0] * old[1] != len(patches):
        side = math.isqrt(len(patches))
        if side * side != len(patches):
            raise ValueError(
                f"{len(patches)} patch positions form no square grid, so their shape is unknown: give the weights' own"
                " configuration, which says their image size, as local-dir:<folder> or in a config.json beside the"
                " weights"
            )
        old = side, side
    image = patches.float().reshape(1, *old, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=grid, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([special, image.permute(0, 2, 3, 1).flatten(0, 2).to(patches.dtype)])


def resize_text_positions(positions: Tensor, length: int) -> Tensor:
    """Rows tokens, [UNC], [CLS] -> the same for `length` tokens; the special rows are untouched.

    Shorter: the first rows, since texts start at the first position. Longer, as LongProLIP: the first 20 rows (a third
    of them when there are fewer than 60) stay and the others are interpolated linearly, both ends fixed, over the rest.
    """
    tokens, special = positions[:-SPECIAL_TOKENS], positions[-SPECIAL_TOKENS:]
    if length <= len(tokens):
        return torch.cat([tokens[:length], special])
    kept = min(KEEP_FIRST, len(tokens) // 3)
    rest = tokens[kept:].float().t().unsqueeze(0)
    rest = F.interpolate(rest, size=length - kept, mode="linear", align_corners=True)[0].t()
    return torch.cat([tokens[:kept], rest.to(tokens.dtype), special])


def check_fit(state: Mapping[str, Tensor], own: Mapping[str, Tensor], init_uncertainty: bool) -> None:
    """CheckpointError with both sides of every mismatch of names and shapes, and the remedy that fits it."""
    missing, unexpected = [key for key in own if key not in state], [key for key in state if key not in own]
    shapes = [f"{key}: checkpoint {tuple(state[key].shape)}, model {tuple(value.shape)}" for key, value in own.items()
              if key in state and state[key].shape != value.shape]  # fmt: skip
    if not (missing or unexpected or shapes):
        return
    lines = ["the weights do not fit the model:"]
    for title, names in (("only in the model", missing), ("only in the checkpoint", unexpected)):
        if names:
            lines.append(f"  {title} ({len(names)}): {', '.join(names)}")
    if shapes:
        lines.append(f"  shapes ({len(shapes)}): {'; '.join(shapes)}")
    if any(name.startswith(("text_model.", "vision_model.")) for name in unexpected):
        remedy = ("these are names of transformers' CLIP: give OpenCLIP's weights of that model, whose names begin with"
                  " visual. and text. or transformer.")
    elif any(".trunk." in name for name in unexpected):
        remedy = "this is a timm image tower, which has no place for [UNC]: use a checkpoint of OpenCLIP's own ViT"
    elif any("unc" in name for name in missing) and not init_uncertainty:
        remedy = ("these are weights without uncertainty: pass init_uncertainty=True to create the missing parts and"
                  " load all others")
    elif shapes and not missing and not unexpected:
        remedy = "the architectures differ in size: create the model whose configuration has the checkpoint's shapes"
    else:
        remedy = "create the model from the checkpoint's own config.json (local-dir:<folder>) or use another checkpoint"
    raise CheckpointError("\n".join([*lines, f"  {remedy}"]))


def find_in(folder: str | os.PathLike, names: tuple[str, ...], what: str) -> Path:
    """The first of `names` in a folder. ValueError where a file in it is a link that leaves it."""
    folder = Path(folder)
    for name in names:
        if (folder / name).is_file() and not is_run(folder):
            check_links(folder)
            return folder / name
    raise FileNotFoundError(why_not_in(folder, names, what))


def read_config(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model configuration, preprocessing) of a config.json: ours, OpenCLIP's hub layout, or the released flat one."""
    path = Path(path)
    config = read_json(path)
    wrapped = isinstance(config, dict) and "model_cfg" in config
    model = config["model_cfg"] if wrapped else config
    if wrapped and isinstance(model, dict):  # where OpenCLIP does not look
        model = {**model, **{key: config.pop(key) for key in OUR_BLOCKS if key in config}}
    if not isinstance(model, dict):
        raise ValueError(f"{path} holds no model configuration: got {type(model).__name__}, want an object with"
                         " embed_dim, vision_cfg and text_cfg, at the top level or under model_cfg")
    preprocess = (config.get("preprocess_cfg") or {}) if wrapped else {}
    if "prolip_cfg" in model and wrapped:  # of other models OpenCLIP reads what it knows
        check_keys(config, ("model_cfg", "preprocess_cfg"), str(path))
    if not isinstance(preprocess, dict):
        raise ValueError(f"{path}: preprocess_cfg is {shown(preprocess)}: give name -> value")
    return model, preprocess


def save_pretrained(model: ProLIP, folder: str | os.PathLike, tokenizer: Any = None) -> Path:
    """Write model.safetensors and config.json, with which `local-dir:<folder>` gives the same model again.

    tokenizer: one of `get_tokenizer`'s; its files, if it has any, are written beside them, in the place of another's.
    The folder is replaced in one step; other files in it stay. ValueError where one of them names another model.
    """
    if not hasattr(model, "state_dict"):
        raise TypeError(f"model is {kind_of(model)}, want a ProLIP: load the weights into one and give that")
    folder = Path(folder)
    other = folder / CONFIG_NAMES[1]
    if other.exists() and not is_reader(model.config):  # which loading would take instead
        raise ValueError(f"{other} is of another model: give another folder, or delete it")
    if is_reader(model.config):
        return save_with_readers(model, folder, tokenizer)
    config = {"model_cfg": model.config, "preprocess_cfg": getattr(model.visual, "preprocess_cfg", {})}
    text = json.dumps(config, indent=2) + "\n"  # what cannot be written is known before the weights are
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    gone = TOKENIZER_NAMES if tokenizer is not None else ()
    with replacing_folder(folder, kept=lambda name: name not in gone) as place:
        save_file(tensors, place / WEIGHT_NAMES[0], metadata={"format": "pt"})
        (place / CONFIG_NAMES[0]).write_text(text, encoding="utf-8")
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(place)
    return folder


def save_with_readers(model: ProLIP, folder: Path, tokenizer: Any) -> Path:
    """OpenCLIP's own configuration and weights, which it opens as points, our blocks where it does not look, and a file
    with readers and what the method added.
    """
    ours = {key: model.config[key] for key in OUR_BLOCKS}
    theirs = {key: value for key, value in model.config.items() if key not in OUR_BLOCKS}
    preprocess = getattr(model.visual, "preprocess_cfg", {})
    kept = {name: preprocess[name] for name in PREPROCESS if name in preprocess}
    text = json.dumps({"model_cfg": theirs, "preprocess_cfg": kept} | ours, indent=2) + "\n"
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    weights, readers = to_openclip(tensors)
    gone = TOKENIZER_NAMES if tokenizer is not None else ()
    with replacing_folder(folder, kept=lambda name: name not in gone) as place:
        save_file(weights, place / OPENCLIP_FILES[1], metadata={"format": "pt"})
        save_file(readers, place / READERS, metadata={"format": "pt"})
        (place / OPENCLIP_FILES[0]).write_text(text, encoding="utf-8")
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(place)
    return folder
