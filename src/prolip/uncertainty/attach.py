"""Fit variances to the pairs of a model, and leave a model that has them in a folder."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.factory import parse_model_name
from open_clip.transformer import QuickGELU
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from prolip.embedder import Loaded, PointModel
from prolip.embeddings import Pairs
from prolip.loading import config_file, is_prolip, load_model, load_openclip, model_fingerprint
from prolip.methods import LikelihoodConfig, find_method
from prolip.methods.base import Context
from prolip.models.checkpoint import OPENCLIP_FILES, PREPROCESS, CheckpointError, read_config, save_pretrained
from prolip.models.config import is_reader, is_released
from prolip.models.diagnose import CONFIG_NAMES, READERS, TOKENIZER_NAMES, WEIGHT_NAMES
from prolip.models.prolip import ProLIP
from prolip.models.registry import get_model_config
from prolip.models.tokenizer import get_tokenizer
from prolip.scores import Side
from prolip.uncertainty.clip import FILE, FittedCLIP
from prolip.uncertainty.fit import Fitted, fit_variances
from prolip.uncertainty.hidden import encode_hidden, innermost
from prolip.uncertainty.novelty import fitted_novelty
from prolip.utils.outputs import check_output, replacing_folder

#: What a model of ours becomes.
METHOD = "likelihood"
#: What belongs to a model; everything else of its folder stays where it is.
FILES = (*CONFIG_NAMES, *WEIGHT_NAMES, READERS, FILE, *TOKENIZER_NAMES)


def attach(  # noqa: PLR0913 (a model is three of them)
    model: str,
    pretrained: str | None,
    tokenizer: str | None,
    pairs: Pairs,
    config: LikelihoodConfig,
    folder: str | os.PathLike,
    seed: int = 0,
) -> Fitted:
    """Fit variances to `pairs`, embeddings of the model `model` (`prolip.loading.load_embedder`), and write the
    model with them into `folder`, in its own format: ours as one of the method likelihood, OpenCLIP's as OpenCLIP's.

    The folder is replaced in one step; what is no model's in it stays. One of OpenCLIP's is loaded again before that.
    ValueError where what was written is read as another model, and where the pairs are of another one; those without a
    fingerprint are compared by their widths alone.
    """
    loaded, folder = load_model(model, pretrained, tokenizer), Path(folder)
    check_belongs(pairs, loaded, model)
    if is_prolip(model):
        return write_prolip(loaded.network, get_tokenizer(model, tokenizer=tokenizer), pairs, config, folder, seed)
    network: Any = loaded.network.model
    vocabulary = max(part.num_embeddings for part in network.modules() if isinstance(part, nn.Embedding))
    known = vocabulary if pairs.text_ids is not None else 0
    sizes = (config.bank, config.centres, known, config.novelty_centres, seed, config.readings)
    fitted = fit_variances(pairs, *sizes)
    with replacing_folder(folder, kept=lambda name: name not in FILES) as place:
        write_openclip(model, network, place)
        wanted = model_fingerprint(*loaded._replace(network=PointModel(network)))  # without variances it may have
        del loaded, network  # a model takes gigabytes, and there is one more to come
        again = load_openclip(f"local-dir:{place}", None, tokenizer)
        if model_fingerprint(*again) != wanted:
            raise ValueError(f"{model} would be read as another model: its configuration does not say all of it")
        written: Any = again.network
        FittedCLIP(written.model, *fitted).save(place)
    return fitted


def check_place(folder: str | os.PathLike, model: str) -> None:
    """ValueError where `attach` may not write into `folder`, as `check_folder`."""
    (schema, own), ours = parse_model_name(model), is_prolip(model)
    plain = ours and not is_reader(get_model_config(model)[0])
    names = CONFIG_NAMES[:1] + WEIGHT_NAMES[:1] if plain else (*OPENCLIP_FILES, READERS if ours else FILE)
    check_folder(Path(folder), (*names, *TOKENIZER_NAMES), ours, Path(own) if schema == "local-dir" else None)


def check_folder(folder: Path, written: Collection[str], ours: bool, source: Path | None = None) -> None:
    """ValueError unless a model may be written into this folder.

    written: names of its files; ours: whether it is a ProLIP; source: the folder of the model that is read. Refused are
    that folder, one with files of anything else that are a model's by their names, and one on a disk without room for
    as much as the source holds.
    """
    read = [] if source is None else [source / name for name in FILES]
    check_output(folder, True, sum(path.stat().st_size for path in read if path.is_file()))
    if source is not None and folder.exists() and folder.resolve() == source.resolve():
        raise ValueError(f"{folder} is where the model lies: give another folder")
    same = all(is_config(folder / name, ours) for name in CONFIG_NAMES if name in written)
    there = [name for name in FILES if (folder / name).exists()]
    if foreign := [name for name in there if name not in written or not (same or name in TOKENIZER_NAMES)]:
        raise ValueError(
            f"{folder} holds files of another model ({', '.join(foreign)}), of another program or of a run"
            ": give another folder, or delete them"
        )


def is_config(path: Path, ours: bool) -> bool:
    """Whether a file is the configuration of one of our models, or else of one of OpenCLIP's."""
    try:
        config = read_config(path)[0]
    except (CheckpointError, OSError, ValueError):
        return False
    return "embed_dim" in config and ("prolip_cfg" in config or is_released(config)) is ours


