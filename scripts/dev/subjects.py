#!/usr/bin/env python
"""Check the subjects of commits: imperative, at most 72 characters.

    python scripts/dev/subjects.py                 the commits since the rule began
    python scripts/dev/subjects.py main..HEAD      those of a branch

Prints one line for each wrong subject. Ends with 1 if there is one, with 2 if git cannot list the commits.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The last commit before the rule, and later commits on main whose wrong subjects remain.
SINCE = "a3315455b39dc49d"
KEPT = frozenset(["82fd14bc", "ca4885b8"])
LONGEST = 72
#: First words that are no imperatives: "Added", "Fixes", "Moving", and words that begin a clause or a noun phrase.
VERBS = "add allow change check correct delete describe drop fix give improve keep make move name read remove rename"
VERBS += " replace return rewrite run say show test update use write"
OTHERS = "a an the this that these what which when where of on in for from with if it its now some more"


def forms(verb: str) -> set[str]:
    """Return the past, the third person and the participle of a regular verb, and close misspellings."""
    stem = verb.removesuffix("e")
    doubled = verb + verb[-1]
    third = f"{verb}es" if verb.endswith(("s", "x", "ch", "sh")) else f"{verb}s"
    return {third, f"{stem}ed", f"{stem}ing", f"{doubled}ed", f"{doubled}ing"}


PAST = "gave gives kept made said wrote written ran"
WRONG = frozenset([*OTHERS.split(), *PAST.split()]).union(*map(forms, VERBS.split()))


def problem(subject: str) -> str:
    """Return the fault of a subject, or an empty text."""
    first = re.match(r"[\w'-]*", subject)[0]  # type: ignore[index]  # it always matches
    if len(subject) > LONGEST:
        return f"{len(subject)} characters, at most {LONGEST}"
    if first.lower() in WRONG:
        return f"begins with {first!r}: begin with an imperative, such as Add, Fix or Describe"
    if not first[:1].isupper():
        return "begin with a capital letter"
    return "no full stop at the end" if subject.endswith(".") else ""


def subjects(span: str) -> list[tuple[str, str]]:
    """Return the commits of a span, hash and subject. OSError if git does not have them."""
    command = ["git", "-C", str(ROOT), "log", "--format=%H %s", span]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[0])
    return [(line[:space], line[space + 1 :]) for line in done.stdout.splitlines() for space in [line.index(" ")]]


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    try:
        every = subjects(words[0] if words else f"{SINCE}..HEAD")
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = [f"{name[:8]} {text}: {wrong}" for name, text in every if (wrong := problem(text)) and name[:8] not in KEPT]
    print(*found, sep="\n", end="\n" * bool(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
