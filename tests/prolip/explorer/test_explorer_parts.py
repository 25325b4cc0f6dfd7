"""Parts of the page, against brute force: the map, images, verdicts, scores side by side, paths, rules, ends."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from commands import evaluate
from commits_curate import write_tar
from explored import make_app
from PIL import Image
from squares import COLOURS, picture

from prolip.curate.rules import parse_rules
from prolip.curate.score import PairSignals
from prolip.curate.select import Choice, select
from prolip.curate.tables import MANIFEST, SCORES, digest, table_path, write_table, write_words
from prolip.embedder import Embedder
from prolip.explorer import query as asking
from prolip.explorer import thumbnails
from prolip.explorer.gallery import Captions, Gallery
from prolip.explorer.query import first_answer, judge, rarity
from prolip.explorer.rules import describe, scored_table, try_rules
from prolip.explorer.thumbnails import Gone, Thumbnails
from prolip.gaussian import Gaussian, concatenate
from prolip.hierarchy.traversal import traverse
from prolip.measures import pairwise_csd_similarity, pairwise_mean_cosine
from prolip.measures.plane import fit_plane, place
from prolip.scores import CSDScore, TrueMatchScore
from prolip.search.index import Part, SearchIndex
from prolip.uncertainty.novelty import refusal


def gaussians(rows: int, dim: int = 12, seed: int = 0) -> Gaussian:
    g = torch.Generator().manual_seed(seed)
    mean = F.normalize(torch.randn(rows, dim, generator=g), dim=1)
    return Gaussian(mean, -4 + torch.randn(rows, 1, generator=g) + 0.3 * torch.randn(rows, dim, generator=g))


def indexed(folder: Path, z: Gaussian, score=None, rows: int = 40) -> SearchIndex:
    """An index of these Gaussians in several chunks, without a model."""
    index = SearchIndex.create(folder, score or CSDScore(10.0, -5.0), z.mean.shape[1])
    keys = [{"key": f"k{i}"} for i in range(len(z.mean))]
    places = [slice(low, low + rows) for low in range(0, len(keys), rows)]
    index.append("gaussians", [Part(keys[some], z.select(some), some.stop) for some in places], rows)
    return index


def test_the_plane_is_that_of_points_drawn_from_all_gaussians():
    z = gaussians(60, 8)
    plane = fit_plane(z)
    points = z.sample(4000, torch.Generator().manual_seed(0)).flatten(0, 1).double()
    covariance = torch.cov(points.T)
    torch.testing.assert_close(plane.axes @ plane.axes.T, torch.eye(2, dtype=torch.float64))
    share = (plane.axes @ covariance @ plane.axes.T).diagonal() / covariance.trace()
    torch.testing.assert_close(share, torch.tensor(plane.share, dtype=torch.float64), rtol=0.02, atol=0)
    best = torch.linalg.eigvalsh(covariance).flip(0)[:2] / covariance.trace()
    torch.testing.assert_close(torch.tensor(plane.share, dtype=torch.float64), best, rtol=0.02, atol=0)


def test_ellipses_are_the_projected_covariances():
    z = gaussians(20, 6, 1)
    plane = fit_plane(z)
    for row, (x, y, longer, shorter, angle) in enumerate(place(plane, z).tolist()):
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
        want = plane.axes @ torch.diag(z.var[row].double()) @ plane.axes.T
        torch.testing.assert_close(
            turn @ torch.tensor([longer**2, shorter**2]).double().diag() @ turn.T, want, rtol=1e-6, atol=1e-9
        )
        assert longer >= shorter
        torch.testing.assert_close(torch.tensor([x, y]).double(), plane.axes @ (z.mean[row].double() - plane.centre))
    with pytest.raises(ValueError, match="a map needs two"):
        fit_plane(z.select(slice(0, 1)))


def test_pictures_are_read_at_their_places_in_a_shard(tmp_path):
    long = "deep/" * 30 + "name"
    members = {
        "./a.png": picture("red"),
        "a.txt": b"red",
        "b.png": picture("green"),
        "b.jpg": picture("blue", "JPEG"),
        f"{long}.webp": picture("pink", "WEBP"),
        "c.txt": b"no picture",
        "d.cls.png": picture("black"),
    }
    path = write_tar(tmp_path / "of.tar", list(members.items()))
    found = Thumbnails()
    for key, name in (("a", "./a.png"), ("b", "b.jpg"), (long, f"{long}.webp")):
        assert found.data({"key": f"of/{key}", "shard": path}) == members[name]
    for key in ("c", "d", "nowhere"):
        with pytest.raises(Gone, match="no longer has an image of"):
            found.thumbnail({"key": f"of/{key}", "shard": path})
    big = picture("brown", size=900)
    (tmp_path / "big.png").write_bytes(big)
    item = {"key": "big.png", "path": str(tmp_path / "big.png")}
    assert Image.open(io.BytesIO(found.thumbnail(item))).size == (thumbnails.SIDE, thumbnails.SIDE)


def test_what_has_no_picture_says_why(tmp_path):
    whole = Path(write_tar(tmp_path / "whole.tar", [("a.png", picture("red"))])).read_bytes()
    packed, cut = tmp_path / "x.tar.gz", tmp_path / "cut.tar"
    packed.write_bytes(gzip.compress(whole))
    cut.write_bytes(whole[:700] + b"x" * 2000)
    (tmp_path / "damaged.png").write_bytes(picture("red")[:50])
    for item, words in (
        ({"key": "k"}, "saved features have no images"),
        ({"key": "x/a", "shard": str(packed)}, "uncompressed"),
        ({"key": "a/a", "shard": "s3://bucket/a.tar"}, "not on this machine"),
        ({"key": "a", "shard": "no.tar"}, "No such"),
        ({"key": "cut/a", "shard": str(cut)}, "cut.tar"),
        ({"key": "a", "path": str(tmp_path / "gone.png")}, "No such file"),
        ({"key": "d", "path": str(tmp_path / "damaged.png")}, "bad image"),
    ):
        with pytest.raises(Gone, match=words):
            Thumbnails().thumbnail(item)


def test_the_ends_of_uncertainty_are_those_of_all_traces(tmp_path):
    z = gaussians(130)
    index = indexed(tmp_path / "index", z)
    index.delete(["k3", "k77"])
    gallery = Gallery(index)
    living = [i for i in range(130) if i not in (3, 77)]
    order = sorted(living, key=lambda i: float(z.trace[i]))
    least, most = gallery.extremes(9)
    assert least == order[:9] and most == order[::-1][:9]
    assert gallery.extremes(500)[0] == order
    for row in (3, 130, -1, True, "4", 2.0):
        with pytest.raises(KeyError):
            gallery.item(row)
    assert set(gallery.sample(500).tolist()) == set(living) and len(gallery.sample(20)) == 20


def test_points_have_a_map_and_no_ends_and_one_item_has_no_map(tmp_path):
    z = gaussians(30)
    points = Gaussian(z.mean, torch.full_like(z.log_var, -torch.inf))
    app = make_app([str(indexed(tmp_path / "index", points).store.folder)])
    assert [len(point["at"]) for point in app.looks["map"]()["points"]] == [5] * 30
    assert [column["score"] for column in app.compare({"row": 0})["columns"]] == ["csd", "mean"]
    for ask, says in ((app.uncertain, "gives points"), (lambda: app.search({"text": "red"}), "need a model")):
        with pytest.raises(ValueError, match=says):
            ask()
    alone = make_app([str(indexed(tmp_path / "one", z.select(slice(1))).store.folder)])
    found = alone.search({"row": 0})
    assert found["answers"] == [] and found["place"] is None
    with pytest.raises(ValueError, match="has no items"):
        Gallery(SearchIndex.create(tmp_path / "empty", CSDScore(), 4))


def elk_by_hand(query: Gaussian, z: Gaussian) -> torch.Tensor:
    """-1/2 sum (m - m')^2 / (v + v') + log(v + v'), (1, N)."""
    var = query.var + z.var
    return -0.5 * ((query.mean - z.mean).square() / var + var.log()).sum(1).unsqueeze(0)


@pytest.mark.parametrize("whole", [True, False])
def test_side_by_side_is_brute_force_by_each_score(tmp_path, monkeypatch, whole):
    z = gaussians(150)
    app = make_app([str(indexed(tmp_path / "index", z).store.folder)])
    if not whole:
        monkeypatch.setattr(asking, "NUMBERS", 0)
    found = app.compare({"row": 17})
    assert found["whole"] is whole
    query = z.select(slice(17, 18)).to(torch.float64)
    formulas = {"csd": pairwise_csd_similarity, "mean": pairwise_mean_cosine, "elk": elk_by_hand}
    first = None
    for column in found["columns"]:
        scores = formulas[column["score"]](query, z.to(torch.float64))[0]
        want = [row for row in scores.argsort(descending=True).tolist() if row != 17][:8]
        assert [item["row"] for item in column["answers"]] == want
        first = first or want
        assert [item["before"] for item in column["answers"]] == [first.index(r) if r in first else None for r in want]
    assert [column["own"] for column in found["columns"]] == [True, False, False]


def test_an_item_never_finds_itself(tmp_path):
    app = make_app([str(indexed(tmp_path / "index", gaussians(50)).store.folder)])
    found = app.search({"row": 4, "count": 60})
    assert sorted(item["row"] for item in found["answers"]) == [i for i in range(50) if i != 4]
    assert found["question"]["rank"] is not None and found["verdict"]["probability"] is None


def test_verdicts_are_those_of_the_whole_gallery_whatever_its_parts():
    z, asked = gaussians(90), gaussians(1, seed=5)
    units = TrueMatchScore(0.4, 0.1, 50, 9, 20.0, -10.0)
    match, share = CSDScore(20.0, -10.0), CSDScore(20.0)
    parts = [z.select(slice(a, b)) for a, b in ((0, 7), (7, 60), (60, 90))]
    length = units.units.code_length(asked.mean @ z.mean.T).min()
    true = -units.match_probability(units.pairwise(z, asked)).max().log()
    scores = pairwise_csd_similarity(z, asked)[:, 0]
    cases = (
        (units, "image", length),
        (units, "text", true),
        (share, "text", -(20 * scores).softmax(0).max().log()),
        (match, "text", -match.match_probability(scores).max().log()),
    )
    for score, side, nats in cases:
        found = first_answer(asked, parts, score, side)
        assert found.among == 90 and found.code_length == pytest.approx(float(nats), abs=1e-5)
    assert first_answer(asked, parts, CSDScore(), "text") is None and first_answer(asked, [], units, "text") is None
    found, novelty = first_answer(asked, parts, units, "text"), {"first": 6.5, "mean": 0.2}
    verdict = judge(found, novelty)
    want = refusal(torch.tensor([found.code_length]), {name: torch.tensor([nats]) for name, nats in novelty.items()})
    assert verdict["nats"] == pytest.approx(float(want), rel=1e-5)
    assert verdict["probability"] == pytest.approx(math.exp(-float(want)), rel=1e-5)
    assert sum(part["nats"] for part in verdict["parts"]) == pytest.approx(verdict["nats"], rel=1e-5)
    assert judge(None, {})["probability"] is None
    assert rarity(math.log(1234)).startswith("1 in 1,200 training-like") and rarity(0.1).startswith("Not unusual")


def test_a_path_is_the_traversal_with_the_nearest_pictures(app):
    empty, captions = app.explored.embedder.embed_texts([""]), app.captions
    z = app.gallery.index.gaussians([5])
    found = app.walk({"row": 5})
    want = traverse(z, captions.found()[1], empty)
    assert [step["text"] for step in found["steps"]] == [captions.found()[0][i] for i in want.path(0)]
    assert found["root_text"] == captions.found()[0][int(want.root_caption)]
    met = captions.found()[1].select(torch.tensor(want.path(0)))
    rows = app.gallery.index.search(met, 4).rows.tolist()
    assert [[item["row"] for item in step["pictures"]] for step in found["steps"]] == rows
    text = captions.found()[0][7]
    by_text = app.walk({"text": text})
    assert by_text["steps"][0]["text"] == text != by_text["root_text"]
    with pytest.raises(ValueError, match="root 'up' is unknown"):
        app.walk({"text": "red", "root": "up"})


def test_further_texts_name_pictures_too(app):
    texts, z = Captions(app.gallery, app.explored.embedder, 3, ["red", "an animal", "an animal"]).found()
    assert len(texts) == len(z.mean) == len(set(texts)) and texts[3:] in (["red", "an animal"], ["an animal"])
    torch.testing.assert_close(z.mean, app.explored.embedder.embed_texts(texts).mean)


def test_a_calibrated_risk_refuses_questions(small_model, shard, app, tmp_path):
    texts = [f"a {colour} square" for colour in COLOURS]
    wrong = [{"text": text, "keys": [app.search({"text": text})["answers"][-1]["key"]]} for text in texts]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, wrong)))
    words = [str(app.explored.index.store.folder), "--risk", "0.1", "--calibrate", str(tmp_path / "questions.jsonl")]
    risk = make_app(words).search({"text": "red"})["risk"]
    assert risk["answers"] is False and "all are refused" in risk["promise"]
    assert re.fullmatch(r"[a-z ]+ -?[\d.e-]+%?", risk["compared"])


