"""A gallery on disk that only grows, and is whole at any moment, whenever its writer is killed.

    FOLDER/index.json     the manifest: the model, the score, how far each source was read, rows; of each file how many
                          bytes count, and their CRC-32
    FOLDER/vector.f32     (N, P + 1) float32, [v, b] of a score that factors: an inner product ranks them
    FOLDER/mean.f32       (N, D) float32, where the vectors do not begin with it
    FOLDER/log_var.f32    (N, D) float32, unless these are points
    FOLDER/items.jsonl    what is known of each row: its key, path, captions; ends.i64: (N,) where its line ends
    FOLDER/deleted.i64    rows that are found no more
    FOLDER/keys-*.run     sorted runs of (hash of a key, row): `prolip.search.disk.keys`
    FOLDER/near-*.faiss   an approximate index of the first rows
    FOLDER/lock           who writes

A writer appends behind the bytes that count, syncs, and then replaces the manifest, which alone says what counts:
readers look at nothing beyond, and the next writer cuts off what a killed one left. Runs and approximate indexes are
never changed but replaced by others; a reader holds those that its manifest names.
"""
from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from prolip.gaussian import Gaussian
from prolip.scores import Score, Side, least_constant
from prolip.search.chunks import Chunk, make_chunk
from prolip.search.disk.keys import ENTRY, absorbed, candidates, hashes_of, merged, run_of
from prolip.utils.console import plain
from prolip.utils.documents import loads
from prolip.utils.outputs import holder_of, lock, replacing

FORMAT, FORMER, NAME, LOCK = "prolip-search-2", "prolip-search-1", "index.json", "lock"
VECTOR, MEAN, LOG_VAR, ITEMS = "vector.f32", "mean.f32", "log_var.f32", "items.jsonl"
ENDS, DELETED, RUN, NEAR = "ends.i64", "deleted.i64", "keys-", "near-"
NUMBERED = re.compile(rf"{RUN}\d{{6,}}\.run|{NEAR}\d{{6,}}\.faiss")
#: What to do about damaged files, and about a damaged approximate index.
REMEDY = "put back a copy of the index, or build it anew in another folder"
AGAIN = "python -m prolip.search finish {} --anew makes it again"
#: Rows that a search looks at at once, and bytes that are summed at once.
BLOCK, READ = 32_768, 2**24
Item = dict[str, Any]


