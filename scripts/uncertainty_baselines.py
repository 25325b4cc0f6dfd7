"""Our variances beside others' uncertainties on the same frozen embeddings: a table for one or more trained models.

    python scripts/uncertainty_baselines.py --models local-dir:runs/siglip-s0/model local-dir:runs/siglip-s1/model

Everything is fitted to the pairs of the training drawings, and asked about the captions and about drawings of a
designer whom the model never saw. Columns: rank correlation of a text's uncertainty with the logarithm of the number of
concepts that it is true of, the same at equal numbers of tokens, rank correlation of deciles of uncertainty with the
average precision of the texts in them (-1 is best), and of images the AUROC of their errors (first name wrong) and AURC
when the most uncertain are refused. Several models: the mean, and each of them in brackets.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import numpy as np  # noqa: E402
from torch import Tensor  # noqa: E402

from prolip.data.captioned import captioned_samples  # noqa: E402
from prolip.data.config import DataConfig  # noqa: E402
from prolip.evaluation.loading import load_embedder  # noqa: E402
from prolip.evaluation.metrics.selective import auroc, risk_coverage  # noqa: E402
from prolip.evaluation.metrics.traces import by_decile, partial_spearman, spearman  # noqa: E402
from prolip.evaluation.model import Embedder  # noqa: E402
from prolip.evaluation.suites.emoji.evaluate import evaluate_corpus, gallery  # noqa: E402
from prolip.evaluation.suites.emoji.result import CorpusResult  # noqa: E402
from prolip.uncertainty.baselines import BASELINES  # noqa: E402
from prolip.uncertainty.collect import embed_images, embed_texts, join  # noqa: E402
from prolip.uncertainty.fit import fit_variances  # noqa: E402
from prolip.uncertainty.pairs import Pairs  # noqa: E402

COLUMNS = ("text: rho log n", "at equal tokens", "text: deciles", "image: AUROC", "image: AURC", "fit, s")
SELECT = "group=animals nature|food drink|travel places; subgroup!=time"
#: Of a method: uncertainties of the corpus's texts and drawings, None of a side that it does not know.
Sides = dict[str, "Tensor | None"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", required=True, help="models of the same training data, such as seeds")
    add("--train-data", default="data/emoji/{noto,noto-v1,twemoji,fluent-emoji-flat,fluent-emoji}.tar")
    add("--caption-sampling", default="name:14,keywords:4,subgroup:1,group:1")
    add("--data", nargs="+", default=["data/emoji/emojione.tar"], help="drawings of an unseen designer")
    add("--names", nargs="+", default=["data/emoji/noto.tar"], help="further names of the gallery")
    add("--select", default=SELECT, help="which concepts, of all of these")
    add("--methods", nargs="+", default=["ours", *BASELINES], choices=["ours", *BASELINES])
    add("--seed", type=int, default=0)
    return parser.parse_args()


def pairs_of(embedder: Embedder, options: argparse.Namespace) -> Pairs:
    """All training drawings with all their captions, and the empty text."""
    config = DataConfig(train_data=options.train_data, caption_sampling=options.caption_sampling, select=options.select)
    part = join([embed_images(captioned_samples(config, embedder.preprocess, 10**9), embedder.encode_hidden)])
    assert embedder.logit_scale is not None
    empty = embedder.embed_texts([""]).mean[0]
    return embed_texts(part, embedder.encode_text, embedder.tokenizer, embedder.logit_scale, empty=empty)


def ours(pairs: Pairs, result: CorpusResult, ids: Tensor, seed: int) -> Sides:
    """The traces that `fit_variances` gives to texts and drawings."""
    vocabulary = int(max(ids.amax(), pairs.text_ids.amax())) + 1
    fitted = fit_variances(pairs, vocabulary=vocabulary, novelty_centres=0, seed=seed)
    return {"text": fitted.text.trace(result.text.mean, ids), "image": fitted.image.trace(result.image.mean)}


def theirs(name: str, pairs: Pairs, result: CorpusResult, seed: int) -> Sides:
    """What a baseline gives to texts and drawings."""
    fitted = BASELINES[name].fit(pairs, seed)
    ask: dict[str, Callable[[Tensor], Tensor]] = {"image": fitted.image, "text": fitted.text}
    return {side: ask[side](getattr(result, side).mean) if side in fitted.sides else None for side in ask}


def figures(sides: Sides, result: CorpusResult) -> list[float]:
    """The columns but the last; NaN for a side that the method does not know."""
    text, image, out = sides["text"], sides["image"], [float("nan")] * 5
    if text is not None:
        u, log_n = text.numpy().astype(np.float64), np.log(result.table.true_matches)
        ranking = result.captions_ranking[1]
        kept = ranking.answerable.numpy()
        deciles = by_decile(u[kept], ranking.ap_at_r.double().numpy()[kept]).spearman_bins
        out[:3] = [spearman(u, log_n), partial_spearman(u, log_n, result.token_lengths), deciles]
    if image is not None:
        wrong = ~result.names_ranking[0].hit(1).bool()
        out[3:] = [auroc(image, wrong), risk_coverage(image, wrong.double()).aurc]
    return out


def main() -> None:
    options = parse()
    corpus = gallery(options.data, options.select, options.names)
    found: dict[str, list[list[float]]] = {name: [] for name in options.methods}
    for model in options.models:
        embedder = load_embedder(model, stored=False)
        pairs, result = pairs_of(embedder, options), evaluate_corpus(embedder, corpus, similarity="mean")
        ids = embedder.tokenizer(list(result.table.texts))
        for name in options.methods:
            start = time.perf_counter()
            args = pairs, result
            sides = ours(*args, ids, options.seed) if name == "ours" else theirs(name, *args, options.seed)
            seconds = time.perf_counter() - start
            found[name].append([*figures(sides, result), seconds])
            print(f"{model}: {name} in {seconds:.1f} s", file=sys.stderr, flush=True)
    print(f"| {'method':<17} | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for name, rows in found.items():
        cells = []
        for values in np.array(rows).T:
            each = f" ({' '.join(f'{x:.3f}' for x in values)})" if len(values) > 1 else ""
            cells.append("-" if np.isnan(values).any() else f"{values.mean():.3f}{each}")
        print(f"| {name:<17} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
