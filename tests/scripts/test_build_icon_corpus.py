"""The icon corpus on tiny packages in the sets' own formats; no network, no renderer."""
from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import sys
import tarfile
from base64 import b64encode
from pathlib import Path

import pytest
from PIL import Image

from prolip.data import emoji

ROOT = Path(__file__).parents[2]
MODULES = ("icon_concepts", "build_emoji_corpus", "build_icon_corpus")


@pytest.fixture(scope="module")
def builder():
    """The script as a module."""
    before, path = {name: sys.modules.pop(name, None) for name in MODULES}, list(sys.path)
    spec = importlib.util.spec_from_file_location("build_icon_corpus", ROOT / "scripts/build_icon_corpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    for name in MODULES:
        sys.modules.pop(name, None)
        if before[name] is not None:
            sys.modules[name] = before[name]


def svg(drawing: str, head: str = "") -> bytes:
    """A drawing whose bytes tell it from others."""
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
def packages(builder, tmp_path, monkeypatch):
    """A folder with the six tarballs, whose checksums the script expects; npm absent, renderer as if present."""
    folder = tmp_path / "packages"
    folder.mkdir()
    pinned = {}
    for key, files in sets().items():
        package = builder.PACKAGES[key]
        licence = {"License" if key == "remixicon" else "LICENSE": f"the licence of {key}".encode()}
        checksum = pack(folder / builder.tarball_name(package.spec), {**files, **licence})
        pinned[key] = package._replace(integrity=checksum)
    monkeypatch.setattr(builder, "PACKAGES", pinned)

    def render(drawing: str) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (64, 64), (sum(drawing.encode()) % 256,) * 3).save(out, "WEBP", lossless=True)
        return out.getvalue()

    monkeypatch.setattr(builder, "render", render)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    return folder


@pytest.fixture
def icons(builder, packages):
    return builder.read_sets(packages)[0]


@pytest.fixture
def concepts(builder, icons):
    return builder.concepts_of(icons)


def build(builder, packages: Path, out: Path, *more: str) -> int:
    return builder.main(["--packages", str(packages), "--out", str(out), "--jobs", "1", *more])


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("arrow-left", "arrow left"),
        ("ArrowLeft", "arrow left"),
        ("mdi_arrow left", "mdi arrow left"),
        ("piñata's", "pinatas"),
        ("html5", "html5"),
    ],
)
def test_names_are_lower_case_words(builder, name, wanted):
    assert sys.modules["icon_concepts"].normalise(name) == wanted


def test_a_name_in_several_sets_is_one_concept_with_all_tags(concepts):
    assert concepts["arrow left"] == (
        "arrow-left", "arrow left", ["arrow back", "back", "go left", "previous"], "arrows", "signs",
    )  # fmt: skip


def test_styles_are_taken_off_names_and_meaning_is_not(icons, concepts):
    drawn = {(icon.style, icon.name) for icon in icons}
    assert {("mdi", "arrow left"), ("mdi-outline", "arrow left"), ("remixicon-fill", "arrow left")} <= drawn
    assert {("remixicon-line", "bold"), ("phosphor-duotone", "archive"), ("mdi", "account off")} <= drawn
    assert concepts["account off"] != concepts["account"]


def test_a_brand_is_a_logo_in_every_set_and_never_the_fruit(icons, concepts):
    assert {i.package for i in icons if i.name == "apple logo"} == {"tabler", "mdi", "phosphor"}
    assert (concepts["apple logo"].group, concepts["apple"].group) == ("brands", "food drink")


def test_an_alias_joins_two_names_that_share_a_word(concepts):
    assert concepts["x square"] == concepts["square x"]
    assert concepts["account off"] == concepts["user off"]


def test_tags_join_only_where_each_names_the_other(concepts):
    assert concepts["box"] != concepts["package"]  # only one of the two says so
    assert concepts["trash"] == concepts["delete"]  # alias here, tag there
    assert concepts["bin"] != concepts["trash"]


def test_an_alias_without_a_second_witness_is_a_keyword_only(concepts):
    assert concepts["account"] != concepts["user"]
    assert "user" in concepts["account"].keywords


