"""The caption of a sample in an epoch, the identity of captions for known matches, and the selection of samples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from prolip.data.faults import SampleFault
from prolip.utils.messages import first_few

#: The plain `.txt` member of a sample (the caption column of a CSV), and its value: one caption or several.
PLAIN = "txt"
Plain = str | list[str] | None
Shares = Mapping[str, float]
#: Common names of caption fields, the likeliest first.
LIKELY: tuple[str, ...] = ("caption", "captions", "text", "texts", "title", "description", "alt", "alt_text")
LIKELY += ("sentence", "sentences", "raw", "prompt", "name", "label")
#: Selections with a name, which a rule gives in place of a condition: the demo's animals, foods and places.
SELECTIONS = {"demo": "group=animals nature|food drink|travel places; subgroup!=time"}


class Drawn(NamedTuple):
    """The caption of this epoch, every caption of the sample, and the text to read."""

    caption: str
    all: tuple[str, ...]
    text: str


def stable_hash(*parts: object, bits: int = 64) -> int:
    """Return a hash of `bits` (at most 64) bits, equal in every process and on every machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


@lru_cache(maxsize=2**16)
def caption_id(caption: str) -> int:
    """Return the identity of a caption text: 63 bits, so that it is a non-negative int64."""
    return stable_hash(caption, bits=63)


def drop_words(caption: str, share: float, *identity: object) -> str:
    """Drop each word with probability `share`, as a function of `identity`, but keep at least one (as PCME does)."""
    if not share:
        return caption
    rng, words = random.Random(stable_hash(*identity, "words")), caption.split()
    kept = [word for word in words if rng.random() >= share]
    return " ".join(kept or [rng.choice(words)])


@dataclass(frozen=True)
class CaptionSampler:
    """Sampler of captions: draws a field by weight among those with captions, then one caption of that field."""

    fields: tuple[str, ...] = (PLAIN,)  # `txt`, or JSON fields that contain a text or a list of texts
    weights: tuple[float, ...] = (1.0,)
    templates: tuple[str, ...] = ()  # prompts with {} for a caption
    shares: Shares | None = None  # field -> share of its captions, other than prompts, that get a template

    @classmethod
    def parse(cls, text: str, templates: Sequence[str] = (), shares: Shares | None = None) -> CaptionSampler:
        """Read "txt", "name,keywords" or "name:2,keywords:1"; ValueError with an example otherwise."""
        remedy = "give fields with optional weights, such as txt or name:2,keywords:1,group"
        fields, weights = [], []
        for part in text.split(","):
            name, colon, weight = (word.strip() for word in part.partition(":"))
            try:
                value = float(weight) if colon else 1.0
            except ValueError:
                value = -1.0
            if not name or name in fields or not 0 < value < float("inf"):
                what = "an empty name" if not name else "a name twice" if name in fields else f"the weight {weight!r}"
                raise ValueError(f"--caption-sampling {text!r} contains {what}: {remedy}")
            fields.append(name)
            weights.append(value)
        if wrong := [one for one in templates if one.count("{}") != 1 or one == "{}"]:
            raise ValueError(f"--caption-templates {wrong[0]!r}: give words with one {{}}, such as 'a photo of {{}}'")
        given = (shares or {}).items()
        good = all(name in fields and isinstance(share, float) and 0 < share < 1 for name, share in given)
        if bool(templates) != bool(shares) or not good:
            remedy = "give fields of --caption-sampling with shares between 0 and 1, such as name=0.2"
            raise ValueError(f"--caption-template-shares: with --caption-templates, and only then, {remedy}")
        return cls(tuple(fields), tuple(weights), tuple(templates), shares)

    def draw(self, plain: Plain, record: Mapping[str, Any] | None, seed: int, but: Collection[str] = ()) -> Drawn:
        """Return the caption for `seed`, none of `but` if there are others; SampleFault if no field has one."""
        found, weights = self._find(plain, record)
        every = tuple(dict.fromkeys(caption for captions in found for caption in captions))
        if but and not set(every) <= set(but):
            found = [[caption for caption in captions if caption not in but] for captions in found]
            weights = [weight if captions else 0.0 for weight, captions in zip(weights, found)]
        rng = random.Random(seed)
        field = rng.choices(range(len(found)), weights)[0]
        caption = rng.choice(found[field])
        prompted = rng.random() < self._share(self.fields[field], caption)
        return Drawn(caption, every, rng.choice(self.templates).replace("{}", caption) if prompted else caption)

    def chances(self, plain: Plain, record: Mapping[str, Any] | None) -> dict[str, float]:
        """Return every text of a sample with the probability that training reads it; SampleFault if there is none.

        One template, chosen by the caption, represents all of them, so texts are at most twice as many as captions.
        """
        found, weights = self._find(plain, record)
        out: dict[str, float] = {}
        for field, captions, weight in zip(self.fields, found, weights):
            for caption in captions:
                chance, share = weight / sum(weights) / len(captions), self._share(field, caption)
                out[caption] = out.get(caption, 0.0) + (1 - share) * chance
                if share:
                    prompt = self.templates[stable_hash(caption) % len(self.templates)].replace("{}", caption)
                    out[prompt] = out.get(prompt, 0.0) + share * chance
        return out

    def _share(self, field: str, caption: str) -> float:
        """Return the share of a caption's draws that get a template: 0 if it is already a prompt."""
        ends, lower = (template.lower().split("{}") for template in self.templates), caption.lower()
        known = any(lower.startswith(begin) and lower.endswith(end) for begin, end in ends)
        return 0.0 if known else (self.shares or {}).get(field, 0.0)

    def _find(self, plain: Plain, record: Mapping[str, Any] | None) -> tuple[list[list[str]], list[float]]:
        """Return the captions and the weight of every field; the weight is 0 without captions."""
        found = [texts(plain if field == PLAIN else (record or {}).get(field), field) for field in self.fields]
        weights = [weight if captions else 0.0 for weight, captions in zip(self.weights, found)]
        if not any(weights):
            there = "" if record is None else f"; {offer_fields(record)}"
            raise SampleFault("no caption", f"no text in {', '.join(self.fields)}{there}")
        return found, weights


