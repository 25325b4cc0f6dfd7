"""clip_benchmark with ProLIP models, compared by CSD: `prolip eval clip-benchmark`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import patch

import torch
from clip_benchmark import cli
from clip_benchmark import models as registry
from clip_benchmark.datasets.builder import get_dataset_default_task
from open_clip.factory import parse_model_name

from prolip.data import images as decoding
from prolip.embedder import choose_score, own_score
from prolip.evaluation.clip_benchmark.encoder import GaussianEncoder
from prolip.evaluation.clip_benchmark.patches import patched
from prolip.evaluation.datasets.base import DamagedData, Dataset
from prolip.evaluation.datasets.webdataset import open_wds
from prolip.factory import create_model_and_transforms
from prolip.loading import is_prolip, load_openclip, model_fingerprint, openclip_tokenizer
from prolip.methods import find_method, find_score
from prolip.models.checkpoint import find_in, read_config
from prolip.models.config import is_released
from prolip.models.diagnose import CONFIG_NAMES, WEIGHT_NAMES
from prolip.models.registry import find_weights, get_model_config, hub_file
from prolip.models.tokenizer import get_tokenizer
from prolip.prompts.weights import PromptWeights
from prolip.scores import TrueMatchScore
from prolip.uncertainty.openclip import has_variances
from prolip.utils.outputs import check_output, replacing

FIELDS = ("dataset", "model", "pretrained", "pretrained_full_path", "language", "task", "similarity")
UPSTREAM_OUTPUT = "{dataset}_{pretrained}_{model}_{language}_{task}.json"
OUR_OUTPUT = "{dataset}_{pretrained}_{model}_{similarity}_{language}_{task}.json"
#: Characters with a meaning in a shell: clip_benchmark downloads by wget, with addresses in the command.
UNSAFE = re.compile(r"::|[;&|$`<>\"'\\\n]")
#: Kind of a wds data set -> the tasks of clip_benchmark that can read it.
TASKS = {
    "classification": ("zeroshot_classification", "linear_probe"),
    "multilabel": ("zeroshot_classification",),
    "retrieval": ("zeroshot_retrieval", "image_caption_selection", "captioning"),
}
#: Beginnings of OpenCLIP errors that a user can fix.
OF_WEIGHTS = ("Pretrained ", "Failed to download weights")


# --- models -----------------------------------------------------------------------------------------------------------
def is_fitted(model: str) -> bool:
    """Return True for an OpenCLIP model with fitted variances."""
    schema, place = parse_model_name(model)
    return schema == "local-dir" and has_variances(place)


def is_ours(run: Namespace) -> bool:
    """Return True if the run's model gives Gaussians. Raises ValueError for an unknown name."""
    schema, place = parse_model_name(run.model)
    if is_fitted(run.model):
        return True
    if schema != "hf-hub" or not run.model_cache_dir:
        return is_prolip(run.model)
    # OpenCLIP's own name first, as config.json may belong to another library
    config, _ = read_config(hub_file(place, tuple(reversed(CONFIG_NAMES)), run.model_cache_dir))
    return "prolip_cfg" in config or is_released(config)


def load_encoder(model_name, pretrained, cache_dir, device, *, own: Namespace):
    """Load a model of the type `prolip` for clip_benchmark: (model, transform, tokenizer)."""
    if is_fitted(model_name):
        model, transform, tokenize = load_openclip(model_name, None, own.tokenizer)
        model = model.to(device)
    else:
        model, _, transform = create_model_and_transforms(
            model_name, pretrained or None, device=device, cache_dir=cache_dir, require_pretrained=True
        )
        tokenize = get_tokenizer(model_name, cache_dir=cache_dir, tokenizer=own.tokenizer)
    prompts = PromptWeights.load(own.prompts) if own.prompts else None
    if prompts is not None:
        prompts.check(prompts.classnames, prompts.templates, model_fingerprint(model, transform, tokenize))
    encoder = GaussianEncoder(model, choose_score(own.similarity, *own_score(model), model_name), prompts)
    return encoder, transform, tokenize


# --- planning ---------------------------------------------------------------------------------------------------------
def parse(own: Namespace, rest: Sequence[str]) -> Namespace:
    """Parse clip_benchmark's flags by its own parser; own: our flags, which `rest` does not have."""
    given = [] if own.pretrained is None else ["--pretrained", *own.pretrained]
    given += [] if own.output is None else ["--output", own.output]
    with patch.object(sys, "argv", ["prolip eval clip-benchmark", *rest, *given]):
        upstream, base = cli.get_parser_args()
    if not hasattr(base, "which"):
        upstream.print_help()
        raise SystemExit(2)
    if base.which == "eval":
        if own.amp and not base.amp:
            raise ValueError("--amp and --no_amp contradict each other: remove one")
        if base.wds_cache_dir:
            raise ValueError("--wds_cache_dir is not supported: use hf download, and give the data set's folder")
    return base


