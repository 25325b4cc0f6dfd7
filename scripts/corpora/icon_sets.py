"""The six icon sets: their npm packages, and readers for the format of each."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import tarfile
import zlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from corpora.build_emoji import BuildError, tarball_name
from corpora.icon_joins import Icon, concept_name, keyword

Files = dict[str, bytes]


class Package(NamedTuple):
    """A pinned npm package: its npm checksum, its licence, and its styles."""

    spec: str
    integrity: str
    licence: str
    styles: tuple[str, ...]


# Later releases of unicons (from 4.0.2) and remixicon (from 4.9) have their own licences, which limit use.
PACKAGES = {
    "tabler": Package(
        "@tabler/icons@3.51.0",
        "sha512-0pinvPZz7YeX+OSfxuEAbnEPWbocVXW5iU8h5lh41pYG8sZuQfpWECC980lxOT0clGIcNGn8xsBr+zKaRGdA/g==",
        "MIT",
        ("tabler", "tabler-filled"),
    ),
    "phosphor": Package(
        "@phosphor-icons/core@2.1.1",
        "sha512-v4ARvrip4qBCImOE5rmPUylOEK4iiED9ZyKjcvzuezqMaiRASCHKcRIuvvxL/twvLpkfnEODCOJp5dM4eZilxQ==",
        "MIT",
        tuple(f"phosphor-{weight}" for weight in ("thin", "light", "regular", "bold", "fill", "duotone")),
    ),
    "lucide": Package(
        "lucide-static@1.62.0",
        "sha512-WBZA/m2PvkFpMGHDtsBck5P2A9G4ehLlYu4GwwICcmEm1BvYVgj00lCDxKRWLlbMlOibLaiwdQ88G5pHkSWgwA==",
        "ISC",
        ("lucide",),
    ),
    "unicons": Package(
        "@iconscout/unicons@4.0.1",
        "sha512-uMyaHfzfrc4Wd+n0EGsrSGqW/YB/7gZYro4fKhK+YjrG5GWn2bag+5Fj2yqnhjj0Wdc3nHQM6i6rjM7B5zNY3Q==",
        "Apache-2.0",
        tuple(f"unicons-{kind}" for kind in ("line", "solid", "thinline", "monochrome")),
    ),
    "mdi": Package(
        "@mdi/svg@7.4.47",
        "sha512-WQ2gDll12T9WD34fdRFgQVgO8bag3gavrAgJ0frN4phlwdJARpE6gO1YvLEMJR0KKgoc+/Ea/A0Pp11I00xBvw==",
        "Apache-2.0",
        ("mdi", "mdi-outline"),
    ),
    "remixicon": Package(
        "remixicon@4.8.0",
        "sha512-8qTM/bWkmsAWitvcL9XrVPVdqHRrdmnNp4zCFBdmIHBygxfHWwoK6NzitbiMyRzjcXKBMlS/ab5M65/ZlxJTVA==",
        "Apache-2.0",
        ("remixicon-line", "remixicon-fill"),
    ),
}
STYLES = [style for package in PACKAGES.values() for style in package.styles]

# ---------------------------------------------------------------------------------------------- packages


def check_sum(tarball: Path, package: Package) -> None:
    """Raise BuildError if the tarball differs from the one that npm published."""
    found = "sha512-" + b64encode(hashlib.sha512(tarball.read_bytes()).digest()).decode()
    if found != package.integrity:
        raise BuildError(
            f"{tarball} has the checksum {found[:20]}..., {package.spec} has {package.integrity[:20]}...; "
            "delete the file to fetch it again"
        )


def unpack(tarball: Path) -> Files:
    """Return {path: content} of a package's texts and drawings, without npm's top folder package/."""
    try:
        with tarfile.open(tarball, "r:gz") as tar:
            wanted = [m for m in tar if m.isfile() and re.search(r"\.(svg|json|mjs)$|/licen[cs]e", m.name, re.I)]
            # npm writes some names like package/./dist/index.mjs
            names = [posixpath.normpath(m.name).split("/", 1)[1] for m in wanted]
            contents = [tar.extractfile(m) for m in wanted]
            return {name: content.read() for name, content in zip(names, contents) if content}
    except (tarfile.TarError, EOFError, OSError, IndexError, zlib.error) as error:
        raise BuildError(f"cannot read {tarball}: {error}; delete the file to fetch it again") from error


@contextmanager
def explained(package: Package) -> Iterator[None]:
    """Name the package that is not laid out as this script expects."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise BuildError(f"{package.spec} is not laid out as expected: {error!r}. Use the pinned version") from error


def licence_text(files: Files) -> bytes:
    """Return the package's licence file."""
    return files[next(path for path in sorted(files) if re.fullmatch(r"licen[cs]e(\.\w+)?", path, re.I))]


# ------------------------------------------------------------------------------- sets, one function for each


def icon(style: str, name: str, svg: bytes, words: Mapping[str, Iterable[str]] | None = None) -> Icon:
    """Build an Icon from raw texts: words holds `aliases`, `tags` and `categories` as the set writes them."""
    raw = words or {}
    categories = tuple(sorted({category.strip().lower() for category in raw.get("categories", ()) if category}))
    package = next(key for key, package in PACKAGES.items() if style in package.styles)
    return Icon(
        package,
        style,
        concept_name(name, categories),
        svg.decode(),
        tuple(sorted({concept_name(alias, categories) for alias in raw.get("aliases", ())} - {""})),
        tuple(sorted({keyword(str(tag)) for tag in raw.get("tags", ())} - {""})),
        categories,
    )


