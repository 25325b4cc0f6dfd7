"""A gallery on disk that only grows, and is consistent if its writer is killed. Files: docs/reference/search_index.md.

A writer appends after the valid bytes, syncs, and replaces the manifest; the next one cuts off the rest of a killed
one. Runs and approximate indexes never change but are replaced, and a reader keeps those that its manifest names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from prolip.gaussian import Gaussian
from prolip.scores import Score, Side, least_constant
from prolip.search.exact import BLOCK, GaussianArrays, make_arrays
from prolip.utils.console import plain
from prolip.utils.documents import loads
from prolip.utils.outputs import holder_of, lock, replacing

FORMAT, NAME, LOCK = "prolip-search-2", "index.json", "lock"
VECTOR, MEAN, LOG_VAR, ITEMS = "vector.f32", "mean.f32", "log_var.f32", "items.jsonl"
ENDS, DELETED, SHARDS, RUN, NEAR = "ends.i64", "deleted.i64", "shards.jsonl", "keys-", "near-"
GROWING = (VECTOR, MEAN, LOG_VAR, ITEMS, ENDS, DELETED, SHARDS)
UNWANTED = 3  # fate of a row that stays deleted when its source is read again
NUMBERED = re.compile(rf"{RUN}\d{{6,}}\.run|{NEAR}\d{{6,}}\.faiss")
#: The remedy for damaged files, and for a damaged approximate index.
REMEDY = "restore a copy of the index, or build it again in another folder"
AGAIN = "rebuild it with: prolip search finish {} --rebuild"
READ = 2**24  # bytes to sum at once
#: An entry of a run. Keys may share a hash, so a search compares the keys.
ENTRY = np.dtype([("hash", "<u8"), ("row", "<i8")])
MERGED = 2**16  # entries of each run in memory during a merge
Item = dict[str, Any]
Sources = Sequence[Mapping[str, Any]]
Files = dict[str, list[int]]  # file -> [valid bytes, their checksum]


class Part(NamedTuple):
    """Some items of a source with their Gaussians."""

    items: list[Item]
    z: Gaussian
    position: int  # position in the source, in its own count


class Store:
    """Gaussians and items in a folder; the number of a row never changes. near: the open approximate index or None."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._lock: IO[str] | None = None
        self._open()

    @classmethod
    def create(cls, folder: str | os.PathLike, values: Mapping[str, Any]) -> Store:
        """Create an empty store; values: JSON values of the caller. FileExistsError if there is one."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if (folder / NAME).exists():
                raise FileExistsError(f"{folder} already has an index. Extend it, or give another folder")
            if others := [name for name in GROWING if (folder / name).exists()]:
                raise FileExistsError(f"{folder / others[0]} does not belong to an index. Give another folder")
            _write_manifest(folder, {"format": FORMAT, **values, "rows": 0, "bounds": None, "made": 0, "files": {}})
        return cls(folder)

    def __len__(self) -> int:
        """Return the number of rows, including deleted ones."""
        return self.values["rows"]

    def _open(self, own: bool = False) -> None:
        """Map the files of the manifest, again if it was replaced. own: this process wrote it."""
        before, path = None, self.folder / NAME
        while True:
            if not path.is_file():
                build = f"prolip search build {self.folder} --data ..."
                raise FileNotFoundError(f"no index in {self.folder}. Build one with {build}")
            text = path.read_bytes()
            self.values: dict[str, Any] = _read_manifest(self.folder, text)
            files, self._files = self.values["files"], dict[str, IO[bytes]]()
            for name, (size, _) in files.items():
                with suppress(FileNotFoundError):
                    file = (self.folder / name).open("rb")
                    if os.fstat(file.fileno()).st_size >= size:
                        self._files[name] = file
            if len(self._files) == len(files) or text == before:
                break
            before = text
        if lost := [name for name in files if name not in self._files and not name.startswith(NEAR)]:
            raise ValueError(f"{self.folder / lost[0]} is missing or cut: {REMEDY}")
        self.near = next((file for name, file in self._files.items() if name.startswith(NEAR)), None)
        self._maps = {
            name: np.memmap(file, np.uint8, "r", shape=(self.values["files"][name][0],)).view(np.ndarray)
            for name, file in self._files.items()
            if file is not self.near
        }
        self._made: dict[str, Any] = {}
        for name in ("deleted", "gallery"):
            self.__dict__.pop(name, None)
        if not own:
            self._fates, self._noted, self._any_unwanted = np.zeros(0, dtype=np.uint8), 0, False

    def verify(self) -> None:
        """Read all bytes. ValueError names a file whose checksum differs from the manifest."""
        for name, (size, checksum) in self.values["files"].items():
            if name not in self._files or _checksum(self._files[name], size) != checksum:
                remedy = AGAIN.format(self.folder) if name.startswith(NEAR) else REMEDY
                raise ValueError(f"{self.folder / name} is damaged: {remedy}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the writers' lock, from the last commit on. BlockingIOError if another process holds it."""
        if self._lock is not None:
            yield
            return
        with locked(self.folder) as self._lock:
            try:
                self._open()
                yield
            finally:
                self._lock = None

    def write(self, **values: Any) -> None:
        """Commit several values together, and delete outdated numbered files."""
        with self.writing():
            _write_manifest(self.folder, self.values | values)
            self._open(own=True)
            for path in self.folder.iterdir():
                if path.name not in self.values["files"] and NUMBERED.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def append(
        self, z: Gaussian, items: Sequence[Item], score: Score, side: Side, sources: Sources, replace: bool = False
    ) -> None:
        """Add rows and the positions in their sources. replace: rows with the same keys, else ValueError."""
        with self.writing():
            keys, start = [item["key"] for item in items], len(self)
            former, last = self.find(keys), {key: place for place, key in enumerate(keys)}
            taken = (former >= 0) & (not replace)
            if twice := [key for place, key in enumerate(keys) if last[key] != place or taken[place]]:
                what = f"{len(twice)} keys are already in {self.folder} or occur twice"
                raise ValueError(f"{what} ({', '.join(map(plain, twice[:3]))}). Delete them first")
            new, lines, files = make_arrays(score, z, side), list(map(_line, items)), dict(self.values["files"])
            self._grow(files, VECTOR, new.vector)
            differ = not np.array_equal(new.vector[:, : new.mean.shape[1]], new.mean)
            for place, (name, is_needed) in enumerate(((MEAN, differ), (LOG_VAR, new.log_var is not None))):
                if name not in files and is_needed:  # begins with the implied values of earlier rows
                    for rows in self.gallery.blocks(deleted=True):
                        self._grow(files, name, self.gallery.gaussian(rows)[place].numpy())
                if name in files or is_needed:
                    self._grow(files, name, new.gaussian(np.arange(len(new.mean)))[place].numpy())
            self._grow(files, ENDS, np.cumsum([len(line) for line in lines]) + files.get(ITEMS, (0,))[0])
            self._grow(files, ITEMS, b"".join(lines))
            self._grow(files, DELETED, former[former >= 0])
            run, runs = run_of(keys, start), self._runs()
            count = absorbed([len(x) for x in runs.values()], len(run))  # last runs, which the new run replaces
            merging = [runs[name] for name in list(runs)[len(runs) - count :] if files.pop(name)]
            with self._replacing(files, f"{RUN}{self.values['made']:06}.run") as path, path.open("wb") as file:
                file.writelines(part.tobytes() for part in merged([*merging, run]))
            own = (new.reach, new.lift, least_constant(new.factors(np.arange(len(items)))))
            bounds = [max(pair) for pair in zip(own, self.values["bounds"] or own)]
            made = self.values["made"] + 1
            self.write(files=files, rows=start + len(items), bounds=bounds, made=made, sources=list(sources))

    def _grow(self, files: Files, name: str, data: np.ndarray | bytes) -> None:
        """Write after the valid bytes of a file, sync, and note the new size in `files`."""
        size, checksum = files.get(name, (0, 0))
        data = data if isinstance(data, bytes) else data.tobytes()
        if not data:
            return
        with open(os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            file.seek(file.truncate(size))  # cuts off the rest of a killed writer
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        files[name] = [size + len(data), zlib.crc32(data, checksum)]

    @contextmanager
    def _replacing(self, files: Files, name: str) -> Iterator[Path]:
        """Yield the path of a new file that never changes after writing, and note it in `files`."""
        with replacing(self.folder / name) as temporary:
            yield temporary
            with temporary.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                files[name] = [size, _checksum(file, size)]

    def write_near(self, write: Callable[[str], None], constant: float) -> None:
        """Replace the approximate index. write: writes it to a path; constant: of its vectors."""
        with self.writing():
            files = {name: entry for name, entry in self.values["files"].items() if not name.startswith(NEAR)}
            name = f"{NEAR}{self.values['made']:06}.faiss"
            try:
                with self._replacing(files, name) as path:
                    write(str(path))
            except RuntimeError as error:  # faiss names the temporary file and its own line
                why = str(error).rpartition(": ")[2]
                raise OSError(f"{self.folder / name} cannot be written ({why}). Free some space") from error
            self.write(files=files, made=self.values["made"] + 1, near={"file": name, "constant": constant})

    def note_shards(self, address: str, stamps: Mapping[str, str | None]) -> None:
        """Store the states of local shards of a source that were read completely; None: read them again."""
        with self.writing():
            files = dict(self.values["files"])
            self._grow(files, SHARDS, b"".join(_line([address, *pair]) for pair in stamps.items()))
            self.write(files=files)

    def delete(self, keys: Sequence[str], unwanted: bool = False, **values: Any) -> None:
        """Delete keys, `unwanted`: permanently, and change values. ValueError for missing keys."""
        with self.writing():
            files, rows = dict(self.values["files"]), self.find(keys)
            if missing := [plain(key) for key, row in zip(keys, rows) if row < 0]:
                some = ", ".join(missing[:3])
                raise ValueError(f"{len(missing)} of {len(keys)} keys are not in {self.folder}: {some}")
            rows = np.unique(rows)
            self._grow(files, DELETED, ~rows if unwanted else rows)
            self.write(files=files, **values)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Compute a value of this state once, until the next commit."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @cached_property
    def gallery(self) -> GaussianArrays:
        """Return all rows, mapped from the files."""
        names, dim = self._maps.keys() & {VECTOR, MEAN, LOG_VAR}, self.values["dim"]
        columns = {name: self._maps[name].view("<f4").reshape(len(self), -1) for name in names}
        vector = columns.get(VECTOR, np.zeros((0, dim), dtype=np.float32))
        alive = None if not self.fates.any() else self.fates == 0
        mean, (reach, lift, _) = columns.get(MEAN, vector[:, :dim]), self.values["bounds"] or [0.0] * 3
        return GaussianArrays(mean, columns.get(LOG_VAR), vector, reach, lift, alive, BLOCK)

    def items(self, rows: Iterable[int]) -> list[Item]:
        """Return key, path, captions and other fields of these rows."""
        out: list[Item] = []
        for row in rows:
            try:
                ends = self._maps[ENDS].view("<i8")
                out.append(json.loads(self._maps[ITEMS][ends[row - 1] if row else 0 : ends[row]].tobytes()))
                if not isinstance(out[-1]["key"], str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, IndexError):
                raise ValueError(f"{self.folder / ITEMS}, {ENDS} or {RUN}* is damaged at row {row}: {REMEDY}") from None
        return out

    def find(self, keys: Sequence[str], deleted: bool = False) -> np.ndarray:
        """Return the rows of keys, (K,) int64, -1 for missing and deleted ones. deleted: the last row if deleted."""
        found = np.full(len(keys), -1)
        places, rows = candidates(self._runs().values(), hashes_of(keys))
        kept = deleted | (self.fates.take(rows, mode="clip") == 0)
        for place, row in zip(places[kept].tolist(), rows[kept].tolist()):
            if row > found[place] and self.items([row])[0]["key"] == keys[place]:  # two keys may share a hash
                found[place] = row
        return found

    def are_unwanted(self, keys: Sequence[str]) -> np.ndarray:
        """Return which of these keys (K,) were deleted permanently and have not been added again."""
        fates = self.fates
        if not self._any_unwanted:
            return np.zeros(len(keys), dtype=bool)
        last = self.find(keys, deleted=True)
        return (last >= 0) & (fates[last] == UNWANTED)

    def shards(self, address: str) -> dict[str, str | None]:
        """Return local shards of a source -> their state when they were read completely; None: read them again."""
        text = self._maps[SHARDS].tobytes() if SHARDS in self._maps else b""
        try:
            return {shard: stamp for source, shard, stamp in map(json.loads, text.splitlines()) if source == address}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.folder / SHARDS} is damaged: {REMEDY}") from error

    def _runs(self) -> dict[str, np.ndarray]:
        return {name: data.view(ENTRY) for name, data in self._maps.items() if name.startswith(RUN)}

    @property
    def fates(self) -> np.ndarray:
        """Return the fate of each row, (N,) uint8: 0 alive, 1 deleted, UNWANTED if it stays deleted after a reread."""
        every = self._maps[DELETED].view("<i8") if DELETED in self._maps else np.zeros(0, dtype=np.int64)
        log = every[self._noted :]
        rows = np.maximum(log, ~log)
        if (rows >= len(self)).any():
            raise ValueError(f"{self.folder / DELETED} is damaged: {REMEDY}")
        if len(self._fates) < len(self):  # the capacity doubles, so a row is copied about once
            self._fates = np.concatenate([self._fates, np.zeros(len(self), dtype=np.uint8)])
        self._fates[rows] |= 1
        self._fates[rows[log < 0]] |= UNWANTED
        self._noted, self._any_unwanted = len(every), self._any_unwanted or bool((log < 0).any())
        return self._fates[: len(self)]

    @cached_property
    def deleted(self) -> np.ndarray:
        return np.flatnonzero(self.fates)


