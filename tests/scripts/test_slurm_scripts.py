"""The job scripts with stand-ins for SLURM's commands: what is started, with which flags, and when it is requeued.

tests/slurm runs them under a real SLURM.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from prolip.cli.command import parser_of
from prolip.cli.main import find, main
from prolip.data.config import chunks_ahead
from prolip.models.registry import get_model_config
from prolip.utils.flags import FlagError
from training.checkpoint.run_dir import write_status
from training.defaults import rows_per_rank, total_steps
from training.main import parse
from training.model import export_checkpoint
from training.run import run as train

ROOT = Path(__file__).parents[2]
SLURM, RECIPES = ROOT / "slurm", ROOT / "scripts" / "recipes"
STUBS = {
    # "show hostnames" and "show job" answer, "requeue" leaves a mark.
    "scontrol": """case "$2" in
hostnames) seq -f node%.0f 9999;;
job) echo JobId=7;;
*) echo "$@" >> "$MARKS";;
esac""",
    "squeue": 'echo "${QUEUE:-}"',
    # Runs the command after its own flags, once, as a task of the step would.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    # Python: the preflight check passes or not; else record the words, perhaps a status, and end as requested.
    "python": """case "$1" in
slurm/preflight.py) printf '%s\\n' "$@" > "$WORDS.preflight"; exit "${MISSING:-0}";;
slurm/measure.py) echo measured; exit 0;;
slurm/blame.py) printf "${BLAME:-none\\t-\\t}\\n"; exit 0;;
esac
printf '%s\\n' "$@" >> "$WORDS"
[ -z "${LIMITED:-}" ] || { ulimit -Sn; ulimit -Hn; } > "$WORDS.limits"
env | grep -E '^(PET_|TORCHELASTIC)' >> "$WORDS.environment"
[ -z "${LEAVES:-}" ] || cp "$LEAVES" runs/it/status.json
exit "${ENDS:-0}" """,
}


@pytest.fixture
def start(tmp_path):
    """Run a script with stubs. Return (exit status, words after python's name, arguments of scontrol, output)."""
    for name, body in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)

    def run(script: str, *words: str, **environment: str) -> tuple[int, list[str], str, str]:
        said, marks = tmp_path / "words", tmp_path / "marks"
        for file in (said, marks):
            file.write_text("")
        job = "JOB_ID=7 JOB_NODELIST=node[1-2] NNODES=2 CPUS_PER_TASK=9 GPUS_ON_NODE=8"
        variables = {f"SLURM_{name}": value for name, value in (word.split("=") for word in job.split())}
        variables |= {"SLURMD_NODENAME": "node1", "NAME": "it", "PYTHON": "python"}
        variables |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "WORDS": str(said), "MARKS": str(marks)}
        done = subprocess.run(
            ["bash", "-c", 'ulimit -Sn 256; exec bash "$@"', "sbatch", SLURM / script, *words],
            cwd=tmp_path,
            text=True,
            env=variables | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        return done.returncode, said.read_text().splitlines(), marks.read_text(), done.stdout

    return run


@pytest.fixture
def leaves(tmp_path):
    """Write the status.json that a run would leave, and return its path."""

    def write(state: str, step: int, checkpoint: str | None, **facts: str) -> str:
        write_status(tmp_path, state, step=step, total_steps=99, checkpoint=checkpoint, **facts)
        return str((tmp_path / "status.json").rename(tmp_path / f"{state}-{step}.json"))

    return write


def flags_of(words: list[str]) -> list[str]:
    return words[words.index("training.main") + 1 :]


# --- what is started -------------------------------------------------------------------------------------------------
def test_without_words_the_papers_recipe_runs_on_the_given_shards_with_a_log_per_rank(start, monkeypatch, tmp_path):
    status, words, _, _ = start("train.sbatch", SHARDS="s3://bucket/{00000..12895}.tar")
    monkeypatch.chdir(ROOT)
    config = parse(flags_of(words))
    assert status == 0
    assert (config.data.train_data, config.run.max_samples) == ("s3://bucket/{00000..12895}.tar", 1_280_000_000)
    assert (config.run.name, config.run.resume, config.run.output) == ("it", "auto", "runs")
    reported = (tmp_path / "words.environment").read_text()
    assert "PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" in reported
    assert "PET_LOG_DIR=runs/it/slurm/7-0/node1\n" in reported and "PET_TEE=3" in reported
    assert "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[rank ${rank}] " in reported


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("prolip-*.yaml")))
def test_every_recipe_of_the_paper_can_be_submitted(start, monkeypatch, recipe):
    words = start("train.sbatch", "--config", f"scripts/recipes/{recipe}", "--lr", "2e-4", SHARDS="a{0..9}.tar")[1]
    monkeypatch.chdir(ROOT)
    config = parse(flags_of(words))
    assert (words.count("--config"), config.optim.lr, config.data.train_data) == (1, 2e-4, "a{0..9}.tar")
    assert (config.run.save_every_minutes, config.run.keep_checkpoints) == (15, 3)


