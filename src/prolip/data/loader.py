"""The training loader: batches whose order depends on the seed and the number of streams, not on ranks or workers."""

from __future__ import annotations

import multiprocessing.queues
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from prolip.data.augment.crops import RandomCrop
from prolip.data.config import DataConfig, chunks_ahead, fitting_batch, fitting_workers
from prolip.data.faults import FaultCounter, FaultGuard, Gather, SampleFault, alone
from prolip.data.noisy_captions import Noise, make_noise
from prolip.data.order import Cursor, Place, RowSource, Source, SyntheticSource
from prolip.data.reading.folders import ImageRows
from prolip.data.samples import Decoder, Example, Row, SyntheticDecoder, preserved_rng
from prolip.data.sources import build_source
from prolip.utils.console import say
from prolip.utils.fields import AUTO
from prolip.utils.threads import cores, raise_file_limit

#: The settings that determine the order of an epoch; the location of shards does not.
ORDER_SETTINGS: tuple[str, ...] = ("train_num_samples", "train_split", "split", "dataset_resampled", "select")
ORDER_SETTINGS += ("train_data_upsampling_factors", "shuffle_buffer", "seed")

Batch = dict[str, Any]
Transform = Callable[[Image.Image], Tensor] | RandomCrop


@dataclass
class Chunks(IterableDataset):
    """The chunks of one rank: worker w yields `per_epoch` chunks of stream w * ranks + rank."""

    source: Source
    decode: Callable[[Row, int], Example]
    tokenize: Any  # list of n captions -> (n, L)
    config: DataConfig
    rank: int
    ranks: int
    per_epoch: int
    epoch: Any  # shared with the workers, which live longer than an epoch
    resumed: dict[str, Any] | None = None  # `state_dict` of an earlier run, with the cursors of this rank
    noise: Noise | None = None

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = get_worker_info(), self.config.workers or 1
        number, epoch = worker.id if worker is not None else 0, self.epoch.value
        place = Place(self.config.seed, epoch, number * self.ranks + self.rank, workers * self.ranks)
        begin, cursor = 0, Cursor()
        if self.resumed is not None and self.resumed["epoch"] == epoch:
            begin = self.resumed["batches"]
            if begin < self.per_epoch:  # at its end, cursors may belong to other streams
                cursor = Cursor(**self.resumed["cursors"][place.stream])
        faults = FaultCounter(limit=self.config.max_bad_fraction)
        rows = self.source.stream(place, faults, cursor)
        for _ in range(begin, self.per_epoch):
            with preserved_rng():
                chunk = self._collate(self._examples(rows, epoch, faults))
            chunk["faults"], chunk["cursor"] = faults.drain(), asdict(cursor)
            yield chunk

    def _examples(self, rows: Iterator[Row], epoch: int, faults: FaultCounter) -> list[Example]:
        examples: list[Example] = []
        while len(examples) < self.config.batch_size // (self.config.workers or 1):
            row = next(rows)
            try:
                examples.append(self.decode(self.noise(row) if self.noise is not None else row, epoch))
            except SampleFault as fault:
                faults.lose_sample(fault, row.raw["__key__"], row.raw.get("__url__", ""))
            else:
                faults.use_sample()
        return examples

    def _collate(self, examples: list[Example]) -> Batch:
        chunk: Batch = {"image": torch.stack([example.image for example in examples])}
        if self.config.captions:
            texts: list[Any] = [example.text for example in examples]
            texts = [*texts[1:], texts[0]] if self.config.unpaired else texts
            if isinstance(texts[0], Tensor):
                chunk["text"] = torch.stack(texts)
            elif isinstance(texts[0], tuple):  # several captions of each image
                chunk["text"] = self.tokenize(list(chain.from_iterable(texts))).unflatten(0, (len(texts), -1))
            else:
                chunk["text"] = self.tokenize(texts)
        chunk["key"] = [example.key for example in examples]
        if self.config.known_matches:
            chunk["caption_id"] = torch.tensor([example.drawn_id for example in examples])
            identities = [torch.tensor(example.ids, dtype=torch.int64) for example in examples]
            chunk["caption_ids"] = pad_sequence(identities, batch_first=True, padding_value=-1)
        return chunk


