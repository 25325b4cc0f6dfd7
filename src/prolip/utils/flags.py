"""Command-line flags from dataclass fields: one group per dataclass, one flag per field."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from prolip.utils.documents import shown

UNBROKEN = r"(?<!\w)'[^']*'(?!\w)|\{\"[^}]*\}|--[\w-]+ (?![-(])"
WIDEST = 60  # characters of choices that a metavar shows
# Before Python 3.14, argparse's own pattern reads -1e1 as a flag.
NEGATIVE_NUMBER = re.compile(r"^-(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?$|^-inf$", re.IGNORECASE)


class FlagError(ValueError):
    """An invalid flag or setting; the message names the one to use."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """argparse's, except that lines break as in `wrap`."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width)

    def _format_usage(self, usage: Any, *rest: Any) -> str:
        text = super()._format_usage(usage, *rest)
        if usage is not None or text.count("\n") < 3:  # a given or a single line
            return text
        part = r"((--\S+ )?[A-Z]\S* (?=\[[A-Z]))?\[.*?\]+(?=\s|$)"  # one flag with its values
        whole = re.sub(part, lambda found: found[0].replace(" ", "\0"), " ".join(text.split()))
        return "\n".join(wrap(whole, self._width, " " * len(f"usage: {self._prog} "))) + "\n\n"


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap a text before flags, not between a flag and its value, nor in words, in 'quoted words' or in JSON."""
    whole = re.sub(UNBROKEN, lambda part: part[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def as_typed(default: Any) -> Any:
    """Return a default value as it is typed after its flag."""
    return " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, with exceptions that name a remedy. An action's `least`: its smallest number.

    retired: other flags, without dashes -> what to type; `*` ends a prefix; "": for a word without a flag.
    """

    def __init__(self, retired: Mapping[str, str] | None = None, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **settings)
        self.retired = dict(retired or {})
        self._negative_number_matcher = NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{message} ({self.prog} --help)")

    def parse_strictly(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the given flags; FlagError with the flag to use instead."""
        others = any(action.nargs == argparse.REMAINDER for action in self._actions)
        for word in [] if others else arguments[: arguments.index("--") if "--" in arguments else None]:
            # before argparse reports a missing flag, which may be the mistyped one
            name = word.partition("=")[0]  # a word with a space is a value, as in argparse
            if name.startswith("--") and " " not in name and name not in (known := self.flags()):
                raise FlagError(explain_unknown(word, known, self.retired))
        given, unknown = self.parse_known_args(arguments)
        if unknown:
            flag = arguments[max(list(arguments).index(unknown[0]) - 2, 0)]  # that of the word before, if it has one
            remedy = f"{flag} takes one value" if flag in self.flags() else "give settings as --flag value"
            raise FlagError(f"got {' '.join(unknown)!r} without a flag: {self.retired.get('', remedy)}")
        for action in self._actions:
            value, least = getattr(given, action.dest, None), getattr(action, "least", None)
            if least is not None and isinstance(value, int) and value < least and value != action.default:
                raise FlagError(f"{action.option_strings[-1]} {value}: give {least} or more")
        return given

    def flags(self) -> list[str]:
        """Return all long flags."""
        return sorted(word for action in self._actions for word in action.option_strings if word.startswith("--"))


def explain_unknown(word: str, known: Iterable[str], retired: Mapping[str, str]) -> str:
    """Return the message for an unknown flag, with what to type instead."""
    known = list(known)
    flag = word.split("=")[0]
    kebab = flag.replace("_", "-")
    if kebab in known:
        return f"unknown flag {flag}: use {kebab}"
    name = kebab.removeprefix("--")
    for pattern, remedy in retired.items():
        if fnmatch(name, pattern) or name.removeprefix("no-") == pattern:
            return f"{flag} is not a flag here: {remedy}"
    return f"unknown flag {flag}: " + did_you_mean(kebab, known, "--help lists all flags")


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three known words similar to this one in any case, nearest first."""
    lower = {name.lower(): name for name in known}
    return [lower[name] for name in difflib.get_close_matches(word.lower(), lower, n=3, cutoff=0.5)]


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Ask for the known words similar to an unknown one; without any, return `otherwise` or a list of all."""
    known = list(known)
    near = nearest(word, known)
    return f"did you mean {' or '.join(near)}?" if near else otherwise or f"choose from {', '.join(known)}"


def flag_of(name: str) -> str:
    """Convert train_data to --train-data."""
    return "--" + name.replace("_", "-")


def check_alone(config: Any, names: Iterable[str], remedy: str) -> None:
    """Raise FlagError if more than one of these settings is given."""
    given = [flag_of(name) for name in names if getattr(config, name) is not None]
    if len(given) > 1:
        raise FlagError(f"{' and '.join(given)} contradict each other: give {remedy}")


def check_range(  # noqa: PLR0913 (the ends of a range)
    config: Any, *names: str, least: float = 0, most: float = math.inf, above=False, below=False, remedy: str = ""
) -> None:
    """Raise FlagError for a number outside [least, most], without ends that are `above` or `below`, or infinite."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, str | None):
            continue
        low, high = value > least if above else value >= least, value < most if below else value <= most
        if low and high and abs(value) < math.inf:
            continue
        ends = [] if least == -math.inf else [f" {'above' if above else 'of at least'} {least}"]
        ends += [] if most == math.inf else [f" {'below' if below else 'at most'} {most}"]
        finite = "finite " if most == math.inf and (above or not ends) else ""
        raise FlagError(f"{flag_of(name)} {value}: give a {finite}number{' and'.join(ends)}{remedy}")


def check_choices(config: Any) -> None:
    """Raise FlagError for a field of a Literal type, or with `choices`, that has another value."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        hint, value = hints[field.name], getattr(config, field.name)
        known = field.metadata.get("choices") or (get_args(hint) if get_origin(hint) is Literal else [value])
        if value not in known:
            raise FlagError(f"{field.name}={value!r} is unknown: use one of {', '.join(known)}")


def add_flags(parser: argparse.ArgumentParser, section: str, config: type, leave_out: Iterable[str] = ()) -> None:
    """Add one argument group for a dataclass, with one flag per field; absent flags leave no value."""
    # the docstring of a dataclass without one is its signature
    text = "" if (config.__doc__ or "").startswith(f"{config.__name__}(") else inspect.getdoc(config) or ""
    first = re.split(r"(?<=\.)\s", text.replace("\n", " "))[0]
    group = parser.add_argument_group(section, textwrap.fill(first, 78))
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        own = argument_settings(hints[field.name], field.metadata.get("choices"), field.metadata.get("also", ""))
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        ending = "" if default in (None, (), [], {}, "", dataclasses.MISSING) else f" (default: {as_typed(default)})"
        own |= {"help": with_choices(f"{field.metadata.get('help', '')}{ending}", own).replace("%", "%%")}
        group.add_argument(flag_of(field.name), dest=f"{section}.{field.name}", default=argparse.SUPPRESS, **own)


def argument_settings(hint: Any, choices: Iterable[Any] | None = None, also: str = "") -> dict[str, Any]:
    """Return argparse's settings for a type: bool, int, float, str, Literal, Optional, list or tuple of these, dict."""
    inner, optional = _unwrap_optional(hint)
    origin = get_origin(inner)
    if inner is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        choices, inner = get_args(inner), type(get_args(inner)[0])
    if inner is dict or origin is dict:
        return {"nargs": "*", "action": _Pairs, "metavar": "KEY=VALUE"}
    settings: dict[str, Any] = {}
    if origin in (list, tuple):
        kinds = get_args(inner)
        settings["nargs"] = "*" if origin is list or kinds[-1] is Ellipsis else len(kinds)
        inner = kinds[0]
    if inner not in (int, float, str):
        raise TypeError(f"no flag for a field of type {hint}: use bool, int, float, str, Literal, list, tuple or dict")

    def convert(word: str) -> Any:
        if also and re.fullmatch(also, word):
            return word
        return None if optional and word.lower() == "none" else inner(word)

    convert.__name__ = inner.__name__  # argparse's messages use this name
    settings |= {"type": convert, "metavar": inner.__name__.upper()}
    if choices is not None:
        text = "{" + ",".join(map(str, choices)) + "}"
        settings |= {"choices": tuple(choices), "metavar": text if len(text) <= WIDEST else "CHOICE"}
    return settings


def with_choices(help: str, settings: Mapping[str, Any]) -> str:
    """Append the choices to a help text if the metavar does not show them."""
    return f"{help}; one of {', '.join(settings['choices'])}" if settings.get("metavar") == "CHOICE" else help


def build(config: type, section: str, values: Mapping[str, Any]) -> Any:
    """Build the dataclass from values of flags or a config file; FlagError for unknown names."""
    hints = typing.get_type_hints(config)
    names = {field.name: field.metadata.get("also", "") for field in dataclasses.fields(config)}
    for name in (name for name in values if name not in names):
        remedy = did_you_mean(str(name)[:80], names, f"use {', '.join(names) or 'none, it has no settings'}")
        raise FlagError(f"{section} has no setting {shown(name)}: {remedy}")
    return config(**{name: check_type(f"{section}.{name}", v, hints[name], names[name]) for name, v in values.items()})


def check_type(name: str, value: Any, hint: Any, also: str = "") -> Any:
    """Convert a value from a file to its field's type: lists to tuples, integers to floats. also: as in `option`."""
    inner, optional = _unwrap_optional(hint)
    if (value is None and optional) or (also and isinstance(value, str) and re.fullmatch(also, value)):
        return value
    origin, kinds = get_origin(inner), get_args(inner)
    if origin is Literal and value in kinds:
        return value
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        if origin is tuple and kinds[-1] is not Ellipsis and len(value) != len(kinds):
            raise FlagError(f"{name} is {shown(value)}: give {len(kinds)} values")
        return origin(check_type(name, item, kinds[0]) for item in value)
    if inner is float and isinstance(value, (str, int)) and not isinstance(value, bool):  # YAML's 1e-3 is a string
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise FlagError(f"{flag_of(name.rpartition('.')[2])} is {value}: give a finite number")
    if inner is int and isinstance(value, int) and abs(value) >= 2**63:
        raise FlagError(f"{name} is {shown(value)}: give a number below 2^63")
    expected = object if origin is Literal else origin or inner
    if origin is Literal or not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        choice = f"one of {', '.join(map(str, kinds))}" if origin is Literal else f"a {expected.__name__}"
        raise FlagError(f"{name} is {shown(value)}, a {type(value).__name__}: give {choice}")
    return value


def _unwrap_optional(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        if len(kinds) != 1 or len(get_args(hint)) != 2:
            raise TypeError(f"no flag for a field of type {hint}: a union may only add None")
        return kinds[0], True
    return hint, False


class _Pairs(argparse.Action):
    """Action that parses key=value words into a dict; values are Python literals, or else strings."""

    def __call__(self, parser, namespace, values, option_string=None):
        pairs = {}
        for word in values:
            key, equals, value = word.partition("=")
            if not equals:
                raise FlagError(f"{option_string} {word!r}: give key=value, such as {word}=1")
            try:
                pairs[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                pairs[key] = value
        setattr(namespace, self.dest, pairs)