# --- what is refused before it costs anything -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "environment", "wanted"),
    [
        (["--name", "x"], {}, "set NAME and RUNS"),
        (["--resume=latest"], {}, "--resume is set by the script"),
        ([], {"PYTHON": "no/python"}, "no no/python"),
        ([], {"MISSING": "2"}, "the run was not started"),
    ],
)
def test_what_is_missing_is_reported_before_all_nodes_start(start, words, environment, wanted):
    status, started, reported, output = start("train.sbatch", *words, **environment)
    assert (status, started, reported) == (2, [], "") and wanted in output


def test_a_run_that_another_job_is_training_is_left_alone(start, tmp_path):
    start("train.sbatch", SLURM_JOB_ID="6")
    status, words, reported, output = start("train.sbatch", QUEUE="6")
    assert (status, words, reported) == (2, [], "") and "job 6 is still training it" in output
    assert start("train.sbatch")[0] == 0  # it has left the queue


def load(name: str) -> ModuleType:
    """Import a file next to the job scripts as a module."""
    spec = importlib.util.spec_from_file_location(f"slurm_{name}", SLURM / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def preflight(monkeypatch, capsys):
    """Run the check for two ranks from the repository's folder; returns (exit status, output, errors)."""
    monkeypatch.chdir(ROOT)

    def run(*words: str) -> tuple[int, str, str]:
        return load("preflight").main(["2", *words]), *capsys.readouterr()

    return run


TINY = ["--model", "ProLIP-ViT-test", "--workers", "0"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--train-data", "http://127.0.0.1:9/{0..9}.tar"], "cannot be read from this node"),
        (["--train-data", "data/emoji/noto.tar", "--global-batch-size", "33"], "batch 33 is not divisible by 2 ranks"),
        ([], "Give --train-data"),
    ],
)
def test_the_check_names_what_is_missing_in_one_line(preflight, words, wanted):
    status, _, errors = preflight(*TINY, *words)
    assert status == 2 and errors.startswith("error: ") and wanted in errors
    assert errors.count("\n") == 1


def test_a_stopped_run_is_requeued_and_a_finished_one_is_not(start, leaves):
    stopped = leaves("stopped", 20, "s3://bucket/step_20.pt", reason="SIGUSR1 at step 20 of 99, saved")
    status, _, reported, output = start("train.sbatch", LEAVES=stopped, ENDS="1")
    assert (status, reported) == (1, "requeue 7\n") and "SIGUSR1 at step 20 of 99, saved" in output
    status, _, reported, _ = start("train.sbatch", LEAVES=leaves("finished", 99, "step_99.pt"), SLURM_RESTART_COUNT="1")
    assert (status, reported) == (0, "")


