"""Sources that change between two builds: what is added, replaced and removed, what is not even read or refused."""

from __future__ import annotations

import os
import re
import shutil

import pytest
import torch
from commits_store import features, known, prepare_rebuild, rebuild
from squares import COLOURS, picture
from webdataset import TarWriter

import prolip
from prolip.cli.main import main
from prolip.data.reading import folders
from prolip.models.checkpoint import save_pretrained
from prolip.search import sources
from prolip.search.index import SearchIndex
from signed import SIGNED, files_with_secrets, serving


@pytest.fixture
def folder(tmp_path):
    """Write images to tmp_path/p, by the names of their colours."""
    (tmp_path / "p").mkdir()
    for colour in COLOURS[:8]:
        (tmp_path / "p" / f"{colour}.png").write_bytes(picture(colour))
    return tmp_path


@pytest.fixture
def build(folder, small_model, small_appends, capsys):
    """Runs a build of folder/i; the three counts, or what it said where it failed."""

    def run(*words: str, data: str = f"images:{folder}/p", to: str = "i", verb: str = "build"):
        few = ("--model", small_model, "--batch-size", "3")
        code = main(["search", verb, str(folder / to), "--data", data, *few, *words])
        said = capsys.readouterr().err
        counts = re.search(r"(\d+) added, (\d+) replaced, (\d+) removed", said)
        return said if code else tuple(map(int, counts.groups()))

    return run


def found(path) -> dict[str, torch.Tensor]:
    index = SearchIndex(path, verify=True)
    return {key: index.gaussians([row]).mean[0] for key, _, row in known(index)}


def assert_same(one, other) -> None:
    one, other = found(one), found(other)
    assert one.keys() == other.keys()
    for key, mean in one.items():
        torch.testing.assert_close(mean, other[key])


def test_pictures_are_added_replaced_renamed_and_removed(folder, build):
    assert build() == (8, 0, 0)
    (folder / "p/new.png").write_bytes(picture("pink"))
    (folder / "p/red.png").write_bytes(picture("cyan"))
    (folder / "p/green.png").rename(folder / "p/leaf.png")
    (folder / "p/blue.png").unlink()
    assert build() == (2, 1, 2)
    assert build(to="fresh") == (8, 0, 0)
    assert_same(folder / "i", folder / "fresh")
    assert build() == build() == (0, 0, 0)


def test_what_is_unchanged_is_not_read_and_what_was_touched_is_not_embedded(folder, build, monkeypatch):
    assert build() == (8, 0, 0)
    reads, decoded = [], []
    read, decode = folders.read_file, sources.decode_image
    monkeypatch.setattr(folders, "read_file", lambda path, limit: reads.append(path) or read(path, limit))
    monkeypatch.setattr(sources, "decode_image", lambda data: decoded.append(1) or decode(data))
    assert build() == (0, 0, 0) and not reads
    os.utime(folder / "p/red.png")
    assert build() == (0, 0, 0) and len(reads) == 1 and not decoded


def test_a_build_that_was_killed_finds_every_file_whatever_went_meanwhile(folder, build, full_disk):
    assert "no space left" in build() and len(SearchIndex(folder / "i")) == 6
    full_disk()
    (folder / "p" / sorted(os.listdir(folder / "p"))[1]).unlink()
    assert build() == (2, 0, 1)
    assert build(to="fresh") == (7, 0, 0)
    assert_same(folder / "i", folder / "fresh")


def test_a_picture_that_is_damaged_now_is_removed_and_comes_back_repaired(folder, build):
    build()
    (folder / "p/red.png").write_bytes(b"no image")
    assert "red.png: bad image" in build() and "red.png" in found(folder / "i")
    assert build("--skip-damaged") == (0, 0, 1)
    assert build("--skip-damaged") == (0, 0, 0)
    (folder / "p/red.png").write_bytes(picture("red"))
    assert build() == (1, 0, 0)


def test_deleted_items_stay_deleted_until_they_are_asked_for(folder, build, capsys):
    build()
    assert main(["search", "delete", str(folder / "i"), "--keys", "red.png", "blue.png"]) == 0
    main(["search", "add", str(folder / "i"), "--data", f"images:{folder}/p"])
    assert "0 added, 0 replaced, 0 removed; 2 stay deleted (--restore adds them again)" in capsys.readouterr().err
    assert build("--restore") == (2, 0, 0) and build() == (0, 0, 0)
    assert main(["search", "delete", str(folder / "i"), "--keys", "red.png"]) == 0
    assert build() == (0, 0, 0) and len(SearchIndex(folder / "i")) == 7
    blue = (folder / "p/blue.png").rename(folder / "blue.png")
    assert build() == (0, 0, 1)
    blue.rename(folder / "p/blue.png")  # which was brought back: its source alone has removed it
    assert build() == (1, 0, 0) and len(SearchIndex(folder / "i")) == 7


