"""Published sets of captioned images, for training and evaluation, named by a word and addresses: `coco:JSON,IMAGES`.

To add a set, write a function of (addresses, splits) that returns its name and images, and a line of SETS.
"""

from __future__ import annotations

import html
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prolip.data.captions import stable_hash
from prolip.data.faults import DamagedData
from prolip.utils.documents import loads, text_lines
from prolip.utils.messages import NAMED, explain_missing, first_few, listing

log = logging.getLogger(__name__)


class CaptionedImage(NamedTuple):
    """An image file with all of its captions."""

    key: str  # unique in the set
    path: str
    captions: tuple[str, ...]
    facts: Mapping[str, Any] = {}  # for `--select`
    image_id: int = -1  # the set's own numbers, if it has any
    caption_ids: tuple[int, ...] = ()


Found = tuple[str, list[CaptionedImage]]


def check_folders(*folders: Path) -> None:
    """Raise FileNotFoundError for the first missing folder."""
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}: {explain_missing(str(folder))}")


def check_files(paths: Sequence[str], what: str) -> list[int]:
    """Return the sizes of local files. FileNotFoundError names missing files, DamagedData empty ones."""
    sizes = [os.path.getsize(path) if os.path.exists(path) else -1 for path in paths]
    for wrong, kind, state in ((-1, FileNotFoundError, "are missing"), (0, DamagedData, "are empty")):
        if names := [path for path, size in zip(paths, sizes) if size == wrong]:
            hint = explain_missing(names[0]) if wrong < 0 else "Download them again."
            raise kind(f"{what}: {len(names)} of {len(paths)} files {state}: {first_few(names, NAMED)}. {hint}")
    return sizes


def read_lines(file: Path) -> list[str]:
    """Return the stripped lines of a text file without blank ones."""
    try:
        return [line for line in text_lines(file.read_text(encoding="utf-8-sig")) if line]
    except UnicodeDecodeError as error:
        raise DamagedData(f"{file} is not UTF-8 text ({error}). Download it again") from error


