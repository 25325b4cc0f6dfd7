"""A trained model with its card, in a folder or on the hub; the card escapes each value, unless it is `Markdown`."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment, PackageLoader, StrictUndefined

from prolip.data.reading.named import shortened, without_word
from prolip.data.reading.shards import expand_source
from prolip.embedder import Embedder
from prolip.fitting.attach import FILES, check_folder
from prolip.loading import config_file, is_prolip
from prolip.models.checkpoint import read_config, save_pretrained
from prolip.models.diagnose import FIT, check_config, is_run
from prolip.models.prolip import ProLIP
from prolip.uncertainty.openclip import FILE
from prolip.uncertainty.units import Units, in_words
from prolip.utils.console import escaped, plain
from prolip.utils.documents import check_types, read_json, shown
from prolip.utils.links import check_links
from prolip.utils.outputs import replacing_folder
from prolip.utils.secrecy import redacted

CARD, FIGURES = "README.md", "eval.json"


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder, with the configuration and last evaluation of its run, empty without a run."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


class CardInfo(NamedTuple):
    """Facts that no file holds. name, licence: of the model; data_licence: of its training data."""

    name: str
    licence: str | None = None
    data_licence: str | None = None


def find_source(place: str, evaluation: str | None = None) -> ModelFolder:
    """Read the folder of a run or model, without secrets. evaluation: a JSON of metrics, instead of the run's."""
    folder = Path(place.removeprefix("local-dir:"))
    run = next((place for place in (folder, folder.absolute().parent) if is_run(place)), None)
    own = folder / "model" if run == folder else folder
    config_file(f"local-dir:{own}")  # raises with an explanation if missing
    if evaluation and not Path(evaluation).is_file():
        raise FileNotFoundError(f"no metrics at {evaluation}: give the eval.json of a run")
    config = check_config(redacted(read_json(run / "config.json")), run / "config.json") if run else {}
    file = Path(evaluation) if evaluation else (run or own) / "eval.json"
    read = file.is_file() and bool(evaluation or run)
    return ModelFolder(own, config, check_metrics(redacted(read_json(file)), file) if read else {})


def make_card(source: ModelFolder, info: CardInfo, address: str) -> str:
    """Return the card of a model that loads as `address`: the hub's YAML, then Markdown."""
    embedder = Embedder.load(f"local-dir:{source.folder}")
    config = read_config(config_file(f"local-dir:{source.folder}"))[0]
    environment = Environment(loader=PackageLoader("prolip.hub", "."), undefined=StrictUndefined, finalize=markdown)
    environment.trim_blocks = environment.lstrip_blocks = environment.keep_trailing_newline = True
    environment.filters |= {"code": code, "literal": literal}
    size = config["vision_cfg"]["image_size"]
    rows, tested = figures(source.metrics), tested_on(source)
    units = embedder.score.units if embedder.probabilistic else None
    body = environment.get_template("card.md.j2").render(
        info=info,
        embedder=embedder,
        address=address,
        method=source.config.get("method") or config.get("method_cfg", {}).get("name"),
        parameters=f"{embedder.parameters / 1e6:,.1f} million",
        dimension=embedder.embed_texts(["a"]).mean.shape[-1],
        pixels=f"{size} x {size}" if isinstance(size, int) else " x ".join(map(str, size)),
        context=config["text_cfg"].get("context_length", 77),
        ours=is_prolip(f"local-dir:{source.folder}"),
        figures=rows,
        tested=tested,
        step=source.metrics.get("step", "the last"),
        units=units,
        readings=readings(units, source.metrics) if units else [],
        trained=trained_on(source),
        fit=fitted_on(source) if units else {},
        shards=licences(source.config.get("data", {}).get("train_data") or ""),
        limits=limits(source, embedder),
    )
    task, data = "zero-shot-image-classification", plain(tested) or "not recorded"
    results = [
        EvalResult(task, "prolip-evaluation", data, plain(row.key), round(row.number, 5), metric_name=plain(row.words))
        for row in rows
    ]
    front = ModelCardData(
        license=info.licence.lower() if info.licence else None,
        library_name="prolip",
        model_name=plain(info.name),
        pipeline_tag=task,
        tags=["prolip", "open_clip", "probabilistic-embeddings"],
        eval_results=results or None,
    )
    return f"---\n{front.to_yaml()}\n---\n\n{body}"


