"""The bundled corpus: drawings of emoji by several designers, with every true caption of every drawing.

A caption row is a text at a level: "cat" is two rows if it is a name and a keyword, but one text. Rows match concepts
strictly, at this level; texts match completely, at any: "hotel" matches the love hotel (subgroup) and the hotel (name).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from prolip.data.captions import Condition, Selector
from prolip.data.faults import SampleFault
from prolip.data.images import decode_image
from prolip.data.reading.shards import expand_source
from prolip.data.reading.stream import is_local, local_path
from prolip.data.reading.tar import read_shard, survey
from prolip.data.samples import image_bytes, json_record
from prolip.utils.documents import shown
from prolip.utils.messages import explain_missing

LEVELS = ("group", "subgroup", "keyword", "name")  # general to specific
FIELDS = (*LEVELS, "hexcode", "style")
WANTED = "give shards of the emoji corpus, .webp with .json, such as data/emoji/emojione.tar"


@dataclass(frozen=True)
class Concept:
    """One hexcode and its texts."""

    hexcode: str
    name: str
    keywords: tuple[str, ...]
    subgroup: str
    group: str

    def captions(self, level: str) -> tuple[str, ...]:
        """Return the distinct captions of one level, or the hexcode."""
        return tuple(dict.fromkeys(self.keywords)) if level == "keyword" else (getattr(self, level),)


@dataclass(frozen=True)
class Drawing:
    """One image: `concept` is the row of its concept in the corpus, `data` the encoded file."""

    key: str
    style: str
    concept: int
    data: bytes

    def image(self) -> Image.Image:
        """Return the image in RGB, as in training. ValueError for a damaged one."""
        try:
            return decode_image(self.data)
        except SampleFault as fault:
            raise ValueError(f"drawing {self.key!r}: {fault}. Repair it, or exclude it with --select") from fault


@dataclass(frozen=True)
class CaptionTable:
    """The captions of all levels: T distinct texts; for each row the indices (C,) into LEVELS and into texts; relation
    (C, K) bool, whether the concept carries the row at that level.
    """

    texts: tuple[str, ...]
    level: np.ndarray
    text: np.ndarray
    relation: np.ndarray

    def rows(self, level: str) -> np.ndarray:
        """Return rows of one level."""
        return np.flatnonzero(self.level == LEVELS.index(level))

    @cached_property
    def text_relation(self) -> np.ndarray:
        """(T, K) bool: whether the concept has the text at any level."""
        out = np.zeros((len(self.texts), self.relation.shape[1]), dtype=bool)
        np.logical_or.at(out, self.text, self.relation)
        return out

    @cached_property
    def true_matches(self) -> np.ndarray:
        """(T,) number of concepts that a text matches."""
        return self.text_relation.sum(1)

    @cached_property
    def text_level(self) -> np.ndarray:
        """(T,) the most general level of a text, an index into LEVELS."""
        out = np.full(len(self.texts), len(LEVELS))
        np.minimum.at(out, self.text, self.level)
        return out


@dataclass(frozen=True)
class Corpus:
    """Concepts (K) and drawings (N) of some of them."""

    concepts: tuple[Concept, ...]
    drawings: tuple[Drawing, ...]

    @cached_property
    def drawing_concepts(self) -> np.ndarray:
        """(N,) the concept of every drawing."""
        return np.array([drawing.concept for drawing in self.drawings], dtype=np.int64)

    def select(self, rule: str) -> Corpus:
        """Return the part that meets a rule such as `group=food drink|travel places; subgroup!=time; style=noto`.

        A style picks drawings, other fields pick concepts. ValueError for an unknown field or value.
        """
        conditions = parse_rule(rule)
        for field, values, _ in conditions:
            if field == "style":
                known = {drawing.style for drawing in self.drawings}
            else:
                known = {text for concept in self.concepts for text in concept.captions(field)}
            if unknown := [value for value in values if value not in known]:
                near = difflib.get_close_matches(unknown[0], known, n=5) or sorted(known)[:8]
                raise ValueError(f"no {field} {unknown[0]!r} in the corpus: use one of {', '.join(near)}")
        styles = [c for c in conditions if c.field == "style"]
        others = [c for c in conditions if c.field != "style"]
        kept = [i for i, it in enumerate(self.concepts) if all(c.holds(it.captions(c.field)) for c in others)]
        row = {old: new for new, old in enumerate(kept)}
        drawings = tuple(
            replace(d, concept=row[d.concept])
            for d in self.drawings
            if d.concept in row and all(c.holds([d.style]) for c in styles)
        )
        if not kept:
            raise ValueError(f"no concept meets {rule!r}: its conditions exclude each other. Remove one")
        return Corpus(tuple(self.concepts[i] for i in kept), drawings)

    def with_concepts(self, concepts: Iterable[Concept]) -> Corpus:
        """Return the same drawings among additional concepts."""
        known = {concept.hexcode: concept for concept in self.concepts}
        for concept in concepts:
            _agree(known.setdefault(concept.hexcode, concept), concept, "added concepts")
        return Corpus(tuple(known.values()), self.drawings)

    def caption_table(self) -> CaptionTable:
        """Return the captions, general to specific, in order of appearance."""
        rows: dict[tuple[str, str], int] = {}
        pairs = []
        for level in LEVELS:
            for k, concept in enumerate(self.concepts):
                for text in concept.captions(level):
                    pairs.append((rows.setdefault((level, text), len(rows)), k))
        relation = np.zeros((len(rows), len(self.concepts)), dtype=bool)
        relation[tuple(np.array(pairs).T)] = True
        texts = {text: i for i, text in enumerate(dict.fromkeys(text for _, text in rows))}
        levels = np.array([LEVELS.index(level) for level, _ in rows])
        return CaptionTable(tuple(texts), levels, np.array([texts[text] for _, text in rows]), relation)


def read(shards: str | Path | Sequence[str | Path]) -> Corpus:
    """Read shards (emoji:TARS, or paths and URLs as for --train-data), in order.

    FileNotFoundError for a missing shard; ValueError for a damaged one, or if shards disagree on a concept.
    """
    given = [str(shards)] if isinstance(shards, (str, Path)) else [str(shard) for shard in shards]
    sources = [source for sources in given for source in sources.removeprefix("emoji:").split("::")]
    urls = [url for source in sources for url in expand_source(source)]
    for url in urls:
        if is_local(url) and not Path(local_path(url)).is_file():
            raise FileNotFoundError(f"no shard at {url}: {WANTED}. {explain_missing(local_path(url))}")
    concepts: dict[str, Concept] = {}
    rows: dict[str, int] = {}
    drawings = []
    for url in urls:
        try:
            for sample in read_shard(url):
                concept, style, data = _parse(sample)
                row = rows.setdefault(concept.hexcode, len(rows))
                _agree(concepts.setdefault(concept.hexcode, concept), concept, url)
                drawings.append(Drawing(sample["__key__"], style, row, data))
        except SampleFault as fault:
            raise ValueError(f"{url}: {fault}") from fault
    if not drawings:
        raise ValueError(f"no sample in {', '.join(urls)}: {survey(urls, expected=WANTED)}")
    return Corpus(tuple(concepts.values()), tuple(drawings))


def parse_rule(rule: str) -> tuple[Condition, ...]:
    """Return the conditions of a rule, as in the training data's --select; `keywords` is the level keyword."""
    selector = Selector.parse(rule)
    conditions = selector.conditions if selector else ()
    named = [c._replace(field=c.field.removesuffix("s") if c.field == "keywords" else c.field) for c in conditions]
    for condition in named:
        if condition.field not in FIELDS:
            raise ValueError(f"no field {condition.field!r} in the corpus, in {rule!r}: use one of {', '.join(FIELDS)}")
    return tuple(named)


