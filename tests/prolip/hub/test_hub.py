"""Models with their cards: what is written is what the model and its run say, and loads again, from the hub too."""

import json
import re
import shutil
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from fitted_models import TINY, fitted_model, fitted_openclip, openclip_model
from PIL import Image

import prolip
from prolip.cli.main import main
from prolip.data.reading.named import shortened
from prolip.embedder import UNINFORMED, Embedder
from prolip.embeddings import Pairs
from prolip.fitting.attach import write_facts
from prolip.hub.sharing import figures, licences
from prolip.measures.chance import warn_once
from prolip.utils import console

METRICS = {
    "step": 300,
    "names/i2t/R@1": 0.25,
    "names/i2t/chance_R@1": 0.01,
    "zero_shot/subgroup/top1": 0.5,
    "zero_shot/subgroup/classes": 25.0,
    "trace/group": 0.3,
    "trace/name": 0.1,
    "spearman/trace_tokens": -0.3,
    "refusal/names_i2t/answer/ece": 0.11,
    "birds/acc1": 0.4,
}
CONFIG = {
    "method": "likelihood",
    "data": {"train_data": "data/emoji/{noto,fluent-emoji}.tar::/private/secret/own.tar", "batch_size": 128},
    "val": {"val_data": "data/emoji/emojione.tar"},
    "run": {"precision": "amp_bf16"},
    "model": {"pretrained": "/private/secret/backbone/model"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that ended, its model fitted to random pairs."""
    folder = tmp_path_factory.mktemp("ended")
    shutil.copytree(fitted_model(folder / "made").removeprefix("local-dir:"), folder / "run/model")
    (folder / "run/eval.json").write_text(json.dumps(METRICS))
    (folder / "run/config.json").write_text(json.dumps(CONFIG))
    for name in ("metrics.jsonl", "status.json"):
        (folder / "run" / name).write_text("{}\n")
    (folder / "run/model/diary.txt").write_text("not the model's")
    return folder / "run"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub as a folder: what is uploaded lies in the cache of models, and there is no network."""
    cache, made = tmp_path / "cache", {}

    class Api:
        def create_repo(self, repo, private, exist_ok):
            assert exist_ok
            made[repo] = private

        def upload_folder(self, repo_id, folder_path, allow_patterns, commit_message):
            place = cache / f"models--{repo_id.replace('/', '--')}"
            (place / "snapshots/abc").mkdir(parents=True)
            (place / "refs").mkdir()
            (place / "refs/main").write_text("abc")
            for name in allow_patterns:
                shutil.copy(Path(folder_path) / name, place / "snapshots/abc")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("prolip.models.registry.reachable", lambda: False)
    return made


def save(source, folder, *words):
    return main(["hub", "save", str(source), "--output", str(folder), *words])


def front_and_body(folder: Path):
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_a_card_says_what_the_run_says_and_its_code_runs(run, tmp_path, capsys, monkeypatch):
    assert save(run, tmp_path / "mine", "--license", "MIT", "--data-license", "Ask me.") == 0
    written = {path.name for path in (tmp_path / "mine").iterdir()}
    assert written == {"config.json", "model.safetensors", "fit.json", "README.md", "eval.json"}
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "mine" / name).read_bytes() == (run / "model" / name).read_bytes()
    front, body = front_and_body(tmp_path / "mine")
    assert front["license"] == "mit" and front["pipeline_tag"] == "zero-shot-image-classification"
    told = {m["type"]: m["value"] for result in front["model-index"][0]["results"] for m in result["metrics"]}
    assert told["names/i2t/R@1"] == 0.25 and told["birds/acc1"] == 0.4
    units = Embedder.load(f"local-dir:{tmp_path}/mine").score.units
    bits = float(units.information(torch.tensor(0.3), bits=True))
    for line in (
        "| images whose name ranks first | 25.0% | 1.0% | `names/i2t/R@1` |",
        "| zero-shot, 25 classes | 50.0% |",
        "| birds: acc1 | 40.0% |",
        f"matches exp(t / {units.unit:.4f}) of",
        "| a group's name | 0.300 |",
        f"{bits:.1f} bits",
        "| emoji/noto.tar | Apache-2.0 |",
        "| emoji/fluent-emoji.tar | MIT |",
        "| secret/own.tar | unknown",
        "weights of backbone/model",
        "75 of 100 such images get a wrong first name",
        "Ask me.",
        "*Novelty* does",
    ):
        assert line in body, line
    assert "/private" not in body + str(front)
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8), "red").save("image.png")
    for code in body.split("```python\n")[1:]:
        exec(code.split("```")[0], {})
    assert "load it as" in capsys.readouterr().out


