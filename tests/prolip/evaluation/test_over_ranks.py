"""An evaluation shared out over gloo processes against one process."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial

import miniatures as mini
import pytest
import torch
import torch.distributed as dist
from distributed_helpers import run_ranks

from prolip.data.faults import FaultCounter
from prolip.embedder import Embedder
from prolip.evaluation import ranks as over_ranks
from prolip.evaluation.datasets.base import DamagedData, Share
from prolip.evaluation.datasets.registry import open_dataset
from prolip.evaluation.evaluate import evaluate_dataset
from prolip.evaluation.ranks import TaskLost, agree, evaluate_over_ranks
from prolip.gaussian import Gaussian


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> list[str]:
    """One set of every kind; of one shard and of three, with keys that repeat in other shards."""
    root = tmp_path_factory.mktemp("sets")
    return [
        f"wds:{mini.wds_classification(root / 'single', images=40)}",
        f"wds:{mini.wds_multilabel(root / 'multi')}",
        f"wds:{mini.wds_retrieval(root / 'pairs', images=12, shards=3)}",
        f"imagenet:{mini.class_folders(root / 'folders', ['cat', 'dog', 'fish'], images=3)}",
        "coco:{},{}".format(*mini.karpathy(root / "coco")),
        "cub:{},{}".format(*mini.cub(root / "cub")),
        f"captions:{mini.caption_table(root / 'table')}",
        f"winogavil:{mini.winogavil(root / 'wino')}",
    ]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> str:
    """A set of which one image cannot be read."""
    root = mini.wds_classification(tmp_path_factory.mktemp("damaged") / "wds_birds", images=12)
    samples = {x.key: {"png": x.image, "cls": str(x.label).encode()} for x in open_dataset(f"wds:{root}").samples()}
    samples["s0000005"]["png"] = samples["s0000005"]["png"][:100]
    mini.write_shards(root / "test", list(samples.items()))
    return f"wds:{root}"


def work(rank: int, folder: str, sets: list[str], damaged: str) -> tuple[list, list, list]:
    """The metrics of all sets, what is said of damage, and of errors of one rank."""
    embedder, answers, errors = Embedder.load(folder), [], []
    found = [evaluate_over_ranks(open_dataset(spec), embedder, batch_size=4, workers=1) for spec in sets]
    metrics = [None if result is None else (result.key, result.metrics, result.info["images"]) for result in found]
    dataset = open_dataset(damaged, damage=FaultCounter())
    for _ in range(2):  # counts are those of one pass
        result = evaluate_over_ranks(dataset, embedder, workers=0)
        answers.append(None if result is None else (result.info["damaged"], result.info["images"]))
    try:
        evaluate_over_ranks(open_dataset(damaged), embedder, workers=0)
    except TaskLost as lost:
        answers.append(str(lost))

    def stumble(kind):
        if rank == 1:
            raise kind("gone")

    for kind in (DamagedData, TypeError):
        try:
            agree(partial(stumble, kind))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return metrics, answers, errors


@pytest.fixture(scope="module")
def answers(folder, sets, damaged):
    """`work` of three ranks: of each, by part."""
    return list(zip(*run_ranks(3, work, folder, sets, damaged)))


def test_ranks_together_give_the_metrics_of_one_process(answers, ours, sets):
    wanted = [evaluate_dataset(open_dataset(spec), ours, batch_size=4) for spec in sets]
    first, *others = answers[0]
    assert all(answer == [None] * len(sets) for answer in others)
    for result, (key, metrics, images) in zip(wanted, first, strict=True):
        assert (key, images) == (result.key, result.info["images"]) and metrics.keys() == result.metrics.keys()
        for name, value in metrics.items():
            assert math.isclose(value, result.metrics[name], rel_tol=1e-6, abs_tol=1e-6), (key, name)


def test_damage_and_errors_of_any_rank_are_counted_once_or_told_to_all(answers):
    first, second, third = answers[1]
    for damaged, images in first[:2]:
        assert damaged["kinds"] == {"bad image": 1} and images == 11 and "s0000005" in damaged["examples"][0]
    assert second[:2] == third[:2] == [None, None]
    assert first[2] == second[2] == third[2] and "s0000005" in first[2] and "rank" in first[2]
    lost, peer = "TaskLost: rank 1: DamagedData: gone", "PeerError: rank 1: TypeError: gone"
    assert answers[2] == ([lost, peer], [lost, "TypeError: gone"], [lost, peer])


@pytest.mark.parametrize("of", [2, 5])
def test_shares_hold_every_sample_once_in_an_order_that_can_be_restored(sets, of):
    for spec in sets:
        dataset = open_dataset(spec)
        parts = [sample for number in range(of) for sample in dataset.samples(Share(number, of))]
        whole = list(dataset.samples())
        assert [s.key for s in sorted(parts, key=lambda s: s.place)] == [s.key for s in whole], spec


def test_keys_that_repeat_are_told_apart_as_in_one_pass(tmp_path, ours):
    png = mini.picture(0)
    names = [("a", "x"), ("b", "y"), ("a", "z"), ("c", "x"), ("a", "y"), ("d", "z")]
    mini.write_shards(tmp_path / "test", [(key, {"png": png, "txt": text.encode()}) for key, text in names], shards=3)
    (tmp_path / "dataset_type.txt").write_text("retrieval")
    dataset = open_dataset(f"wds:{tmp_path}")
    found = [(list(dataset.samples(Share(number, 2))), [], None) for number in range(2)]
    blank = [Gaussian(torch.ones(len(samples), 4), torch.zeros(len(samples), 4)) for samples, *_ in found]
    found = [(samples, [z], None) for (samples, *_), z in zip(found, blank)]
    assert list(over_ranks.merge(dataset, ours, found).keys) == [sample.key for sample in dataset.samples()]


def wait_for_the_slow_one(rank: int, folder: str, source: str, store: str) -> int | None:
    """Collectives of the training give up after two seconds; reading takes rank 1 three."""
    dist.barrier()  # or a rank that is quick would leave while the other one still connects to it
    dist.destroy_process_group()
    place = {"init_method": f"file://{store}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(seconds=2), **place)
    waiting = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    dataset = open_dataset(source)

    def slow(share):
        time.sleep(3 * share.number)
        yield from dataset.samples(share)

    result = evaluate_over_ranks(replace(dataset, samples=slow), Embedder.load(folder), group=waiting, workers=0)
    return None if result is None else result.info["images"]


def test_a_slow_rank_runs_nobody_into_the_time_out_of_the_training(tmp_path, folder, sets):
    assert run_ranks(2, wait_for_the_slow_one, folder, sets[0], str(tmp_path / "store")) == [40, None]


def test_without_a_process_group_it_is_the_evaluation_of_one_process(sets, ours):
    dataset = open_dataset(sets[0])
    result = evaluate_over_ranks(dataset, ours)
    assert result.metrics == evaluate_dataset(dataset, ours).metrics
    with pytest.raises(TaskLost, match="gave 9 images, expected 10"):
        evaluate_over_ranks(replace(open_dataset(sets[3]), size=10), ours)
