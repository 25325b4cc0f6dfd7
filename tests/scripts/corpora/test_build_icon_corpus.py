"""The icon corpus on tiny packages in the sets' own formats; no network, no renderer."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from base64 import b64encode
from pathlib import Path

import pytest

from corpora import build_icons as builder
from corpora import icon_joins, icon_sets
from prolip.data.reading.shards import expand_source
from training.main import parse

ROOT = Path(__file__).parents[3]
#: A renderer that needs nothing: a grey that depends on the drawing. In a file, for the processes that draw.
RENDERER = """
import io

from PIL import Image


def svg_to_bytes(svg_string, width, height, skip_system_fonts):
    if "broken" in svg_string:
        raise ValueError("no such path")
    out = io.BytesIO()
    Image.new("RGB", (width, height), (sum(svg_string.encode()) % 256,) * 3).save(out, "PNG")
    return out.getvalue()
"""


def svg(drawing: str, head: str = "") -> bytes:
    """Return a drawing whose bytes differ from all others."""
    return f'{head}<svg class="{drawing}" viewBox="0 0 24 24"><path d="{drawing}"/></svg>'.encode()


def lucide(name: str, drawing: str) -> bytes:
    """A drawing as Lucide writes it: the class is the name, so an alias differs from its drawing in that alone."""
    return f'<!-- licence --><svg class="lucide-{name}"><path d="{drawing}"/></svg>'.encode()


def phosphor(weights: list[str]) -> dict[str, bytes]:
    """Two icons of Phosphor: a brand, and one with a former name."""
    entries = """var t = (i) => (i.ARROWS = "arrows");
    const n = [{ name: "apple-logo", pascal_name: "AppleLogo", categories: [e.BRAND], figma_category: a.BRAND,
      tags: ["*new*", "macos"], codepoint: 1 },
      { name: "archive", pascal_name: "Archive", alias: { name: "archive-box", pascal_name: "ArchiveBox" },
      categories: [e.OFFICE,
        e.SYSTEM], figma_category: a.OFFICE, tags: ["Saved"], codepoint: 2 }];"""
    names = ("apple-logo", "archive")
    drawn = {f"assets/{w}/{n}{'' if w == 'regular' else '-' + w}.svg": svg(n + w) for w in weights for n in names}
    return {"./dist/index.mjs": entries.encode(), **drawn}


def sets() -> dict[str, dict[str, bytes]]:
    """{set: {path: content}} of six tiny packages."""
    tabler = {
        "arrow-left": {"category": "Arrows", "tags": ["back", "Go Left"]},
        "brand-apple": {"category": "Brand", "tags": []},
        "apple": {"category": "Food", "tags": ["fruit"]},
        "trash": {"category": "System", "tags": ["garbage", "delete"]},
        "user": {"category": "System", "tags": ["profile", 1]},
        "box": {"category": "System", "tags": ["parcel"]},
    }
    mdi = [
        {"name": "arrow-left", "aliases": ["arrow-back"], "tags": ["Arrow"]},
        {"name": "arrow-left-outline", "aliases": [], "tags": ["Arrow"]},
        {"name": "apple", "aliases": [], "tags": ["Brand / Logo"]},
        {"name": "account", "aliases": ["user", "person"], "tags": ["Account / User"]},
        {"name": "delete", "aliases": ["trash"], "tags": ["Home Automation"]},
        {"name": "account-off", "aliases": ["user-off"], "tags": []},
        {"name": "account-cowboy-hat", "aliases": [], "tags": []},
        {"name": "zeppelin", "aliases": [], "tags": []},
    ]
    unicons = [{"name": "arrow-left", "category": "Arrows", "tags": ["previous"]}]
    dice = [{"name": "package", "category": "Shopping", "tags": ["parcel", "box"]}]
    return {
        "tabler": {
            "icons.json": json.dumps(tabler).encode(),
            **{f"icons/outline/{name}.svg": svg(name) for name in tabler},
            "icons/filled/apple.svg": svg("apple filled"),
        },
        "phosphor": phosphor(["thin", "light", "regular", "bold", "fill", "duotone"]),
        "lucide": {
            "tags.json": json.dumps({"square-x": ["close"], "user-off": ["leave"], "bin": ["trash", "waste"]}).encode(),
            "icons/square-x.svg": lucide("square-x", "x in a square"),
            "icons/x-square.svg": lucide("x-square", "x in a square"),
            "icons/user-off.svg": lucide("user-off", "nobody"),
            "icons/bin.svg": lucide("bin", "bin"),
        },
        "unicons": {
            "json/line.json": json.dumps(unicons).encode(),
            "json/solid.json": json.dumps(dice).encode(),
            "json/thinline.json": b"[]",
            "json/monochrome.json": b"[]",
            "svg/line/arrow-left.svg": svg("left"),
            "svg/solid/package.svg": svg("package"),
            "svg/thinline/nameless.svg": svg("thin"),
            "svg/monochrome/nameless.svg": svg("nameless"),
        },
        "mdi": {"meta.json": json.dumps(mdi).encode(), **{f"svg/{e['name']}.svg": svg(e["name"]) for e in mdi}},
        "remixicon": {
            "icons/Arrows/arrow-left-line.svg": svg("l"),
            "icons/Arrows/arrow-left-fill.svg": svg("f"),
            "icons/Editor/bold.svg": svg("b"),
            "icons/Arrows/x-square-line.svg": svg("x"),
        },
    }


def pack(path: Path, files: dict[str, bytes]) -> str:
    """A tarball as npm makes it; returns its checksum as npm writes it."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return "sha512-" + b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder with the six tarballs, whose checksums the script expects; npm absent, renderer as if present."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for key, files in sets().items():
        package = builder.PACKAGES[key]
        licence = {"License" if key == "remixicon" else "LICENSE": f"the licence of {key}".encode()}
        checksum = pack(folder / icon_sets.tarball_name(package.spec), {**files, **licence})
        monkeypatch.setitem(builder.PACKAGES, key, package._replace(integrity=checksum))
    (tmp_path / "renderer").mkdir()
    (tmp_path / "renderer/resvg_py.py").write_text(RENDERER)
    monkeypatch.syspath_prepend(tmp_path / "renderer")
    monkeypatch.setitem(sys.modules, "resvg_py", None)  # restored after the test
    del sys.modules["resvg_py"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    return folder


@pytest.fixture
def icons(packages):
    return builder.read_sets(packages)[0]


@pytest.fixture
def concepts(icons):
    return builder.concepts_of(icons)


def build(packages: Path, out: Path, *more: str) -> int:
    return builder.main(["--packages", str(packages), "--out", str(out), "--jobs", "1", *more])


def test_a_name_in_several_sets_is_one_concept_with_all_tags(concepts):
    tags = ["arrow back", "back", "go left", "previous"]
    assert concepts["arrow left"] == ("arrow-left", "arrow left", tags, "arrows", "signs")


def test_styles_are_taken_off_names_and_meaning_is_not(icons, concepts):
    drawn = {(icon.style, icon.name) for icon in icons}
    assert {("mdi", "arrow left"), ("mdi-outline", "arrow left"), ("remixicon-fill", "arrow left")} <= drawn
    assert {("remixicon-line", "bold"), ("phosphor-duotone", "archive"), ("mdi", "account off")} <= drawn
    assert concepts["account off"] != concepts["account"]


def name_of(row: tuple | str) -> str:
    """An icon's name without its set."""
    return (row if isinstance(row, str) else row[0])[2:]


def one_concept(rows: list) -> bool:
    """Return whether two icons are one concept. Row: set and name, or (set and name, aliases, tags, category)."""
    icons = []
    for row in rows:
        (named, *more) = (row,) if isinstance(row, str) else row
        aliases, tags, category = (*more, *((), (), "")[len(more) :])
        icons.append(icon_joins.Icon(named[0], named[0], named[2:], "", tuple(aliases), tuple(tags), (category,)))
    return any({name_of(row) for row in rows[:2]} <= entry.sets_of.keys() for entry in icon_joins.join(icons))


def many(pattern: str) -> list[str]:
    """Return enough names of one set to make a word a kind of things, or a mark."""
    return [pattern.format(f"w{i}") for i in range(10)]


AGREE = (), ("sharp",)
CARDS = (), (), "gaming / rpg"


#: Joined, by the rule that does it; "a bell slash" is an icon "bell slash" of set a.
JOINED = {
    "slash is off": ["a bell slash", "b bell off"],
    "some set writes it apart": ["a qrcode", "b qr code"],
    "and so in longer names": ["a qrcode scan", "b scan qr code", "c qrcode", "c qr code"],
    "alt is a design": ["a receipt alt", "b receipt"],
    "order of things": ["a desk lamp", "b lamp desk", "c desk", "c lamp"],
    "plural, a keyword": [("a thumb up", *AGREE), ("b thumbs up", *AGREE)],
    "plural, a category": [("a club", *CARDS), ("b clubs", *CARDS)],
    "a kind": [("a currency euro", *AGREE, "currency"), ("b euro", *AGREE), *many("a currency {}")],
    "an alias that shares a plural": [("a book multiple", ["books"]), "b books"],
    "an alias and a tag": [("a bin", ["trash"]), ("b trash", (), ["bin"])],
    "an alias by usual words": [
        ("a magnify", ["search"]),
        "b search",
        *((f"a magnify {x}", [f"search {x}"]) for x in ("in", "out")),
        *(f"b search {x}" for x in ("in", "out")),
    ],
    "more in common": [("a bin", ["bin lid", "bin bag"], ["waste"]), ("b bin lid", (), ["waste"]), "b bin bag"],
    "tags of both": [("a at", (), ["at sign"]), ("b at sign", (), ["at"])],
    "one has two other names": ["b zoom in", "c zoom more", ("a zoom", ["zoom in", "zoom more"])],
}
APART = {
    "of two shapes one is inside": ["a circle square", "b square circle"],
    "a plural without a witness": ["a ring", "b rings"],
    "a count": [("a user 3", *AGREE), ("b users three", *AGREE)],
    "a mark is no thing": [("a map star", *AGREE, "map"), ("b star", *AGREE), *many("a map {}"), *many("a {} star")],
    "an alias without a witness": [("a account", ["user"]), "b user"],
    "an alias of another number": [("a tv small", ["tv 2"]), "b tv 2"],
    "tags of three": [("a box", (), ["package"]), ("b package", (), ["box", "parcel"]), ("c parcel", (), ["package"])],
    "a logo": [("a apple logo",), ("b apple", ["apple logo"], ["fruit"])],
    "a chain": [("a red x", ["blue x"]), ("d grey x", ["green x"]), ("b blue x", ["green x"]), "c green x"],
}


@pytest.mark.parametrize("rows", JOINED.values(), ids=JOINED)
def test_names_are_joined(rows):
    assert one_concept(rows)
    others = [f"z {name_of(row)}" for row in rows[:2]]
    assert not one_concept([*rows, *others]), "a set that draws both distinguishes them"


@pytest.mark.parametrize("rows", APART.values(), ids=APART)
def test_names_are_kept_apart(rows):
    assert not one_concept(rows)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_two_builds_give_the_same_bytes_whatever_the_number_of_processes(packages, tmp_path, jobs):
    assert build(packages, tmp_path / "a") == 0
    assert build(packages, tmp_path / "b", "--jobs", jobs) == 0
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) == len(builder.STYLES) + 7
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    with tarfile.open(tmp_path / "a/tabler.tar") as tar:
        members = list(tar)
    assert [m.name for m in members] == sorted((m.name for m in members), key=lambda n: n.split(".")[0])
    assert {(m.mtime, m.uid, m.uname) for m in members} == {(0, 0, "")}


