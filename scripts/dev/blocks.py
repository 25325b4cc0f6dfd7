#!/usr/bin/env python
"""Run the blocks of README, docs/start.md and docs/guides, and refresh the output that the pages show.

    python scripts/dev/blocks.py docs/start.md            run a page and print where its output differs
    python scripts/dev/blocks.py --write                  write the output into every page (first: make demo)

A block is ```bash or ```python. The ```text block that follows is its output, in which a line `...` replaces any
number of lines. The blocks of a page run in order in one folder that resembles a clone, with `data`, `scripts`,
`slurm`, a finished `runs/demo`, and small inputs (`make_inputs`). A comment above a block changes how it runs:

    <!-- run: slow -->       in slow tests only
    <!-- run: serve -->      starts a server: wait for its address, then stop it (also: serve, slow)
    <!-- run: no, REASON --> not at all; its flags are still checked

`<!-- setup` (or `<!-- setup slow`), commands and `-->` run commands that the page does not show. A small CLIP replaces
weights that must be downloaded (REPLACED).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Text of a page -> its replacement, because weights need a download or the model of the tests is at chance.
REPLACED = {
    "--model ViT-B-32 --pretrained openai": "--model local-dir:clip",
    "--model ViT-B-16-SigLIP2 --pretrained webli": "--model local-dir:clip",
    '"ViT-B-32", pretrained="openai"': '"local-dir:clip"',
    '"ViT-B-32", "openai"': '"local-dir:clip"',
    "prolip curate select ": "prolip curate select --yes ",  # the stand-in of the tests is at chance
}
#: Programs that change the machine or need a cluster: their lines are read, not run.
NOT_RUN = {"make", "pip", "git", "sbatch", "srun", "squeue", "scancel", "apt-get", "docker", ".", "source", "export"}
SHELL = re.compile(r"[|<>;&$*]")
BLOCK = re.compile(
    r"^(?:<!-- setup(?P<late> slow)?\n(?P<setup>.*?)^-->\n)|"
    r"^(?:<!-- run: (?P<mark>.*?) -->\n)?^```(?P<kind>bash|python)\n(?P<code>.*?)^```$"
    r"(?:\s*^```text\n(?P<said>.*?)^```$)?",
    re.S | re.M,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a page: its code, how it runs, and the place of its output in the page's text."""

    kind: str  # bash or python
    code: str
    mark: str = ""
    said: str | None = None  # the output that the page shows
    place: tuple[int, int] = (0, 0)

    @property
    def runs(self) -> bool:
        return not self.mark.startswith("no")

    @property
    def slow(self) -> bool:
        return "slow" in self.mark


