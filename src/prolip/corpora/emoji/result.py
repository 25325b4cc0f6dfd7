"""The result of an evaluation on the corpus: metrics, embeddings and drawings, saved, loaded and printed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prolip.corpora.emoji import uncertainty
from prolip.corpora.emoji.corpus import LEVELS, CaptionTable, Concept, Corpus, Drawing
from prolip.evaluation.metrics import bootstrap
from prolip.evaluation.metrics.ranking import Ranking, statistics_of
from prolip.evaluation.metrics.streaming import Nearest, PairScores, Relevance, rank
from prolip.evaluation.table import aligned
from prolip.gaussian import Gaussian
from prolip.methods import score_from_dict
from prolip.scores import Score
from prolip.uncertainty.doubt import Evidence
from prolip.utils.console import plain
from prolip.utils.documents import check_types, loads
from prolip.utils.outputs import replacing_folder

#: Prefixes of the arrays of novelty, and of the reader's arrays.
NOVELTY, READ = "novelty_", "read_"
WITHIN = "matches/within_factor_2"
#: Signals to refuse a first answer by, as named in the table and the report.
REFUSED_BY = {
    "score": "top score",
    "image": "trace of the drawing",
    "text": "trace of the text",
    "pair": "trace of both",
    "mean": "novelty",
    "first": "novelty of the first token",
    "answer": "answer's probability",
    "all": "answer and novelty",
}


@dataclass
class CorpusResult:
    """One evaluation: of drawings (N, D) and texts (T, D) of a corpus."""

    corpus: Corpus
    image: Gaussian
    text: Gaussian
    token_lengths: np.ndarray
    metrics: dict[str, float]
    info: dict  # JSON values
    novelty: dict[str, np.ndarray] = field(default_factory=dict)  # nats of drawings (N,) by tower end
    # From the model's reader: `evidence` (N, 2), `ambiguity` (N,) of drawings; `share_low`, `share_high` (T,) of texts.
    read: dict[str, np.ndarray] = field(default_factory=dict)
    # Its metrics as functions of the drawings, not saved.
    zero_shot: dict[str, bootstrap.Statistic] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def table(self) -> CaptionTable:
        """The captions."""
        return self.corpus.caption_table()

    @property
    def similarity(self) -> str:
        """Name of the score that ranked images and texts."""
        return self.info.get("similarity", "csd")

    @cached_property
    def score(self) -> Score:
        """The score that ranked images and texts."""
        return score_from_dict(self.info.get("score", {"name": self.similarity}))

    @cached_property
    def model_score(self) -> Score:
        """The score of the model's method."""
        return score_from_dict(self.info.get("model_score", self.info.get("score", {"name": self.similarity})))

    def uncertainty(self, z: Gaussian) -> np.ndarray:
        """Return the uncertainty by the model's method, (N, D) -> (N,)."""
        return self.model_score.uncertainty(z).numpy()

    @property
    def doubt(self) -> torch.Tensor | None:
        """(N,) share of each drawing's match probability that is not the model's; None for a model without it."""
        evidence = Evidence(*torch.from_numpy(self.read["evidence"]).unbind(1)) if "evidence" in self.read else None
        return self.model_score.doubts(evidence, evidence)

    @property
    def expected_matches(self) -> np.ndarray | None:
        """(T,) expected matches of each text among the drawings; None if traces have no unit."""
        units = self.model_score.units
        return None if units is None else units.matches(self.text.trace, len(self.corpus.drawings)).numpy()

    @property
    def probabilistic(self) -> bool:
        """True if the variances have a meaning."""
        return self.info.get("probabilistic", True)

    @cached_property
    def name_texts(self) -> np.ndarray:
        """(K,) the text of every concept's name."""
        return self.table.text[self.table.rows("name")]

    @cached_property
    def text_relation(self) -> np.ndarray:
        """(T, N) bool: whether the text matches the drawing at any level."""
        return self.table.text_relation[:, self.corpus.drawing_concepts]

    @cached_property
    def galleries(self) -> dict[str, tuple[Gaussian, np.ndarray]]:
        """The texts (G, D) of each gallery, and their matches with drawings, (G, N) bool.

        `names`: strict labels, where a concept's keyword is not its name; `captions`: all texts, complete labels.
        """
        named = self.table.relation[self.table.rows("name")][:, self.corpus.drawing_concepts]
        return {"names": (self.text.select(self.name_texts), named), "captions": (self.text, self.text_relation)}

    @cached_property
    def ranked(self) -> dict[str, list[tuple[Ranking, Nearest]]]:
        """Both directions of each gallery: rankings and first answers."""
        found = {}
        for name, (text, relation) in self.galleries.items():
            scores = PairScores.from_gaussians(self.image, text, self.score)
            relevance = Relevance.from_dense(torch.from_numpy(relation).mT)
            found[name] = [rank(scores.image_rows, relevance), rank(scores.text_rows, relevance.transposed())]
        return found

    @property
    def rankings(self) -> dict[str, list[Ranking]]:
        """Only the rankings."""
        return {name: [ranking for ranking, _ in ways] for name, ways in self.ranked.items()}

    @property
    def clusters(self) -> dict[str, bootstrap.Clusters]:
        """The concepts that intervals resample, with their drawings, names, and texts whose first drawing is theirs."""
        drawn = np.unique(self.corpus.drawing_concepts, return_inverse=True)[1]
        named, first = self.galleries["names"][1].argmax(1), self.text_relation.argmax(1)
        first[self.name_texts] = named
        of = {"images": drawn, "names": drawn[named], "captions": drawn[first]}
        return {name: bootstrap.Clusters("concepts", rows, drawn.max() + 1) for name, rows in of.items()}

    @property
    def statistics(self) -> dict[str, bootstrap.Statistic]:
        """The metrics with intervals, as functions of how often each cluster was drawn."""
        found = self.zero_shot | uncertainty.statistics(self)
        for name, (i2t, t2i) in self.rankings.items():
            found |= {f"{name}/{key}": statistic for key, statistic in statistics_of(i2t, t2i, name).items()}
        known = {key for key, value in self.metrics.items() if math.isfinite(value) and not key.endswith("rsum")}
        clusters = self.clusters
        return {key: bootstrap.clustered(statistic, clusters) for key, statistic in found.items() if key in known}

    def add_intervals(self, draws: int, against: CorpusResult | None = None) -> None:
        """Add 95% bootstrap intervals, `info["intervals"]`, and those of differences from another model's result,
        `info["difference"]`. ValueError for a result on other drawings or texts.
        """
        own = self.statistics
        self.info["intervals"] = {key: [x.low, x.high] for key, x in bootstrap.intervals(own, draws).items()}
        if against is None:
            return
        first, second = ([(d.key, d.concept) for d in x.corpus.drawings] for x in (against, self))
        if first != second:
            raise ValueError("the two results are of different drawings. Give both the same --data and --select")
        if against.corpus.concepts != self.corpus.concepts:
            flags = "--data, --names, --all-names and --select"
            raise ValueError(f"the two results are of different texts. Give both the same {flags}")
        found = bootstrap.paired(against.statistics, own, draws)
        self.info["difference"] = {key: list(x) for key, x in found.items()}

    def save(self, folder: str | Path) -> Path:
        """Write `metrics.json`, `corpus.json` and `embeddings.npz` (with the drawings) into a folder in one step."""
        finite = {key: value if math.isfinite(value) else None for key, value in self.metrics.items()}
        written = json.dumps({"info": self.info, "metrics": finite}, indent=1)
        drawings = [[d.key, d.style, d.concept] for d in self.corpus.drawings]
        concepts = [asdict(concept) for concept in self.corpus.concepts]
        arrays: dict[str, Any] = {f"{NOVELTY}{name}": nats for name, nats in self.novelty.items()}
        arrays |= {f"{READ}{name}": x for name, x in self.read.items()}
        for side, z in (("image", self.image), ("text", self.text)):
            arrays |= {f"{side}_mean": z.mean.numpy(), f"{side}_log_var": z.log_var.numpy()}
        data = [d.data for d in self.corpus.drawings]
        arrays |= {"token_lengths": self.token_lengths, "drawing_sizes": np.array(list(map(len, data)))}
        arrays["drawings"] = np.frombuffer(b"".join(data), dtype=np.uint8)
        with replacing_folder(Path(folder), kept=lambda name: True) as place:
            (place / "metrics.json").write_text(written, encoding="utf-8")
            (place / "corpus.json").write_text(json.dumps({"concepts": concepts, "drawings": drawings}))
            np.savez(place / "embeddings.npz", **arrays)
        return Path(folder)


