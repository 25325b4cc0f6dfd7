"""Which names of icons are one concept.

Icons of one normalised name are. Then names are joined by these rules, each over what those before it have left:

- spelling: `bell-slash` is `bell off`, `number-two` is `number 2`, `qrcode` is `qr code` where some set writes that;
- design: `calendar-alt` is `calendar`;
- order: `circle-check` is `check circle`; but `eye search` is `search eye` only if the sets agree, for both are marks;
- number: `thumbs-up` is `thumb up` if the sets agree;
- kind: `currency-euro` is `euro` if the sets agree, as currency is its category;
- other names: one set calls its icon so, and the two share a word or a subgroup, or differ by words that are swapped
  in other names too; or the tags of both name each other; never if their numbers differ.

The sets agree if all of them give a keyword that is not in the names, or a subgroup. No rule joins what one set draws
as two, for that set tells them apart, nor a logo with anything else, nor a name that has two ways to go.
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

#: Words that differ between the sets alone.
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
#: Last words that only say that it is another drawing.
DESIGNS = {"alt", "variant"}
#: How many names of a set begin or end with a word that is a kind of things, or a mark beside a thing.
MANY = 10
#: How often sets have to write one word for another before it counts as the same: `magnify` and `search`.
SOME = 3
#: Last words that say what is done to a thing, not what it is.
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
#: What a thing stands in. Of two shapes the order of words says which is inside.
SHAPES = {"circle", "square", "hexagon", "octagon", "triangle", "rectangle", "diamond", "pentagon", "box"}
ATTRIBUTES = MODIFIERS | SHAPES | {"top", "bottom", "vertical", "horizontal", "center"}
LOGO = " logo"


class Icon(NamedTuple):
    """One drawing as its set describes it: normalised name, aliases and tags, its categories in lower case."""

    package: str
    style: str
    name: str
    svg: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()


class Entry:
    """What all sets say of names that are one concept."""

    def __init__(self, icons: Iterable[Icon]) -> None:
        self.icons = list(icons)
        self.sets_of: defaultdict[str, set[str]] = defaultdict(set)
        for icon in self.icons:
            self.sets_of[icon.name].add(icon.package)

    @cached_property
    def name(self) -> str:
        """What most sets call it, then what is shorter."""
        return min(self.sets_of, key=lambda name: (-len(self.sets_of[name]), len(name), name))

    @cached_property
    def shortest(self) -> str:
        """The shortest of its names: the one without a word of design."""
        return min(self.sets_of, key=lambda name: (len(name), name))

    @cached_property
    def packages(self) -> set[str]:
        """The sets that draw it."""
        return {icon.package for icon in self.icons}

    @cached_property
    def aliases(self) -> set[str]:
        """What its sets also call it."""
        return {word for icon in self.icons for word in icon.aliases}

    @cached_property
    def keywords(self) -> set[str]:
        """All aliases and tags."""
        return self.aliases.union(*(icon.tags for icon in self.icons))

    @cached_property
    def clear_subgroups(self) -> set[str]:
        """What the sets' categories are called here, without the vague ones that say nothing of a thing."""
        subgroups = {SUBGROUP[c] for icon in self.icons for c in icon.categories if c in SUBGROUP}
        return {subgroup for subgroup in subgroups if GROUP[subgroup] != VAGUE}

    @cached_property
    def category_words(self) -> set[str]:
        """The words of its sets' categories."""
        return {singular(word) for icon in self.icons for c in icon.categories for word in normalise(c).split()}

    @cached_property
    def name_words(self) -> set[str]:
        """The words of all its names."""
        return {singular(word) for name in self.sets_of for word in name.split()}


# ------------------------------------------------------------------------------------------------- names


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
    return plain.removeprefix("brand ").removesuffix(LOGO) + LOGO


def singular(word: str) -> str:
    """A word without the s of a plural."""
    if len(word) > 3 and word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def without_design(words: tuple[str, ...]) -> tuple[str, ...]:
    """Words without those at the end that only say that it is another drawing."""
    while len(words) > 1 and words[-1] in DESIGNS:
        words = words[:-1]
    return words


