"""Diagonal Gaussians, the embeddings of all images and texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

COMPUTE = (
    "compute with its tensors z.mean and z.log_var (log sigma^2), join rows with"
    " prolip.gaussian.concatenate([z, w]), average them with prolip.gaussian.mixture(z)"
)
COMPARE = "compare tensors, torch.equal(z.mean, w.mean), or Gaussians, prolip.measures.csd_distance(z, w)"
ROWS = "a Gaussian has only the indices 0 (mean) and 1 (log_var): take rows with z.select(rows)"
#: Common first code of OpenCLIP users: features / features.norm(...), and features @ features.T.
ATTRIBUTES = {
    "norm": "means already have unit length, so remove `z / z.norm()`",
    "T": "compare images with texts by prolip.measures.pairwise_csd_similarity(image, text)",
}


def refuse_tuple_operators(cls: type[Gaussian]) -> type[Gaussian]:
    """Decorate the class: `z * 2`, `z + w`, `z == w` and `z[:2]` would act on the tuple, so each raises an error."""

    def refuse(what: str, remedy: str, *of: type) -> Callable[..., Any]:
        def method(self: Any, *others: Any, **_: Any) -> Any:
            if of and not isinstance(others[0], of):
                return NotImplemented
            raise TypeError(f"a Gaussian has no {what}: {remedy}")

        return method

    def item(self: Any, index: Any) -> Any:
        if type(index) is not int:
            raise TypeError(ROWS)
        if not -2 <= index < 2:
            raise IndexError(f"z[{index}]: {ROWS}")
        return self.log_var if index % 2 else self.mean  # torch.compile traces this in every version, unlike tuple's

    def missing(self: Any, name: str) -> NoReturn:
        remedy = ATTRIBUTES.get(name, f"{COMPUTE}, move it with z.to(...)")
        of_tensors = not name.startswith("_") and hasattr(Tensor, name)
        raise AttributeError(f"a Gaussian has no {name!r}" + (f": {remedy}" if of_tensors else ""))

    methods: dict[str, Any] = {"getitem": item, "getattr": missing, "contains": refuse("operator in", COMPARE)}
    for sign, names in {"+": "add radd", "*": "mul rmul"}.items():
        methods |= {name: refuse(f"operator {sign}", COMPUTE) for name in names.split()}
    for sign, name in {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}.items():
        methods[name] = refuse(f"operator {sign}", COMPARE, tuple, Tensor)
    # Otherwise NumPy would stack both tensors, in np.asarray(z) and in array * z.
    methods |= {"array": refuse("one array", "take z.mean.numpy() and z.log_var.numpy()"), "array_ufunc": None}
    for name, method in methods.items():
        setattr(cls, f"__{name}__", method)
    return cls


@refuse_tuple_operators
class Gaussian(NamedTuple):
    """Diagonal Gaussians N(mean, diag exp(log_var)), ProLIP section 3.1.

    mean, log_var: (..., D), log_var is log sigma^2 (never log sigma). Unpacks as a tuple of its two tensors.
    """

    mean: Tensor
    log_var: Tensor

    @property
    def var(self) -> Tensor:
        """sigma^2 = exp(log_var), (..., D)."""
        return self.log_var.exp()

    @property
    def trace(self) -> Tensor:
        """The uncertainty of an input, sum_d sigma^2_d (ProLIP 4.3), (...); in float32 for half-precision inputs."""
        return upcast(self.log_var).exp().sum(-1)

    def to(self, *args, **kwargs) -> Gaussian:
        """Return both tensors through `Tensor.to`."""
        return Gaussian(self.mean.to(*args, **kwargs), self.log_var.to(*args, **kwargs))

    def float(self) -> Gaussian:
        """Return both tensors in float32, or float64 if they are float64: the dtype of losses and measures."""
        return Gaussian(upcast(self.mean), upcast(self.log_var))

    def detach(self) -> Gaussian:
        """Return both tensors without a graph."""
        return Gaussian(self.mean.detach(), self.log_var.detach())

    def select(self, rows) -> Gaussian:
        """Index the leading dimensions of both tensors (z[0] and z[1] are already these tensors)."""
        return Gaussian(self.mean[rows], self.log_var[rows])

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw `count` points of each Gaussian by reparameterisation, mean + sigma * noise: (count, ..., D)."""
        mean, shape = self.mean, (count, *self.mean.shape)
        noise = torch.randn(shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return (mean + (0.5 * self.log_var).exp() * noise).to(mean.dtype)


def upcast(x: Tensor) -> Tensor:
    """Return float64 unchanged, everything else as float32."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a region in which matrix products keep their dtype and full precision: no autocast, no TF32."""
    context: AbstractContextManager = nullcontext()
    if device.type != "meta" and torch.is_autocast_enabled(device.type):  # meta has none
        context = torch.autocast(device.type, enabled=False)
    return context if torch.compiler.is_compiling() else full_precision(context)


@contextmanager
def full_precision(context: AbstractContextManager) -> Iterator[None]:
    """Run `context` with torch's float32 matmul precision "highest", and restore it afterwards."""
    try:
        before, highest, change = torch.get_float32_matmul_precision(), "highest", torch.set_float32_matmul_precision
    except RuntimeError:  # after a setting by `fp32_precision`, since torch 2.9, the older interface raises
        backend: Any = torch.backends.cuda.matmul
        before, highest, change = backend.fp32_precision, "ieee", partial(setattr, backend, "fp32_precision")
    if before != highest:
        change(highest)
    try:
        with context:
            yield
    finally:
        if before != highest:
            change(before)


def check_gaussian(z: Any, name: str = "z") -> None:
    """Raise TypeError unless `z` is a Gaussian of two float tensors, ValueError unless (..., D) on one device."""
    if not isinstance(z, Gaussian):
        remedy = "Gaussian(mean, log_var), or prolip.gaussian.as_points(features) for points without variances"
        raise TypeError(f"{name} is {kind_of(z)}, expected a Gaussian: give the output of encode_image, {remedy}")
    for part, x in zip(z._fields, z):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name}.{part} is {kind_of(x)}, expected a float tensor: torch.as_tensor({part}).float()")
    mean, log_var = z
    if mean.shape != log_var.shape or not mean.ndim:
        shapes = f"mean {tuple(mean.shape)} and log_var {tuple(log_var.shape)} differ, or have no dimension"
        raise ValueError(f"{name}: {shapes}: give (..., D) for both; expand log_var")
    if mean.device != log_var.device:
        devices = f"mean is on {mean.device} and log_var on {log_var.device}"
        raise ValueError(f"{name}: {devices}: move both with {name}.to(device)")