def _parse(sample: dict) -> tuple[Concept, str, bytes]:
    """Return concept, style and encoded image of one webdataset sample."""
    place, wanted = (
        f"sample {sample['__key__']} of {sample['__url__']}",
        ("hexcode", "name", "subgroup", "group", "style"),
    )
    try:
        data, record = image_bytes(sample), json_record(sample)
    except SampleFault as fault:
        raise ValueError(f"{place}: {fault}; {WANTED}") from fault
    if missing := [field for field in wanted if not record.get(field)]:
        raise ValueError(f"the .json of {place} lacks {', '.join(missing)}: {WANTED}")
    keywords = record.get("keywords") or []
    if not isinstance(keywords, list) or not all(isinstance(x, str) for x in [*(record[w] for w in wanted), *keywords]):
        raise ValueError(f"the .json of {place} has invalid texts ({shown(record)}): {WANTED}")
    concept = Concept(record["hexcode"], record["name"], tuple(keywords), record["subgroup"], record["group"])
    return concept, record["style"], data


def _agree(known: Concept, new: Concept, where: str) -> None:
    """Raise ValueError if a hexcode has two sets of texts."""
    if known != new:
        again = "rebuild all shards from one release"
        raise ValueError(f"{where}: {new.hexcode} has the texts {new}, but {known} before: {again}")
