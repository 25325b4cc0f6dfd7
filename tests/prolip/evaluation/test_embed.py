"""Batched embedding: what comes out does not depend on how it was batched."""

import pytest
import torch
from embedding import embed_images, embed_texts, similarity_scores
from torch import nn

from prolip import embedder as evaluated
from prolip.gaussian import Gaussian


class Stub(nn.Module):
    """A model whose outputs are plain functions of its inputs; dropout betrays a wrong mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 5)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.seen: list[torch.dtype] = []

    def encode_image(self, x):
        out = self.drop(self.linear(x.flatten(1)))
        self.seen.append(out.dtype)
        return Gaussian(nn.functional.normalize(out, dim=-1), out)

    def encode_text(self, ids):
        return self.encode_image(ids.float())


def tokenize(texts):
    rows = torch.zeros(len(texts), 12, dtype=torch.long)
    for i, text in enumerate(texts):
        codes = [99, *(ord(c) for c in text), 98][:12]
        rows[i, : len(codes)] = torch.tensor(codes)
    return rows


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stub()


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_embeddings_do_not_depend_on_the_batch_size(model, batch_size):
    images = torch.randn(7, 3, 2, 2)
    got = embed_images(model, iter(images), lambda x: x, batch_size=batch_size)
    model.eval()
    whole = model.encode_image(images)
    torch.testing.assert_close(got.mean, whole.mean.detach())
    torch.testing.assert_close(got.log_var, whole.log_var.detach())


def test_texts_are_tokenised_in_order(model):
    texts = ["a", "bb", "ccc"]
    got = embed_texts(model, tokenize, texts, batch_size=2)
    torch.testing.assert_close(got.mean, model.eval().encode_text(tokenize(texts)).mean.detach())


def test_every_module_gets_its_own_mode_back_and_no_graph_is_left(model):
    model.train()
    model.frozen.eval()
    got = embed_texts(model, tokenize, ["a"])
    assert model.training and model.drop.training and not model.frozen.training
    assert not got.mean.requires_grad and not got.mean.is_inference()
    with pytest.raises(RuntimeError), evaluated.evaluating(model, "cpu"):
        raise RuntimeError
    assert model.drop.training


def test_autocast_runs_in_bf16_and_returns_float32(model):
    got = embed_images(model, torch.randn(2, 3, 2, 2), lambda x: x, precision="amp_bf16")
    assert model.seen == [torch.bfloat16] and got.mean.dtype == got.log_var.dtype == torch.float32


def test_token_lengths_leave_out_the_padding_only():
    lengths = evaluated.token_lengths(tokenize, ["", "a", "abc", "a" * 40, "a\0b"], batch_size=2)
    assert lengths.tolist() == [2, 3, 5, 12, 5]  # an id of padding inside a text is a token of it


def test_similarities_are_csd_and_cosine_and_any_measure():
    a = Gaussian(torch.eye(2), torch.zeros(2, 2).log_softmax(1))  # traces are 1
    b = Gaussian(torch.eye(2)[:1], torch.full((1, 2), -1e9))  # trace 0
    torch.testing.assert_close(similarity_scores(a, b), torch.tensor([[0.5], [-0.5]]))
    torch.testing.assert_close(similarity_scores(a, b, "mean"), torch.tensor([[1.0], [0.0]]))
    torch.testing.assert_close(similarity_scores(a, b, "csd_similarity"), similarity_scores(a, b))
    with pytest.raises(ValueError, match="unknown"):
        similarity_scores(a, b, "nearness")


def test_bad_requests_are_refused(model):
    with pytest.raises(ValueError, match="no text to embed"):
        embed_texts(model, tokenize, [])
    with pytest.raises(ValueError, match="use one of fp32, amp_bf16, amp_fp16"):
        embed_texts(model, tokenize, ["a"], precision="int8")
    with pytest.raises(ValueError, match="batch size 0"):
        embed_texts(model, tokenize, ["a"], batch_size=0)
