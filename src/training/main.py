"""The command line: `python -m training.main --train-data ...`, or the same after `torchrun --nproc_per_node N -m`.

Exit codes: 0 finished; 1 a bug, with a traceback; 2 an error in one line; 75 stopped by a signal after a checkpoint;
130 stopped immediately by a second Ctrl-C.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from prolip.utils import console
from prolip.utils.documents import read_json
from prolip.utils.flags import FlagError, Parser, add_flags, did_you_mean, flag_of
from prolip.utils.threads import share_busy_cores
from training.health.signals import EXIT_STOPPED, STOP, Stopped, under_torchrun

if TYPE_CHECKING:
    from training.config import Config

#: Flags of OpenCLIP and of earlier versions, without the leading dashes -> what to type here.
RETIRED: dict[str, str] = read_json(Path(__file__).with_name("retired_flags.json"))
# One setting of each group is valid: a flag replaces the others of a config file.
ALTERNATIVES = (
    (("run", "epochs"), ("run", "max_steps"), ("run", "max_samples")),
    (("data", "batch_size"), ("run", "global_batch_size")),
)
PR_SET_PDEATHSIG = 1
DESCRIPTION = """Train a probabilistic vision-language model.

  prolip train --config scripts/recipes/emoji-demo.yaml --name first

On N devices: torchrun --nproc_per_node N -m training.main, with the same flags.
--help --method METHOD adds the flags of a method."""
USAGE = "%(prog)s [--config FILE] [--method METHOD] --train-data SOURCE [...]"


def build_parser(method: str | None, prog: str = "training.main") -> Parser:
    """Return a parser with all flags of a run with this method; without a method, the flags that all methods share."""
    from prolip.methods import retired_flags

    parser = Parser(RETIRED | retired_flags(), prog=prog, usage=USAGE, description=DESCRIPTION)
    fill(parser, method)
    return parser


def fill(parser: argparse.ArgumentParser, method: str | None = None) -> None:
    """Add the flags of a run to a parser."""
    from prolip.methods import DEFAULT_METHOD, all_methods
    from training.config import DERIVED, section_types

    parser.add_argument("--config", metavar="FILE", help="config.json of a run, or a YAML file; flags override it")
    names = ", ".join(all_methods())
    parser.add_argument("--method", metavar="METHOD", help=f"training method: {names} (default: {DEFAULT_METHOD})")
    for section, config in section_types(method).items():
        add_flags(parser, section, config, leave_out=DERIVED.get(section, ()))


def parse(arguments: Sequence[str], prog: str = "training.main") -> Config:
    """Parse the command line into a validated config: flags override the config file, which overrides the defaults."""
    first = Parser(add_help=False, prog=prog)
    for flag in ("--config", "--method", "--resume", "--name", "--output", "--checkpoint-dir"):
        first.add_argument(flag)
    early, rest = first.parse_known_args(arguments)
    if not {"-h", "--help"}.isdisjoint(rest):
        build_parser(early.method, prog).print_help()
        raise SystemExit(0)
    from prolip.methods import DEFAULT_METHOD
    from training.config import REDACTED, build_config, read_config_file

    path = early.config or own_config(early)
    saved = read_config_file(path) if path else {}
    if path and not early.config:  # the run may have moved
        saved["run"] = saved.get("run", {}) | {"name": early.name, "output": str(Path(path).parents[1])}
    left_out = saved.pop(REDACTED, {})
    saved_method = saved.pop("method", DEFAULT_METHOD)
    method = early.method or saved_method
    given = vars(build_parser(method, prog).parse_strictly(arguments))
    if method != saved_method:
        saved.pop("objective", None)
    flags: dict[str, dict[str, Any]] = {}
    for destination, value in given.items():
        if "." in destination:
            section, name = destination.split(".")
            flags.setdefault(section, {})[name] = value
    for name in left_out:
        section, setting = name.split(".")
        if setting not in flags.get(section, {}):
            own, secret = flag_of(setting), "its secret part (user info, query or command)"
            raise FlagError(f"--config {path} holds {own} without {secret}: give {own} again")
    merged = {section: dict(saved.get(section, {})) | flags.get(section, {}) for section in {**saved, **flags}}
    for settings in ALTERNATIVES:
        typed = [(section, name) for section, name in settings if name in flags.get(section, {})]
        for section, name in settings if typed else ():
            if (section, name) not in typed:
                merged.get(section, {}).pop(name, None)
    return build_config(method, merged)


def own_config(early: argparse.Namespace) -> str | None:
    """Return the path of the saved config of the run to resume, or None; FlagError for a mistyped name."""
    from training.config import RunConfig

    if early.resume not in ("latest", "auto") or not early.name:
        return None
    runs = Path(early.output or RunConfig.output)
    file = runs / early.name / "config.json"
    if early.resume == "latest" and not (file.parent.is_dir() or early.checkpoint_dir):
        others = (run.parent.name for run in runs.glob("*/config.json"))
        hint = did_you_mean(early.name, others, "--resume auto starts at step 0")
        raise FlagError(f"--resume latest: {file.parent} holds no run: {hint}")
    return str(file) if file.is_file() else None


@console.cleaning()
def main(arguments: Sequence[str] | None = None, prog: str = "training.main") -> int:
    """Run a command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        config = parse(arguments, prog)
        from prolip.data.reading.csv import show_counts
        from training.run import run

        if first_rank():
            show_counts()
        run(config)
    except KeyboardInterrupt:
        complain(f"interrupted: {STOP.way_on}")
        return console.EXIT_INTERRUPTED
    except Stopped as stop:
        if first_rank():
            again = STOP.again or way_on(stop.folder, config, prog)
            print(f"stopped: {stop}. Resume with:\n  {again}", file=sys.stderr, flush=True)
        return EXIT_STOPPED
    except FlagError as error:  # before `explain`, which imports OpenCLIP
        if "--traceback" in arguments:
            raise
        if first_rank():
            complain(console.one_line(error))
        return 2
    except Exception as error:
        from training.health.errors import NonFiniteError, explain

        text = explain(error)
        if text is None or "--traceback" in arguments:
            raise
        if first_rank() or not isinstance(error, NonFiniteError):
            complain(text)
        return 2
    return 0