def tested_on(source: ModelFolder) -> str:
    """Return the data of the run's evaluation."""
    val, data = source.config.get("val", {}), source.config.get("data", {})
    held = [f"{shortened(str(data.get('train_data')))} (the part that --split {data.get('split')} held out)"]
    held = held if data.get("split") and any(key.startswith("held-out/") for key in source.metrics) else []
    given = val.get("val_data") or []
    sources = [given] if isinstance(given, str) else list(map(str, given))
    drawings = [one.removeprefix("emoji:") for one in sources if isinstance(given, str) or one.startswith("emoji:")]
    if not drawings:
        return ", ".join([*(shortened(str(task)) for task in val.get("val_tasks") or sources), *held])
    chosen = f" ({val['val_select']})" if val.get("val_select") else ""
    names = f", with the captions of {shortened(val['val_names'])} in the gallery" if val.get("val_names") else ""
    return ", ".join([f"{'::'.join(map(shortened, drawings))}{chosen}{names}", *held])


def trained_on(source: ModelFolder) -> str:
    """Describe data, length and initial weights of the run in one or two sentences."""
    data, run, model = (source.config.get(name, {}) for name in ("data", "run", "model"))
    if not data.get("train_data"):
        return ""
    steps, batch = source.metrics.get("step"), data.get("batch_size")
    length = f", {steps:,} steps of {batch} pairs per process" if steps and batch else ""
    chosen = f" ({data['select']})" if data.get("select") else ""
    start = model.get("pretrained")
    begun = f" Training began with the weights of {shortened(start)}, so their data count too." if start else ""
    return f"{shortened(data['train_data'])}{chosen}{length}, {run.get('precision', 'fp32')}.{begun}"


def fitted_on(source: ModelFolder) -> dict[str, Any]:
    """Return the data and the number of pairs to which the variances were fitted; empty if they are unknown."""
    file = source.folder / FIT
    if not file.is_file():
        return {}
    found = check_types(redacted(read_json(file)), {"data": str, "pairs": int}, file)
    return found if {"data", "pairs"} <= found.keys() else {}


def limits(source: ModelFolder, embedder: Embedder) -> list[str]:
    """List the model's limitations that follow from its files."""
    found, tested, metrics = [], tested_on(source), source.metrics
    if tested:
        found.append(f"It was measured only on {markdown(tested)}. Its metrics on other images and texts are unknown.")
    if isinstance(right := metrics.get("names/i2t/R@1"), (int, float)):
        remedy = "To bound the errors, use `calibrate_risk` and `predict(..., risk=...)`"
        found.append(f"{round(100 * (1 - right))} of 100 such images get a wrong first name. {remedy}.")
    if isinstance(ece := metrics.get("refusal/names_i2t/answer/ece"), (int, float)):
        found.append(f"Its probabilities there are wrong by {ece:.2f} on average. `fit` them to labelled images.")
    if embedder.caution:
        found.append(f"{embedder.caution.capitalize()}.")
    if not embedder.probabilistic:
        found.append("It has no uncertainty apart from its similarities.")
    elif embedder.novelty is None:
        found.append("It cannot detect foreign images, because it has no novelty.")
    if embedder.parameters < 50e6:
        found.append(f"It is a small model for experiments, with {embedder.parameters / 1e6:.0f} million parameters.")
    found.append("Its results on people have not been examined. Do not use it for decisions about people.")
    return list(map(Markdown, found))


FACTS = json.loads(resources.files("prolip.hub").joinpath("card.json").read_text(encoding="utf-8"))
#: Metrics of the corpus: key, words, True for a share; metrics with a chance value `chance_NAME`; those of other sets.
KNOWN, TASKS = FACTS["figures"], FACTS["tasks"]
CHANCE = {key: "/chance_".join(key.rsplit("/", 1)) for key in FACTS["with_chance"]}
#: Licences of the bundled images by prefix of their shard's name; levels of captions by the key of their trace.
LICENCES, LEVELS = FACTS["licences"], FACTS["levels"]
#: Other numbers of an evaluation on the card.
COUNTS = {*(key for key, _ in LEVELS), "zero_shot/group/classes", "zero_shot/subgroup/classes", "step"}


