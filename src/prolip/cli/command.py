"""Declaration of commands, and the groups of flags that they share."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_type_hints

from prolip.utils.documents import read_json
from prolip.utils.fields import option
from prolip.utils.flags import Parser, argument_settings, as_typed, flag_of, with_choices, wrap
from prolip.utils.outputs import check_output

if TYPE_CHECKING:
    from prolip.embedder import Embedder

#: Command, or `verbs` -> old spellings, without dashes -> what to type.
RENAMED: dict[str, dict[str, str]] = read_json(Path(__file__).with_name("renamed_flags.json"))
Flags = Callable[[Any], object]  # adds flags to a parser, or to a group of one
Run = Callable[[argparse.Namespace], int | None]


class Command(NamedTuple):
    """One command."""

    name: str  # as typed after `prolip`
    does: str  # one line of help
    example: str
    flags: Sequence[Flags]  # in the order of the help
    run: Run  # returns the exit code, None for 0
    more: str = ""  # end of the help


def command(name: str, words: str, *flags: Flags, more: str = "") -> Callable[[Run], Command]:
    """Decorate a function as a command; the first sentence of its docstring is the help. words: end of the example."""

    def made(run: Run) -> Command:
        does = (run.__doc__ or "").partition(".")[0]
        return Command(name, does[:1].lower() + does[1:], f"prolip {name} {words}", flags, run, more)

    return made


def flag(name: str, help: str, *, least: int | None = None, **settings: Any) -> Flags:
    """Return a flag or positional argument with argparse's settings. The default gives the type and ends the help."""
    default = settings.get("default")
    if "action" not in settings and (isinstance(default, (int, float)) or least is not None):
        settings.setdefault("type", float if isinstance(default, float) else int)
    if settings.get("type") is int:
        settings.setdefault("metavar", "N")
    if default and "(default" not in help:
        help += f" (default: {as_typed(default)})".replace("%", "%%")

    def add(parser: Any) -> None:
        parser.add_argument(name, help=help, **settings).least = least

    return add


def add_all(parser: Any, flags: Iterable[Flags]) -> None:
    for add in flags:
        add(parser)


def either(*flags: Flags) -> Flags:
    return lambda parser: add_all(parser.add_mutually_exclusive_group(), flags)


def titled(title: str, *flags: Flags) -> Flags:
    return lambda parser: add_all(parser.add_argument_group(textwrap.fill(title, 79)), flags)


