"""The command line `prolip VERB [SUBVERB] ...`. Only the command named is imported.

Exit codes: 0 done; 1 a bug (with its traceback), or as the command's help states; 2 an error in one line; 74 the output
could not be written; 130 interrupted. For `prolip train` see training/main.py.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from prolip import __version__
from prolip.cli.command import RENAMED, Command, add_all, file_of_clone, parser_of
from prolip.utils import console
from prolip.utils.flags import FlagError, did_you_mean

#: Group in `prolip --help` -> verb -> (module of its commands in prolip.cli, with a dot in scripts/ of a clone; help).
VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "train": ("", "train a model (same as python -m training.main)"),
        "plan": ("runs", "estimate time, memory and cost of a run before it starts"),
        "demo": ("runs", "train, evaluate and report on the bundled drawings (in a clone)"),
        "uncertainty": ("uncertainty", "add calibrated variances and novelty to any CLIP model"),
    },
    "Measure": {
        "eval": ("eval", "evaluate a model: tasks, emoji, datacomp, clip-benchmark"),
        "report": ("runs", "write a run's report page"),
        "figures": ("studies.papers.figures.command", "draw the figures of the ProLIP paper (in a clone)"),
        "prompts": ("prompts", "fit and show prompt weights"),
        "hierarchy": ("hierarchy", "find more general texts for images, score hierarchies"),
    },
    "Use": {
        "search": ("search", "build and query an index of images or texts"),
        "explore": ("explore", "open a page to explore a run, an index or a folder"),
        "curate": ("curate", "score, select, write and report training data"),
        "data": ("data", "prepare data sets and shard indexes"),
        "export": ("export", "export a model as a graph, or from a checkpoint"),
        "hub": ("export", "save a model with its card, or push it to the hub"),
    },
}
RETIRED = RENAMED["verbs"]  # other words for verbs -> the verb to type


def commands_of(verb: str) -> dict[str, Command]:
    """Return subverb (or "") -> command. FlagError for an unknown verb, ValueError outside a clone."""
    modules = {name: module for verbs in VERBS.values() for name, (module, _) in verbs.items()}
    if verb not in modules:
        hint = did_you_mean(verb, modules, "prolip --help lists all")
        raise FlagError(f"unknown verb {verb!r}: {f'use prolip {RETIRED[verb]}' if verb in RETIRED else hint}")
    module = f"prolip.cli.{modules[verb]}"
    if "." in modules[verb]:
        module, remedy = modules[verb], f"prolip {verb} is a script: run it in a clone of the repository"
        scripts = str(file_of_clone("scripts/demo.py", remedy).parent)
        sys.path += [scripts] if scripts not in sys.path else []
    commands = [found for found in vars(import_module(module)).values() if isinstance(found, Command)]
    return {sub: found for found in commands for own, _, sub in [found.name.partition(" ")] if own == verb}


def find(words: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command that these words name, and the words that it parses."""
    verb, *rest = words
    commands = commands_of(verb)
    if "" in commands:
        return commands[""], rest
    if not rest or rest[0].startswith("-"):
        raise FlagError(f"prolip {verb} needs a subverb: give {', '.join(commands)} (prolip {verb} --help)")
    if rest[0] not in commands:
        was = RETIRED.get(f"{verb} {rest[0]}")
        hint = f"use prolip {was}" if was else did_you_mean(rest[0], commands, f"use {', '.join(commands)}")
        raise FlagError(f"prolip {verb} has no {rest[0]!r}: {hint}")
    return commands[rest[0]], rest[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["train"]:
        from training.main import main as train

        return train(words[1:], prog="prolip train")
    # before OpenCLIP's first message, which would configure the log too
    logging.basicConfig(format="%(message)s", handlers=[console.Notes()])
    with console.cleaning():
        try:
            return run(words)
        except Exception as error:
            if not isinstance(error, (OSError, ValueError, ImportError)):
                from safetensors import SafetensorError

                from prolip.data.faults import SampleFault, TooManyBadSamples
                from prolip.models.checkpoint import CheckpointError

                if not isinstance(error, (CheckpointError, SafetensorError, SampleFault, TooManyBadSamples)):
                    raise
            print(f"error: {console.one_line(error)}", file=sys.stderr)
            return 2


def run(words: list[str]) -> int:
    """Print help, version or completion of `prolip`, or run a command."""
    if not words or words[0] in ("-h", "--help", "help"):
        print("usage: prolip VERB ...\n\nProbabilistic vision-language models: train, measure and use them.")
        for title, verbs in VERBS.items():
            print(f"\n{title}:", *(f"  {verb:<12} {does}" for verb, (_, does) in verbs.items()), sep="\n")
        print("\nprolip VERB --help shows an example and all flags.")
        print("prolip --version; prolip --completion bash (or zsh, tcsh)")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"prolip {__version__}")
        return 0
    if words[0] == "--completion":
        print(completion(*words[1:]))
        return 0
    if len(words) == 2 and words[1] in ("-h", "--help") and "" not in (commands := commands_of(words[0])):
        print(f"usage: prolip {words[0]} SUBVERB ...\n")
        print("\n".join(f"  {name:<16} {command.does}" for name, command in commands.items()))
        print(f"\nprolip {words[0]} SUBVERB --help shows an example and all flags.")
        return 0
    command, rest = find(words)
    return command.run(parser_of(command).parse_strictly(rest)) or 0


def completion(shell: str = "bash") -> str:
    """Return a script that completes verbs, flags and files in a shell."""
    import shtab

    from training.main import fill

    if shell not in shtab.SUPPORTED_SHELLS:
        raise FlagError(f"--completion {console.plain(shell)}: give {', '.join(shtab.SUPPORTED_SHELLS)}")
    parser = argparse.ArgumentParser("prolip")
    verbs = parser.add_subparsers()
    for verb, (module, does) in (found for group in VERBS.values() for found in group.items()):
        one = verbs.add_parser(verb, help=does)
        try:
            commands = commands_of(verb) if module else {"": Command(verb, does, "", [fill], lambda given: 0)}
        except ValueError:  # outside a clone
            continue
        subverbs = None if "" in commands else one.add_subparsers()
        for name, command in commands.items():
            last = one if subverbs is None else subverbs.add_parser(name, help=command.does)
            add_all(last, command.flags)
            for action in last._actions:
                if action.nargs != 0 and action.choices is None:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell=shell))


def clip_benchmark() -> NoReturn:
    """Run `prolip eval clip-benchmark` as `prolip-clip-benchmark`."""
    sys.argv[1:1] = ["eval", "clip-benchmark"]
    script()


def script() -> NoReturn:
    """Run `prolip` as a process."""
    if sys.argv[1:2] == ["train"]:
        from training.main import script as train

        train(sys.argv[2:], prog="prolip train")
    console.command(main)
