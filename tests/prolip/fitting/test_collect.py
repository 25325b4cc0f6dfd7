"""Embeddings of pairs from samples: what several ranks bring is what one would have brought."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_helpers import run_worlds
from torchvision.transforms import Compose, Normalize

from prolip.data.augment.shifts import changed
from prolip.data.sources import Captioned
from prolip.embeddings import UnpairedEmbeddings
from prolip.fitting import collect
from prolip.fitting.collect import (
    Least,
    Rows,
    checksum,
    embed_changed,
    embed_images,
    embed_pool,
    embed_texts,
    encode_texts,
    join,
)
from prolip.ranks import everywhere
from training.hooks import least_of

KEYS = [f"{number:03d}" for number in range(30)]
SHARES = [KEYS[::2], KEYS[1::2]], [KEYS[20:], [], KEYS[:3], KEYS[3:20]]
ZERO = torch.zeros(1, 1, dtype=torch.int64)


def sample(key: str) -> Captioned:
    return Captioned(key, torch.full((3, 2, 2), float(key)), {f"text {int(key) % 7}": 0.5, "all": 0.5})


def encode(batch: torch.Tensor) -> Rows:
    """A point that says which input it is of, and first tokens that are twice that."""
    number = batch.flatten(1)[:, -1].float()
    mean = F.normalize(torch.stack([number, torch.ones_like(number)], 1), dim=1)
    return {"mean": mean, "first": 2 * number.unsqueeze(1).half()}


def tokenize(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[len(text), int(text.rpartition(" ")[2]) if " " in text else 9] for text in texts])


def pairs_of(*shares: list[str]):
    part = join([embed_images(map(sample, keys), encode, batch_size=4) for keys in shares])
    return embed_texts(part, encode, tokenize, 10.0, batch_size=3)


@pytest.mark.parametrize("most", [100, 12])
def test_ranks_bring_what_one_process_brings(monkeypatch, most):
    monkeypatch.setattr(collect, "SAMPLE", most)
    one = pairs_of(KEYS)
    for shares in SHARES:
        other = pairs_of(*shares)
        for name, x in one.tensors().items():
            assert torch.equal(x, other.tensors()[name]), name


def look(batch: torch.Tensor) -> Rows:
    """Return a point for the brightness of the images above and below."""
    halves = batch.float().flatten(2).unflatten(2, (2, -1)).mean((1, 3))
    return {"mean": F.normalize(halves + 3, dim=1)}


PREPROCESS = Compose([Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))])


def picture(key: str) -> Captioned:
    pixels = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(int(key)))
    return Captioned(key, PREPROCESS(pixels), {f"text {int(key) % 7}": 1.0})


def changed_by(shares: list[list[str]], most: int):
    """Close as in the code: the limit applies to all ranks together."""
    held = [Least(most) for _ in shares]
    parts = [embed_images(map(picture, keys), look, 4, one) for keys, one in zip(shares, held)]
    limit = least_of([one.names for one in held], most)
    for one in held:
        one.limit = limit
    return join([embed_changed(part, one, look, PREPROCESS, 5) for part, one in zip(parts, held)])


@pytest.mark.parametrize("most", [0, 1, 7, 100])
def test_ranks_change_the_pictures_that_one_process_changes(most):
    one = changed_by([KEYS], most)
    wanted = sorted(sorted(KEYS, key=lambda key: (checksum(key), key))[:most])
    assert [one.keys[row] for row in one.changed_of] == wanted and ("changed" in one.image) is (most > 0)
    for shares in SHARES:
        other = changed_by(shares, most)
        assert torch.equal(one.changed_of, other.changed_of)
        assert all(torch.equal(x, other.image[name]) for name, x in one.image.items())
    for row, key in enumerate(wanted):
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
        pixels = PREPROCESS(changed(picture(key).pixels.half().float() * std + mean, checksum(key)))
        torch.testing.assert_close(one.image["changed"][row], look(pixels)["mean"], rtol=1e-4, atol=1e-4)


def test_pixels_that_no_normalisation_makes_are_not_changed():
    held = Least(5)
    part = embed_images(map(picture, KEYS), look, 4, held)
    assert embed_changed(part, held, look, lambda image: image) is part


@pytest.mark.parametrize("most", [100, 12])
def test_first_tokens_are_of_the_rows_that_they_name(monkeypatch, most):
    monkeypatch.setattr(collect, "SAMPLE", most)
    pairs = pairs_of(KEYS[::2], KEYS[1::2])
    assert len(pairs.image_first) == min(most, 30) and len(pairs.text_first) == 8
    mean = pairs.image[pairs.image_first_of]
    torch.testing.assert_close(pairs.image_first[:, 0].float(), 2 * mean[:, 0] / mean[:, 1])
    torch.testing.assert_close(pairs.text_first[:, 0].float(), 2 * pairs.text_ids[pairs.text_first_of][:, -1].float())


def test_shorter_batches_of_ids_are_filled_with_padding_and_not_with_the_first_texts_end():
    """The first text of a batch may fill its context, and end in an id that is no padding."""

    def of_bytes(texts):
        longest = max(map(len, texts), default=0) + 1
        return torch.tensor([[*text.encode(), 7, *[0] * (longest - len(text) - 1)] for text in texts] or [[0]])

    found = encode_texts(["abcd", "e", "wx", "yz"], encode, lambda texts: of_bytes(texts) if texts[0] else ZERO, 2)[1]
    assert found.tolist() == [[97, 98, 99, 100, 7], [101, 7, 0, 0, 0], [119, 120, 7, 0, 0], [121, 122, 7, 0, 0]]


# --- pools -----------------------------------------------------------------------------------------------------------
def encode_pool(batch: torch.Tensor) -> Rows:
    rows = encode(batch)
    return {"mean": rows["mean"], "log_var": -rows["mean"], "novelty first": batch.flatten(1)[:, -1].float()}


def pool_of(keys: list[str]) -> tuple[UnpairedEmbeddings, dict]:
    """This rank's share, and all rows of all ranks."""
    pool = embed_pool(embed_images(map(sample, keys), encode_pool), encode_pool, tokenize, torch.device("cpu"))
    (images, image_rows), (texts, text_rows) = pool.side("image"), pool.side("text")
    number = torch.tensor([int(key) for key in pool.keys], dtype=torch.int64)
    image = everywhere(image_rows, *images, number, pool.image_novelty.get("first", torch.empty(0)))
    text = everywhere(text_rows, *texts, pool.text_ids, pool.text_novelty["first"])
    return pool, dict(enumerate([*image, *text]))


