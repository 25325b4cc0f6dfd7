"""Rows that ranks exchange in blocks over the default process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from prolip.data.captions import stable_hash
from prolip.losses.autograd import gather, rank_in, world_size

BLOCK = 2**15  # rows exchanged at once


def shares(own: Tensor) -> list[int]:
    """Return the number of rows of each rank."""
    return gather(torch.tensor([len(own)], device=own.device), None).tolist()


def blocks(*own: Tensor) -> Iterator[list[Tensor]]:
    """Yield every rank's rows of each of these (n, ...), rank by rank, at most BLOCK at a time, on every rank."""
    for source, count in enumerate(shares(own[0])):
        for start in range(0, count, BLOCK):
            end = min(count, start + BLOCK)
            mine = source == rank_in()
            block = [x[start:end].contiguous() if mine else x.new_empty((end - start, *x.shape[1:])) for x in own]
            for x in block if world_size() > 1 else ():
                dist.broadcast(x, source)
            yield block


def everywhere(place: Tensor, *own: Tensor) -> list[Tensor]:
    """Return all rows of all ranks sorted by place, on every CPU: places (N,), and each of `own`; twice their bytes."""
    found = [torch.cat(x) for x in zip(*([x.cpu() for x in block] for block in blocks(place, *own)))]
    if not found:
        return [x[:0].cpu() for x in (place, *own)]
    order = found[0].argsort(stable=True)
    return [x[order] for x in found]


def numbered(names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places (n,) of this rank's names among all ranks' distinct names, and which are on no earlier rank.

    Places follow the order of 63-bit checksums: no names are exchanged, and every rank holds 16 bytes of each.
    """
    own = torch.tensor([stable_hash(name, bits=63) for name in names], dtype=torch.int64, device=device)
    checksum, rank = everywhere(own, torch.full_like(own, rank_in()))
    values, inverse = checksum.unique(return_inverse=True)
    first = torch.full_like(values, world_size()).scatter_reduce(0, inverse, rank, "amin")
    place = torch.searchsorted(values, own.cpu())
    return place, first[place] == rank_in()
