"""prolip plan: tables, JSON, verdicts, refusals."""

from __future__ import annotations

import json

import pytest

from prolip.cli.main import main
from prolip.plan.config import TABLES, PlanConfig
from prolip.plan.plan import judge, make_plan


def plan(*words):
    return main(["plan", *words])


def planned(gpus=32, **settings):
    """(plan, its verdict) for so many GPUs."""
    config = PlanConfig(gpus=[gpus], **settings)
    plan = make_plan(config, gpus)
    return plan, judge(plan, config)


def test_all_tables_and_a_verdict_are_printed(capsys):
    assert plan("--mfu", "0.4", "--gpus", "8", "32") == 0
    text = capsys.readouterr().out
    for name in TABLES:
        assert f"| {name} " in text
    assert text.splitlines()[0].startswith("ProLIP-ViT-B-16: 197,923,586 parameters, 147.6 GFLOPs")
    assert "\n8 GPUs: memory: " in text and "\n32 GPUs: computation" in text


def test_json_holds_what_the_tables_show(capsys):
    assert plan("--gpus", "32", "--mfu", "0.4", "--json") == 0
    (values,) = json.loads(capsys.readouterr().out)
    assert plan("--gpus", "32", "--mfu", "0.4", "--show", "time") == 0
    assert f" {values['time']['samples/s']:,.0f} |" in capsys.readouterr().out
    assert values["memory"]["parameters"] == 4 * 197_923_586
    assert values["traffic"]["text exchange"] == "gather"
    assert (values["gpus"], values["verdict"]) == (32, "computation")


def test_time_and_cost_follow_from_samples_and_speed():
    time = planned(rate=463.0, price=2.0)[0].tables["time"]
    assert time["samples/s/GPU"] == pytest.approx(463, rel=0.02)
    assert time["run, start to end"] == pytest.approx(86400, rel=0.03)
    assert time["cost"] == pytest.approx(2.0 * 32 * time["run, start to end"] / 3600)
    assert time["MFU with waits"] == pytest.approx(0.069, rel=0.03)


def test_the_price_is_among_the_assumptions():
    prices = [({}, "; $4.916 per GPU-hour, assumed"), ({"gpu": "B200", "price": 3.5}, "; $3.5 per GPU-hour, given")]
    for settings, said in [*prices, ({"gpu": "B200"}, "")]:  # no list price
        assert planned(**settings)[0].heading.endswith("TFLOP/s, assumed" + said)


def test_a_run_that_does_not_fit_or_fails_too_often_is_named():
    assert planned(memory_gb=40.0)[1].startswith("memory: ")
    assert "% of the run is spent on starts, checkpoints and failures" in planned(mtbf_gpu_hours=50.0)[1]
    assert planned(dataset_samples=3e6)[1].startswith("shards: 212 too few for 512 streams")
    assert "16 samples per GPU: the towers will be slower" in planned(1024)[1]


def test_both_exchanges_are_planned_and_the_step_has_the_one_that_training_takes():
    names = {"ring": "PPCL by the ring", "gather": "PPCL with texts gathered"}
    for gpus, taken, other in ((256, "gather", "ring"), (2, "ring", "gather")):
        plan, _ = planned(gpus, mfu=0.4, global_batch_size=gpus * 64)
        rows = plan.tables["traffic"]
        assert rows["text exchange"] == plan.step.pairs.exchange == taken
        assert plan.step.pairs.seconds == rows[names[taken]] != rows[names[other]]
        assert rows["messages, not hidden"] == plan.step.pairs.exposed
    assert "PPCL (gather): messages" in planned(256, mfu=0.4)[1]


REFUSED = [
    (
        ["--global-batch-size", "1000", "--gpus", "32"],
        "--global-batch-size 1000 is not divisible by 32 GPUs x 1 micro-batches: give 1024",
    ),
    (["--gpus", "12", "--global-batch-size", "1200"], "--gpus 12 is not a multiple of 8 (--gpus-per-node): give 16"),
    (["--gpu", "H10"], "--gpu"),
    (["--model", "ProLIP-B"], "--model 'ProLIP-B': unknown model 'ProLIP-B': did you mean ProLIP-ViT-B-16"),
    (["--mfu", "40"], "--mfu 40.0: give a number above 0 and at most 1"),
    (["--mfu", "0.4", "--rate", "100"], "--mfu and --rate contradict each other: give one of them"),
    (["--measured", "runs/a"], "--measured is not a flag here: give --mfu from its metrics.jsonl"),
    (["--restart-minutes", "5"], "--restart-minutes is not a flag here: use --queue-minutes"),
    (["--mtbf-node-hours", "5"], "--mtbf-node-hours is not a flag here: include them in --mtbf-gpu-hours"),
    (["--gpus", "0"], "--gpus is [0]: give numbers of at least 1"),
    (["--store-gbs", "0"], "--store-gbs 0.0: give a finite number above 0"),
    (["--store-total-gbs", "0"], "--store-total-gbs 0.0: give a finite number above 0"),
    (["--exchange", "ring"], "--exchange is not a flag here: remove it: the traffic table shows both"),
    (["--inter-hop-us", "1"], "--inter-hop-us is not a flag here: remove it: the plan uses NCCL's own latencies"),
    (["--queue-minutes", "-1"], "--queue-minutes -1.0: give a number of at least 0"),
    (["--rate", "nan"], "--rate is nan: give a finite number"),
    (["--max-samples", "inf"], "--max-samples is inf: give a finite number"),
    (["--mtbf-gpu-hours", "0.001"], "so the run never ends: give a larger --mtbf-gpu-hours"),
    (["--link-rate", "5"], "unknown flag --link-rate"),
    (["--parallel", "fsdp"], "--parallel is not a flag here: use --fsdp"),
    (["--save-every-steps", "5"], "--save-every-steps is not a flag here: give --save-every-samples"),
]


@pytest.mark.parametrize("words, said", REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_bad_input_is_refused_with_a_remedy(capsys, words, said):
    assert plan(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
