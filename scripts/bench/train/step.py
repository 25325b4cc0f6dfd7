"""Time of a whole ProLIP training step against a SigLIP step of OpenCLIP on the same towers.

    python scripts/bench/train/step.py    # ProLIP-ViT-S-16, batch 32, on this machine's CPU
    python scripts/bench/train/step.py --model ProLIP-ViT-B-16 --batch-size 512 --device cuda --compile --profile 45
    python scripts/bench/train/step.py --model ViT-B-16 --batch-size 8 --rounds 25 --only "no views"

A step is the forward pass, the loss, the backward pass and fused AdamW, on a batch that is on the device. The steps
take turns within one process (A B C D A B C D...), so that other load affects all of them alike. Times are medians,
and ratios are medians of the ratios within a turn.

siglip           OpenCLIP's own model of the same configuration without uncertainty, with OpenCLIP's SigLipLoss
prolip           ours: PPCL, inclusion, VIB, masked views (patches dropped before they are embedded, texts in one pass)
no views         ours without masked views (alpha2 = 0)
our siglip       SigLIP's loss on our towers, with [UNC] in the sequence
likelihood       the method that the demo trains, whose variances are fitted when training ends
released views   ours with masked views in the shape of the released code: a second full forward pass of the first
                 12.5% of the batch that keeps 75% of the patches, a text pass of its own, texts masked row by row
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch
from open_clip.loss import SigLipLoss
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import prolip
from bench.common import spread
from prolip.flops import image_sides
from prolip.methods.base import Batch, Objective
from prolip.methods.deterministic import PointsConfig, SigLIPObjective
from prolip.methods.likelihood import LikelihoodConfig, LikelihoodObjective
from prolip.methods.prolip import ProLIPConfig, ProLIPObjective
from prolip.models.prolip import ProLIP
from prolip.models.readers import openclip_model
from prolip.models.registry import get_model_config
from prolip.views import count_masked_rows
from training.model import attention_for
from training.parallel import keep_freed_memory

Step = Callable[[], None]


class SigLIP(nn.Module):
    """OpenCLIP's model and loss for one of our configurations."""

    def __init__(self, name: str):
        super().__init__()
        config, _ = get_model_config(name)
        self.model = openclip_model(config | {"init_logit_scale": math.log(10), "init_logit_bias": -10.0})
        self.loss = SigLipLoss()

    def forward(self, batch: Batch) -> Tensor:
        image, text, scale, bias = self.model(batch["image"], batch["text"])
        return self.loss(image, text, scale, bias)


