"""clip_benchmark with ProLIP models, compared by csd: `prolip eval clip-benchmark`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from clip_benchmark import cli
from clip_benchmark import models as registry
from clip_benchmark.datasets.builder import get_dataset_default_task
from open_clip.factory import parse_model_name

from prolip.data.samples import decoding
from prolip.embedder import choose_score, own_score
from prolip.evaluation.clip_benchmark import checks
from prolip.evaluation.clip_benchmark.encoder import GaussianEncoder
from prolip.evaluation.clip_benchmark.repairs import repaired
from prolip.evaluation.datasets.base import DamagedData
from prolip.evaluation.datasets.wds import read_kind
from prolip.factory import create_model_and_transforms
from prolip.loading import load_openclip, model_fingerprint
from prolip.methods import find_method, find_score
from prolip.models.checkpoint import find_in
from prolip.models.diagnose import WEIGHT_NAMES
from prolip.models.registry import find_weights, get_model_config
from prolip.models.tokenizer import get_tokenizer
from prolip.prompts.weights import PromptWeights
from prolip.scores import TrueMatchScore
from prolip.utils.outputs import replacing

PROG = "prolip eval clip-benchmark"
FIELDS = ("dataset", "model", "pretrained", "pretrained_full_path", "language", "task", "similarity")
UPSTREAM_OUTPUT = "{dataset}_{pretrained}_{model}_{language}_{task}.json"
OUR_OUTPUT = "{dataset}_{pretrained}_{model}_{similarity}_{language}_{task}.json"

#: Errors of clip_benchmark and OpenCLIP that only they can find, by their beginning, and what helps.
REMEDIES = {
    "Unsupported dataset": "A folder in wds layout is --dataset wds/NAME --dataset_root FOLDER.",
    "Failed to download weights": "Fetch them where there is a network and give the file: --pretrained FILE.",
}


class Added(NamedTuple):
    """Flags that clip_benchmark has not, or in a narrower meaning."""

    similarity: str | None = None
    prompts: str | None = None
    amp: bool = False
    tokenizer: str | None = None
    pretrained: Sequence[str] | None = None
    output: str | None = None


NOTHING = Added()


def load_encoder(model_name, pretrained, cache_dir, device, *, own: Added):
    """clip_benchmark's loader of the model type `prolip`: (model, transform, tokenizer); own: our flags.

    ValueError where weights of prompts are of another model.
    """
    if checks.is_fitted(model_name):
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


@contextmanager
def plugged_in(own: Added) -> Iterator[None]:
    """clip_benchmark, repaired, with the model type `prolip`; as it was afterwards."""
    loader = partial(load_encoder, own=own)
    with repaired(), patch.dict(registry.TYPE2FUNC, prolip=loader):
        registry.MODEL_TYPES.append("prolip")  # the parser's choices are this very list
        try:
            yield
        finally:
            registry.MODEL_TYPES.remove("prolip")


def parse(own: Added, rest: Sequence[str]) -> Namespace:
    """clip_benchmark's flags, by its own parser; own: ours, which were taken out of `rest`."""
    rest = list(rest)
    if own.pretrained is not None:
        rest += ["--pretrained", *own.pretrained]
    if own.output is not None:
        rest += ["--output", own.output]
    with patch.object(sys, "argv", [PROG, *rest]):
        upstream, base = cli.get_parser_args()
    if not hasattr(base, "which"):
        upstream.print_help()
        raise SystemExit(2)
    if own.amp and base.which == "eval" and not base.amp:
        raise ValueError("--amp and --no_amp contradict each other: drop one")
    return base


def planned(own: Added, base: Namespace) -> list[Namespace]:
    """Every evaluation that clip_benchmark would make of these arguments, completed and checked."""
    checks.check_names(cli._as_list(base.pretrained_model))
    base.amp = own.amp  # the original's default is autocast, which is bfloat16 on CPU and changes rankings
    # With --skip_load the original ends in UnboundLocalError after its work. Features are still taken from their files.
    base.skip_load = False
    if own.pretrained is None and all(parse_model_name(model)[0] for model in base.model):
        base.pretrained = [""]
    runs: list[Namespace] = []
    with patch.object(cli, "run", runs.append):
        cli.main_eval(base)
    for run in runs:
        complete(run, own)
        checks.check_task(run)
        if own.prompts:
            checks.check_prompts(run, PromptWeights.load(own.prompts))
    checks.check_outputs(runs)
    for run in {(run.model, run.pretrained): run for run in runs}.values():
        checks.check_model(run, own.tokenizer)
    marks: dict[tuple, list[str]] = {}
    for run in runs:
        place, key = checks.wds_place(run), (run.dataset, run.task)
        if key not in marks:
            marks[key] = [] if place is None else checks.check_wds(run, place)
        if run.task == "linear_probe":
            run.feature_root = feature_folder(run, marks[key])
    return runs