def test_columns_are_those_that_curation_writes(app):
    embedder = app.explored.embedder
    items = [Image.open(io.BytesIO(picture(colour))) for colour in COLOURS]
    first = [item["captions"][0] for item in app.gallery.index.items(range(12))]
    want = PairSignals(embedder)(torch.stack([embedder.preprocess(image) for image in items]), first)
    names = app.table().names
    assert {"cosine", "score", "match_probability", "normalised_score", "inclusion", "text_uncertainty"} <= set(names)
    for name in names:
        np.testing.assert_allclose(app.table().column(name), want[name], rtol=2e-4, atol=2e-5, err_msg=name)


def columns_of(keys, captions) -> dict:
    nothing = pa.array([None] * len(keys), pa.string())
    columns = {"row": pa.array(range(len(keys)), pa.int32()), "key": pa.array(keys), "uid": nothing}
    return columns | {"caption": pa.array(captions), "fault": nothing}


def write_scores(folder: Path, shards: dict[str, dict]) -> None:
    """Tables of shards as `prolip curate score` writes them."""
    tables = {shard: pa.table(columns) for shard, columns in shards.items()}
    schema = next(iter(tables.values())).schema
    words = {"shards": list(shards), "columns": {field.name: str(field.type) for field in schema}}
    (folder / SCORES).mkdir(parents=True)
    for number, (shard, table) in enumerate(tables.items()):
        note = {"scores": digest(words), "shard": shard, "source": None, "content": "", "faults": {}}
        note |= {"samples": len(table), "usable": len(table)}
        write_table(table_path(folder / SCORES, number), table, note)
    write_words(folder / SCORES / MANIFEST, words)