def interleave(chunks: Sequence[Batch], pin: bool) -> Batch:
    """Join one chunk of every worker into a batch, pinned or not: row r is row r // workers of chunk r % workers."""
    batch: Batch = {}
    for name in chunks[0]:
        parts = [chunk[name] for chunk in chunks]
        if isinstance(parts[0], list):
            batch[name] = [item for row in zip(*parts, strict=True) for item in row]
            continue
        if name == "caption_ids":
            longest = max(part.shape[1] for part in parts)
            parts = [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=-1) for part in parts]
        if len(parts) == 1:
            batch[name] = parts[0].pin_memory() if pin else parts[0]
            continue
        rows, *rest = parts[0].shape
        out = torch.empty((rows, len(parts), *rest), dtype=parts[0].dtype, pin_memory=pin)
        batch[name] = torch.stack(tuple(parts), 1, out=out).flatten(0, 1)
    return batch


class Loader:
    """Loader of training batches. Iterate once per epoch, after `set_epoch(e)`: `num_batches` batches on every rank.

    A batch: image (B, 3, H, W), text (B, L) int64, key list[str]. If `captions` C is not 1, text is (B, C, L), or
    missing for 0. With `known_matches` also caption_id (B,) and caption_ids (B, K) int64, padded with -1.
    gather: set it for several ranks, so that they check faults together and share the captions for noise.
    """

    def __init__(self, chunks: Chunks, dataset_samples: int):
        self.config = chunks.config
        self.gather: Gather = alone
        self.dataset_samples, self.num_batches = dataset_samples, chunks.per_epoch
        self.num_samples = chunks.per_epoch * chunks.config.batch_size * chunks.ranks  # of an epoch, over all ranks
        self._chunks, self.source = chunks, chunks.source
        self.pin = torch.cuda.is_available()  # whether batches are in pinned memory
        self._guard = FaultGuard(self.config.max_bad_fraction)
        self._taken = 0
        self._cursors: dict[int, dict[str, Any]] = {}
        self._workers: DataLoader | None = None
        if self.config.workers:
            self._workers = DataLoader(
                chunks,
                batch_size=None,
                num_workers=self.config.workers,
                prefetch_factor=chunks_ahead(self.config.prefetch, self.config.batch_size),
                persistent_workers=True,
                worker_init_fn=start_worker,
                collate_fn=hand_on,
                generator=torch.Generator(),  # without it every epoch draws from the global generator
            )

    @cached_property
    def noise(self) -> Noise | None:
        """The captions that `config.noise_ratio` gives to other samples, computed on first use (`make_noise`)."""
        return make_noise(self.config, self.source, self._chunks.rank, self.gather)

    @property
    def held_out(self) -> ImageRows | None:
        """The rows that `config.split` holds out; None for shards or without a split."""
        rows = self.source.read if isinstance(self.source, RowSource) else None
        return rows.held_out if isinstance(rows, ImageRows) else None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        if epoch != self._chunks.epoch.value:
            self._taken, self._cursors = 0, {}
        self._chunks.epoch.value = epoch

    def faults(self) -> dict[str, int]:
        """Return the faults so far by kind, with the number of `samples` and `shards` read."""
        return self._guard.total.summary()

    def close(self) -> None:
        """Stop the workers now; a later iteration starts new ones."""
        if self._workers is not None and self._workers._iterator is not None:
            iterator: Any = self._workers._iterator
            iterator._shutdown_workers()
            for worker in iterator._workers:  # a stuck worker ignores SIGTERM
                if worker.is_alive():
                    worker.kill()
                    worker.join()
            self._workers._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank after the last returned batch, in plain types (see `join_states`)."""
        chunks = self._chunks
        noise = {"noise": self.noise.digest} if self.noise is not None else {}
        order = {name: getattr(self.config, name) for name in ORDER_SETTINGS}
        order |= {"shards": len(getattr(self.source, "urls", ())), "samples": self.dataset_samples}
        return {
            "epoch": chunks.epoch.value,
            "batches": self._taken,
            "num_batches": self.num_batches,
            "streams": chunks.ranks * (self.config.workers or 1),
            "order": {**order, "global batch": self.config.batch_size * chunks.ranks},
            "cursors": dict(self._cursors),
            "faults": self._guard.to_dict(),
            **noise,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, the joined states of all ranks, without decoding earlier samples; before iterating.

        ValueError if the noise in the captions differs or, within an epoch, the number of streams or the data.
        """
        saved, now = state.get("noise"), self.noise.digest if self.noise is not None else None
        if saved != now:
            was, is_now = ("none" if digest is None else f"noise {digest[:8]}" for digest in (saved, now))
            remedy = "give its --noise-ratio, --noise-seed, --caption-sampling, --select and data, or start a new run"
            raise ValueError(f"the checkpoint's captions had other noise ({was}) than this run's ({is_now}): {remedy}")
        rank, ranks, batches, mine = self._chunks.rank, self._chunks.ranks, state["batches"], {}
        if batches >= state.get("num_batches", self.num_batches):
            batches = self.num_batches  # the epoch is complete on every rank
        elif batches:
            own, order = self.state_dict(), state["order"]
            where = f"the checkpoint is {batches} batches inside epoch {state['epoch']}"
            remedy = "or resume from a checkpoint between epochs, where this may change"
            if (streams := state["streams"]) != own["streams"]:
                what = f"{where}, which has {streams} streams (ranks x workers), but this run has"
                choose = f"choose --workers so that ranks x workers is {streams}"
                raise ValueError(f"{what} {own['streams']}: {choose}, {remedy}")
            pairs = [(name, old, own["order"].get(name)) for name, old in order.items()]
            if changed := [f"{name} was {old!r}, is {new!r}" for name, old, new in pairs if old != new]:
                what = f"{where}, in another order of the data: {'; '.join(changed)}"
                raise ValueError(f"{what}. Restore the former values, {remedy}")
            mine = {stream: cursor for stream, cursor in state["cursors"].items() if stream % ranks == rank}
        self.close()
        self._cursors, self._taken = mine, batches
        self._chunks.resumed = {"epoch": state["epoch"], "batches": batches, "cursors": mine} if batches else None
        self._chunks.epoch.value = state["epoch"]
        if rank == 0:
            self._guard.absorb(state["faults"])

    def __iter__(self) -> Iterator[Batch]:
        resumed, epoch = self._chunks.resumed, self._chunks.epoch.value
        if resumed is not None and resumed["epoch"] == epoch:
            self._taken, self._cursors = resumed["batches"], dict(resumed["cursors"])
        else:
            self._taken, self._cursors = 0, {}
            self._guard.epoch = FaultCounter()
        self._chunks.noise = self.noise
        try:
            if self._workers is not None:
                raise_file_limit()
            chunks = iter(self._chunks if self._workers is None else self._workers)
            while self._taken < self.num_batches:
                parts = [next(chunks) for _ in range(self.config.workers or 1)]
                for worker, part in enumerate(parts):
                    self._guard.add(part.pop("faults"))
                    self._cursors[worker * self._chunks.ranks + self._chunks.rank] = part.pop("cursor")
                self._taken += 1
                yield interleave(parts, self.pin)
            next(chunks, None)  # lets the workers finish their epoch
            self._guard.end_epoch(self.gather)
        except Exception as error:
            lost = lost_worker(error, self._workers)
            self.close()  # workers left to the garbage collector take ten seconds to end after an error
            if lost:
                raise RuntimeError(lost) from error
            raise


