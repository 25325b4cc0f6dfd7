"""Recomputing changes memory, never gradients."""

from __future__ import annotations

import pytest
import torch

import prolip
from training.model import checkpoint_selectively


def backward(policy: str, precision: torch.dtype | None) -> tuple[list[torch.Tensor], int]:
    """Gradients of a small model, and the bytes that its forward pass keeps for the backward pass."""
    torch.manual_seed(0)
    model = prolip.create_model("ProLIP-ViT-XS-16", force_image_size=64)
    if policy == "full":
        model.set_grad_checkpointing(True)
    elif policy == "selective":
        checkpoint_selectively(model)
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


@pytest.mark.parametrize("precision", [torch.bfloat16, pytest.param(None, marks=pytest.mark.slow)])
def test_recomputing_gives_the_same_gradients_from_less_memory(precision):
    want, everything = backward("none", precision)
    for policy in ("full", "selective"):
        got, _ = backward(policy, precision)
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(b, a)
    # hooks outside of a checkpoint see what is kept outside of it; full recomputation keeps the inputs of blocks
    assert backward("full", precision)[1] < 0.5 * everything