def offer_fields(record: Mapping[str, Any]) -> str:
    """List the fields of a sample's JSON, with the flag that draws captions from the likeliest."""
    values = {name: value if isinstance(value, list) else [value] for name, value in record.items()}
    names = [name for name, value in values.items() if value and all(isinstance(one, str) and one for one in value)]
    known = [name for name in LIKELY if name in names] + [name for name in names if name.lower() in LIKELY]
    advice = f": --caption-sampling {[*known, *names][0]}" if names else ", none of which is a text"
    return f"the fields are {first_few([*record], 12) or 'none'}{advice}"


def texts(value: object, field: str) -> list[str]:
    """Return a text or a list of texts as a list of stripped, non-empty texts; SampleFault for other types."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, (dict, list, bool)) or one is None for one in values):
        raise SampleFault("bad json", f"{field} is {str(value)[:80]!r}, expected a text or a list of texts")
    # JSON may contain unpaired surrogates, which cannot be encoded; they become U+FFFD
    whole = (str(one).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").strip() for one in values)
    return [text for text in whole if text]


class Condition(NamedTuple):
    """A field, and values of which a sample must have one, or none if `excludes`."""

    field: str
    values: tuple[str, ...]
    excludes: bool = False

    def holds(self, carried: Iterable[str]) -> bool:
        """Return whether to keep a sample that has these texts in the field."""
        return any(value in self.values for value in carried) != self.excludes

    def __str__(self) -> str:
        return f"{self.field}{'!=' if self.excludes else '='}{'|'.join(self.values)}"


@dataclass(frozen=True)
class Selector:
    """Selector of samples by JSON fields: keeps one if every condition holds."""

    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, text: str | None) -> Selector | None:
        """Read a rule such as "group=food drink;subgroup!=time" or "demo;style=noto", with names of SELECTIONS.

        None for no rule; ValueError with an example for a wrong one.
        """
        if not text:
            return None
        conditions, example = [], "'group=animals nature|food drink;style!=noto'"
        named = ";".join(SELECTIONS.get(part.strip(), part) for part in text.split(";"))
        for part in filter(None, map(str.strip, named.split(";"))):
            field, equals, values = part.partition("=")
            name = field.removesuffix("!").strip()
            given = tuple(value.strip() for value in values.split("|") if value.strip())
            if not (name and equals and given):
                expected = f"give field=value|value or field!=value|value, several joined by ';', e.g. {example}"
                raise ValueError(f"{text!r}: {part!r} is not a condition: {expected}")
            conditions.append(Condition(name, given, excludes=field.endswith("!")))
        return cls(tuple(conditions))

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Return whether to keep a sample with this JSON."""
        return all(c.holds(texts(record.get(c.field), c.field)) for c in self.conditions)