def test_rules_count_as_select_does(tmp_path):
    random, shards = np.random.default_rng(0), {}
    for number, count in enumerate((70, 50)):
        own = columns_of([f"k{i}" for i in range(count)], [f"<b>{i}</b>" for i in range(count)])
        own["fault"] = pa.array([("bad image" if i % 17 == 0 else None) for i in range(count)], pa.string())
        own["cosine"] = random.normal(size=count).astype(np.float32)
        own["text_bits"] = random.random(count).astype(np.float32)
        own["image_bits"] = np.zeros(count, np.float32)  # a column may have one value only
        shards[f"{number}.tar"] = own
    write_scores(tmp_path, shards)
    rules = ["low: cosine < -0.5", "vague: text_bits < quantile(text_bits, 0.3) and cosine < 1", "odd: not cosine > -1"]
    table = scored_table(tmp_path)
    found, want = try_rules(table, rules), select(tmp_path, Choice(rules=parse_rules(rules)))
    assert found["kept"] == want["kept"] and found["unusable"] == want["dropped"]["unusable"] == 8
    for rule in found["rules"]:
        assert rule["dropped"] == want["dropped"][rule["name"]] and rule["alone"] == want["dropped_alone"][rule["name"]]
    assert found["command"].startswith(f"prolip curate select {tmp_path} --drop 'low: cosine < -0.5'")
    assert found["command"].endswith("--drop 'odd: not cosine > -1'") and want["kept"] > 60
    assert try_rules(table, ["odd: cosine > -1"])["command"].endswith(" --yes")
    with pytest.raises(ValueError, match="more than half"):
        select(tmp_path, Choice(rules=parse_rules(["odd: cosine > -1"])))
    reasons = [item["reasons"] for item in found["shown"]["dropped"]]
    assert all(reasons) and all(not item["reasons"] for item in found["shown"]["kept"])
    assert table.item(75) == {"key": "1/k5", "shard": "1.tar", "captions": ["<b>5</b>"]}
    about = {column["name"]: column for column in describe(table)["columns"]}
    assert about["cosine"]["quantiles"][50] == pytest.approx(float(np.median(table.column("cosine"))), rel=1e-4)
    for column in about.values():
        low, high = column["quantiles"][0], column["quantiles"][100]
        ends = [f"low: {column['name']} < {low}", f"high: {column['name']} > {high}"]
        assert [rule["dropped"] for rule in try_rules(table, ends)["rules"]] == [0, 0]
    assert all(len(column["bars"]) == 40 and sum(column["bars"]) == 120 for column in about.values())
    for bad, words in (
        ("x", "NAME: FORMULA"),
        ("x: cosin < 1", "did you mean cosine"),
        ("x: 1 < 2", "no column"),
        ("x: __import__('os')", "not supported"),
        ("x: cosine", "not a comparison"),
    ):
        with pytest.raises(ValueError, match=words):
            try_rules(table, [bad])


