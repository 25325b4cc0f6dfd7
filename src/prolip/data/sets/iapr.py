"""IAPR TC-12 (Grubinger et al. 2006): 20,000 photographs of travels, each described in one to five sentences.

    FOLDER/annotations_complete_eng/00/25.eng        SGML in ISO-8859-1, see below (also: FOLDER/annotations)
    FOLDER/images/00/25.jpg
    iaprtc12_train_list.txt, iaprtc12_test_list.txt  ids such as 00/25, a line each: LEAR's, 17,665 and 1,962 images

An annotation has <DESCRIPTION>first sentence; second sentence;</DESCRIPTION>, whose sentences are captions, and
<IMAGE>images/00/25.jpg</IMAGE>. The benchmark has no official split. Without a list, an image is in "test" where the
hash of its id modulo 10 is 0, else in "train". "all" is both.
"""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from prolip.data.captions import stable_hash
from prolip.data.faults import DamagedData
from prolip.data.sets.base import CaptionedImage, PublishedImages, check_folders
from prolip.utils.documents import text_lines
from prolip.utils.messages import first_few, listing

log = logging.getLogger(__name__)

ANNOTATIONS = ("annotations_complete_eng", "annotations")
SPLITS = ("train", "test", "all")
LIST = "iaprtc12_{}_list.txt"
#: One image in so many is for testing, without a list.
TEST_OF = 10
#: No parser of XML: descriptions hold bare ampersands.
TAG = re.compile(r"<(?P<name>[A-Z]+)>(?P<text>.*?)</(?P=name)>", re.DOTALL)
FACTS = ("TITLE", "NOTES", "LOCATION", "DATE")
NAMED = 3


def read_iapr(addresses: Sequence[str], splits: Collection[str]) -> PublishedImages:
    """The photographs of some splits in the order of their ids, a caption for each sentence; key: the id.

    addresses: of the folder and, optionally, of a file of ids, which then are the split, or of the folder of LEAR's
    lists; default: in the folder. FileNotFoundError, ValueError, DamagedData. Images without a description are left
    out, which is logged.
    """
    root, *lists = map(Path, addresses)
    check_folders(root)
    places = [root / name for name in ANNOTATIONS if (root / name).is_dir()]
    if not places or not (root / "images").is_dir():
        missing = "images" if places else " or ".join(ANNOTATIONS)
        there = f"it holds {listing(str(root))}"
        raise FileNotFoundError(f"{root} holds no folder {missing} ({there}): give the folder iaprtc12, as unpacked")
    files = {
        path.relative_to(place).with_suffix("").as_posix(): path
        for place in reversed(places)  # the complete annotations first
        for path in place.glob("*/*.eng")
    }
    if not files:
        raise ValueError(f"{places[0]} holds no annotation NN/NUMBER.eng: unpack all of it")
    chosen = {key for split in splits for key in choose(split, files, root, *lists)}
    found = [parse_annotation(key, files[key], root) for key in sorted(chosen, key=by_number)]
    captioned = [image for image in found if image.captions]
    if len(captioned) < len(found):
        bare = [image.key for image in found if not image.captions]
        log.warning("IAPR TC-12: %d images have no description and are left out: %s", len(bare), first_few(bare, NAMED))
    if not captioned:
        raise ValueError(f"the split {' and '.join(map(repr, splits))} of {root} has no image with a description")
    return PublishedImages("iapr", captioned)


def choose(split: str, known: Collection[str], root: Path, lists: Path | None = None) -> list[str]:
    """The ids of a split."""
    if split not in SPLITS:
        raise ValueError(f"IAPR TC-12 has no split {split!r}: give one of {', '.join(SPLITS)}")
    if split == "all" and lists is None:
        return list(known)
    place = lists or root
    file = place / LIST.format(split) if place.is_dir() else place
    if file.is_file():
        ids = [line.strip().removesuffix(".jpg") for line in text_lines(file.read_text(encoding="utf-8-sig"))]
        ids = [key for key in ids if key]
        lost = [key for key in ids if key not in known]
        if lost or not ids:
            what = f"names {len(lost)} images without an annotation, {lost[0]} first" if lost else "names no image"
            raise DamagedData(f"{file} {what}: want ids such as 00/25, a line each, of {root}")
        return ids
    if lists is not None:
        raise FileNotFoundError(f"no list {file}: give a file of ids, or the folder of {LIST.format(split)}")
    wanted = split == "test"
    return [key for key in known if (stable_hash("iapr", key) % TEST_OF == 0) == wanted]


def by_number(key: str) -> tuple[tuple[int, str], ...]:
    """00/25 before 00/112."""
    return tuple((int(part) if part.isdecimal() else -1, part) for part in key.split("/"))


def parse_annotation(key: str, file: Path, root: Path) -> CaptionedImage:
    """One image; DamagedData where the annotation lacks its parts."""
    text = file.read_text(encoding="iso-8859-1")
    begin, end = text.find("<DOC>"), text.rfind("</DOC>")
    inner = text[begin + len("<DOC>") : end] if 0 <= begin < end else text
    found = {tag["name"]: html.unescape(tag["text"]).strip() for tag in TAG.finditer(inner)}
    if "DESCRIPTION" not in found or "IMAGE" not in found:
        lacks = " and ".join(f"<{name}>" for name in ("DESCRIPTION", "IMAGE") if name not in found)
        raise DamagedData(f"{file} has no {lacks}: fetch it again")
    sentences = (" ".join(sentence.split()) for sentence in found["DESCRIPTION"].split(";"))
    facts = {name.lower(): found[name] for name in FACTS if found.get(name)}
    return CaptionedImage(key, str(root / found["IMAGE"]), tuple(filter(None, sentences)), facts)