def test_a_card_of_held_out_pairs_names_them_their_chance_and_examples_of_traces(run, tmp_path):
    own = shutil.copytree(run, tmp_path / "own")
    metrics = {"held-out/i2t/R@1": 0.2, "held-out/mean_recall@1": 0.25, "held-out/i2t/queries": 15.0, "birds/acc1": 0.4}
    metrics |= {"held-out/i2t/queries_without_match": 1.0, "all/t2i/R@1": 0.3, "all/own/i2t/R@1": 0.1}
    metrics["all/i2t/queries"] = 9.0  # with more labels than each image's own captions
    (own / "eval.json").write_text(json.dumps(metrics))
    (own / "config.json").write_text(
        json.dumps({"method": "likelihood", "data": {"train_data": "/home/me/a/b.csv", "split": 0.2}})
    )
    assert save(own, tmp_path / "card") == 0
    front, body = front_and_body(tmp_path / "card")
    held = "a/b.csv (the part that --split 0.2 held out)"
    assert front["model-index"][0]["results"][0]["dataset"]["name"] == held
    for line in (
        "| held-out: i2t/R@1 | 20.0% | 6.2% |",
        "| held-out: mean_recall@1 | 25.0% | 6.2% |",
        "| birds: acc1 | 40.0% |  |",
        "| all: t2i/R@1 | 30.0% |  |",
        f"Measured on {held}",
        "| caption | trace |",
        "| example: a general text |",
    ):
        assert line in body, line


def test_a_saved_model_is_replaced_with_a_line_and_the_model_of_another_run_is_refused(run, tmp_path, capfd):
    for former in (False, True):
        assert save(run, tmp_path / "mine") == 0
        assert (f"{tmp_path}/mine: the former model was replaced" in capfd.readouterr().err) is former
    other = shutil.copytree(run, tmp_path / "other")
    before = {path.name: path.read_bytes() for path in (other / "model").iterdir()}
    assert save(run, other / "model") == 2 and "holds the model of a run" in capfd.readouterr().err
    assert before == {path.name: path.read_bytes() for path in (other / "model").iterdir()}


@pytest.mark.parametrize("kind", ["ours", "openclip"])
def test_a_card_names_the_data_of_the_fit_without_the_folders_of_a_machine(kind, tmp_path, capsys):
    source = (fitted_model if kind == "ours" else fitted_openclip)(tmp_path / "made").removeprefix("local-dir:")
    facts = json.loads((Path(source) / "fit.json").read_text())
    assert facts | {"own_first": []} == {"data": "", "pairs": 64, "images": 64, "texts": 64, "own_first": []}
    rows = Pairs.in_rows(*[torch.eye(1200)] * 2, scale=9.0)
    for data, of in (("", "64 pairs of data that are not recorded"), ("/home/me/a/b.csv", "1,200 pairs of a/b.csv")):
        if data:
            write_facts(Path(source), rows, data)
        assert save(source, tmp_path / "mine") == 0
        _, body = front_and_body(tmp_path / "mine")
        own = body.partition("## Training data\n\n")[2].partition("\n\n## Limits")[0]
        assert own == f"The model's own training data: not recorded.\n\nThe variances were fitted to {of}."
    (Path(source) / "fit.json").write_text('{"data": 3}')
    capsys.readouterr()
    assert save(source, tmp_path / "mine") == 2 and "fit.json: 'data' is 3: expected str" in capsys.readouterr().err


