"""prolip plan: tables, JSON, measured speeds, refusals."""
from __future__ import annotations

import json

import pytest

from planner.models import count_of_run
from planner.plan import make_plans
from planner.question import Machines, Question, Safety, Speed, Supply, Training
from planner.runs import read_measurement
from planner.tables import SECTIONS, size, span
from prolip.cli.main import main


def plan(*words):
    return main(["plan", *words])


def run_folder(folder, speeds, waits, model="ProLIP-ViT-B-16", batch=512):
    """A run folder with metrics.jsonl and config.json as training leaves them."""
    folder.mkdir()
    lines = [{"kind": "train", "step": 20 * (i + 1), "samples_per_second": s, "data_wait": w}
             for i, (s, w) in enumerate(zip(speeds, waits))]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    text += json.dumps({"kind": "eval", "step": 20, "accuracy": 0.5}) + "\n" + '{"kind": "train", "st'
    (folder / "metrics.jsonl").write_text(text)
    config = {"method": "prolip", "model": {"model": model}, "data": {"batch_size": batch}, "run": {}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def question(**sections):
    return Question(training=Training(gpus=[32]), **sections)


def test_all_tables_and_a_verdict_are_printed(capsys):
    assert plan("--mfu", "0.4", "--gpus", "8", "32") == 0
    text = capsys.readouterr().out
    for name in SECTIONS:
        assert f"| {name} " in text
    assert text.splitlines()[0].startswith("ProLIP-ViT-B-16: 197,923,586 parameters, 147.6 GFLOPs")
    assert "\n8 GPUs: memory: " in text and "\n32 GPUs: computation" in text


def test_json_holds_what_the_tables_show(capsys):
    assert plan("--gpus", "32", "--mfu", "0.4", "--json") == 0
    (values,) = json.loads(capsys.readouterr().out)
    assert plan("--gpus", "32", "--mfu", "0.4", "--show", "time") == 0
    assert f" {values['samples_per_second']:,.0f} |" in capsys.readouterr().out
    assert values["memory"]["parameters"] == 4 * values["parameters"]
    assert values["verdict"]


def test_time_and_cost_follow_from_samples_and_speed():
    (plan,) = make_plans(question(speed=Speed(rate=463.0), machines=Machines(price=2.0)))
    assert plan.per_gpu == pytest.approx(463, rel=0.02)
    assert plan.risk.wall == pytest.approx(86400, rel=0.03)
    assert plan.cost == pytest.approx(2.0 * 32 * plan.risk.wall / 3600)
    assert plan.mfu == pytest.approx(0.069, rel=0.03)


def test_a_slow_loader_sets_the_pace_and_is_named():
    (plan,) = make_plans(question(speed=Speed(mfu=0.4), supply=Supply(workers=4, images_per_core=100.0)))
    assert plan.per_gpu == pytest.approx(400, rel=0.01)
    assert plan.verdict[0].startswith("input: decoding gives")
    (plan,) = make_plans(question(speed=Speed(mfu=0.4), supply=Supply(store_gbs=0.1)))
    assert plan.verdict[0].startswith("input: the object store gives")


def test_a_run_that_does_not_fit_or_fails_too_often_is_named():
    (plan,) = make_plans(question(machines=Machines(memory_gb=40.0)))
    assert plan.verdict[0].startswith("memory: ")
    (plan,) = make_plans(question(safety=Safety(mtbf_gpu_hours=50.0)))
    assert any(text.startswith("failures: ") for text in plan.verdict)
    (plan,) = make_plans(question(supply=Supply(dataset_samples=3e6)))
    assert plan.verdict[0].startswith("shards: 212 too few for 512 streams")


def test_micro_batches_take_less_memory_and_a_third_longer_in_the_towers():
    whole, parts = (
        make_plans(Question(training=Training(gpus=[8], accum_freq=accum), supply=Supply(workers=64)))[0]
        for accum in (1, 4)
    )
    assert parts.memory["activations"] == pytest.approx(whole.memory["activations"] / 4)
    assert parts.memory["PPCL"] == whole.memory["PPCL"]
    assert parts.step.forward + parts.step.backward == pytest.approx(4 / 3 * (whole.step.forward + whole.step.backward))
    assert parts.step.pairs == whole.step.pairs
    with pytest.raises(ValueError, match="give 15360 or 18432"):
        Training(gpus=[1024], accum_freq=3, global_batch_size=16384)


def planned(exchange, gpus, **training):
    choice = Training(gpus=[gpus], exchange=exchange, **training)
    return make_plans(Question(training=choice, speed=Speed(mfu=0.4)))[0]


def test_both_exchanges_are_planned_and_the_step_has_the_chosen_one():
    auto, ring, gather = (planned(exchange, 256) for exchange in ("auto", "ring", "gather"))
    assert auto == gather
    assert ring.exchanges == gather.exchanges
    assert (ring.step.pairs, gather.step.pairs) == (ring.exchanges["ring"], ring.exchanges["gather"])
    saved = ring.step.pairs.seconds - gather.step.pairs.seconds
    assert saved > 0.02 and ring.seconds - gather.seconds == pytest.approx(saved)
    assert ring.verdict[0].startswith("ring: ") and "kernels started for each of its blocks" in ring.verdict[0]
    assert any("gathered would save" in text and "leave --exchange out" in text for text in ring.verdict)
    assert gather.verdict[0].startswith("PPCL with texts gathered: ") and "nothing hides" in gather.verdict[0]


def test_texts_too_many_for_the_trainings_bound_are_named_with_what_gathering_would_save():
    plan = planned("auto", 4096, global_batch_size=524288)
    assert plan.step.pairs.exchange == "ring"
    assert any("hold 3.2 GB: raise prolip.losses.contrastive.GATHERED_BYTES" in text for text in plan.verdict)
    siglip = planned("auto", 4096, global_batch_size=524288, method="siglip")
    assert not any("gathered" in text for text in siglip.verdict)
    small = planned("auto", 32, global_batch_size=524288)
    assert small.step.pairs.exchange == "ring" and not any("gathered" in text for text in small.verdict)


def test_float32_is_reckoned_by_the_peak_of_tf32():
    half, single = (planned("ring", 32, precision=precision) for precision in ("amp_bf16", "fp32"))
    assert single.cluster.peak == 494.7e12 and "40% of 494.7 TFLOP/s" in single.speed_from
    assert single.step.forward == pytest.approx(2 * half.step.forward)
    assert single.mfu == pytest.approx(half.mfu, rel=0.02)


def test_models_of_openclip_are_planned_as_siglip_is():
    (theirs,) = make_plans(Question(training=Training(model="ViT-B-16-SigLIP", gpus=[32]), speed=Speed(mfu=0.4)))
    assert theirs.step.pairs.exchange == "ring" and not any("gathered" in text for text in theirs.verdict)
    assert [part.name for part in theirs.model.passes] == ["image", "text"]


def test_one_gpu_stands_beside_shards_and_a_part_of_a_node_beside_whole_ones(capsys):
    assert plan("--gpus", "1", "32", "--fsdp", "--show", "memory") == 0
    text = capsys.readouterr().out
    assert "H100, 8 to a node" in text
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:4]]
            for cells in (line.split("|") for line in text.splitlines()) if len(cells) == 5}  # fmt: skip
    assert rows["gradients (DDP's buckets)"] == ["792 MB", "-"] and rows["gradients"] == ["-", "24.7 MB"]