class Store:
    """Gaussians with what is known of them, below a folder; a row's number never changes.

    near: the approximate index, open, as its name may go; None where there is none, or where it is gone or cut.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._lock: IO[str] | None = None
        self._open()

    @classmethod
    def create(cls, folder: str | os.PathLike, values: Mapping[str, Any]) -> Store:
        """An empty one; values: JSON values of whoever makes it. FileExistsError where there is one."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if (folder / NAME).exists():
                raise FileExistsError(f"{folder} holds an index already: extend it, or give another folder")
            if others := [name for name in (VECTOR, MEAN, LOG_VAR, ITEMS, ENDS, DELETED) if (folder / name).exists()]:
                raise FileExistsError(f"{folder / others[0]} belongs to no index: give another folder")
            _write_manifest(folder, {"format": FORMAT, **values, "rows": 0, "bounds": None, "made": 0, "files": {}})
        return cls(folder)

    def __len__(self) -> int:
        """Rows, those that were deleted too."""
        return self.values["rows"]

    def _open(self) -> None:
        """Map what the manifest names; once more where a writer has replaced it meanwhile."""
        before, path = None, self.folder / NAME
        while True:
            if not path.is_file():
                raise FileNotFoundError(f"no index in {self.folder}: build one with python -m prolip.search build"
                                        f" {self.folder} --data ...")  # fmt: skip
            text = path.read_bytes()
            self.values: dict[str, Any] = _read_manifest(self.folder, text)
            files = {name: _opened(self.folder / name, size) for name, (size, _) in self.values["files"].items()}
            self._files = {name: file for name, file in files.items() if file is not None}
            if len(self._files) == len(files) or text == before:
                break
            before = text
        if lost := [str(self.folder / name) for name in files if name not in self._files and not name.startswith(NEAR)]:
            raise ValueError(f"{', '.join(lost)} is gone or cut: {REMEDY}")
        self.near = next((file for name, file in self._files.items() if name.startswith(NEAR)), None)
        self._maps = {name: np.memmap(file, np.uint8, "r", shape=(self.values["files"][name][0],)).view(np.ndarray)
                      for name, file in self._files.items() if file is not self.near}  # fmt: skip
        for name in ("deleted", "alive"):
            self.__dict__.pop(name, None)

    def verify(self) -> None:
        """Read all bytes. ValueError naming the files whose checksum is not what the manifest says."""
        wrong = [name for name, (size, checksum) in self.values["files"].items()
                 if name not in self._files or _checksum(self._files[name], size) != checksum]  # fmt: skip
        if wrong:
            remedy = AGAIN.format(self.folder) if all(name.startswith(NEAR) for name in wrong) else REMEDY
            raise ValueError(f"{', '.join(str(self.folder / name) for name in wrong)} is damaged: {remedy}")

    # --- writing -----------------------------------------------------------------------------------------------------
    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of writers, and begin with what the last one committed. BlockingIOError where it is held."""
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
        """Change some of the values, all of them at once, and delete numbered files that count no more."""
        with self.writing():
            _write_manifest(self.folder, self.values | values)
            self._open()
            for path in self.folder.iterdir():
                if path.name not in self.values["files"] and NUMBERED.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def append(
        self, z: Gaussian, items: Sequence[Item], score: Score, side: Side, sources: Sequence[Mapping[str, Any]],
        replace: bool = False,
    ) -> None:  # fmt: skip
        """Add rows, and with them how far the sources were read.

        replace: whether items take the place of those with their keys. ValueError for keys that stand twice, or that
        are there already and are not to be replaced.
        """
        with self.writing():
            keys, start = [item["key"] for item in items], len(self)
            former = self.find(keys)
            places = {key: place for place, key in enumerate(keys)}
            if twice := [key for place, key in enumerate(keys)
                         if places[key] != place or (former[place] >= 0 and not replace)]:  # fmt: skip
                some = ", ".join(map(plain, twice[:3]))
                raise ValueError(f"{len(twice)} keys are in {self.folder} already or stand twice ({some}): delete them"
                                 " first, or leave them out")  # fmt: skip
            chunk = make_chunk(score, z, start, side)
            lines = [json.dumps(item, ensure_ascii=False).encode(errors="surrogatepass") + b"\n" for item in items]
            files = self._with_columns(chunk)
            ends = np.cumsum([len(line) for line in lines]) + files.get(ITEMS, (0,))[0]
            for name, data in ((ITEMS, b"".join(lines)), (ENDS, ends), (DELETED, former[former >= 0])):
                if len(data):
                    files[name] = self._grown(files, name, data)
            self._add_run(files, run_of(keys, start))
            own = (chunk.reach, chunk.lift, least_constant(chunk.factors))
            bounds = [max(pair) for pair in zip(own, self.values["bounds"] or own)]
            made = self.values["made"] + 1
            self.write(files=files, rows=start + len(items), bounds=bounds, made=made, sources=list(sources))

    def _with_columns(self, chunk: Chunk) -> dict[str, list[int]]:
        """The files with the arrays of a chunk; one that was not needed before begins with what its rows stood for."""
        assert chunk.vector is not None
        files, mean = dict(self.values["files"]), chunk.mean
        columns = {VECTOR: chunk.vector}
        if MEAN in files or not np.array_equal(chunk.vector[:, : mean.shape[1]], mean):
            columns[MEAN] = mean
        if LOG_VAR in files or chunk.log_var is not None:
            columns[LOG_VAR] = np.full_like(mean, -np.inf) if chunk.log_var is None else chunk.log_var
        for name, array in columns.items():
            for old in self.chunks() if name not in files else ():
                files[name] = self._grown(files, name, old.mean if name == MEAN else np.full_like(old.mean, -np.inf))
            files[name] = self._grown(files, name, array)
        return files

    def _grown(self, files: Mapping[str, Sequence[int]], name: str, data: np.ndarray | bytes) -> list[int]:
        """Write behind the bytes of a file that count, and sync; the bytes that count then, and their checksum."""
        size, checksum = files.get(name, (0, 0))
        data = data if isinstance(data, bytes) else data.tobytes()
        with open(os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            file.truncate(size)  # of what a killed writer left
            file.seek(size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return [size + len(data), zlib.crc32(data, checksum)]

    def _add_run(self, files: dict[str, list[int]], run: np.ndarray) -> None:
        """Write a run, merged with the last ones, and name it in `files` in their place."""
        runs = self._runs()
        count = absorbed([len(x) for x in runs.values()], len(run))
        own = [runs[name] for name in list(runs)[len(runs) - count :] if files.pop(name)]
        name, size, checksum = f"{RUN}{self.values['made']:06}.run", 0, 0
        with replacing(self.folder / name) as temporary, temporary.open("wb") as file:
            for part in merged([*own, run]):
                size, checksum = size + file.write(part.tobytes()), zlib.crc32(part.tobytes(), checksum)
        files[name] = [size, checksum]

    def write_near(self, write: Callable[[str], None], constant: float) -> None:
        """Have another file be the approximate index. write: makes it at a path; constant: of its vectors."""
        with self.writing():
            files = {name: entry for name, entry in self.values["files"].items() if not name.startswith(NEAR)}
            name = f"{NEAR}{self.values['made']:06}.faiss"
            with replacing(self.folder / name) as temporary:
                try:
                    write(str(temporary))
                except RuntimeError as error:  # of faiss, which names the temporary file and its own line
                    why = str(error).rpartition(": ")[2]
                    raise OSError(f"{self.folder / name} cannot be written ({why}): make room") from error
                with temporary.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    files[name] = [size, _checksum(file, size)]
            self.write(files=files, made=self.values["made"] + 1, near={"file": name, "constant": constant})

    def delete(self, keys: Sequence[str], **values: Any) -> None:
        """Have the rows of these keys found no more, and change some of the values. KeyError for keys without one."""
        with self.writing():
            files, rows = dict(self.values["files"]), self.find(keys)
            if missing := [plain(key) for key, row in zip(keys, rows) if row < 0]:
                some = ", ".join(missing[:3])
                raise KeyError(f"{len(missing)} of {len(keys)} keys are not in {self.folder}: {some}")
            if len(rows):
                files[DELETED] = self._grown(files, DELETED, np.unique(rows))
            self.write(files=files, **values)

    # --- reading -----------------------------------------------------------------------------------------------------
    def chunks(self, first: int = 0) -> list[Chunk]:
        """All of it from a row on, mapped from the files, BLOCK rows each."""
        if not len(self):
            return []
        columns = {name: self._maps[name].view("<f4").reshape(len(self), -1)
                   for name in (VECTOR, MEAN, LOG_VAR) if name in self._maps}  # fmt: skip
        mean, log_var = columns.get(MEAN, columns[VECTOR][:, : self.values["dim"]]), columns.get(LOG_VAR)
        (reach, lift, _), out = self.values["bounds"], []
        for start in range(first, len(self), BLOCK):
            some = slice(start, min(start + BLOCK, len(self)))
            low, high = np.searchsorted(self.deleted, (some.start, some.stop))
            alive = None if self.alive is None or low == high else self.alive[some]
            own = None if log_var is None else log_var[some]
            out.append(Chunk(start, mean[some], own, columns[VECTOR][some], reach, lift, alive))
        return out

    def items(self, rows: Iterable[int]) -> list[Item]:
        """What is known of these rows."""
        out: list[Item] = []
        for row in rows:
            try:
                ends = self._maps[ENDS].view("<i8")
                out.append(json.loads(self._maps[ITEMS][ends[row - 1] if row else 0 : ends[row]].tobytes()))
                if not isinstance(out[-1]["key"], str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, IndexError):
                raise ValueError(f"{self.folder / ITEMS}, {ENDS} or {RUN}* is damaged at row {row}: {REMEDY}"
                                 ) from None  # fmt: skip
        return out

    def find(self, keys: Sequence[str]) -> np.ndarray:
        """The rows of these keys (K,) int64, -1 for those that are not there or were deleted."""
        found = np.full(len(keys), -1)
        places, rows = candidates(self._runs().values(), hashes_of(keys))
        low, high = (np.searchsorted(self.deleted, rows, side=side) for side in ("left", "right"))
        for place, row in zip(places[low == high].tolist(), rows[low == high].tolist()):
            if self.items([row])[0]["key"] == keys[place]:  # hashes of two keys may be equal
                found[place] = row
        return found

    def _runs(self) -> dict[str, np.ndarray]:
        return {name: data.view(ENTRY) for name, data in self._maps.items() if name.startswith(RUN)}

    @cached_property
    def deleted(self) -> np.ndarray:
        """Rows that were deleted, rising."""
        rows = np.sort(self._maps[DELETED].view("<i8")) if DELETED in self._maps else np.zeros(0, dtype=np.int64)
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(self):
            raise ValueError(f"{self.folder / DELETED} is damaged: {REMEDY}")
        return rows

    @cached_property
    def alive(self) -> np.ndarray | None:
        """(N,) bool; None where nothing was deleted."""
        if not len(self.deleted):
            return None
        alive = np.ones(len(self), dtype=bool)
        alive[self.deleted] = False
        return alive


def holds_index(folder: str | os.PathLike) -> bool:
    """Whether a folder holds an index of this or an earlier version; other programs have an index.json, too."""
    path = Path(folder) / NAME
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"format": "prolip-search-' in file.read(64)


@contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """The lock of who writes to a folder. BlockingIOError where another holds it."""
    held = lock(folder / LOCK)
    if held is None:
        raise BlockingIOError(f"{folder} is being written to by {holder_of(folder / LOCK)}: wait until it has ended, or"
                              " end it, and type this again")  # fmt: skip
    with held:
        yield held


def _read_manifest(folder: Path, text: bytes) -> dict[str, Any]:
    """The values of a manifest. ValueError for anything else, and for one whose checksum is not its own."""
    try:
        values = loads(text)
        version, is_whole = values["format"], zlib.crc32(json.dumps(values | {"sum": 0}).encode()) == values.get("sum")
    except (ValueError, KeyError, TypeError):
        version, is_whole = "", False
    if version == FORMER:
        raise ValueError(f"{folder} is of an earlier version: python -m prolip.search convert {folder} makes it anew")
    if version != FORMAT or not is_whole:
        raise ValueError(f"{folder / NAME} describes no index, was changed by hand, or is damaged: {REMEDY}")
    return values


def _write_manifest(folder: Path, values: Mapping[str, Any]) -> None:
    """Commit: what is named here counts from now on."""
    text = json.dumps({**values, "sum": 0})
    with replacing(folder / NAME) as temporary:
        temporary.write_text(json.dumps({**values, "sum": zlib.crc32(text.encode())}), encoding="utf-8")


def _opened(path: Path, size: int) -> IO[bytes] | None:
    """A file whose first bytes count; None where it is gone or has fewer."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    return file if os.fstat(file.fileno()).st_size >= size else None


def _checksum(file: IO[bytes], size: int) -> int:
    """The CRC-32 of the first bytes of a file."""
    checksum = 0
    for start in range(0, size, READ):
        checksum = zlib.crc32(os.pread(file.fileno(), min(READ, size - start), start), checksum)
    return checksum
