"""Loading of our models and every OpenCLIP model by name, with preprocessing and tokenizer, and fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import open_clip
import torch
from open_clip.factory import parse_model_name
from open_clip.pretrained import is_pretrained_cfg
from PIL import Image
from torch import Tensor, nn

from prolip.data import images as decoding
from prolip.factory import create_model_and_transforms, flattening
from prolip.gaussian import kind_of
from prolip.models.checkpoint import CheckpointError, find_in, read_config, read_state_dict
from prolip.models.config import PreprocessRules, check, check_openclip, is_released
from prolip.models.diagnose import CONFIG_NAMES, WEIGHT_NAMES, why_no_model
from prolip.models.registry import check_own_weights, hub_file, hub_files, is_bare, own_models, why_unknown
from prolip.models.tokenizer import BPETokenizer, check_ids, cut, get_tokenizer, local, read_folder
from prolip.uncertainty.openclip import FILE, PointModel, has_variances, with_variances
from prolip.utils.documents import read_json
from prolip.utils.moved import late

RANDOM = "random"
SEED = 0  # seed of random weights, equal in every process
TEXTS = ("a photo of a cat.", "Zürich, 12:30")  # texts whose tokens are part of a fingerprint
#: Seconds for which transformers asks whether to run code of a model's folder; with 0 it refuses at once.
FOREIGN_CODE = "transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE"

__getattr__ = late(__name__, {}, moved={"load_embedder": "prolip.Embedder.load(name, pretrained, tokenizer=...)"})


class Loaded(NamedTuple):
    """A network with `encode_image` and `encode_text` -> Gaussian, its preprocessing and its tokenizer."""

    network: nn.Module
    preprocess: Callable[[Image.Image], Tensor]
    tokenizer: Callable[[list[str]], Tensor]


def load_model(model: str, pretrained: str | None, tokenizer: str | None) -> Loaded:
    """Return a model on the CPU by its name, as for `Embedder.load`."""
    ours = is_prolip(model)
    check_weights(model, pretrained, ours)
    pretrained = None if pretrained == RANDOM else pretrained
    if not ours:
        return load_openclip(model, pretrained, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        load = pretrained is not None or not is_bare(model)
        network, _, preprocess = create_model_and_transforms(model, pretrained, load_weights=load)
    return Loaded(network, preprocess, get_tokenizer(model, tokenizer=tokenizer))


def load_openclip(model: str, pretrained: str | None, tokenizer: str | None) -> Loaded:
    """Return an OpenCLIP model in float32; weights that are unavailable or do not match raise ValueError."""
    tokenize = openclip_tokenizer(model, tokenizer)
    foreign = check_openclip_config(model)
    trained = pretrained is not None or parse_model_name(model)[0] is not None
    # OpenCLIP only warns about missing weights, and downloads those of a text tower alone if none are requested.
    options: dict[str, Any] = {"pretrained": pretrained, "require_pretrained": trained, "pretrained_text": False}
    try:
        with torch.random.fork_rng(devices=[]), patch(FOREIGN_CODE, 0) if foreign else nullcontext():
            torch.manual_seed(SEED)
            network, _, preprocess = open_clip.create_model_and_transforms(model, **options)
    except Exception as error:  # damaged files raise any kind of error
        what = f"{model} with the weights {pretrained!r}" if pretrained else model
        remedy = "Download the weights on a machine with network access, and give --pretrained FILE"
        why = f"{str(error).rstrip('.')}. {remedy}"
        if pretrained and Path(pretrained).is_file():
            try:  # our message if it is unreadable, OpenCLIP's if it does not match
                read_state_dict(pretrained)
                why = f"{pretrained} does not match: {error}"
            except CheckpointError as unreadable:
                why = str(unreadable)
        raise ValueError(f"OpenCLIP cannot load {what}: {why}") from error
    schema, folder = parse_model_name(model)
    if schema == "hf-hub" and read_json(config_file(model)).get("uncertainty"):  # as prolip hub writes it
        folder = str(hub_files(folder, (FILE,)))
    if folder and has_variances(folder):
        return Loaded(with_variances(network, folder), flattening(preprocess), tokenize)
    return Loaded(PointModel(network), flattening(preprocess), tokenize)


def check_openclip_config(model: str) -> bool:
    """Return whether this configuration has a tower of transformers. ValueError for invalid values of a file."""
    if parse_model_name(model)[0] is None:
        return False  # OpenCLIP's own
    path = config_file(model)
    config, preprocess = read_config(path)
    try:
        check_openclip(config)
        read = {key: value for key, value in preprocess.items() if key in PreprocessRules.model_fields}
        check(PreprocessRules, read, "preprocess_cfg")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return bool(config["text_cfg"].get("hf_model_name"))


def is_prolip(model: str) -> bool:
    """Return whether a name is of one of our models. ValueError for an unknown name."""
    if not isinstance(model, str):
        raise TypeError(f"the model is {kind_of(model)}: give a name, such as local-dir:runs/demo/model")
    if parse_model_name(model)[0]:
        config, _ = read_config(config_file(model))
        return "prolip_cfg" in config or is_released(config)
    if model not in own_models() and model.replace("/", "-") not in open_clip.list_models():
        raise ValueError(why_unknown(model))
    return model in own_models()


def recognised(model: str, pretrained: str | None) -> str:
    """Describe the kind of a model and of its weights."""
    kind = "a ProLIP model" if is_prolip(model) else "an OpenCLIP model"
    known = {None: "", RANDOM: " with random weights"}
    of = "the weights in" if pretrained and Path(pretrained).is_file() else "the published weights"
    return f"{model} is {kind}{known.get(pretrained, f' with {of} {pretrained}')}"


def config_file(model: str) -> Path:
    """Return the configuration file of a schema: OpenCLIP's own file name first, as OpenCLIP reads no other."""
    schema, name = parse_model_name(model)
    names = tuple(reversed(CONFIG_NAMES))  # config.json next to it may belong to another library
    return find_in(name, names, "configuration") if schema == "local-dir" else hub_file(name, names)


