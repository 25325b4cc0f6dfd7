"""Parts of `gpu.py`: the Triton kernel against eager, and PPCL against a plain sigmoid loss."""

from __future__ import annotations

import copy
import statistics
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from gpu_kit import Kit
from torch import Tensor


def leaves(x: Any) -> list[Tensor]:
    """Return the leaves of `bench_loss.Inputs` that have gradients."""
    return [*x.image, *x.text, x.scale, x.bias]


def doubled(x: Any) -> Any:
    """Return the same inputs in float64."""
    twin = copy.copy(x)
    twin.image, twin.text = (
        type(z)(*(part.detach().double().requires_grad_() for part in z)) for z in (x.image, x.text)
    )
    twin.scale, twin.bias = (part.detach().double().requires_grad_() for part in (x.scale, x.bias))
    return twin


def gradients(loss: Callable[[Any], Tensor], x: Any) -> list[Tensor]:
    """Return the loss and its gradients, in float64."""
    x.clear()
    value = loss(x)
    value.backward()
    found = [part.grad if part.grad is not None else torch.zeros_like(part) for part in leaves(x)]
    return [part.detach().double() for part in (value, *found)]


def furthest(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest error of loss and gradients, relative to the largest element if it is not 0; NaN stays."""
    sizes = [b.abs().max() for b in exact]
    errors = [(a - b).abs().max() / torch.where(size > 0, size, 1.0) for a, b, size in zip(got, exact, sizes)]
    return torch.stack(errors).max().item()


def kernel_in_use(kit: Kit) -> None:
    """Enable the kernel, also in a rehearsal on the CPU, and check that the loss uses it."""
    from prolip.losses import fused, pairs

    pairs.FUSED_DEVICES = frozenset({"cuda", kit.device.type})
    chosen = pairs.choose_sum_block(
        pairs.Factors(torch.zeros(1, 1, device=kit.device), torch.zeros(1, device=kit.device))
    )
    kit.check(
        "scorer of a block", f"{chosen.__module__}.{chosen.__name__}", "the Triton kernel", chosen is fused.sum_block
    )


def kernel(kit: Kit) -> None:
    """Compare the Triton kernel with plain operations: values and gradients against float64, and times."""
    from bench.train import loss as bench_loss
    from prolip.losses import Matches, ppcl

    kernel_in_use(kit)
    batch, dim = (48, 16) if kit.rehearse else (2048, 768)
    x = bench_loss.Inputs(batch, dim, kit.device.type)
    place = torch.arange(batch, device=kit.device)
    ids = Matches(torch.stack([place, (place + 1) % batch], 1), place)
    for name, labels in {"": None, ", known matches": ids}.items():
        kit.begin(f"values and gradients{name}, B={batch}, D={dim}")

        def loss(inputs: Any, labels: Any = labels) -> Tensor:
            return ppcl(inputs.image, inputs.text, inputs.scale, inputs.bias, labels)

        exact, fused = gradients(loss, doubled(x)), gradients(loss, x)
        with patch.dict(bench_loss.LOSSES), patch.object(bench_loss, "ours", loss):
            plain = gradients(bench_loss.plain, x)
        error, eager = furthest(fused, exact), furthest(plain, exact)
        bound = max(2 * eager, 1e-5)
        kit.check(
            f"largest error against float64{name}", f"{error:.1e}, eager {eager:.1e}", f"<= {bound:.1e}", error <= bound
        )
    for batch in (32, 64) if kit.rehearse else (4096, 16384):
        kit.begin(f"times, B={batch}, D={dim}")
        inputs = bench_loss.Inputs(batch, dim, kit.device.type)
        times = bench_loss.take_turns(["ours", "plain"], 2 if kit.rehearse else 15, inputs, kit.device.type)
        ours, eager = (1e3 * statistics.median(times[name]) for name in ("ours", "plain"))
        ratio = bench_loss.median_ratio(times["ours"], times["plain"])
        kit.speed(f"kernel / eager, B={batch}", ratio, f"{ratio:.3f} ({ours:.2f} ms, eager {eager:.2f} ms)", most=1.0)
    kit.settle()


def one_block(rows: Tensor, columns: Tensor, bias: Tensor, place: Tensor, weight: float) -> tuple[Tensor, ...]:
    """Return loss, gradient of the logits and its sum for rows of the plain sigmoid loss; place: own columns."""
    logits = rows @ columns.T + bias
    own = place[:, None] == torch.arange(len(columns), device=rows.device)
    z = torch.where(own, -logits, logits)
    g = torch.where(own, -weight, weight) * torch.sigmoid(z)
    return F.softplus(z).sum(), g, g.sum()


def compiled_blocks(compiled: Callable[..., tuple[Tensor, ...]], block: int) -> Callable[[Any], Tensor]:
    """Return the plain sigmoid loss of means, in compiled blocks of rows with gradients in the forward pass."""
    from prolip.losses.autograd import Evaluation, differentiate

    def evaluate(inputs: Sequence[Tensor], _: Sequence[bool]) -> Evaluation:
        image, text, scale, bias = inputs
        loss, d_bias = scale.new_zeros(()), scale.new_zeros(())
        d_image, d_text = torch.empty_like(image), torch.zeros_like(text)
        place = torch.arange(len(image), device=image.device)
        for start in range(0, len(image), block):
            part = slice(start, start + block)
            scaled = image[part] * scale
            value, g, total = compiled(scaled, text, bias, place[part], 1 / len(image))
            loss += value
            d_bias += total
            torch.mm(g, text, out=d_image[part])
            d_text.addmm_(g.T, scaled)
        d_scale = d_image.flatten().dot(image.flatten())
        return loss / len(image), (d_image.mul_(scale), d_text, d_scale, d_bias)

    return lambda x: differentiate(evaluate, (x.image.mean, x.text.mean, x.scale, x.bias))


def pairs(kit: Kit) -> None:
    """Time PPCL, forward and backward, against two plain sigmoid losses: our kernel and torch.compile's."""
    from bench.train import loss as bench_loss
    from prolip.losses import Factors
    from prolip.losses import pairs as blocks
    from prolip.losses.contrastive import sigmoid_loss

    kernel_in_use(kit)
    batch, dim = (64, 16) if kit.rehearse else (65536, 768)
    block = blocks.default_block(batch, kit.device)

    def same_kernel(x: Any) -> Tensor:
        image, text = (Factors(z.mean, z.mean.new_zeros(len(z.mean))) for z in (x.image, x.text))
        return sigmoid_loss(image, text, x.scale, x.bias)

    how = torch.compile(one_block, dynamic=False, backend="eager" if kit.rehearse else "inductor")
    plain = {"plain, same kernel": same_kernel, "plain, compiled": compiled_blocks(how, block)}
    x = bench_loss.Inputs(batch, dim, kit.device.type)
    kit.begin(f"the two plain losses give one value, B={batch}, D={dim}")
    wanted = gradients(same_kernel, x)
    try:
        error = furthest(gradients(plain["plain, compiled"], x), wanted)
        kit.check("plain losses: largest difference", f"{error:.1e}", "<= 1e-04", error <= 1e-4)
    except Exception as failure:  # the compiler failed: the other comparison still counts
        traceback.print_exc()
        del plain["plain, compiled"]
        kit.wrong.append(f"plain, compiled: {type(failure).__name__}: {failure}".splitlines()[0])
        kit.row("plain, compiled", f"FAILED: {kit.wrong[-1]}")
    del wanted
    with patch.dict(bench_loss.LOSSES, plain):
        pair_times(kit, plain, x, f"B={batch}", block)
    kit.settle()


def pair_times(kit: Kit, plain: Collection[str], x: Any, size: str, block: int) -> None:
    """Time PPCL and the named plain losses in turn, and measure the memory of PPCL."""
    from bench.train import loss as bench_loss

    turns, device = 2 if kit.rehearse else 7, kit.device.type
    kit.begin(f"times, {size}, float32 products, which PPCL always takes, {block} rows a block")
    times = bench_loss.take_turns(["ours", *plain], turns, x, device)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    fastest = min(plain, key=lambda name: medians[name])
    for name in plain:
        kit.row(name, f"{1e3 * medians[name]:.1f} ms")
    ratio = bench_loss.median_ratio(times["ours"], times[fastest])
    figure = f"{ratio:.3f} ({1e3 * medians['ours']:.1f} ms against: {fastest})"
    kit.speed(f"PPCL / plain, forward and backward, {size}", ratio, figure, most=1.2)
    if "plain, compiled" in plain:
        kit.begin("the compiled loss with TF32 products: the cost of full precision")
        torch.set_float32_matmul_precision("high")
        taken = bench_loss.take_turns(["plain, compiled"], turns, x, device)["plain, compiled"]
        kit.row("plain, compiled, TF32 products", f"{1e3 * statistics.median(taken):.1f} ms")
        torch.set_float32_matmul_precision("highest")
    if kit.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        bench_loss.ours(x).backward()
        kit.row("PPCL: peak memory above its inputs", f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB")