def test_the_recipe_trains_on_styles_that_are_built_and_none_of_the_designer_it_is_evaluated_on():
    config = parse(["--config", str(ROOT / "scripts/recipes/icons.yaml")])
    trained = {Path(url).stem for url in expand_source(config.data.train_data)}
    (evaluated,) = (Path(url).stem for drawings in config.val.emoji for url in expand_source(drawings))
    assert trained | {evaluated} <= set(builder.STYLES)
    (package,) = (package for package in builder.PACKAGES.values() if evaluated in package.styles)
    assert not trained & set(package.styles)


def test_shards_that_the_build_does_not_write_are_refused(packages, tmp_path, capsys):
    out = tmp_path / "out"
    build(packages, out, "--style", "mdi")
    before = (out / "mdi.tar").read_bytes()
    assert build(packages, out, "--style", "lucide") == 2
    said = capsys.readouterr().err
    assert f"{out} holds mdi.tar, not written by this build" in said and said.count("\n") == 1
    assert [path.name for path in out.glob("*.tar*")] == ["mdi.tar"] and (out / "mdi.tar").read_bytes() == before
    assert build(packages, out) == 0  # all styles: it is written again


def test_a_tarball_with_another_checksum_is_refused(packages, tmp_path, capsys):
    tarball = packages / "mdi-svg-7.4.47.tgz"
    tarball.write_bytes(tarball.read_bytes() + b"\0")
    assert build(packages, tmp_path / "o") == 2
    said = capsys.readouterr().err
    assert f"{tarball} has the checksum sha512-" in said and "delete the file" in said and said.count("\n") == 1
