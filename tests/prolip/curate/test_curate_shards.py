"""Curation of shards that change, lack something or have odd names, by many processes, from damaged files."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import commits_curate as make
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buckets import Bucket
from forked import one_thread
from prolip.cli.main import main as prolip_command
from prolip.curate.report import write_page
from prolip.curate.rules import Expression
from prolip.curate.select import Choice, select
from prolip.curate.tables import claimed, made, read_table, stamp, table_path
from prolip.data.reading.tar import read_shard
from prolip.utils import outputs
from signed import SIGNED, files_with_secrets, serving

FORK = multiprocessing.get_context("fork")
RULE = "dark: cosine < quantile(cosine, 0.5)"


def main(words: list[str]) -> int:
    """The exit code of `prolip curate`."""
    return prolip_command(["curate", *words])


@pytest.fixture
def scored(tmp_path) -> Path:
    make.score_all(make.three_shards(tmp_path / "shards"), tmp_path / "out")
    return tmp_path / "out"


def fails(capsys, *words: object) -> str:
    """The one line in which a command ends."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


def column(out: Path, number: int, name: str) -> list:
    return pq.read_table(table_path(out / "scores", number)).to_pydict()[name]


def exchange(path: Path, same_time: bool = False) -> None:
    """Write the same keys with the images and captions of others, and as many bytes."""
    before = path.stat()
    make.write_tar(path, [x for row in range(4) for x in make.sample(f"{row}", 3 - row + 100)])
    data = path.read_bytes()
    path.write_bytes(data + bytes(max(0, before.st_size - len(data))))
    if same_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_has_changed_is_refused_by_select_and_scored_again(scored, tmp_path, capsys):
    urls = sorted(map(str, (tmp_path / "shards").iterdir()))
    assert make.score_all(urls, scored) == [] and main(["select", str(scored)]) == 0
    exchange(Path(urls[1]))
    assert "1.tar has changed since it was scored: run `prolip curate score` again" in fails(capsys, "select", scored)
    assert [note["shard"] for note in make.score_all(urls, scored)] == [urls[1]]
    assert column(scored, 1, "caption") == [f"caption {n}" for n in (103, 102, 101, 100)]
    for words in (["write", "--output", tmp_path / "kept"], ["report"]):
        assert "made from other scores" in fails(capsys, words[0], scored, *words[1:])
    assert main(["select", str(scored)]) == 0
    assert main(["write", str(scored), "--output", str(tmp_path / "kept"), "--processes", "0"]) == 0


def test_write_names_the_earlier_selection_that_a_refused_select_leaves(scored, tmp_path, capsys):
    everything, kept = "wide: width > 1", ["write", scored, "--processes", 0, "--output"]
    assert "remains" not in fails(capsys, "select", scored, "--drop", everything)
    words = ["--drop", "short: (width <\n 1)", "--keep", "0.8", "--rank-by", "cosine", "--copies", "1"]
    assert main(["select", str(scored), *words]) == 0
    for rule in (everything, "wide: wdth > 1"):
        assert fails(capsys, "select", scored, "--drop", rule).endswith(". The earlier selection remains\n")
    os.utime(scored / "selection/selection.json", (time.mktime((2026, 11, 7, 17, 3, 59, 0, 0, -1)),) * 2)
    assert main([str(word) for word in [*kept, tmp_path / "a"]]) == 0
    said = r"short: (width <\n 1); --keep 0.8; --rank-by cosine; --copies 1"
    assert capsys.readouterr().out.splitlines()[0] == f"selection of 2026-11-07 17:03: {said}"
    assert main(["select", str(scored)]) == 0 and main([str(word) for word in [*kept, tmp_path / "b"]]) == 0
    assert ": all usable samples\n12 samples in" in capsys.readouterr().out


def test_a_remote_shard_is_asked_what_it_is_now(tmp_path):
    url, local = "gs://curation/0.tar", Path(make.write_tar(tmp_path / "0.tar", make.sample("a", 1)))
    for number in (1, 2):  # first scores, then a changed object
        make.write_tar(local, make.sample("a", number))
        Bucket().pipe_file(url, local.read_bytes())
        assert len(make.score_all([url], tmp_path / "out")) == 1
        assert make.score_all([url], tmp_path / "out") == []
    make.choose(tmp_path / "out")
    Bucket().rm(url)  # what does not answer keeps its scores
    assert make.score_all([url], tmp_path / "out") == [] and make.choose(tmp_path / "out")["kept"] == 1