def check_metrics(metrics: Any, path: object) -> dict[str, Any]:
    """Return the metrics of an eval.json, infinite ones as None. ValueError for a wrong type or range."""
    if not isinstance(metrics, dict):
        raise ValueError(f"{path} is {shown(metrics)}: expected the metrics of an evaluation, name -> number")
    lost = {key for key, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)}
    shares = {key for key, _, _ in KNOWN} | set(CHANCE.values())
    for key, value in metrics.items():
        share = key in shares or key.partition("/")[2] in TASKS
        if value is None or key in lost or not (share or key in COUNTS):
            continue
        least, most = (-1 if key.startswith("spearman") else 0, 1) if share else (0, 10**9)
        if type(value) not in (int, float) or not least <= value <= most:
            raise ValueError(f"{path}: {shown(key)} is {shown(value)}: expected a number from {least} to {most:,}")
    return {key: None if key in lost else value for key, value in metrics.items()}


class CardRow(NamedTuple):
    """One row of the table. key: as in eval.json; value, chance: as printed, "" for none."""

    key: str
    words: str
    value: str
    chance: str
    number: float


def figures(metrics: Mapping[str, Any]) -> list[CardRow]:
    """Return the rows of a card's table of metrics, metrics of the corpus first."""
    numbers = {key: x for key, x in metrics.items() if isinstance(x, (int, float)) and math.isfinite(x)}
    found = []
    for key, words, share in (row for row in KNOWN if row[0] in numbers):
        for part in [part for part in numbers if f"{{{part}}}" in words]:
            words = words.replace(f"{{{part}}}", f"{numbers[part]:.0f}")
        chance = numbers.get(CHANCE.get(key, ""))
        guessed = "" if chance is None else text(chance, share)
        found.append(CardRow(key, words, text(numbers[key], share), guessed, numbers[key]))
    known = {key.partition("/")[0] for key, _, _ in KNOWN} | {"recall_by_trace", "trace", "inclusion"}
    for key, value in numbers.items():
        task, _, rest = key.partition("/")
        if rest in TASKS and task not in known:
            images = sum(numbers.get(f"{task}/i2t/queries{part}", 0.0) for part in ("", "_without_match"))
            own = "@1" in rest and images >= 1 and f"{task}/own/i2t/R@1" not in numbers  # each text matches one image
            guessed = text(1 / images, True) if own else ""
            found.append(CardRow(key, f"{task}: {rest}", text(value, True), guessed, value))
    return found


def text(value: float, share: bool) -> str:
    return f"{value:.1%}" if share else f"{value:.3f}"


def licences(source: str) -> list[tuple[str, str]]:
    """Return (shard, licence of its images) for the data in a source; "" if unknown."""
    found = {}
    for part in without_word(source).split("::") if source else ():
        try:
            urls = expand_source(part)
        except (OSError, ValueError, ImportError):  # on another machine
            urls = [part]
        for path in map(Path, urls):
            known = LICENCES.get(path.parent.name, {}) if path.suffix == ".tar" else {}
            names = sorted((name for name in known if path.stem.startswith(name)), key=len)
            found["/".join(path.parts[-2:])] = known[names[-1]] if names else ""
    return list(found.items())