def test_aliases_never_form_a_chain(builder):
    Icon = sys.modules["icon_concepts"].Icon  # noqa: N806
    chain = [Icon(p, p, n, "", (a,)) for p, n, a in (("a", "x 1", "x 2"), ("b", "x 2", "x 3"), ("c", "x 3", ""))]
    assert len({c.hexcode for c in builder.concepts_of(chain).values()}) == 3
    assert len({c.hexcode for c in builder.concepts_of(chain[1:]).values()}) == 1


def test_a_set_that_draws_both_names_keeps_them_apart(builder):
    Icon = sys.modules["icon_concepts"].Icon  # noqa: N806
    both = [Icon("a", "a", "big x", "", ("x",)), Icon("b", "b", "x", ""), Icon("a", "a", "x", "")]
    assert len({c.hexcode for c in builder.concepts_of(both).values()}) == 2


def test_categories_are_voted_on_borrowed_or_honestly_absent(concepts):
    assert (concepts["archive"].subgroup, concepts["archive"].group) == ("business", "commerce")  # not the vague system
    assert concepts["account cowboy hat"].subgroup == "users"  # of "account"
    assert concepts["zeppelin"].group == "uncategorised"


def test_every_category_of_the_table_has_one_place(builder):
    table = sys.modules["icon_concepts"].GROUPS
    names = [c for subgroups in table.values() for text in subgroups.values() for c in text.split("|")]
    assert len(names) == len(set(names))
    subgroups = [subgroup for group in table.values() for subgroup in group]
    assert len(subgroups) == len(set(subgroups))


def test_a_lucide_file_with_the_drawing_of_another_is_its_alias(icons):
    assert [(i.name, i.aliases) for i in icons if i.package == "lucide"] == [
        ("bin", ()), ("square x", ("x square",)), ("user off", ()),
    ]  # fmt: skip


def test_monochrome_drawings_get_the_opacities_that_the_stylesheet_gives(icons):
    drawing = next(i.svg for i in icons if i.style == "unicons-monochrome")
    assert '<style>.uim-secondary{opacity:.7}' in drawing and drawing.endswith("</svg>")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_two_builds_give_the_same_bytes_whatever_the_number_of_processes(builder, packages, tmp_path, jobs):
    assert build(builder, packages, tmp_path / "a") == 0
    assert build(builder, packages, tmp_path / "b", "--jobs", jobs) == 0
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) == len(builder.STYLES) + 7
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    with tarfile.open(tmp_path / "a/tabler.tar") as tar:
        members = list(tar)
    assert [m.name for m in members] == sorted((m.name for m in members), key=lambda n: n.split(".")[0])
    assert {(m.mtime, m.uid, m.uname) for m in members} == {(0, 0, "")}


def test_one_style_has_the_texts_it_has_among_all(builder, packages, tmp_path):
    assert build(builder, packages, tmp_path / "all") == 0
    assert build(builder, packages, tmp_path / "one", "--style", "mdi") == 0
    assert [p.name for p in (tmp_path / "one").glob("*.tar")] == ["mdi.tar"]
    assert (tmp_path / "one/mdi.tar").read_bytes() == (tmp_path / "all/mdi.tar").read_bytes()