def test_no_table_has_the_secrets_of_addresses_and_write_takes_them_again(tmp_path, capsys):
    make.write_tar(tmp_path / "0.tar", make.sample("a", 1))
    out, kept = tmp_path / "out", tmp_path / "kept"
    with serving(tmp_path) as place:
        url = f"{place}/0.tar{SIGNED}"
        make.score_all([url], out)
        make.choose(out)
        write = ["write", out, "--output", kept, "--processes", 1, "--allow-private-hosts"]
        assert "SECRET" not in fails(capsys, *write)
        assert main([str(word) for word in [*write, "--data", url]]) == 0
    assert (kept / "000000.tar").exists() and not files_with_secrets(tmp_path)
    assert "SECRET" not in str([read_table(path).note for path in (out / "scores").glob("*.parquet")])


def test_a_shard_that_is_gone_is_named(scored, tmp_path, capsys):
    (tmp_path / "shards/2.tar").unlink()
    assert "2.tar is gone since it was scored: restore it" in fails(capsys, "select", scored)


def test_write_finds_what_size_and_time_do_not_tell(scored, tmp_path, capsys):
    assert main(["select", str(scored)]) == 0
    exchange(tmp_path / "shards/1.tar", same_time=True)
    assert main(["select", str(scored)]) == 0
    words = ["write", scored, "--output", tmp_path / "kept", "--shard-samples", 12]
    error = fails(capsys, *words)
    assert "1.tar has another sample '0'" in error and f"Delete {table_path(scored / 'scores', 1)}" in error
    assert not list((tmp_path / "kept").glob("*.tar"))
    table_path(scored / "scores", 1).unlink()
    assert len(make.score_all(sorted(map(str, (tmp_path / "shards").iterdir())), scored)) == 1
    assert "made from other scores" in fails(capsys, *words)
    assert main(["select", str(scored)]) == 0


def test_the_page_shows_no_picture_of_another_sample(scored, tmp_path):
    assert main(["select", str(scored)]) == 0 and main(["report", str(scored)]) == 0
    assert (scored / "report.html").read_text().count("data:image/webp") == 12
    exchange(tmp_path / "shards/1.tar", same_time=True)
    assert main(["report", str(scored)]) == 0
    assert (scored / "report.html").read_text().count("data:image/webp") == 8


def test_tables_of_two_selections_are_not_mixed(scored, tmp_path, capsys):
    assert main(["select", str(scored)]) == 0
    shutil.copytree(scored / "selection", tmp_path / "former")
    assert main(["select", str(scored), "--yes", "--drop", RULE]) == 0
    shutil.copy(tmp_path / "former/000001.parquet", scored / "selection")
    for words in (["write", "--output", tmp_path / "kept"], ["report"]):
        assert "000001.parquet and selection.json are of different selections" in fails(
            capsys, words[0], scored, *words[1:]
        )
    assert main(["select", str(scored), "--yes", "--drop", RULE]) == 0 and main(["report", str(scored)]) == 0


@pytest.mark.parametrize("name", ["selection/selection.json", "scores/manifest.json"])
def test_a_damaged_summary_is_one_line(scored, tmp_path, capsys, name):
    assert main(["select", str(scored)]) == 0
    whole = (scored / name).read_text()
    damaged = ["{}", "[1]", whole[:-9], whole.replace("1", "2", 1)]
    for text in damaged:
        (scored / name).write_text(text)
        for words in (["write", "--output", tmp_path / "kept"], ["report"]):
            assert f"{Path(name).name} is damaged" in fails(capsys, words[0], scored, *words[1:])
    (scored / name).unlink()
    make.score_all(sorted(map(str, (tmp_path / "shards").iterdir())), scored)
    assert main(["select", str(scored)]) == 0 and main(["report", str(scored)]) == 0


