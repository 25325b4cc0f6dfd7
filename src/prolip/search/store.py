"""A gallery on disk that only grows, and is whole at any moment, whenever its writer is killed.

    FOLDER/index.json     the manifest: the model, the score, how far each source was read, rows, and of each file how
                          many bytes count, with their CRC-32
    FOLDER/vector.f32     (N, P + 1) float32, [v, b] of a score that factors: an inner product ranks them
    FOLDER/mean.f32       (N, D) float32, where the vectors do not begin with it
    FOLDER/log_var.f32    (N, D) float32, unless these are points
    FOLDER/items.jsonl    what is known of each row: its key, path, captions; ends.i64: (N,) where its line ends
    FOLDER/deleted.i64    rows that are found no more
    FOLDER/keys-*.run     sorted runs of (hash of a key, row): `prolip.search.keys`
    FOLDER/near-*.faiss   an approximate index of the first rows
    FOLDER/lock           who writes

All little-endian. An append writes behind the bytes that count, syncs, and then replaces the manifest, which alone says
what counts: readers look at nothing beyond, and the next writer cuts off what a killed one left there. Runs and
approximate indexes get new names; a reader keeps those open that its manifest names.
"""
from __future__ import annotations

import json
import os
import re
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from prolip.gaussian import Gaussian
from prolip.scores import Score, Side, least_constant
from prolip.search.chunks import Chunk, make_chunk
from prolip.search.keys import ENTRY, absorbed, candidates, hashes_of, is_in, merged, run_of
from prolip.utils.documents import loads
from prolip.utils.outputs import holder_of, lock, replacing

FORMAT, FORMER, NAME = "prolip-search-2", "prolip-search-1", "index.json"
VECTOR, MEAN, LOG_VAR, ITEMS = "vector.f32", "mean.f32", "log_var.f32", "items.jsonl"
ENDS, DELETED, RUN, LOCK = "ends.i64", "deleted.i64", ".run", "lock"
#: Files that are replaced by others with a new number.
NUMBERED = re.compile(r"keys-\d+\.run|near-\d+\.faiss")
#: Rows that a search looks at at once, and bytes that are summed at once.
BLOCK, READ = 16_384, 2**24
Item = dict[str, Any]


