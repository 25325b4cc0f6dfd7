"""Wrong input, found before a model is loaded: unknown models, missing weights, test sets that do not fit the task."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import open_clip
from clip_benchmark import cli
from open_clip.factory import parse_model_name

from prolip.evaluation.datasets.places import Place, archive_state, find_place, join, shard_marks
from prolip.evaluation.datasets.wds import CLASSNAMES, TEMPLATES, Reading, check_first, open_wds, read_kind, shard_count
from prolip.loading import is_prolip, openclip_tokenizer
from prolip.models.checkpoint import CONFIG_NAMES, read_config
from prolip.models.config import is_released
from prolip.models.registry import find_weights, get_model_config, hub_file
from prolip.models.tokenizer import get_tokenizer
from prolip.prompts.weights import PromptWeights
from prolip.uncertainty.openclip import has_variances
from prolip.utils.documents import loads
from prolip.utils.outputs import check_output

#: What a shell would act on, and webdataset: clip_benchmark fetches by curl and wget, with addresses in the command.
UNSAFE = re.compile(r"::|[;&|$`<>\"'\\\n]")
#: OpenCLIP's own name first: config.json may be another library's.
HUB_CONFIGS = tuple(reversed(CONFIG_NAMES))
#: The dataset_type.txt that each task of clip_benchmark can read.
TYPES = {
    "zeroshot_classification": ("classification", "multilabel"),
    "linear_probe": ("classification",),
    "zeroshot_retrieval": ("retrieval",),
    "image_caption_selection": ("retrieval",),
    "captioning": ("retrieval",),
}


def is_fitted(model: str) -> bool:
    """Whether a name means one of OpenCLIP's models with variances that were fitted to it."""
    schema, place = parse_model_name(model)
    return schema == "local-dir" and has_variances(place)


def is_ours(run: Namespace) -> bool:
    """Whether the run's model gives Gaussians. Raises ValueError for a name that nobody knows."""
    schema, place = parse_model_name(run.model)
    if is_fitted(run.model):
        return True
    if schema != "hf-hub" or not run.model_cache_dir:
        return is_prolip(run.model)
    config, _ = read_config(hub_file(place, HUB_CONFIGS, run.model_cache_dir))
    return "prolip_cfg" in config or is_released(config)


def check_model(run: Namespace, tokenizer: str | None) -> None:
    """The model, its weights and its tokenizer are there. Raises ValueError or FileNotFoundError."""
    if run.model_type == "prolip" and is_fitted(run.model):
        openclip_tokenizer(run.model, tokenizer)
    elif run.model_type == "prolip":
        get_model_config(run.model, run.model_cache_dir)
        if find_weights(run.model, run.pretrained or None, run.model_cache_dir) is None:
            raise ValueError(
                f"{run.model} has no weights of its own: give --pretrained FILE, or a folder with weights"
                " as the model, --model local-dir:FOLDER"
            )
        get_tokenizer(run.model, cache_dir=run.model_cache_dir, tokenizer=tokenizer)
    elif run.model_type == "open_clip" and parse_model_name(run.model)[0] is None:
        tag, name = run.pretrained, run.model.replace("/", "-")  # OpenCLIP reads ViT-B/32 as ViT-B-32
        if tag and not open_clip.pretrained.is_pretrained_cfg(name, tag) and not os.path.isfile(tag):
            tags = open_clip.list_pretrained_tags_by_model(name)
            known = f"choose from {', '.join(tags)}" if tags else "OpenCLIP has none for it"
            raise ValueError(f"--pretrained {tag!r} is neither a file nor weights of {run.model}: {known}")