def check_weights(model: str, pretrained: str | None, ours: bool) -> None:
    """Raise ValueError or FileNotFoundError if no weights are named or found."""
    schema, name = parse_model_name(model)
    check_own_weights(model, pretrained)
    if schema and not (pretrained and ours):
        if schema == "local-dir":
            find_in(name, WEIGHT_NAMES, "weights")
        return
    tags = [] if ours else open_clip.list_pretrained_tags_by_model(model.replace("/", "-"))
    if not pretrained:
        offer = f"one of {', '.join(tags)}" if tags else "a weights file"
        remedy = "local-dir:<run>/model, or --pretrained <weights file>" if ours else f"--pretrained with {offer}"
        why = f"{model} names an architecture, but no weights are given"
        raise ValueError(f"{why}: use {remedy}; --pretrained {RANDOM} evaluates untrained weights")
    published = ours and parse_model_name(pretrained)[0] is not None
    if not ours and Path(pretrained).is_dir():
        why = why_no_model(Path(pretrained)) or f"{pretrained} is a folder: give the weights file in it"
        raise FileNotFoundError(f"--pretrained for {model}: {why}")
    known = pretrained == RANDOM or published or (not ours and is_pretrained_cfg(model.replace("/", "-"), pretrained))
    if not known and not Path(pretrained).exists():
        offer = f"; tags of {model}: {', '.join(tags)}" if tags else ""
        raise FileNotFoundError(f"the weights {pretrained!r} are neither a file nor a tag{offer}")


def openclip_tokenizer(model: str, tokenizer: str | None) -> Callable[[list[str]], Tensor]:
    """Return OpenCLIP's tokenizer of a model, `bpe` or a folder's, for texts that `models.tokenizer.cut` shortened."""
    schema, name = parse_model_name(model)
    check_openclip_config(model)
    config = read_config(config_file(model))[0] if schema else open_clip.get_model_config(name.replace("/", "-"))
    text = config["text_cfg"]
    context, options = text.get("context_length", 77), text.get("tokenizer_kwargs") or {}
    source = tokenizer or text.get("hf_tokenizer_name") or "bpe"
    if source == "bpe":
        made = BPETokenizer(context, **({} if tokenizer else options))
        check_ids(made, source, model, {"text_cfg": text})
        return made
    place = local(name if schema == "local-dir" and tokenizer is None else source, model)
    read = read_folder(place, context_length=context, tokenizer_mode=text.get("tokenizer_mode"), **options)
    return partial(_tokenize_cut, read, context)  # can be pickled


def _tokenize_cut(made: Callable[[list[str]], Tensor], context: int, texts: list[str]) -> Tensor:
    return made(cut(texts, context))


def model_fingerprint(network: nn.Module, preprocess: Callable, tokenizer: Callable) -> str:
    """Return 32 digits of the tensors' bytes, all modules' settings, decoding, a preprocessed image and two texts."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"pixels {decoding.VERSION}".encode())
    # Masks and similar buffers are not saved but built from the configuration.
    for name, tensor in sorted((dict(network.named_buffers()) | network.state_dict()).items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    # The same weights with other activations, heads or padding make a different model.
    for name, module in network.named_modules():
        settings = {key: plain(value) for key, value in vars(module).items() if key[0] != "_" and key != "training"}
        digest.update(json.dumps([name, type(module).__qualname__, settings], sort_keys=True).encode())
    ramp = torch.arange(97 * 61 * 3).remainder(251).to(torch.uint8).reshape(61, 97, 3)
    digest.update(preprocess(Image.fromarray(ramp.numpy())).contiguous().numpy().tobytes())
    digest.update(tokenizer(list(TEXTS)).numpy().tobytes())
    return digest.hexdigest()


def plain(value: Any) -> Any:
    """Return a setting as JSON values: numbers and texts unchanged, functions and foreign objects by name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return getattr(value, "__qualname__", type(value).__qualname__)