def means_fingerprint(loaded: Loaded) -> str:
    """32 digits of what a model's means depend on: weights, settings, preprocessing and tokenizer, without variances.

    ValueError for a method whose own layers change the means, as a model with fitted variances does not have these.
    """
    network: Any = innermost(loaded.network)
    if not isinstance(network, ProLIP):
        return model_fingerprint(*loaded._replace(network=PointModel(network)))
    bare = ProLIP(network.config | {"method_cfg": {"name": "siglip"}}).eval()
    bare.load_state_dict({k: v for k, v in network.state_dict().items() if k not in network.added_names})
    bare.visual.preprocess_cfg = network.visual.preprocess_cfg
    for side, batch in probes(loaded):
        if not torch.equal(*(encode_hidden(one, batch, side).z.mean for one in (network.eval(), bare))):
            name = network.config["method_cfg"]["name"]
            raise ValueError(
                f"the method {name} has layers of its own between the towers and the means, which a model"
                " with fitted variances does not have: take a model of another method"
            )
    return model_fingerprint(*loaded._replace(network=bare))


def probes(loaded: Loaded) -> list[tuple[Side, Tensor]]:
    """A blank picture and the empty text, as batches of one."""
    blank = loaded.preprocess(Image.new("RGB", (64, 64), "white"))
    return [("image", blank.unsqueeze(0)), ("text", loaded.tokenizer([""]))]


def check_belongs(pairs: Pairs, loaded: Loaded, name: str) -> None:
    """ValueError where pairs were embedded by another model, as fingerprint or widths say."""
    remedy = "embed them by this model: give --data"
    if means_fingerprint(loaded) != pairs.model != "":
        raise ValueError(f"the pairs were embedded by another model than {name}: {remedy}")
    for side, batch in probes(loaded):
        hidden = encode_hidden(loaded.network.eval(), batch, side)
        for part, x in ((side, hidden.z.mean), (f"{side}_first", hidden.first)):
            own, width = getattr(pairs, part), 0 if x is None else x.shape[1]
            if own is not None and own.shape[1] != width:
                raise ValueError(f"{part} of the pairs has {own.shape[1]} dimensions, {name} has {width}: {remedy}")


def write_prolip(  # noqa: PLR0913, PLR0917
    old: Any, tokenizer: Any, pairs: Pairs, config: LikelihoodConfig, folder: Path, seed: int
) -> Fitted:
    """A model of ours: its weights, without what its own method added, as one of the method likelihood."""
    if pairs.text_ids is None:
        raise ValueError(
            "the pairs have no text_ids, and a model of ours reads how rare a text's words are: write them"
            " again with --save-pairs"
        )
    new = ProLIP(copy.deepcopy(old.config) | {"method_cfg": {"name": METHOD, "config": asdict(config)}})
    method = find_method(METHOD)
    assert method.extend is not None
    new.extend(partial(method.extend, config=config))
    new.load_state_dict({k: v for k, v in old.state_dict().items() if k not in old.added_names}, strict=False)
    new.visual.preprocess_cfg = old.visual.preprocess_cfg
    method.objective(new, config, Context(seed=seed)).close(new, pairs)
    save_pretrained(new, folder, tokenizer=tokenizer)
    image: Any = new.visual.head
    text: Any = new.text.head
    score: Any = method.score.of(new)
    readings: Any = getattr(new, "readings", None)
    return Fitted(image, text, score, fitted_novelty(new), fitted_novelty(new, "text"), readings)


def write_openclip(model: str, network: Any, folder: Path) -> None:
    """OpenCLIP's weights, configuration and tokenizer files of a model by this name."""
    # tensors that share memory, or are a part of another's, safetensors does not take
    state = {name: value.detach().cpu().contiguous().clone() for name, value in network.state_dict().items()}
    save_file(state, folder / OPENCLIP_FILES[1], metadata={"format": "pt"})
    if parse_model_name(model)[0]:
        settings = read_config(config_file(model))[0]
        for name in TOKENIZER_NAMES:
            if (config_file(model).parent / name).is_file():
                shutil.copy(config_file(model).parent / name, folder)
    else:
        settings = open_clip.get_model_config(model.replace("/", "-"))
        settings["quick_gelu"] = any(isinstance(m, QuickGELU) for m in network.modules())
    preprocess = {name: network.visual.preprocess_cfg[name] for name in PREPROCESS}
    text = json.dumps({"model_cfg": settings, "preprocess_cfg": preprocess}, indent=2)
    (folder / OPENCLIP_FILES[0]).write_text(text + "\n", encoding="utf-8")