class Written(dict[str, Any]):
    """The values of a file by name; ValueError for a missing one."""

    def __init__(self, values: dict[str, Any], place: str):
        super().__init__(values)
        self.place = place

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self.place} has no {name!r}: evaluate again with prolip eval emoji")


#: Types of the values in `info`.
KINDS: dict[str, Any] = dict.fromkeys(("images", "concepts", "texts", "parameters"), int)
KINDS |= dict.fromkeys(("machine", "software", "date", "similarity"), str)
KINDS |= {"styles": list, "seconds": int | float, "probabilistic": bool}


def load(folder: str | Path) -> CorpusResult:
    """Read the files of `save`. FileNotFoundError for a missing file, ValueError for files that do not match."""
    folder = Path(folder)
    for name in ("metrics.json", "corpus.json", "embeddings.npz"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"no {name} in {folder}: run prolip eval emoji with --output {folder}")
    written = loads((folder / "metrics.json").read_text(encoding="utf-8"))
    place = str(folder / "metrics.json")
    info = Written(check_types(written["info"], KINDS, f"info of {place}"), place)
    metrics = Written(check_types(written["metrics"], {}, place, int | float | None), place)
    metrics.update({key: float("nan") for key, value in metrics.items() if value is None})
    texts = loads((folder / "corpus.json").read_text(encoding="utf-8"))
    concepts = tuple(Concept(**{**c, "keywords": tuple(c["keywords"])}) for c in texts["concepts"])
    with np.load(folder / "embeddings.npz") as arrays:
        data, ends = arrays["drawings"].tobytes(), np.cumsum(arrays["drawing_sizes"])
        z = {key: torch.from_numpy(arrays[key]) for key in arrays.files if key.startswith(("image_", "text_"))}
        novelty = {key.removeprefix(NOVELTY): arrays[key] for key in arrays.files if key.startswith(NOVELTY)}
        said = {key.removeprefix(READ): arrays[key] for key in arrays.files if key.startswith(READ)}
        token_lengths = arrays["token_lengths"]
    drawings = tuple(
        Drawing(key, style, concept, data[start:end])
        for (key, style, concept), start, end in zip(texts["drawings"], [0, *ends[:-1]], ends)
    )
    image, text = (Gaussian(z[f"{kind}_mean"], z[f"{kind}_log_var"]) for kind in ("image", "text"))
    result = CorpusResult(Corpus(concepts, drawings), image, text, token_lengths, metrics, info, novelty, said)
    for what, wanted, *found in (
        ("drawings", len(texts["drawings"]), len(ends), len(image.mean), len(image.log_var)),
        ("texts", len(result.table.texts), len(token_lengths), len(text.mean), len(text.log_var)),
    ):
        if set(found) != {wanted}:
            raise ValueError(f"embeddings.npz has {min(found)} rows for the {wanted} {what} of corpus.json")
    return result


