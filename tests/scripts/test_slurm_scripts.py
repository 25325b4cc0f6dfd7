"""The job scripts with stand-ins for SLURM's commands: what is started, with which flags, and when it is requeued."""
from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from training.main import parse
from training.runfolder import OURS

SLURM = Path(__file__).parents[2] / "slurm"
STUBS = {
    # "show hostnames" and "show job" answer, "requeue" leaves a mark.
    "scontrol": """case "$2" in
hostnames) seq -f node%.0f 9999;;
job) echo JobId=7;;
*) echo "$@" >> "$MARKS";;
esac""",
    # Runs what it is given behind its own flags, once, as a task of the step would.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    # Python: pip freeze says nothing; else write the words down, perhaps save a checkpoint, and end as told.
    "python": """[ "$2" = pip ] && exit 0
printf '%s\\n' "$@" > "$WORDS"
[ -z "${SAVES:-}" ] || { mkdir -p "$(dirname "$SAVES")"; touch "$SAVES"; }
exit "${ENDS:-0}" """,
}


@pytest.fixture
def start(tmp_path):
    """Run a script with stubs; returns (exit status, the words after python's name, what scontrol was told)."""
    for name, body in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)

    def run(script: str, *words: str, **environment: str) -> tuple[int, list[str], str]:
        said, marks = tmp_path / "words", tmp_path / "marks"
        for file in (said, marks):
            file.write_text("")
        variables = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": "python", "WORDS": str(said),
            "MARKS": str(marks), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "9", "NAME": "it",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", SLURM / script, *words], cwd=tmp_path, env=variables | environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.returncode, said.read_text().splitlines(), marks.read_text()

    return run


@pytest.mark.parametrize("script", ["train.sbatch", "eval.sbatch"])
def test_scripts_are_valid_bash(script):
    assert subprocess.run(["bash", "-n", SLURM / script], capture_output=True).stderr == b""


def test_every_training_flag_is_one_the_program_takes(start):
    status, words, _ = start("train.sbatch", "--lr", "1e-3")
    config = parse(words[words.index("training.main") + 1 :])
    assert status == 0
    assert (config.data.train_data, config.optim.lr) == ("s3://bucket/{00000..12895}.tar", 1e-3)
    assert (config.run.max_samples, config.optim.beta2, config.run.resume) == (1_280_000_000, 0.95, None)


def test_the_first_node_is_the_meeting_point_of_all(start):
    _, words, _ = start("train.sbatch", GPUS="4")
    assert "--rdzv-endpoint=node1:20007" in words
    assert "--nnodes=2" in words and "--nproc-per-node=4" in words


def test_a_job_that_saved_before_it_was_stopped_is_requeued_and_goes_on(start, tmp_path):
    saves = str(tmp_path / "runs/it/checkpoints/step_100.pt")
    status, words, told = start("train.sbatch", SAVES=saves, ENDS="1")
    assert (status, told) == (1, "requeue 7\n") and "--resume" not in words
    status, words, told = start("train.sbatch", SLURM_RESTART_COUNT="1")
    assert (status, told) == (0, "") and words[-2:] == ["--resume", "latest"]


def test_a_job_that_fails_without_a_new_checkpoint_is_not_requeued(start):
    assert start("train.sbatch", ENDS="1")[::2] == (1, "")
    status, words, _ = start("train.sbatch", SLURM_RESTART_COUNT="1")  # by SLURM itself, after a node's failure
    assert status == 0 and words[-1] == "--overwrite"


def test_the_script_leaves_nothing_that_makes_the_run_folder_look_taken(start, tmp_path):
    start("train.sbatch")
    assert [p.name for p in (tmp_path / "runs/it").iterdir()] == ["slurm"] and "slurm" not in OURS


def test_the_environment_is_recorded_without_keys(start, tmp_path):
    start("train.sbatch", AWS_SECRET_ACCESS_KEY="hush", NCCL_DEBUG="INFO")
    record = (tmp_path / "runs/it/slurm/7-0/environment.txt").read_text()
    assert "NCCL_DEBUG=INFO" in record and "JobId=7" in record and "hush" not in record


def test_evaluation_takes_a_finished_run_and_refuses_anything_else(start, tmp_path):
    status, words, _ = start("eval.sbatch", "runs/it")
    assert status == 2 and words == []
    (tmp_path / "runs/it/model").mkdir(parents=True)
    status, words, _ = start("eval.sbatch", "runs/it", "--all-names")
    assert status == 0
    assert words[1:] == [
        "prolip.evaluation.corpus", "--model", "local-dir:runs/it/model", "--data", "data/emoji/emojione.tar",
        "--names", "data/emoji/noto.tar",
        "--out", "runs/it/eval", "--all-names",
    ]  # fmt: skip
