#!/usr/bin/env python3
"""Build the shards of data/emoji from the npm packages that publish the drawings and the words.

    python scripts/corpora/build_emoji.py --out /tmp/emoji                      # all seven styles
    python scripts/corpora/build_emoji.py --out /tmp/emoji --style noto         # one of them
    python scripts/corpora/build_emoji.py --check data/emoji                    # rebuild, compare, keep nothing

Needs npm (or the packages' .tgz files under --packages), and `pip install resvg-py==0.5.0 pillow` (the extra
`corpora`). What is missing is said before any work starts. With resvg-py 0.5.0 and Pillow 13.0 the seven bundled files
come out byte for byte; another renderer or WebP encoder draws the edges a little differently, which --check measures.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# The versions the bundled shards were made from; npm keeps them.
STYLES = {
    "noto": "1.2.9",
    "noto-v1": "1.2.5",
    "twemoji": "1.2.5",
    "fluent-emoji-flat": "1.2.6",
    "fluent-emoji": "1.2.7",
    "emojione": "1.2.3",
    "fluent-emoji-high-contrast": "1.2.6",
}
WORDS_VERSION = "17.0.0"
RENDERER_VERSION = "0.5.0"
SIZE = 64
WEBP_QUALITY, WEBP_METHOD = 80, 6
SUFFIXES = ("webp", "txt", "json")
LEFT_OUT_GROUPS = ("component", "flags")


class Concept(NamedTuple):
    """What the Unicode CLDR says of one emoji: the captions of all its drawings."""

    hexcode: str
    name: str
    keywords: list[str]
    subgroup: str
    group: str


class BuildError(Exception):
    """Something is missing or does not fit; the text says what to do."""


# ------------------------------------------------------------------------------------------------- words


def read_concepts(data: list[dict[str, Any]], groups: dict[str, Any]) -> list[Concept]:
    """The concepts of emojibase's en/data.json in CLDR order, without flags, components and skin-tone variants.

    data: the list of emoji (skin tones are nested under `skins`, so reading the top level leaves them out); groups:
    meta/groups.json. A regional indicator has no group: it is a component too. A keyword that only repeats the name
    says nothing more and is dropped.
    """
    concepts = []
    for entry in sorted((e for e in data if "group" in e), key=lambda e: e["order"]):
        group = groups["groups"][str(entry["group"])]
        if group in LEFT_OUT_GROUPS:
            continue
        name = entry["label"]
        concepts.append(
            Concept(
                hexcode=entry["hexcode"].lower(),
                name=name,
                keywords=sorted(tag for tag in entry.get("tags", []) if tag != name.lower()),
                subgroup=groups["subgroups"][str(entry["subgroup"])].replace("-", " "),
                group=group.replace("-", " "),
            )
        )
    return concepts


# ---------------------------------------------------------------------------------------------- drawings


def slug(name: str) -> str:
    """The icon name made of a CLDR name: ASCII letters and digits joined by hyphens ("one o'clock" -> one-oclock)."""
    plain = unicodedata.normalize("NFKD", name.lower())
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"[’'“”.]", "", plain)).strip("-")


def find_icon(concept: Concept, icons: dict[str, Any], chars: dict[str, str]) -> str | None:
    """The name of a style's drawing of the concept, or None.

    By code point where the package has such a table (chars.json, written without the variation selector fe0f), else by
    name; icons.json holds `icons` and the `aliases` that point at them.
    """
    known = {**icons["icons"], **icons.get("aliases", {})}
    by_code = chars.get(concept.hexcode.replace("-fe0f", ""))
    return next((name for name in (by_code, slug(concept.name)) if name in known), None)


def icon_svg(name: str, icons: dict[str, Any]) -> str:
    """One icon as a complete SVG document; an alias takes its parent's drawing.

    An alias's hFlip is not followed: the bundled shards were drawn without it (data/emoji/README.md, known flaws), and
    this script rebuilds those.
    """
    while name not in icons["icons"]:
        name = icons["aliases"][name]["parent"]
    icon = icons["icons"][name]
    left, top = icon.get("left", 0), icon.get("top", 0)
    width, height = (icon.get(key, icons.get(key, 16)) for key in ("width", "height"))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}" width="{width}" height="{height}">{icon["body"]}</svg>'
    )


def render(svg: str) -> bytes:
    """An SVG in the middle of a white square as WebP, SIZE x SIZE RGB; its proportions are kept."""
    import resvg_py
    from PIL import Image

    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIZE, height=SIZE, skip_system_fonts=True))
    drawing = Image.open(io.BytesIO(png)).convert("RGBA")
    canvas = Image.new("RGBA", (SIZE, SIZE), "white")
    canvas.alpha_composite(drawing, ((SIZE - drawing.width) // 2, (SIZE - drawing.height) // 2))
    out = io.BytesIO()
    canvas.convert("RGB").save(out, "WEBP", quality=WEBP_QUALITY, method=WEBP_METHOD)
    return out.getvalue()


# ------------------------------------------------------------------------------------------------ shards


def samples(style: str, concepts: list[Concept], icons: dict[str, Any], chars: dict[str, str]) -> Iterator[dict]:
    """The samples of one style in CLDR order: {"key", "webp", "txt", "json"}, the last three as bytes."""
    for concept in concepts:
        icon = find_icon(concept, icons, chars)
        if icon is None:
            continue
        record = {**concept._asdict(), "style": style}
        yield {
            "key": f"{style}-{concept.hexcode}",
            "webp": render(icon_svg(icon, icons)),
            "txt": concept.name.encode(),
            "json": json.dumps(record, ensure_ascii=False).encode(),
        }


def write_shard(path: Path, rows: Iterator[dict]) -> int:
    """Write samples as a tar whose bytes depend on nothing but the samples (time 0, no owner); returns their number."""
    count = 0
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for row in rows:
            for suffix in SUFFIXES:
                info = tarfile.TarInfo(f"{row['key']}.{suffix}")
                info.size = len(row[suffix])
                tar.addfile(info, io.BytesIO(row[suffix]))
            count += 1
    return count


def read_shard(path: Path) -> dict[str, dict[str, bytes]]:
    """{key: {suffix: bytes}} of a shard, in its order."""
    rows: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, suffix = member.name.split(".", 1)
            content = tar.extractfile(member)
            rows.setdefault(key, {})[suffix] = content.read() if content else b""
    return rows


# ------------------------------------------------------------------------------------------------- check


def pixel_difference(a: bytes, b: bytes) -> tuple[float, int]:
    """Mean and maximum absolute difference of two pictures of one size, in steps of 8-bit RGB."""
    from PIL import Image, ImageChops, ImageStat

    difference = ImageChops.difference(*(Image.open(io.BytesIO(x)).convert("RGB") for x in (a, b)))
    statistics = ImageStat.Stat(difference)
    return sum(statistics.mean) / 3, max(int(high) for _, high in statistics.extrema)


def compare(built: Path, wanted: Path) -> tuple[bool, str]:
    """Whether two shards hold the same keys, captions and annotations, and one line on that and on their pictures.

    Pictures are measured, not judged: another renderer or WebP encoder draws edges a little differently.
    """
    ours, theirs = read_shard(built), read_shard(wanted)
    if list(ours) != list(theirs):
        lost, new = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
        return False, f"{len(lost)} samples lost {lost[:5]}, {len(new)} new {new[:5]}, or another order"
    unlike = {s: sum(ours[k].get(s) != theirs[k].get(s) for k in ours) for s in SUFFIXES}
    text = f"{len(ours)} samples, differ: " + ", ".join(f"{unlike[s]} {s}" for s in ("txt", "json", "webp"))
    if unlike["webp"]:
        pairs = [pixel_difference(ours[k]["webp"], theirs[k]["webp"]) for k in ours]
        means, highest = zip(*pairs)
        text += f" (of 255: mean {sum(means) / len(means):.3f}, worst picture {max(means):.2f}, max {max(highest)})"
    same = built.read_bytes() == wanted.read_bytes()
    return not (unlike["txt"] or unlike["json"]), text + (", the files are equal byte for byte" if same else "")


# ---------------------------------------------------------------------------------------------- packages


def package_names(styles: list[str]) -> list[str]:
    """What npm is asked for."""
    return [f"emojibase-data@{WORDS_VERSION}", *(f"@iconify-json/{s}@{STYLES[s]}" for s in styles)]


def tarball_name(package: str) -> str:
    """The file `npm pack` makes of a package: @iconify-json/noto@1.2.9 -> iconify-json-noto-1.2.9.tgz."""
    name, version = package.lstrip("@").rsplit("@", 1)
    return f"{name.replace('/', '-')}-{version}.tgz"


def missing_tools(packages: list[str], folder: Path) -> list[str]:
    """Everything that would stop the build, each with its remedy."""
    problems = []
    absent = [p for p in packages if not (folder / tarball_name(p)).is_file()]
    if absent and shutil.which("npm") is None:
        problems.append(
            f"npm is not on PATH: install Node.js (apt-get install npm), or run `npm pack {' '.join(absent)}` where it "
            "is and give the folder of the .tgz files as --packages"
        )
    try:
        import resvg_py  # noqa: F401
    except ImportError as error:
        problems.append(f"no SVG renderer ({error}): pip install resvg-py=={RENDERER_VERSION}")
    try:
        from PIL import features

        if not features.check("webp"):
            problems.append("this Pillow cannot write WebP: pip install --force-reinstall pillow (its wheels can)")
    except ImportError:
        problems.append("Pillow is not installed: pip install pillow")
    return problems


def fetch(packages: list[str], folder: Path) -> None:
    """`npm pack` the packages that are not in the folder yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        if (folder / tarball_name(package)).is_file():
            continue
        print(f"npm pack {package}", flush=True)
        done = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode or not (folder / tarball_name(package)).is_file():
            raise BuildError(f"npm pack {package} failed ({done.returncode}): {done.stderr.strip()[-500:]}")