def join_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the data states of all ranks into the state of the run."""
    faults = FaultGuard(1.0)
    for state in states:
        faults.absorb(state["faults"])
    cursors = {stream: cursor for state in states for stream, cursor in state["cursors"].items()}
    return states[0] | {"cursors": cursors, "faults": faults.to_dict()}


def build_loader(
    config: DataConfig,
    transform: Transform | None,
    tokenizer: Callable[..., Tensor] | None,
    *,
    rank: int = 0,
    world_size: int = 1,
    image_size: int | tuple[int, int] | None = None,
    context_length: int | None = None,
    once: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> Loader:
    """Return the training loader of one rank, after every check that is possible before the first batch.

    transform: RGB Pillow image -> (3, H, W), or a `RandomCrop`. tokenizer: list[str] -> (n, L) int64, also called with
    context_length if that is given. Synthetic data needs only image_size and context_length.
    once: for several ranks, lets one of them list, check and count the data and share its result or error.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: ranks count from 0")
    if config.workers is None:
        config = replace(config, workers=fitting_workers(config.batch_size, cores(), config.unpaired))
    source, size = once(partial(build_source, config, world_size * (config.workers or 1)))
    if config.batch_size == AUTO:
        config = replace(config, batch_size=fitting_batch(size, world_size, config.workers or 0))
    whole = config.batch_size * world_size
    if size < whole:
        what = f"one global batch of {whole} ({config.batch_size} x {world_size} ranks)"
        remedy = f"use --batch-size {max(size // world_size, 1)} or less, or more data"
        raise ValueError(f"{size} samples are fewer than {what}: {remedy}")
    decode: Callable[[Row, int], Example]
    if isinstance(source, SyntheticSource):
        if image_size is None or context_length is None:
            raise ValueError("synthetic data requires image_size and context_length: give both to build_loader")
        decode = SyntheticDecoder(image_size, context_length, config.seed, config.captions)
    elif transform is None or (tokenizer is None and config.captions):
        raise ValueError("build_loader got no transform or no tokenizer. Give both; only synthetic data needs neither")
    else:
        options = (config.seed, config.known_matches, config.captions, config.word_drop)
        decode = Decoder(transform, config.sampler, *options)
        if tokenizer is not None and context_length is not None:
            tokenizer = partial(tokenizer, context_length=context_length)
    per_epoch, epoch = -(-size // whole), multiprocessing.Value("q", 0)  # rounded up, as in OpenCLIP
    return Loader(Chunks(source, decode, tokenizer, config, rank, world_size, per_epoch, epoch), size)


def start_worker(_: int) -> None:
    """Prepare a worker process: no tokenizer threads after a fork, no stop signals."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A stop signal such as Ctrl-C often reaches the whole process group. The run still finishes its step and saves, for
    # which it needs its workers; they end with their parent.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    def end_worker(error: Exception, _: Any) -> None:
        # Python's queue would drop a chunk that it cannot send, and the run would wait forever
        say(f"a worker of the data loader cannot send its samples: {type(error).__name__}: {error}")
        os._exit(1)

    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(end_worker)


def hand_on(chunk: Any) -> Any:
    """Collate whole chunks: move tensors to shared memory here, where an error reaches the parent."""
    for value in chunk.values():
        if isinstance(value, Tensor):
            value.share_memory_()
    return chunk


def lost_worker(error: Exception, workers: DataLoader | None) -> str | None:
    """Name the worker that caused an error and the signal that ended it, in torch's words; torch itself rarely does."""
    of_worker = isinstance(error, (EOFError, OSError)) or str(error).startswith("DataLoader worker (pid(s) ")
    if workers is None or not of_worker or "Caught " in str(error):
        return None
    iterator: Any = workers._iterator
    for _ in range(20):  # a worker killed while sending closes its connection before it counts as dead
        for worker in iterator._workers:
            if worker.exitcode is not None:
                how = signal.strsignal(-worker.exitcode) if worker.exitcode < 0 else None
                end = f"is killed by signal: {how}." if how else "exited unexpectedly"
                return f"DataLoader worker (pid {worker.pid}) {end}"
        time.sleep(0.1)
    return None