def damages(path: Path) -> dict[str, bytes]:
    whole = path.read_bytes()
    other = pa.BufferOutputStream()
    pq.write_table(pq.read_table(path).drop_columns(["cosine"]), other)
    stranger = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": [1]}), stranger)
    return {
        "cut": whole[: len(whole) // 2],
        "schema": other.getvalue().to_pybytes(),
        "foreign": stranger.getvalue().to_pybytes(),
    }


@pytest.mark.parametrize("kind", ["cut", "schema", "foreign"])
def test_a_damaged_table_is_named_and_made_again(scored, tmp_path, capsys, kind):
    path = table_path(scored / "scores", 1)
    whole = path.read_bytes()
    path.write_bytes(damages(path)[kind])
    assert "000001.parquet" in fails(capsys, "select", scored, "--yes", "--drop", RULE)
    make.score_all(sorted(map(str, (tmp_path / "shards").iterdir())), scored)
    assert path.read_bytes() == whole
    assert main(["select", str(scored)]) == 0
    place = table_path(scored / "selection", 1)
    place.write_bytes(damages(path)[kind])
    assert "000001.parquet" in fails(capsys, "write", scored, "--output", tmp_path / "kept")


LACKING = {
    "broken": [(f"{row}.{suffix}", b"x") for row in range(2) for suffix in ("png", "txt")],
    "empty": [],
    "no text": [(f"{row}.png", make.picture(row)) for row in range(2)],
}


@pytest.mark.parametrize(("kind", "place"), [("broken", 0), ("empty", 1), ("no text", 1)])
def test_a_shard_without_usable_samples_has_the_columns_of_all(tmp_path, kind, place):
    good = make.write_tar(tmp_path / "good.tar", [x for row in range(4) for x in make.sample(f"{row}", row)])
    urls = [good]
    urls.insert(place, make.write_tar(tmp_path / "bad.tar", LACKING[kind]))
    make.score_all(urls, tmp_path / "out")
    assert pq.read_schema(table_path(tmp_path / "out/scores", 0)).remove_metadata() == (
        pq.read_schema(table_path(tmp_path / "out/scores", 1)).remove_metadata()
    )
    summary = make.choose(tmp_path / "out", RULE, "long: text_tokens > 99")
    assert (summary["kept"], summary["samples"]) == (2, 4 + len(LACKING[kind]) // (1 + (kind == "broken")))
    assert make.write_all(tmp_path / "out", tmp_path / "kept") == 2
    assert place or main(["report", f"{tmp_path}/out"]) == 0


@pytest.mark.parametrize("kind", ["broken", "empty"])
def test_shards_without_any_usable_sample_give_nothing_and_say_so(tmp_path, capsys, kind):
    make.score_all([make.write_tar(tmp_path / "bad.tar", LACKING[kind])], tmp_path / "out")
    words = [str(tmp_path / "out")]
    rules = ["--drop", RULE, "--keep", "0.5", "--rank-by", "cosine", "--copies", "cosine"]
    assert main(["select", *words, *rules]) == 0
    count = 0 if kind == "empty" else 2
    assert f"0 of {count} samples are kept" in capsys.readouterr().out
    assert main(["write", *words, "--output", str(tmp_path / "kept"), "--processes", "0"]) == 0
    assert "0 samples in 0 new shards" in capsys.readouterr().out
    assert main(["report", *words]) == 0


def test_equal_keys_of_old_shards_lose_no_sample(tmp_path):
    keys = [["x"], ["x_2"], ["x", "x_1"], ["x_2", "x"]]
    urls = [
        make.write_tar(tmp_path / f"{n}.tar", [y for key in some for y in make.sample(key, n)])
        for n, some in enumerate(keys)
    ]
    make.score_all(urls, tmp_path / "out")
    make.choose(tmp_path / "out")
    assert make.write_all(tmp_path / "out", tmp_path / "kept", 99) == 6
    faults: list = []
    found = [raw["__key__"] for raw in read_shard(str(tmp_path / "kept/000000.tar"), faults.append)]
    assert len(set(found)) == 6 and not faults and found[:2] == ["x", "x_2"]


ODD = [
    b"a\nb",
    b"\x1b]0;pwned\x07\x1b[31mx",
    b"caf\xe9",
    "\u65e5\u672c".encode(),
    b"d/" + b"k" * 300,
    b" ",
    b"<b>\xe2\x80\xae</b>",
]


def test_odd_names_are_written_and_read_and_never_steer_a_terminal(tmp_path, capsys):
    parts = {
        b".png": b"",
        b".txt": b"caption \x1b[31m\xe2\x80\xae",
        b".": b"nameless",
        b"._x": b"hidden",
        b".json": b'{"uid": "\\ud800"}',
    }
    members = [(key + name, data or make.picture(n)) for n, key in enumerate(ODD) for name, data in parts.items()]
    shard, out = (Path(os.fsdecode(os.fsencode(tmp_path) + name)) for name in (b"/shard\xff\n.tar", b"/out\xff"))
    make.write_tar(shard, members)
    assert make.score_all([str(shard)], out)[0]["usable"] == len(ODD)
    select(out, Choice(copies=Expression.parse("1.5")))
    make.write_all(out, out / "kept", 99)
    page = write_page(out).read_text()
    assert not set("\x1b\x07\u202e") & set(page) and r"\x1b]0;pwned\x07" in page and "<b>\\" not in page
    want = {raw.pop("__key__"): raw for raw in read_shard(str(shard))}
    found = {raw.pop("__key__"): raw for raw in read_shard(f"{out}/kept/000000.tar")}
    assert want.keys() <= found.keys() and len(want) == len(ODD)
    for key, raw in want.items():
        assert raw.keys() == {"__url__", "png", "txt", "", "_x", "json"}
        assert found[key] == raw | {"__url__": f"{out}/kept/000000.tar"}


@pytest.mark.parametrize(
    "words, said",
    [
        (["--drop", "kept: cosine < 0"], "--drop kept: ... is a reserved name"),
        ([x for n in range(61) for x in ("--drop", f"r{n}: cosine < 0")], "at most 60 rules"),
        (["--drop", "x: " + " + ".join(["cosine"] * 2000) + " < 0"], "more than 100 nested operations"),
        (["--drop", "x: cosine < quantile(cosine, " + "9" * 401 + ")"], "is not supported"),
        (["--drop", "x: " + "(" * 5000], "is not a rule"),
        (["--drop", "x: " + "cosine < 1 or " * 9000 + "cosine < 1"], "more than 20,000 characters"),
    ],
)
def test_a_rule_that_cannot_be_is_one_line(scored, capsys, words, said):
    error = fails(capsys, "select", scored, *words)
    assert said in error and len(error) < 600


def together(count: int, work, *arguments: object) -> None:
    """Processes that begin at one moment; all of them end well."""
    gate = FORK.Barrier(count)
    processes = [FORK.Process(target=_after, args=(gate, work, number, *arguments)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


def _after(gate, work, *arguments) -> None:
    one_thread()
    gate.wait(60)
    work(*arguments)


def _claim(number: int, folder: Path, seen: dict[int, tuple[int, int] | None]) -> None:
    for n in seen:
        with claimed(folder / f"{n}", seen[n]) as mine:
            if mine:
                time.sleep(0.002)
                with open(folder / "log", "a") as log:
                    log.write(f"{n}\n")
                (folder / f"{n}.new").write_text("x")
                os.replace(folder / f"{n}.new", folder / f"{n}")


def test_any_set_of_processes_does_each_part_once(tmp_path):
    (tmp_path / "3").write_text("broken")  # one process writes it again
    together(7, _claim, tmp_path, {n: stamp(tmp_path / f"{n}") for n in range(40)})
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(40))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*map(str, range(40)), "log"])
    assert (tmp_path / "3").read_text() == "x"


def test_what_a_killed_process_held_is_done_by_the_next(tmp_path):
    def die(number: int) -> None:
        claimed(tmp_path / "0", None).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=die, args=(0,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    together(2, _claim, tmp_path, dict.fromkeys(range(40)))
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(40))


def _score(number: int, urls: list[str], out: Path) -> None:
    scorer = make.scorer(urls, out)
    assert len([*made(scorer.missing(range(len(urls))), scorer.path, scorer.score)]) <= len(urls)


@pytest.mark.parametrize("locks", [True, False])
def test_a_loop_and_many_processes_write_the_same_bytes(scored, tmp_path, monkeypatch, locks):
    if not locks:
        monkeypatch.setattr(outputs.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no locks")))
    together(3, _score, sorted(map(str, (tmp_path / "shards").iterdir())), tmp_path / "many")
    names = sorted(path.name for path in (tmp_path / "many/scores").iterdir())
    assert names == sorted(path.name for path in (scored / "scores").iterdir())
    for name in names:
        assert (tmp_path / "many/scores" / name).read_bytes() == (scored / "scores" / name).read_bytes()
