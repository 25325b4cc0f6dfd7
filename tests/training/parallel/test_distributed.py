"""Torchrun's variables, the device they select, and agreement between ranks."""

from __future__ import annotations

import pytest
import torch
from distributed_helpers import run_ranks
from torch import nn

from prolip.data.faults import SampleFault
from training.health.errors import LossMeter, NonFiniteError, NonFiniteGuard
from training.optim import gradient_norms
from training.parallel import (
    StopConsensus,
    World,
    check_equal_batches,
    choose_device,
    collect_rows,
    from_first,
    gathered,
    read_environment,
)

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_torchruns_environment_is_read():
    assert read_environment(WHOLE) == (1, 4, 1)
    assert read_environment({}) == read_environment({"MASTER_ADDR": "here", "MASTER_PORT": "1"}) == (0, 1, 0)
    with pytest.raises(ValueError, match="RANK=4 of WORLD_SIZE=4"):
        read_environment(WHOLE | {"RANK": "4"})


@pytest.mark.parametrize("missing", sorted(WHOLE))
def test_a_half_set_environment_is_refused_with_what_is_missing(missing):
    half = {name: value for name, value in WHOLE.items() if name != missing}
    with pytest.raises(ValueError, match=f"but not {missing}: start with torchrun"):
        read_environment(half)


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ValueError, match="0 CUDA devices.*use --device cpu"):
        choose_device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="start at most 2 processes on this machine"):
        choose_device("cuda", 2)


def refusal(rank: int) -> str:
    world = World(rank=rank, world_size=3)
    check_equal_batches(8, world)
    with pytest.raises(ValueError) as error:
        check_equal_batches(8 - rank % 2, world)
    return str(error.value)


def test_unequal_batches_are_refused_on_every_rank_with_the_sizes_and_the_remedy():
    check_equal_batches(3, World())
    for said in run_ranks(3, refusal):
        assert "ranks (7 to 8): use the same on all 3 ranks, such as 7" in said


def agreeing(rank: int) -> tuple[list[list[int]], int]:
    """Return the results of 300 exchanges, with requests of rank 2 from the fourth, and the number of all-reduces."""
    posted, honest = [], torch.distributed.all_reduce

    def count(*args, **more):
        posted.append(1)
        return honest(*args, **more)

    torch.distributed.all_reduce = count
    agreement = StopConsensus(World(rank=rank, world_size=3))
    return [agreement.exchange(10 * (rank == 2 and step > 3), rank) for step in range(300)], len(posted)


def test_what_one_rank_asks_for_is_known_to_all_at_the_same_step_by_few_exchanges():
    said = run_ranks(3, agreeing)
    assert said[0] == said[1] == said[2]
    answers, posted = said[0]
    asked = [step for step, (stop, _) in enumerate(answers) if stop == 10]
    assert asked and 3 < asked[0] <= 2 * StopConsensus.MOST + 3
    assert {tuple(one) for one in answers} == {(0, 0), (0, 2), (10, 2)}
    assert 300 / StopConsensus.MOST <= posted < 60


def stepping(rank: int) -> list[float]:
    """Return which of four steps are held: gradients are NaN on rank 1 in two, of which one is allowed."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    network, gate, held = nn.parallel.DistributedDataParallel(model), NonFiniteGuard(1, torch.device("cpu")), []
    for bad in (True, False, True, False):
        model.zero_grad()
        factor = float("nan") if bad and rank == 1 else 1.0
        (network(torch.full((2, 3), rank + 1.0)).sum() * factor).backward()
        held.append(gate.hold(gradient_norms({"all": [*model.parameters()]}, None)["grad_norm"]).item())
    return held


def test_a_nan_on_one_rank_holds_the_step_on_all():
    assert run_ranks(2, stepping) == [[1, 0, 1, 1]] * 2


def judging(rank: int) -> str:
    meter = LossMeter()
    for step in (1, 2, 3):
        loss = torch.tensor(float("nan") if rank == 1 and step >= 2 else 1.0)
        meter.add({"loss": loss, "vib": torch.tensor(1.0)}, step, [f"sample{rank}{step}"])
    with pytest.raises(NonFiniteError) as error:
        meter.check(World(rank=rank, world_size=2))
    return str(error.value)


def test_a_term_that_is_bad_on_one_rank_stops_all():
    for said in run_ranks(2, judging):
        assert said.startswith("step 2: loss not finite on rank 1 (samples sample12)")


class Twice(ValueError):
    """An error that says something else when it is made again of its arguments."""

    def __init__(self, text: str):
        super().__init__(f"twice: {text}")


def told(rank: int) -> list[tuple[str, str]]:
    world, said = World(rank=rank, world_size=3), []
    for error in (Twice("x"), SampleFault("bad image", "y"), KeyError("z"), FileNotFoundError(2, "gone", "/f")):

        def fail(error: Exception = error) -> None:
            assert rank == 0, "the other ranks do no work"
            raise error

        try:
            from_first(fail, world)
        except Exception as caught:
            said.append((type(caught).__name__, str(caught)))
    with pytest.raises(Exception, match="pickle"):
        from_first(lambda: lambda: rank, world)
    assert from_first(lambda: {"of rank": rank}, world) == {"of rank": 0}
    return said


def test_errors_of_any_class_reach_every_rank_and_none_waits():
    first, *others = run_ranks(3, told)
    assert others[0] == others[1] and [text for _, text in others[0]] == [text for _, text in first]
    assert [kind for kind, _ in first] == ["Twice", "SampleFault", "KeyError", "FileNotFoundError"]
    assert [kind for kind, _ in others[0]] == ["ValueError", "RuntimeError", "KeyError", "FileNotFoundError"]


def test_one_process_does_its_own_work_and_raises_its_own_error():
    assert from_first(lambda: 3, World()) == 3
    with pytest.raises(Twice, match="^twice: x$"):
        from_first(lambda: (_ for _ in ()).throw(Twice("x")), World())


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(2.0 * (rank % 3)).view(2, rank % 3).T + rank


def collecting(rank: int) -> tuple:
    world = World(rank=rank, world_size=4)
    counts = gathered(len(rows_of(rank)), list, world)
    with pytest.raises(ValueError, match="3 of 4"):
        gathered(rank, lambda ranks: int(f"{max(ranks)} of {len(ranks)}"), world)
    return counts, collect_rows(rows_of(rank), counts if rank == 0 else [], world)


def test_rows_come_to_the_first_rank_alone_in_the_order_of_the_ranks():
    found = run_ranks(4, collecting)
    assert [counts for counts, _ in found] == 4 * [[0, 1, 2, 0]]
    assert torch.equal(found[0][1], torch.cat([rows_of(rank) for rank in range(4)]))
    assert all(rows.shape == (0, 2) for _, rows in found[1:])
    own = rows_of(1)
    assert collect_rows(own, [], World()) is own and gathered(3, sum, World()) == 3
