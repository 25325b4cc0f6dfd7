"""The corpus builder on small JSON in the packages' own format; no network, no renderer."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from types import ModuleType

import pytest
from PIL import Image
from test_build_icon_corpus import pack

from corpora import build_emoji as builder

GROUPS = {
    "groups": {"2": "component", "3": "animals-nature", "8": "symbols", "9": "flags"},
    "subgroups": {"33": "animal-mammal", "85": "time", "90": "keycap", "99": "hair-style", "100": "country-flag"},
}
DATA = [
    {"label": "regional indicator A", "hexcode": "1F1E6", "emoji": "\U0001f1e6", "type": 1, "version": 0},
    {"label": "red hair", "hexcode": "1F9B0", "order": 5, "group": 2, "subgroup": 99, "tags": ["ginger"]},
    {"label": "one o’clock", "hexcode": "1F550", "order": 20, "group": 8, "subgroup": 85, "tags": ["time", "1"]},
    {"label": "Ox", "hexcode": "1F402", "order": 10, "group": 3, "subgroup": 33, "tags": ["taurus", "ox", "bull"]},
    {"label": "piñata", "hexcode": "1FA85", "order": 30, "group": 3, "subgroup": 33},
    {"label": "keycap: *", "hexcode": "002A-FE0F-20E3", "order": 40, "group": 8, "subgroup": 90},
    {"label": "flag: Peru", "hexcode": "1F1F5-1F1EA", "order": 50, "group": 9, "subgroup": 100},
]
SQUARE = '<path fill="#f00" d="M0 0h32v32H0z"/>'
ICONS = {
    "prefix": "noto",
    "width": 32,
    "height": 32,
    "icons": {
        "one-oclock": {"body": SQUARE, "height": 16},
        "cow-male": {"body": SQUARE},
        "keycap-asterisk": {"body": ""},
    },
    "aliases": {"bull": {"parent": "cow-male"}, "ox": {"parent": "bull", "hFlip": True}},
}
CHARS = {"2a-20e3": "elsewhere", "002a-20e3": "keycap-asterisk"}


def test_concepts_come_in_cldr_order_without_flags_and_components_their_captions_sorted():
    concepts = builder.read_concepts(DATA, GROUPS)
    assert [c.hexcode for c in concepts] == ["1f402", "1f550", "1fa85", "002a-fe0f-20e3"]
    ox = concepts[0]  # one keyword repeats the name
    assert (ox.name, ox.keywords) == ("Ox", ["bull", "taurus"])
    assert (ox.subgroup, ox.group) == ("animal mammal", "animals nature")


@pytest.fixture
def packages(tmp_path):
    """A folder with the tarballs for the style noto."""
    folder = tmp_path / "packages"
    folder.mkdir()
    contents = {"en/data.json": DATA, "meta/groups.json": GROUPS}, {"icons.json": ICONS, "chars.json": CHARS}
    for package, files in zip(builder.package_names(["noto"]), contents):
        pack(folder / builder.tarball_name(package), {name: json.dumps(x).encode() for name, x in files.items()})
    return folder


@pytest.fixture
def installed(monkeypatch):
    """The builder as if npm were absent, with a renderer of greys whose value is the length of the drawing."""

    def render(svg: str) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (64, 64), (len(svg) % 256,) * 3).save(out, "WEBP", lossless=True)
        return out.getvalue()

    monkeypatch.setattr(builder, "render", render)
    monkeypatch.setattr(builder.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "resvg_py", ModuleType("resvg_py"))
    return builder


def test_a_shard_is_the_same_bytes_every_time_and_reads_back(installed, packages, tmp_path):
    for out in ("a", "b"):
        assert installed.main(["--style", "noto", "--packages", str(packages), "--out", str(tmp_path / out)]) == 0
    first, second = tmp_path / "a/noto.tar", tmp_path / "b/noto.tar"
    assert first.read_bytes() == second.read_bytes()
    assert [f.name for f in (tmp_path / "a").iterdir()] == ["noto.tar"]
    rows = installed.read_shard(first)
    assert list(rows) == ["noto-1f402", "noto-1f550", "noto-002a-fe0f-20e3"]
    assert rows["noto-1f550"]["txt"].decode() == "one o’clock"
    ox = {"hexcode": "1f402", "name": "Ox", "keywords": ["bull", "taurus"], "subgroup": "animal mammal"}
    assert json.loads(rows["noto-1f402"]["json"]) == ox | {"group": "animals nature", "style": "noto"}
    with tarfile.open(first) as tar:
        assert {(m.mtime, m.uid, m.uname) for m in tar} == {(0, 0, "")}


def test_check_passes_on_equal_shards_and_measures_other_pictures(installed, packages, tmp_path, capsys, monkeypatch):
    args = ["--style", "noto", "--packages", str(packages)]
    wanted = tmp_path / "wanted"
    assert installed.main([*args, "--out", str(wanted)]) == 0
    assert installed.main([*args, "--check", str(wanted)]) == 0
    assert "0 txt, 0 json, 0 webp, the files are equal byte for byte" in capsys.readouterr().out
    lighter = installed.render
    monkeypatch.setattr(installed, "render", lambda svg: lighter(svg + "   "))
    assert installed.main([*args, "--check", str(wanted)]) == 0
    assert "0 json, 3 webp (of 255: mean 3.000, worst image 3.00, max 3)" in capsys.readouterr().out
