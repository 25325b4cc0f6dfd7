"""A model card of facts: everything in it is read from the model and from what its run left, its figures in words, its
data and their licences, and what its traces mean. Every value is escaped, unless it says that it is Markdown itself.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from prolip.data.reading.named import without_word
from prolip.data.reading.shards import expand_source
from prolip.embedder import Embedder
from prolip.loading import config_file, is_prolip, load_embedder
from prolip.models.checkpoint import read_config
from prolip.models.diagnose import check_config, is_run
from prolip.uncertainty.units import Units, in_words
from prolip.utils.console import escaped, plain
from prolip.utils.documents import read_json, shown
from prolip.utils.secrecy import redacted

CARD = "README.md"
POINTS = "A CLIP-like model: pictures and texts become points."
GAUSSIANS = "A probabilistic vision-language model: every picture and every text becomes a Gaussian."


@dataclass(frozen=True)
class Source:
    """A model's folder, and of its run the configuration and the last evaluation, empty where there is none."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Said:
    """What only people know. name: of the model; licence: its own; data_licence: of what it was trained on."""

    name: str
    licence: str | None = None
    data_licence: str | None = None


def find_source(place: str, evaluation: str | None = None) -> Source:
    """A run's folder, or a model's. evaluation: a JSON of figures, instead of the run's eval.json.

    FileNotFoundError for what is neither, ValueError for a file that is no JSON, or holds something else. Addresses
    come without secrets.
    """
    folder = Path(place.removeprefix("local-dir:"))
    run = folder if is_run(folder) else folder.absolute().parent if is_run(folder.absolute().parent) else None
    model = folder / "model" if is_run(folder) else folder
    config_file(f"local-dir:{model}")  # or it says what is there instead
    found = {}
    for name, path in (("config", run and run / "config.json"), ("metrics", evaluation or (run and run / "eval.json"))):
        if path and Path(path).is_file():
            found[name] = {"config": check_config, "metrics": check_metrics}[name](redacted(read_json(path)), path)
        elif name == "metrics" and evaluation:
            raise FileNotFoundError(f"no figures at {evaluation}: give the eval.json of a run")
    return Source(model, **found)


