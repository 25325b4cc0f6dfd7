"""Curation of tables and folders of images: each is scored as one shard, and what is kept is written as shards."""

import json

import pytest
from commands import run

import own_data
from prolip.curate.tables import read_table, table_path
from prolip.evaluation.datasets.registry import open_dataset
from prolip.explorer.rules import scored_table
from prolip.explorer.thumbnails import Thumbnails


def cosines(folder):
    return read_table(table_path(folder / "scores", 0), ["cosine", "caption"]).columns


def write_coco(folder):
    """The images of `own_data.write` as COCO's splits have them."""
    images = [
        {
            "filename": f"{n:02d}.png",
            "split": "train" if n < 6 else "restval",
            "sentences": [{"raw": text, "sentid": 2 * n + which} for which, text in enumerate(own_data.captions(n))],
        }
        for n in range(12)
    ]
    (folder / "coco.json").write_text(json.dumps({"dataset": "coco", "images": images}))
    return f"coco:{folder}/coco.json,{folder}/photos"


@pytest.mark.parametrize("kind", ["csv", "coco"])
def test_a_table_is_scored_selected_written_and_reported(kind, small_model, tmp_path, capsys):
    made, out = own_data.write(tmp_path / "d"), tmp_path / "out"
    made["coco"] = write_coco(tmp_path / "d")
    run("curate", "score", "--data", made[kind], "--model", small_model, "--output", out)
    assert f"1 shard scored into {out}" in capsys.readouterr().out
    found = cosines(out)
    assert found["caption"].tolist() == [own_data.captions(number)[0] for number in range(12)]
    run("curate", "select", out, "--drop", "low: cosine < quantile(cosine, 0.5)", "--yes")
    run("curate", "write", out, "--output", tmp_path / "kept", "--processes", 0)
    assert "6 samples in 1 new shard in" in capsys.readouterr().out
    kept = list(open_dataset(f"shards:{tmp_path}/kept").samples())
    low = sorted(range(12), key=found["cosine"].__getitem__)[:6]
    assert [list(sample.captions) for sample in kept] == [own_data.captions(n) for n in range(12) if n not in low]
    run("curate", "report", out)
    assert (out / "report.html").stat().st_size > 10_000
    assert Thumbnails().data(scored_table(out).item(5)) == own_data.image(5)
