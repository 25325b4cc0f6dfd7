"""Fit variances to the pairs of a model, and write the model with them to a folder."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import open_clip
import torch
from open_clip.factory import parse_model_name
from open_clip.transformer import QuickGELU
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from prolip.data.config import DataConfig
from prolip.data.faults import FaultCounter
from prolip.data.reading.named import shortened
from prolip.embedder import Embedder
from prolip.embeddings import Pairs
from prolip.fitting.collect import embed_pairs
from prolip.loading import Loaded, config_file, is_prolip, load_model, load_openclip, model_fingerprint
from prolip.methods import find_method
from prolip.methods.base import Context
from prolip.models.checkpoint import OPENCLIP_FILES, PREPROCESS, CheckpointError, read_config, save_pretrained
from prolip.models.config import is_reader, is_released
from prolip.models.diagnose import CONFIG_NAMES, FIT, READERS, TOKENIZER_NAMES, TRAINED, WEIGHT_NAMES, is_model, is_run
from prolip.models.prolip import ProLIP
from prolip.models.registry import get_model_config
from prolip.models.tokenizer import get_tokenizer
from prolip.scores import Side
from prolip.uncertainty.fit import Fitted, fit_variances
from prolip.uncertainty.novelty import fitted_novelty
from prolip.uncertainty.openclip import FILE, FittedCLIP, PointModel
from prolip.uncertainty.options import FitOptions
from prolip.uncertainty.token_stats import encode_with_stats, innermost
from prolip.utils.outputs import check_output, replacing, replacing_folder
from prolip.utils.secrecy import redacted

log = logging.getLogger(__name__)

METHOD = "likelihood"  # the method of our models after the fit
#: Files of a model; other files of its folder stay.
FILES = (*CONFIG_NAMES, *WEIGHT_NAMES, READERS, FILE, FIT, *TOKENIZER_NAMES)


def attach(  # noqa: PLR0913, PLR0917 (three describe a model)
    model: str,
    pretrained: str | None,
    tokenizer: str | None,
    pairs: Pairs,
    config: FitOptions,
    folder: str | os.PathLike,
    seed: int = 0,
    data: str = "",
) -> Fitted:
    """Fit variances to `pairs`, embeddings of `model`, and write the model with them to `folder`, in its own format.

    data: the source of the pairs, for the model's card.
    """
    loaded, folder = load_model(model, pretrained, tokenizer), Path(folder)
    remedy = "embed them with this model, by --data"
    if means_fingerprint(loaded) != pairs.model != "":
        raise ValueError(f"the pairs were embedded by another model than {model}: {remedy}")
    for side, batch in probes(loaded):
        hidden = encode_with_stats(loaded.network.eval(), batch, side)
        for part, x in ((side, hidden.z.mean), (f"{side}_first", hidden.token_stats)):
            own, width = getattr(pairs, part), 0 if x is None else x.shape[1]
            if own is not None and own.shape[1] != width:
                raise ValueError(f"{part} of the pairs has {own.shape[1]} dimensions, {model} has {width}: {remedy}")
    if is_prolip(model):
        tokens = get_tokenizer(model, tokenizer=tokenizer)
        fitted = write_prolip(loaded.network, tokens, pairs, config, folder, seed)
        write_facts(folder, pairs, data)
        return fitted
    network: Any = loaded.network.model
    vocabulary = max(part.num_embeddings for part in network.modules() if isinstance(part, nn.Embedding))
    fitted = fit_variances(pairs, vocabulary=0 if pairs.text_ids is None else vocabulary, seed=seed, **config.sizes)
    with replacing_folder(folder, kept=lambda name: name not in FILES) as place:
        write_openclip(model, network, place)
        wanted = model_fingerprint(*loaded._replace(network=PointModel(network)))  # without its old variances
        del loaded, network  # frees gigabytes before the next line loads another model
        again = load_openclip(f"local-dir:{place}", None, tokenizer)
        if model_fingerprint(*again) != wanted:
            raise ValueError(f"{model} would load as another model, its configuration is incomplete: complete it")
        written: Any = again.network
        FittedCLIP(written.model, *fitted).save(place)
        write_facts(place, pairs, data)
    return fitted


def write_facts(folder: Path, pairs: Pairs, data: str) -> None:
    """Write the data and the counts of a fit next to its model, without absolute paths and secrets."""
    counts = {"pairs": len(pairs), "images": len(pairs.image), "texts": len(pairs.text), "own_first": pairs.own_first}
    with replacing(folder / FIT) as file:
        file.write_text(json.dumps({"data": shortened(redacted(data)), **counts}, indent=2) + "\n", encoding="utf-8")


def fit_uncertainty(
    model: str,
    data: str | DataConfig,
    output: str | os.PathLike,
    *,
    pretrained: str | None = None,
    tokenizer: str | None = None,
    config: FitOptions | None = None,
    seed: int = 0,
    **options: Any,
) -> Fitted:
    """Fit variances, novelty and doubt of a trained model to images with texts, and write the model.

    model, pretrained, tokenizer, options: as for `Embedder.load`, and batch_size; data: as for `prolip
    uncertainty --data`, or its config; config: sizes of the fit. The model's means do not change.
    """
    check_place(output, model)
    config = config or FitOptions()
    data = DataConfig(train_data=data, seed=seed) if isinstance(data, str) else data
    faults = FaultCounter(limit=data.max_bad_fraction)
    pairs = embed_data(model, data, config, faults, pretrained, tokenizer, **options)
    for caution in pairs.cautions:
        log.warning(caution)
    return attach(model, pretrained, tokenizer, pairs, config, output, seed, data.train_data or "")


def embed_data(  # noqa: PLR0913, PLR0917 (three describe a model)
    model: str,
    data: DataConfig,
    config: FitOptions,
    faults: FaultCounter,
    pretrained: str | None = None,
    tokenizer: str | None = None,
    batch_size: int = 256,
    **options: Any,
) -> Pairs:
    """Embed the pairs of a fit, without keeping the model. options: device and precision of `Embedder.load`."""
    fingerprint = means_fingerprint(load_model(model, pretrained, tokenizer))
    changes = config.changed_images if config.readings and config.novelty_centres else 0
    embedder = Embedder.load(model, pretrained, tokenizer=tokenizer, **options)
    return embed_pairs(embedder, fingerprint, data, config.fit_samples, faults, batch_size, changes)


def check_place(folder: str | os.PathLike, model: str) -> None:
    """Raise ValueError if `attach` must not write into `folder`, see `check_folder`."""
    (schema, own), ours = parse_model_name(model), is_prolip(model)
    plain = ours and not is_reader(get_model_config(model)[0])
    names = CONFIG_NAMES[:1] + WEIGHT_NAMES[:1] if plain else (*OPENCLIP_FILES, READERS if ours else FILE)
    check_folder(Path(folder), (*names, *TOKENIZER_NAMES), ours, Path(own) if schema == "local-dir" else None)


def check_folder(folder: Path, written: Collection[str], ours: bool, source: Path | None = None) -> None:
    """Raise ValueError unless a model's files `written` may go into a folder. ours: of a ProLIP; source: the original's
    folder.
    """
    read = [] if source is None else [source / name for name in FILES]
    check_output(folder, True, sum(path.stat().st_size for path in read if path.is_file()))
    if source is not None and folder.exists() and folder.resolve() == source.resolve():
        raise ValueError(f"{folder} contains the model itself: give another folder")
    place = folder.absolute()
    if place.name in TRAINED and is_run(place.parent) and is_model(place):
        raise ValueError(f"{folder} holds the model of a run: give another folder, such as {folder.parent / 'fitted'}")
    same = True
    for name in CONFIG_NAMES:
        try:
            config = read_config(folder / name)[0] if name in written else None
        except (CheckpointError, OSError, ValueError):
            config = {}
        if config is not None:
            same &= "embed_dim" in config and ("prolip_cfg" in config or is_released(config)) is ours
    there = [name for name in FILES if name != FIT and (folder / name).exists()]
    if foreign := [name for name in there if name not in written or not (same or name in TOKENIZER_NAMES)]:
        what = f"files of another model, program or run ({', '.join(foreign)})"
        raise ValueError(f"{folder} has {what}: give another folder, or delete them")


def means_fingerprint(loaded: Loaded) -> str:
    """Return 32 digits of all that the means depend on; ValueError for a method whose own layers change the means."""
    network: Any = innermost(loaded.network)
    if not isinstance(network, ProLIP):
        return model_fingerprint(*loaded._replace(network=PointModel(network)))
    bare = ProLIP(network.config | {"method_cfg": {"name": "siglip"}}).eval()
    bare.load_state_dict({k: v for k, v in network.state_dict().items() if k not in network.added_names})
    bare.visual.preprocess_cfg = network.visual.preprocess_cfg
    for side, batch in probes(loaded):
        if not torch.equal(*(encode_with_stats(one, batch, side).z.mean for one in (network.eval(), bare))):
            own = f"the method {network.config['method_cfg']['name']} has its own layers between towers and means"
            raise ValueError(f"{own}, which a model with fitted variances cannot have: use a model of another method")
    return model_fingerprint(*loaded._replace(network=bare))


def probes(loaded: Loaded) -> list[tuple[Side, Tensor]]:
    """Return a blank image and the empty text, as batches of one."""
    blank = loaded.preprocess(Image.new("RGB", (64, 64), "white"))
    return [("image", blank.unsqueeze(0)), ("text", loaded.tokenizer([""]))]


def write_prolip(  # noqa: PLR0913, PLR0917
    old: Any, tokenizer: Any, pairs: Pairs, options: FitOptions, folder: Path, seed: int
) -> Fitted:
    """Write a model of ours as one of the method likelihood: its weights, without the parts of its own method."""
    if pairs.text_ids is None:
        raise ValueError("the pairs have no text_ids, which our models need: write them again with --save-pairs")
    method = find_method(METHOD)
    assert method.extend is not None
    config = method.config(**asdict(options))
    new = ProLIP(copy.deepcopy(old.config) | {"method_cfg": {"name": METHOD, "config": asdict(config)}})
    new.extend(partial(method.extend, config=config))
    new.load_state_dict({k: v for k, v in old.state_dict().items() if k not in old.added_names}, strict=False)
    new.visual.preprocess_cfg = old.visual.preprocess_cfg
    method.objective(new, config, Context(seed=seed)).after_training(new, pairs)
    save_pretrained(new, folder, tokenizer=tokenizer)
    made, score = cast(Any, new), cast(Any, method.score.of(new))
    novelty = fitted_novelty(new), fitted_novelty(new, "text")
    return Fitted(made.visual.head, made.text.head, score, *novelty, getattr(new, "readings", None))


def write_openclip(model: str, network: Any, folder: Path) -> None:
    """Write OpenCLIP's weights, configuration and tokenizer files of a model."""
    # safetensors refuses tensors that share memory
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