def check_embeddings(z: Any, name: str = "z", width: int | None = None) -> None:
    """Apply `check_gaussian`; raise ValueError unless `z` is (N, D) with finite numbers, except -inf of points."""
    check_gaussian(z, name)
    if z.mean.ndim != 2 or width not in (None, z.mean.shape[1]):
        got = f"{name} has the shape {tuple(z.mean.shape)}, expected (N, {width or 'D'})"
        raise ValueError(f"{got}: give one row per input, embedded by this model")
    bad = ~(z.mean.isfinite() & (z.log_var < torch.inf)).all(1)
    if bool(bad.any()):
        where = f"in {int(bad.sum())} of {len(bad)} rows, first in row {int(bad.nonzero()[0])}"
        remedy = "remove these inputs, or check if the model diverged"
        raise ValueError(f"{name} has NaN or infinite numbers {where}: {remedy}")


def check_pair(p: Any, q: Any, names: tuple[str, str] = ("p", "q")) -> tuple[Gaussian, Gaussian]:
    """Return both in one dtype, float32 or float64. TypeError and ValueError unless width D and device are equal."""
    for z, name in zip((p, q), names):
        check_gaussian(z, name)
    if p.mean.shape[-1] != q.mean.shape[-1]:
        shapes = f"Gaussians of shape {tuple(p.mean.shape)} and {tuple(q.mean.shape)} differ in their last dimension D"
        raise ValueError(f"{shapes}: compare embeddings of one model as {' and '.join(names)}")
    if p.mean.device != q.mean.device:
        devices = f"{names[0]} is on {p.mean.device} and {names[1]} on {q.mean.device}"
        raise ValueError(f"{devices}: move one, {names[1]}.to({str(p.mean.device)!r})")
    dtype = reduce(torch.promote_types, (x.dtype for x in (*p, *q)), torch.float32)
    return p.to(dtype), q.to(dtype)