@pytest.mark.parametrize("state", ["running", "failed"])  # killed, or by an error of its own
def test_a_try_that_broke_is_requeued_only_behind_a_new_checkpoint(start, leaves, state):
    assert start("train.sbatch", LEAVES=leaves(state, 20, "runs/it/step_20.pt"), ENDS="1")[2] == "requeue 7\n"
    # it begins at step 20, breaks at 25 and has saved nothing: a bug that would be met again for ever
    again = leaves(state, 25, None)
    status, _, reported, output = start("train.sbatch", LEAVES=again, ENDS="1", SLURM_RESTART_COUNT="1")
    assert (status, reported) == (1, "") and "without a new checkpoint" in output


@pytest.mark.parametrize(
    ("action", "wanted"),
    [
        ("again", "requeue 7\n"),
        ("exclude", "requeue 7\nupdate JobId=7 ExcNodeList=node1,node2\n"),  # only a job that waits takes other nodes
        ("keep", ""),
        ("none", ""),
    ],
)
def test_a_try_that_one_host_made_fail_is_requeued_without_a_checkpoint(start, leaves, action, wanted):
    given = {"BLAME": f"{action}\\tnode1,node2\\tnode2 did it", "LEAVES": leaves("failed", 3, None), "ENDS": "1"}
    status, _, reported, output = start("train.sbatch", **given)
    assert (status, reported) == (1, wanted) and "node2 did it" in output
    assert start("train.sbatch", **given | {"LEAVES": leaves("stopped", 5, "c")})[2] == "requeue 7\n"  # no failure


def test_nodes_are_measured_where_they_are_not_those_of_the_last_try(start):
    always, other = {"PREFLIGHT": "always"}, {"SLURM_JOB_NODELIST": "node[2-3]"}
    off, one = {"PREFLIGHT": "off", "SLURM_JOB_NODELIST": "node[3-4]"}, {"SLURM_NNODES": "1"}
    one |= {"SLURM_JOB_NODELIST": "node1"}
    tries: list[dict[str, str]] = [{}, {}, other, off, always, always, one]
    said = [start("train.sbatch", SLURM_RESTART_COUNT=str(number), **more)[3] for number, more in enumerate(tries)]
    assert ["measured" in output for output in said] == [True, False, True, False, True, True, False]
    assert ["in the last try" in output for output in said] == [False] * 6 + [True]
    status, started, _, output = start("train.sbatch", PREFLIGHT="1")
    assert (status, started) == (2, []) and "set it to auto, always or off" in output


def test_a_try_that_never_began_is_not_requeued_whatever_the_last_one_left(start, leaves):
    assert start("train.sbatch", ENDS="1")[::2] == (1, "")
    start("train.sbatch", LEAVES=leaves("stopped", 20, "step_20.pt"), ENDS="1")
    status, _, reported, output = start("train.sbatch", ENDS="1", SLURM_RESTART_COUNT="1")
    assert (status, reported) == (1, "") and "failed before its first step" in output


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_the_environment_is_recorded_without_keys(start, tmp_path):
    names = ("AWS_SECRET_ACCESS_KEY", "TORCHTOKEN", "PETS", "NCCL_TOKEN", "NAMES")
    secret = dict.fromkeys(names, "hush\nNAME=hush")
    data = "https://user:hush/x@host/{0..9}.tar?sig=hush::pipe:curl -H 'x: hush'::s3://hush@b/x::http://h/a.tar?hush"
    start("train.sbatch", "--lr", "1e-3", "--train-data", data, **secret, NCCL_DEBUG="INFO", SHARDS=data)
    record = (tmp_path / "runs/it/slurm/7-0/environment.txt").read_text()
    assert "NCCL_DEBUG=INFO" in record and "JobId=7" in record and "sbatch slurm/train.sbatch --lr 1e-3" in record
    assert "SHARDS=https://host/" in record
    assert "hush" not in record
    assert "Linux" in (tmp_path / "runs/it/slurm/7-0/node1/node.txt").read_text()


