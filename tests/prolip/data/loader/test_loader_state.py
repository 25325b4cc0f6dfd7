"""A loader stopped between two batches resumes with exactly the same batches, also for another number of ranks."""

import json

import pytest
import torch
from tiny_tars import letters, members, noisy, write_shards, write_tar

from prolip.data.captions import stable_hash
from prolip.data.loader import DataConfig, build_loader, join_states

SETTINGS = {"caption_sampling": "name,keywords:2,txt", "max_bad_fraction": 0.5, "shuffle_buffer": 6}


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, [3, 9, 5, 7, 6, 4])
    write_tar(tmp_path / "9.tar", [("x", {**members(90), "png": b"x"}), ("y", members(91))])
    return tmp_path


def build(folder, ranks=1, workers=0, rank=0, **changes):
    settings = {"batch_size": 8 // ranks, **SETTINGS, **changes}
    config = DataConfig(train_data=str(folder), workers=workers, **settings)
    return build_loader(config, noisy, letters, rank=rank, world_size=ranks)


def digest(batches):
    """One number per global row, in the order of global rows, of several ranks' batches of one step."""
    rows = []
    for i in range(len(batches[0]["key"])):
        for batch in batches:
            rows.append((batch["key"][i], stable_hash(batch["image"][i].numpy().tobytes(), batch["text"][i].tolist())))
    return rows


def all_batches(folder, ranks=1, workers=0, epoch=1, state=None, **changes):
    """Return (global batches of an epoch, joined state after each of them), starting at `state`."""
    loaders = [build(folder, ranks, workers, rank, **changes) for rank in range(ranks)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        loader.set_epoch(epoch)
    found, states = [], []
    for step in zip(*loaders, strict=True):
        found.append(digest(step))
        states.append(plain_copy(join_states([loader.state_dict() for loader in loaders])))
    faults = sum(loader.faults().get("bad image", 0) for loader in loaders)
    for loader in loaders:
        loader.close()
    return found, states, faults


def plain_copy(state):
    """Through JSON, which keeps plain types only; its keys come back as words."""
    copy = json.loads(json.dumps(state))
    return copy | {"cursors": {int(stream): cursor for stream, cursor in copy["cursors"].items()}}


@pytest.mark.parametrize("before, after", [((1, 0), (1, 0)), ((2, 1), (1, 2)), ((2, 2), (4, 0))])
def test_an_epoch_goes_on_with_the_same_batches(folder, before, after):
    whole, states, faults = all_batches(folder, *before)
    assert len(whole) == 5 and faults > 0
    for stop in (1, 3):
        rest, _, faults_in_all = all_batches(folder, *after, state=states[stop - 1])
        assert rest == whole[stop:]
        assert faults_in_all == faults


def test_the_epoch_after_a_resumed_one_is_the_usual_one_though_streams_change(folder):
    _, states, _ = all_batches(folder)
    usual, _, _ = all_batches(folder, epoch=2)
    loader = build(folder)
    loader.load_state_dict(states[1])
    loader.set_epoch(1)
    assert len(list(loader)) == 3
    loader.set_epoch(2)
    assert [digest([batch]) for batch in loader] == usual
    usual, _, _ = all_batches(folder, 2, 2, epoch=2)
    assert all_batches(folder, 2, 2, epoch=2, state=states[-1])[0] == usual


@pytest.mark.parametrize("before, after", [((1, 0), (1, 2)), ((1, 0), (4, 0))])
def test_an_epoch_that_was_at_its_end_has_no_batch_left_for_any_rank_or_worker(folder, before, after):
    """A checkpoint after the last step of an epoch belongs to that epoch; its reader resumes with the next."""
    _, states, faults = all_batches(folder, *before)
    usual, _, _ = all_batches(folder, *after, epoch=2)
    loaders = [build(folder, *after, rank) for rank in range(after[0])]
    for loader in loaders:
        loader.load_state_dict(states[-1])
        loader.set_epoch(1)
        assert list(loader) == []
    again = join_states([loader.state_dict() for loader in loaders])
    for loader in loaders:
        loader.load_state_dict(plain_copy(again) | {"faults": states[-1]["faults"]})
        assert list(loader) == []
        loader.set_epoch(2)
    assert [digest(step) for step in zip(*loaders, strict=True)] == usual
    for loader in loaders:
        loader.close()


def test_what_changes_the_order_is_refused_inside_an_epoch_and_not_between_two(folder):
    _, states, _ = all_batches(folder)
    for size in (4, 16):
        with pytest.raises(ValueError, match=f"global batch was 8, is {size}"):
            build(folder, batch_size=size).load_state_dict(states[0])
        loader = build(folder, batch_size=size)
        loader.load_state_dict(states[-1])
        assert list(loader) == []
    with pytest.raises(ValueError, match=r"1 streams .* this run has 4: choose --workers so that ranks x workers is 1"):
        build(folder, 2, 2).load_state_dict(states[0])
    with pytest.raises(ValueError, match="shuffle_buffer was 6, is 7"):
        build(folder, shuffle_buffer=7).load_state_dict(states[0])
    write_tar(folder / "new.tar", [("z", members(92))])
    with pytest.raises(ValueError, match="shards was 7, is 8; samples was 36, is 37"):
        build(folder).load_state_dict(states[0])
    build(folder).load_state_dict(states[-1])


def test_the_state_is_small_and_of_plain_types(folder, tmp_path):
    _, states, _ = all_batches(folder, 2)
    torch.save(states[2], tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == states[2]
    assert (tmp_path / "state.pt").stat().st_size < 5000