def complete(run: Namespace, own: Added) -> None:
    """Fill in what depends on the model and the data set: model type, weights, task, output."""
    if run.model_type == "open_clip" and checks.is_ours(run):
        run.model_type = "prolip"
    if (
        own.pretrained is None
        and not run.pretrained_model
        and (run.model_type == "prolip" or parse_model_name(run.model)[0])
    ):
        run.pretrained = ""
    place = checks.wds_place(run)
    if place is not None and run.dataset_root.startswith("hf-hub:"):
        run.dataset_root = place.source  # the original knows pages of the hub by their address only
    if run.task == "auto":
        run.task = get_dataset_default_task(checks.dataset_name(run))
        # The original knows the tasks of some names and takes all others for classification.
        if run.task == "zeroshot_classification" and place is not None and read_kind(place, None) == "retrieval":
            run.task = "zeroshot_retrieval"
    run.output = output_of(run, own)


def similarity_of(run: Namespace, own: Added) -> str:
    """What the run compares by; a linear probe reads the means."""
    if run.model_type != "prolip":
        return "cosine"
    if run.task == "linear_probe":
        return "mean"
    if own.similarity is not None:
        return own.similarity
    if checks.is_fitted(run.model):
        return TrueMatchScore.name
    config, _ = get_model_config(run.model, run.model_cache_dir)
    return find_method(config["method_cfg"]["name"]).score.name


def output_of(run: Namespace, own: Added) -> str:
    """The file of a run. The original puts the slashes of a model's name into it, and at the end finds no folder."""
    template = run.output
    if own.output is None and template == UPSTREAM_OUTPUT and run.model_type == "prolip":
        template = OUR_OUTPUT
        if own.prompts:
            template = template.replace(".json", f"_{PromptWeights.load(own.prompts).digest}.json")
    weights = os.path.basename(run.pretrained) if os.path.isfile(run.pretrained) else run.pretrained
    values = (
        checks.dataset_name(run),
        run.model,
        weights,
        run.pretrained,
        run.language,
        run.task,
        similarity_of(run, own),
    )
    try:
        return template.format(**{field: value.replace("/", "_") for field, value in zip(FIELDS, values)})
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"--output {template!r} has a field that is not known ({error}): use"
            f" {', '.join(f'{{{field}}}' for field in FIELDS)}"
        ) from error


def feature_folder(run: Namespace, shard_marks: Sequence[str]) -> str:
    """The folder of a linear probe's features. The original names it by model and data set alone, and so takes features
    of other weights, data, splits or precision for its own where it finds them.
    """
    what = [checks.root_of(run), run.split, run.train_split, run.val_split, run.amp, run.normalize, *shard_marks]
    what += [decoding.VERSION]
    if run.val_proportion is not None:
        what += [run.val_proportion, run.seed]  # the seed draws the validation set
    weights: str | os.PathLike | None = run.pretrained
    if checks.is_fitted(run.model):
        weights = find_in(parse_model_name(run.model)[1], WEIGHT_NAMES, "weights")
    elif run.model_type == "prolip":
        weights = find_weights(run.model, run.pretrained or None, run.model_cache_dir)
    if weights and os.path.isfile(weights):
        status = os.stat(weights)
        what += [os.path.abspath(weights), status.st_size, status.st_mtime_ns]
    what += [run.model, run.dataset]
    return os.path.join(run.feature_root, hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16])


def evaluate_and_write(run: Namespace, own: Added) -> None:
    """One evaluation by clip_benchmark, its file completed with what was compared and how."""
    path = Path(run.output)
    if run.skip_existing and path.exists():
        if run.verbose:
            print(f"Skip {path}, exists already.")
        return
    if run.task == "linear_probe":
        os.makedirs(run.feature_root, exist_ok=True)  # the original makes its last folder only
    with replacing(path) as temporary:
        output = str(temporary).replace("{", "{{").replace("}", "}}")  # the original formats it
        cli.run(Namespace(**vars(run) | {"output": output}))
        result = json.loads(temporary.read_bytes()) | {"similarity": similarity_of(run, own), "amp": run.amp}
        result |= {"prompts": str(PromptWeights.load(own.prompts))} if own.prompts else {}
        temporary.write_text(json.dumps(result), encoding="utf-8")
    if run.verbose:
        print(f"Results are in {path}")


def run(words: Sequence[str], own: Added = NOTHING) -> None:
    """What clip_benchmark does with these words, `eval ...` or `build ...`, with our models in it.

    What the user can mend is known before a model is loaded: OSError, ValueError or CheckpointError.
    """
    if own.similarity is not None:
        own = own._replace(similarity=find_score(own.similarity).name)
    with plugged_in(own):
        base = parse(own, words)
        if base.which == "build":
            checks.check_results(base.files)
            checks.check_output(base.output)
            with replacing(Path(base.output)) as temporary:
                base.output = str(temporary)
                cli.main_build(base)
            return
        for one in planned(own, base):
            try:
                evaluate_and_write(one, own)
            except FileNotFoundError:
                raise
            except DamagedData as error:  # from a loader's worker with the worker's traceback before it
                raise DamagedData(str(error).splitlines()[-1].rpartition(f"{DamagedData.__name__}: ")[2]) from error
            except OSError as error:  # no network to fetch the data from, no room for the result
                raise OSError(f"--dataset {one.dataset}, --output {one.output}: {error}") from error
            except (ValueError, RuntimeError) as error:
                remedy = next((words for start, words in REMEDIES.items() if str(error).startswith(start)), None)
                if remedy is None:
                    raise
                raise ValueError(f"{error} {remedy}") from error