def format_corpus(result: CorpusResult, brief: bool = False) -> str:
    """Return the metrics as text; brief: the first ten lines."""
    m, info = result.metrics, result.info

    def shares(*keys: str) -> list[str]:  # in percent; a dash for a missing metric, such as R@10 among nine drawings
        return [f"{100 * m[key]:.2f}" if key in m else "-" for key in keys]

    lines = [
        f"{info['images']} drawings ({plain(', '.join(info['styles']))}), {info['concepts']} names, "
        f"{info['texts']} texts; ranked by {result.similarity}; {info['seconds']} s"
    ]
    ways = {"names/i2t": "image -> names", "names/t2i": "names -> image"}
    ways |= {"captions/i2t": "image -> all captions", "captions/t2i": "all captions -> image"}
    rows = {}
    for place, label in ways.items():
        found = shares(*(f"{place}/{key}" for key in ("R@1", "R@5", "R@10", "mAP@R", "R-Precision")))
        rows[label] = [*found, f"{m[f'{place}/median_rank']:.1f}", *shares(f"{place}/chance_R@1")]
    lines += _block("retrieval", ["R@1", "R@5", "R@10", "mAP@R", "R-Prec", "median", "chance"], rows)
    if brief:
        last = {"right subgroup": "zero_shot/subgroup_members/top1", "counts within factor 2": WITHIN}
        return "\n".join([*lines, *(f"{what:<26}{shares(key)[0]:>8}" for what, key in last.items() if key in m)])
    rows = {}
    for kind in (f"{level}{how}" for level in ("subgroup", "group") for how in ("", "_plain", "_members")):
        found = shares(*(f"zero_shot/{kind}/{key}" for key in ("top1", "top5", "mean_per_class_recall")))
        rows[kind] = [*found, f"{m[f'zero_shot/{kind}/classes']:.0f}"]
    lines += _block("zero-shot", ["top-1", "top-5", "by class", "classes"], rows)
    lines += ["-: fewer candidates than k"] if any(" - " in f"{line[26:]} " for line in lines) else []
    lines += [*refusal_lines(m), *calibration_lines(m), ""]
    if result.probabilistic:
        lines.append("mean trace                " + "  ".join(f"{k} {m[f'trace/{k}']:.4g}" for k in (*LEVELS, "image")))
        spreads = "  ".join(f"{kind}s {100 * m[f'trace/{kind}_spread']:.2f}%" for kind in ("text", "image"))
        lines.append(f"middle 90% over median    {spreads}")
        for prefix in ("matches/", "ambiguity/", "spearman/", "inclusion/", "recall_by_trace/"):
            lines += [""] if any(key.startswith(prefix) for key in m) else []
            lines += [f"{k:<56}{v:9.3f}" for k, v in m.items() if k.startswith(prefix) and not k.endswith("/median")]
    else:
        lines.append("points: this model's method trains only means, so variances have no meaning")
    change = info.get("difference", {})
    head = f"{'95% intervals by bootstrap over concepts':<53}" + ("difference to --against" if change else "")
    lines += ["", head] if "intervals" in info else []
    for key, (low, high) in info.get("intervals", {}).items():
        cells = f"{key:<34}{100 * low:5.1f} to {100 * high:5.1f}"
        if key in change:
            cells += "   {:+6.2f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in change[key]))
        lines.append(cells)
    return "\n".join(lines)


