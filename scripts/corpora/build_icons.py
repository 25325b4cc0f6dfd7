#!/usr/bin/env python3
"""Build a corpus of icons, laid out as data/emoji is, from the npm packages of six free icon sets.

    python scripts/corpora/build_icons.py                                        # all styles, into data/icons
    python scripts/corpora/build_icons.py --out /tmp/icons --style tabler        # one of them, with the same texts
    python scripts/corpora/build_icons.py --check data/icons                     # rebuild, compare, keep nothing

Needs npm (or the packages' .tgz files under --packages), and `pip install resvg-py==0.5.0 pillow` (the extra
`corpora`). The script first reports everything that is missing. icon_joins.py decides which icons are one concept.
docs/developing/corpora.md describes the result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "scripts") not in sys.path:
    sys.path.insert(0, str(ROOT / "scripts"))

from corpora.build_emoji import BuildError, compare, fetch, missing_tools, render, write_shard
from corpora.icon_categories import UNCATEGORISED
from corpora.icon_concepts import Concept, concepts_of
from corpora.icon_joins import Icon
from corpora.icon_sets import PACKAGES, STYLES, read_sets

SHARD_SIZE = 10_000
REPORT_EVERY = 1000
TITLE = "# Icons of six free sets, annotated as data/emoji is"
Row = tuple[Concept, Icon]

# ------------------------------------------------------------------------------------------------ shards


def plan(icons: Iterable[Icon], concepts: dict[str, Concept]) -> dict[str, list[Row]]:
    """Return {style: its drawings by concept}, with the first drawing of each concept in a style."""
    chosen: dict[tuple[str, str], Row] = {}
    for item in icons:
        concept = concepts[item.name]
        chosen.setdefault((item.style, concept.hexcode), (concept, item))
    out: dict[str, list[Row]] = {style: [] for style in STYLES}
    for (style, _), row in sorted(chosen.items(), key=lambda entry: entry[0]):
        out[style].append(row)
    return out


def shards_of(rows: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Return {file: its drawings}: a file per style, or several numbered ones of at most SHARD_SIZE drawings."""
    out = {}
    for style, drawings in rows.items():
        parts = [drawings[start : start + SHARD_SIZE] for start in range(0, len(drawings), SHARD_SIZE)] or [[]]
        for i, part in enumerate(parts):
            out[f"{style}.tar" if len(parts) == 1 else f"{style}-{i:02d}.tar"] = part
    return out


def samples(rows: list[Row], pictures: Iterator[bytes], label: str) -> Iterator[dict]:
    """Yield samples like build_emoji.samples, and print progress."""
    for done, ((concept, item), picture) in enumerate(zip(rows, pictures), start=1):
        record = {**concept._asdict(), "style": item.style}
        yield {
            "key": f"{item.style}-{concept.hexcode}",
            "webp": picture,
            "txt": concept.name.encode(),
            "json": json.dumps(record, ensure_ascii=False).encode(),
        }
        if done % REPORT_EVERY == 0:
            print(f"{label}: {done} of {len(rows)}", flush=True)


def draw(svg: str) -> bytes:
    """Render one image. BuildError quotes a drawing that the renderer refuses."""
    try:
        return render(svg)
    except ValueError as error:
        raise BuildError(f"cannot draw {svg[:200]!r}: {error}") from error


@contextmanager
def renderer(jobs: int) -> Iterator[Callable[[list[str]], Iterator[bytes]]]:
    """Yield a function that draws SVGs in order, in `jobs` processes; the bytes do not depend on their number."""
    if jobs == 1:
        yield lambda svgs: map(draw, svgs)
        return
    # Spawned, because not every system forks, and the start takes a second. Only the parent handles Ctrl-C.
    interrupts = (signal.SIGINT, signal.SIG_IGN)
    with multiprocessing.get_context("spawn").Pool(jobs, signal.signal, interrupts) as pool:
        yield lambda svgs: pool.imap(draw, svgs, chunksize=32)


def make_ready(out: Path, names: Iterable[str]) -> None:
    """Create the folder without unfinished files. Raise BuildError for foreign files that would look like ours."""
    out.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in out.glob("*.tar") if path.name not in set(names))
    if others:
        raise BuildError(
            f"{out} holds {', '.join(others)}, not written by this build, so perhaps with other texts. "
            "Delete them, or give another --out"
        )
    readme = out / "README.md"
    if readme.exists() and not readme.read_text(encoding="utf-8", errors="replace").startswith(TITLE):
        raise BuildError(f"{readme} belongs to no icon corpus and would be overwritten. Give another --out")
    delete_unfinished(out)


def delete_unfinished(out: Path) -> None:
    """Delete the files of an interrupted build."""
    for unfinished in out.glob("*.tar.part"):
        unfinished.unlink()


