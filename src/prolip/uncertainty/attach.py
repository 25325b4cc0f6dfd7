"""Fit variances to the pairs of a model, and leave a model that has them in a folder."""
from __future__ import annotations

import copy
import json
import os
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.factory import parse_model_name
from open_clip.transformer import QuickGELU
from safetensors.torch import save_file
from torch import Tensor, nn

from prolip.evaluation.loading import config_file, is_prolip, load_openclip, load_prolip, model_fingerprint
from prolip.evaluation.model import PointModel
from prolip.methods import LikelihoodConfig, find_method
from prolip.methods.base import Context
from prolip.models.prolip import ProLIP
from prolip.models.tokenizer import ALL_NAMES, get_tokenizer
from prolip.models.weights.checkpoint import read_config, save_pretrained
from prolip.uncertainty.clip import FILE, FittedCLIP
from prolip.uncertainty.fit import Fitted, fit_variances
from prolip.uncertainty.novelty import fitted_novelty
from prolip.uncertainty.pairs import Pairs
from prolip.utils.outputs import replacing

#: What a model of ours becomes.
METHOD = "likelihood"
WEIGHTS, CONFIG = "open_clip_model.safetensors", "open_clip_config.json"
#: What of a preprocessing OpenCLIP reads from a folder.
KEPT = ("mean", "std", "interpolation", "resize_mode")
#: Files of a tokenizer that go with a folder.
TOKENIZER = (*ALL_NAMES, "vocab.json", "merges.txt", "vocab.txt", "special_tokens_map.json", "added_tokens.json")


def attach(  # noqa: PLR0913 (a model is three of them)
    model: str, pretrained: str | None, tokenizer: str | None, pairs: Pairs, config: LikelihoodConfig,
    folder: str | os.PathLike, seed: int = 0,
) -> Fitted:
    """Fit variances to `pairs`, embeddings of the model `model` (`evaluation.loading.load_embedder`), and write the
    model with them into `folder`, in its own format: ours as one of the method likelihood, OpenCLIP's as OpenCLIP's.

    ValueError where the pairs are of another width than the model.
    """
    write = write_prolip if is_prolip(model) else write_openclip
    return write(model, pretrained, tokenizer, pairs, config, Path(folder), seed)


def write_prolip(  # noqa: PLR0913
    model: str, pretrained: str | None, tokenizer: str | None, pairs: Pairs, config: LikelihoodConfig, folder: Path,
    seed: int,
) -> Fitted:
    """A model of ours: its weights, without what its own method added, as one of the method likelihood."""
    old: Any = load_prolip(model, pretrained, tokenizer).network
    check_width(pairs, old.embed_dim, model)
    if pairs.text_ids is None:
        raise ValueError("the pairs have no text_ids, and a model of ours reads how rare a text's words are: write them"
                         " again with --save-pairs")
    settings = {"name": METHOD, "config": asdict(config)}
    new = ProLIP(copy.deepcopy(old.config) | {"method_cfg": settings})
    method = find_method(METHOD)
    assert method.extend is not None
    new.extend(partial(method.extend, config=config))
    new.load_state_dict({k: v for k, v in old.state_dict().items() if k not in old.added_names}, strict=False)
    new.visual.preprocess_cfg = old.visual.preprocess_cfg
    method.objective(new, config, Context(seed=seed)).close(new, pairs)
    save_pretrained(new, folder, tokenizer=get_tokenizer(model, tokenizer=tokenizer))
    head: Any = new.visual.head
    score: Any = method.score.of(new)
    novelties = fitted_novelty(new), fitted_novelty(new, "text")
    return Fitted(head, new.text.head, score, *novelties)  # type: ignore[arg-type]


def write_openclip(  # noqa: PLR0913
    model: str, pretrained: str | None, tokenizer: str | None, pairs: Pairs, config: LikelihoodConfig, folder: Path,
    seed: int,
) -> Fitted:
    """One of OpenCLIP's: its own configuration and weights, which OpenCLIP loads too, and the variances beside them.

    ValueError where what was written is read as another model.
    """
    loaded = load_openclip(model, pretrained, tokenizer)
    network: Any = loaded.network.model
    with torch.no_grad():
        check_width(pairs, network.encode_text(loaded.tokenizer([""])).shape[1], model)
    vocabulary = max(m.num_embeddings for m in network.modules() if isinstance(m, nn.Embedding))
    known = vocabulary if pairs.text_ids is not None else 0
    fitted = fit_variances(pairs, config.bank, config.centres, known, config.novelty_centres, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).unlink(missing_ok=True)
    with replacing(folder / WEIGHTS) as temporary:
        save_file(unshared(network.state_dict()), temporary, metadata={"format": "pt"})
    if parse_model_name(model)[0]:
        settings = read_config(config_file(model))[0]
        for name in TOKENIZER:
            if (config_file(model).parent / name).is_file():
                shutil.copy(config_file(model).parent / name, folder)
    else:
        settings = open_clip.get_model_config(model.replace("/", "-"))
        settings["quick_gelu"] = any(isinstance(m, QuickGELU) for m in network.modules())
    preprocess = {name: network.visual.preprocess_cfg[name] for name in KEPT}
    with replacing(folder / CONFIG) as temporary:
        text = json.dumps({"model_cfg": settings, "preprocess_cfg": preprocess}, indent=2)
        temporary.write_text(text + "\n", encoding="utf-8")
    wanted = model_fingerprint(*loaded._replace(network=PointModel(network)))  # of variances it may have had: none
    del loaded, network  # a model takes gigabytes, and there is one more to come
    again = load_openclip(f"local-dir:{folder}", None, tokenizer)
    if model_fingerprint(*again) != wanted:
        raise ValueError(f"{folder} is read as another model than {model}: its configuration does not say all of it")
    written: Any = again.network
    FittedCLIP(written.model, *fitted).save(folder)
    return fitted


def unshared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state as safetensors takes it: on the CPU, contiguous, and no two tensors in one piece of memory."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, value in state.items():
        x = value.detach().cpu().contiguous()
        own = x.untyped_storage()
        if own.data_ptr() in taken or own.nbytes() != x.numel() * x.element_size():
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        found[name] = x
    return found


def check_width(pairs: Pairs, width: int, name: str) -> None:
    """ValueError where the pairs cannot be of a model whose means are `width` wide."""
    if pairs.image.shape[1] != width:
        own = pairs.image.shape[1]
        raise ValueError(f"the pairs have {own} dimensions, {name} has {width}: embed them by this model")