class Vocabulary:
    """How the sets write words, and what they use them for.

    compounds: {word that some name writes as two: the two}; things: words that are names of their own; marks: words
    that end many names of a set; kinds: words of a set's categories that begin many of its names.
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
        """The words of a name in the one way in which all sets could write them."""
        parts = (part for word in name.split() for part in self.compounds.get(word, (word,)))
        return tuple(SAME_WORDS.get(part, part) for part in parts)

    def numbers(self, entry: Entry) -> list[str]:
        """The numbers in its name."""
        return [word for word in self.spelt(entry.shortest) if word.isdigit()]

    def swap(self, one: Entry, two: Entry) -> frozenset[str]:
        """The two words in which two names differ; empty if they differ in more."""
        mine, theirs = (Counter(self.spelt(entry.shortest)) for entry in (one, two))
        words = [*(mine - theirs).elements()], [*(theirs - mine).elements()]
        return frozenset(words[0] + words[1]) if len(words[0]) == len(words[1]) == 1 else frozenset()


# ------------------------------------------------------------------------------------------------ joining


def gather(icons: Iterable[Icon]) -> list[Entry]:
    """One entry for each name, sorted."""
    by_name: defaultdict[str, list[Icon]] = defaultdict(list)
    for icon in icons:
        by_name[icon.name].append(icon)
    return [Entry(by_name[name]) for name in sorted(by_name)]


def may_join(entries: list[Entry]) -> bool:
    """Whether no set draws two of them, and all are logos or none is."""
    sets = set().union(*(entry.packages for entry in entries))
    return len(sets) == sum(len(entry.packages) for entry in entries) and (
        len({entry.name.endswith(LOGO) for entry in entries}) == 1
    )


def agree(entries: list[Entry]) -> bool:
    """Whether all say the same of a thing by a keyword that is not in their names, or by a subgroup."""
    own = set().union(*(entry.name_words for entry in entries))
    said = set.intersection(*(entry.keywords for entry in entries))
    said = {text for text in said if not own.issuperset(map(singular, text.split()))}
    return bool(said or set.intersection(*(entry.clear_subgroups for entry in entries)))


def merge(entries: Iterable[Entry]) -> Entry:
    """The entry of all their icons."""
    return Entry(icon for entry in entries for icon in entry.icons)


def join_alike(
    entries: list[Entry], key: Callable[[Entry], Hashable], same: Callable[[list[Entry]], bool]
) -> list[Entry]:
    """Entries of one key made one where they may be joined and are the `same`; else all of that key stay apart."""
    alike: defaultdict[Hashable, list[Entry]] = defaultdict(list)
    for entry in entries:
        alike[key(entry)].append(entry)
    out: list[Entry] = []
    for group in alike.values():
        out += [merge(group)] if len(group) > 1 and may_join(group) and same(group) else group
    return out


def join_spellings(entries: list[Entry], vocabulary: Vocabulary) -> list[Entry]:
    """Entries whose names are the same words: by spelling, design, order, number and kind."""

    def words(entry: Entry) -> tuple[str, ...]:
        return vocabulary.spelt(entry.shortest)

    def without_kind(entry: Entry) -> tuple[str, ...]:
        first, *rest = words(entry)
        is_kind = first in vocabulary.kinds and singular(first) in entry.category_words
        # what is left has to be a thing: not `pause` of `map pause`, not `up` of `arrow up`
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
    """Two entries (by number) of which one names the other, or both do; one_calls: as another name, not a tag alone.

    common: the share of the keywords of the one that has fewer that the other has too.
    """

    first: int
    second: int
    one_calls: bool
    both_name: bool
    common: float

    @property
    def strength(self) -> int:
        """By what they are linked: tags alone 0, another name 1, another name and back 2."""
        return self.one_calls * (1 + self.both_name)

    def beats(self, rival: Link) -> bool:
        """Whether it is clearly the surer one."""
        if self.strength != rival.strength:
            return self.strength > rival.strength
        return self.common > 2 * rival.common


def find_links(entries: list[Entry], vocabulary: Vocabulary) -> list[Link]:
    """The pairs of entries that are one thing by what they call each other."""
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
    """Those that leave no choice, the surest first.

    By tags alone two are one thing only if neither is linked with a third. By another name each may be linked with
    several, for a set has one of them, but with no two of one set, unless one link is clearly the surer.
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
    """Entries that are other names of each other; one of several names all the others, so that none form a chain."""
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
    """One entry for each concept, sorted by name."""
    entries = gather(icons)
    vocabulary = Vocabulary(entries)
    entries = join_spellings(entries, vocabulary)
    return sorted(join_other_names(entries, vocabulary), key=lambda entry: entry.name)
