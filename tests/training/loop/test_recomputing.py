"""What is recomputed changes memory, never gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import prolip
from training.model import checkpoint_selectively


def build(policy: str):
    """A small model that recomputes by a policy."""
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-XS-16", force_image_size=64)
    if policy == "full":
        model.set_grad_checkpointing(True)
    elif policy == "selective":
        checkpoint_selectively(model)
    return model


def backward(policy: str, precision: torch.dtype | None) -> tuple[list[torch.Tensor], int]:
    """Gradients of a small model, and the bytes that its forward pass keeps for the backward pass."""
    model = build(policy)
    generator, kept = torch.Generator().manual_seed(1), {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    image, text = torch.randn(8, 3, 64, 64, generator=generator), torch.randint(1, 99, (8, model.context_length))
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", precision, bool(precision)):
        out = model(image, text)
        loss = out.image.mean.pow(3).sum() + out.text.log_var.mean() + (out.image.mean * out.text.mean).sum()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return gradients, sum(size for pointer, size in kept.items() if pointer not in owned)


class Calls(TorchDispatchMode):
    """Counts the operations that are computed."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_recomputing_gives_the_same_gradients_from_less_memory(precision):
    want, everything = backward("none", precision)
    for policy in ("full", "selective"):
        got, _ = backward(policy, precision)
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(b, a)
    # hooks outside of a checkpoint see what is kept outside of it; full recomputation keeps the inputs of blocks
    assert backward("full", precision)[1] < 0.5 * everything


def test_the_selective_policy_keeps_products_and_computes_norms_again():
    counts = {}
    for policy in ("none", "full", "selective"):
        model = build(policy)
        loss = model.encode_image(torch.randn(2, 3, 64, 64)).mean.pow(3).sum()
        with Calls() as calls:
            loss.backward()
        counts[policy] = (calls.count["addmm"], calls.count["native_layer_norm"])
    blocks = len(model.visual.transformer.resblocks)
    assert counts["none"] == (0, 0)
    assert counts["selective"] == (0, 2 * blocks)
    assert counts["full"][0] >= 2 * blocks and counts["full"][1] == 2 * blocks
