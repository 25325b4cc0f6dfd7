"""The scripts of the study: texts held out, foreign inputs, the tables of a trained and of a frozen toy model."""

import json
import tarfile
from pathlib import Path

import pytest

from studies.uncertainty import foreign_inputs, hold_out_texts
from studies.uncertainty import study as uncertainty_study
from studies.uncertainty.baselines import heads
from training.main import main as train

ROOT = Path(__file__).resolve().parents[3]

SHARD, UNSEEN = ROOT / "data/emoji/noto.tar", ROOT / "data/emoji/emojione.tar"
SELECT = "subgroup=animal mammal|animal bird|food fruit"
TOY = ["--model", "ProLIP-ViT-test", "--warmup", "1", "--max-steps", "2", "--batch-size", "16", "--workers", "0"]
TOY += ["--caption-sampling", "name:2,keywords:2,subgroup:1,group:1", "--select", SELECT]
TOY += ["--val-data", f"emoji:{UNSEEN}", "--val-select", SELECT]


def captions(shard: Path) -> dict[str, dict]:
    with tarfile.open(shard) as tar:
        return {m.name: json.load(tar.extractfile(m)) for m in tar if m.name.endswith(".json")}


def test_held_out_texts_are_gone_and_all_else_is_there(tmp_path):
    hold_out_texts.main([str(SHARD), "--select", SELECT, "--seed", "3", "--output", str(tmp_path)])
    held = set(json.loads((tmp_path / "held.json").read_text()))
    old, new = captions(SHARD), captions(tmp_path / SHARD.name)
    assert old.keys() == new.keys() and len(held) > 20
    for key, sample in old.items():
        assert new[key]["keywords"] == [text for text in sample["keywords"] if text not in held]
        assert new[key]["subgroup"] == ("" if sample["subgroup"] in held else sample["subgroup"])
        assert all(new[key][name] == sample[name] for name in ("name", "group"))
    with tarfile.open(SHARD) as before, tarfile.open(tmp_path / SHARD.name) as after:
        drawing = next(m.name for m in before if not m.name.endswith(".json"))
        assert before.extractfile(drawing).read() == after.extractfile(drawing).read()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Toy runs of the paper's loss, of likelihood, of SigLIP's loss, and of it without some texts."""
    folder = tmp_path_factory.mktemp("study")
    hold_out_texts.main([str(SHARD), "--select", SELECT, "--output", str(folder / "shards")])
    trained = (("paper", "prolip", SHARD), ("ours", "likelihood", SHARD), ("frozen", "siglip", SHARD))
    for name, method, data in (*trained, ("held", "siglip", folder / "shards/noto.tar")):
        given = ["--method", method, "--train-data", str(data), "--output", str(folder), "--name", name]
        assert train([*TOY, *given]) == 0
    return folder


def test_the_tables_have_a_row_for_each_uncertainty_and_the_models_own_figures(runs, monkeypatch, capsys):
    monkeypatch.setattr(heads, "STEPS", 4)
    monkeypatch.setattr(foreign_inputs, "COUNT", 20)
    words = [word for name in ("paper", "ours", "frozen", "held") for word in (f"--{name}", str(runs / name))]
    uncertainty_study.main([*words, "--baselines", "top score", "AsymVLM"])
    printed = capsys.readouterr().out
    rows = {line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("|")}
    methods = {"the paper's loss", "likelihood", "SigLIP, cosine", "prolip.uncertainty", "top score", "AsymVLM"}
    assert methods | {"likelihood: all", "prolip.uncertainty: novelty, first"} <= rows
    figures = json.loads((runs / "ours/eval.json").read_text())
    retrieval = printed[printed.index("Retrieval") :]
    ours = next(line for line in retrieval.splitlines() if line.startswith("| likelihood"))
    cells = [float(cell) for cell in ours.split("|")[2:-1] if cell.strip() != "-"]
    assert any(cell == pytest.approx(100 * figures["captions/t2i/mAP@R"], abs=0.05) for cell in cells)
    asym = next(line for line in printed[printed.index("Refusal") :].splitlines() if line.startswith("| AsymVLM"))
    assert asym.split("|")[2].strip() == "-"  # it has no uncertainty of images
    assert "| 0 | " in printed[printed.index("likelihood - the paper's loss") :]
