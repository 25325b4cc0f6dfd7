"""What an evaluation on the corpus leaves behind: figures, embeddings, and the drawings they belong to."""
from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from prolip.data.emoji import CaptionTable, Concept, Corpus, Drawing
from prolip.evaluation.metrics.blockwise import PairScores, Relevance, rank_sparse
from prolip.evaluation.metrics.ranking import Ranking
from prolip.gaussian import Gaussian
from prolip.methods import find_score, score_from_dict
from prolip.scores import Score
from prolip.utils.documents import loads


@dataclass
class CorpusResult:
    """One evaluation.

    corpus: drawings and the concepts they were told apart from; image: (N, D) per drawing; text: (T, D) per text of
    `table`; token_lengths: (T,); metrics: flat figures; info: what was run, JSON values.
    """

    corpus: Corpus
    image: Gaussian
    text: Gaussian
    token_lengths: np.ndarray
    metrics: dict[str, float]
    info: dict

    @cached_property
    def table(self) -> CaptionTable:
        """The captions."""
        return self.corpus.caption_table()

    @property
    def similarity(self) -> str:
        """What images and texts were ranked by."""
        return self.info.get("similarity", "csd")

    @cached_property
    def score(self) -> Score:
        """What they were ranked by, with whatever was trained."""
        return score_from_dict(self.info["score"]) if "score" in self.info else find_score(self.similarity)()

    def uncertainty(self, z: Gaussian) -> np.ndarray:
        """What the model's method reads off its Gaussians, whatever they were ranked by: (N, D) -> (N,)."""
        own = self.info.get("model_score", self.info.get("score"))
        return (find_score(self.similarity)() if own is None else score_from_dict(own)).uncertainty(z).numpy()

    @property
    def probabilistic(self) -> bool:
        """Whether the variances mean something; points have none."""
        return self.info.get("probabilistic", True)

    @cached_property
    def name_texts(self) -> np.ndarray:
        """(K,) the text of every concept's name."""
        return self.table.text[self.table.rows("name")]

    @cached_property
    def name_relation(self) -> np.ndarray:
        """(K, N) bool: the name is the name of the drawing's concept (strict: a keyword of it does not count)."""
        return self.table.relation[self.table.rows("name")][:, self.corpus.drawing_concepts]

    @cached_property
    def text_relation(self) -> np.ndarray:
        """(T, N) bool: the text is true of the drawing at any level."""
        return self.table.text_relation[:, self.corpus.drawing_concepts]

    @cached_property
    def names_ranking(self) -> tuple[Ranking, Ranking]:
        """Images against names and names against images, strict labels."""
        return self._rank(self.text.select(self.name_texts), self.name_relation)

    @cached_property
    def captions_ranking(self) -> tuple[Ranking, Ranking]:
        """Images against all texts and all texts against images, complete labels."""
        return self._rank(self.text, self.text_relation)

    def _rank(self, text: Gaussian, relation: np.ndarray) -> tuple[Ranking, Ranking]:
        """Both directions; relation (texts, images)."""
        scores = PairScores.from_gaussians(self.image, text, self.score)
        relevance = Relevance.from_dense(torch.from_numpy(relation).mT)
        (i2t,) = rank_sparse(scores.image_rows, relevance)
        (t2i,) = rank_sparse(scores.text_rows, relevance.transposed())
        return i2t, t2i

    def save(self, folder: str | Path) -> Path:
        """Write `metrics.json`, `corpus.json` and `embeddings.npz` (with the encoded drawings) into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        finite = {key: value if math.isfinite(value) else None for key, value in self.metrics.items()}
        written = json.dumps({"info": self.info, "metrics": finite}, indent=1)
        (folder / "metrics.json").write_text(written, encoding="utf-8")
        drawings = [[d.key, d.style, d.concept] for d in self.corpus.drawings]
        concepts = [asdict(concept) for concept in self.corpus.concepts]
        (folder / "corpus.json").write_text(json.dumps({"concepts": concepts, "drawings": drawings}), encoding="utf-8")
        np.savez(
            folder / "embeddings.npz",
            image_mean=self.image.mean.numpy(), image_log_var=self.image.log_var.numpy(),
            text_mean=self.text.mean.numpy(), text_log_var=self.text.log_var.numpy(),
            token_lengths=self.token_lengths,
            drawings=np.frombuffer(b"".join(d.data for d in self.corpus.drawings), dtype=np.uint8),
            drawing_sizes=np.array([len(d.data) for d in self.corpus.drawings]),
        )  # fmt: skip
        return folder


def load(folder: str | Path) -> CorpusResult:
    """Read what `Result.save` wrote. Raises FileNotFoundError naming the missing file."""
    folder = Path(folder)
    for name in ("metrics.json", "corpus.json", "embeddings.npz"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"no {name} in {folder}: run python -m prolip.evaluation.corpus --out {folder}")
    written = loads((folder / "metrics.json").read_text(encoding="utf-8"))
    metrics = {key: float("nan") if value is None else value for key, value in written["metrics"].items()}
    texts = loads((folder / "corpus.json").read_text(encoding="utf-8"))
    concepts = tuple(Concept(**{**c, "keywords": tuple(c["keywords"])}) for c in texts["concepts"])
    with np.load(folder / "embeddings.npz") as arrays:
        data, ends = arrays["drawings"].tobytes(), np.cumsum(arrays["drawing_sizes"])
        z = {key: torch.from_numpy(arrays[key]) for key in arrays.files if key.endswith(("mean", "log_var"))}
        token_lengths = arrays["token_lengths"]
    drawings = tuple(
        Drawing(key, style, concept, data[start:end])
        for (key, style, concept), start, end in zip(texts["drawings"], [0, *ends[:-1]], ends)
    )
    image, text = (Gaussian(z[f"{kind}_mean"], z[f"{kind}_log_var"]) for kind in ("image", "text"))
    return CorpusResult(Corpus(concepts, drawings), image, text, token_lengths, metrics, written["info"])