def kind_of(value: Any) -> str:
    """Describe a value for an error: its type, with shape and dtype of an array, or the types in a sequence."""
    kind = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {kind} {tuple(value.shape)} {value.dtype}"
    if isinstance(value, (list, tuple)):
        return f"a {kind} of {', '.join(sorted({type(x).__name__ for x in value})) or 'nothing'}"
    return f"a {kind}"


def as_scalar(value: Any, like: Tensor, name: str) -> Tensor:
    """Return a number, or a tensor of one element, as () with the dtype and device of `like`, keeping the graph."""
    remedy = "give a number or a tensor of one element"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}: {remedy}")
        return value.to(like).reshape(())
    try:
        return like.new_full((), value)
    except TypeError:
        raise TypeError(f"{name} must be one number, got {kind_of(value)}: {remedy}") from None


def concatenate(gaussians: Iterable[Gaussian]) -> Gaussian:
    """Join along the first dimension. ValueError for no Gaussians."""
    if isinstance(gaussians, (Gaussian, Tensor)) or not isinstance(gaussians, Iterable):
        raise TypeError(f"gaussians are {kind_of(gaussians)}, expected a list of Gaussians: concatenate([z, w])")
    parts = list(gaussians)
    if not parts:
        raise ValueError("no Gaussians to concatenate: give at least one (its tensors may have no rows)")
    for i, z in enumerate(parts):
        check_gaussian(z, f"gaussians[{i}]")
    kinds = [f"{tuple(z.mean.shape[1:])} on {z.mean.device}" for z in parts]
    if len(set(kinds)) > 1:
        raise ValueError(f"rows have shapes {', '.join(kinds)}: join embeddings of one model on one device")
    return Gaussian(torch.cat([z.mean for z in parts]), torch.cat([z.log_var for z in parts]))


def as_points(features: Tensor | Gaussian) -> Gaussian:
    """Return features (B, D), or the means of Gaussians, as points: unit means in float32, log_var = -inf."""
    mean = F.normalize((features.mean if isinstance(features, Gaussian) else features).float(), dim=-1)
    return Gaussian(mean, torch.full_like(mean, -torch.inf))


def mixture(z: Gaussian, weights: Tensor | None = None, normalise: bool = True) -> Gaussian:
    """Return a class as a mixture of its prompts, N(sum w mean, sum w sigma^2), ProLIP 4.2 (variance not divided by N).

    z: (..., N, D); weights: (..., N) >= 0 that sum to one, default uniform; normalise: scale the mean to unit length,
    as in the released evaluation. A weight of 0 drops its prompt and has a finite gradient; weights that are all 0 give
    no class: log_var is -inf.
    """
    check_gaussian(z)
    z = z.float()
    if z.mean.dim() < 2 or z.mean.shape[-2] == 0:
        raise ValueError(f"a mixture needs prompts (..., N, D) with N >= 1, got {tuple(z.mean.shape)}")
    if weights is None:
        weights = z.mean.new_full(z.mean.shape[:-1], 1 / z.mean.shape[-2])
    elif not isinstance(weights, Tensor) or weights.shape != z.mean.shape[:-1]:
        got = f"weights, {kind_of(weights)}, do not match prompts {tuple(z.mean.shape[:-1])}"
        raise ValueError(f"{got}: give a tensor (..., N)")
    weights = weights.to(z.mean)
    total = weights.sum(-1)
    if not bool(((weights > -1e-4).all(-1) & (((total - 1).abs() < 1e-3) | (total == 0))).all()):
        raise ValueError("weights are negative or do not sum to one: divide them by weights.sum(-1, keepdim=True)")
    weights = weights.unsqueeze(-1)
    mean = (weights * z.mean).sum(-2)
    # No log of a weight: its gradient at 0 is infinite. The shift is a constant that cancels in value and gradient.
    shift = z.log_var.detach().amax(-2, keepdim=True)
    shift = shift.masked_fill(shift.isneginf(), 0.0)  # points, of variance 0, mix to a point
    log_var = (weights * (z.log_var - shift).exp()).sum(-2).log() + shift.squeeze(-2)
    return Gaussian(F.normalize(mean, dim=-1) if normalise else mean, log_var)
