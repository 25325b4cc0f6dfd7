"""What the icon sets' names, aliases, tags and categories say, joined into the concepts of the icon corpus.

Icons of one normalised name are one concept. Two concepts are joined by an alias only if all of this holds:

- the tags or aliases of both name each other; or one set gives the alias as its icon's other name, and a second
  witness agrees: the two names share a word, or the sets' categories share a subgroup;
- no set draws both: a set that does tells them apart;
- each is the only partner of the other, so a join is of two names and aliases never form a chain;
- both are logos, or neither is.
"""
from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

UNCATEGORISED = "uncategorised"
BRAND = "brands"
#: group: {subgroup: the sets' categories}. The order breaks ties; the group interface counts only where no other does.
GROUPS: dict[str, dict[str, str]] = {
    "animals nature": {
        "animals": "animals|animal",
        "nature": "nature|agriculture",
        "weather": "weather",
        "zodiac": "zodiac",
    },
    "food drink": {"food": "food|food / drink"},
    "people": {
        "users": "users|account / user|user & faces|people|people / family|gender",
        "faces": "mood|emoji",
        "gestures": "gestures",
        "clothing": "clothing",
    },
    "health": {
        "medicine": "health|medical|medical / hospital|health & medical",
        "beauty": "health / beauty",
    },
    "travel places": {
        "maps": "map|location and map|navigation|geographic information system|places",
        "buildings": "buildings|construction",
        "vehicles": "vehicles|transport|automotive",
        "roads": "transportation + road",
        "flying": "transportation + flying",
        "water transport": "transportation + water",
        "other transport": "transportation + other",
    },
    "activities": {
        "sports": "sport|sports|game & sports",
        "games": "games|gaming / rpg",
        "holidays": "holiday",
        "religion": "religion",
        "art": "drawing / art",
    },
    "home tools": {
        "home automation": "home automation",
        "laundry": "laundry",
        "tools": "hardware / tools",
        "electricity": "electrical",
    },
    "commerce": {
        "money": "finance|currencies|currency|banking",
        "shopping": "e-commerce|commerce|shopping",
        "business": "business|office",
    },
    "science education": {
        "mathematics": "math|logic",
        "science": "science",
        "education": "education",
        "charts": "charts",
    },
    "devices": {
        "telephones": "cellphone / phone",
        "computers": "computers",
        "batteries": "battery",
        "printers": "printer",
        "other devices": "devices|device|device / tech",
    },
    "media": {
        "photography": "photography|photography tools",
        "music": "music|audio",
        "video": "video / movie",
        "other media": "media|multimedia",
    },
    "communication": {
        "chat": "chat|tooltip",
        "notifications": "notification|alert / error",
        "social media": "social media",
        "other communication": "communication",
    },
    "computing": {
        "databases": "database",
        "clouds": "cloud|cloud and web",
        "version control": "version control",
        "programming": "development|developer / languages|extensions",
        "security": "lock|security",
    },
    "documents": {
        "files": "document|files / folders|file and folder",
        "text": "text|text / content / format|content|editor",
        "forms": "form",
        "editing": "edit / modify",
    },
    "signs": {
        "arrows": "arrows|arrow",
        "letters": "letters|alpha / numeric",
        "numbers": "numbers",
        "shapes": "shapes|shape",
        "badges": "badges",
        "time": "time|date / time",
        "symbols": "symbols|sign and symbol",
    },
    BRAND: {"logos": "brand|brand / logo|brand logos|logos"},
    "interface": {
        "colours": "color",
        "vectors": "vector",
        "arrangement": "arrange",
        "design": "design|design tools",
        "views": "view",
        "settings": "settings",
        "system": "system|user interface",
        "other objects": "objects|others",
    },
}
VAGUE = "interface"
#: Last words that say what is done to a thing, not what it is.
MODIFIERS = {
    "plus", "minus", "off", "on", "slash", "check", "add", "remove", "edit", "close", "open", "alert", "multiple", "x",
    "up", "down", "left", "right",
}  # fmt: skip
SUBGROUP = {c: sub for subs in GROUPS.values() for sub, names in subs.items() for c in names.split("|")}
GROUP = {sub: group for group, subs in GROUPS.items() for sub in subs} | {UNCATEGORISED: UNCATEGORISED}
RANK = {sub: i for i, sub in enumerate(GROUP)}


class Icon(NamedTuple):
    """One drawing as its set describes it: normalised name, aliases and tags, its categories in lower case."""

    package: str
    style: str
    name: str
    svg: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()


class Concept(NamedTuple):
    """The texts of all drawings of one thing; hexcode is the name joined by hyphens."""

    hexcode: str
    name: str
    keywords: list[str]
    subgroup: str
    group: str


class Entry:
    """What all sets say of one name."""

    def __init__(self) -> None:
        self.icons: list[Icon] = []

    @property
    def packages(self) -> set[str]:
        """The sets that draw it."""
        return {icon.package for icon in self.icons}

    @property
    def subgroups(self) -> set[str]:
        """What the sets' categories are called here."""
        return {SUBGROUP[c] for icon in self.icons for c in icon.categories if c in SUBGROUP}

    def words(self, *fields: str) -> set[str]:
        """All aliases, all tags, or both."""
        return {word for icon in self.icons for field in fields for word in getattr(icon, field)}