# --- COCO and Flickr30k -----------------------------------------------------------------------------------------------
def read_karpathy(addresses: Sequence[str], splits: Collection[str]) -> Found:
    """Read COCO or Flickr30k in the splits of Karpathy and Fei-Fei (2015), in file order; IMAGES contains val2014/."""
    file, root = map(Path, addresses)
    if not root.is_dir():
        raise FileNotFoundError(f"no image folder {root}: {explain_missing(str(root))}")
    if not file.is_file():
        raise FileNotFoundError(f"no annotations {file}: {explain_missing(str(file))}")
    try:
        content = loads(file.read_text(encoding="utf-8"), unique=True)
        records = content["images"]
        known = sorted({record["split"] for record in records})
    except (ValueError, KeyError, TypeError) as error:
        what = f"{file} is not a file of Karpathy's splits ({type(error).__name__}: {error})"
        expected = 'expected {"images": [{"filename", "split", "sentences"}, ...]}'
        raise DamagedData(f"{what}: {expected}. Download dataset_coco.json or dataset_flickr30k.json") from error
    for split in splits:
        if split not in known:
            raise ValueError(f"{file} has no images of the split {split!r}: it has {', '.join(known)}")
    images = []
    for record in records:
        if record["split"] not in splits:
            continue
        try:
            name, sentences = record["filename"], record["sentences"]
            texts = tuple(sentence["raw"].strip() for sentence in sentences)
            ids = tuple(int(sentence["sentid"]) for sentence in sentences)
            number = int(record.get("cocoid", record.get("imgid", -1)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            name = record.get("filename", "?")
            raise DamagedData(f"{file}: image {name!r} lacks {error}. Download the file again") from error
        if not all(texts) or not texts:
            has = f"{sum(not text for text in texts)} empty captions" if texts else "no caption"
            raise DamagedData(f"{file}: {name} has {has}. Add captions, or remove the image from the split")
        below = root / record.get("filepath", "") / name
        path = root / name if not below.is_file() and (root / name).is_file() else below
        key = str(record["cocoid"]) if "cocoid" in record else name
        images.append(CaptionedImage(key, str(path), texts, {"split": record["split"]}, number, ids))
    return f"{content.get('dataset') or file.stem}_karpathy", images


# --- CUB --------------------------------------------------------------------------------------------------------------
#: Split -> its files: CUB's own, next to IMAGES; or those of PCME (Chun et al. 2021), where a caption matches every
#: image of its species: 50 unseen classes, and the other 150 without or with the held-out images.
OFFICIAL, CLASSES = ("images.txt", "train_test_split.txt"), ("trainvalclasses.txt", "seen_test_images.txt")
FILES = {"train": OFFICIAL, "test": OFFICIAL, "unseen": ("testclasses.txt",), "trainval": CLASSES, "seen": CLASSES}


def read_cub(addresses: Sequence[str], splits: Collection[str]) -> Found:
    """Read the captions of Reed et al. (2016), ten for each image of CUB-200-2011, in order of key CLASS/NAME.jpg.

    addresses: CAPTIONS with CLASS/NAME.txt, one caption a line; IMAGES with CLASS/NAME.jpg; optionally the folder with
    the split files, by default these two and their parents.
    """
    texts, root, *lists = map(Path, addresses)
    check_folders(texts, root)
    places = lists or [texts, root, texts.resolve().parent, root.resolve().parent]
    chosen = sorted({key for split in splits for key in choose_birds(split, places, root)})
    named = " and ".join(repr(split) for split in splits)
    files = [texts / f"{os.path.splitext(key)[0]}.txt" for key in chosen]
    check_files([str(file) for file in files], f"captions of the split {named} of CUB")
    images = []
    for key, file in zip(chosen, files):
        if not (captions := tuple(read_lines(file))):
            raise DamagedData(f"{file} has no caption. Download it again")
        species = key.split("/")[0].partition(".")[2].replace("_", " ")  # of 001.Black_footed_Albatross/NAME.jpg
        images.append(CaptionedImage(key, str(root / key), captions, {"class": species}))
    return "cub", images


def choose_birds(split: str, places: Sequence[Path], root: Path) -> list[str]:
    """Return the keys CLASS/NAME.jpg of a split. FileNotFoundError for a list that none of `places` has."""
    if split not in FILES:
        raise ValueError(f"CUB has no split {split!r}: give one of {', '.join(FILES)}")
    files = []
    for file in FILES[split]:
        if not (found := [place / file for place in places if (place / file).is_file()]):
            looked = ", ".join(dict.fromkeys(map(str, places)))
            raise FileNotFoundError(f"no {file} in {looked}. Download it and give its folder as the third address")
        files.append(found[0])
    rows = [read_lines(file) for file in files]
    try:
        if split in ("train", "test"):
            training = dict(line.split() for line in rows[1])
            wanted = str(int(split == "train"))
            keys = [key for number, key in (line.split() for line in rows[0]) if training[number] == wanted]
        else:
            numbers = {int(line.split(".")[0]) for line in rows[0]}
            folders = [path for path in root.iterdir() if path.is_dir() and int(path.name.split(".")[0]) in numbers]
            found = [path for folder in folders for path in folder.iterdir()]
            keys = [f"{x.parent.name}/{x.name}" for x in found if x.suffix.lower() in (".jpg", ".jpeg")]
    except (ValueError, KeyError) as error:
        names, what = " and ".join(file.name for file in files), f"{type(error).__name__}: {error}"
        raise DamagedData(f"{names} do not match {root} ({what}). Download them again") from error
    if split in ("seen", "trainval"):
        held_out = set(rows[1])
        keys = [key for key in keys if (key in held_out) == (split == "seen")]
    if not keys:
        raise ValueError(f"the split {split!r} has no image in {root}. Give the folder that contains the class folders")
    return keys


# --- IAPR TC-12 -------------------------------------------------------------------------------------------------------
ANNOTATIONS, LIST = ("annotations_complete_eng", "annotations"), "iaprtc12_{}_list.txt"
#: Not an XML parser, because descriptions contain bare ampersands.
TAG = re.compile(r"<(?P<name>[A-Z]+)>(?P<text>.*?)</(?P=name)>", re.DOTALL)
FACTS = ("TITLE", "NOTES", "LOCATION", "DATE")


def read_iapr(addresses: Sequence[str], splits: Collection[str]) -> Found:
    """Read IAPR TC-12 (Grubinger et al. 2006): 20,000 photographs, one caption per sentence, in order of key 00/25.

    addresses: FOLDER with images/00/25.jpg and annotations_complete_eng/00/25.eng or annotations/, SGML in ISO-8859-1.
    Optional: a file of ids, which become the split, or the folder of LEAR's lists (17,665 and 1,962 images). Without a
    list, "test" has the images whose hashed id modulo 10 is 0, "train" the others, "all" both. Images without a
    description are skipped with a warning.
    """
    root, *lists = map(Path, addresses)
    check_folders(root)
    places = [root / name for name in ANNOTATIONS if (root / name).is_dir()]
    if not places or not (root / "images").is_dir():
        missing = "images" if places else " or ".join(ANNOTATIONS)
        there = f"it contains {listing(str(root))}"
        raise FileNotFoundError(f"{root} has no folder {missing} ({there}). Give the unpacked folder iaprtc12")
    files = {
        path.relative_to(place).with_suffix("").as_posix(): path
        for place in reversed(places)  # the complete annotations first
        for path in place.glob("*/*.eng")
    }
    if not files:
        raise ValueError(f"{places[0]} has no annotation NN/NUMBER.eng. Unpack the whole archive")
    chosen = {key for split in splits for key in choose_photographs(split, files, root, *lists)}

    def by_number(key: str) -> list[tuple[int, str]]:  # 00/25 before 00/112
        return [(int(part) if part.isdecimal() else -1, part) for part in key.split("/")]

    captioned, bare = [], []
    for key in sorted(chosen, key=by_number):
        text = files[key].read_text(encoding="iso-8859-1")
        begin, end = text.find("<DOC>"), text.rfind("</DOC>")
        inner = text[begin + len("<DOC>") : end] if 0 <= begin < end else text
        found = {tag["name"]: html.unescape(tag["text"]).strip() for tag in TAG.finditer(inner)}
        if lacks := [f"<{name}>" for name in ("DESCRIPTION", "IMAGE") if name not in found]:
            raise DamagedData(f"{files[key]} has no {' and '.join(lacks)}. Download it again")
        sentences = (" ".join(sentence.split()) for sentence in found["DESCRIPTION"].split(";"))
        if not (captions := tuple(filter(None, sentences))):
            bare.append(key)
            continue
        facts = {name.lower(): found[name] for name in FACTS if found.get(name)}
        captioned.append(CaptionedImage(key, str(root / found["IMAGE"]), captions, facts))
    if bare:
        log.warning("IAPR TC-12: %d images have no description and are skipped: %s", len(bare), first_few(bare, NAMED))
    if not captioned:
        raise ValueError(f"the split {' and '.join(map(repr, splits))} of {root} has no image with a description")
    return "iapr", captioned


def choose_photographs(split: str, known: Collection[str], root: Path, lists: Path | None = None) -> list[str]:
    """Return the ids of a split."""
    if split not in ("train", "test", "all"):
        raise ValueError(f"IAPR TC-12 has no split {split!r}: give one of train, test, all")
    if split == "all" and lists is None:
        return list(known)
    place = lists or root
    file = place / LIST.format(split) if place.is_dir() else place
    if file.is_file():
        ids = [line.removesuffix(".jpg") for line in read_lines(file)]
        lost = [key for key in ids if key not in known]
        if lost or not ids:
            what = f"names {len(lost)} images without an annotation, {lost[0]} first" if lost else "names no image"
            raise DamagedData(f"{file} {what}. Give ids of {root} such as 00/25, one per line")
        return ids
    if lists is not None:
        raise FileNotFoundError(f"no list {file}: give a file of ids, or the folder of {LIST.format(split)}")
    return [key for key in known if (stable_hash("iapr", key) % 10 == 0) == (split == "test")]


# --- index of the sets ------------------------------------------------------------------------------------------------
class PublishedSet(NamedTuple):
    """A reader of (addresses, splits), the form of the addresses, their least and most number, the training splits."""

    read: Callable[[Sequence[str], Sequence[str]], Found]
    form: str
    addresses: tuple[int, int]
    splits: str


SETS = {
    "coco": PublishedSet(read_karpathy, "coco:JSON,IMAGES", (2, 2), "train+restval"),
    "flickr": PublishedSet(read_karpathy, "flickr:JSON,IMAGES", (2, 2), "train"),
    "cub": PublishedSet(read_cub, "cub:CAPTIONS,IMAGES[,LISTS]", (2, 3), "train"),
    "iapr": PublishedSet(read_iapr, "iapr:FOLDER[,LISTS]", (1, 2), "train"),
}
FORMS = ", ".join(known.form for known in SETS.values())


def read_set(word: str, train_data: str, splits: str | None = None) -> Found:
    """Return the name and images of a published set and check that all files exist; train_data may begin with the word.

    splits: joined by '+'; default: the training splits. ValueError, FileNotFoundError, DamagedData.
    """
    known = SETS[word]
    addresses = train_data.removeprefix(f"{word}:").split(",")
    least, most = known.addresses
    if not least <= len(addresses) <= most or not all(addresses):
        count = len(list(filter(None, addresses)))
        raise ValueError(f"the data set {train_data!r} has {count} address(es): write {known.form}")
    name, images = known.read(addresses, (splits or known.splits).split("+"))
    check_files([image.path for image in images], f"images of {word}, {splits or known.splits}")
    return name, images
