"""Curation of shards from scores to new shards: figures by hand, kills, parts, faults, copies, the page, mistakes."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commits_curate import picture, sample, write_tar
from fitted_models import fitted_model
from PIL import Image

import faults
import prolip
from prolip.cli.main import main as prolip_command
from prolip.curate.rules import MEANINGS
from prolip.curate.score import PairSignals, side_columns
from prolip.curate.tables import SIGNATURE, read_words
from prolip.curate.write import write_shard
from prolip.data.reading.tar import read_shard
from prolip.embedder import Embedder
from prolip.measures import inclusion_test
from prolip.models.checkpoint import save_pretrained
from prolip.scores import TrueMatchScore

WORDS = ["a red square", "a blue square", "a green one", "stripes", "dots and dots"]


def main(words: list[str]) -> int:
    """The exit code of `prolip curate`."""
    return prolip_command(["curate", *words])


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Write three shards of 40 samples; one image of the second is damaged, two samples of the third share an image."""
    folder = tmp_path_factory.mktemp("shards")
    number = 0
    for shard, count in enumerate((15, 15, 10)):
        members = []
        for row in range(count):
            broken, again = (shard, row) == (1, 4), (shard, row) == (2, 7)
            image = b"no picture" if broken else picture(7777 if again or number == 33 else number, (40, 36))
            text, record = f"{WORDS[number % 5]} {number}".encode(), json.dumps({"uid": f"{number:032x}"}).encode()
            members += sample(f"{row:04d}", number, png=image, txt=text, json=record)  # the same keys in all shards
            number += 1
        write_tar(folder / f"{shard}.tar", members)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    save_pretrained(prolip.create_model("ProLIP-ViT-test", init_unc_bias=-3.0), folder)
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def scored(shards, model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("curated")
    assert main(score_words(shards, model, folder)) == 0
    return folder


def score_words(shards: Path, model: str, out: Path, *more: str) -> list[str]:
    data = f"{shards}/{{0,1,2}}.tar"
    return ["score", "--data", data, "--model", model, "--output", str(out), "--workers", "2", *more]


def selected(scored: Path, out: Path, *words: str) -> dict:
    """A selection of its own, from the same scores."""
    shutil.copytree(scored / "scores", out / "scores")
    assert main(["select", str(out), "--yes", *words]) == 0
    return json.loads((out / "selection/selection.json").read_text())


def table(folder: Path, number: int) -> dict[str, list]:
    return pq.read_table(folder / f"{number:06d}.parquet").to_pydict()


def column(folder: Path, name: str) -> np.ndarray:
    """Return a column of all three tables; NaN for a missing number."""
    return np.concatenate([np.array(table(folder, number)[name], float) for number in range(3)])


def test_figures_are_those_of_the_model(scored, model, shards):
    embedder = Embedder.load(model)
    rows = list(read_shard(f"{shards}/0.tar"))
    pixels = torch.stack([embedder.preprocess(Image.open(io.BytesIO(raw["png"]))) for raw in rows])
    texts = [raw["txt"].decode() for raw in rows]
    z, t = embedder.encode_image(pixels), embedder.embed_texts(texts)
    found = table(scored / "scores", 0)
    scores = embedder.score.pairwise(z, t)
    logits = embedder.logit_scale * scores.double()
    want = {
        "cosine": (z.mean * t.mean).sum(1),
        "score": scores.diagonal(),
        "image_uncertainty": z.trace,
        "text_uncertainty": t.trace,
        "match_probability": embedder.score.match_probability(scores.diagonal()),
        "normalised_score": torch.stack(
            [logits[i, i] - (logits[i].exp().mean().log() + logits[:, i].exp().mean().log()) / 2 for i in range(15)]
        ),
        "inclusion": inclusion_test(z, t),
    }
    for name, values in want.items():
        np.testing.assert_allclose(found[name], values.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)
    assert found["own_first"] == [float(first == row) for row, first in enumerate(scores.argmax(1).tolist())]
    assert found["caption"] == texts and found["row"] == list(range(15)) and found["uid"][3] == f"{3:032x}"
    assert (found["width"][0], found["height"][0]) == (36, 40) and set(found["fault"]) == {None}


def test_each_side_says_bits_about_the_other():
    score, trace = TrueMatchScore(0.4, 0.1, 50, 9, 20.0, -10.0), torch.tensor([0.2, 0.7])
    for side, other in (("image", "texts"), ("text", "images")):
        found = side_columns(score, trace, side)
        torch.testing.assert_close(found[f"{side}_bits"], score.units.information(trace, other, bits=True))
    assert not torch.equal(score.units.information(trace, "texts"), score.units.information(trace, "images"))


def test_a_doubted_image_has_its_doubt_and_its_ambiguity_and_a_match_probability_that_knows(tmp_path):
    embedder = Embedder.load(fitted_model(tmp_path, doubts=True))
    pixels = torch.randn(9, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    captions = [f"a {letter}" for letter in "bcdefghij"]
    found, (z, _) = PairSignals(embedder)(pixels, captions), embedder.encode(pixels, "image")
    own = embedder.reader.evidence(z.mean)
    doubt, t = embedder.score.doubts(own, own), embedder.embed_texts(captions)
    np.testing.assert_allclose(found["image_doubt"], doubt, rtol=1e-5)
    np.testing.assert_allclose(found["image_ambiguity"], embedder.reader.ambiguity(z.mean), rtol=1e-5)
    p = torch.sigmoid(embedder.score.scale * embedder.score.pairwise(z, t).diagonal() + embedder.score.bias)
    wanted = (1 - doubt) * p + doubt * embedder.score.units.share(t.trace)
    np.testing.assert_allclose(found["match_probability"], wanted, rtol=1e-4)
    assert {"image_doubt", "image_novelty_first", "text_novelty_mean"} <= found.keys() <= {*MEANINGS, SIGNATURE}


def test_what_cannot_be_used_keeps_its_reason_and_no_figure(scored, tmp_path, capsys):
    found = table(scored / "scores", 1)
    assert found["fault"][4].startswith("bad image") and found["cosine"][4] is None
    assert sum(fault is not None for fault in found["fault"]) == 1 and found["cosine"][5] is not None
    summary = selected(scored, tmp_path)
    assert summary["dropped"] == {"unusable": 1, "duplicate": 0, "rank": 0, "copies": 0} and summary["kept"] == 39
    assert "bad image 1" in capsys.readouterr().out


def test_a_killed_run_goes_on_and_parts_make_the_same_tables(scored, shards, model, tmp_path, monkeypatch, capsys):
    assert main(score_words(shards, model, tmp_path, "--part", "1/2")) == 0
    assert sorted(path.name for path in (tmp_path / "scores").iterdir()) == ["000001.parquet", "manifest.json"]
    assert main(["select", str(tmp_path)]) == 2
    assert "2 of 3 shards have no scores yet, such as number 0" in capsys.readouterr().err
    assert main(score_words(shards, model, tmp_path)) == 0
    before = (tmp_path / "scores/000001.parquet").stat().st_mtime_ns
    assert main(score_words(shards, model, tmp_path)) == 0
    assert "3 of 3 shards already have scores" in capsys.readouterr().err
    assert (tmp_path / "scores/000001.parquet").stat().st_mtime_ns == before
    for number in range(3):
        name = f"scores/{number:06d}.parquet"
        assert (tmp_path / name).read_bytes() == (scored / name).read_bytes()


def test_rules_shares_and_reasons_are_those_of_numpy(scored, tmp_path):
    cosine, trace = (column(scored / "scores", name) for name in ("cosine", "text_uncertainty"))
    rules = ["--drop", "poor: cosine < quantile(cosine, 0.25)", "--keep", "0.5", "--rank-by=-text_uncertainty"]
    summary = selected(scored, tmp_path, *rules)
    poor = cosine < np.nanquantile(cosine.astype(np.float32), 0.25)
    rest = np.flatnonzero(~poor & ~np.isnan(cosine))
    best = rest[np.argsort(trace[rest])][:20]
    reasons = column(tmp_path / "selection", "reasons")
    assert sorted(np.flatnonzero(reasons == 0)) == sorted(best)
    assert summary["dropped"]["poor"] == poor.sum() and summary["dropped"]["rank"] == len(rest) - 20
    assert summary["reasons"] == ["unusable", "duplicate", "rank", "copies", "poor"]


def test_one_of_two_equal_pictures_stays(scored, tmp_path):
    summary = selected(scored, tmp_path / "one", "--duplicates", "1")
    assert summary["dropped"]["duplicate"] == 1 and summary["kept"] == 38
    repeated = np.flatnonzero(column(tmp_path / "one/selection", "reasons") == 2).item()
    assert repeated in (33, 37)
    best = column(scored / "scores", "cosine")[33 + 37 - repeated]
    summary = selected(scored, tmp_path / "none", "--duplicates", "1", "--drop", f"best: cosine >= {best}")
    assert summary["dropped"]["duplicate"] == 0  # the image that it repeats is dropped
    assert "duplicate" in summary["listed"] and "rank" not in summary["listed"]  # 0 dropped is printed if asked for


def test_new_shards_hold_what_is_kept_and_no_byte_depends_on_kills_or_parts(scored, tmp_path, monkeypatch, capsys):
    summary = selected(scored, tmp_path / "a", "--drop", "poor: cosine < quantile(cosine, 0.3)")
    words = ["write", str(tmp_path / "a"), "--shard-samples", "8", "--processes", "1", "--output"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    samples = [raw for path in sorted((tmp_path / "whole").glob("*.tar")) for raw in read_shard(str(path))]
    assert len(samples) == summary["kept"] == summary["written"]
    uids = [json.loads(raw["json"])["uid"] for raw in samples]
    every = [row for number in range(3) for row in table(scored / "scores", number)["uid"]]
    copies = column(tmp_path / "a/selection", "copies")
    assert uids == [uid for uid, kept in zip(every, copies) if kept]
    index = json.loads((tmp_path / "whole/index.json").read_text())
    assert sum(entry["samples"] for entry in index["shards"].values()) == len(samples)

    def killed(plan, out, number):
        if number == 2:
            raise KeyboardInterrupt
        return write_shard(plan, out, number)

    monkeypatch.setattr("prolip.curate.write.write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        main([*words, str(tmp_path / "killed")])
    monkeypatch.undo()
    assert not (tmp_path / "killed/index.json").exists()
    assert main([*words, str(tmp_path / "killed"), "--part", "1/2"]) == 0
    assert main([*words, str(tmp_path / "killed"), "--part", "0/2"]) == 0
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes()
    assert "the last process writes the index" in capsys.readouterr().out
    assert main(["select", str(tmp_path / "a")]) == 0
    assert main([*words, str(tmp_path / "whole")]) == 2
    assert "contains shards of another selection. Give another --output" in capsys.readouterr().err


def test_copies_have_keys_of_their_own_and_the_mean_that_was_asked_for(scored, tmp_path):
    summary = selected(scored, tmp_path / "a", "--copies", "2.5")
    assert summary["written"] == pytest.approx(2.5 * 39, rel=0.1) and summary["kept"] == 39
    assert main(["write", str(tmp_path / "a"), "--output", str(tmp_path / "b"), "--processes", "0"]) == 0
    faults: list = []
    keys = [raw["__key__"] for raw in read_shard(str(tmp_path / "b/000000.tar"), faults.append)]
    assert len(keys) == len(set(keys)) == summary["written"] and not faults


def test_a_shard_that_breaks_off_is_said_and_scored_again(tmp_path, shards, model, capsys):
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    whole = (copy / "1.tar").read_bytes()
    (copy / "1.tar").write_bytes(whole[: len(whole) // 2])
    assert main(score_words(copy, model, tmp_path / "a")) == 1
    assert "1.tar is damaged" in capsys.readouterr().err
    some = len(table(tmp_path / "a/scores", 1)["key"])
    assert 0 < some < 15
    assert main(["select", str(tmp_path / "a")]) == 0
    (copy / "1.tar").write_bytes(whole)
    assert main(score_words(copy, model, tmp_path / "a")) == 0
    assert len(table(tmp_path / "a/scores", 1)["key"]) == 15


def test_a_field_that_no_sample_has_is_said_loudly(tmp_path, shards, model, capsys):
    assert main(score_words(shards, model, tmp_path, "--caption-sampling", "nofield")) == 1
    error = capsys.readouterr().err
    assert "0.tar: none of its 15 samples is usable; the first: no caption: no text in nofield" in error
    assert "no sample of any shard is usable" in error


def test_the_subset_is_datacomps(scored, tmp_path):
    rule = "poor: cosine < quantile(cosine, 0.5)"
    selected(scored, tmp_path / "a", "--subset", str(tmp_path / "s.npy"), "--drop", rule)
    uids = np.load(tmp_path / "s.npy")
    assert uids.dtype == np.dtype("u8,u8") and (np.sort(uids) == uids).all()
    copies = column(tmp_path / "a/selection", "copies")
    assert uids["f0"].tolist() == [0] * len(uids) and uids["f1"].tolist() == np.flatnonzero(copies).tolist()


def test_dropped_samples_are_listed_with_all_their_reasons(scored, tmp_path, capsys):
    rules = ["--drop", "first: width > 1 and text_tokens < 7", "--drop", "poor: cosine < quantile(cosine, 0.5)"]
    place = tmp_path / "dropped.jsonl"
    summary = selected(scored, tmp_path / "a", "--dropped", str(place), *rules)
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    assert f"{len(lines)} dropped samples in {place}" in capsys.readouterr().out
    expected = []
    for number, shard in enumerate(read_words(scored / "scores/manifest.json", "")["shards"]):
        keys, bits = table(scored / "scores", number)["key"], table(tmp_path / "a/selection", number)["reasons"]
        reasons = [[name for place, name in enumerate(summary["reasons"]) if bit & 1 << place] for bit in bits]
        expected += [{"shard": shard, "key": key, "reasons": why} for key, why in zip(keys, reasons) if why]
    assert lines == expected and {len(line["reasons"]) for line in lines} == {1, 2}
    for name in summary["reasons"]:
        assert sum(name in line["reasons"] for line in lines) == summary["dropped"][name]
    assert [line["key"] for line in lines if "unusable" in line["reasons"]] == ["0004"]


def knowing(scored: Path, out: Path, known: bool) -> Path:
    """The scores of a model that finds every caption, or of one that finds as many as chance."""
    shutil.copytree(scored / "scores", out / "scores")
    for path in (out / "scores").glob("*.parquet"):
        found = pq.read_table(path)
        first = [None if fault else float(known or row == 0) for row, fault in enumerate(found["fault"].to_pylist())]
        place = found.column_names.index("own_first")
        pq.write_table(found.set_column(place, found.schema.field(place), pa.array(first, pa.float32())), path)
    return out


def test_scores_that_are_noise_drop_nothing_without_yes(scored, tmp_path, capsys):
    out, rule = knowing(scored, tmp_path, False), ["--drop", "poor: cosine < quantile(cosine, 0.3)"]
    capsys.readouterr()
    for words in (rule, ["--keep", "0.5", "--rank-by", "score"], ["--copies", "0.5 * match_probability"]):
        assert main(["select", str(out), *words]) == 2
        error = capsys.readouterr().err
        assert "own caption first in 6.7%, no better than chance (6.7%): check" in error
        assert error.count("\n") == 1 and "or give --yes" in error and not (out / "selection").exists()
    assert main(["select", str(out), "--drop", "small: width < 9", "--keep", "0.5", "--rank-by=-text_tokens"]) == 0
    assert capsys.readouterr().err == ""  # no rule reads a score
    assert main(["select", str(out), "--yes", *rule]) == 0 and main(["report", str(out)]) == 0
    assert "warning: the model finds an image's own caption first in 6.7%" in capsys.readouterr().err
    assert 'class="card warning" role="alert">Warning: the model finds' in (out / "report.html").read_text()


def test_a_rule_on_scores_drops_at_most_half_without_yes(scored, tmp_path, capsys):
    out = knowing(scored, tmp_path, True)
    many, half = "poor: cosine < quantile(cosine, 0.8)", "poor: cosine < quantile(cosine, 0.4)"
    assert main(["select", str(out), "--drop", many]) == 2
    assert "of 40 samples, more than half: change poor, or give --yes" in capsys.readouterr().err
    assert main(["select", str(out), "--duplicates", "0.01"]) == 2  # a model that sees one image in all
    assert "more than half: change --duplicates, or give --yes" in capsys.readouterr().err
    assert main(["select", str(out), "--drop", "wide: width > 1", "--drop", "never: width < 0"]) == 2
    error = capsys.readouterr().err
    assert "the rules keep none of 40 samples (unusable 1, wide 39): loosen them, or give --yes\n" in error
    for words in ([many, "--yes"], [half], ["wide: width > 1", "--yes"], [half, "--duplicates", "0.01", "--yes"]):
        assert main(["select", str(out), "--drop", *words]) == 0
        assert capsys.readouterr().err == ""


def test_the_page_shows_reasons_and_pictures_and_escapes_captions(scored, tmp_path, capsys):
    out = tmp_path / "a"
    selected(scored, out, "--drop", "poor: cosine < quantile(cosine, 0.3)", "--duplicates", "0.999")
    path = out / "scores/000000.parquet"
    changed = pq.read_table(path)
    captions = ["<script>alert(1)</script>"] * 15
    changed = changed.set_column(changed.column_names.index("caption"), "caption", [captions])
    pq.write_table(changed, path)
    assert main(["report", str(out), "--top", "40"]) == 0
    page = (out / "report.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert page.count("data:image/webp") >= 39 and "Dropped: poor" in page and "Dropped: duplicate" in page
    assert 'src="http' not in page and "unreadable" in page


@pytest.mark.parametrize(
    "words,said",
    [
        (["select", "--drop", "cosine < 1"], "give NAME: FORMULA"),
        (["select", "--drop", "x: cosin < 1"], "did you mean cosine"),
        (["select", "--keep", "0.5"], "Give --rank-by"),
        (["select", "--keep", "0", "--rank-by", "cosine"], "above 0 and at most 1"),
        (["select", "--duplicates", "2"], "--duplicates 2.0"),
        (["write", "--output", "{out}/new"], "run `prolip curate select` first"),
    ],
)
def test_mistakes_end_in_one_line(scored, tmp_path, capsys, words, said):
    shutil.copytree(scored / "scores", tmp_path / "scores")
    assert main([words[0], str(tmp_path), *(word.format(out=tmp_path) for word in words[1:])]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1


def test_scores_of_another_model_are_not_mixed(scored, shards, tmp_path, capsys):
    shutil.copytree(scored / "scores", tmp_path / "a" / "scores")
    torch.manual_seed(1)
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), tmp_path / "other")
    assert main(score_words(shards, f"local-dir:{tmp_path}/other", tmp_path / "a")) == 2
    assert "was made with model" in capsys.readouterr().err


def test_a_kill_or_a_full_disk_leaves_the_old_or_the_new_state(tmp_path):
    report = faults.check("commits_curate:table,selection,shards", tmp_path)
    assert report.count("the old state") > 2 and report.count("the new state") > 2


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["table", "selection", "first_selection", "shards"])
def test_a_kill_at_every_call_leaves_the_old_or_the_new_state(tmp_path, commit):
    faults.check(f"commits_curate:{commit}", tmp_path, every=True)