def way_on(folder: Path, config: Config, prog: str) -> str:
    """Return the command line that resumes a stopped run."""
    from training.config import REDACTED

    program = prog if " " in prog else f"python -m {prog}"
    if under_torchrun():
        several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        local = os.environ.get("LOCAL_WORLD_SIZE", "1")
        ranks = "(its options, as before)" if several else f"--nproc_per_node {local}"
        program = f"torchrun {ranks} -m training.main"
    place = [] if folder.parent == Path(type(config.run).output) else ["--output", str(folder.parent)]
    hidden = [f"{flag_of(name.partition('.')[2])} (as before)" for name in config.to_dict().get(REDACTED, {})]
    return " ".join([program, shlex.join(["--name", folder.name, "--resume", "latest", *place]), *hidden])


def first_rank() -> bool:
    """Return True if this process is rank 0 or the only one."""
    return os.environ.get("RANK", "0") == "0"


def complain(text: str) -> None:
    """Print an error line, with the rank unless it is 0."""
    rank = "" if first_rank() else f" (rank {os.environ['RANK']})"
    print(f"error{rank}: {text}", file=sys.stderr, flush=True)


def script(arguments: Sequence[str] | None = None, prog: str = "training.main") -> NoReturn:
    """Run `main` as a process; signals stop it after a checkpoint, even during the import of torch."""
    console.guard()
    share_busy_cores()
    STOP.install()
    if under_torchrun() and sys.platform == "linux":
        # SIGTERM to a rank, which has its own session, if its torchrun dies: otherwise it would continue to write to a
        # folder that the resumed run has locked
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    sys.exit(main(arguments, prog))


if __name__ == "__main__":
    script()