class ReleasedViews(ProLIPObjective):
    """Masked views with the cost of the released code, not its exact semantics."""

    def prepare(self, batch: Batch, step: int) -> Batch:
        """Choose a random 75% of the patches for all rows, and mask the texts row by row."""
        rows = count_masked_rows(len(batch["image"]), self.config.mask_fraction)
        patches, text = self.model.num_patches, batch["text"][:rows].clone()
        keep = torch.randperm(patches, device=text.device)[: patches * 3 // 4].sort().values
        for row in range(rows):
            places = torch.nonzero(text[row] != self.model.pad_token_id).flatten()
            chosen = places[torch.rand(len(places), device=text.device) < self.config.mask_ratio]
            text[row, chosen] = self.model.mask_token_id
        return batch | {"masked_image": batch["image"][:rows], "keep": keep.expand(rows, -1), "masked_text": text}

    def embed(self, batch: Batch) -> dict[str, Tensor]:
        """Run the four passes."""
        reps = {"scale": self.model.logit_scale.exp(), "bias": self.model.logit_bias}
        views = {
            "image": self.model.encode_image(batch["image"]),
            "text": self.model.encode_text(batch["text"]),
            "masked_image": self.model.encode_image(batch["masked_image"], keep=batch["keep"]),
            "masked_text": self.model.encode_text(batch["masked_text"]),
        }
        for name, z in views.items():
            reps |= {f"{name}_mean": z.mean, f"{name}_log_var": z.log_var}
        return reps


#: Our steps -> objective and config.
OURS: dict[str, tuple[type[Objective], Any]] = {
    "our siglip": (SigLIPObjective, PointsConfig()),
    "likelihood": (LikelihoodObjective, LikelihoodConfig()),
    "prolip": (ProLIPObjective, ProLIPConfig()),
    "no views": (ProLIPObjective, ProLIPConfig(alpha2=0.0)),
    "released views": (ReleasedViews, ProLIPConfig()),
}


def build_steps(options: argparse.Namespace) -> dict[str, Step]:
    """Return name -> one training step, each with a model and an optimiser of its own."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    batch = make_batch(options, device)

    def ours(kind: type[Objective], config: Any) -> tuple[nn.Module, Callable[[int], Tensor]]:
        objective = kind(prolip.create_model(options.model, device=device), config).to(device)
        if options.compile:
            objective.model.visual.compile(dynamic=False)
            objective.model.text.compile(dynamic=False)
        return objective, lambda step: objective(objective.prepare(batch, step))["loss"]

    siglip = SigLIP(options.model).to(device)
    if options.compile:
        siglip.model.visual.compile(dynamic=False)
        siglip.model.text.compile(dynamic=False)
    made: dict[str, tuple[nn.Module, Callable[[int], Tensor]]] = {"siglip": (siglip, lambda step: siglip(batch))}
    made |= {name: ours(*OURS[name]) for name in options.only}
    return {name: make_step(module, loss, options, device) for name, (module, loss) in made.items()}


def make_batch(options: argparse.Namespace, device: torch.device) -> Batch:
    """Return random images, and texts of random lengths, as the loader gives them."""
    config, _ = get_model_config(options.model)
    with torch.device("meta"):
        model = ProLIP(config)
    (height, width), length = image_sides(model), model.context_length
    text = torch.randint(1, 1000, (options.batch_size, length))
    text[torch.arange(length) >= torch.randint(4, length, (options.batch_size, 1))] = 0
    return {
        "image": torch.randn(options.batch_size, 3, height, width).to(device),
        "text": text.to(device),
        "key": [str(row) for row in range(options.batch_size)],
    }


def make_step(
    module: nn.Module, loss: Callable[[int], Tensor], options: argparse.Namespace, device: torch.device
) -> Step:
    """Return a step: forward, backward and AdamW of one model."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.2, fused=True)
    dtype = {"bf16": torch.bfloat16, "fp32": None}[options.precision]
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        with torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext():
            value = loss(count)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step: Step, device: torch.device, clock: Callable[[], float]) -> float:
    """Return the seconds of one step, until the device has finished."""
    start = clock()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def measure(
    steps: dict[str, Step], rounds: int, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of every step in every turn, after two uncounted turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            taken = seconds(step, device, clock)
            if turn >= 2:
                times[name].append(taken)
    return times


def profiled(steps: dict[str, Step], most: int, device: torch.device) -> None:
    """Print the slowest operations in two steps of each kind."""
    cuda = device.type == "cuda"
    for name, step in steps.items():
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
            for _ in range(2):
                seconds(step, device, time.perf_counter)
        by = "self_device_time_total" if cuda else "self_cpu_time_total"
        print(f"\n{name}, two steps\n{found.key_averages().table(sort_by=by, row_limit=most)}")


def report(times: dict[str, list[float]], batch_size: int) -> None:
    """Print the table, then a line on masked views if they were measured."""
    print("| step | ms | samples/s | step / siglip |\n|---|---:|---:|---:|")
    for name, values in times.items():
        middle = statistics.median(values)
        ratios = [a / b for a, b in zip(values, times["siglip"])]
        print(f"| {name} | {middle * 1e3:.1f} | {batch_size / middle:.1f} | {spread(ratios)} |")
    if not {"prolip", "no views", "released views"} <= times.keys():
        return
    plain = times["no views"]
    ours, released = (
        statistics.median(a - b for a, b in zip(times[name], plain)) for name in ("prolip", "released views")
    )
    print(f"\nmasked views: {ours * 1e3:.1f} ms, in the released shape {released * 1e3:.1f} ms: {ours / released:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ProLIP-ViT-S-16")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=list(OURS), default=list(OURS), metavar="STEP", help="our steps")
    parser.add_argument("--rounds", type=int, default=15, help="number of counted turns (default: %(default)s)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="also print the N slowest operations")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cpu":
        keep_freed_memory()  # as training.main does; here for all steps
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(f"{options.model}, batch {options.batch_size}, {options.precision}, {where}, torch {torch.__version__}\n")
    with attention_for(f"amp_{options.precision}", device):  # the choice of training.main; the same for all
        steps = build_steps(options)
        report(measure(steps, options.rounds, device), options.batch_size)
        if options.profile:
            profiled(steps, options.profile, device)


if __name__ == "__main__":
    main()