def test_an_unknown_price_is_asked_for_not_guessed(capsys):
    assert plan("--gpu", "B200", "--gpus", "8", "--show", "time") == 0
    assert "give --price" in capsys.readouterr().out


def test_a_measured_run_is_its_median_without_warm_up_and_waits(tmp_path):
    folder = run_folder(tmp_path / "run", [10, 400, 300, 200, 400, 500], [0.9, 0.0, 0.25, 0.5, 0.0, 0.0])
    found = read_measurement(str(folder), ranks=2)
    assert found.lines == 5
    assert found.samples_per_second == pytest.approx(400 / 2)
    assert (found.model, found.flops) == ("ProLIP-ViT-B-16", count_of_run("ProLIP-ViT-B-16", "prolip", 512).flops)
    assert read_measurement(str(folder / "metrics.jsonl"), 2) == found._replace(path=str(folder / "metrics.jsonl"))


def test_a_measured_speed_is_extrapolated_by_flops_to_another_model(tmp_path):
    folder = str(run_folder(tmp_path / "run", [500.0] * 3, [0.0] * 3))
    speed, names = Speed(measured=folder), ("ProLIP-ViT-B-16", "ProLIP-ViT-L-16")
    trainings = [Training(model=name, gpus=[1], global_batch_size=512) for name in names]
    same, other = (make_plans(Question(training=training, speed=speed))[0] for training in trainings)
    assert same.per_gpu == pytest.approx(500, rel=0.02)
    assert other.per_gpu * other.model.flops == pytest.approx(same.per_gpu * same.model.flops, rel=0.02)
    assert "with ProLIP-ViT-B-16" in other.speed_from and "with" not in same.speed_from