@cache
def normalise(name: str) -> str:
    """Lower-case ASCII words joined by spaces: arrow-left, ArrowLeft and arrow_left are all `arrow left`."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    plain = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", plain)
    return " ".join(re.findall(r"[a-z0-9]+", re.sub(r"['’]", "", plain).lower()))


def keyword(tag: str) -> str:
    """A tag as a text: lower case, its words apart; a tag of signs alone, such as %, stays."""
    return normalise(tag) or tag.strip().lower()


def concept_name(name: str, categories: Iterable[str]) -> str:
    """A normalised name; a brand's is `... logo`, which keeps Apple's apart from the fruit."""
    plain = normalise(name)
    if not any(GROUP.get(SUBGROUP.get(category, "")) == BRAND for category in categories):
        return plain
    return f"{plain.removeprefix('brand ').removesuffix(' logo')} logo"


# ------------------------------------------------------------------------------------------------ joining


def gather(icons: Iterable[Icon]) -> dict[str, Entry]:
    """{name: what all sets say of it}, sorted by name."""
    entries: defaultdict[str, Entry] = defaultdict(Entry)
    for icon in icons:
        entries[icon.name].icons.append(icon)
    return dict(sorted(entries.items()))


def same_thing(name: str, other: str, entries: dict[str, Entry]) -> bool:
    """Whether `name`, which has `other` as an alias or tag, means the same by a second witness."""
    mine, theirs = entries[name], entries[other]
    if name in theirs.words("tags", "aliases"):
        return True
    if other not in mine.words("aliases"):
        return False
    common = mine.subgroups & theirs.subgroups
    return bool(set(name.split()) & set(other.split()) or any(GROUP[sub] != VAGUE for sub in common))


def alias_pairs(entries: dict[str, Entry]) -> list[tuple[str, str]]:
    """The pairs of names that are one thing, by the rule at the top of this file; no name is in two of them."""
    partners: defaultdict[str, set[str]] = defaultdict(set)
    for name, entry in entries.items():
        for other in entry.words("aliases", "tags"):
            if other in entries and other != name and same_thing(name, other, entries):
                partners[name].add(other)
                partners[other].add(name)
    pairs = []
    for name, others in sorted(partners.items()):
        other = next(iter(others))
        alone = len(others) == 1 and len(partners[other]) == 1
        if alone and name < other and not entries[name].packages & entries[other].packages:
            pairs.append((name, other))
    return [(a, b) for a, b in pairs if a.endswith(" logo") == b.endswith(" logo")]


def join(entries: dict[str, Entry]) -> dict[str, tuple[str, ...]]:
    """{concept's name: the names joined in it}; a pair is called what more sets call it, then what is shorter."""
    other = {}
    for a, b in alias_pairs(entries):
        first, second = sorted((a, b), key=lambda name: (-len(entries[name].packages), len(name), name))
        other[first], other[second] = second, ""
    return {name: (name, other[name]) if other.get(name) else (name,) for name in entries if other.get(name) != ""}


# --------------------------------------------------------------------------------------------- categories


def own_subgroup(icons: Iterable[Icon]) -> str:
    """The subgroup that most sets give, or "".

    One set has one vote for each of its categories. The vague ones of the group interface count only where there is
    no other; a tie goes to the first in GROUPS.
    """
    votes = Counter(sub for _, sub in {(i.package, SUBGROUP[c]) for i in icons for c in i.categories if c in SUBGROUP})
    return min(votes, key=lambda sub: (GROUP[sub] == VAGUE, -votes[sub], RANK[sub]), default="")


def borrowed_subgroup(name: str, keywords: Iterable[str], known: dict[str, str]) -> str:
    """For a name without categories: that of the longest name that begins it, of its keywords, or that ends it."""
    words = name.split()
    for n in range(len(words) - 1, 0, -1):
        if (start := " ".join(words[:n])) in known:
            return known[start]
    votes = Counter(known[word] for word in keywords if word in known)
    if votes:
        return min(votes, key=lambda sub: (-votes[sub], RANK[sub]))
    ends = () if words[-1] in MODIFIERS else (" ".join(words[n:]) for n in range(1, len(words)))
    return next((known[end] for end in ends if end in known), UNCATEGORISED)


def concepts_of(icons: Iterable[Icon]) -> dict[str, Concept]:
    """{every icon's name: its concept}; joined names have the same one."""
    entries = gather(icons)
    joined = join(entries)
    known = {name: own_subgroup(i for part in parts for i in entries[part].icons) for name, parts in joined.items()}
    known = {name: subgroup for name, subgroup in known.items() if subgroup}
    out = {}
    for name, parts in joined.items():
        keywords = set(parts).union(*(entries[part].words("aliases", "tags") for part in parts)) - {name, ""}
        subgroup = known.get(name) or borrowed_subgroup(name, sorted(keywords), known)
        concept = Concept(name.replace(" ", "-"), name, sorted(keywords), subgroup, GROUP[subgroup])
        out.update(dict.fromkeys(parts, concept))
    return out