def test_sources_do_not_remove_or_replace_what_others_gave(folder, build):
    build()
    shutil.copytree(folder / "p", folder / "q/sub")
    for _ in range(2):
        assert build(data=f"images:{folder}/q", verb="add") in ((8, 0, 0), (0, 0, 0))
    (folder / "q/sub/red.png").unlink(), (folder / "p/blue.png").unlink()
    assert build(data=f"images:{folder}/q", verb="add") == (0, 0, 1)
    assert build(verb="add") == (0, 0, 1) and len(SearchIndex(folder / "i")) == 14
    shutil.copytree(folder / "p", folder / "r")
    said = build(data=f"images:{folder}/r", verb="add")
    assert "is in the index already. Rename" in said and len(found(folder / "i")) == 14


def test_another_model_is_refused_also_when_nothing_is_new(folder, build, capsys):
    build()
    torch.manual_seed(1)
    other = save_pretrained(prolip.create_model("ProLIP-ViT-test"), folder / "other")
    for model, says in (
        (f"local-dir:{other}", "is not the model of this index"),
        (f"local-dir:{folder}/none", "none"),
    ):
        assert main(["search", "build", str(folder / "i"), "--data", f"images:{folder}/p", "--model", model]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1


def write_shard(path, colours, captions="a {} square") -> None:
    with TarWriter(str(path), encoder=False) as writer:
        for colour in colours:
            writer.write({"__key__": colour, "png": picture(colour), "txt": captions.format(colour).encode()})


def test_shards_that_did_not_change_are_not_read_and_others_by_their_samples(folder, build, monkeypatch):
    for number in range(3):
        write_shard(folder / f"{number}.tar", COLOURS[4 * number : 4 * number + 4])
    data = f"shards:{folder}/{{0..2}}.tar"
    assert build(data=data) == (12, 0, 0)
    read, reads = sources.read_shard, []
    monkeypatch.setattr(sources, "read_shard", lambda url, note: reads.append(url[-5:]) or read(url, note))
    assert build(data=data) == (0, 0, 0) and not reads
    write_shard(folder / "1.tar", [*COLOURS[5:8], "pink"])
    assert build(data=data) == (1, 0, 1) and reads == ["1.tar"]
    monkeypatch.setattr(sources, "decode_image", None)
    write_shard(folder / "2.tar", COLOURS[8:12], "other words, {}")
    assert build(data=data) == (0, 4, 0)
    keys = {item["key"]: item["captions"] for item in SearchIndex(folder / "i").items(range(13, 17))}
    assert keys["2/brown"] == ["other words, brown"]


def test_what_a_shard_held_is_kept_while_it_cannot_be_read(folder, build):
    for number in range(2):
        write_shard(folder / f"{number}.tar", COLOURS[4 * number : 4 * number + 4])
    data, whole = f"shards:{folder}/{{0,1}}.tar", (folder / "1.tar").read_bytes()
    build(data=data)
    (folder / "1.tar").write_bytes(whole[: len(whole) // 2])
    assert "Fetch it again" in build(data=data)
    assert build("--skip-damaged", data=data) == (0, 0, 0) and len(SearchIndex(folder / "i")) == 8
    (folder / "1.tar").write_bytes(whole)
    assert build(data=data) == (0, 0, 0)


def test_texts_are_followed_line_by_line(folder, build):
    data, path = f"texts:{folder}/t.txt", folder / "t.txt"
    path.write_text("\n".join(COLOURS))
    assert build(data=data) == (12, 0, 0)
    path.write_text("\n".join(["a\u2028b", *COLOURS[:0:-1], "teal"]))
    assert build(data=data) == (2, 0, 1) and build(data=data) == (0, 0, 0)
    assert set(found(folder / "i")) == {"a\u2028b", "teal", *COLOURS[1:]}


def test_a_key_that_a_source_has_twice_is_refused(tmp_path):
    prepare_rebuild(tmp_path)
    for keys in ("aa", "abca", "abcdefghijklmnopzz", "Zbcdefghijklmnop0123456789Z"):
        with pytest.raises(ValueError, match="twice|one of the two items"):
            rebuild(tmp_path, features(keys))


def test_the_index_has_no_secrets_of_addresses(folder, build):
    """The source is found again by its address without them."""
    write_shard(folder / "0.tar", COLOURS[:2])
    with serving(folder) as place:
        for wanted in ((2, 0, 0), (0, 0, 0)):
            assert build(data=f"shards:{place}/0.tar{SIGNED}", to="signed") == wanted
    assert not files_with_secrets(folder / "signed")
