"""Every command that a page, a batch script, a recipe, a notebook or a message spells is one that `prolip` takes."""

import re
import shlex
from pathlib import Path

import pytest

from prolip.cli.command import parser_of
from prolip.cli.main import VERBS, commands_of, find
from prolip.utils.moved import DOORS

ROOT = Path(__file__).parents[3]
PLACES = ("README.md", "Makefile", "pyproject.toml", "docs", "slurm", "scripts", "src", "data", ".github", ".ci")
KINDS = {".md", ".sbatch", ".py", ".yaml", ".yml", ".j2", ".ipynb", ".js", ".sh", ""}
#: What is allowed to spell what is gone: its history, and the table that says what to type instead.
HISTORY = {"docs/CHANGELOG.md", "src/prolip/utils/moved.py"}
VERB_NAMES = {verb for verbs in VERBS.values() for verb in verbs}
OLD = re.compile(
    r"python3? -m (?:" + "|".join(re.escape(door) for door in sorted(DOORS, key=len, reverse=True)) + r")\b"
    r"|\bprolip-(?:search|hub|explore|figures|hierarchy)\b(?!-)|plan_run\.py|slurm/export\.py"
)


def texts() -> dict[str, str]:
    """Path -> text of every file that people read or run."""
    found = {}
    for place in PLACES:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            name = file.relative_to(ROOT).as_posix()
            if file.is_file() and file.suffix in KINDS and "__pycache__" not in name and name not in HISTORY:
                found[name] = file.read_text(encoding="utf-8", errors="replace")
    return found


TEXTS = texts()


def whole_lines(name: str, text: str) -> list[str]:
    """The command lines of a file that begin with `prolip`, continued lines joined and comments dropped.

    In pages these are lines of code blocks; elsewhere, lines that hold nothing else.
    """
    text = text.replace("\\\\\n", "\\\n")
    if name.endswith(".ipynb"):
        text = text.replace("\\n", "\n").replace('\\"', "'").replace('",', "")
    if name.endswith(".md"):
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        text = "\n".join(block for kind, block in blocks if kind in ("", "bash", "sh", "console"))
    text = re.sub(r"\\\n", " ", text)
    quoted = "" if name.endswith(".py") else '"'  # strings of Python are looked at as sentences
    start = rf"^[ \t#>!{quoted}]*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*bin/)?(prolip (?:{'|'.join(sorted(VERB_NAMES))}) .*)$"
    return [re.sub(r"\s#\s.*|\",.*|\",.*", "", line) for line in re.findall(start, text, re.MULTILINE)]


def words_of(line: str) -> list[str]:
    """A command line as the shell splits it, with a value for each variable, and without what follows it."""
    line = re.sub(r'"?\$\{?\w+[^}"\s]*\}?"?|"\$@"|\$\(.*?\)', "1", line)
    return shlex.split(re.split(r"\s(?:\||>|2>|&&|&|;)", line)[0])[1:]


LINES = sorted({(name, line) for name, text in TEXTS.items() for line in whole_lines(name, text)})


def test_the_lines_are_found():
    assert len(LINES) > 60
    assert {words_of(line)[0] for _, line in LINES} >= VERB_NAMES - {"demo", "train"}


@pytest.mark.parametrize(("name", "line"), LINES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(LINES)])
def test_a_command_line_parses(name, line):
    words = words_of(line)
    if "..." in words or words[0] == "train":  # an abbreviated one; training's are parsed by tests of docs
        words = words[: words.index("...")] if "..." in words else words
        assert words[0] == "train" or find(words)
        return
    if words[:2] == ["eval", "clip-benchmark"]:
        return
    command, rest = find(words)
    try:
        parser_of(command).parse_strictly(rest)
    except SystemExit as end:
        assert end.code == 0, line  # --help


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_text_spells_a_door_that_is_gone(name):
    assert OLD.findall(TEXTS[name]) == []


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_verbs_and_flags_within_sentences_exist(name):
    flat = re.sub(r"\s+", " ", re.sub(r"[\"']\s*\n\s*[rf]*[\"']", "", TEXTS[name]))
    for verb, rest in re.findall(r"[`\"' (]prolip ([a-z]+)((?: [\w<>{}./:=*,'-]+){0,12})", flat):
        if verb not in VERB_NAMES or verb == "train":
            continue
        commands = commands_of(verb)
        word = [*rest.split(), ""][0]
        command = commands.get("") or commands.get(word)
        if command is None:  # "prolip search builds", "prolip eval VERB"
            assert not word.startswith("--"), f"prolip {verb}{rest}"
            continue
        known = parser_of(command).flags()
        if word == "clip-benchmark":  # whose other flags are clip_benchmark's own
            continue
        for flag in re.findall(r"--[a-z][a-z-]*[a-z]", re.split(r"`| -- | (?:prolip|python|torchrun) ", rest)[0]):
            assert flag in known, f"prolip {verb}{rest}"
