"""Time of BPRW: likelihoods and EM of all classes, against a loop over classes with torch.distributions.

python scripts/bench/use/prompts.py                     # ImageNet's size: 1,000 classes, 80 prompts, 100 points
python scripts/bench/use/prompts.py --classes 50 --loop
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Independent, Normal

from prolip.gaussian import Gaussian
from prolip.prompts.bprw import TOLERANCE, fit_weights, inverse_traces


def world(classes: int, prompts: int, points: int, dim: int, seed: int = 0) -> tuple[Gaussian, Tensor]:
    """Draw prompts around a direction per class, (C, N, D), and points around some of them, (C, P, D)."""
    g = torch.Generator().manual_seed(seed)
    centre = F.normalize(torch.randn(classes, 1, dim, generator=g), dim=-1)
    mean = F.normalize(centre + 0.5 * torch.randn(classes, prompts, dim, generator=g) / dim**0.5, dim=-1)
    log_var = 0.2 * torch.randn(classes, prompts, 1, generator=g) - 7
    near = mean[:, torch.randint(prompts, (points,), generator=g) // 4]
    return Gaussian(mean, log_var.expand_as(mean).contiguous()), near + 0.05 * torch.randn(near.shape, generator=g)


def loop(z: Gaussian, points: Tensor, alpha: float, eps: float) -> Tensor:
    """Compute the same weights class by class, with a density for every pair: (C, N)."""
    out = []
    for c in range(len(points)):
        own = z.select(c).to(torch.float64)
        density = Independent(Normal(own.mean, (own.var + eps).sqrt()), 1)
        likelihood = density.log_prob(points[c].double().unsqueeze(1))
        weights, change = inverse_traces(z.select(slice(c, c + 1)))[0], 1.0
        while change > TOLERANCE:
            gamma = (likelihood + weights.log()).softmax(1)
            found = gamma.sum(0) + alpha - 1
            found = found / found.sum()
            change, weights = float((found - weights).abs().max()), found
        out.append(weights)
    return torch.stack(out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, value in (("--classes", 1000), ("--prompts", 80), ("--points", 100), ("--dim", 512)):
        parser.add_argument(flag, type=int, default=value)
    parser.add_argument("--alpha", type=float, nargs="+", default=[5.0, 2.0])
    parser.add_argument("--eps", type=float, default=0.02)
    parser.add_argument("--loop", action="store_true", help="also time the loop with torch.distributions")
    args = parser.parse_args(arguments)
    z, points = world(args.classes, args.prompts, args.points, args.dim)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; {args.classes} classes, "
        f"{args.prompts} prompts, {args.points} points, D={args.dim}, eps {args.eps:g}"
    )
    for alpha in args.alpha:
        start, used = time.perf_counter(), time.process_time()
        fit = fit_weights(z, points, alpha, args.eps)
        print(
            f"alpha {alpha:g}: {time.perf_counter() - start:.2f} s, processor {time.process_time() - used:.2f} s, "
            f"{fit.steps.float().mean():.0f} steps of a class, {fit.steps.max()} at most"
        )
        if args.loop:
            start, used = time.perf_counter(), time.process_time()
            far = (loop(z, points, alpha, args.eps) - fit.weights).abs().max()
            print(
                f"  the loop: {time.perf_counter() - start:.2f} s, processor {time.process_time() - used:.2f} s; "
                f"weights differ by {far:.1e}"
            )


if __name__ == "__main__":
    main()
