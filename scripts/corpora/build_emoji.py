#!/usr/bin/env python3
"""Build the shards of data/emoji from the npm packages that publish the drawings and the words.

    python scripts/corpora/build_emoji.py --out /tmp/emoji                      # all seven styles
    python scripts/corpora/build_emoji.py --out /tmp/emoji --style noto         # one of them
    python scripts/corpora/build_emoji.py --check data/emoji                    # rebuild, compare, keep nothing

Needs npm (or the packages' .tgz files under --packages), and `pip install resvg-py==0.5.0 pillow` (the extra
`corpora`). The script first reports everything that is missing. With resvg-py 0.5.0 and Pillow 13.0 it reproduces the
seven bundled files byte for byte. Another renderer or WebP encoder draws edges slightly differently; --check measures
the difference.
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

# The versions of the bundled shards; npm keeps them.
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
    """The texts of one emoji in the Unicode CLDR: the captions of all its drawings."""

    hexcode: str
    name: str
    keywords: list[str]
    subgroup: str
    group: str


class BuildError(Exception):
    """Something is missing or inconsistent; the message says what to do."""


# ------------------------------------------------------------------------------------------------- words


def read_concepts(data: list[dict[str, Any]], groups: dict[str, Any]) -> list[Concept]:
    """Return the concepts of emojibase's en/data.json in CLDR order, without flags, components and skin-tone variants.

    data: the list of emoji (skin tones are nested under `skins`, so the top level omits them); groups:
    meta/groups.json. A regional indicator has no group: it is a component too. A keyword equal to the name is dropped.
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
    """Return the icon name of a CLDR name: ASCII letters and digits joined by hyphens ("one o'clock" -> one-oclock)."""
    plain = unicodedata.normalize("NFKD", name.lower())
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"[’'“”.]", "", plain)).strip("-")


def find_icon(concept: Concept, icons: dict[str, Any], chars: dict[str, str]) -> str | None:
    """Return the name of a style's drawing of the concept, or None.

    The search is by code point if the package has such a table (chars.json, without the variation selector fe0f), else
    by name; icons.json holds `icons` and the `aliases` that point at them.
    """
    known = {**icons["icons"], **icons.get("aliases", {})}
    by_code = chars.get(concept.hexcode.replace("-fe0f", ""))
    return next((name for name in (by_code, slug(concept.name)) if name in known), None)


def icon_svg(name: str, icons: dict[str, Any]) -> str:
    """Return one icon as a complete SVG document; an alias takes its parent's drawing.

    An alias's hFlip is ignored, because the bundled shards were drawn without it (data/emoji/README.md, known flaw).
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
    """Render an SVG in the middle of a white square as WebP, SIZE x SIZE RGB, with its proportions."""
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
    """Yield the samples of one style in CLDR order: {"key", "webp", "txt", "json"}, the last three as bytes."""
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
    """Write samples as a tar whose bytes depend only on the samples (time 0, no owner). Return their number."""
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
    """Read {key: {suffix: bytes}} from a shard, in its order."""
    rows: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, suffix = member.name.split(".", 1)
            content = tar.extractfile(member)
            rows.setdefault(key, {})[suffix] = content.read() if content else b""
    return rows


# ------------------------------------------------------------------------------------------------- check


def pixel_difference(a: bytes, b: bytes) -> tuple[float, int]:
    """Return the mean and maximum absolute difference of two images of one size, in levels of 8-bit RGB."""
    from PIL import Image, ImageChops, ImageStat

    difference = ImageChops.difference(*(Image.open(io.BytesIO(x)).convert("RGB") for x in (a, b)))
    statistics = ImageStat.Stat(difference)
    return sum(statistics.mean) / 3, max(int(high) for _, high in statistics.extrema)


def compare(built: Path, wanted: Path) -> tuple[bool, str]:
    """Return whether two shards hold the same keys, captions and annotations, and one line on that and on their images.

    Images are measured, not judged: another renderer or WebP encoder draws edges slightly differently.
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
        text += f" (of 255: mean {sum(means) / len(means):.3f}, worst image {max(means):.2f}, max {max(highest)})"
    same = built.read_bytes() == wanted.read_bytes()
    return not (unlike["txt"] or unlike["json"]), text + (", the files are equal byte for byte" if same else "")


