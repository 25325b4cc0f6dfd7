"""How much room an index takes, before it is built."""
from __future__ import annotations

from prolip.search.indexes import FLAT, KINDS, Kind, lists_for, memory_per_item, padded, sample_size
from prolip.search.store import BLOCK

#: Bytes of a row's key, path and captions, about, and of its hash, its row and where its line ends.
ITEM, BESIDE = 120, 24


def building_bytes(kind: Kind, dim: int, items: int) -> float:
    """Bytes of memory that building an index takes at most, beside the process and its model: the sample that it learns
    from, in three copies (vectors, with zeros, normal to its centres), its centres and rows, and a chunk."""
    width = dim + 1
    sample = 0 if kind.name == FLAT else 3 * 4 * padded(width) * sample_size(kind, items)
    return sample + memory_per_item(kind, width) * items + 6 * 4 * width * BLOCK


def table(items: int, dim: int, probabilistic: bool = True) -> str:
    """A row for every kind; on disk there are vectors by csd, variances, what is known of an item, and the index."""
    rows = ["| kind | memory per item, bytes | memory, GB | disk, GB | most memory while building, GB | lists |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    for name in KINDS:
        kind = Kind(name)
        memory = memory_per_item(kind, dim + 1)
        disk = (4 * (dim + 1) + 4 * dim * probabilistic + ITEM + BESIDE + memory) * items
        lists = lists_for(items) if name in ("ivf", "pq") else "-"
        held = f"{memory:.0f} | {memory * items / 1e9:.2f}" if name != FLAT else "0 (mapped) | 0"
        rows.append(f"| {name} | {held} | {disk / 1e9:.1f} | {building_bytes(kind, dim, items) / 1e9:.1f} | {lists} |")
    return "\n".join(rows)
