"""Several GRUs over sequences of one length: on a CPU step by step together, where torch runs them one by one."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

#: Whether a graph is made for other programs; torch before 2.7 does not tell it from one for itself.
EXPORTING = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def run_grus(grus: Sequence[nn.GRU], x: Tensor) -> list[Tensor]:
    """States of GRUs of one layer and one size on the same input, (N, T, input) -> (N, T, H) each.

    A step of a small GRU takes a CPU less time than asking for it: G of them are taken in one, and their gradients are
    in closed form. CUDA has kernels for whole sequences.
    """
    alone = x.device.type != "cpu" or EXPORTING()  # ONNX has an operator for whole sequences, too
    return [gru(x)[0] for gru in grus] if alone else _step_together(grus, x)


# Hundreds of steps are no graph; of nn.GRU Dynamo makes none either. `torch.compiler.disable` is the same, but imports
# Dynamo here, a second for every command.
@torch._disable_dynamo
def _step_together(grus: Sequence[nn.GRU], x: Tensor) -> list[Tensor]:
    weight, bias = (torch.cat([getattr(gru, f"{part}_ih_l0") for gru in grus]) for part in ("weight", "bias"))
    again, offset = (torch.stack([getattr(gru, f"{part}_hh_l0") for gru in grus]) for part in ("weight", "bias"))
    gates = F.linear(x.transpose(0, 1), weight, bias).unflatten(2, (len(grus), -1)).transpose(1, 2).contiguous()
    return list(Recurrence.apply(gates, again, offset).permute(1, 2, 0, 3))


class Recurrence(torch.autograd.Function):
    """torch.nn.GRU's steps of G GRUs from h = 0, with x_r, x_z, x_n what their inputs give to the gates:

        r, z = sigmoid(x_r + U_r h + c_r), sigmoid(x_z + U_z h + c_z)
        n = tanh(x_n + r (U_n h + c_n)),   h' = n + z (h - n).

    gates x (T, G, N, 3 H), U (G, 3 H, H), c (G, 3 H) -> h after each step (T, G, N, H).
    """

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        steps, groups, rows, width = gates.shape[0], *gates.shape[1:3], weight.shape[2]
        states = gates.new_zeros(steps + 1, groups, rows, width)
        rz, n = gates.new_empty(steps, groups, rows, 2 * width), gates.new_empty(steps, groups, rows, width)
        before = torch.empty_like(n)  # U_n h + c_n
        weights, biases = weight.mT.split([2 * width, width], 2), bias.unsqueeze(1).split([2 * width, width], 2)
        whole = *(part.contiguous() for part in weights), *biases
        first, second = gates.split([2 * width, width], 3)
        for x_rz, x_n, h, after, rz_t, n_t, before_t in zip(first, second, states, states[1:], rz, n, before):
            torch.baddbmm(whole[2], h, whole[0], out=rz_t).add_(x_rz).sigmoid_()
            torch.baddbmm(whole[3], h, whole[1], out=before_t)
            torch.addcmul(x_n, rz_t[..., :width], before_t, out=n_t).tanh_()
            torch.lerp(n_t, h, rz_t[..., width:], out=after)
        ctx.save_for_backward(weight, states, rz, n, before)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With d of h' and a = (1 - z) (1 - n^2): n's argument has d a, r's d a r (1 - r) (U_n h + c_n), z's
        d (h - n) z (1 - z). All factors but d are known before the first step.
        """
        weight, states, rz, n, before = ctx.saved_tensors
        r, z = rz.chunk(2, 3)
        inner = (1 - z) * (1 - n.square())
        factor = torch.stack([inner * before * r * (1 - r), (states[:-1] - n) * z * (1 - z), inner * r], 3)
        each, sums = torch.empty_like(factor), torch.empty_like(n)
        reach = torch.zeros_like(n[0])  # what later steps ask of this one's state
        z = z.contiguous()
        for t in reversed(range(len(n))):
            d = torch.add(grad[t], reach, out=sums[t])
            part = torch.mul(factor[t], d.unsqueeze(2), out=each[t])
            reach = torch.baddbmm(d * z[t], part.flatten(2), weight)
        each = each.flatten(3)
        width = weight.shape[2]
        of_gates = torch.cat([each[..., : 2 * width], sums * inner], 3)
        flat = each.transpose(0, 1).flatten(1, 2)
        return of_gates, flat.mT @ states[:-1].transpose(0, 1).flatten(1, 2), flat.sum(1)