def planned(own: Namespace, base: Namespace) -> list[Namespace]:
    """Return every evaluation of clip_benchmark for these arguments, completed; ValueError, FileNotFoundError."""
    for name in cli._as_list(base.pretrained_model):
        if not os.path.isfile(name) and name not in cli.model_collection and name.count(",") != 1:
            forms = "'model,pretrained', a file of such lines or a collection"
            raise ValueError(f"--pretrained_model {name!r}: use {forms}")
    base.amp = own.amp  # the original's default is autocast, bfloat16 on CPU, which changes rankings
    # With --skip_load the original ends in UnboundLocalError after its work. Features still come from their files.
    base.skip_load = False
    if own.pretrained is None and all(parse_model_name(model)[0] for model in base.model):
        base.pretrained = [""]
    runs: list[Namespace] = []
    with patch.object(cli, "run", runs.append):
        cli.main_eval(base)
    open_once = lru_cache(maxsize=None)(open_wds)
    outputs: dict[str, tuple] = {}
    for run in runs:
        root = root_of(run)
        splits = [run.split]
        if run.task == "linear_probe":
            splits += [split for split in (run.train_split, run.val_split) if split]
        sets = [open_once(root, split) for split in splits] if run.dataset.startswith("wds/") else []
        complete(run, own, sets[0].kind if sets else None)
        check_run(run, own, sets)
        what = (run.model, run.pretrained, run.dataset, run.language)
        if outputs.setdefault(run.output, what) != what:
            both = f"{' '.join(outputs[run.output])} and {' '.join(what)} would both write {run.output}"
            raise ValueError(
                f"{both}: name the file by {{dataset}}, {{model}}, {{pretrained}}, {{language}} in --output"
            )
        if run.task == "linear_probe":
            run.feature_root = feature_folder(run, sets)
    return runs


def filled(flag: str, template: str, values: Mapping[str, str]) -> str:
    """Fill the {fields} of a flag's value. ValueError for another field."""
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        fields = ", ".join(f"{{{field}}}" for field in values)
        raise ValueError(f"{flag} {template!r} has an unknown field ({error}): use {fields}") from error


def root_of(run: Namespace) -> str:
    """Return the folder or URL of the run's data set; ValueError for one with a meaning in a shell."""
    name = run.dataset.removeprefix("wds/")
    fields = {"dataset": name, "dataset_cleaned": name.replace("/", "-")}
    root = filled("--dataset_root", run.dataset_root, fields)
    if unsafe := UNSAFE.search(root):
        raise ValueError(f"--dataset_root {root!r} has {unsafe[0]!r}; clip_benchmark passes it to a shell: rename it")
    return root


def complete(run: Namespace, own: Namespace, kind: str | None) -> None:
    """Set what depends on the model and the data set (of a `kind`, for wds): model type, weights, task, output."""
    if run.model_type == "open_clip" and is_ours(run):
        run.model_type = "prolip"
    with_weights = run.model_type == "prolip" or parse_model_name(run.model)[0]
    if own.pretrained is None and not run.pretrained_model and with_weights:
        run.pretrained = ""
    if run.task == "auto":
        run.task = get_dataset_default_task(run.dataset.removeprefix("wds/"))
        if run.task == "zeroshot_classification" and kind == "retrieval":
            run.task = "zeroshot_retrieval"
    # The original puts slashes of a model's name into the file name, and then finds no folder.
    template = run.output
    if own.output is None and template == UPSTREAM_OUTPUT and run.model_type == "prolip":
        template = OUR_OUTPUT
        if own.prompts:
            template = template.replace(".json", f"_{PromptWeights.load(own.prompts).digest}.json")
    weights = os.path.basename(run.pretrained) if os.path.isfile(run.pretrained) else run.pretrained
    values = (
        run.dataset.removeprefix("wds/"),
        run.model,
        weights,
        run.pretrained,
        run.language,
        run.task,
        similarity_of(run, own),
    )
    run.output = filled("--output", template, {field: x.replace("/", "_") for field, x in zip(FIELDS, values)})