def test_what_is_pushed_is_loaded_from_the_hub(run, hub, capsys):
    assert main(["hub", "push", str(run), "org/mine", "--private"]) == 0
    assert hub == {"org/mine": True} and "load it as hf-hub:org/mine" in capsys.readouterr().out
    ours, theirs = (Embedder.load(name) for name in (f"local-dir:{run}/model", "hf-hub:org/mine"))
    assert ours.fingerprint == theirs.fingerprint
    model = prolip.create_model("hf-hub:org/mine")
    assert model.logit_scale == prolip.create_model(f"local-dir:{run}/model").logit_scale


def test_a_model_in_memory_and_a_run_are_pushed_from_python(run, hub):
    model = prolip.create_model(f"local-dir:{run}/model")
    assert prolip.push_to_hub(model, "org/memory", license="mit") == "hf-hub:org/memory"
    assert prolip.push_to_hub(run, "org/run", private=True) == "hf-hub:org/run"
    assert hub == {"org/memory": False, "org/run": True}
    names = ("hf-hub:org/memory", "hf-hub:org/run", f"local-dir:{run}/model")
    memory, of_run, own = (Embedder.load(name) for name in names)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for x, y, z in zip(*(one.encode_image(pixels) for one in (memory, of_run, own))):
        assert torch.equal(x, z) and torch.equal(y, z)
    with pytest.raises(ValueError, match="only for a model in memory"):
        prolip.push_to_hub(run, "org/run", tokenizer=prolip.get_tokenizer(f"local-dir:{run}/model"))
    with pytest.raises(ValueError, match="give org/name"):
        prolip.push_to_hub(model, "mine")


def test_an_openclip_model_keeps_its_variances_on_the_hub(hub, tmp_path, capsys):
    name = fitted_openclip(tmp_path)
    assert main(["hub", "push", str(tmp_path / "fitted"), "org/clip"]) == 0
    fitted = Embedder.load(name)
    again = Embedder.load("hf-hub:org/clip")
    assert again.probabilistic and again.fingerprint == fitted.fingerprint
    assert again.score.units == fitted.score.units


def test_a_fit_whose_cosines_predicted_nothing_is_named_at_loading_and_on_the_card(tmp_path, caplog):
    name = fitted_openclip(tmp_path)  # fitted to random pairs
    warn_once.cache_clear()
    for _ in range(2):
        embedder = Embedder.load(name)
    assert [message for message in caplog.messages if UNINFORMED in message] == [f"{name}: {UNINFORMED}"]
    assert embedder.caution == UNINFORMED and save(tmp_path / "fitted", tmp_path / "out") == 0
    assert f"- {UNINFORMED.capitalize()}." in front_and_body(tmp_path / "out")[1]


def test_a_dry_run_sends_nothing_and_shows_what_it_would(run, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("asked the hub"))
    assert main(["hub", "push", str(run), "org/mine", "--dry-run"]) == 0
    said = capsys.readouterr().out
    size = (run / "model/model.safetensors").stat().st_size
    assert f"{size:,} bytes  model.safetensors" in said and "hf-hub:org/mine" in said and "diary" not in said
    assert "not stated: ask the author" in said