def make_card(source: Source, said: Said, address: str) -> str:
    """The card of a model that is loaded as `address`, Markdown behind the hub's YAML."""
    embedder = load_embedder(f"local-dir:{source.folder}", stored=False)
    config = read_config(config_file(f"local-dir:{source.folder}"))[0]
    environment = Environment(
        loader=PackageLoader("prolip.hub", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=markdown,
    )
    environment.filters |= FILTERS
    size = config["vision_cfg"]["image_size"]
    rows = figures(source.metrics)
    units = embedder.score.units if embedder.probabilistic else None
    data = source.config.get("data", {})
    body = environment.get_template("card.md.j2").render(
        name=said.name,
        kind=GAUSSIANS if embedder.probabilistic else POINTS,
        address=address,
        method=source.config.get("method") or config.get("method_cfg", {}).get("name"),
        parameters=f"{embedder.parameters / 1e6:,.1f} million",
        dimension=embedder.embed_texts(["a"]).mean.shape[-1],
        pixels=f"{size} x {size}" if isinstance(size, int) else " x ".join(map(str, size)),
        context=config["text_cfg"].get("context_length", 77),
        ours=is_prolip(f"local-dir:{source.folder}"),
        figures=rows,
        tested=tested_on(source),
        step=source.metrics.get("step", "the last"),
        probabilistic=embedder.probabilistic,
        units=units,
        readings=readings(units, source.metrics) if units else [],
        novelty=embedder.novelty is not None,
        trained=trained_on(source),
        shards=licences([data.get("train_data")]),
        data_licence=said.data_licence,
        licence=said.licence,
        limits=limits(source, embedder),
    )
    front = ModelCardData(
        license=said.licence.lower() if said.licence else None,
        library_name="prolip",
        model_name=plain(said.name),
        pipeline_tag="zero-shot-image-classification",
        tags=["prolip", "open_clip", "probabilistic-embeddings"],
        eval_results=[
            EvalResult(
                task_type="zero-shot-image-classification",
                dataset_type="prolip-evaluation",
                dataset_name=plain(tested_on(source)) or "not recorded",
                metric_type=plain(row.key),
                metric_value=round(row.number, 5),
                metric_name=plain(row.words),
            )
            for row in rows
        ]
        or None,
    )
    return f"---\n{front.to_yaml()}\n---\n\n{body}"


def tested_on(source: Source) -> str:
    """The data of the run's evaluation."""
    val = source.config.get("val", {})
    given = val.get("val_data") or []
    before = [given] if isinstance(given, str) else []  # the emoji corpus, as earlier versions wrote it
    sources = [] if before else [str(source) for source in given]
    drawings = before or [source.removeprefix("emoji:") for source in sources if source.startswith("emoji:")]
    others = val.get("val_tasks") or [source for source in sources if not source.startswith("emoji:")]
    told = "::".join(map(place, drawings))
    chosen = f" ({val['val_select']})" if told and val.get("val_select") else ""
    names = f", beside the captions of {place(val['val_names'])}" if told and val.get("val_names") else ""
    return f"{told}{chosen}{names}" if told else ", ".join(place(str(task)) for task in others)


def trained_on(source: Source) -> str:
    """Data, length and beginning of the run, in two or three sentences."""
    data, run, model = (source.config.get(name, {}) for name in ("data", "run", "model"))
    if not data.get("train_data"):
        return ""
    steps, batch = source.metrics.get("step"), data.get("batch_size")
    length = f", {steps:,} steps of {batch} pairs per process" if steps and batch else ""
    chosen = f" ({data['select']})" if data.get("select") else ""
    start = model.get("pretrained")
    begun = f" It began with the weights of {place(start)}, whose data count too." if start else ""
    return f"{place(data['train_data'])}{chosen}{length}, {run.get('precision', 'fp32')}.{begun}"


def limits(source: Source, embedder: Embedder) -> list[str]:
    """What the model cannot do, as far as its files say."""
    found = []
    tested, metrics = tested_on(source), source.metrics
    if tested:
        found.append(f"It was measured on {markdown(tested)} alone. Of other pictures and texts nothing is known.")
    if isinstance(wrong := metrics.get("names/i2t/R@1"), (int, float)):
        found.append(
            f"Of 100 such pictures {round(100 * (1 - wrong))} get a wrong first name: take answers with a"
            " bound on how many are wrong (`calibrate_risk`, `predict(..., risk=...)`)."
        )
    if isinstance(ece := metrics.get("refusal/names_i2t/answer/ece"), (int, float)):
        found.append(f"Its probabilities are off by {ece:.2f} on average there: `fit` them to labelled pictures.")
    if embedder.probabilistic and embedder.novelty is None:
        found.append("It does not notice pictures of a foreign kind: it has no novelty.")
    if not embedder.probabilistic:
        found.append("It says nothing of how sure it is but by its similarities.")
    if embedder.parameters < 50e6:
        found.append(f"It is small, {embedder.parameters / 1e6:.0f} million parameters: a model to try things with.")
    found.append("Nobody has looked at what it makes of people. Do not let it decide on them.")
    return list(map(Markdown, found))


#: Figures of the corpus in the order of the card: key, what it is, whether it is a share.
KNOWN = (
    ("names/i2t/R@1", "pictures that find their name first", True),
    ("names/i2t/R@5", "pictures that find their name among the first five", True),
    ("names/t2i/R@1", "names that find their picture first", True),
    ("captions/i2t/mAP@R", "mAP@R, pictures to all captions", True),
    ("captions/t2i/mAP@R", "mAP@R, captions to pictures", True),
    ("zero_shot/subgroup/top1", "zero-shot, {zero_shot/subgroup/classes} classes", True),
    ("zero_shot/group/top1", "zero-shot, {zero_shot/group/classes} classes", True),
    ("refusal/names_i2t/score/auroc", "AUROC of wrong names, by the score", False),
    ("refusal/names_i2t/all/auroc", "AUROC of wrong names, by answer and novelty", False),
    ("refusal/names_i2t/answer/ece", "ECE of the answer's probability", False),
    ("matches/within_factor_2", "captions whose number of matches is predicted within a factor of 2", True),
    ("spearman/trace_true_matches", "Spearman's correlation of traces with true matches", False),
)
CHANCE = {
    "names/i2t/R@1": "names/i2t/chance_R@1",
    "names/i2t/R@5": "names/i2t/chance_R@5",
    "names/t2i/R@1": "names/t2i/chance_R@1",
    "matches/within_factor_2": "matches/chance_within_factor_2",
}
#: What other test sets are measured by.
TASKS = ("acc1", "mean_per_class_recall", "mean_recall@1", "i2t/R@1", "t2i/R@1", "mAP")
#: The bundled pictures by the beginning of their shard's name, the longest first. Texts: Unicode's, or the sets' own.
LICENCES = {
    "emoji": {"noto": "Apache-2.0", "twemoji": "CC-BY-4.0", "emojione": "CC-BY-4.0", "fluent-emoji": "MIT"},
    "icons": {
        "tabler": "MIT",
        "phosphor": "MIT",
        "lucide": "ISC",
        "unicons": "Apache-2.0",
        "mdi": "Apache-2.0",
        "remixicon": "Apache-2.0",
    },
}
#: Traces that are explained: of captions at a level, as the evaluation found them.
LEVELS = (
    ("trace/group", "a group's name"),
    ("trace/subgroup", "a subgroup's name"),
    ("trace/keyword", "a keyword"),
    ("trace/name", "a name"),
)
#: Figures that lie in these bounds by what they are.
BOUNDS: Mapping[str, tuple[float, float]] = (
    dict.fromkeys([*(key for key, _, _ in KNOWN), *CHANCE.values()], (0, 1))
    | dict.fromkeys([key for key, _ in LEVELS], (0, 10**6))
    | dict.fromkeys(["zero_shot/group/classes", "zero_shot/subgroup/classes"], (1, 10**9))
    | {"spearman/trace_true_matches": (-1, 1), "step": (0, 2**63)}
)


def check_metrics(metrics: Any, path: object) -> dict[str, Any]:
    """The figures of an eval.json, those that are not finite as None; ValueError for what the figures cannot be."""
    if not isinstance(metrics, dict):
        raise ValueError(f"{path} is {shown(metrics)}: want the figures of an evaluation, name -> number")
    found = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in metrics.items()
    }
    for key, value in found.items():
        bounds = BOUNDS.get(key, (0, 1) if key.partition("/")[2] in TASKS else None)
        kinds, noun = ((int,), "whole number") if key == "step" else ((int, float), "number")
        if value is not None and bounds and not (type(value) in kinds and bounds[0] <= value <= bounds[1]):
            raise ValueError(f"{path}: {shown(key)} is {shown(value)}: want a {noun} from {bounds[0]} to {bounds[1]:,}")
    return found


