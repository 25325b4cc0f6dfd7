"""Records, measurements and verdicts of a job's nodes: slurm/node.py, slurm/blame.py and slurm/measure.py."""

from __future__ import annotations

import argparse
import json

import pytest
from test_slurm_scripts import load
from torch.distributed import run as torchrun

from training.health.errors import explain

A, B, C, D = "node-a", "node-b", "node-c", "node-d"
LOST = "error (rank 1): another rank ended (Connection closed by peer [10.0.0.1]): see its error above or below"


@pytest.fixture
def blame(tmp_path, monkeypatch):
    """Judge a try by what its nodes noted: {host: (seconds, exit code, error)}; the job has two of four nodes."""
    module, nodes = load("blame"), dict.fromkeys((A, B, C, D), "idle")
    job = {"Partition": "gpu", "ExcNodeList": "(null)", "ReqNodeList": "(null)"}

    def call(*words: str) -> str:
        if words[0] == "sinfo":
            return "\n".join(f"{name}|{state}|(null)|4|1|gpu:8" for name, state in nodes.items())
        if words[:3] == ("scontrol", "-o", "show"):
            return " ".join(f"{name}={value}" for name, value in job.items())
        return words[-1].replace(",", "\n")

    def judge(number: int, ends: dict[str, tuple[float, int, str]], srun: str = "") -> tuple[str, str, str]:
        logs = tmp_path / f"7-{number}"
        for host, (seconds, code, error) in ends.items():
            (logs / host).mkdir(parents=True)
            note = {"time": seconds, "failures": [{"rank": 0, "exit": code, "error": error}]}
            (logs / host / "end.json").write_text(json.dumps(note))
        logs.mkdir(exist_ok=True)
        (logs / "srun.err").write_text(srun)
        return module.verdict(logs)

    monkeypatch.setattr(module, "call", call)
    monkeypatch.setenv("SLURM_NNODES", "2")
    judge.nodes, judge.job = nodes, job
    return judge


# --- which host failed -----------------------------------------------------------------------------------------------
def test_the_host_that_did_not_fail_for_want_of_another_is_excluded_the_second_time(blame, tmp_path):
    ends = {A: (5.0, 2, LOST), B: (5.3, -9, "SIGKILL")}  # torchrun notes a rank's end a little later or earlier
    assert blame(0, ends)[:2] == ("again", "-")
    action, nodes, why = blame(1, ends)
    assert (action, nodes) == ("exclude", B) and "SIGKILL" in why
    rows = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert [(row["try"], row["host"], row["verdict"]) for row in rows] == [(0, B, "again"), (1, B, "exclude")]


def test_exclusions_add_up(blame):
    blame.job["ExcNodeList"] = C
    blame.nodes[D] = "drain"
    assert blame(0, {A: (5.0, -7, "SIGBUS")})[:2] == ("again", "-")
    assert blame(1, {A: (5.0, -7, "SIGBUS")})[:2] == ("keep", "-")  # only B would be left
    blame.nodes["node-e"] = "alloc"
    assert blame(2, {A: (5.0, -7, "SIGBUS")})[:2] == ("exclude", f"{C},{A}")


@pytest.mark.parametrize(
    "ends",
    [
        {A: (1.0, 1, "ValueError: 12 is odd"), B: (30.0, 1, "ValueError: 14 is odd")},  # but for a number
        {A: (1.0, 2, "error: a bad flag"), B: (1.1, 2, "")},  # only rank 0 says what is wrong with a flag
        {A: (1.0, -9, "SIGKILL"), B: (2.0, -9, "SIGKILL"), C: (9.0, 2, LOST)},
        {A: (1.0, 1, "KeyError: 'x'"), B: (2.0, -9, "SIGKILL")},  # no clock shows which was first
        {A: (1.0, 2, LOST), B: (2.0, -15, "SIGTERM")},
        {},
    ],
)
def test_no_host_is_at_fault_where_nodes_fail_alike_or_together(blame, ends):
    assert [blame(number, ends)[:2] for number in range(3)] == 3 * [("none", "-")]


