"""Models by name: configurations (bundled, of folders, of the hub) and places of their weights."""

from __future__ import annotations

import json
import os
import urllib.request
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import open_clip
from open_clip.factory import parse_model_name
from open_clip.model import CLIPVisionCfg
from open_clip.utils import to_2tuple

from prolip.models.checkpoint import PREPROCESS, find_in, read_config
from prolip.models.config import PreprocessRules, check, check_openclip, complete, is_reader, is_released
from prolip.models.diagnose import CONFIG_NAMES, READERS, WEIGHT_NAMES, why_no_name
from prolip.utils.flags import did_you_mean
from prolip.utils.messages import explain_missing

CONFIG_DIR = Path(__file__).parent / "configs"
# for published models, whose folders also hold a transformers model under the plain names
OPENCLIP_FIRST = tuple(sorted(WEIGHT_NAMES, key=lambda name: not name.startswith("open_clip")))
PROBE_SECONDS = 5.0


class HubFileNotFoundError(FileNotFoundError):
    """A file neither in the local cache nor on the hub; the message gives the reason, not the remedy."""


# --- names ------------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def own_models() -> dict[str, dict[str, Any]]:
    """Return ProLIP's own architectures by name."""
    files = sorted(CONFIG_DIR.glob("*.json"), key=lambda path: path.stem.lower())
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}


def list_models() -> list[str]:
    """List the names of `create_model` and `get_tokenizer` without a schema: ProLIP's, then OpenCLIP's."""
    return [*own_models(), *open_clip.list_models()]


def why_unknown(name: str) -> str:
    """Return the message for an unknown model name: what it looks like, or the nearest names."""
    near = did_you_mean(name, list_models())
    if not near.startswith("did"):  # OpenCLIP has too many to list
        near = f"choose from {', '.join(own_models())}, or OpenCLIP's open_clip.list_models()"
    others = "or hf-hub:<org/name>, local-dir:<folder with a configuration and weights>"
    return why_no_name(name) or f"unknown model {name!r}: {near} ({others})"