def check_task(run: Namespace) -> None:
    """The task can be run with this model. Raises ValueError."""
    if run.task == "captioning" and run.model_type == "prolip":
        raise ValueError(
            f"{run.model} writes no captions: --task captioning wants a model that does, such as"
            " OpenCLIP's coca_ViT-B-32"
        )
    if min(run.recall_k) < 1 or run.batch_size < 1 or run.num_workers < 0:
        raise ValueError(
            f"got --recall_k {run.recall_k}, --batch_size {run.batch_size}, --num_workers"
            f" {run.num_workers}: want a k and a batch of 1 or more, and 0 workers or more"
        )
    for path in run.load_clfs:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"--load_clfs: no file {path}: write one with --save_clf")


def check_prompts(run: Namespace, prompts: PromptWeights) -> None:
    """Weights of prompts can be used: by a model of ours, on images that they were not fitted to. Raises ValueError."""
    if run.task != "zeroshot_classification" or run.model_type != "prolip":
        raise ValueError(
            "--prompts weighs the prompts of a probabilistic model's classes, and this is --task"
            f" {run.task} of a model of the type {run.model_type}: drop it"
        )
    place = wds_place(run)
    if place is not None:
        dataset = open_wds(place.source, run.split)
        templates = dataset.templates if not run.custom_template_file else prompts.templates
        classnames = dataset.classnames if not run.custom_classname_file else prompts.classnames
        prompts.check(classnames, templates, prompts.fingerprint, dataset.fingerprint)
        prompts.check_images(dataset)


def dataset_name(run: Namespace) -> str:
    """The data set without `wds/`."""
    return run.dataset.removeprefix("wds/")


def root_of(run: Namespace) -> str:
    """The folder or URL of the run's data set, its template filled in as clip_benchmark does. Raises ValueError."""
    name = dataset_name(run)
    try:
        return run.dataset_root.format(dataset=name, dataset_cleaned=name.replace("/", "-"))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"--dataset_root {run.dataset_root!r} has a field that is not known ({error}): use {{dataset}}"
            " or {dataset_cleaned}"
        ) from error


def wds_place(run: Namespace) -> Place | None:
    """Where a wds data set lies, None for others. Raises FileNotFoundError or ValueError."""
    root = root_of(run)
    if unsafe := UNSAFE.search(root):
        raise ValueError(
            f"--dataset_root {root!r} holds {unsafe[0]!r}, and clip_benchmark hands addresses to a shell:"
            " give one without"
        )
    if not run.dataset.startswith("wds/"):
        return None
    return find_place(root)


def check_wds(run: Namespace, place: Place) -> list[str]:
    """The shards of every split that the task reads are there, and its texts: marks of the shards, which change with
    them. Raises ValueError or FileNotFoundError.
    """
    kind = read_kind(place, None)
    if kind not in TYPES[run.task]:
        fits = [task for task, kinds in TYPES.items() if kind in kinds]
        remedy = f"choose --task {' or '.join(fits)}" if fits else "correct dataset_type.txt"
        raise ValueError(
            f"{place.source} is a test set of type {kind!r}, --task {run.task} wants"
            f" {' or '.join(TYPES[run.task])}: {remedy}"
        )
    shard_count(place, run.split, None)  # of the wrong folder this tells the right one
    if run.task in ("zeroshot_classification", "linear_probe"):
        _check_texts(run, place)
    splits = [run.split]
    if run.task == "linear_probe":
        if run.val_proportion is not None:
            raise ValueError(
                "--val_proportion needs a data set that knows its length, wds data sets are streams: give"
                " a split with --val_split, or neither"
            )
        splits += [split for split in (run.train_split, run.val_split) if split]
    shards = [[join(place.data, split, f"{i}.tar") for i in range(shard_count(place, split, None))] for split in splits]
    for urls in shards:
        if not run.custom_classname_file:
            check_first(Reading(tuple(urls), kind, len(place.lines(CLASSNAMES)), None, None))
    urls = [url for part in shards for url in part]
    return [*shard_marks(urls), str(archive_state(urls))]