def test_an_error_that_moves_to_another_host_is_the_programs(blame):
    for number, want in enumerate(["again", "exclude"]):
        assert blame(number, {B: (1.0, 1, "IndexError: 17"), A: (1.1, 2, LOST)})[0] == want
    action, _, why = blame(2, {C: (1.0, 1, "IndexError: 18"), A: (1.1, 2, LOST)})
    assert action == "none" and "the program is at fault" in why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda judge: judge.nodes.update({C: "down*", D: "drain"}), "only 1 such nodes are left, but the job needs 2"),
        (lambda judge: judge.job.update(ReqNodeList=f"{A},{B}"), "requires it by name"),
    ],
)
def test_a_host_that_the_job_cannot_run_without_is_kept(blame, change, why):
    change(blame)
    assert blame(0, {B: (1.0, -9, "SIGKILL")})[0] == "again"
    action, nodes, said = blame(1, {B: (1.0, -9, "SIGKILL")})
    assert (action, nodes) == ("keep", "-") and "NOT excluded" in said and why in said


def test_a_rank_that_lost_its_peer_says_so_in_words_that_are_known():
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1")
    assert load("blame").LOST.search(explain(gloo)) and load("blame").LOST.search(str(gloo))


# --- torchrun of a node ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("known", ["new", "old"])
def test_ranks_are_bound_where_torchrun_knows_how(tmp_path, monkeypatch, capsys, known):
    started, node = [], load("node")
    if known == "old":
        monkeypatch.setattr(torchrun, "get_args_parser", argparse.ArgumentParser)
    monkeypatch.setattr(torchrun, "main", started.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("SLURM_NODEID", "0")
    node.main(["--nnodes=1", "-m", "training.main"])
    bound = [*(["--numa-binding=node"] if known == "new" else []), "--nnodes=1", "-m", "training.main"]
    assert started == [bound]
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and ("has no --numa-binding" in said) == (known == "old")
    monkeypatch.setenv("SLURM_NODEID", "1")
    node.main([])
    assert capsys.readouterr().out == "" and (tmp_path / "node.txt").read_text() == 2 * said
    assert not (tmp_path / "end.json").exists()


# --- slow nodes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", range(1, 10))
def test_every_node_meets_two_others_once_at_a_time(count):
    rounds = load("measure").rounds(count)
    for pairs in rounds:
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met))
    partners = {node: {*pair} - {node} for node in range(count) for pair in sum(rounds, []) if node in pair}
    meetings = [sum(node in pair for pair in sum(rounds, [])) for node in range(count)]
    assert meetings == [min(count - 1, 2)] * count and len(partners) == (count if count > 1 else 0)


def test_a_node_below_four_fifths_of_the_median_is_slow_and_its_neighbours_are_not(tmp_path):
    measure = load("measure")
    speeds = [10.0, 10.0, 7.0, 10.0, 10.0]
    answers: dict[str, dict] = {
        f"n{node}": {"0": {"loader": 79.0 if node == 4 else 100.0, "all_reduce": {}}} for node in range(len(speeds))
    }
    for one, other in sum(measure.rounds(len(speeds)), []):
        for node in (one, other):
            answers[f"n{node}"]["0"]["all_reduce"][f"{one} {other}"] = min(speeds[one], speeds[other])
    answers["n5"] = {"0": {"error": "OSError: no disk"}}
    lines = measure.report([f"n{node}" for node in range(7)], answers, tmp_path / "nodes.json", 60)
    assert lines[1:] == [
        "preflight: n2 is slow: all_reduce 7 GB/s, 70% of the median",
        "preflight: n4 is slow: loader 79 samples/s, 79% of the median",
        "preflight: n5 has no measurement: OSError: no disk",
        "preflight: n6 has no measurement: no answer in 60 s",
    ]
    assert "loader 100 samples/s, all_reduce 10 GB/s" in lines[0]
    found = json.loads((tmp_path / "nodes.json").read_text())
    assert list(found["slow"]) == ["n2", "n4"] and found["silent"] == ["n5", "n6"]