class RefusingHub(BaseHTTPRequestHandler):
    """A hub that does not accept the token."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(401, "Unauthorized")

    def log_message(self, *words):
        pass


def test_a_hub_that_refuses_is_an_error_in_one_line(run, capsys, monkeypatch):
    with HTTPServer(("127.0.0.1", 0), RefusingHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = partial(huggingface_hub.HfApi, endpoint=f"http://127.0.0.1:{server.server_port}", token="hf_no")
        monkeypatch.setattr(huggingface_hub, "HfApi", api)
        getattr(huggingface_hub.utils, "reset_sessions", lambda: None)()  # before 1.0 a session made offline stays so
        assert main(["hub", "push", str(run), "org/mine"]) == 2
        server.shutdown()
    assert "401" in (said := capsys.readouterr().err) and "hf auth login" in said


@pytest.mark.parametrize(
    "words, said",
    [
        (["push", "RUN", "a name with spaces"], "error"),
        (["push", "RUN", "mine"], "give org/name"),
        (["save", "RUN/model", "--output", "RUN/model"], "another folder"),
        (["save", "no/such", "--output", "x"], "no/such"),
        (["save", "RUN", "--output", "x", "--metrics", "no.json"], "no metrics at no.json"),
    ],
)
def test_what_cannot_be_saved_is_refused(run, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["hub", *(word.replace("RUN", str(run)) for word in words)]) == 2
    assert said in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_a_model_without_a_run_or_variances_claims_nothing(tmp_path):
    openclip_model(folder := tmp_path / "clip")
    (folder / "weights.pt").rename(folder / "open_clip_pytorch_model.bin")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY, "preprocess_cfg": {}}))
    assert save(folder, tmp_path / "out") == 0
    front, body = front_and_body(tmp_path / "out")
    assert "model-index" not in front and "license" not in front
    for line in ("This model has no evaluation", "a deterministic model", "Not recorded with this model"):
        assert line in body
    assert "have no meaning" not in body


def test_figures_licences_and_places_are_told_as_they_are():
    rows = figures({"recall_by_trace/x/acc1": 1.0, "names/i2t/R@1": 0.2, "cars/acc1": 0.5, "cars/acc5": 1.0})
    assert [row.key for row in rows] == ["names/i2t/R@1", "cars/acc1"]
    assert figures({"names/i2t/R@1": float("nan")}) == []
    assert licences("data/icons/mdi-outline.tar::data/emoji/noto-v1.tar::noto.tar") == [
        ("icons/mdi-outline.tar", "Apache-2.0"),
        ("emoji/noto-v1.tar", "Apache-2.0"),
        ("noto.tar", ""),
    ]
    assert shortened("/a/b/c/d") == "c/d" and shortened("data/x.tar") == "data/x.tar" and shortened(None) == ""


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("open_clip_config.json", "{}", "another model"),
        ("pytorch_model.bin", "", "another model"),
        ("spiece.model", "", "another model"),
        ("uncertainty.safetensors", "", "another model"),
        ("config.json", '{"name": "a web server"}', "model, program or run"),
        ("config.json", "no JSON", "model, program or run"),
        ("config.json", json.dumps(CONFIG), "model, program or run"),
        ("README.md", "# My project\n", "not a ProLIP card"),
        ("README.md", "---\nlibrary_name: transformers\n---\n", "not a ProLIP card"),
    ],
)
def test_a_folder_with_the_files_of_others_is_refused(run, name, text, said, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert save(run, tmp_path) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == text


def test_a_foreign_readme_is_replaced_on_request_and_an_own_card_always(run, tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    assert save(run, tmp_path, "--overwrite") == 0
    assert save(run, tmp_path, "--name", "second") == 0
    assert "# second\n" in (tmp_path / "README.md").read_text()


HOSTILE = ["x\n\n# Licence\n\nPublic domain", "<script>alert(1)</script> <!-- x &lt;b>", "a\x1b[31mb\u202eb", "# x"]
HOSTILE += ["![x](http://evil/x.png) [x](javascript:alert(1)) \\[x](y)", "x | y\n|---|---|", "`` ` x **x**", "1. x"]
HOSTILE += ["---\nlicense: mit\n---"]


@pytest.mark.parametrize("value", HOSTILE)
def test_values_in_a_card_are_text_wherever_they_stand(run, value, tmp_path):
    shutil.copytree(run, folder := tmp_path / "run")
    config = {
        "method": value,
        "data": {"train_data": value, "select": value},
        "model": {"pretrained": value},
        "run": {"precision": value},
        "val": {"val_tasks": [value]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "eval.json").write_text(json.dumps({**METRICS, f"{value.replace('/', '')}/acc1": 0.5, "step": 3}))
    assert save(folder, tmp_path / "out", "--name", value, "--data-license", value) == 0
    (folder / "config.json").write_text(json.dumps(config).replace(json.dumps(value), '"x"'))
    (folder / "eval.json").write_text(json.dumps({**METRICS, "x/acc1": 0.5, "step": 3}))
    assert save(folder, tmp_path / "plain", "--name", "x", "--data-license", "x") == 0
    front, body = front_and_body(tmp_path / "out")
    assert front["model-index"][0]["name"] == console.plain(value) and "license" not in front
    assert not any(character in body for character in "\x1b\u202e") and not re.search(r"<\w|<!|[^\\]\]\(java", body)
    assert body.count("\n# ") == 1 and body.count("## Licence") == 1
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    rendered, expected = (parser.parse(text) for text in (body, front_and_body(tmp_path / "plain")[1]))
    assert shape(rendered) == shape(expected)


def shape(tokens) -> list[str]:
    """The structure of a parsed text: blocks, links, images, emphasis and HTML."""
    return [token.type for block in tokens for token in (block, *(block.children or ())) if token.type != "text"]


FIGURES = {
    "[1]": "expected the metrics",
    "null": "expected the metrics",
    "[" * 10**5: "nested",
    "{": "is not valid JSON",
}
FIGURES |= {'{"names/i2t/R@1": 1e308}': "from 0 to 1", '{"names/i2t/R@1": 44.4}': "from 0 to 1"}
FIGURES |= {'{"birds/acc1": "x"}': "from 0 to 1", '{"refusal/names_i2t/answer/ece": -1}': "from 0 to 1"}
FIGURES |= {'{"zero_shot/subgroup/classes": "x"}': "expected a number", '{"step": "x"}': "expected a number"}
FIGURES |= {'{"trace/group": 1e308}': "expected a number", '{"names/i2t/R@1": true}': "expected a number"}


@pytest.mark.parametrize("text", FIGURES)
def test_figures_that_cannot_be_are_refused(run, text, tmp_path, capsys):
    (tmp_path / "eval.json").write_text(text)
    assert save(run, tmp_path / "out", "--metrics", str(tmp_path / "eval.json")) == 2
    error = capsys.readouterr().err
    assert FIGURES[text] in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_configuration_of_other_types_is_an_error_in_one_line(run, tmp_path, capsys):
    shutil.copytree(run, folder := tmp_path / "run")
    wrong = [[], {"data": None}, {"val": []}, {"data": {"train_data": ["a"]}}, {"data": {"train_data": 5}}]
    wrong += [{"method": {}}, {"model": {"pretrained": 1}}, {"val": {"val_tasks": "x"}}, {"data": {"batch_size": "x"}}]
    for config in wrong:
        (folder / "config.json").write_text(json.dumps(config))
        assert save(folder, tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert "config.json" in error and "expected" in error and error.count("\n") == 1, config


def test_links_out_of_a_folder_are_refused_and_those_of_the_cache_are_not(run, tmp_path, capsys):
    snapshot = tmp_path / "models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (blobs := snapshot.parents[1] / "blobs").mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):
        shutil.copy(run / "model" / name, blobs / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    assert save(snapshot, tmp_path / "out") == 0
    (tmp_path / "secret").write_text("x")
    (snapshot / "vocab.json").symlink_to(tmp_path / "secret")
    assert save(snapshot, tmp_path / "other") == 2
    assert main(["hub", "push", str(snapshot), "org/name", "--dry-run"]) == 2
    assert "vocab.json is a link to" in (said := capsys.readouterr().err) and "cp -rL" in said
    assert not (tmp_path / "other").exists()