def _check_texts(run: Namespace, place: Place) -> None:
    """Class names and templates, in the data set or in files given for it."""
    for name, custom, flag in (
        (CLASSNAMES, run.custom_classname_file, "custom_classname_file"),
        (TEMPLATES, run.custom_template_file, "custom_template_file"),
    ):
        lines = place.lines(name)
        if custom:
            _check_custom(run, custom, flag, place.lines(CLASSNAMES))
            continue
        if not lines:
            raise FileNotFoundError(f"no {name} in {place.source}: write one line per entry, or give --{flag}")
        wrong = [line for line in lines if "{c}" not in line]
        if wrong and name == TEMPLATES:
            raise ValueError(
                f"{name} of {place.source} has the template {wrong[0]!r}: write {{c}} where the class goes"
            )


def _check_custom(run: Namespace, path: str, flag: str, classes: Sequence[str]) -> None:
    """The entry of the data set is there and fits its classes; the original finds out later, or scores what is not.

    path: a JSON file, or one of clip_benchmark's own, as clip_benchmark looks for it.
    """
    file = next((file for file in (Path(path), Path(cli.__file__).parent / "datasets" / path) if file.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"--{flag}: no file {path}")
    try:
        table = loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--{flag}: {file} is no JSON: {error}") from error
    keys = [run.dataset, dataset_name(run), *(["imagenet1k"] if flag == "custom_template_file" else [])]
    entry = next((table[key] for key in keys if key in table), None)
    if not entry:
        some = ", ".join(list(table)[:5]) or "none"
        raise ValueError(f"--{flag}: no entry for {' or '.join(keys)}, there are {some}")
    if flag == "custom_classname_file" and classes and len(entry) != len(classes):
        raise ValueError(f"--{flag}: {len(entry)} names for the {len(classes)} classes of {run.dataset}: give one each")
    if flag == "custom_template_file" and isinstance(entry, dict):
        if not run.custom_classname_file and (without := [name for name in classes if not entry.get(name)]):
            raise ValueError(f"--{flag}: no prompt for {len(without)} classes of {run.dataset}, such as {without[0]!r}")
    elif flag == "custom_template_file" and (wrong := [line for line in entry if "{c}" not in line]):
        raise ValueError(f"--{flag}: the template {wrong[0]!r} has no {{c}} where the class goes")


def check_results(paths: Sequence[str]) -> None:
    """Every path is a result file or a folder of such files, of which a table is built. Raises ValueError."""
    for path in map(Path, paths):
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"the folder {path} holds no .json: give the files that eval wrote, or their folder")
        for file in files:
            try:
                fits = {"metrics", "model", "pretrained"} <= loads(file.read_text(encoding="utf-8")).keys()
            except (OSError, ValueError, AttributeError) as error:
                raise ValueError(f"{file} cannot be read ({error}): give the files that eval wrote") from error
            if not fits:
                raise ValueError(f"{file} is no result of an evaluation: give the files that eval wrote")


def check_names(pretrained_models: Sequence[str]) -> None:
    """Every --pretrained_model is a file, a collection, or `model,pretrained`. Raises ValueError."""
    for name in pretrained_models:
        if not os.path.isfile(name) and name not in cli.model_collection and name.count(",") != 1:
            raise ValueError(
                f"--pretrained_model {name!r}: want 'model,pretrained' (nothing after the comma for a"
                " model with its own weights), a file of such lines, or one of"
                f" {', '.join(cli.model_collection)}"
            )


def check_outputs(runs: Sequence[Namespace]) -> None:
    """All files can be written, and no two different evaluations write the same. Raises ValueError."""
    first: dict[str, tuple] = {}
    for run in runs:
        check_output(run.output)
        if run.task == "linear_probe":
            check_output(run.feature_root, folder=True)
        if run.save_clf:
            check_output(run.save_clf)
        what = (run.model, run.pretrained, run.dataset, run.language)
        other = first.setdefault(run.output, what)
        if other != what:
            raise ValueError(
                f"{' '.join(other)} and {' '.join(what)} would both be written to {run.output}: name the"
                " file by {dataset}, {model}, {pretrained}, {language} in --output"
            )