def drawings(files: Files, folder: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, SVG) of the drawings directly in a folder, sorted."""
    for path in sorted(files):
        if posixpath.dirname(path) == folder and path.endswith(".svg"):
            yield posixpath.basename(path).removesuffix(".svg"), files[path]


def read_tabler(files: Files) -> Iterator[Icon]:
    """Read Tabler: one category and tags in icons.json; the folder is the style, so names keep words such as line."""
    words = json.loads(files["icons.json"])
    for style, folder in (("tabler", "icons/outline"), ("tabler-filled", "icons/filled")):
        for name, svg in drawings(files, folder):
            said = words[name]
            yield icon(style, name, svg, {"tags": said["tags"] or (), "categories": [said["category"]]})


PHOSPHOR_ENTRY = re.compile(
    r'name: "([^"]+)",\s*pascal_name: "[^"]+",(?:\s*alias: \{\s*name: "([^"]+)",[^}]*\},)?'
    r"\s*categories: \[([^\]]*)\],\s*figma_category: \w+\.(\w+),\s*tags: \[([^\]]*)\]"
)


def read_phosphor(files: Files) -> Iterator[Icon]:
    """Read Phosphor: categories, tags and former names in a JavaScript module; the weight ends a file's name."""
    words = {}
    for name, alias, categories, main, tags in PHOSPHOR_ENTRY.findall(files["dist/index.mjs"].decode()):
        marked = re.findall(r'"([^"]*)"', tags)
        words[name] = {
            "aliases": [alias] if alias else [],
            "tags": [tag for tag in marked if not tag.startswith("*")],  # *new* and *updated* do not describe the icon
            "categories": [*re.findall(r"\w+\.(\w+)", categories), main],
        }
    for style in PACKAGES["phosphor"].styles:
        weight = style.removeprefix("phosphor-")
        for name, svg in drawings(files, f"assets/{weight}"):
            plain = name.removesuffix(f"-{weight}")
            yield icon(style, plain, svg, words[plain])


def read_lucide(files: Files) -> Iterator[Icon]:
    """Read Lucide: tags in tags.json; a missing file shares the drawing of an existing one, and is its alias."""
    tags = json.loads(files["tags.json"])
    bodies: dict[bytes, str] = {}
    aliases: defaultdict[str, list[str]] = defaultdict(list)
    rows = dict(drawings(files, "icons"))
    for name in sorted(rows, key=lambda name: (name not in tags, name)):
        body = rows[name].split(b">", 2)[-1]  # after the comment and the <svg> with the name as its class
        if name in tags:
            bodies[body] = name
        elif body in bodies:
            aliases[bodies[body]].append(name)
    for name in sorted(tags.keys() & rows.keys()):
        yield icon("lucide", name, rows[name], {"aliases": aliases[name], "tags": tags[name]})


# The package defines these in a stylesheet; without it all parts of a drawing are one black shape.
MONOCHROME = (
    b"<style>"
    + b"".join(
        b".uim-%s{opacity:%s}" % part
        for part in ((b"secondary", b".7"), (b"tertiary", b".5"), (b"quaternary", b".25"), (b"quinary", b"0"))
    )
    + b"</style>"
)


def read_unicons(files: Files) -> Iterator[Icon]:
    """Read Unicons: category and tags in one JSON file for each style."""
    for style in PACKAGES["unicons"].styles:
        kind = style.removeprefix("unicons-")
        words = {entry["name"]: entry for entry in json.loads(files[f"json/{kind}.json"])}
        for name, svg in drawings(files, f"svg/{kind}"):
            said = words.get(name, {})
            if kind == "monochrome":
                start = svg.index(b">", svg.index(b"<svg")) + 1
                svg = svg[:start] + MONOCHROME + svg[start:]
            category = said.get("category")
            yield icon(style, name, svg, {"tags": said.get("tags", ()), "categories": [category] if category else []})


def read_mdi(files: Files) -> Iterator[Icon]:
    """Read Material Design Icons: aliases, and categories that they call tags; -outline at the end is a style."""
    for entry in sorted(json.loads(files["meta.json"]), key=lambda entry: entry["name"]):
        name = entry["name"]
        style = "mdi-outline" if name.endswith("-outline") else "mdi"
        aliases = [alias.removesuffix("-outline") for alias in entry["aliases"]]
        words = {"aliases": aliases, "categories": entry["tags"]}
        yield icon(style, name.removesuffix("-outline"), files[f"svg/{name}.svg"], words)


def read_remixicon(files: Files) -> Iterator[Icon]:
    """Read Remix: the folder is the category, -line or -fill the style; a name with neither is drawn in lines."""
    for folder in sorted({posixpath.dirname(path) for path in files if path.startswith("icons/")}):
        for name, svg in drawings(files, folder):
            style = "remixicon-fill" if name.endswith("-fill") else "remixicon-line"
            plain = name.removesuffix("-fill").removesuffix("-line")
            yield icon(style, plain, svg, {"categories": [posixpath.basename(folder)]})


READERS: dict[str, Callable[[Files], Iterator[Icon]]] = {
    "tabler": read_tabler,
    "phosphor": read_phosphor,
    "lucide": read_lucide,
    "unicons": read_unicons,
    "mdi": read_mdi,
    "remixicon": read_remixicon,
}


def read_sets(folder: Path) -> tuple[list[Icon], dict[str, bytes]]:
    """Return the icons of all sets, and the sets' licences."""
    icons: list[Icon] = []
    licences = {}
    for key, package in PACKAGES.items():
        tarball = folder / tarball_name(package.spec)
        check_sum(tarball, package)
        files = unpack(tarball)
        with explained(package):
            try:
                licences[key] = licence_text(files)
            except StopIteration:
                raise BuildError(f"{package.spec} has no licence file, which redistribution needs") from None
            icons += READERS[key](files)
    return icons, licences