def write_shards(out: Path, shards: dict[str, list[Row]], drawn: Callable) -> None:
    """Write {file: its drawings}.

    They are renamed when all are complete: a killed build leaves the old shards, or none, never an incomplete one or a
    mix of old and new.
    """
    for name, rows in shards.items():
        unfinished = out / f"{name}.part"
        count = write_shard(unfinished, samples(rows, drawn([item.svg for _, item in rows]), name))
        print(f"{name}: {count} drawings, sha256 {hashlib.sha256(unfinished.read_bytes()).hexdigest()}", flush=True)
    for name in shards:
        (out / f"{name}.part").replace(out / name)


def write_notes(out: Path, shards: dict[str, list[Row]], licences: dict[str, bytes]) -> None:
    """Write README.md and the licences of the sets next to the shards."""
    (out / "LICENSES").mkdir(exist_ok=True)
    table = []
    for name, rows in shards.items():
        key = next(key for key, package in PACKAGES.items() if re.sub(r"(-\d\d)?\.tar$", "", name) in package.styles)
        (out / "LICENSES" / f"{key}.txt").write_bytes(licences[key])
        package = PACKAGES[key]
        table.append(f"| {name} | {len(rows)} | {package.spec} | {package.licence} | LICENSES/{key}.txt |")
    concepts = {concept.hexcode for rows in shards.values() for concept, _ in rows}
    (out / "README.md").write_text(
        f"{TITLE}\n\n"
        f"Made by scripts/corpora/build_icons.py: {sum(map(len, shards.values()))} drawings"
        f" of {len(concepts)} concepts. "
        "The texts are the sets' own names, tags, aliases and categories.\n\n"
        "| shard | drawings | npm package | licence | text |\n|---|---|---|---|---|\n" + "\n".join(table) + "\n",
        encoding="utf-8",
    )


# ----------------------------------------------------------------------------------------------- program


def build(styles: list[str], packages: Path, out: Path, jobs: int) -> list[str]:
    """Write the shards of the styles with licences and README.md into `out`. Return the shards' names."""
    icons, licences = read_sets(packages)
    concepts = concepts_of(icons)
    planned = plan(icons, concepts)
    shards = shards_of({style: planned[style] for style in styles})
    make_ready(out, shards)
    report(icons, concepts, sum(map(len, planned.values())))
    try:
        with renderer(jobs) as drawn:
            write_shards(out, shards, drawn)
    finally:
        delete_unfinished(out)
    write_notes(out, shards, licences)
    return list(shards)


def report(icons: list[Icon], concepts: dict[str, Concept], drawn: int) -> None:
    """Print the totals of all sets."""
    sets = defaultdict(set)
    for item in icons:
        sets[concepts[item.name].hexcode].add(item.package)
    uncategorised = {concept.hexcode for concept in concepts.values() if concept.group == UNCATEGORISED}
    print(
        f"{drawn} drawings of {len(sets)} concepts, {sum(len(of) > 1 for of in sets.values())} of them drawn by "
        f"several sets; {len(concepts) - len(sets)} names joined with others, {len(uncategorised)} concepts "
        f"uncategorised; {len(icons) - drawn} drawings omitted, as second of their style and concept",
        flush=True,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the shards; default: data/icons, none with --check")
    parser.add_argument("--style", action="append", choices=STYLES, help="a style, repeatable; default: all")
    parser.add_argument("--packages", type=Path, help="folder of the packages' .tgz files; missing ones are fetched")
    parser.add_argument("--check", type=Path, help="folder of shards to compare with; fails if texts or keys differ")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that draw; default: all cores")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: give 1 or more")
    if args.out is None and args.check is None:
        args.out = ROOT / "data/icons"
    if args.out is not None and args.check is not None and args.out.resolve() == args.check.resolve():
        parser.error(f"--out {args.out} would overwrite the shards to compare with. Give another folder, or no --out")
    return args


def compare_all(names: list[str], built: Path, wanted: Path) -> int:
    """Print how each shard differs from the expected one. Return 0 if keys and texts are equal, else 1."""
    verdicts = []
    for name in names:
        there = (wanted / name).is_file()
        equal, line = compare(built / name, wanted / name) if there else (False, f"{wanted / name} does not exist")
        print(f"check {name}: {line}")
        verdicts.append(equal)
    return 0 if all(verdicts) else 1


def main(argv: list[str] | None = None) -> int:
    """Build and compare. Return 0, 1 if shards differ in more than images, or 2 if something is missing."""
    args = parse(argv)
    specs = [package.spec for package in PACKAGES.values()]  # all sets, because they share the texts
    with tempfile.TemporaryDirectory() as scratch:
        packages, out = args.packages or Path(scratch, "packages"), args.out or Path(scratch, "shards")
        problems = missing_tools(specs, packages)
        if args.check is not None and not args.check.is_dir():
            problems.append(f"---check needs the folder {args.check}, which does not exist")
        if problems:
            print("cannot build the corpus:\n- " + "\n- ".join(problems), file=sys.stderr)
            return 2
        try:
            fetch(specs, packages)
            names = build(args.style or STYLES, packages, out, args.jobs)
        except (BuildError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        return 0 if args.check is None else compare_all(names, out, args.check)


if __name__ == "__main__":
    sys.exit(main())
