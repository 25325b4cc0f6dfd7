"""prolip plan: tables, JSON, measured speeds, refusals."""
from __future__ import annotations

import json

import pytest

from planner.config import TABLES, PlanConfig
from planner.models import count_of_run
from planner.plan import judge, make_plan, measured_flops
from planner.tables import size, span
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
    assert values["traffic"]["texts come by"] == "gather"
    assert (values["gpus"], values["verdict"]) == (32, "computation")


def test_time_and_cost_follow_from_samples_and_speed():
    time = planned(rate=463.0, price=2.0)[0].tables["time"]
    assert time["samples/s/GPU"] == pytest.approx(463, rel=0.02)
    assert time["run, with failures"] == pytest.approx(86400, rel=0.03)
    assert time["cost"] == pytest.approx(2.0 * 32 * time["run, with failures"] / 3600)
    assert time["MFU with waits"] == pytest.approx(0.069, rel=0.03)


def test_a_slow_loader_sets_the_pace_and_is_named():
    plan, verdict = planned(mfu=0.4, workers=4, images_per_core=100.0)
    assert plan.tables["time"]["samples/s/GPU"] == pytest.approx(400, rel=0.01)
    assert verdict.startswith("input: decoding gives")
    assert planned(mfu=0.4, store_gbs=0.1)[1].startswith("input: the object store gives")


def test_a_run_that_does_not_fit_or_fails_too_often_is_named():
    assert planned(memory_gb=40.0)[1].startswith("memory: ")
    assert "failures: " in planned(mtbf_gpu_hours=50.0)[1]
    assert planned(dataset_samples=3e6)[1].startswith("shards: 212 too few for 512 streams")
    assert "16 samples per GPU: the towers will be slower" in planned(1024)[1]


def test_micro_batches_take_less_memory_and_a_third_longer_in_the_towers():
    whole, parts = (planned(8, accum_freq=accum, workers=64)[0] for accum in (1, 4))
    assert parts.tables["memory"]["activations"] == pytest.approx(whole.tables["memory"]["activations"] / 4)
    assert parts.tables["memory"]["PPCL"] == whole.tables["memory"]["PPCL"]
    assert parts.step.forward + parts.step.backward == pytest.approx(4 / 3 * (whole.step.forward + whole.step.backward))
    assert parts.step.pairs == whole.step.pairs
    with pytest.raises(ValueError, match="give 15360 or 18432"):
        PlanConfig(gpus=[1024], accum_freq=3, global_batch_size=16384)


def test_both_exchanges_are_planned_and_the_step_has_the_chosen_one():
    (auto, _), (ring, slow), (gather, fast) = (planned(256, mfu=0.4, exchange=e) for e in ("auto", "ring", "gather"))
    assert auto == gather
    rows = ring.tables["traffic"]
    for name in ("PPCL by the ring", "PPCL with texts gathered", "gathered texts and sums"):
        assert rows[name] == gather.tables["traffic"][name]
    assert rows["PPCL"] == rows["PPCL by the ring"] == ring.step.pairs.seconds
    assert gather.step.pairs.seconds == rows["PPCL with texts gathered"]
    saved = ring.step.pairs.seconds - gather.step.pairs.seconds
    assert saved > 0.02 and ring.seconds - gather.seconds == pytest.approx(saved)
    assert slow.startswith("ring: ") and "kernels started for each of its blocks" in slow
    assert fast.startswith("PPCL with texts gathered: ") and "nothing hides" in fast


def test_float32_is_reckoned_by_the_peak_of_tf32():
    half, single = (planned(mfu=0.4, exchange="ring", precision=precision)[0] for precision in ("amp_bf16", "fp32"))
    assert single.cluster.peak == 494.7e12 and "40% of 494.7 TFLOP/s" in single.heading
    assert single.step.forward == pytest.approx(2 * half.step.forward)
    shares = [plan.tables["time"]["MFU with waits"] for plan in (half, single)]
    assert shares[1] == pytest.approx(shares[0], rel=0.02)


def test_one_gpu_stands_beside_shards_and_a_part_of_a_node_beside_whole_ones(capsys):
    assert plan("--gpus", "1", "32", "--fsdp", "--show", "memory") == 0
    text = capsys.readouterr().out
    assert "H100, 8 to a node" in text
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:4]]
            for cells in (line.split("|") for line in text.splitlines()) if len(cells) == 5}  # fmt: skip
    assert rows["gradients"] == ["792 MB", "24.7 MB"]