REFUSED = [
    (["--global-batch-size", "1000", "--gpus", "32"],
     "--global-batch-size 1000 does not divide among 32 GPUs: give 992 or 1024"),
    (["--gpus", "12", "--global-batch-size", "1200"], "--gpus 12 fills no whole number of nodes of 8: give 8 or 16"),
    (["--gpu", "H10"], "--gpu 'H10' is unknown: did you mean H100"),
    (["--model", "ProLIP-B"], "--model 'ProLIP-B' is neither ours nor OpenCLIP's"),
    (["--mfu", "40"], "--mfu 40.0 is outside (0, 1]: give a share such as 0.4"),
    (["--mfu", "0.4", "--rate", "100"], "--mfu and --rate contradict each other: give one of them"),
    (["--measured", "nowhere"], "--measured nowhere: there is no such file"),
    (["--gpus", "0"], "--gpus is [0]: give one or more numbers of at least 1"),
    (["--save-every-steps", "5", "--save-every-minutes", "5"],
     "--save-every-steps and --save-every-minutes contradict each other: give one cadence"),
    (["--store-gbs", "0"], "--store-gbs is 0.0: give a number above 0"),
    (["--exchange", "post"], "--exchange"),
    (["--exchange", "gather", "--method", "siglip"], "--exchange gather is of --method prolip: leave it out"),
    (["--inter-hop-us", "-1"], "--inter-hop-us is -1.0: give a number of 0 or more"),
    (["--rate", "nan"], "--rate is nan: give a finite number"),
    (["--max-samples", "inf"], "--max-samples is inf: give a finite number"),
    (["--mtbf-gpu-hours", "0.001"], "such a run never ends; give a larger --mtbf-gpu-hours"),
    (["--link-rate", "5"], "unknown flag --link-rate"),
    (["--parallel", "fsdp"], "--parallel is not a flag here: use --fsdp"),
    (["--every-steps", "5"], "--every-steps is not a flag here: use --save-every-steps"),
]


@pytest.mark.parametrize("words, said", REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_bad_input_is_refused_with_a_remedy(capsys, words, said):
    assert plan(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


def test_empty_metrics_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 1}\n')
    with pytest.raises(ValueError, match="wanted at least one"):
        read_measurement(str(tmp_path), 1)


def test_units_keep_three_digits():
    assert [size(x) for x in (0, 999, 1234, 5.678e9, 999.7e6)] == ["0 B", "999 B", "1.23 kB", "5.68 GB", "1000 MB"]
    assert [span(x) for x in (5e-6, 0.0123, 1.5, 100, 7000, 1e6)] == ["5 us", "12.3 ms", "1.5 s", "100 s", "117 min",
                                                                     "11.6 d"]
