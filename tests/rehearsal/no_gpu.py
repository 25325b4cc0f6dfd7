"""A CUDA device without a GPU: the meta device, which Python code sees as cuda:0, and a watch on what a host waits for.

Tensors of the device have no values, those of the host are real. So a step takes the code path of a GPU, the host's own
work is done, and every operator is seen with the devices of its tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prolip.data.augment.affine import constant
from prolip.losses import pairs

CUDA = torch.device("cuda", 0)
SOURCE = str(Path(__file__).parents[2] / "src")
#: What makes a tensor of numbers: on a device it is a copy that the host waits for.
OF_NUMBERS = ("tensor", "as_tensor", "asarray", "new_tensor")
#: Operators other than elementwise ones that take a number from a tensor () of the host.
TAKE_NUMBERS = ("masked_fill", "masked_fill_", "fill_", "index_put", "index_put_")
#: Operators that look at values and have no tag that says so.
LOOK = ("_linalg_check_errors", "_assert_scalar")
LOOKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class DeviceFault(AssertionError):
    """A step mixes devices, or has the host wait for the device."""


def dressed(value: Any) -> Any:
    """A device argument as torch is to see it."""
    if isinstance(value, torch.device):
        return torch.device("meta") if value.type == "cuda" else value
    return "meta" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class LooksLikeCuda(TorchFunctionMode):
    """Lets Python see the meta device as cuda:0, and refuses what makes a tensor there of numbers.

    torch makes those of the meta device without a word to any dispatch mode.
    """

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__":
            if func.__self__ is Tensor.device:
                return CUDA if func(*args).type == "meta" else func(*args)
            if func.__self__ in (Tensor.is_cuda, Tensor.is_meta):
                return func.__self__ is Tensor.is_cuda and on_device(args[0])
            return func(*args)
        if name == "to" or "device" in kwargs:
            args = tuple(map(dressed, args))
            kwargs |= {"device": dressed(kwargs["device"])} if "device" in kwargs else {}
        out = func(*args, **kwargs)
        if name in OF_NUMBERS and on_device(out) and not any(map(on_device, args[name == "new_tensor" :])):
            what = f"torch.{name} makes a tensor on the device of numbers, a copy that the host waits for"
            self.watch.fault(f"{what}: torch.full does not")
        parts = args[1] if name in ("__getitem__", "__setitem__") and on_device(args[0]) else ()
        if any(isinstance(part, list) for part in (parts if isinstance(parts, tuple) else (parts,))):
            self.watch.fault("a list as an index is copied to the device, which the host waits for: use a slice")
        return out


class Watch(TorchDispatchMode):
    """Sees every operator. While `watching`, DeviceFault for mixed devices and for what the host waits for.

    allowed: names of functions of src that may wait, as evaluation does for its results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watching, self.allowed, self.waits = False, frozenset[str](), list[str]()
        self.pinned: set[int] = set()
        self.outputs: list[Tensor] = []
        self.seen = 0

    def pin(self, x: Tensor) -> Tensor:
        """Take a host tensor for one in pinned memory, as the loader gives it on CUDA."""
        self.pinned.add(x.untyped_storage()._cdata)
        self.outputs.append(x)  # or another storage could get its place
        return x

    def fault(self, what: str) -> None:
        """DeviceFault with the place in src, where it is watched for and not allowed there."""
        if not self.watching:
            return
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(SOURCE):
                frames.append(frame)
            frame = frame.f_back
        allowed = [frame.f_code.co_name for frame in frames if frame.f_code.co_name in self.allowed]
        if allowed:
            self.waits.append(allowed[0])
            return
        where = [f"{frame.f_code.co_filename.removeprefix(SOURCE)}:{frame.f_lineno}" for frame in frames[:3]]
        raise DeviceFault(f"{what} ({' < '.join(where) or 'outside of src'})")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors):
            with self:  # of inference tensors modes get what autograd would have taken apart
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        host = [x for x in tensors if x.device.type == "cpu"]
        own = [x for x in tensors if x.device.type == "meta"]
        self.seen += bool(own)
        if name == "is_pinned":
            return self.is_pinned(host[0]) if host else False
        if name == "_pin_memory":
            return self.pin(host[0].clone())
        if name == "_local_scalar_dense" and own and not self.watching:
            return 0
        place = kwargs.get("device")
        if name == "_to_copy" and place is not None or name == "copy_":
            target = args[0].device if name == "copy_" else torch.device(place)
            source = args[1] if name == "copy_" else args[0]
            return self.copy(func, args, kwargs, source, target)
        self.check(func, name, own, host, args)
        return func(*args, **kwargs)

    def is_pinned(self, x: Tensor) -> bool:
        """Return whether a tensor lies in pinned memory."""
        return x.untyped_storage()._cdata in self.pinned

    def copy(self, func: Any, args: tuple, kwargs: dict, source: Tensor, target: torch.device) -> Tensor:
        """A copy: from the host without waiting only out of pinned memory, to the host never."""
        if source.device.type == "cpu" and target.type == "meta":
            inside = func.overloadpacket.__name__ == "copy_" and len(args) > 2
            free = kwargs.get("non_blocking", args[2] if inside else False)
            if not (free and self.is_pinned(source)):
                how = "not pinned" if free else "waited for"
                what = f"{tuple(source.shape)} {source.dtype} is copied to the device from memory that is {how}"
                self.fault(f"{what}: pin_memory().to(device, non_blocking=True)")
        if source.device.type == "meta" and target.type == "cpu":
            self.fault(f"{tuple(source.shape)} {source.dtype} is copied to the host, which waits for it")
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        return func(*args, **kwargs)

    def check(self, func: Any, name: str, own: list[Tensor], host: list[Tensor], args: tuple) -> None:
        """Check for inputs that CUDA would refuse or wait for in any other operator."""
        if not own:
            return
        elementwise = torch.Tag.pointwise in func.tags or name in TAKE_NUMBERS
        strangers = [x for x in host if x.ndim or not elementwise]
        if strangers:
            self.fault(f"{func} mixes a tensor {tuple(strangers[0].shape)} of the host with the device's")
        given = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        indices = [x for x in given if isinstance(x, Tensor)]
        masks = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
        if name.startswith("index_put"):
            looks = masks and (len(indices) > 1 or args[2].device.type != "cpu" or args[2].numel() != 1)
        elif name == "index":  # which has the tag for masks alone
            looks = masks
        else:
            looks = name in LOOK or not LOOKING.isdisjoint(func.tags)
        if looks:
            self.fault(f"{func} waits for the device: it looks at values")