class Store:
    """Gaussians with what is known of them, below a folder; a row's number never changes.

    near: an open descriptor of the approximate index, None where there is none, or where it is gone or cut.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.near: int | None = None
        self._close_near: Callable[[], Any] = lambda: None
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
            try:
                self._maps = {name: _mapped(self.folder / name, size)
                              for name, (size, _) in self.values["files"].items() if not is_near(name)}  # fmt: skip
                self._open_near(self.values["files"], last=text == before)
                break
            except (FileNotFoundError, ValueError) as error:
                if text == before:
                    said = f"{error.filename} is gone" if isinstance(error, OSError) else error
                    raise ValueError(f"{said}: {self._remedy}") from error
                before = text
        for name in ("deleted", "alive"):
            self.__dict__.pop(name, None)

    def _open_near(self, files: Mapping[str, Sequence[int]], last: bool) -> None:
        """Keep the approximate index open, whose name may go. last: whether it may be damaged, and is left out then."""
        self._close_near()
        self.near = None
        for name in filter(is_near, files):
            try:
                self.near = os.open(self.folder / name, os.O_RDONLY)
            except FileNotFoundError:
                if not last:
                    raise
                continue
            self._close_near = weakref.finalize(self, os.close, self.near)
            if os.fstat(self.near).st_size != files[name][0]:
                self.near = None

    @property
    def _remedy(self) -> str:
        return f"put it back from a copy of {self.folder}, or build the index anew in another folder"

    def verify(self) -> None:
        """Read all bytes. ValueError naming the files whose checksum is not what the manifest says."""
        wrong = [name for name, (size, checksum) in self.values["files"].items()
                 if not (self.folder / name).is_file() or _checksum(self.folder / name, size) != checksum]  # fmt: skip
        if wrong and all(map(is_near, wrong)):
            raise ValueError(f"{self.folder / wrong[0]} is damaged: python -m prolip.search finish {self.folder}"
                             " --anew makes it again")  # fmt: skip
        if wrong:
            raise ValueError(f"{', '.join(str(self.folder / name) for name in wrong)}: damaged, the bytes are not those"
                             f" that were written: {self._remedy}")  # fmt: skip

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
                self._sweep()
                yield
            finally:
                self._lock = None

    def write(self, **values: Any) -> None:
        """Change some of the values, all of them at once."""
        with self.writing():
            _write_manifest(self.folder, self.values | values)
            self._open()
            self._sweep()

    def append(
        self, z: Gaussian, items: Sequence[Item], score: Score, side: Side, sources: Sequence[Mapping[str, Any]],
        replace: bool = False,
    ) -> None:  # fmt: skip
        """Add rows, and with them how far the sources were read.

        replace: whether items take the place of those with their keys. ValueError for keys that stand twice, or that
        are there already and are not to be replaced.
        """
        with self.writing():
            keys = [item["key"] for item in items]
            former = self.find(keys)
            self._refuse_known(keys, former if not replace else former[:0])
            chunk = make_chunk(score, z, len(self), side)
            assert chunk.vector is not None
            files = self._with_columns(chunk)
            lines = [json.dumps(item, ensure_ascii=False).encode(errors="surrogatepass") + b"\n" for item in items]
            ends = np.cumsum([len(line) for line in lines], dtype="<i8") + files.get(ITEMS, (0,))[0]
            files[ITEMS], files[ENDS] = self._grown(files, ITEMS, b"".join(lines)), self._grown(files, ENDS, ends)
            if (former >= 0).any():
                files[DELETED] = self._grown(files, DELETED, former[former >= 0])
            self._add_run(files, run_of(keys, len(self)))
            own = (chunk.reach, chunk.lift, least_constant(chunk.factors))
            bounds = [max(pair) for pair in zip(own, self.values["bounds"] or own)]
            rows = len(self) + len(items)
            self.write(files=files, rows=rows, bounds=bounds, made=self.values["made"] + 1, sources=list(sources))

    def _with_columns(self, chunk: Chunk) -> dict[str, list[int]]:
        """The files when the arrays of a chunk are written; one that was not needed before gets its former rows."""
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
        path, data = self.folder / name, data if isinstance(data, bytes) else data.tobytes()
        with path.open("r+b" if path.exists() else "xb") as file:
            file.truncate(size)  # of what a killed writer left
            file.seek(size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return [size + len(data), zlib.crc32(data, checksum)]

    def _add_run(self, files: dict[str, list[int]], run: np.ndarray) -> None:
        """Write a run, merged with the last ones, and name it in `files` in their place."""
        names = [name for name in files if name.endswith(RUN)]
        runs = [self._maps[name].view(ENTRY) for name in names]
        count = absorbed([len(x) for x in runs], len(run))
        name, size, checksum = f"keys-{self.values['made']:06}{RUN}", 0, 0
        with replacing(self.folder / name) as temporary, temporary.open("wb") as file:
            for part in merged([*runs[len(runs) - count :], run]):
                size, checksum = size + part.nbytes, zlib.crc32(part.tobytes(), checksum)
                file.write(part.tobytes())
        for old in names[len(runs) - count :]:
            del files[old]
        files[name] = [size, checksum]

    def write_near(self, write: Callable[[str], None], constant: float) -> None:
        """Have another file be the approximate index. write: makes it at a path; constant: of its vectors."""
        with self.writing():
            files = {name: entry for name, entry in self.values["files"].items() if not is_near(name)}
            name = f"near-{self.values['made']:06}.faiss"
            with replacing(self.folder / name) as temporary:
                write(str(temporary))
            size = (self.folder / name).stat().st_size
            files[name] = [size, _checksum(self.folder / name, size)]
            self.write(files=files, made=self.values["made"] + 1, near={"file": name, "constant": constant})

    def delete(self, keys: Sequence[str], **values: Any) -> None:
        """Have the rows of these keys found no more, and change some of the values; KeyError as `rows_of`."""
        with self.writing():
            files, rows = dict(self.values["files"]), np.unique(self.rows_of(keys))
            if len(rows):
                files[DELETED] = self._grown(files, DELETED, rows)
            self.write(files=files, **values)

    def _sweep(self) -> None:
        """Delete runs and approximate indexes that do not count: merged, replaced, or of a killed writer."""
        for path in self.folder.iterdir():
            if path.name not in self.values["files"] and NUMBERED.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _refuse_known(self, keys: Sequence[str], former: np.ndarray) -> None:
        """ValueError for keys that stand twice, or that a row has which was not deleted."""
        counts = Counter(keys)
        twice = [key for key, count in counts.items() if count > 1]
        twice += [keys[place] for place in np.flatnonzero(former >= 0) if counts[keys[place]] == 1]
        if twice:
            raise ValueError(f"{len(twice)} keys are in {self.folder} already or stand twice ({', '.join(twice[:3])}):"
                             " delete them first, or leave them out")  # fmt: skip

    # --- reading -----------------------------------------------------------------------------------------------------
    def chunks(self, first: int = 0) -> list[Chunk]:
        """All of it from a row on, mapped from the files, BLOCK rows each."""
        if not len(self):
            return []
        columns = {name: self._maps[name].view("<f4").reshape(len(self), -1)
                   for name in (VECTOR, MEAN, LOG_VAR) if name in self._maps}  # fmt: skip
        mean = columns.get(MEAN, columns[VECTOR][:, : self.values["dim"]])
        log_var, (reach, lift, _) = columns.get(LOG_VAR), self.values["bounds"]
        out = []
        for start in range(first, len(self), BLOCK):
            some = slice(start, min(start + BLOCK, len(self)))
            low, high = np.searchsorted(self.deleted, (some.start, some.stop))
            alive = None if self.alive is None or low == high else self.alive[some]
            own = None if log_var is None else log_var[some]
            out.append(Chunk(start, mean[some], own, columns[VECTOR][some], reach, lift, alive))
        return out

    def items(self, rows: Iterable[int]) -> list[Item]:
        """What is known of these rows."""
        ends = self._maps[ENDS].view("<i8") if len(self) else np.zeros(0, dtype=np.int64)
        out = []
        for row in rows:
            start = ends[row - 1] if row else 0
            try:
                item = json.loads(self._maps[ITEMS][start : ends[row]].tobytes())
                if not isinstance(item["key"], str):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{self.folder / ITEMS} or {ENDS} is damaged at row {row}: {self._remedy}") from None
            out.append(item)
        return out

    def known(self) -> Iterator[tuple[str, str | None, int]]:
        """The key, the fingerprint ("print") and the row of all that can be found, by rising row."""
        for start in range(0, len(self), BLOCK):
            rows = np.arange(start, min(start + BLOCK, len(self)))
            rows = rows if self.alive is None else rows[self.alive[rows]]
            for row, item in zip(rows.tolist(), self.items(rows)):
                yield item["key"], item.get("print"), row

    def find(self, keys: Sequence[str]) -> np.ndarray:
        """The rows of these keys (K,) int64, -1 for those that are not there or were deleted."""
        runs = [data.view(ENTRY) for name, data in self._maps.items() if name.endswith(RUN)]
        places, rows = candidates(runs, hashes_of(keys))
        if len(rows):
            if rows.max() >= len(self):
                raise ValueError(f"{self.folder}/keys-*{RUN} are damaged: {self._remedy}")
            living = ~is_in(self.deleted, rows)
            places, rows = places[living], rows[living]
        found = np.full(len(keys), -1)
        for place, row, item in zip(places.tolist(), rows.tolist(), self.items(rows)):
            if item["key"] == keys[place]:  # hashes of two keys may be equal
                found[place] = row
        return found

    def rows_of(self, keys: Sequence[str]) -> list[int]:
        """The rows of these keys. KeyError, naming some, for those that are not there or were deleted."""
        rows = self.find(keys).tolist()
        missing = [key for key, row in zip(keys, rows) if row < 0]
        if missing:
            raise KeyError(f"{len(missing)} of {len(keys)} keys are not in {self.folder}: {', '.join(missing[:3])}")
        return rows

    @cached_property
    def deleted(self) -> np.ndarray:
        """Rows that were deleted, rising."""
        rows = np.sort(self._maps[DELETED].view("<i8")) if DELETED in self._maps else np.zeros(0, dtype=np.int64)
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(self):
            raise ValueError(f"{self.folder / DELETED} is damaged: {self._remedy}")
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
    try:
        return str(json.loads((Path(folder) / NAME).read_bytes())["format"]).startswith("prolip-search-")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


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
        if values["format"] == FORMER:
            raise ValueError(f"{folder} is an index of an earlier version: python -m prolip.search convert {folder}")
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, wanted {FORMAT!r}")
        if zlib.crc32(json.dumps(values | {"sum": 0}).encode()) != values["sum"]:
            raise ValueError("its checksum is not its own, so it is damaged or was changed by hand")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / NAME} describes no index ({error}): put it back from a copy, or build the index"
                         " anew in another folder") from error  # fmt: skip
    return values


def _write_manifest(folder: Path, values: Mapping[str, Any]) -> None:
    """Commit: what is named here counts from now on."""
    text = json.dumps({**values, "sum": 0})
    with replacing(folder / NAME) as temporary:
        temporary.write_text(json.dumps({**json.loads(text), "sum": zlib.crc32(text.encode())}), encoding="utf-8")


def is_near(name: str) -> bool:
    """Whether a file is an approximate index."""
    return name.startswith("near-")


def _mapped(path: Path, size: int) -> np.ndarray:
    """The bytes of a file that count (size,) uint8. ValueError where there are fewer; OSError."""
    found = path.stat().st_size
    if found < size:
        raise ValueError(f"{path} is damaged, {found:,} bytes of {size:,} are there")
    return np.memmap(path, np.uint8, "r", shape=(size,)).view(np.ndarray) if size else np.zeros(0, dtype=np.uint8)


def _checksum(path: Path, size: int) -> int:
    """The CRC-32 of the first bytes of a file."""
    checksum = 0
    with path.open("rb") as file:
        while data := file.read(min(READ, size)):
            checksum, size = zlib.crc32(data, checksum), size - len(data)
    return checksum