def parser_of(command: Command) -> Parser:
    example = " \\\n      ".join(wrap(command.example, 74))
    about = textwrap.fill(f"{command.does[0].upper()}{command.does[1:]}.", 80) + f"\n\n  {example}"
    lines = []
    for line in re.sub(r"(?<=\S)\n(?=[^ ])", " ", command.more).splitlines():  # keeps a description in its column
        column = re.match(r" +\S.*? {2,}", line)
        lines += wrap(line, 80, " " * (column.end() if column else 0)) or [""]
    retired: dict[str, str] = {}
    for name in (command.name, command.name.split()[0], "prolip"):
        retired = RENAMED.get(name, {}) | retired
    settings = {"prog": f"prolip {command.name}", "description": about, "epilog": "\n".join(lines)}
    parser = Parser(retired, **settings)
    add_all(parser, command.flags)
    return parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The model that embeds images and texts."""

    model: str | None = option(None, "local-dir:FOLDER, hf-hub:ORG/NAME, or a ProLIP or OpenCLIP name", metavar="NAME")
    pretrained: str | None = option(None, "weights: a file, OpenCLIP's tag, or random (untrained)", metavar="FILE")
    tokenizer: str | None = option(None, "folder of tokenizer files, or bpe; default: the model's", metavar="FOLDER")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """Computation."""

    device: str = option("auto", "cpu, cuda or cuda:N; auto: a GPU if available", metavar="DEVICE")
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = option("fp32", "arithmetic of the towers")
    batch_size: int = option(256, "images or texts per forward pass", metavar="N", least=1)
    workers: int | None = option(None, "threads for image decoding; default: all cores but one", metavar="N", least=0)
    seed: int = option(0, "seed of all random choices", metavar="N", least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Input data."""

    data: str | None = option(None, "data to read, as KIND:ADDRESS", metavar="SOURCE")
    skip_damaged: bool = option(False, "skip and report damaged samples")
    allow_private_hosts: bool = option(False, "allow addresses in data to point to hosts in private networks")
    part: str | None = option(None, "process part I of N (I/N); slurm: part of this SLURM array task", metavar="I/N")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Output files."""

    output: str | None = option(None, "file or folder to write", metavar="PATH")
    save_features: str | None = option(None, "save embeddings here, and reuse saved ones", metavar="FOLDER")
    overwrite: bool = option(False, "delete existing output and start again")
    json: bool = option(False, "print JSON lines instead of text")


def shared(
    group: type,
    *names: str,
    required: Iterable[str] = (),
    help: Mapping[str, str] = MappingProxyType({}),
    **defaults: Any,
) -> Flags:
    """Return the flags of a group, by field name or all. help, defaults: of flags in this command."""
    hints, flags = get_type_hints(group), []
    for field in dataclasses.fields(group):
        if names and field.name not in names:
            continue
        kind, own = hints[field.name], field.metadata
        settings = {"action": "store_true"} if kind is bool else argument_settings(kind)
        settings |= {name: own[name] for name in ("metavar", "least") if name in own}
        settings |= {"required": True} if field.name in required else {}
        default = defaults.get(field.name, field.default)
        text = with_choices(help.get(field.name, own["help"]), settings).replace("%", "%%")
        flags.append(flag(flag_of(field.name), text, default=None if field.name in required else default, **settings))
    return titled((group.__doc__ or "").partition("\n")[0].rstrip("."), *flags)


def output(help: str, *more: str, required: bool = True, **settings: Any) -> Flags:
    """Return `--output` with this help, and more flags of its group."""
    return shared(Output, "output", *more, required=["output"] * required, help={"output": help}, **settings)


MODEL = shared(Model, required=["model"])  # of a command that requires one
COMPUTE = shared(Compute, "device", "precision", "batch_size", "workers")


def load(args: argparse.Namespace, model: str | None = None) -> Embedder:
    """Load the model from the flags of `Model` and `Compute`. model: one of several."""
    from prolip.embedder import Embedder

    options = {name: getattr(args, name) for name in ("tokenizer", "device", "precision")}
    return Embedder.load(model or args.model, args.pretrained, **options)


def check(args: argparse.Namespace, folder: bool = False) -> None:
    """Raise ValueError for an unknown device or an unwritable output. folder: `--output` is a folder."""
    for name, is_folder in (("output", folder), ("save_features", True)):
        if path := getattr(args, name, None):
            check_output(path, is_folder)
    if hasattr(args, "device"):
        from prolip.embedder import check_device

        check_device(args.device)


def file_of_clone(name: str, remedy: str) -> Path:
    """Return a file of the clone that this package or the working directory belongs to. ValueError outside a clone."""
    for clone in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (clone / name).is_file():
            return clone / name
    raise ValueError(remedy)


def part_of(text: str | None) -> tuple[int, int]:
    """Return (I, N) of `--part`, I from 0; (0, 1) without it, and for slurm outside an array. ValueError for others."""
    if text is None:
        return 0, 1
    if text == "slurm":
        names = {"ID": 0, "MIN": 0, "MAX": 0, "COUNT": 1}
        mine, first, last, count = (int(os.environ.get(f"SLURM_ARRAY_TASK_{k}", v)) for k, v in names.items())
        step = (last - first) // max(count - 1, 1)
        if count > 1 and (step * (count - 1) != last - first or (mine - first) % step):
            what = f"the {count} numbers of this array have gaps, so the parts are unknown"
            raise ValueError(f"--part slurm: {what}: submit --array=0-{count - 1}")
        return (mine - first) // max(step, 1), count
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--part {text!r}: give I/N with I from 0 to N - 1, such as 0/16, or slurm")
    return int(part), int(parts)