def test_rules_without_captions_know_the_items_alone(tmp_path):
    z = gaussians(60)
    app = make_app([str(indexed(tmp_path / "index", z).store.folder)])
    app.warm_up()
    assert app.looks["map"].done  # before anyone opens it
    assert app.table().names == ["image_uncertainty"] and app.columns()["source"] == "all 60 items"
    found = app.rules({"rules": ["wide: image_uncertainty > quantile(image_uncertainty, 0.75)"]})
    assert found["kept"] == 45 and [item["row"] for item in found["shown"]["kept"]]


def test_a_temporary_index_goes_with_its_page(small_model, tmp_path):
    (tmp_path / "red.png").write_bytes(picture("red"))
    (tmp_path / "blue.png").write_bytes(picture("blue"))
    app = make_app([small_model.removeprefix("local-dir:"), "--data", str(tmp_path)])
    folder = app.explored.index.store.folder
    assert len(app.gallery.index) == 2 and folder.is_dir()
    assert any("have no captions" in line for line in app.about()["lacks"])
    app.explored.temporary.cleanup()
    assert not folder.exists()


def test_a_line_before_the_work_says_what_is_read_and_by_which_model(small_model, shard, tmp_path, capfd):
    index = tmp_path / "index"
    make_app([small_model, "--data", shard, "--output", str(index)])
    assert capfd.readouterr().err.startswith(f"embedding shards:{shard} with {small_model}\n")
    make_app([str(index)])
    assert capfd.readouterr().err.startswith(f"opening {index}\n")


