"""HierarCaps in its own format, and both protocols' metrics against hand counts and loops."""

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from test_entailment import gaussians

from prolip.gaussian import Gaussian
from prolip.hierarchy import benchmark_metrics, paper_metrics, read_hierarcaps
from prolip.hierarchy.traversal import Traversal

URL = "http://images.cocodataset.org/val2014/"
ROWS = """id,captions,image_url
0,"animal => bird => blue bird, small => A blue bird, small, on a branch",{url}a.jpg
1,animal => dog => dog runs => A dog runs on grass.,{url}b.jpg
2,object => bird => bird sits => A bird that sits on a branch,{url}a.jpg
"""


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "hierarcaps_test.csv"
    path.write_text(ROWS.replace("{url}", URL))
    return read_hierarcaps(path)


def test_rows_are_read_with_quotes_and_shared_images(data, tmp_path):
    assert data.chains[0] == ("animal", "bird", "blue bird, small", "A blue bird, small, on a branch")
    assert data.images == ("a.jpg", "b.jpg", "a.jpg") and data.image_of.tolist() == [0, 1, 0]
    assert len(data.texts) == 10 and [data.texts[i] for i in data.rows[2]] == list(data.chains[2])
    (tmp_path / "excel.csv").write_text(ROWS.replace("{url}", URL), "utf-8-sig")
    assert read_hierarcaps(tmp_path / "excel.csv") == data


def test_damaged_files_are_named_with_their_line(tmp_path):
    path = tmp_path / "caps.csv"
    with pytest.raises(FileNotFoundError, match="hierarcaps_test.csv"):
        read_hierarcaps(path)
    for content, words in (
        ("id,captions\n0,a => b\n", "no column image_url"),
        ("id,captions,image_url\n", "has no rows"),
        ("id,captions,image_url\n0,a,x.jpg\n", "line 2.*two levels or more"),
        ("id,captions,image_url\n0,a => ,x.jpg\n", "line 2.*none of them empty"),
        ("id,captions,image_url\n0,a => b,\n", "line 2.*the image's URL"),
        ("id,captions,image_url\n0,a => b,x.jpg\n1,a => b => c,x.jpg\n", "line 3: 3 levels, expected 2"),
        ('id,captions,image_url\n0,"a => b" c,x.jpg\n', "not a CSV"),
        (b"id,captions,image_url\n0,\xff => b,x.jpg\n", "not a CSV in UTF-8"),
        ("", "no column id"),
    ):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=words):
            read_hierarcaps(path)


def test_the_paper_s_metrics_count_a_row_against_what_its_image_met(data):
    paths = (("blue bird, small", "bird", "bird", "animal"), ("dog runs", "bird sits", "bird", "object"))
    met = torch.tensor([[data.texts.index(text) for text in path] for path in paths])
    found = Traversal(met[:, 0], met[:, -1], torch.zeros(2, 3), met)
    metrics = paper_metrics(data, found)
    # row 0 meets 3 of its 4, all 3 met are its own; row 1 1 of 4 and 1 of 4; row 2 has bird alone of image a's 3
    want = {"precision": (1 + 1 / 4 + 1 / 3) / 3, "recall": (3 / 4 + 1 / 4 + 1 / 4) / 3}
    want |= {"any_hit": 1.0, "root_recall": 1 / 3, "root_level0": 1 / 3}
    assert metrics == pytest.approx({f"paper/{name}": value for name, value in want.items()})


def test_the_benchmark_s_metrics_are_those_of_a_loop(data):
    image, text, empty = gaussians(2, 4), gaussians(10, 4, seed=1), gaussians(1, 4, seed=2)
    found = benchmark_metrics(data, image, text, empty, steps=7)
    mean, radius = text.mean.numpy(), (text.mean - empty.mean).norm(dim=1).numpy().astype(np.float64)
    precision, recall = [], []
    for i in range(2):
        taken = set()
        for threshold in np.linspace(radius.min(), radius.max(), 7):
            inside = [t for t in range(10) if radius[t] <= threshold + 1e-9]
            taken.add(max(inside, key=lambda t: float(mean[t] @ image.mean[i].numpy())))
        own = [row for row, of in zip(data.rows.tolist(), data.image_of) if of == i]
        every = {t for row in own for t in row}
        precision.append(len(taken & every) / len(taken))
        recall.append(sum(any(row[level] in taken for row in own) for level in range(4)) / 4)
    tau = np.mean([kendalltau(radius[row], range(4)).statistic for row in data.rows])
    trace = np.mean([kendalltau(-text.trace.numpy()[row], range(4)).statistic for row in data.rows])
    want = {"precision": np.mean(precision), "recall": np.mean(recall), "d_corr": tau, "d_corr_trace": trace}
    assert found == pytest.approx({f"benchmark/{name}": value for name, value in want.items()})
    points = Gaussian(text.mean, torch.full_like(text.mean, -torch.inf))
    assert "benchmark/d_corr_trace" not in benchmark_metrics(data, image, points, empty)
    flat = Gaussian(text.mean, torch.zeros_like(text.log_var))  # equal traces say nothing about depth
    assert benchmark_metrics(data, image, flat, empty, steps=3)["benchmark/d_corr_trace"] == 0
