"""Augmentation of token ids: against the definition token by token, shares, what must stay, equality over ranks."""

import math
from types import SimpleNamespace

import pytest
import torch

from prolip.data.augment.tokens import TokenAugment
from prolip.models.tokenizer import BPETokenizer, get_tokenizer
from prolip.random import Draws

PAD, START, END, MASK = 0, 1, 2, 99
SHARES = (0.1, 0.02, 0.08)


def build(shares=SHARES, pad=PAD, end=END, **settings):
    words = torch.ones(100, dtype=torch.bool)
    words[[pad, START, end, MASK]] = False
    return TokenAugment(shares, words, mask_id=MASK, pad_id=pad, draws=Draws(**settings))


def texts(rows, length, pad=PAD, end=END, seed=0):
    """[start, words of random number, end, padding...]."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(10, 50, (rows, length), generator=generator)
    count = torch.randint(0, length - 1, (rows, 1), generator=generator)
    column = torch.arange(length)
    text = torch.where(column <= count, words, torch.tensor(pad))
    text[:, 0] = START
    return text.masked_fill(column == count + 1, end)


def by_hand(text, draws, others, shares, pad=PAD, end=END):
    """The definition, token by token."""
    mask, random, delete = shares
    out = torch.full_like(text, pad)
    for row in range(len(text)):
        places = [i for i in range(text.shape[1]) if text[row, i].item() not in (pad, START, end, MASK)]
        spared = max(places, key=lambda i, row=row: draws[row, i].item(), default=None)
        found = []
        for i, token in enumerate(text[row].tolist()):
            draw = draws[row, i].item() if i in places and i != spared else 2.0
            if draw < mask:
                found.append(MASK)
            elif draw < mask + random:
                found.append(others[row, i].item())
            elif draw >= mask + random + delete:
                found.append(token)
        out[row, : len(found)] = torch.tensor(found)
    return out


@pytest.mark.parametrize("end", [END, PAD], ids=["end", "end is padding"])
@pytest.mark.parametrize("shares", [SHARES, (0.5, 0, 0), (0, 0.5, 0), (0, 0, 0.5), (0.3, 0.4, 0.3), (0, 0, 1.0)])
def test_tokens_go_where_the_definition_has_them(shares, end):
    text = texts(60, 12, end=end)
    draws, others = (torch.rand(60, 12), torch.randint(10, 50, (60, 12)))
    out = build(shares, end=end).change(text, draws, others)
    assert out.equal(by_hand(text, draws, others, shares, end=end))


def test_shares_are_those_asked_for_and_other_tokens_any_word_but_a_special_one():
    text = torch.full((4000, 40), 50)
    out = build((0.1, 0.3, 0.08))(text, 3)
    counts = torch.bincount(out.flatten(), minlength=100)
    assert counts[[START, END]].eq(0).all()
    drawn = counts[[i for i in range(100) if i not in (PAD, START, END, MASK, 50)]].float()
    assert (drawn - drawn.mean()).abs().max() < 5 * drawn.mean().sqrt()
    found = {0.1: counts[MASK].item(), 0.08: counts[PAD].item(), 0.3 * 95 / 96: drawn.sum().item()}
    for share, number in found.items():  # one in 96 words is itself
        assert abs(number / text.numel() - share) < 5 * math.sqrt(share / text.numel())


@pytest.mark.parametrize("shape", [(8, 10), (8, 3, 10)])
def test_ranks_change_the_tokens_that_one_process_changes(shape):
    text = texts(math.prod(shape[:-1]), 10).view(shape)
    whole = build((0.2, 0.2, 0.2), seed=4)(text, 9)
    for rank in range(4):
        part = build((0.2, 0.2, 0.2), seed=4, rank=rank, world_size=4)(text[rank::4], 9)
        assert part.equal(whole[rank::4])
    assert not whole.equal(build((0.2, 0.2, 0.2), seed=4)(text, 10))
    assert not whole.equal(build((0.2, 0.2, 0.2), seed=5)(text, 9))
    assert whole.shape == text.shape and not whole.equal(text)


def test_mask_needs_a_mask():
    words = torch.ones(10, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"text_mask is 0.1 and the model's vocabulary has no \[MASK\]"):
        TokenAugment((0.1, 0, 0), words, mask_id=None, pad_id=0)
    text = torch.arange(1, 9).view(2, 4)
    assert TokenAugment((0, 0, 0.5), words, mask_id=None, pad_id=0)(text, 0).shape == text.shape


def test_words_are_what_neither_tokenizer_nor_model_has_for_special():
    tokenizer = get_tokenizer("ProLIP-ViT-test")
    model = SimpleNamespace(pad_token_id=0, mask_token_id=49408, special_token_ids=(49406,), vocab_size=49500)
    words = TokenAugment.for_model(model, tokenizer, SHARES, Draws()).words
    assert words.shape == (49500,) and not words[[0, 49406, 49407, 49408, 49499]].any() and words[1:49406].all()
    model = SimpleNamespace(pad_token_id=0, mask_token_id=None, special_token_ids=(), vocab_size=50)
    assert TokenAugment.for_model(model, None, (0, 0.1, 0), Draws()).words.tolist() == [False] + [True] * 49
    ids = tokenizer(["a photo of a grey cat!"])
    assert words[ids][ids > 0].sum() == (ids > 0).sum() - 2  # but for start and end


def test_clips_words_are_masked_by_a_letter_that_no_text_has_and_its_end_is_the_highest_id():
    """OpenCLIP's text towers pool at the highest id, so nothing that is put in may be above the end's."""
    tokenizer = get_tokenizer("ViT-B-16-quickgelu")
    model = SimpleNamespace(pad_token_id=0, mask_token_id=None, special_token_ids=(), vocab_size=tokenizer.vocab_size)
    letter = tokenizer.encoder["M"]
    caption = "Many MEN Mow a Meadow in May, M " * 2
    text = tokenizer([caption] * 400)
    assert letter not in text and letter == tokenizer.unseen_id
    out = TokenAugment.for_model(model, tokenizer, (0.5, 0.2, 0.1), Draws())(text, 3)
    start, end = tokenizer.encoder["<start_of_text>"], tokenizer.encoder["<end_of_text>"]
    assert (out[:, 0] == start).all() and (out == end).sum(1).eq(1).all()
    assert out.argmax(1).equal((out == end).int().argmax(1))
    words = text[0].ne(0).sum().item() - 2
    assert (out == letter).sum().item() == pytest.approx(400 * words * 0.5, rel=0.05)
    assert (text.ne(0).sum() - out.ne(0).sum()).item() == pytest.approx(400 * words * 0.1, rel=0.1)
    assert BPETokenizer(77, clean="whitespace").unseen_id is None  # there a text may have it