def on_device(x: Any) -> bool:
    """Return whether it is a tensor of the device."""
    return isinstance(x, Tensor) and x.device.type in ("meta", "cuda")


class HostGenerator(torch.Generator):
    """Replacement of a device's generator: timm's average keeps one, and uses it only in lower precision."""

    def __new__(cls, device: Any = "cpu") -> HostGenerator:
        return super().__new__(cls, "cpu")


class KernelStandIn:
    """Replacement of the Triton kernel, which has no meta tensors: it counts its starts and writes nothing."""

    def __init__(self) -> None:
        self.starts = 0

    def __getitem__(self, tiles: tuple[int, ...]) -> KernelStandIn:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        assert all(on_device(x) for x in arguments if isinstance(x, Tensor))
        self.starts += 1


@contextmanager
def without_gpu(kernel: KernelStandIn | None = None) -> Iterator[Watch]:
    """While entered there is a device cuda:0 without values. Set `watching` for what must not wait."""
    watch = Watch()
    kept = [patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)]
    kept.append(patch.object(torch, "Generator", HostGenerator))
    if kernel is None:
        kept.append(patch.object(pairs, "FUSED_DEVICES", frozenset()))
    else:
        from prolip.losses import fused

        kept.append(patch.object(fused, "_pairs_kernel", kernel))
        kept.append(patch.object(torch.cuda, "device_of", lambda x: nullcontext()))
    constant.cache_clear()
    try:
        for one in kept:
            one.start()
        with watch, LooksLikeCuda(watch):
            yield watch
    finally:
        for one in kept:
            one.stop()
        constant.cache_clear()  # a real device would get what has no values


@contextmanager
def watched(watch: Watch, *allowed: str) -> Iterator[Watch]:
    """While entered nothing may wait but inside these functions of src."""
    watch.watching, watch.allowed, watch.waits, watch.seen = True, frozenset(allowed), [], 0
    try:
        yield watch
    finally:
        watch.watching = False
