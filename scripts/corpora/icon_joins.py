"""Rules that join names of icons into concepts.

Icons of one normalised name are one concept. Then these rules join names, each applied to the result of those before:

- spelling: `bell-slash` is `bell off`, `number-two` is `number 2`, `qrcode` is `qr code` if some set writes that;
- design: `calendar-alt` is `calendar`;
- order: `circle-check` is `check circle`; but `eye search` is `search eye` only if the sets agree, for both are marks;
- number: `thumbs-up` is `thumb up` if the sets agree;
- kind: `currency-euro` is `euro` if the sets agree, as currency is its category;
- other names: one set gives the other name to its icon, and the two share a word or a subgroup, or differ by words
  that are swapped in other names too; or the tags of both name each other; never if their numbers differ.

The sets agree if all of them give a keyword that is not in the names, or a subgroup. No rule joins two icons of one
set, because that set distinguishes them, or a logo with anything else, or a name with two candidates.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

from corpora.icon_categories import BRAND, GROUP, SUBGROUP, VAGUE

#: Words that differ only between the sets.
SAME_WORDS = {
    "slash": "off",
    "add": "plus",
    "times": "x",
    "zero": "0",
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
}
#: Last words that only mark another drawing.
DESIGNS = {"alt", "variant"}
#: Least number of names in a set that begin with a kind of things, or end with a mark next to a thing.
MANY = 10
#: Least number of swaps after which two words count as the same: `magnify` and `search`.
SOME = 3
#: Last words for an action on a thing, not the thing.
MODIFIERS = {
    "plus",
    "minus",
    "off",
    "on",
    "slash",
    "check",
    "add",
    "remove",
    "edit",
    "close",
    "open",
    "alert",
    "multiple",
    "x",
    "up",
    "down",
    "left",
    "right",
}
#: Shapes around a thing. For two shapes, the order of words says which is inside.
SHAPES = {"circle", "square", "hexagon", "octagon", "triangle", "rectangle", "diamond", "pentagon", "box"}
ATTRIBUTES = MODIFIERS | SHAPES | {"top", "bottom", "vertical", "horizontal", "center"}
LOGO = " logo"


class Icon(NamedTuple):
    """One drawing as its set describes it: normalised name, aliases and tags, and categories in lower case."""

    package: str
    style: str
    name: str
    svg: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()


class Entry:
    """The icons of all sets whose names are one concept."""

    def __init__(self, icons: Iterable[Icon]) -> None:
        self.icons = list(icons)
        self.sets_of: defaultdict[str, set[str]] = defaultdict(set)
        for icon in self.icons:
            self.sets_of[icon.name].add(icon.package)

    @cached_property
    def name(self) -> str:
        """Return the most frequent name, the shorter one in a tie."""
        return min(self.sets_of, key=lambda name: (-len(self.sets_of[name]), len(name), name))

    @cached_property
    def shortest(self) -> str:
        """Return its shortest name: the one without a word of design."""
        return min(self.sets_of, key=lambda name: (len(name), name))

    @cached_property
    def packages(self) -> set[str]:
        """Return the sets that draw it."""
        return {icon.package for icon in self.icons}

    @cached_property
    def aliases(self) -> set[str]:
        """Return its other names in its sets."""
        return {word for icon in self.icons for word in icon.aliases}

    @cached_property
    def keywords(self) -> set[str]:
        """Return all aliases and tags."""
        return self.aliases.union(*(icon.tags for icon in self.icons))

    @cached_property
    def clear_subgroups(self) -> set[str]:
        """Return our subgroups of the sets' categories, without the vague ones."""
        subgroups = {SUBGROUP[c] for icon in self.icons for c in icon.categories if c in SUBGROUP}
        return {subgroup for subgroup in subgroups if GROUP[subgroup] != VAGUE}

    @cached_property
    def category_words(self) -> set[str]:
        """Return the words of its sets' categories."""
        return {singular(word) for icon in self.icons for c in icon.categories for word in normalise(c).split()}

    @cached_property
    def name_words(self) -> set[str]:
        """Return the words of all its names."""
        return {singular(word) for name in self.sets_of for word in name.split()}


# ------------------------------------------------------------------------------------------------- names


@cache
def normalise(name: str) -> str:
    """Return lower-case ASCII words joined by spaces: arrow-left, ArrowLeft and arrow_left are all `arrow left`."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    plain = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", plain)
    return " ".join(re.findall(r"[a-z0-9]+", re.sub(r"['’]", "", plain).lower()))


def keyword(tag: str) -> str:
    """Return a tag as a text in lower case with separate words; a tag without letters, such as %, stays."""
    return normalise(tag) or tag.strip().lower()


def concept_name(name: str, categories: Iterable[str]) -> str:
    """Return a normalised name; a brand's is `... logo`, so that Apple's differs from the fruit."""
    plain = normalise(name)
    if not any(GROUP.get(SUBGROUP.get(category, "")) == BRAND for category in categories):
        return plain
    return plain.removeprefix("brand ").removesuffix(LOGO) + LOGO


def singular(word: str) -> str:
    """Return a word without the s of a plural."""
    if len(word) > 3 and word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def without_design(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return words without final ones that only mark another drawing."""
    while len(words) > 1 and words[-1] in DESIGNS:
        words = words[:-1]
    return words