def get_model_config(
    model_name: str, cache_dir: str | None = None, tag: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (complete model configuration, preprocessing) of a model's name, for its weights of this `tag`."""
    if not isinstance(model_name, str) or not model_name:
        remedy = "one of list_models(), local-dir:<folder> or hf-hub:<name>"
        raise ValueError(f"model_name is {model_name!r}: give {remedy}")
    schema, name = parse_model_name(model_name)
    if schema in ("local-dir", "hf-hub"):
        path = _find_file(schema, name, CONFIG_NAMES, "configuration", cache_dir)
        config, preprocess = read_config(path)
        try:
            check(PreprocessRules, preprocess, "preprocess_cfg")
            return complete(config), preprocess
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if (found := own_models().get(name)) is not None:
        return complete(found), {}
    name = name.replace("/", "-")
    if (theirs := open_clip.get_model_config(name)) is None:
        raise ValueError(why_unknown(model_name))
    if open_clip.get_pretrained_cfg(name, tag or "").get("quick_gelu"):  # OpenCLIP only warns
        theirs["quick_gelu"] = True
    tags = open_clip.list_pretrained_tags_by_model(name)
    cfgs = [open_clip.get_pretrained_cfg(name, one) for one in ([tag] if tag in tags else tags)]
    given = [{key: cfg[key] for key in PREPROCESS if cfg.get(key)} for cfg in cfgs]
    return complete(theirs), given[0] if given and all(one == given[0] for one in given) else {}


# --- weights ----------------------------------------------------------------------------------------------------------
def is_bare(model_name: str) -> bool:
    """Return True for the name of a local folder with only a configuration."""
    schema, name = parse_model_name(model_name)
    return schema == "local-dir" and not any((Path(name) / known).is_file() for known in WEIGHT_NAMES)


def check_own_weights(model_name: str, pretrained: str | None) -> None:
    """Raise ValueError if a name has its own weights and others are given."""
    if pretrained and parse_model_name(model_name)[0] and not is_bare(model_name):
        raise ValueError(f"{model_name} has its own weights, so pretrained={pretrained!r} would be ignored: remove one")


def find_weights(model_name: str, pretrained: str | None, cache_dir: str | None = None) -> Path | None:
    """Return the weights file of a name and `pretrained`, or None; a local folder may hold only a configuration."""
    schema, name = parse_model_name(model_name)
    check_own_weights(model_name, pretrained)
    if schema and not pretrained:
        return _find_file(schema, name, WEIGHT_NAMES, "weights", cache_dir)
    if not pretrained:
        return None
    schema, name = parse_model_name(str(pretrained))
    if schema == "hf-hub":
        with suppress(FileNotFoundError):  # `check_forward` compares it with the model
            hub_file(name, tuple(reversed(CONFIG_NAMES)), cache_dir)
    if schema:
        return _find_file(schema, name, OPENCLIP_FIRST, "weights", cache_dir)
    if cfg := open_clip.get_pretrained_cfg(model_name.replace("/", "-"), pretrained):
        repo, _, file = cfg["hf_hub"].rpartition("/")
        return hub_file(repo, (file,) if file else OPENCLIP_FIRST, cache_dir)
    path = Path(pretrained)
    if path.is_dir():
        return find_in(path, OPENCLIP_FIRST, "weights")
    if not path.is_file():
        tagged = sorted(open_clip.list_pretrained_models_by_tag(str(pretrained)), key=lambda one: one[:3] != "ViT")
        hint = f" (for this tag of OpenCLIP give its architecture, such as --model {tagged[0]})" if tagged else ""
        remedy = f"give a weights file, its folder, or hf-hub:<org/name>{hint}"
        raise FileNotFoundError(f"--pretrained {pretrained!r} does not exist: {remedy}. {explain_missing(str(path))}")
    return path


def _find_file(schema: str, name: str, names: tuple[str, ...], what: str, cache_dir: str | None) -> Path:
    if schema == "local-dir":
        return find_in(name, names, what)
    found = hub_file(name, names, cache_dir)
    if what == "weights" and is_reader(config_beside(found)):
        hub_file(name, (READERS,), cache_dir)
    return found


def config_beside(weights: Path) -> dict[str, Any]:
    """Read the configuration of weights from the file next to them; empty if there is none."""
    for name in CONFIG_NAMES:
        path, theirs = weights.parent / name, dict[str, Any]()
        with suppress(OSError, ValueError):
            theirs, _ = read_config(path)
        if {"embed_dim", "vision_cfg", "text_cfg"} <= theirs.keys():  # not the config.json of another program
            try:
                complete(theirs) if "prolip_cfg" in theirs or is_released(theirs) else check_openclip(theirs)
            except ValueError as error:
                raise ValueError(f"{path}, next to the weights: {error}") from error
            return theirs
    return {}


def check_forward(config: dict[str, Any], theirs: dict[str, Any], weights: Path, chosen: set[str]) -> None:
    """Raise ValueError for weights of another forward pass, even with matching shapes, unless the pass is `chosen`."""
    trained: dict[str, Any] = {"quick_gelu": bool(theirs.get("quick_gelu", False))} if theirs else {}
    if is_released(theirs) or theirs.get("prolip_cfg"):
        trained["forward"] = "released" if is_released(theirs) else theirs["prolip_cfg"].get("forward", "paper")
    for key, value in trained.items():
        mine = config["prolip_cfg"]["forward"] if key == "forward" else config["quick_gelu"]
        if mine != value and key not in chosen:
            found = f"{weights} was trained with {key}={value!r}, but the model has {key}={mine!r}"
            raise ValueError(f"{found}: give {key}={value!r}, or local-dir:{weights.parent} as the model")


def grid_of(theirs: dict[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of patches of a configuration; None without one, or without patches (ResNet)."""
    vision = theirs.get("vision_cfg", {})
    patch = vision.get("patch_size", CLIPVisionCfg.patch_size)
    if not (vision and patch):
        return None
    height, width = to_2tuple(vision.get("image_size", CLIPVisionCfg.image_size))
    rows, columns = to_2tuple(patch)
    return height // rows, width // columns


# --- the hub: the cache first, and no long retries without a network --------------------------------------------------
def offline() -> bool:
    """Return True if the user disabled the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def reachable() -> bool:
    """Return True if the hub answers one request, through proxies of the environment; never raises."""
    from huggingface_hub.constants import ENDPOINT

    try:
        urllib.request.urlopen(urllib.request.Request(ENDPOINT, method="HEAD"), timeout=PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        return getattr(error, "code", 500) < 500  # an answer, although an error
    return True


def hub_file(repo: str, names: tuple[str, ...], cache_dir: str | None = None) -> Path:
    """Return a local path to the first of `names` in `repo`; does not download the others."""
    try:
        folder = hub_files(repo, *((name,) for name in names), cache_dir=cache_dir)
    except HubFileNotFoundError as error:
        fetch = f"On a machine with a network, run `hf download {repo} --local-dir <folder>`, copy the folder here and"
        fetch += " use local-dir:<folder>, or give its weights as --pretrained"
        raise HubFileNotFoundError(f"{error}. {fetch}") from error
    return next(folder / name for name in names if (folder / name).is_file())


def hub_files(repo: str, *groups: tuple[str, ...], cache_dir: str | None = None) -> Path:
    """Return a local folder with the files of the first group that `repo` has, from the cache or else the hub."""
    from huggingface_hub import snapshot_download  # slow: takes a second
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    reason = "HF_HUB_OFFLINE is set" if offline() else "the hub cannot be reached"
    for local in (True, False):
        if not local:
            if offline() or not reachable():
                break
            reason = "the repository has none"
        for names in groups:
            try:
                options: dict[str, Any] = {"allow_patterns": list(names), "local_files_only": local}
                found = Path(snapshot_download(repo, cache_dir=cache_dir, **options))
            except HFValidationError as error:
                raise ValueError(f"{repo!r} is not a name of the hub: expected org/name ({error})") from error
            except (HfHubHTTPError, OSError) as error:
                reason = reason if local else str(error).splitlines()[0]
                continue
            if any((found / name).is_file() for name in names):
                return found
    missing = " or ".join(name for names in groups for name in names)
    raise HubFileNotFoundError(f"no {missing} of {repo} in the local cache, and {reason}")