def readings(units: Units, metrics: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return (caption, trace, share of matching images, bits) by level, measured, else for round shares."""
    given = [(words, float(metrics[key])) for key, words in LEVELS if isinstance(metrics.get(key), (int, float))]
    if not given:
        names = {n: f"example: a {word} text" for n, word in ((2, "general"), (10, "narrower"), (100, "specific"))}
        given = [(names[n], float(units.trace(torch.tensor(1 / n)))) for n in names if units.images >= n]
    traces = torch.tensor([trace for _, trace in given])
    matched, bits = units.share(traces).tolist(), units.information(traces, bits=True).tolist()
    return [(words, f"{t:.3f}", in_words(x), f"{bit:.1f}") for (words, t), x, bit in zip(given, matched, bits)]


#: Markdown's special characters within a line (not an underscore between letters), at the start of a block, and in a
#: name between backquotes.
INLINE = re.compile(r"[\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])")
BLOCK = re.compile(r"^(?:(?=#|=|--|\+\+|[-+](?:\s|$))|(\d+)(?=[.)](?:\s|$)))")
ODD = re.compile(r"[`|<>\[\]&]")


class Markdown(str):
    """Text that is already Markdown."""


def markdown(value: object) -> str:
    """Escape a value as one line without headings, tables, links, images or HTML."""
    if isinstance(value, Markdown):
        return value
    text = INLINE.sub(r"\\\g<0>", html.escape(plain(value).strip(), quote=False))
    return Markdown(BLOCK.sub(r"\1\\", text))


def code(value: object) -> Markdown:
    """Escape a value for backquotes, also in a table: special characters become \\xNN."""
    return Markdown(ODD.sub(escaped, plain(value)))


def literal(value: object) -> Markdown:
    """Return a text as a literal in a block of Python."""
    return Markdown(json.dumps(plain(value), ensure_ascii=False))


# --- folders and the hub ----------------------------------------------------------------------------------------------
def save(
    source: ModelFolder, folder: Path, info: CardInfo, address: str | None = None, overwrite: bool = False
) -> list[Path]:
    """Copy a model's files and write its card and metrics next to them; returns the written files, in order.

    address: of the model on its card, by default this folder. overwrite: replace a README.md that is not our card.
    """
    check_links(source.folder)
    names = [name for name in FILES if (source.folder / name).is_file()]
    check_folder(folder, names, is_prolip(f"local-dir:{source.folder}"), source.folder)
    there = (folder / CARD).read_text(encoding="utf-8", errors="replace") if (folder / CARD).exists() else ""
    head = there.partition("\n---\n")[0]
    own = head.startswith("---\n") and "\nlibrary_name: prolip\n" in head and "- probabilistic-embeddings" in head
    if not (overwrite or own) and (folder / CARD).exists():
        raise ValueError(f"{folder / CARD} is not a ProLIP card: give another folder, or --overwrite")
    card = make_card(source, info, address or f"local-dir:{folder}")  # before any writing: loads the model
    texts = {CARD: card} | ({FIGURES: json.dumps(source.metrics, indent=2) + "\n"} if source.metrics else {})
    if "open_clip_config.json" in names and (source.folder / FILE).is_file():
        config = read_json(source.folder / "open_clip_config.json") | {"uncertainty": FILE}
        texts["open_clip_config.json"] = json.dumps(config, indent=2) + "\n"
    gone = {*FILES, *((FIGURES,) if own else ())}
    with replacing_folder(folder, kept=lambda name: name not in gone) as place:
        for name in names:
            shutil.copyfile(source.folder / name, place / name)
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")
    return [folder / name for name in dict.fromkeys((*names, *texts))]


def push_to_hub(
    model: ProLIP | str | os.PathLike,
    repo: str,
    *,
    tokenizer: Any = None,
    license: str | None = None,
    data_license: str | None = None,
    private: bool = False,
) -> str:
    """Push a model with its card to the hub as `org/name`; returns the address that loads it.

    model: in memory (without metrics), or the folder of a run or model; tokenizer: from `get_tokenizer`, for a model in
    memory; license: a hub identifier such as mit or cc-by-4.0; data_license: a sentence.
    """
    check_repo(repo)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        if isinstance(model, ProLIP):
            model = save_pretrained(model, place / "memory", tokenizer)
        elif tokenizer is not None:
            raise ValueError(f"tokenizer is only for a model in memory: remove it, {os.fspath(model)} has its own")
        info = CardInfo(repo.split("/")[1], license, data_license)
        save(find_source(os.fspath(model)), place / "model", info, f"hf-hub:{repo}")
        return push(place / "model", repo, private)


def check_repo(repo: str) -> None:
    """Raise ValueError unless `repo` is `org/name`."""
    validate_repo_id(repo)
    if "/" not in repo:
        raise ValueError(f"{repo!r} has no owner: give org/name")


def push(folder: Path, repo: str, private: bool = False) -> str:
    """Push a folder written by `save` to the hub as `org/name`, creating the repository; returns the address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_links(folder)
    api = HfApi()
    names = [name for name in (*FILES, CARD, FIGURES) if (folder / name).is_file()]
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        print(f"{repo}: uploading {len(names)} files")
        message = "Add the model with its card"
        api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=names, commit_message=message)
    except (HfHubHTTPError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConnectionError(f"cannot write to {repo} ({why}): log in with `hf auth login`") from error
    return f"hf-hub:{repo}"