def test_kept_features_are_explored_with_and_without_their_model(small_model, shard, tmp_path, capsys):

    (tmp_path / "task/test").mkdir(parents=True)
    (tmp_path / "task/test/0.tar").write_bytes(Path(shard).read_bytes())
    (tmp_path / "task/test/nshards.txt").write_text("1")
    (tmp_path / "task/dataset_type.txt").write_text("retrieval")
    evaluate(["--model", small_model, "--data", f"wds:{tmp_path}/task", "--save-features", str(tmp_path / "kept")])
    app = make_app([str(tmp_path / "kept")])
    about = app.about()
    assert len(app.gallery.index) == 12 and not about["can_ask"]
    assert "need a model" in about["lacks"][0] and "The images of these" in about["lacks"][1]
    assert len(app.search({"row": 0})["answers"]) == 11 and len(app.uncertain()["least"]) == 12
    with pytest.raises(Gone, match="no images"):
        app.thumbnail("item", 0)
    with pytest.raises(ValueError, match="need a model"):
        app.walk({"row": 0})
    asked = make_app([f"features:{tmp_path}/kept", "--model", small_model])
    assert asked.about()["can_ask"] and len(asked.walk({"row": 0})["steps"]) and len(asked.about()["lacks"]) == 1
    with pytest.raises(ValueError, match="are already embedded. Remove --data"):
        make_app([str(tmp_path / "kept"), "--data", shard])
    for made in (app, asked):
        made.explored.temporary.cleanup()


def test_samples_that_were_scored_show_their_pictures(app, shard, tmp_path):
    columns = columns_of([f"s{i:02}" for i in range(12)], COLOURS) | {"cosine": np.arange(12, dtype=np.float32)}
    write_scores(tmp_path, {shard: columns})
    scored = make_app([str(app.explored.index.store.folder), "--scores", str(tmp_path)])
    (goes,) = scored.rules({"rules": ["low: cosine < 1"]})["shown"]["dropped"]
    kind, row = goes["thumbnail"].split("/")
    image = Image.open(io.BytesIO(scored.thumbnail(kind, int(row)))).convert("RGB")
    assert goes["captions"] == ["red"] and goes["row"] is None and image.getpixel((9, 9))[0] > 240
    with pytest.raises(KeyError, match="expected a number from 0"):
        scored.thumbnail("sample", 12)


def test_an_index_of_texts_is_asked_by_pictures(small_model, tmp_path):
    (tmp_path / "texts.txt").write_text("red\nblue\n<b>green</b>\n")
    app = make_app([small_model, "--data", f"texts:{tmp_path / 'texts.txt'}"])
    kept = app.upload(picture("red", size=40))["upload"]
    found = app.search({"upload": kept})
    embedder = Embedder.load(small_model)
    image = embedder.encode_image(embedder.preprocess(Image.new("RGB", (40, 40), "red")).unsqueeze(0))
    scores = embedder.score.pairwise(image, embedder.embed_texts(["red", "blue", "<b>green</b>"]))[0]
    assert [item["row"] for item in found["answers"]] == scores.argsort(descending=True).tolist()
    assert found["answers"][0]["probability"] is not None and found["verdict"]["among"] == "items"
    assert concatenate([app.captions.found()[1]]).mean.shape[0] == 3
    app.explored.temporary.cleanup()
