"""The concepts of the icon corpus: the names that icon_joins joins, with all texts of the sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from corpora.icon_categories import GROUP, RANK, SUBGROUP, UNCATEGORISED, VAGUE
from corpora.icon_joins import MODIFIERS, Icon, join


class Concept(NamedTuple):
    """The texts of all drawings of one concept; hexcode is the name joined by hyphens."""

    hexcode: str
    name: str
    keywords: list[str]
    subgroup: str
    group: str


def own_subgroup(icons: Iterable[Icon]) -> str:
    """Return the subgroup that most sets give, or "".

    One set has one vote for each of its categories. The vague ones of the group interface count only if there is no
    other; a tie goes to the first in GROUPS.
    """
    votes = Counter(sub for _, sub in {(i.package, SUBGROUP[c]) for i in icons for c in i.categories if c in SUBGROUP})
    return min(votes, key=lambda sub: (GROUP[sub] == VAGUE, -votes[sub], RANK[sub]), default="")


def borrowed_subgroup(name: str, keywords: Iterable[str], known: dict[str, str]) -> str:
    """Return the subgroup of a name without categories: of its longest known prefix, its keywords, or its suffix."""
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
    """Return {every icon's name: its concept}; joined names share one."""
    entries = join(icons)
    own = {entry.name: own_subgroup(entry.icons) for entry in entries}
    known = {name: own[entry.name] for entry in entries for name in entry.sets_of if own[entry.name]}
    out = {}
    for entry in entries:
        keywords = sorted((entry.keywords | entry.sets_of.keys()) - {entry.name, ""})
        subgroup = own[entry.name] or borrowed_subgroup(entry.name, keywords, known)
        concept = Concept(entry.name.replace(" ", "-"), entry.name, keywords, subgroup, GROUP[subgroup])
        out.update(dict.fromkeys(entry.sets_of, concept))
    return out
