#!/usr/bin/env python
"""Count and list faults that make prose hard to read: long sentences, banned words, fragments in docstrings.

    python scripts/dev/prose.py                    the counts of this tree as a table
    python scripts/dev/prose.py --pages            words and sentences of each page
    python scripts/dev/prose.py --list src/prolip/search docs/start.md    each finding with its line

tests/scripts/dev/test_glossary.py compares the words and their replacements with docs/developing/glossary.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import shlex
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Pattern of a banned word -> the words to write instead.
BANNED = {
    r"behind": "after, below",
    r"besides?": "next to, and, as well as",
    r"anew": "again",
    r"(?:go|goes|going|went|gone) on": "continue, resume",
    r"wants?|wanted": "require, expect, need",
    r"tells?|told": "report, say, distinguish",
    r"stands?(?!-| for\b)|stood": "is, has",
    r"whoever|whatever|nobody": "name the person or the thing",
    r"meanwhile": "at the same time",
    r"what (?:it is|they are) worth": "how well it predicts errors",
    r"taken up again|takes? up again": "resumed",
    r"made up for": "repeated",
    r"pictures?|pictured": "image",
    r"surest|sureness|surer": "most certain, confidence, more certain",
    r"(?:leaves?|left|leaving) open": "name what is uncertain",
    r"(?:broken|broke|breaks?) off": "interrupted",
    r"strangeness|newness": "novelty",
    r"spoilt|spoiled": "damaged",
    r"for good": "permanently",
}
WORD = re.compile(rf"(?<![\w-])(?:{'|'.join(BANNED)})(?![\w-])", re.I)
#: First words of docstrings that begin neither with a verb nor with a noun phrase.
OPENERS = frozenset(
    [
        "what",
        "whatever",
        "its",
        "of",
        "those",
        "these",
        "that",
        "which",
        "who",
        "whose",
        "whoever",
        "where",
        "when",
        "whether",
        "how",
        "as",
        "by",
        "in",
        "on",
        "at",
        "from",
        "for",
        "to",
        "with",
        "without",
        "and",
        "but",
        "or",
        "if",
        "because",
        "so",
        "than",
        "not",
    ]
)
#: Code, and quoted words.
QUOTED = re.compile(r'```.*?```|`[^`]*`|"[^"\n]*"', re.S)
PROMPT = "a picture of"  # a template, which is data
FENCE = re.compile(r"^ *```.*?^ *```", re.S | re.M)
TABLE = re.compile(r"^\|.*$", re.M)


def pages(root: Path) -> list[Path]:
    """Return every page of a tree that a person reads: README, docs and the READMEs of folders."""
    found = [root / "README.md", *root.glob("docs/**/*.md"), root / "slurm/README.md", root / "data/emoji/README.md"]
    return sorted(path for path in found if path.is_file())


def generated(path: Path) -> bool:
    """Return whether the first line of a page says that a program wrote it."""
    return path.read_text(encoding="utf-8").startswith("<!-- Generated")


def prose(text: str) -> str:
    """Return the running text of a page, without code, tables, comments, images and the targets of links."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("\n", text), flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", TABLE.sub("", text))
    text = re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`+[^`]*`+", "code", text)


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, items of lists and headings, each as one line."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose(text)):
        line = re.sub(r"^\s*(?:#+|[-*>]|\d+\.) +", "", " ".join(block.split()))
        if line and not block.lstrip().startswith((":::", "!!!")):
            yield line.replace("**", "").replace("*", "")


def sentences(text: str) -> list[list[str]]:
    """Return the sentences of a page as lists of words. A heading or item without a full stop counts as one."""
    split = [part for line in paragraphs(text) for part in re.split(r"(?<=[.!?:])[\")]?\s+(?=[\"'(A-Z0-9]|code)", line)]
    return [words for part in split if len(words := re.findall(r"[\w'’.,%/+-]*\w[\w'’%+-]*", part)) > 1]


def findings(text: str) -> list[tuple[int, str, str]]:
    """Return the banned words in a text: line, word, replacement."""
    return [(text.count("\n", 0, match.start()) + 1, match[0], instead_of(match[0])) for match in WORD.finditer(text)]


def instead_of(word: str) -> str:
    return next(new for old, new in BANNED.items() if re.fullmatch(old, word, re.I))


def checked(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file that people read, with their first lines: strings and comments of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, re.sub(QUOTED, lambda quoted: re.sub(r"[^\n]", "x", quoted[0]), text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value.replace(PROMPT, "")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa")):
            yield token.start[0], token.string


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, with their lines."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def fragment(docstring: str) -> bool:
    """Return whether a docstring begins with a fragment, such as "What is kept" or "Of both directions"."""
    words = re.findall(r"[\w'’-]+", docstring)
    return bool(words) and words[0].lower() in OPENERS


def commands(path: Path) -> list[str]:
    """Return the programs that the blocks of a page start, one entry per command."""
    found = []
    for block in re.findall(r"^ *```(?:bash|sh|console)\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.S | re.M):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            if words := line_words(re.sub(r"(^|\s)#.*", "", line)):
                found.append(door(words))
    return found