def test_an_unknown_price_is_asked_for_not_guessed(capsys):
    assert plan("--gpu", "B200", "--gpus", "8", "--show", "time") == 0
    assert "give --price" in capsys.readouterr().out


def test_a_measured_run_is_its_median_without_warm_up_and_waits(tmp_path):
    folder = run_folder(tmp_path / "run", [10, 400, 300, 200, 400, 500], [0.9, 0.0, 0.25, 0.5, 0.0, 0.0])
    for place in (folder, folder / "metrics.jsonl"):
        rate, source = measured_flops(str(place), 2, count_of_run("ProLIP-ViT-B-16", "prolip", 512))
        assert source == f"200 samples/s of one rank, measured over 5 lines of {place}"
        assert rate == pytest.approx(400 / 2 * count_of_run("ProLIP-ViT-B-16", "prolip", 512).flops)
    (folder / "config.json").unlink()
    assert measured_flops(str(folder), 2, count_of_run("ProLIP-ViT-B-16", "prolip", 512))[0] == rate


def test_a_measured_speed_is_extrapolated_by_flops_to_another_model(tmp_path):
    folder = str(run_folder(tmp_path / "run", [500.0] * 3, [0.0] * 3))
    names = "ProLIP-ViT-B-16", "ProLIP-ViT-L-16"
    same, other = (planned(1, model=name, global_batch_size=512, measured=folder)[0] for name in names)
    speeds = [plan.tables["time"]["samples/s/GPU"] * count_of_run(name, "prolip", 512).flops
              for name, plan in zip(names, (same, other))]
    assert same.tables["time"]["samples/s/GPU"] == pytest.approx(500, rel=0.02)
    assert speeds[1] == pytest.approx(speeds[0], rel=0.02)
    assert "with ProLIP-ViT-B-16" in other.heading and "with" not in same.heading


REFUSED = [
    (["--global-batch-size", "1000", "--gpus", "32"],
     "--global-batch-size 1000 does not divide among 32 GPUs: give 992 or 1024"),
    (["--gpus", "12", "--global-batch-size", "1200"], "--gpus 12 fills no whole number of nodes of 8: give 8 or 16"),
    (["--gpu", "H10"], "--gpu 'H10' is unknown: did you mean H100"),
    (["--model", "ProLIP-B"], "--model 'ProLIP-B': unknown model 'ProLIP-B': did you mean ProLIP-ViT-B-16"),
    (["--mfu", "40"], "--mfu 40.0 is outside (0, 1]: give a share such as 0.4"),
    (["--mfu", "0.4", "--rate", "100"], "--mfu and --rate contradict each other: give one of them"),
    (["--measured", "nowhere"], "--measured nowhere: no run folder nowhere: give"),
    (["--gpus", "0"], "--gpus is [0]: give one or more numbers of at least 1"),
    (["--store-gbs", "0"], "--store-gbs 0.0: give a finite number above 0"),
    (["--exchange", "post"], "--exchange"),
    (["--inter-hop-us", "-1"], "--inter-hop-us -1.0: give a number of at least 0"),
    (["--rate", "nan"], "--rate is nan: give a finite number"),
    (["--max-samples", "inf"], "--max-samples is inf: give a finite number"),
    (["--mtbf-gpu-hours", "0.001"], "such a run never ends; give a larger --mtbf-gpu-hours"),
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


def test_empty_metrics_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 1}\n')
    with pytest.raises(ValueError, match="wanted at least one"):
        measured_flops(str(tmp_path), 1, count_of_run("ProLIP-ViT-test", "prolip", 8))


def test_units_keep_three_digits():
    assert [size(x) for x in (0, 999, 1234, 5.678e9, 999.7e6)] == ["0 B", "999 B", "1.23 kB", "5.68 GB", "1000 MB"]
    assert [span(x) for x in (5e-6, 0.0123, 1.5, 100, 7000, 1e6)] == ["5 us", "12.3 ms", "1.5 s", "100 s", "117 min",
                                                                     "11.6 d"]
