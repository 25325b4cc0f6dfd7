"""A small evaluation result with known properties, and a run folder around it, for the tests of the report."""

import io
import json
from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from prolip.corpora.emoji.corpus import Concept, Corpus, Drawing
from prolip.corpora.emoji.evaluate import corpus_retrieval
from prolip.corpora.emoji.result import CorpusResult
from prolip.corpora.emoji.uncertainty import trace_metrics
from prolip.evaluation.metrics.classification import classification
from prolip.gaussian import Gaussian
from prolip.scores import TrueMatchScore
from prolip.uncertainty.doubt import Doubt

SUBGROUPS = (("nature", "bird"), ("nature", "fish"), ("food", "fruit"))


def picture(i):
    out = io.BytesIO()
    Image.new("RGB", (16, 16), (10 * i % 255, 80, 120)).save(out, "png")
    return out.getvalue()


def make_corpus(count=24):
    concepts = []
    for i in range(count):
        group, subgroup = SUBGROUPS[i % 3]
        concepts.append(Concept(str(i), f"thing <b>{i}</b>", (f"k{i % 7}", f"only {i}"), subgroup, group))
    drawings = tuple(Drawing(f"s-{i}", "s", i, picture(i)) for i in range(count - 2))
    return Corpus(tuple(concepts), drawings)


def make_result(noise=0.6, traces=None, seed=0):
    """Texts are the mean of the concepts they are true of plus noise; `traces`: one number per level, or alike."""
    g = torch.Generator().manual_seed(seed)
    corpus = make_corpus()
    table = corpus.caption_table()
    dim = len(corpus.concepts)
    mean = torch.from_numpy(table.text_relation).float()
    mean = torch.nn.functional.normalize(mean, dim=-1) + noise / dim**0.5 * torch.randn(mean.shape, generator=g)
    levels = torch.from_numpy(table.text_level)
    trace = torch.tensor(traces if traces is not None else [0.1] * 4, dtype=torch.float32)[levels]
    log_var = (trace / dim).log()[:, None] + (0.1 * torch.randn(mean.shape, generator=g) if traces is not None else 0)
    text = Gaussian(torch.nn.functional.normalize(mean, dim=-1), log_var.expand_as(mean).clone())
    image = torch.eye(dim)[corpus.drawing_concepts]
    image = image + noise / dim**0.5 * torch.randn(image.shape, generator=g)
    wobble = 0.3 * torch.randn(len(image), 1, generator=g) if traces is not None else torch.zeros(len(image), 1)
    image = Gaussian(torch.nn.functional.normalize(image, dim=-1), (wobble - 6.5).expand_as(image).clone())
    info = {"similarity": "csd", "images": len(corpus.drawings), "concepts": dim, "texts": len(table.texts)}
    info |= {"styles": ["emojione"], "parameters": 12, "scale": 10.0, "bias": -5.0, "seconds": 1.0}
    info |= {"machine": "a machine", "software": "Python", "date": "today"}
    result = CorpusResult(corpus, image, text, np.array([len(t.split()) for t in table.texts]), {}, info)
    result.metrics |= corpus_retrieval(result)
    result.metrics |= trace_metrics(result)
    labels = torch.from_numpy(corpus.drawing_concepts % 3)
    for kind in ("subgroup", "subgroup_plain", "subgroup_members"):
        scores = torch.rand(len(labels), 3, generator=g)
        result.metrics |= {f"zero_shot/{kind}/{k}": v for k, v in classification(scores, labels).items()}
    return result


def with_units(result):
    """The same of a model whose trace is 0.1 for each nat, fitted to 5,000 images and 90 texts."""
    score = TrueMatchScore(0.4, 0.1, images=5000, texts=90, scale=20.0, bias=-9.0)
    return replace(result, info=result.info | {"model_score": score.to_dict()})


def with_doubt(result):
    """The same of a model that doubts its drawings, knows their ambiguity, and gives intervals of a factor of 2."""
    doubt = Doubt((0.0, 0.5, -0.1), (-1.0, 0.5, -0.1, -0.05), (0.0, 0.0), (9.0, 9.0))
    score = TrueMatchScore(0.4, 0.1, images=5000, texts=90, scale=20.0, bias=-9.0, doubt=doubt)
    info = result.info | {"similarity": "true_match", "score": score.to_dict(), "model_score": score.to_dict()}
    number, share = np.arange(len(result.image.mean), dtype=np.float32), score.units.share(result.text.trace).numpy()
    read = {
        "evidence": np.stack([number, 9 - number], 1),
        "ambiguity": (number * 7) % 22,
        "share_low": share / 2,
        "share_high": share * 2,
    }
    return replace(result, info=info, read=read)


def write_run(folder, result=None, steps=12):
    """A run folder as the trainer leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"method": "prolip", "data": {"train_data": "x/{noto,twemoji}.tar", "unset": None}, "optim": {"lr": 0.001}}
    (folder / "config.json").write_text(json.dumps(config))
    fixed = {"inclusion_image_text": 0.7, "vib_image": 4.0, "vib_text": 3.9, "bias": -5.0, "lr": 1e-3}
    fixed |= {"kind": "train", "samples_per_second": 9.0, "data_wait": 0.0}
    lines = []
    for i in range(1, steps + 1):
        done = {"step": i, "epoch": i / 4, "samples": 8 * i, "seconds": 30.0 * i, "scale": 10.0 + i}
        done |= {"loss": 5 - 0.1 * i, "ppcl": 4.9 - 0.1 * i, "trace_image": 0.01 * i, "trace_text": 0.02 * i}
        lines.append(done | fixed)
    lines += [{"kind": "eval", "step": i, "names/i2t/R@1": 0.1 * i, "names/t2i/R@1": 0.05 * i} for i in (4, 8)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if result is not None:
        result.save(folder / "eval")
    return folder