def package_json(folder: Path, package: str, path: str) -> Any:
    """One JSON file out of a package's tarball."""
    tarball = folder / tarball_name(package)
    try:
        with tarfile.open(tarball) as tar:
            content = tar.extractfile(f"package/{path}")
            return json.load(content) if content else {}
    except (KeyError, tarfile.TarError, EOFError, json.JSONDecodeError) as error:
        raise BuildError(f"cannot read {path} in {tarball}: {error}; delete the file to fetch it again") from error


# --------------------------------------------------------------------------------------------- programme


def build(styles: list[str], packages: Path, out: Path) -> None:
    """Write one shard per style into `out`."""
    words, *drawings = package_names(styles)
    concepts = read_concepts(
        package_json(packages, words, "en/data.json"), package_json(packages, words, "meta/groups.json")
    )
    out.mkdir(parents=True, exist_ok=True)
    for style, package in zip(styles, drawings):
        icons, chars = (package_json(packages, package, f"{name}.json") for name in ("icons", "chars"))
        # Through a file of another name, so that an interrupted run leaves no half shard behind.
        part = out / f"{style}.tar.part"
        count = write_shard(part, samples(style, concepts, icons, chars))
        part.replace(out / f"{style}.tar")
        print(f"{style}.tar: {count} samples", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the shards")
    parser.add_argument("--style", action="append", choices=list(STYLES), help="a style, repeatable; default: all")
    parser.add_argument("--packages", type=Path, help="folder of the packages' .tgz files; missing ones are fetched")
    parser.add_argument("--check", type=Path, help="folder of shards to compare with; fails if texts or keys differ")
    args = parser.parse_args(argv)
    if args.out is None and args.check is None:
        parser.error("nothing to do: give --out FOLDER to write shards, --check data/emoji to compare, or both")
    if args.out is not None and args.check is not None and args.out.resolve() == args.check.resolve():
        parser.error(f"--out {args.out} would overwrite the shards to compare with: give another folder, or no --out")
    return args


def main(argv: list[str] | None = None) -> int:
    """Build, compare; 0 if all is well, 1 if shards differ in more than pictures, 2 if something is missing."""
    args = parse(argv)
    styles = args.style or list(STYLES)
    with tempfile.TemporaryDirectory() as scratch:
        packages, out = args.packages or Path(scratch, "packages"), args.out or Path(scratch, "shards")
        problems = missing_tools(package_names(styles), packages)
        if args.check is not None:
            absent = [str(args.check / f"{s}.tar") for s in styles if not (args.check / f"{s}.tar").is_file()]
            problems += [f"--check wants {path}, which does not exist" for path in absent]
        if problems:
            print("cannot build the corpus:\n- " + "\n- ".join(problems), file=sys.stderr)
            return 2
        try:
            fetch(package_names(styles), packages)
            build(styles, packages, out)
        except BuildError as error:
            print(error, file=sys.stderr)
            return 2
        if args.check is None:
            return 0
        verdicts = [compare(out / f"{s}.tar", args.check / f"{s}.tar") for s in styles]
        for style, (_, line) in zip(styles, verdicts):
            print(f"check {style}: {line}")
        return 0 if all(equal for equal, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