# ---------------------------------------------------------------------------------------------- packages


def package_names(styles: list[str]) -> list[str]:
    """Return the names of the npm packages to fetch."""
    return [f"emojibase-data@{WORDS_VERSION}", *(f"@iconify-json/{s}@{STYLES[s]}" for s in styles)]


def tarball_name(package: str) -> str:
    """Return the file name of `npm pack` for a package: @iconify-json/noto@1.2.9 -> iconify-json-noto-1.2.9.tgz."""
    name, version = package.lstrip("@").rsplit("@", 1)
    return f"{name.replace('/', '-')}-{version}.tgz"


def missing_tools(packages: list[str], folder: Path) -> list[str]:
    """List everything that would stop the build, each with its remedy."""
    problems = []
    absent = [p for p in packages if not (folder / tarball_name(p)).is_file()]
    if absent and shutil.which("npm") is None:
        problems.append(
            f"npm is not on PATH: install Node.js (apt-get install npm), or run `npm pack {' '.join(absent)}` "
            "elsewhere and give the folder of the .tgz files as --packages"
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
    """Run `npm pack` for the packages that are missing in the folder."""
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
    """Read one JSON file from a package's tarball."""
    tarball = folder / tarball_name(package)
    try:
        with tarfile.open(tarball) as tar:
            content = tar.extractfile(f"package/{path}")
            return json.load(content) if content else {}
    except (KeyError, tarfile.TarError, EOFError, json.JSONDecodeError) as error:
        raise BuildError(f"cannot read {path} in {tarball}: {error}; delete the file to fetch it again") from error


# ----------------------------------------------------------------------------------------------- program


def build(styles: list[str], packages: Path, out: Path) -> None:
    """Write one shard per style into `out`."""
    words, *drawings = package_names(styles)
    concepts = read_concepts(
        package_json(packages, words, "en/data.json"), package_json(packages, words, "meta/groups.json")
    )
    out.mkdir(parents=True, exist_ok=True)
    for style, package in zip(styles, drawings):
        icons, chars = (package_json(packages, package, f"{name}.json") for name in ("icons", "chars"))
        # Write to a temporary name, so that an interrupted run leaves no incomplete shard.
        part = out / f"{style}.tar.part"
        count = write_shard(part, samples(style, concepts, icons, chars))
        part.replace(out / f"{style}.tar")
        print(f"{style}.tar: {count} samples", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the shards")
    parser.add_argument("--style", action="append", choices=list(STYLES), help="a style, repeatable; default: all")
    parser.add_argument("--packages", type=Path, help="folder of the packages' .tgz files; missing ones are fetched")
    parser.add_argument("--check", type=Path, help="folder of shards to compare with; fails if texts or keys differ")
    args = parser.parse_args(argv)
    if args.out is None and args.check is None:
        parser.error("nothing to do. Give --out FOLDER to write shards, --check data/emoji to compare, or both")
    if args.out is not None and args.check is not None and args.out.resolve() == args.check.resolve():
        parser.error(f"--out {args.out} would overwrite the shards to compare with. Give another folder, or no --out")
    return args


def main(argv: list[str] | None = None) -> int:
    """Build and compare. Return 0, 1 if shards differ in more than images, or 2 if something is missing."""
    args = parse(argv)
    styles = args.style or list(STYLES)
    with tempfile.TemporaryDirectory() as scratch:
        packages, out = args.packages or Path(scratch, "packages"), args.out or Path(scratch, "shards")
        problems = missing_tools(package_names(styles), packages)
        if args.check is not None:
            absent = [str(args.check / f"{s}.tar") for s in styles if not (args.check / f"{s}.tar").is_file()]
            problems += [f"--check needs {path}, which does not exist" for path in absent]
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
