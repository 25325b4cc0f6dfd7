"""Noisy correspondence: which captions go where, the same for all ranks, workers and restarts, and written down."""

import itertools
import json
import random
from collections import Counter

import pytest
from tiny_loaders import build, epoch, gathered, same
from tiny_tars import letters, members, plain, png, write_shards, write_tar

from prolip.data import noisy_captions as noises
from prolip.data.captions import caption_id
from prolip.data.config import DataConfig
from prolip.data.loader import join_states
from prolip.data.noisy_captions import Slot, derange, shuffle
from prolip.data.reading.tar import read_shard
from prolip.data.sources import captioned_samples

FIELDS = "name,keywords:2,txt"


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, [5, 3, 4])
    return tmp_path


def slots(owners, field="txt"):
    return [Slot((0, str(owner)), field, number, f"{owner}.{number}") for number, owner in enumerate(owners)]


def kept(owners, order):
    return sum(owners[place] == owner for owner, place in zip(owners, order))


@pytest.mark.parametrize("size", range(6))
def test_as_few_as_possible_keep_their_own_of_all_permutations(size):
    for owners in itertools.product(range(3), repeat=size):
        least = min(kept(owners, order) for order in itertools.permutations(range(size)))
        for seed in range(2):
            order = derange(owners, random.Random(seed))
            assert sorted(order) == list(range(size)) and kept(owners, order) == least
    found = Counter(tuple(derange("abc", random.Random(seed))) for seed in range(400))
    assert found.keys() == {(1, 2, 0), (2, 0, 1)} and min(found.values()) > 150


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_a_share_of_each_field_is_shuffled_among_itself(ratio):
    owners = [number // 5 for number in range(100)]
    given = slots(owners) + slots(owners[:30], "name")
    swaps = shuffle(given, ratio, seed=3)
    for field, size in (("txt", 100), ("name", 30)):
        mine = [swap for swap in swaps if swap.slot.field == field]
        assert len(mine) == round(ratio * size)
        assert all(swap.source.field == field and swap.slot.owner != swap.source.owner for swap in mine)
        assert sorted(swap.slot for swap in mine) == sorted(swap.source for swap in mine)
    assert shuffle(given, ratio, seed=3) == swaps
    assert shuffle(given, ratio, seed=4) != swaps
    # images do not just change places with all of their captions
    assert len({(swap.slot.owner, swap.source.owner) for swap in swaps if swap.slot.field == "txt"}) > 20 * ratio


def noisy_captions(folder, noise):
    """Return each sample's captions after the swaps of `noise`, by hand from the raw shards."""
    found = {}
    for url in sorted(folder.glob("*.tar")):
        for raw in read_shard(str(url)):
            record = json.loads(raw["json"])
            record |= {"txt": [raw["txt"].decode()], "name": [record["name"]]}
            found[raw["__key__"]] = {field: record[field] for field in ("txt", "name", "keywords")}
    for swap in noise.swaps:
        (_, key), field, number, own = swap.slot
        assert found[key][field][number] == own
    for swap in noise.swaps:
        found[swap.slot.owner[1]][swap.slot.field][swap.slot.number] = swap.source.text
    return found


def test_the_loader_gives_the_captions_that_are_written_down(folder, tmp_path):
    settings = {"caption_sampling": FIELDS, "known_matches": True, "batch_size": 12}
    loader = build(folder, workers=2, transform=plain, noise_ratio=0.5, **settings)
    assert str(loader.noise) == "30 of 60 associations (50.0%) shuffled, 30 changed text"
    loader.noise.write(tmp_path / "noise.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "noise.jsonl").read_text().splitlines()]
    assert len(lines) == 30 and all(line["own"] != line["given"] and line["key"] != line["from"] for line in lines)
    wanted = noisy_captions(folder, loader.noise)
    by_file = {(line["key"], line["field"], line["slot"]): line["given"] for line in lines}
    (batch,) = epoch(loader)
    (usual,) = epoch(build(folder, transform=plain, **settings))
    pictures = dict(zip(usual["key"], usual["image"]))
    drawn = set()
    for key, image, text, ids in zip(batch["key"], batch["image"], batch["text"], batch["caption_ids"]):
        captions = {(key, field, number): x for field, own in wanted[key].items() for number, x in enumerate(own)}
        assert {caption_id(caption) for caption in captions.values()} == set(ids.tolist()) - {-1}
        assert any(letters([caption])[0].equal(text) for caption in captions.values())
        assert image.equal(pictures[key]) and captions | by_file == by_file | captions
        drawn.add(key)
    loader.close()
    assert len(drawn) > 9


def test_ranks_and_workers_see_the_same_noise(folder):
    settings = {"caption_sampling": FIELDS, "known_matches": True, "noise_ratio": 0.4}

    def of(ranks, workers):
        loaders = [build(folder, 8 // ranks, workers, rank, ranks, **settings) for rank in range(ranks)]
        whole = [gathered(step) for step in zip(*(epoch(loader) for loader in loaders))]
        for loader in loaders:
            loader.close()
        return {loader.noise.digest for loader in loaders}, whole

    (one, first), (digests, batches) = of(1, 4), of(4, 1)
    assert digests == one and len(batches) == len(first) and all(same(a, b) for a, b in zip(first, batches))


def test_ranks_that_share_the_reading_find_what_one_finds(folder):
    whole = build(folder, noise_ratio=0.4, caption_sampling=FIELDS).noise
    settings = {"batch_size": 2, "noise_ratio": 0.4, "caption_sampling": FIELDS}
    sources = [build(folder, rank=rank, world_size=2, **settings) for rank in range(2)]
    answers = []

    def gather(value, work):  # what the other rank says is computed here, as it would be there
        if value is None:
            return work([None, None])
        given = dict(whole.shards), whole.captions
        parts = [noises.read_slots(one._chunks.source, *given, rank, 2) for rank, one in enumerate(sources)]
        answers.append(value[0])
        return work([(part, "") for part in parts])

    for loader in sources:
        loader.gather = gather
        assert loader.noise == whole and loader.noise.digest == whole.digest
    assert not answers[0].keys() & answers[1].keys() and answers[0].keys() | answers[1].keys() == {0, 1, 2}


def test_every_rank_raises_what_one_of_them_met(folder, monkeypatch):
    loader = build(folder, noise_ratio=0.4)
    loader.gather = lambda value, work: work([value, ({}, "shard 7 is gone") if value else None])
    with pytest.raises(ValueError, match="shard 7 is gone"):
        loader.noise  # noqa: B018
    monkeypatch.setattr(noises, "MOST", 11)
    with pytest.raises(ValueError, match="--noise-ratio 0.5: the data has more than 11 associations"):
        build(folder, noise_ratio=0.5).noise  # noqa: B018
    path = folder / "1.tar"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"--noise-ratio 0.5: .*1\.tar cannot be read: .*Repair this shard"):
        build(folder, noise_ratio=0.5, max_bad_fraction=1.0, train_num_samples=12, batch_size=4).noise  # noqa: B018


def test_no_noise_is_what_it_was_and_the_seed_of_training_has_no_say(folder):
    usual, zero = (build(folder, caption_sampling=FIELDS, **more) for more in ({}, {"noise_ratio": 0.0}))
    assert all(same(a, b) for a, b in zip(epoch(usual), epoch(zero)))
    assert zero.noise is None and "noise" not in zero.state_dict() and zero.state_dict() == usual.state_dict()
    one, other = (build(folder, noise_ratio=0.5, seed=seed).noise for seed in (0, 1))
    assert one == other != build(folder, noise_ratio=0.5, noise_seed=1).noise


def test_selected_samples_exchange_captions_among_themselves_alone(folder):
    settings = {"select": "group=objects|food drink", "caption_sampling": "group,name"}
    chosen = build(folder, noise_ratio=1.0, **settings).noise
    keys = {f"s{i:03d}" for i in range(12) if i % 3}
    assert {swap.slot.owner[1] for swap in chosen.swaps} == {swap.source.owner[1] for swap in chosen.swaps} == keys
    assert chosen.slots == 16
    # equal strings coincide: half of the groups are those of any other sample
    changed = sum(swap.slot.text != swap.source.text for swap in chosen.swaps)
    assert str(chosen).endswith(f"{changed} changed text") and 8 <= changed < 16
    loader = build(folder, batch_size=8, noise_ratio=1.0, **settings)
    assert {key for batch in epoch(loader) for key in batch["key"]} == keys  # chosen by what they were


def test_equal_keys_of_several_shards_are_several_samples(tmp_path):
    for name in "ab":
        rows = [(f"k{i}", {"png": png(i), "txt": f"{name}{i}".encode()}) for i in range(4)]
        write_tar(tmp_path / f"{name}.tar", rows)
    loader = build(tmp_path, batch_size=8, noise_ratio=1.0, transform=plain)
    (batch,) = epoch(loader)
    texts = ["".join(map(chr, text.tolist())).rstrip("\0") for text in batch["text"]]
    assert sorted(texts) == sorted(f"{name}{i}" for name in "ab" for i in range(4))
    assert len({swap.slot.owner for swap in loader.noise.swaps}) == 8


def test_a_run_goes_on_with_its_noise(folder):
    settings = {"batch_size": 4, "workers": 2, "caption_sampling": FIELDS, "noise_ratio": 0.5}
    loader = build(folder, **settings)
    loader.set_epoch(1)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(json.loads(json.dumps(join_states([loader.state_dict()]))))
        states[-1]["cursors"] = {int(stream): cursor for stream, cursor in states[-1]["cursors"].items()}
    loader.close()
    resumed = build(folder, **settings)
    resumed.load_state_dict(states[0])
    resumed.set_epoch(1)
    rest = list(resumed)
    assert len(rest) == 2 and all(same(a, b) for a, b in zip(rest, batches[1:]))
    resumed.close()
    for other in ({"noise_ratio": 0.0}, {"noise_seed": 1}, {"noise_ratio": 0.4}, {"caption_sampling": "name"}):
        for state in (states[0], states[-1]):  # inside an epoch and between two
            with pytest.raises(ValueError, match="captions had other noise .* give its --noise-ratio"):
                build(folder, **settings | other).load_state_dict(state)


def test_what_is_looked_at_when_training_ends_has_the_same_captions(folder):
    settings = {"caption_sampling": FIELDS, "noise_ratio": 0.5}
    noise = build(folder, **settings).noise
    wanted = noisy_captions(folder, noise)
    config = DataConfig(train_data=str(folder), workers=0, batch_size=4, **settings)
    for given in (None, noise):
        found = {one.key: set(one.chances) for one in captioned_samples(config, plain, 12, noise=given)}
        assert found == {key: {text for texts in fields.values() for text in texts} for key, fields in wanted.items()}


def test_a_caption_that_is_another_now_is_a_fault(folder):
    loader = build(folder, noise_ratio=1.0, batch_size=4, max_bad_fraction=0.9)
    assert loader.noise
    write_tar(folder / "0.tar", [(f"s{i:03d}", members(i) | ({"txt": b"new"} if i < 2 else {})) for i in range(5)])
    epoch(loader)
    assert loader.faults()["changed caption"] >= 1
