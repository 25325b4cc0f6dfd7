"""The command: images, shards, features and texts to answers; resumed builds, refusals, errors."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from squares import COLOURS, picture

from prolip.cli.main import main
from prolip.embedder import Embedded, Embedder, embed_texts
from prolip.gaussian import Gaussian, mixture
from prolip.measures.chance import OwnFirst, warn_once
from prolip.scores import TrueMatchScore
from prolip.search.ann import table
from prolip.search.index import Part, SearchIndex
from prolip.search.query import Query, confidences, embed
from prolip.search.risk_control import Threshold
from prolip.uncertainty.novelty import refusal


def run(capsys, *words: str) -> tuple[int, list[str], str]:
    code = main(["search", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


@pytest.fixture(scope="module")
def built(tmp_path_factory, photos, small_model):
    folder = tmp_path_factory.mktemp("built") / "index"
    words = ["--data", f"images:{photos}", "--model", small_model, "--batch-size", "5"]
    assert main(["search", "build", str(folder), *words]) == 0
    return folder


@pytest.fixture(scope="module")
def embedder(small_model):
    return Embedder.load(small_model)


def test_pictures_are_found_by_text_picture_and_both(built, photos, embedder, capsys):
    index = SearchIndex(built)
    assert len(index) == 12 and index.side == "image"
    red = photos / "warm/green.png"
    words = ("query", built, "--top", 3, "--json")
    code, lines, _ = run(capsys, *words, "--text", "a red square", "--text", "blue", "--image", red)
    answers = [json.loads(line) for line in lines]
    assert code == 0 and [len(a["answers"]) for a in answers] == [3, 3, 3]
    first = answers[2]["answers"][0]
    assert first["key"] == "warm/green.png" and first["path"] == str(red)
    assert first["probability"] is None and 0 < answers[0]["answers"][0]["probability"] < 1
    text = embed_texts(embedder.encode_text, embedder.tokenizer, ["a red square"])
    z = index.gaussians(range(12))
    want = embedder.score.pairwise(z.to(torch.float64), text.to(torch.float64))[:, 0]
    keys = [item["key"] for item in index.items(want.argsort(descending=True)[:3].tolist())]
    assert [a["key"] for a in answers[0]["answers"]] == keys
    assert answers[0]["answers"][0]["similarity"] == pytest.approx(float(want.max()), abs=1e-6)
    code, lines, _ = run(capsys, *words, "--text", "a red square", "--image", red, "--combine")
    assert code == 0 and len(lines) == 1
    both = embed([Query("a red square", str(red))], embedder).z
    own = embed([Query("a red square"), Query(None, str(red))], embedder).z
    for x, y in zip(both, mixture(own)):
        torch.testing.assert_close(x[0], y)
    found = index.search(both, 3)
    keys = [item["key"] for item in index.items(found.rows[0].tolist())]
    assert [a["key"] for a in json.loads(lines[0])["answers"]] == keys


def test_answers_are_read_by_people(built, capsys):
    code, lines, _ = run(capsys, "query", built, "--text", "red", "--top", 2)
    assert code == 0 and lines[0] == "red:"
    figures = r"similarity -?[\d.]+  match probability (?:[\d.]+%|about 1 in [\d,]+)"
    answer = rf"(warm|cold)/\w+\.png  {figures}\s+'(warm|cold)'"
    assert re.fullmatch(rf"   1  {answer}\n   2  {answer}", "\n".join(lines[1:]))
    found = 0
    for way in ("--more-general", "--more-specific"):
        code, lines, _ = run(capsys, "query", built, "--text", "red", way)
        assert code == 0 and all("match" not in line for line in lines)
        assert all(re.search(r"  log inclusion -?[\d.]+  ", line) and "similarity" not in line for line in lines[1:])
        found += len(lines) - 1
        code, lines, _ = run(capsys, "query", built, "--text", "red", way, "--json")
        assert all("similarity" in answer and "ranked_by" not in answer for answer in json.loads(lines[0])["answers"])
    assert found


def test_a_model_at_chance_on_the_captions_of_an_index_is_named_once(
    tmp_path, shards, small_model, capsys, monkeypatch
):
    folder, words = tmp_path / "index", ("--data", f"shards:{shards}/{{0,1}}.tar", "--model", small_model)
    said = []
    for command in (("build", folder, *words), ("query", folder, "--text", "red", "--text", "blue")):
        warn_once.cache_clear()
        with monkeypatch.context() as own_process:
            own_process.setattr(logging.root, "handlers", [])
            code, _, error = run(capsys, *command)
        assert code == 0
        said.append([line for line in error.splitlines() if "no better than chance" in line])
    index = SearchIndex(folder)
    hits, pairs, candidates = index.store.values["own_first"]
    first = [f"a {colour} square" for colour in COLOURS]
    best = index.score.pairwise(index.gaussians(range(12)), Embedder.load(small_model).embed_texts(first)).argmax(1)
    assert (hits, pairs, candidates) == (int((best == torch.arange(12)).sum()), 12, 12) and hits < 4
    assert said == [[f"warning: {OwnFirst(hits, pairs, candidates)}"]] * 2


def test_a_command_warns_of_chance_once_if_fit_and_index_are_at_chance(
    tmp_path, shards, small_model, capsys, monkeypatch
):
    model = shutil.copytree(small_model.removeprefix("local-dir:"), tmp_path / "model")
    (model / "fit.json").write_text('{"own_first": [0, 12, 12]}')
    folder, words = tmp_path / "index", ("--data", f"shards:{shards}/{{0,1}}.tar", "--model", f"local-dir:{model}")
    for command in (("build", folder, *words), ("query", folder, "--text", "red")):
        warn_once.cache_clear()
        with monkeypatch.context() as own_process:
            own_process.setattr(logging.root, "handlers", [])
            code, _, error = run(capsys, *command)
        said = [line for line in error.splitlines() if "no better than chance" in line]
        assert code == 0 and said == [f"warning: local-dir:{model}: in its fit, {OwnFirst(0, 12, 12)}"]
    assert OwnFirst.read(SearchIndex(folder).store.values["own_first"]).at_chance


def test_shards_extend_an_index_and_texts_are_searched_by_pictures(tmp_path, photos, shards, small_model, capsys):
    folder = tmp_path / "index"
    words = ("--data", f"shards:{shards}/0.tar", "--model", small_model, "--index-type", "ivf")
    assert run(capsys, "build", folder, *words)[0] == 0
    assert run(capsys, "add", folder, "--data", f"shards:{shards}/1.tar")[0] == 0
    index = SearchIndex(folder)
    items = index.items(range(12))
    assert [item["key"] for item in items] == [f"{n}/s{row}" for n in range(2) for row in range(6)]
    assert [item["captions"] for item in items] == [[f"a {colour} square", colour] for colour in COLOURS]
    code, lines, said = run(capsys, "build", folder, *words)
    assert code == 2 and "use prolip search add, or give another folder" in said
    code, lines, said = run(capsys, "add", folder, "--data", f"shards:{shards}/1.tar")
    assert code == 0 and said == "0 added, 0 replaced, 0 removed\n"
    assert run(capsys, "delete", folder, "--keys", "1/s0", "1/s1")[1][0].startswith("10 items")
    assert run(capsys, "finish", folder, "--rebuild")[0] == 0 and len(SearchIndex(folder)) == 10
    (tmp_path / "texts.txt").write_text("red\ngreen\nred\n\nblue\n")
    texts = tmp_path / "texts"
    assert run(capsys, "build", texts, "--data", f"texts:{tmp_path}/texts.txt", "--model", small_model)[0] == 0
    code, lines, _ = run(capsys, "query", texts, "--image", photos / "warm/green.png")
    assert code == 0 and len(lines) == 4 and all("match" in line for line in lines[1:])
    code, _, said = run(capsys, "add", texts, "--data", f"images:{photos}")
    assert code == 2 and "has images, but this index has texts" in said


def test_damaged_pictures_are_named_or_left_out(tmp_path, small_model, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture("red"))
    (folder / "b.png").write_bytes(b"no image")
    words = ("--data", f"images:{folder}", "--model", small_model)
    code, _, said = run(capsys, "build", tmp_path / "index", *words)
    assert code == 2 and "b.png" in said and "--skip-damaged" in said
    code, lines, said = run(capsys, "build", tmp_path / "index", *words, "--skip-damaged")
    assert code == 0 and lines[0].startswith("1 items") and "skipped: 1 " in said


def test_refusal_by_risk_answers_what_is_known_and_refuses_the_rest(built, tmp_path, photos, capsys, caplog):
    path = tmp_path / "questions.jsonl"
    names = [f"{('cold', 'warm')[n % 2]}/{colour}.png" for n, colour in enumerate(COLOURS)]
    right = [{"image": str(photos / name), "keys": [name]} for name in names] * 10
    path.write_text("\n".join(map(json.dumps, right)))
    words = ("query", built, "--image", photos / "warm/green.png", "--risk", 0.1, "--calibrate", path)
    code, lines, said = run(capsys, *words)
    assert code == 0 and "with 90% confidence at most 10% of new answers are wrong" in said and len(lines) == 11
    name = re.match(r"answers if the (.+) is at least [\d.e-]+%?; ", said)[1]
    assert re.fullmatch(rf"{re.escape(str(photos))}/warm/green.png: {re.escape(name)} [\d.e-]+%?", lines[0])
    path.write_text("\n".join(json.dumps(line | {"keys": right[n - 1]["keys"]}) for n, line in enumerate(right)))
    code, lines, said = run(capsys, *words)
    assert code == 0 and "all are refused" in said and lines == [f"{photos}/warm/green.png: refused"]
    path.write_text("\n".join(json.dumps(line | {"keys": ["an\n", *line["keys"]]}) for line in right))
    code, _, said = run(capsys, *words)
    assert code == 0 and "1 of 13 keys of the queries are not in the index (an\\n)" in caplog.text
    path.write_text("\n".join(json.dumps(line | {"keys": [f"{line['keys'][0]}x"]}) for line in right))
    code, _, said = run(capsys, *words)
    assert code == 2 and "12 of 12 keys of the queries are not in the index" in said and said.count("\n") == 1
    assert "). Give keys as" in said
    path.write_text("\n".join(json.dumps(line | {"keys": [f"a/photos/{line['keys'][0]}"]}) for line in right))
    code, _, said = run(capsys, *words)
    assert code == 2 and said.count("\n") == 1
    assert f"), but {names[0]} is. Use the table of the queries for the index, or give keys as query --json" in said
    path.write_text('{"text": 5, "keys": []}')
    code, _, said = run(capsys, *words)
    assert code == 2 and "line 1" in said and '"keys"' in said and said.count("\n") == 1, said


@pytest.mark.parametrize(
    "words, kind, known",
    [
        (["--image", "a.png"], "image", {"text": "red"}),
        (["--text", "red"], "text", {"image": "a.png"}),
        (["--text", "red", "--image", "a.png", "--combine"], "text and image", {"text": "red"}),
    ],
)
def test_a_calibration_on_queries_of_another_kind_is_refused_before_anything_is_embedded(
    built, tmp_path, monkeypatch, capsys, words, kind, known
):
    monkeypatch.setattr(Embedder, "embed", lambda *_: pytest.fail("embedded"))
    (tmp_path / "q.jsonl").write_text(f"{json.dumps(known | {'keys': ['warm/green.png']})}\n" * 40)
    code, lines, said = run(capsys, "query", built, *words, "--risk", 0.5, "--calibrate", tmp_path / "q.jsonl")
    assert code == 2 and not lines and said.count("\n") == 1
    assert f"a query is by {kind}, but the queries with known answers are by {next(iter(known))}: " in said
    line = said.partition("Give lines such as ")[2].replace("[...]", "[]").replace("...", '""')
    assert list(json.loads(line)) == [*kind.split(" and "), "keys"]


def test_training_pairs_are_named_as_no_calibration(tmp_path, shards, small_model, capsys, caplog):
    shutil.copytree(small_model.removeprefix("local-dir:"), tmp_path / "run/model")
    config = {"method": "prolip", "data": {"train_data": f"{shards}/{{1,2}}.tar"}}
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    index, model = tmp_path / "index", f"local-dir:{tmp_path}/run/model"
    assert run(capsys, "build", index, "--data", f"shards:{shards}/0.tar", "--model", model)[0] == 0
    assert run(capsys, "add", index, "--data", f"shards:{shards}/1.tar")[0] == 0
    for shard, told in ((0, False), (1, True)):
        line = {"text": "a red square", "keys": [f"{shard}/s0"]}
        (tmp_path / "q.jsonl").write_text(f"{json.dumps(line)}\n" * 40)
        caplog.clear()
        words = ("query", index, "--text", "red", "--risk", 0.5, "--calibrate", tmp_path / "q.jsonl")
        assert run(capsys, *words)[0] == 0
        assert (f"trained on shards:{shards}/1.tar: the bound does not hold" in caplog.text) == told


def test_the_answer_among_all_items_and_novelty_are_what_is_refused_by(tmp_path, monkeypatch):
    """Against `Units.code_length` of the whole matrix, without the deleted, and `refusal`."""
    from prolip.search import query as answers

    score = TrueMatchScore(0.4, 0.07, images=50, texts=60, scale=20.0, bias=-9.0)
    g = torch.Generator().manual_seed(0)
    z, asked = (
        Gaussian(F.normalize(torch.randn(n, 16, generator=g), dim=1), torch.randn(n, 16, generator=g) - 4)
        for n in (40, 9)
    )
    index = SearchIndex.create(tmp_path / "index", score, 16)
    index.append(
        "own",
        [Part([{"key": str(i)} for i in range(a, a + 20)], z.select(slice(a, a + 20)), a + 20) for a in (0, 20)],
        20,
    )
    index.delete(["3", "25"])
    monkeypatch.setattr(answers, "BLOCK", 4)
    found = index.search(asked, 5)
    novelty = {"first": torch.linspace(0, 9, 9), "mean": torch.linspace(4, 1, 9)}
    sure = confidences(index, Embedded(asked, novelty), found)
    alive = [i for i in range(40) if i not in (3, 25)]
    want = score.units.code_length(asked.mean @ z.mean[alive].T)
    want = want.gather(1, torch.tensor([[alive.index(row)] for row in found.rows[:, 0].tolist()])).squeeze(1)
    alone, familiar, joint = (
        torch.from_numpy(sure[name]) for name in ("log probability", "familiarity", "joint log probability")
    )
    torch.testing.assert_close(-alone, want.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(-joint, refusal(want, novelty).double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(joint - alone, familiar)
    assert "joint log probability" not in confidences(index, Embedded(asked, {}), found)
    monkeypatch.setattr(answers, "NUMBERS", 100)
    assert "log probability" not in confidences(index, Embedded(asked, novelty), found)
    threshold = Threshold("joint log probability", -1.0, 0.1, 0.1, 5, 0, 9)
    with pytest.raises(ValueError, match="for joint log probability, .* texts or images"):
        threshold.answers(confidences(index, Embedded(asked, {}), found))


@pytest.mark.parametrize(
    "words, says",
    [
        (["build", "{}/new", "--data", "photos"], "--data 'photos' is missing"),
        (["build", "{}/new", "--data", "images:{}"], "--model is required"),
        (["query", "{index}"], "give --text or --image"),
        (["query", "{index}", "--text", "a", "--combine"], "give equal numbers"),
        (["query", "{index}", "--text", "a", "--risk", "0.1"], "need each other"),
        (["query", "{index}", "--text=a", "--risk=0.1", "--calibrate=x", "--more-general"], "rank by inclusion"),
        (["query", "{index}", "--image", "{}/no.png"], "no.png"),
        (["query", "{index}", "--text", "a", "--top", "0"], "give 1 or more"),
        (["delete", "{index}", "--keys", "x"], "1 of 1 keys are not in"),
    ],
)
def test_mistakes_end_in_one_line(built, tmp_path, capsys, words, says):
    code, _, said = run(capsys, *(word.replace("{index}", str(built)).replace("{}", str(tmp_path)) for word in words))
    assert code == 2 and says in said and len(said.strip().splitlines()) == 1


def test_a_dry_run_has_a_row_for_every_kind_and_writes_nothing(tmp_path, photos, small_model, capsys):
    words = ("--data", f"images:{photos}", "--model", small_model, "--dry-run", 10_000_000)
    code, lines, _ = run(capsys, "build", tmp_path / "i", *words)
    dim = int(re.fullmatch(r"10,000,000 items of (\d+) dimensions, csd", lines[0])[1])
    assert code == 0 and "\n".join(lines[2:]) == table(10_000_000, dim) and len(lines) == 8
    assert not (tmp_path / "i").exists()


def test_the_room_of_ten_million_items_is_that_of_the_docs():
    held = {line.split(" | ")[0][2:]: line.split(" | ") for line in table(10_000_000, 768).split("\n")[2:]}
    assert held["pq"][1] == "104" and float(held["pq"][2]) < 1.1 and float(held["hnsw"][2]) > 30
    assert table(10_000_000, 768) in (Path(__file__).parents[3] / "docs/reference/search_index.md").read_text()


ODD = (b"a\nb.png", b"\xff\xfe.png", b"\x1b[31mc.png", b"u\xe2\x80\xa8v.png", b"sub\xe4/x\r.png", b'q"{1..3}.png')


def test_odd_names_are_found_in_one_line_each_and_as_json(tmp_path, small_model, capsys):
    """Line ends, escape sequences and bytes that are no UTF-8."""
    for name, colour in zip(ODD, COLOURS):
        path = tmp_path / "p" / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(colour))
    assert run(capsys, "build", tmp_path / "i", "--data", f"images:{tmp_path}/p", "--model", small_model)[0] == 0
    code, lines, _ = run(capsys, "query", tmp_path / "i", "--text", "red")
    assert code == 0 and sum(line.startswith("   ") and line[3] != " " for line in lines) == len(ODD)
    assert all(line.isprintable() for line in lines)
    code, lines, _ = run(capsys, "query", tmp_path / "i", "--text", "red", "--json")
    found = json.loads(lines[0].encode())["answers"]
    assert len(lines) == 1 and all(Path(answer["path"]).is_file() for answer in found)
    keys = {"a\nb.png", r"\udcff\udcfe.png", "\x1b[31mc.png", "u\u2028v.png", "sub\\udce4/x\r.png", 'q"{1..3}.png'}
    assert {answer["key"] for answer in found} == keys
    assert all(set(answer) & {"print", "source"} == set() for answer in found)


@pytest.mark.parametrize("words", [("--top", 30, "--probe", 3), ("--exact",)])
def test_questions_with_known_answers_are_asked_as_the_others(built, tmp_path, monkeypatch, capsys, words):
    """The promise is of the first answers, and an approximate index finds other ones by other settings."""
    asked, search = [], SearchIndex.search

    def noted(self, queries, *args, **settings):
        asked.append((len(queries.mean), args, settings))
        return search(self, queries, *args, **settings)

    monkeypatch.setattr(SearchIndex, "search", noted)
    (tmp_path / "q.jsonl").write_text('{"text": "a", "keys": ["warm/green.png"]}\n' * 40)
    risk = ("--risk", 0.99, "--calibrate", tmp_path / "q.jsonl")
    code, lines, _ = run(capsys, "query", built, "--text", "a", *risk, *words)
    assert code == 0 and [number for number, *_ in asked] == [1, 40] and asked[0][1:] == asked[1][1:]
    assert lines == ["a: refused"] or len(lines) == 1 + min(12, dict(zip(words[::2], words[1::2])).get("--top", 10))