def pages() -> list[Path]:
    """Return README, the start page and the guides."""
    return [ROOT / "README.md", ROOT / "docs/start.md", *sorted((ROOT / "docs/guides").glob("*.md"))]


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page in order."""
    return [
        Block("bash", match["setup"], (match["late"] or "").strip())
        if match["setup"] is not None
        else Block(match["kind"], match["code"], match["mark"] or "", match["said"], match.span("said"))
        for match in BLOCK.finditer(text)
    ]


def lines_of(code: str) -> Iterator[str]:
    """Yield the command lines of a bash block, with continued lines joined and without comments."""
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        words = re.sub(r"(^|\s)#.*", "", line).strip()
        if words:
            yield words


def placed(source: str, target: str) -> None:
    """Copy a file. A large one, which commands replace but never change, becomes a hard link if possible."""
    try:
        if os.path.getsize(source) > 1e6:
            os.link(os.path.realpath(source), target)  # a model's files may not be symbolic links
            return
    except OSError:  # another disk
        pass
    shutil.copy2(source, target)


class Sandbox:
    """A folder that resembles a clone after `make demo`, in which the blocks of a page run."""

    def __init__(self, folder: Path, inputs: Path, demo: Path):
        """Build the folder. inputs: a folder by `make_inputs`; demo: a finished run."""
        self.folder, self.names = folder, dict[str, Any]()
        shutil.copytree(inputs, folder, dirs_exist_ok=True)
        for name in ("data", "scripts", "slurm"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "runs").mkdir()
        shutil.copytree(demo, folder / "runs/demo", copy_function=placed)

    def run(self, block: Block) -> str:
        """Run a block and return what it prints. RuntimeError, with the output, for a command that fails."""
        code = block.code
        for shown, small in REPLACED.items():
            code = code.replace(shown, small)
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            if block.kind == "python":
                return self.printed(lambda: exec(code, self.names), code)
            return "".join(self.command(line, "serve" in block.mark) for line in lines_of(code))
        finally:
            os.chdir(before)

    def command(self, line: str, serve: bool) -> str:
        first = shlex.split(line, comments=True)
        while first and re.match(r"[A-Z_]+=", first[0]):
            first = first[1:]
        if not first or first[0] in NOT_RUN:
            return ""
        if serve:
            return self.served(line)
        if first[0] == "prolip" and not SHELL.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", line)):
            from prolip.cli.main import main

            return self.printed(lambda: main(first[1:]), line)
        return self.shell(line)

    def printed(self, run: Any, name: str) -> str:
        """Return the output of a call on both streams. RuntimeError if it fails."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                code = run()
            except SystemExit as end:
                code = end.code
            except Exception:
                traceback.print_exc(file=out)
                code = 1
        if code:
            raise RuntimeError(f"{name}\nended with {code}:\n{out.getvalue()[-3000:]}")
        return self.plain(out.getvalue())

    def shell(self, line: str) -> str:
        done = subprocess.run(["bash", "-c", line], env=self.env(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{line}\nended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        return self.plain(done.stdout + done.stderr)

    def served(self, line: str) -> str:
        """Start a server on a free port, return its output up to its address, and stop it."""
        free = f"exec {line} --port 0" if line.startswith("prolip ") else f"exec {line}"
        with subprocess.Popen(
            ["bash", "-c", free], env=self.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            said = []
            for printed in process.stdout or ():
                said.append(printed)
                if "http://" in printed:
                    break
            process.terminate()
        if not any("http://" in printed for printed in said):
            raise RuntimeError(f"{line}\nprinted no address:\n{''.join(said)[-3000:]}")
        return self.plain("".join(said))

    def env(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
        }

    def plain(self, text: str) -> str:
        """Return output without this folder's path, colours and overwritten lines."""
        text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).replace(f"{self.folder.resolve()}/", "")
        text = text.replace(f"{ROOT}/", "")
        return "".join(line.rpartition("\r")[2] for line in text.splitlines(keepends=True))


def words_of(text: str) -> set[str]:
    """Return the words of an output that do not depend on the model: no numbers, quoted text or counts in words."""
    text = re.sub(
        r"\babout 1 in\b|\bnearly all\b|\babout \d+ of \d+\b", " ", re.sub(r"'[^'\n]*'|\"[^\"\n]*\"", " ", text)
    )
    return {word for word in re.findall(r"\S+", text) if re.fullmatch(r"[(]?[A-Za-z][A-Za-z_@/-]*[:,;.)]?", word)}


def missing_words(block: Block, printed: str) -> set[str]:
    """Return words of the page's output that are neither in the printed output nor in the code."""
    strip = "(:,;.)"
    there = {word.strip(strip) for word in words_of(printed) | set(re.findall(r"[A-Za-z_@/-]+", block.code))}
    return {word.strip(strip) for word in words_of(block.said or "")} - there


def shortened(printed: str, shown: str) -> str:
    """Shorten an output to as many first and last lines as the page shows around its `...`."""
    new, old = printed.rstrip("\n").splitlines(), shown.rstrip("\n").splitlines()
    if "..." not in old:
        return "".join(f"{line.rstrip()}\n" for line in new)
    head, tail = old.index("..."), len(old) - 1 - old[::-1].index("...")
    after = len(old) - 1 - tail
    kept = [*new[:head], "...", *(new[-after:] if after else [])]
    return "".join(f"{line.rstrip()}\n" for line in kept)


def drawings(count: int) -> list[tuple[bytes, dict[str, str]]]:
    """Return drawings of the demo's test designer as WebP, with their fields."""
    found = []
    with tarfile.open(ROOT / "data/emoji/emojione.tar") as tar:
        for member in tar:
            if member.name.endswith(".json"):
                fields = json.loads(tar.extractfile(member).read())  # type: ignore[union-attr]
                if fields["group"] in ("animals nature", "food drink"):
                    image = tar.extractfile(member.name.removesuffix("json") + "webp").read()  # type: ignore[union-attr]
                    found.append((image, fields))
    return found[:: len(found) // count][:count]


def make_inputs(folder: Path) -> Path:
    """Write a user's small data: 60 images in every form that the pages name.

    photos/01.png ... with captions.csv (image, caption); classes/CLASS/01.png; pairs.parquet; shards/0000.tar and
    0001.tar; crawl/ as shards, with ten wrong captions; dataset_coco.json and coco/; clip/: a small CLIP of OpenCLIP's.
    """
    from PIL import Image

    for name in ("photos", "shards", "crawl", "coco/val2014"):
        (folder / name).mkdir(parents=True)
    rows, coco = [], []
    for number, (webp, fields) in enumerate(drawings(60), 1):
        name, out = f"{number:02d}", io.BytesIO()
        Image.open(io.BytesIO(webp)).convert("RGBA").resize((96, 96)).save(out, "PNG")
        place = folder / "classes" / fields["subgroup"].replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        for path in (folder / f"photos/{name}.png", place / f"{name}.png", folder / f"coco/val2014/{name}.png"):
            path.write_bytes(out.getvalue())
        caption = f"a drawing of a {fields['name']}"
        rows.append((name, out.getvalue(), caption, fields["subgroup"]))
        said = [caption, fields["name"], f"a {fields['name']}", f"one {fields['name']}", f"the {fields['name']}"]
        split = "train" if number <= 40 else "val" if number <= 50 else "test"
        sentences = [{"raw": text, "sentid": 5 * number + i} for i, text in enumerate(said)]
        named = {"filepath": "val2014", "filename": f"{name}.png", "cocoid": number, "imgid": number}
        coco.append(named | {"split": split, "sentences": sentences})
    write_tables(folder, rows)
    (folder / "dataset_coco.json").write_text(json.dumps({"dataset": "coco", "images": coco}), encoding="utf-8")
    write_clip(folder / "clip")
    return folder


def write_tables(folder: Path, rows: list[tuple[str, bytes, str, str]]) -> None:
    """Write the rows as a CSV, as Parquet, and as shards, once with wrong captions."""
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    with (folder / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["image", "caption"], *((f"photos/{n}.png", text) for n, _, text, _ in rows)])
    table = [{"image": {"bytes": image, "path": None}, "caption": text, "label": kind} for _, image, text, kind in rows]
    pq.write_table(pa.Table.from_pylist(table), folder / "pairs.parquet")
    for part, wrong in (("shards", 0), ("crawl", 10)):
        captions = [text for _, _, text, _ in rows]
        captions[:wrong] = [*captions[1:wrong], *captions[:1]][:wrong]
        for shard in range(2):
            with tarfile.open(folder / part / f"{shard:04d}.tar", "w") as tar:
                for (name, image, _, kind), text in list(zip(rows, captions, strict=True))[shard::2]:
                    fields = json.dumps({"name": text, "subgroup": kind}).encode()
                    for end, data in (("png", image), ("txt", text.encode()), ("json", fields)):
                        info = tarfile.TarInfo(f"{name}.{end}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))


def write_clip(folder: Path) -> None:
    """Write a small random CLIP in OpenCLIP's format."""
    import open_clip
    import torch
    from safetensors.torch import save_file

    vision = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16}
    text = {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    folder.mkdir()
    torch.manual_seed(1)
    model = open_clip.CLIP(**config)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    saved = {"model_cfg": config, "preprocess_cfg": {"mean": mean, "std": std}}
    (folder / "open_clip_config.json").write_text(json.dumps(saved), encoding="utf-8")


def refresh(path: Path, inputs: Path, demo: Path, write: bool) -> int:
    """Run a page, and print or write differences. Return the number of blocks that failed or differ."""
    text, wrong, parts, done = path.read_text(encoding="utf-8"), 0, [], 0
    with tempfile.TemporaryDirectory() as scratch:
        sandbox = Sandbox(Path(scratch), inputs, demo)
        for block in blocks_of(text):
            if not block.runs:
                continue
            try:
                printed = sandbox.run(block)
            except RuntimeError as error:
                print(f"{path.name}: {error}")
                wrong += 1
                continue
            if block.said is not None and (new := shortened(printed, block.said)) != block.said:
                wrong += not write
                print(f"{path.name}: {block.code.splitlines()[0]} prints\n{new}")
                parts += [text[done : block.place[0]], new]
                done = block.place[1]
    if write and parts:
        path.write_text("".join([*parts, text[done:]]), encoding="utf-8")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages to run (default: README, start and all guides)")
    parser.add_argument("--write", action="store_true", help="write the printed output into the pages")
    parser.add_argument("--demo", type=Path, default=ROOT / "runs/demo", help="the finished run to use")
    args = parser.parse_args()
    if not (args.demo / "model").is_dir():
        parser.error(f"{args.demo} holds no finished run. Train it with `make demo`, or give one with --demo")
    with tempfile.TemporaryDirectory() as scratch:
        inputs = make_inputs(Path(scratch) / "inputs")
        return min(
            1, sum(refresh(path.resolve(), inputs, args.demo.resolve(), args.write) for path in args.pages or pages())
        )


if __name__ == "__main__":
    sys.exit(main())
