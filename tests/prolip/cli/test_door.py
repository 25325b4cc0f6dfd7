"""The command `prolip`: one door per task, help that starts at once, answers to unknown words, parts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prolip.cli.command import parser_of, part_of
from prolip.cli.main import RETIRED, VERBS, commands_of, find, main
from prolip.utils.flags import wrap
from prolip.utils.moved import DOORS

ROOT = Path(__file__).parents[3]
#: For each line of stdin, forks a process that runs this command, and prints what it did as JSON.
EACH = """
import io, json, os, resource, sys
from contextlib import redirect_stderr, redirect_stdout
def run(words):
    from prolip.cli.main import main
    with redirect_stdout(io.StringIO()) as text, redirect_stderr(text):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    used = resource.getrusage(resource.RUSAGE_SELF)
    heavy = [name for name in ("torch", "open_clip", "timm", "faiss", "scipy", "matplotlib") if name in sys.modules]
    print(json.dumps([text.getvalue(), code, used.ru_utime + used.ru_stime, ",".join(heavy)]), flush=True)
for line in sys.stdin:
    if (child := os.fork()) == 0:
        run(json.loads(line))
        os._exit(0)
    os.waitpid(child, 0)
"""
VERB_NAMES = [verb for verbs in VERBS.values() for verb in verbs]
COMMANDS = [(verb, sub) for verb in VERB_NAMES if verb != "train" for sub in commands_of(verb)]


@pytest.fixture(scope="module")
def timed():
    """A function: (what a command printed, exit code, CPU seconds, heavy modules) in a fresh process."""
    command, facts = [sys.executable, "-c", EACH], os.environ | {"COLUMNS": "80"}
    with subprocess.Popen(command, env=facts, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(*words):
            print(json.dumps(words), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def test_help_shows_every_verb_on_one_screen_within_three_tenths_of_a_second(timed):
    text, code, cpu, heavy = min((timed("--help") for _ in range(2)), key=lambda found: found[2])
    assert code == 0 and cpu < 0.3 and not heavy
    assert len(text.splitlines()) <= 30 and max(map(len, text.splitlines())) <= 80
    assert all(re.search(rf"^  {verb} ", text, re.MULTILINE) for verb in VERB_NAMES)


@pytest.mark.parametrize(("verb", "sub"), COMMANDS, ids=[f"{verb}-{sub}" for verb, sub in COMMANDS])
def test_the_help_of_a_command_begins_with_an_example_and_needs_no_torch(timed, verb, sub):
    text, code, cpu, heavy = timed(verb, *filter(None, [sub]), "--help")
    assert code == 0 and cpu < 1 and not heavy
    assert text.startswith(f"usage: prolip {verb}") and re.search(rf"^  prolip {verb}", text, re.MULTILINE)
    assert "--device" not in text or "(default: auto)" in " ".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines())
    assert not re.search(r"[^,\s] --[\w-]+( \\)?\n +[^-\[(\s]", text)  # a flag without its value at the end of a line


def test_help_breaks_lines_between_flags_and_words_only(timed):
    text, *_ = timed("data", "few-shot", "--help")
    assert "for its name; default:\n                        'a photo of a {c}'" in text
    assert "others are the test images. It writes:\n  FOLDER/train.tar " in text
    assert "of the first half of the classes, and of the\n                        second\n" in text
    line = 'use --data csv:FILE or {"text": 1} --top 5'
    assert wrap(line, 16) == ["use", "--data csv:FILE", 'or {"text": 1}', "--top 5"]
    assert "(default: onnx)" in timed("export", "graph", "--help")[0]


@pytest.mark.parametrize(("verb", "sub"), COMMANDS, ids=[f"{verb}-{sub}" for verb, sub in COMMANDS])
def test_the_example_of_a_command_is_one(verb, sub):
    command = commands_of(verb)[sub]
    found, rest = find(command.example.split()[1:])
    assert found is command and command.example.startswith("prolip ")
    parser_of(command).parse_strictly(rest)


def test_the_help_of_training_needs_no_openclip_and_shows_a_method_where_one_is_named(timed):
    text, code, _, heavy = timed("train", "--help", "--method", "pcme")
    assert code == 0 and heavy in ("", "torch") and "--train-data" in text and "--kl-weight" in text
    text, code, _, heavy = timed("train", "--trian-data", "x")
    assert code == 2 and heavy in ("", "torch") and "did you mean --train-data" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown verb 'trian': did you mean train"),
        (["evaluate"], "unknown verb 'evaluate': use prolip eval"),
        (["\x1b[2J"], r"unknown verb '\\x1b\[2J': prolip --help lists all"),
        (["hub"], "prolip hub needs a subverb: give save, push"),
        (["search", "extend", "index"], "prolip search has no 'extend': use prolip search add"),
        (["hub", "psh"], "prolip hub has no 'psh': did you mean push"),
        (["hub", "save", "run", "--outptu", "x"], "unknown flag --outptu: did you mean --output"),
        (["hub", "save", "run", "--out", "x"], "--out is not a flag here: use --output"),
        (["hub", "save", "run", "more", "--output", "x"], "got 'more' without a flag"),
        (["eval", "tasks", "--model", "a", "b"], "got 'b' without a flag: --model takes one value"),
        (["search", "query", "runs/index", "a cat"], "got 'a cat' .*: search for a text with --text 'a cat', for an"),
        (["search", "query", "runs/index", "--text", "cat", "--top", "0"], "--top 0: give 1 or more"),
        (["hub", "save"], r"required: RUN, --output \(prolip hub save --help\)"),
    ],
)
def test_a_word_that_is_not_known_is_answered_with_the_near_ones(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.startswith("error: ") and error.count("\n") == 1


def test_retired_verbs_name_commands_that_there_are():
    for verb in [*RETIRED.values(), *DOORS.values()]:
        words = verb.split()
        assert words[1:] == [] or words[1] in commands_of(words[0])
        assert words[0] in VERB_NAMES


def test_a_bug_shows_its_trace(monkeypatch):
    monkeypatch.setattr("prolip.cli.main.run", lambda words: {}["bug"])
    with pytest.raises(KeyError, match="bug"):
        main(["hub"])


@pytest.mark.parametrize("module", sorted(DOORS)[::6])
def test_a_module_that_was_a_command_names_the_verb(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: python -m {module} is now: prolip {DOORS[module]} (prolip ")


def test_the_verb_train_is_not_taken_for_a_folder_of_the_users(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training/__init__.py").write_text("")
    command = [sys.executable, "-m", "prolip", "train", "--help"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "--train-data" in done.stdout, done.stderr[-2000:]


def test_a_shell_completes_verbs_subverbs_and_flags(capsys):
    script = """
        source /dev/stdin <<< "$SCRIPT"
        for words in "prolip se" "prolip search bu" "prolip search build --ind" "prolip train --init-logit-b"; do
            COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
            _shtab_prolip; echo "${COMPREPLY[*]}"
        done
    """
    assert main(["--completion", "bash"]) == 0
    env = os.environ | {"SCRIPT": capsys.readouterr().out}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["search", "build", "--index-type", "--init-logit-bias"], done.stderr
    assert main(["--completion", "ksh"]) == 2
    assert "--completion ksh: give bash, zsh, tcsh" in capsys.readouterr().err


@pytest.fixture
def array(monkeypatch):
    """Sets the environment of a task of sbatch --array=NUMBERS, as SLURM does."""

    def be(numbers, task):
        facts = {"ID": task, "MIN": min(numbers), "MAX": max(numbers), "COUNT": len(numbers)}
        for name, value in facts.items():
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))

    return be


@pytest.mark.parametrize("text", ["8/8", "x", "array", "1", "-1/2", "1/2/3"])
def test_a_wrong_part_says_what_to_give(text):
    with pytest.raises(ValueError, match="--part .* give I/N with I from 0"):
        part_of(text)


@pytest.mark.parametrize("numbers", [range(8), (1, 4, 7), (4,)], ids=str)
def test_the_tasks_of_an_array_take_all_parts_whatever_their_numbers(array, numbers):
    assert part_of(None) == part_of("0/1") == part_of("slurm") == (0, 1) and part_of("2/8") == (2, 8)
    parts = []
    for task in numbers:
        array(numbers, task)
        parts.append(part_of("slurm"))
    assert parts == [(i, len(numbers)) for i in range(len(numbers))]


@pytest.mark.parametrize("numbers, task", [((0, 3, 7), 0), ((0, 3, 7), 3), ((0, 1, 5, 6), 1)])
def test_an_array_with_gaps_is_told_what_to_submit(array, numbers, task):
    array(numbers, task)
    with pytest.raises(ValueError, match=f"have gaps.* submit --array=0-{len(numbers) - 1}$"):
        part_of("slurm")


@pytest.mark.parametrize("words", ["eval tasks --data x --model m", "eval emoji --data x --model m"])
def test_intervals_take_1000_draws_where_no_number_is_given(words):
    command, rest = find([*words.split(), "--intervals"])
    assert parser_of(command).parse_strictly(rest).intervals == 1000