class Figure(NamedTuple):
    """One line of the table. key: as eval.json has it; value: as it is written; chance: of no model at all, or ""."""

    key: str
    words: str
    value: str
    chance: str
    number: float


def figures(metrics: Mapping[str, Any]) -> list[Figure]:
    """The figures of an evaluation that a card shows, those of the corpus first."""
    found = []
    for key, words, share in KNOWN:
        if isinstance(value := metrics.get(key), (int, float)) and math.isfinite(value):
            for part in [part for part in metrics if f"{{{part}}}" in words]:
                words = words.replace(f"{{{part}}}", f"{metrics[part]:.0f}")
            chance = metrics.get(CHANCE.get(key, ""))
            found.append(Figure(key, words, text(value, share), "" if chance is None else text(chance, share), value))
    known = {key.partition("/")[0] for key, _, _ in KNOWN} | {"recall_by_trace", "trace", "inclusion"}
    for key, value in metrics.items():
        task, _, rest = key.partition("/")
        if rest in TASKS and task not in known and isinstance(value, (int, float)) and math.isfinite(value):
            found.append(Figure(key, f"{task}: {rest}", text(value, True), "", value))
    return found


def text(value: float, share: bool) -> str:
    return f"{value:.1%}" if share else f"{value:.3f}"


def licences(sources: Sequence[str | None]) -> list[tuple[str, str]]:
    """(shard, licence of its pictures) of the bundled data among these; "" where it is not known."""
    found = {}
    for source in sources:
        for part in without_word(source or "").split("::"):
            for url in shards_of(part):
                path = Path(url)
                known = LICENCES.get(path.parent.name, {}) if path.suffix == ".tar" else {}
                names = sorted((name for name in known if path.stem.startswith(name)), key=len)
                found["/".join(path.parts[-2:])] = known[names[-1]] if names else ""
    return list(found.items())


def shards_of(source: str) -> list[str]:
    """The shards of a source; itself where they are not known here, as they may lie on another machine."""
    try:
        return expand_source(source) if source else []
    except (OSError, ValueError, ImportError):
        return [source]


def readings(units: Units, metrics: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, trace, pictures that it fits, bits) of captions by level; of round shares where nothing was measured."""
    given = [(words, float(metrics[key])) for key, words in LEVELS if isinstance(metrics.get(key), (int, float))]
    if not given:
        shares = [torch.tensor(1 / n) for n in (2, 10, 100) if units.images >= n]
        given = [("a text", float(units.trace(share))) for share in shares]
    rows = []
    for words, trace in given:
        x = torch.tensor(trace)
        bits = float(units.information(x, bits=True))
        rows.append((words, f"{trace:.3f}", in_words(float(units.share(x))), f"{bits:.1f}"))
    return rows


def place(path: str | None) -> str:
    """Paths as others may read them: the end of those that are of this machine alone."""
    text = path or ""
    word, parts = text.removesuffix(without_word(text)), without_word(text).split("::")
    return word + "::".join("/".join(Path(part).parts[-2:]) if Path(part).is_absolute() else part for part in parts)


#: What has a meaning within a line; an underscore between letters has none.
INLINE = re.compile(r"[\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])")
#: What has a meaning at the beginning of a block.
BLOCK = re.compile(r"^(?:(?=#|=|--|\+\+|[-+](?:\s|$))|(\d+)(?=[.)](?:\s|$)))")
#: What a name between backquotes may not hold.
ODD = re.compile(r"[`|<>\[\]&]")


class Markdown(str):
    """Text that is Markdown, in which the values are escaped."""


def markdown(value: object) -> str:
    """A value as text of one line, with which no heading, table, link, image or HTML begins or ends."""
    if isinstance(value, Markdown):
        return value
    text = INLINE.sub(r"\\\g<0>", html.escape(plain(value).strip(), quote=False))
    return Markdown(BLOCK.sub(r"\1\\", text))


def code(value: object) -> Markdown:
    """A value between backquotes, in a table, too: characters that mean something in Markdown are written as \\xNN."""
    return Markdown(ODD.sub(escaped, plain(value)))


def literal(value: object) -> Markdown:
    """A text in a block of Python."""
    return Markdown(json.dumps(plain(value), ensure_ascii=False))


FILTERS = {"code": code, "literal": literal}