# --- the recipes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "samples", "steps", "tokens"),
    [("1.28b", 1.28e9, 78_125, 64), ("12.8b", 12.8e9, 781_250, 64), ("long-context", 2.56e8, 31_250, 256)],
)
def test_recipes_are_the_papers_for_32_gpus(name, samples, steps, tokens):
    config = parse(["--config", str(RECIPES / f"prolip-b16-{name}.yaml"), "--train-data", "x.tar"])
    model = get_model_config(config.model.model)[0]
    assert (config.run.max_samples, total_steps(config, 1, config.run.global_batch_size)) == (samples, steps)
    text, image = model["text_cfg"], model["vision_cfg"]
    assert (model["embed_dim"], image["image_size"], text["context_length"]) == (768, 224, tokens)
    assert rows_per_rank(config, 32) == (256 if tokens == 256 else 512)
    assert (
        chunks_ahead(config.data.prefetch, rows_per_rank(config, 32)) == 8
    )  # docs/benchmarks/planner.md: a slow shard's opening
    optim, objective = config.optim, config.objective
    assert (optim.opt, optim.beta1, optim.beta2, optim.eps, optim.lr_scheduler) == ("adamw", 0.9, 0.95, 1e-6, "cosine")
    assert (objective.alpha1, objective.alpha2, objective.beta) == (1e-7, 1e-3, 1e-4)
    assert (objective.inclusion_form, objective.inclusion_reduction) == ("printed", "dim")  # as the runs computed it
    assert (objective.mask_fraction, objective.mask_ratio) == (0.125, 0.75)
    assert config.model.aug_cfg["scale"] == [0.8, 1.0] and config.run.precision == "amp_bf16"
    course = optim.lr, optim.wd, optim.warmup, config.run.global_batch_size
    inclusion = objective.inclusion_scale, objective.inclusion_eps
    if tokens == 64:  # B.1
        assert (*course, *inclusion) == (5e-4, 0.2, 10_000, 16_384, 1000, -20)
    else:  # the released script of LongProLIP
        assert (*course, *inclusion) == (1e-6, 0.01, 200, 8_192, 10, -100)


# --- evaluation -------------------------------------------------------------------------------------------------------
@pytest.fixture
def runs(tmp_path) -> list[str]:
    """Two runs that ended, one that did not."""
    for name in "ab":
        (tmp_path / "runs" / name / "model").mkdir(parents=True)
    return ["runs/a", "runs/b", "runs/c"]


def evaluations(words: list[str]) -> list[str]:
    return [words[place + 1] for place, word in enumerate(words) if word == "--model"]


def test_evaluation_takes_flags_behind_two_dashes_and_the_gpu_it_was_given(start, runs):
    status, words, _, _ = start("eval.sbatch", "runs/a", "--", "--all-names")
    assert status == 0
    said = "prolip eval emoji --model local-dir:runs/a/model --data data/emoji/emojione.tar --names data/emoji/noto.tar"
    assert words[1:] == f"{said} --device cuda --output runs/a/eval --all-names".split()
    assert "cpu" in start("eval.sbatch", "runs/a", SLURM_GPUS_ON_NODE="")[1]


def test_each_task_of_an_array_evaluates_one_run(start, runs):
    for index, name in enumerate("ab"):
        status, words, _, _ = start("eval.sbatch", *runs[:2], SLURM_ARRAY_TASK_ID=str(index))
        assert status == 0 and evaluations(words) == [f"local-dir:runs/{name}/model"]
    assert evaluations(start("eval.sbatch", *runs[:2])[1]) == ["local-dir:runs/a/model", "local-dir:runs/b/model"]
    status, words, _, output = start("eval.sbatch", *runs[:2], SLURM_ARRAY_TASK_ID="2")
    assert (status, words) == (2, []) and "--array=0-1" in output


def test_a_run_that_has_not_ended_is_refused_and_the_others_are_evaluated(start, runs):
    status, words, _, output = start("eval.sbatch", "runs/c", "runs/b")
    assert status == 2 and "got 'runs/c': give" in output and evaluations(words) == ["local-dir:runs/b/model"]
    assert start("eval.sbatch")[0] == 2 and start("eval.sbatch", "runs/a", "--all-names")[0] == 2


