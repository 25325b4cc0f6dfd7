"""Export of the emoji corpus in clip_benchmark's layout, for many-to-many retrieval and for classification.

Retrieval: the gallery has every distinct text once: a name with its own drawing, another text with the first drawing
that it matches; `relevance.json` has all other matches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from prolip.corpora.emoji.corpus import Corpus
from prolip.evaluation.datasets.webdataset import COUNT, RELEVANCE, TYPE, class_files
from prolip.evaluation.datasets.write import SHARD, SPLIT, image_member, write_split
from prolip.prompts import DRAWINGS
from prolip.utils.outputs import check_output, replacing_folder


def write_emoji(corpus: Corpus, folder: str | os.PathLike) -> Path:
    """Write a corpus as a retrieval task, without texts that match no drawing. FileExistsError for a second."""
    folder = new_folder(corpus, folder)
    owned, further = shared_out(corpus)
    files = {TYPE: "retrieval\n", f"{SPLIT}/{RELEVANCE}": json.dumps({"pairs": further})}
    return write_task(corpus, folder, "txt", ["\n".join(texts) for texts in owned], files)


def write_emoji_classes(
    corpus: Corpus, folder: str | os.PathLike, level: str = "subgroup", templates: Sequence[str] = DRAWINGS
) -> Path:
    """Write a corpus as a classification task: every drawing and the `level`, subgroup or group, of its concept."""
    folder = new_folder(corpus, folder)
    own = [getattr(corpus.concepts[concept], level) for concept in corpus.drawing_concepts.tolist()]
    classes = sorted(set(own))
    files = class_files(classes, [template.replace("{}", "{c}") for template in templates])
    return write_task(corpus, folder, "cls", [str(classes.index(name)) for name in own], files)


def new_folder(corpus: Corpus, folder: str | os.PathLike) -> Path:
    """Return the folder. ValueError and FileExistsError if the task cannot be written."""
    if not corpus.drawings:
        raise ValueError("the corpus has no drawings. Give shards, or a rule that selects some")
    for drawing in corpus.drawings:  # a damaged drawing would stop each reader of the task
        drawing.image()
    folder = Path(folder)
    check_output(folder, folder=True, size=sum(len(drawing.data) for drawing in corpus.drawings))
    if (folder / SPLIT / COUNT).exists():
        raise FileExistsError(f"{folder / SPLIT} already exists. Give another folder, or remove it")
    return folder


def write_task(corpus: Corpus, folder: Path, suffix: str, contents: Sequence[str], files: Mapping[str, str]) -> Path:
    """Write drawings, each with one text member, and files by their path, in one step."""
    samples = (
        {"__key__": drawing.key, **image_member(drawing.data), suffix: content.encode()}
        for drawing, content in zip(corpus.drawings, contents)
    )
    with replacing_folder(folder, kept=lambda name: True) as place:
        write_split(place, samples, files, SHARD)
    return folder


def shared_out(corpus: Corpus) -> tuple[list[list[str]], dict[str, list[int]]]:
    """Return the texts of each drawing: its concept's name and texts of no earlier drawing; and by its key the rows of
    other matching texts in the gallery, which has all texts in the order of the drawings.
    """
    table = corpus.caption_table()
    true_of = table.text_relation[:, corpus.drawing_concepts]
    shown = true_of.any(1)
    owner = np.where(shown, true_of.argmax(1), -1)
    row_of = {text: row for row, text in enumerate(table.texts)}
    first = {concept: row for row, concept in reversed(list(enumerate(corpus.drawing_concepts.tolist())))}
    for concept, row in first.items():
        owner[row_of[corpus.concepts[concept].name]] = row
    gallery = np.flatnonzero(shown)[owner[shown].argsort(kind="stable")]
    owned: list[list[str]] = [[] for _ in corpus.drawings]
    for text in gallery:
        owned[owner[text]].append(table.texts[text])
    further = {
        drawing.key: np.flatnonzero(true_of[gallery, row] & (owner[gallery] != row)).tolist()
        for row, drawing in enumerate(corpus.drawings)
    }
    return owned, {key: rows for key, rows in further.items() if rows}
