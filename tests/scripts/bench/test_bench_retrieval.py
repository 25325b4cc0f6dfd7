"""The retrieval benchmark's parts give what it prints; how fast things are is no test's business."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.use import retrieval as bench_retrieval

ROOT = Path(__file__).resolve().parents[3]

NUMBER = r"\d+\.\d+"


def test_streaming_alone_prints_time_memory_and_recalls(forked):
    assert forked.script(ROOT / "scripts/bench/use/retrieval.py", "--large", "300", "--dim", "8") == 0, forked.err[
        -2000:
    ]
    assert re.search(rf"^300 x 300, D=8: {NUMBER} s, peak \d+ MB, \d+ MB of it before$", forked.out, re.M), forked.out
    assert re.search(rf"^i2t/R@1 {NUMBER}  i2t/median_rank {NUMBER}  t2i/R@1", forked.out, re.M)


def test_the_packages_rankings_are_ids_best_first_ties_by_place():
    scores = np.array([[0.1, 0.5, 0.5], [0.9, 0.0, 0.2]], dtype=np.float32)
    got = bench_retrieval.order_of(scores, np.array([30, 10, 20], dtype=np.int32), block=1)
    assert got.tolist() == [[10, 20, 30], [30, 20, 10]] and got.dtype == np.int32


def test_the_matrix_holds_every_block():
    pytest.importorskip("eccv_caption")
    annotations = bench_retrieval.coco.load_annotations()
    images, captions, image, text = bench_retrieval.embeddings(annotations, 4, 0)
    assert (len(images), len(captions)) == (5000, 25_000) and image.mean.shape == (5000, 4)
    some = bench_retrieval.PairScores.from_gaussians(image.select(slice(0, 30)), text.select(slice(0, 20)))
    torch.testing.assert_close(bench_retrieval.make_matrix(some), some.image_rows(slice(0, 30)))