def test_a_large_style_is_several_numbered_shards(builder, packages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(builder, "SHARD_SIZE", 4)
    monkeypatch.setattr(builder, "REPORT_EVERY", 2)
    assert build(builder, packages, tmp_path, "--style", "tabler") == 0
    assert sorted(p.name for p in tmp_path.glob("*.tar")) == ["tabler-00.tar", "tabler-01.tar"]
    said = capsys.readouterr().out
    assert "tabler-00.tar: 2 of 4" in said
    assert f"sha256 {hashlib.sha256((tmp_path / 'tabler-01.tar').read_bytes()).hexdigest()}" in said
    assert "| tabler-01.tar | 2 |" in (tmp_path / "README.md").read_text()


def test_the_loader_reads_what_was_built(builder, packages, tmp_path):
    build(builder, packages, tmp_path)
    corpus = emoji.read([str(path) for path in sorted(tmp_path.glob("*.tar"))])
    assert {drawing.style for drawing in corpus.drawings} == set(builder.STYLES)
    arrows = corpus.select("group=signs")
    assert {c.name for c in arrows.concepts} == {"arrow left", "square x"}
    table = corpus.caption_table()
    assert "arrow left" in table.texts and (table.true_matches > 0).all()
    assert corpus.drawings[0].image().size == (64, 64)


def test_licences_and_sources_lie_beside_the_shards(builder, packages, tmp_path):
    build(builder, packages, tmp_path, "--style", "lucide", "--style", "remixicon-fill")
    assert {p.name: p.read_text() for p in (tmp_path / "LICENSES").iterdir()} == {
        "lucide.txt": "the licence of lucide", "remixicon.txt": "the licence of remixicon",
    }  # fmt: skip
    said = (tmp_path / "README.md").read_text()
    assert "4 drawings of 4 concepts" in said
    assert "| lucide.tar | 3 | lucide-static@1.62.0 | ISC | LICENSES/lucide.txt |" in said


def test_check_passes_on_equal_shards_and_fails_on_lost_ones(builder, packages, tmp_path, capsys):
    build(builder, packages, tmp_path / "a")
    check = ["--packages", str(packages), "--jobs", "1", "--check", str(tmp_path / "a")]
    assert builder.main(check) == 0
    assert "check mdi.tar: 7 samples, differ: 0 txt, 0 json, 0 webp, the files are equal" in capsys.readouterr().out
    (tmp_path / "a/mdi.tar").unlink()
    assert builder.main(check) == 1
    assert "mdi.tar does not exist" in capsys.readouterr().out


def test_a_missing_package_without_npm_is_said_before_work_starts(builder, packages, tmp_path, capsys):
    (packages / "mdi-svg-7.4.47.tgz").unlink()
    assert build(builder, packages, tmp_path / "o") == 2
    said = capsys.readouterr().err
    assert "npm is not on PATH" in said and "npm pack @mdi/svg@7.4.47`" in said
    assert not (tmp_path / "o").exists()


def test_a_tarball_with_another_checksum_is_refused(builder, packages, tmp_path, capsys):
    tarball = packages / "mdi-svg-7.4.47.tgz"
    tarball.write_bytes(tarball.read_bytes() + b"\0")
    assert build(builder, packages, tmp_path / "o") == 2
    said = capsys.readouterr().err
    assert f"{tarball} has the checksum sha512-" in said and "delete the file" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "change", [lambda blob: blob[: len(blob) // 2], lambda blob: b"not a tarball"], ids=["half", "other"]
)
def test_a_broken_tarball_is_named(builder, packages, change):
    tarball = packages / "mdi-svg-7.4.47.tgz"
    tarball.write_bytes(change(tarball.read_bytes()))
    with pytest.raises(builder.BuildError, match=f"cannot read {tarball}.*delete the file to fetch it again"):
        builder.unpack(tarball)


@pytest.mark.parametrize(
    "lost, said",
    [("LICENSE", "has no licence file"), ("icons.json", "is not laid out as expected: KeyError('icons.json')")],
)
def test_a_package_without_licence_or_metadata_is_refused(builder, packages, tmp_path, capsys, lost, said):
    files = {"LICENSE": b"free", **sets()["tabler"]}
    del files[lost]
    package = builder.PACKAGES["tabler"]
    checksum = pack(packages / builder.tarball_name(package.spec), files)
    builder.PACKAGES["tabler"] = package._replace(integrity=checksum)
    assert build(builder, packages, tmp_path / "o") == 2
    assert f"@tabler/icons@3.51.0 {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, said",
    [
        (["--out", "x", "--check", "x"], "would overwrite"),
        (["--style", "feather"], "invalid choice"),
        (["--jobs", "0"], "at least one process"),
    ],
)
def test_bad_flags_are_refused(builder, args, said, capsys):
    with pytest.raises(SystemExit):
        builder.main(args)
    assert said in capsys.readouterr().err


def test_a_missing_folder_to_compare_with_is_said(builder, packages, tmp_path, capsys):
    assert builder.main(["--packages", str(packages), "--check", str(tmp_path / "none")]) == 2
    assert "--check wants the folder" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_in_one_line(builder, packages, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert build(builder, packages, tmp_path / "file" / "out") == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "file") in said and said.count("\n") == 1
