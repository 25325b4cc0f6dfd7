"""Check a run before all nodes start: python slurm/preflight.py RANKS [flags of training.main]

Prints the packages, then checks the flags for RANKS processes, the initial weights, the tokenizer, and the first and
last shard. Exits with 2 and one line on an error: one process then fails in seconds, instead of all.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions

import torch

from prolip.data.captions import Selector
from prolip.data.reading.shards import expand_shards
from prolip.data.reading.stream import ReadPolicy
from prolip.data.reading.tar import read_shard, refuse_unusable, survey
from prolip.data.samples import Raw, caption_parts, image_bytes, is_selected
from prolip.data.sources import source_of
from prolip.factory import find_weights
from prolip.utils.fields import AUTO
from prolip.utils.flags import FlagError
from prolip.utils.messages import naming
from prolip.utils.secrecy import redacted, scrub
from training.config import Config
from training.defaults import rows_per_rank
from training.health.errors import explain
from training.main import parse
from training.model import build_tokenizer

#: Gives up on a dead address within half a minute.
POLICY = ReadPolicy(connect_timeout=5, read_timeout=10, retries=2, backoff_limit=2)


def packages() -> list[str]:
    """List name==version of all installed packages, and torch's CUDA version."""
    found = sorted({f"{item.metadata['Name']}=={item.version}" for item in distributions()}, key=str.lower)
    return [f"python {sys.version.split()[0]}, torch for CUDA {torch.version.cuda}", *found]


def check_batch(config: Config, ranks: int) -> None:
    """Raise FlagError or ValueError unless the global batch is divisible by ranks, micro-batches and workers."""
    rows = rows_per_rank(config, ranks)
    workers = config.data.workers or 1
    if rows != AUTO and (rows // config.run.accum_freq) % workers:  # "auto" is always divisible
        raise ValueError(f"a batch of {rows // config.run.accum_freq} is not divisible by {workers} workers")


def check_shards(config: Config) -> str:
    """Read a sample of the first and of the last shard; returns a line for the log. FlagError if one is unreadable."""
    source = source_of(config.data)
    if source.kind != "shards":
        return f"{redacted(str(source))}: not read before the start"
    with naming("--train-data"):
        shards = expand_shards(source.address, config.data.train_data_upsampling_factors)
    urls = [shard.url for shard in shards]
    captions, selector = config.data.sampler, Selector.parse(config.data.select)

    def check_sample(raw: Raw) -> None:
        image_bytes(raw)
        if is_selected(raw, selector) and config.data.captions:
            captions.draw(*caption_parts(raw, captions), seed=0)

    for url in dict.fromkeys((urls[0], urls[-1])):
        try:
            sample = next(iter(read_shard(url, policy=POLICY)), None)
        except Exception as error:  # every file system has its own exceptions
            raise FlagError(
                f"{url} cannot be read from this node ({error}): fix --train-data (SHARDS), or the credentials and "
                "proxies of the job's environment"
            ) from None
        if sample is None:
            raise FlagError(f"--train-data: {survey([url], POLICY)}")
        if config.data.max_bad_fraction < 1:
            with naming("--train-data"):
                refuse_unusable([url], check_sample, POLICY)
        print(
            f"{redacted(url)}: {sample['__key__']} with {', '.join(k for k in sample if k[:2] != '__')}; "
            f"captions are drawn from {', '.join(captions.fields)}"
        )
    return f"{len(urls)} shards, {redacted(urls[0])} to {redacted(urls[-1])}"


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if not arguments or not arguments[0].isdecimal():
        print("usage: python slurm/preflight.py RANKS [flags of python -m training.main]", file=sys.stderr)
        return 2
    print("\n".join(packages()))
    try:
        ranks, config = int(arguments[0]), parse(arguments[1:])
        check_batch(config, ranks)
        if config.model.pretrained:
            find_weights(config.model.model, config.model.pretrained)
        build_tokenizer(config)
        print(check_shards(config))
    except Exception as error:
        text = explain(error)
        if text is None:
            raise
        print(f"error: {scrub(text)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