def line_words(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError:  # the first or last line of a loop
        return []
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def door(words: list[str]) -> str:
    """Return the program of a command line by its usual name: `prolip`, `python -m x`, `scripts/x.py`, `make test`."""
    if "-m" in words[:8]:
        return f"python -m {words[words.index('-m') + 1]}"
    for word in words[:4]:
        if word.endswith((".py", ".sbatch", ".sh")):
            return word
    first = words[0].rsplit("/", 1)[-1]
    return " ".join([first, *words[1:2]]) if first == "make" else first


def python_files(root: Path) -> list[Path]:
    return sorted(path for folder in ("src", "scripts", "slurm") for path in (root / folder).rglob("*.py"))


def count(root: Path) -> dict[str, int]:
    """Return the counts of a tree."""
    read = [path for path in pages(root) if path.name != "CHANGELOG.md" and not generated(path)]
    texts = [path.read_text(encoding="utf-8") for path in read]
    every = [words for text in texts for words in sentences(text)]
    typed = [name for path in read for name in commands(path)]
    strings = [text for path in python_files(root) for _, text in checked(path)]
    said = [text for path in python_files(root) for _, text in docstrings(path)]
    changes = root / "docs/CHANGELOG.md"
    guides = [path for path in read if path.name == "README.md" and path.parent == root or "guides" in path.parts]
    guides += [root / "docs/start.md"] * (root / "docs/start.md").is_file()
    return {
        "pages (without changelog and generated)": len(read),
        "words": sum(len(text.split()) for text in texts),
        "words of README, start and guides": sum(len(path.read_text(encoding="utf-8").split()) for path in guides),
        "words of the changelog": len(changes.read_text(encoding="utf-8").split()) if changes.is_file() else 0,
        "commands": len(typed),
        "doors": len(set(typed)),
        "sentences": len(every),
        "sentences over 25 words": sum(len(words) > 25 for words in every),
        "banned words in pages": sum(len(findings(text)) for path in read for _, text in checked(path)),
        "banned words in code": sum(len(findings(text)) for text in strings),
        "docstrings": len(said),
        "docstrings that begin with a fragment": sum(map(fragment, said)),
    }


def print_findings(places: list[Path]) -> None:
    """Print each banned word, long sentence and fragment of files and folders, with its line."""
    for place in places:
        files = [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.md")])
        for path in files:
            for start, text in checked(path):
                for line, word, new in findings(text):
                    print(f"{path}:{start + line - 1}: {word!r}: {new}")
            if path.suffix == ".py":
                for line, text in docstrings(path):
                    if fragment(text):
                        print(f"{path}:{line}: begins with a fragment: {text.splitlines()[0]}")
            else:
                for words in sentences(path.read_text(encoding="utf-8")):
                    if len(words) > 25:
                        print(f"{path}: {len(words)} words: {' '.join(words[:9])} ...")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="tree to count")
    parser.add_argument("--pages", action="store_true", help="print words and sentences of each page")
    parser.add_argument("--list", nargs="+", type=Path, metavar="PATH", help="list the findings of files and folders")
    args = parser.parse_args()
    if args.list:
        print_findings(args.list)
    elif args.pages:
        for path in pages(args.root):
            lengths = [len(words) for words in sentences(path.read_text(encoding="utf-8"))] or [0]
            mean, long = sum(lengths) / len(lengths), sum(length > 25 for length in lengths)
            page = path.relative_to(args.root)
            print(
                f"| {page} | {len(path.read_text(encoding='utf-8').split())} | {mean:.0f} | {max(lengths)} | {long} |"
            )
    else:
        for name, number in count(args.root).items():
            print(f"| {name} | {number:,} |")


if __name__ == "__main__":
    main()