class Vocabulary:
    """The spelling and use of words in the sets.

    compounds: {word that some name writes as two: the two}; things: words that are also names; marks: words that end
    many names of a set; kinds: words of a set's categories that begin many of its names.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        sets_of = {name: sets for entry in entries for name, sets in entry.sets_of.items()}
        words = {word for name in sets_of for word in name.split()}
        pairs = {pair for name in sets_of for pair in pairwise(name.split())}
        # no single letters: `letter s` is not `letters`
        self.compounds = {a + b: (a, b) for a, b in sorted(pairs) if len(a) > 1 and len(b) > 1 and a + b in words}
        self.things = {name for name, sets in sets_of.items() if " " not in name and len(sets) > 1} - ATTRIBUTES
        ends = Counter((name.split()[-1], one) for name, sets in sets_of.items() for one in sets)
        starts = Counter((name.split()[0], one) for name, sets in sets_of.items() for one in sets)
        self.marks = {word for (word, _), count in ends.items() if count >= MANY} - ATTRIBUTES
        self.kinds = {word for (word, _), count in starts.items() if count >= MANY}

    def spelt(self, name: str) -> tuple[str, ...]:
        """Return the words of a name in a spelling common to all sets."""
        parts = (part for word in name.split() for part in self.compounds.get(word, (word,)))
        return tuple(SAME_WORDS.get(part, part) for part in parts)

    def numbers(self, entry: Entry) -> list[str]:
        """Return the numbers in its name."""
        return [word for word in self.spelt(entry.shortest) if word.isdigit()]

    def swap(self, one: Entry, two: Entry) -> frozenset[str]:
        """Return the two words in which two names differ; empty if they differ in more."""
        mine, theirs = (Counter(self.spelt(entry.shortest)) for entry in (one, two))
        words = [*(mine - theirs).elements()], [*(theirs - mine).elements()]
        return frozenset(words[0] + words[1]) if len(words[0]) == len(words[1]) == 1 else frozenset()


# ------------------------------------------------------------------------------------------------ joining


def gather(icons: Iterable[Icon]) -> list[Entry]:
    """Return one entry for each name, sorted."""
    by_name: defaultdict[str, list[Icon]] = defaultdict(list)
    for icon in icons:
        by_name[icon.name].append(icon)
    return [Entry(by_name[name]) for name in sorted(by_name)]


def may_join(entries: list[Entry]) -> bool:
    """Return whether no set draws two of them, and all are logos or none is."""
    sets = set().union(*(entry.packages for entry in entries))
    return len(sets) == sum(len(entry.packages) for entry in entries) and (
        len({entry.name.endswith(LOGO) for entry in entries}) == 1
    )


def agree(entries: list[Entry]) -> bool:
    """Return whether all share a keyword that is not in their names, or a subgroup."""
    own = set().union(*(entry.name_words for entry in entries))
    said = set.intersection(*(entry.keywords for entry in entries))
    said = {text for text in said if not own.issuperset(map(singular, text.split()))}
    return bool(said or set.intersection(*(entry.clear_subgroups for entry in entries)))


def merge(entries: Iterable[Entry]) -> Entry:
    """Return the entry of all their icons."""
    return Entry(icon for entry in entries for icon in entry.icons)


def join_alike(
    entries: list[Entry], key: Callable[[Entry], Hashable], same: Callable[[list[Entry]], bool]
) -> list[Entry]:
    """Merge the entries of a key if they may be joined and are the `same`; else all of that key stay separate."""
    alike: defaultdict[Hashable, list[Entry]] = defaultdict(list)
    for entry in entries:
        alike[key(entry)].append(entry)
    out: list[Entry] = []
    for group in alike.values():
        out += [merge(group)] if len(group) > 1 and may_join(group) and same(group) else group
    return out


def join_spellings(entries: list[Entry], vocabulary: Vocabulary) -> list[Entry]:
    """Join entries whose names have the same words: by spelling, design, order, number and kind."""

    def words(entry: Entry) -> tuple[str, ...]:
        return vocabulary.spelt(entry.shortest)

    def without_kind(entry: Entry) -> tuple[str, ...]:
        first, *rest = words(entry)
        is_kind = first in vocabulary.kinds and singular(first) in entry.category_words
        # the rest must be a thing: not `pause` of `map pause`, not `up` of `arrow up`
        is_thing = bool(rest) and rest[-1] not in vocabulary.marks and not ATTRIBUTES.issuperset(rest)
        return tuple(rest) if is_kind and is_thing else (first, *rest)

    def order_is_free(group: list[Entry]) -> bool:
        found = set(words(group[0]))
        marked = len(found & vocabulary.things) > 1 and found & vocabulary.things & vocabulary.marks
        return len(found & SHAPES) < 2 and (not marked or agree(group))

    def number_is_free(group: list[Entry]) -> bool:
        # `users three` shows three, `user 3` is a third user
        return not vocabulary.numbers(group[0]) and agree(group) and order_is_free(group)

    entries = join_alike(entries, words, lambda group: True)
    entries = join_alike(entries, lambda entry: without_design(words(entry)), lambda group: True)
    entries = join_alike(entries, lambda entry: tuple(sorted(words(entry))), order_is_free)
    entries = join_alike(entries, lambda entry: tuple(sorted(map(singular, words(entry)))), number_is_free)
    return join_alike(entries, without_kind, agree)


class Link(NamedTuple):
    """Two entries (by number) of which one or both name the other; one_calls: as another name, not only a tag.

    common: the share of the shorter keyword list that the other list contains.
    """

    first: int
    second: int
    one_calls: bool
    both_name: bool
    common: float

    @property
    def strength(self) -> int:
        """Return the strength: 0 by tags only, 1 by another name, 2 by another name in both directions."""
        return self.one_calls * (1 + self.both_name)

    def beats(self, rival: Link) -> bool:
        """Return whether it is clearly the more certain one."""
        if self.strength != rival.strength:
            return self.strength > rival.strength
        return self.common > 2 * rival.common


def find_links(entries: list[Entry], vocabulary: Vocabulary) -> list[Link]:
    """Find the pairs of entries that are one thing because they name each other."""
    exact = {name: i for i, entry in enumerate(entries) for name in entry.sets_of}
    spelt: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
    for name, i in exact.items():
        spelt[tuple(sorted(vocabulary.spelt(name)))].add(i)

    def named(texts: Iterable[str]) -> Iterator[int]:
        for text in texts:
            if text in exact:
                yield exact[text]
            elif len(found := spelt.get(tuple(sorted(vocabulary.spelt(text))), ())) == 1:
                yield from found

    called = [set(named(entry.aliases)) - {i} for i, entry in enumerate(entries)]
    said = [set(named(entry.keywords)) - {i} for i, entry in enumerate(entries)]
    pairs = sorted({(min(i, j), max(i, j)) for i, others in enumerate(said) for j in others})
    calls = {(a, b) for a, b in pairs if b in called[a] or a in called[b]}
    swaps = Counter(vocabulary.swap(entries[a], entries[b]) for a, b in calls)
    links = []
    for a, b in pairs:
        one, two = entries[a], entries[b]
        both = b in said[a] and a in said[b]
        if vocabulary.numbers(one) != vocabulary.numbers(two):  # `tv 2` is one set's second drawing
            continue
        swap = vocabulary.swap(one, two)
        usual = swap and swaps[swap] >= SOME
        shared = usual or one.name_words & two.name_words or one.clear_subgroups & two.clear_subgroups
        if both or ((a, b) in calls and shared):
            fewer = max(1, min(len(one.keywords), len(two.keywords)))
            links.append(Link(a, b, (a, b) in calls, both, len(one.keywords & two.keywords) / fewer))
    return links


def sure_links(entries: list[Entry], links: list[Link]) -> list[Link]:
    """Return the unambiguous links, the most certain first.

    By tags only, two are one thing if neither is linked with a third. By another name each may be linked with several,
    because a set has one of them, but not with two of one set, unless one link is clearly more certain.
    """
    others: defaultdict[int, list[tuple[int, Link]]] = defaultdict(list)
    for link in links:
        others[link.first].append((link.second, link))
        others[link.second].append((link.first, link))

    def rivals(link: Link) -> bool:
        for end, partner in ((link.first, link.second), (link.second, link.first)):
            for third, rival in others[end]:
                same_set = entries[third].packages & entries[partner].packages
                if third != partner and (not link.one_calls or (same_set and not link.beats(rival))):
                    return True
        return False

    sure = [link for link in links if may_join([entries[link.first], entries[link.second]]) and not rivals(link)]
    return sorted(sure, key=lambda link: (-link.strength, -link.common, link.first, link.second))


def join_other_names(entries: list[Entry], vocabulary: Vocabulary) -> list[Entry]:
    """Join entries that are other names of each other. One entry must name all the others, so that no chain forms."""
    links = find_links(entries, vocabulary)
    linked = {pair for link in links for pair in ((link.first, link.second), (link.second, link.first))}
    part_of = [[i] for i in range(len(entries))]
    for link in sure_links(entries, links):
        one, two = part_of[link.first], part_of[link.second]
        parts = [*one, *two]
        has_hub = any(all(i == j or (i, j) in linked for j in parts) for i in parts)
        if one is not two and has_hub and may_join([entries[i] for i in parts]):
            for i in parts:
                part_of[i] = parts
    return [merge(entries[i] for i in parts) for number, parts in enumerate(part_of) if min(parts) == number]


def join(icons: Iterable[Icon]) -> list[Entry]:
    """Return one entry for each concept, sorted by name."""
    entries = gather(icons)
    vocabulary = Vocabulary(entries)
    entries = join_spellings(entries, vocabulary)
    return sorted(join_other_names(entries, vocabulary), key=lambda entry: entry.name)