def holds_index(folder: str | os.PathLike) -> bool:
    """Return whether a folder holds a search index of any version; other programs have an index.json, too."""
    path = Path(folder) / NAME
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"format": "prolip-search-' in file.read(64)


@contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Hold the lock of a folder. BlockingIOError if another process holds it."""
    held = lock(folder / LOCK)
    if held is None:
        holder = holder_of(folder / LOCK)
        raise BlockingIOError(f"{folder} is being written by {holder}. Wait until it ends, or end it, then rerun this")
    with held:
        yield held


def _read_manifest(folder: Path, text: bytes) -> dict[str, Any]:
    """Read a manifest. ValueError for other files, and for a wrong checksum."""
    with suppress(ValueError, KeyError, TypeError):
        values = loads(text)
        if values["format"] == FORMAT and values["sum"] == zlib.crc32(json.dumps(values | {"sum": 0}).encode()):
            return values
    what = "is not an index, has another version, was edited, or is damaged"
    raise ValueError(f"{folder / NAME} {what}: {REMEDY}")


def _write_manifest(folder: Path, values: Mapping[str, Any]) -> None:
    """Commit: from now on the files in the manifest are valid."""
    text = json.dumps({**values, "sum": 0})
    with replacing(folder / NAME) as temporary:
        temporary.write_text(json.dumps({**values, "sum": zlib.crc32(text.encode())}), encoding="utf-8")


def _line(value: Any) -> bytes:
    """Return a value as a line of JSON, with any bytes of file names."""
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


def _checksum(file: IO[bytes], size: int) -> int:
    checksum = 0
    for start in range(0, size, READ):
        checksum = zlib.crc32(os.pread(file.fileno(), min(READ, size - start), start), checksum)
    return checksum


# --- keys: sorted runs of (hash, row); N rows have at most log2(N), and a row is merged O(log N) times ----------------
def hashes_of(keys: Iterable[str]) -> np.ndarray:
    """Return 64 bits of each key, (N,) uint64."""
    digests = [hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest() for key in keys]
    return np.frombuffer(b"".join(digests), dtype="<u8")


def run_of(keys: Sequence[str], start: int) -> np.ndarray:
    """Return the sorted run of keys whose rows begin at `start`, (N,) of ENTRY."""
    run = np.empty(len(keys), dtype=ENTRY)
    run["hash"], run["row"] = hashes_of(keys), np.arange(start, start + len(keys))
    return run[np.argsort(run["hash"], kind="stable")]


def absorbed(sizes: Sequence[int], new: int) -> int:
    """Return the number of last runs to merge with a run of `new` entries."""
    count = 0
    while count < len(sizes) and sizes[-1 - count] < 2 * new:
        count += 1
        new += sizes[-count]
    return count


def merged(runs: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    places = [0] * len(runs)
    while any(place < len(run) for place, run in zip(places, runs)):
        parts = [run[place : place + MERGED] for place, run in zip(places, runs)]
        ends = [part["hash"][-1] for run, place, part in zip(runs, places, parts) if place + MERGED < len(run)]
        if ends:  # entries after this hash may follow in another run
            parts = [part[: np.searchsorted(part["hash"], min(ends), side="right")] for part in parts]
        places = [place + len(part) for place, part in zip(places, parts)]
        both = np.concatenate(parts)
        yield both[np.argsort(both["hash"], kind="stable")]


def candidates(runs: Iterable[np.ndarray], hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows (M,) int64 with one of these hashes, and their places in `hashes` (M,) int64."""
    places, rows = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    order = np.argsort(hashes)  # sorted hashes reuse the cache
    for run in filter(len, runs):
        low = np.searchsorted(run["hash"], hashes[order])
        there = run["hash"][np.minimum(low, len(run) - 1)] == hashes[order]
        high = np.searchsorted(run["hash"], hashes[order[there]], side="right")
        for place, start, end in zip(order[there], low[there], high):
            places.append(np.full(end - start, place))
            rows.append(run["row"][start:end])
    return np.concatenate(places), np.concatenate(rows)
