"""The peak memory of tensors, in elements."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakElements(TorchDispatchMode):
    """Counts the elements of all storages made inside it: those alive now, and the most that ever were."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.watch(x.untyped_storage(), x.element_size())
        return out

    def watch(self, storage, element_size):
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes() // element_size
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size):
        self.known.discard(key)
        self.live -= size