def refusal_lines(metrics: dict[str, float]) -> list[str]:
    """Return AUROC and AURC of every signal for refusal; none for an old result."""
    lines: list[str] = []
    columns = [f"{what} {key.upper()}" for what in ("names", "all captions") for key in ("auroc", "aurc")]
    for way, title in {"i2t": "image -> text", "t2i": "text -> image"}.items():
        rows = {}
        for name in (name for name in REFUSED_BY if f"refusal/names_{way}/{name}/aurc" in metrics):
            keys = (f"{gallery}_{way}/{name}/{key}" for gallery in ("names", "captions") for key in ("auroc", "aurc"))
            rows[REFUSED_BY[name]] = [f"{metrics.get(f'refusal/{key}', math.nan):.3f}" for key in keys]
        lines += _block(f"{title}, refused by", columns, rows, 20) if rows else []
    return lines


def calibration_lines(metrics: dict[str, float]) -> list[str]:
    """Return the calibration of match probabilities; none for a score without them, and for an old result."""
    columns = {"match/ece": "ECE", "match/base_rate": "base rate", "match/probability_over_base_rate": "p / base"}
    columns |= {"match_i2t/ece": "top-1 i2t", "match_t2i/ece": "top-1 t2i"}
    rows = {
        f"{name}{said}": [f"{metrics.get(f'{place}/{name}/{key}', math.nan):.4f}" for key in columns]
        for name in ("names", "captions")
        for place, said in (("calibration", ""), ("undoubted", ", unadjusted"))
        if f"{place}/{name}/match/ece" in metrics
    }
    lines = _block("match probability", list(columns.values()), rows, 11) if rows else []
    ece, own = (metrics.get(f"{place}/names_i2t/answer/ece") for place in ("refusal", "undoubted"))
    return lines if own is None else [*lines, f"{'first name is right, ECE':<26}{ece:11.4f}, unadjusted {own:.4f}"]


def _block(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]], width: int = 8) -> list[str]:
    """Return an empty line and a table."""
    return ["", *aligned(columns, [(f"{label:<26}", cells) for label, cells in rows.items()], width, title)]