def check_run(run: Namespace, own: Namespace, sets: Sequence[Dataset]) -> None:
    """Raise ValueError or FileNotFoundError if the task cannot run with this model on these data."""
    if run.task == "captioning" and run.model_type == "prolip":
        raise ValueError(f"{run.model} cannot write captions: use a model such as coca_ViT-B-32 for --task captioning")
    if run.task == "linear_probe":
        check_device(run)
    for dataset in sets:
        if run.task not in TASKS[dataset.kind]:
            tasks = " or ".join(TASKS[dataset.kind])
            raise ValueError(f"{dataset.source} is of type {dataset.kind!r}, not for --task {run.task}: choose {tasks}")
    if own.prompts:
        prompts = PromptWeights.load(own.prompts)
        if run.task != "zeroshot_classification" or run.model_type != "prolip":
            this = f"this is --task {run.task} of a model of the type {run.model_type}"
            raise ValueError(f"--prompts weighs the class prompts of a probabilistic model, and {this}: remove it")
        for dataset in sets:
            templates = dataset.templates if not run.custom_template_file else prompts.templates
            classnames = dataset.classnames if not run.custom_classname_file else prompts.classnames
            prompts.check(classnames, templates, prompts.fingerprint, dataset.fingerprint)
            prompts.check_images(dataset)
    check_output(run.output)
    if run.save_clf:
        check_output(run.save_clf)
    if is_fitted(run.model):
        openclip_tokenizer(run.model, own.tokenizer)
    elif run.model_type == "prolip":
        get_model_config(run.model, run.model_cache_dir)
        if find_weights(run.model, run.pretrained or None, run.model_cache_dir) is None:
            what = "give --pretrained FILE, or a folder with weights as the model, --model local-dir:FOLDER"
            raise ValueError(f"{run.model} has no weights: {what}")
        get_tokenizer(run.model, cache_dir=run.model_cache_dir, tokenizer=own.tokenizer)


def check_device(run: Namespace) -> None:
    """Raise ValueError without CUDA, for which the original fails at an assertion."""
    if not torch.cuda.is_available():
        raise ValueError(f"--task {run.task} needs CUDA: run it on a machine with a GPU")


def similarity_of(run: Namespace, own: Namespace) -> str:
    """Return the similarity of the run; a linear probe reads the means."""
    if run.model_type != "prolip":
        return "cosine"
    if run.task == "linear_probe":
        return "mean"
    if own.similarity is not None:
        return own.similarity
    if is_fitted(run.model):
        return TrueMatchScore.name
    config, _ = get_model_config(run.model, run.model_cache_dir)
    return find_method(config["method_cfg"]["name"]).score.name


def feature_folder(run: Namespace, sets: Sequence[Dataset]) -> str:
    """Return the folder of a linear probe's features, which also depends on weights, data, splits and precision."""
    what = [root_of(run), run.split, run.train_split, run.val_split, run.amp, run.normalize, decoding.VERSION]
    what += [(dataset.fingerprint, dataset.state) for dataset in sets]
    if run.val_proportion is not None:
        what += [run.val_proportion, run.seed]  # the seed draws the validation set
    weights: str | os.PathLike | None = run.pretrained
    if is_fitted(run.model):
        weights = find_in(parse_model_name(run.model)[1], WEIGHT_NAMES, "weights")
    elif run.model_type == "prolip":
        weights = find_weights(run.model, run.pretrained or None, run.model_cache_dir)
    if weights and os.path.isfile(weights):
        status = os.stat(weights)
        what += [os.path.abspath(weights), status.st_size, status.st_mtime_ns]
    what += [run.model, run.dataset]
    return os.path.join(run.feature_root, hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16])


# --- running ----------------------------------------------------------------------------------------------------------
def evaluate_and_write(run: Namespace, own: Namespace) -> None:
    """Run one evaluation by clip_benchmark, and add similarity and precision to its file."""
    path = Path(run.output)
    if run.skip_existing and path.exists():
        if run.verbose:
            print(f"Skip {path}, exists already.")
        return
    if run.task == "linear_probe":
        os.makedirs(run.feature_root, exist_ok=True)  # the original makes only the last folder
    with replacing(path) as temporary:
        output = str(temporary).replace("{", "{{").replace("}", "}}")  # the original formats it
        cli.run(Namespace(**vars(run) | {"output": output}))
        result = json.loads(temporary.read_bytes()) | {"similarity": similarity_of(run, own), "amp": run.amp}
        result |= {"prompts": str(PromptWeights.load(own.prompts))} if own.prompts else {}
        temporary.write_text(json.dumps(result), encoding="utf-8")
    if run.verbose:
        print(f"Results are in {path}")


def run(words: Sequence[str], own: Namespace) -> None:
    """Run clip_benchmark with these arguments and our models; own: our flags. Checks all arguments first."""
    if own.similarity is not None:
        own.similarity = find_score(own.similarity).name
    types = [*registry.MODEL_TYPES, "prolip"]
    with (
        patched(),
        patch.dict(registry.TYPE2FUNC, prolip=partial(load_encoder, own=own)),
        patch.object(registry, "MODEL_TYPES", types),
        patch.object(cli, "MODEL_TYPES", types),
    ):
        base = parse(own, words)
        if base.which == "build":
            with replacing(Path(base.output)) as temporary:
                base.output = str(temporary)
                cli.main_build(base)
            return
        for one in planned(own, base):
            try:
                evaluate_and_write(one, own)
            except DamagedData as error:  # a loader's worker puts its traceback before it
                raise DamagedData(str(error).splitlines()[-1].rpartition(f"{DamagedData.__name__}: ")[2]) from error
            except RuntimeError as error:
                if not str(error).startswith(OF_WEIGHTS):
                    raise
                raise ValueError(f"{error}; or give a file, --pretrained FILE") from error