@pytest.mark.parametrize(
    ("address", "out"),
    [("runs/c/checkpoints/step_7.pt", "runs/c/checkpoints/step_7"), ("s3://x/c/step_7.pt", "runs/x/c/step_7")],
)
def test_a_checkpoint_is_exported_first(start, address, out):
    status, words, _, _ = start("eval.sbatch", address)
    assert status == 0 and words[:7] == ["-m", "prolip", "export", "checkpoint", address, "--output", f"{out}/model"]
    assert evaluations(words) == [f"local-dir:{out}/model"] and words[-1] == f"{out}/eval"


def test_datacomps_tasks_are_shared_out_over_an_array(start, runs):
    status, words, _, _ = start("datacomp.sbatch", "runs/a", "--", "--tasks", "vtab", DATA="data")
    assert status == 0
    said = "prolip eval datacomp --model local-dir:runs/a/model --data data --output runs/a/datacomp"
    assert words[1:] == f"{said} --part slurm --device cuda --tasks vtab".split()
    words = start("datacomp.sbatch", "ViT-B-16", "--", "--pretrained", "openai", DATA="hf-hub", OUT="out")[1]
    assert evaluations(words) == ["ViT-B-16"] and words[-2:] == ["--pretrained", "openai"] and "out" in words


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ([], {"DATA": "data"}, "no model"),
        (["runs/a"], {}, "DATA is not set"),
        (["runs/c/step_7.pt"], {"DATA": "data", "OUT": "out"}, "prolip export checkpoint runs/c/step_7.pt"),
    ],
)
def test_what_datacomps_script_lacks_is_named(start, runs, words, variables, message):
    status, started, _, output = start("datacomp.sbatch", *words, **variables)
    assert (status, started) == (2, []) and message in output


def test_curation_scores_on_the_gpu_that_its_task_has(start):
    given = ["score", "--data", "{0..9}.tar", "--model", "local-dir:m", "--output", "scores"]
    status, words, _, _ = start("curate.sbatch", *given)
    assert status == 0
    assert words == ["-m", "prolip", "curate", "score", "--device", "cuda", "--precision", "amp_bf16", *given[1:]]
    command, rest = find(words[2:])
    assert parser_of(command).parse_strictly(rest).device == "cuda"
    assert start("curate.sbatch", *given, SLURM_GPUS_ON_NODE="0")[1] == ["-m", "prolip", "curate", *given]
    given = ["write", "scores", "--output", "kept"]
    assert start("curate.sbatch", *given)[1] == ["-m", "prolip", "curate", *given]
    status, started, _, output = start("curate.sbatch")
    assert (status, started) == (2, []) and "no command" in output


def test_the_exported_model_is_the_one_that_the_run_left(tmp_path, capfd):
    words = "--dataset-type synthetic --train-num-samples 16 --batch-size 8 --max-steps 2 --warmup 1 --device cpu"
    words += " --precision fp32 --ema-decay 0.5 --swa-epochs 1 --name run --output"
    folder = train(parse([*TINY, *words.split(), str(tmp_path)]))
    address = str(folder / "checkpoints/step_2.pt")
    for average, name in ((None, "model"), ("ema", "model_ema"), ("swa", "model_swa")):
        want = load_file(folder / name / "model.safetensors")
        got = load_file(export_checkpoint(address, tmp_path / name, average) / "model.safetensors")
        assert want.keys() == got.keys() and all(torch.equal(value, got[key]) for key, value in want.items())
    for former in (False, True):
        assert main(["export", "checkpoint", address, "--output", str(tmp_path / "again")]) == 0
        assert (f"{tmp_path}/again: the former model was replaced" in capfd.readouterr().err) is former
    with pytest.raises(FlagError, match="does not exist"):
        export_checkpoint(str(folder / "checkpoints/step_3.pt"), tmp_path / "none")