def pool_rank(rank: int) -> tuple:
    return pool_of(next(shares for shares in SHARES if len(shares) == dist.get_world_size())[rank])


@pytest.fixture(scope="module")
def worlds() -> dict[int, list]:
    return run_worlds([2, 4], pool_rank)


@pytest.mark.parametrize("shares", SHARES, ids=len)
def test_ranks_share_a_pool_out_and_every_text_is_embedded_once(worlds, shares):
    pool, one = pool_of(KEYS)
    assert sorted(pool.keys) == KEYS and len(pool.text_ids) == 8
    found = worlds[len(shares)]
    assert [len(own.keys) for own, _ in found] == [len(keys) for keys in shares]
    assert sum(len(own.text_ids) for own, _ in found) == 8
    for own, everyone in found:
        assert all(torch.equal(everyone[name], x) for name, x in one.items())
        assert (own.side("text")[1].diff() > 0).all() and (own.side("image")[1].diff() > 0).all()


def test_a_pool_of_one_text_or_no_image_is_refused():
    with pytest.raises(ValueError, match="0 images: give two or more"):
        pool_of([])
    part = embed_images(map(sample, KEYS), encode_pool)._replace(texts=["all"])
    with pytest.raises(ValueError, match="1 texts: give two or more"):
        embed_pool(part, encode_pool, tokenize, torch.device("cpu"))
