"""Parts of `gpu.py`: a training step against SigLIP's and the device's peak, and the loader that feeds it."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tarfile
from io import BytesIO
from pathlib import Path

import torch
from gpu_kit import Kit


def flops_of(name: str, rows: int) -> float:
    """Return the model FLOPs of a sample in a ProLIP step, forward and backward."""
    from prolip.flops import flops_per_sample
    from prolip.methods.prolip import ProLIPConfig, ProLIPObjective
    from prolip.models.prolip import ProLIP
    from prolip.models.registry import get_model_config

    with torch.device("meta"):
        model = ProLIP(get_model_config(name)[0])
    return flops_per_sample(model, ProLIPObjective.encoder_passes(ProLIPConfig(), rows, model), rows)


def step(kit: Kit) -> None:
    """Time ProLIP's step against SigLIP's on the same towers, eager and compiled: ratio, samples/s, MFU."""
    from prolip.flops import peak_of

    model = "ProLIP-ViT-test" if kit.rehearse else "ProLIP-ViT-B-16"
    peak = None if kit.rehearse else peak_of(torch.cuda.get_device_name(kit.device))
    for how in ("eager", "compiled"):
        for batch in (8,) if kit.rehearse else (512, 256, 128):
            kit.begin(f"{model}, batch {batch}, bf16, {how}")
            try:
                times = step_times(kit, model, batch, compile=how == "compiled" and not kit.rehearse)
                break
            except torch.OutOfMemoryError as error:
                kit.row(f"batch {batch}, {how}", f"out of memory: {str(error).splitlines()[0]}")
            gc.collect()
            torch.cuda.empty_cache()
        else:
            raise RuntimeError("no batch fitted into the device's memory")
        taken = statistics.median(times["prolip"])
        rate, per_sample = batch / taken, flops_of(model, batch)
        for name in times:
            kit.row(f"{name} step, {how}, batch {batch}", f"{1e3 * statistics.median(times[name]):.1f} ms")
        kit.row(
            f"ProLIP step, {how}",
            f"{rate:,.1f} samples/s, {per_sample / 1e9:,.1f} GFLOP a sample, {rate * per_sample / 1e12:,.1f} TFLOP/s",
        )
        ratio = statistics.median(a / b for a, b in zip(times["prolip"], times["siglip"]))
        record = kit.speed if how == "compiled" else lambda what, _, figure, **__: kit.row(what, figure)
        record(f"ProLIP step / SigLIP step, {how}", ratio, f"{ratio:.3f}", most=1.08)
        if peak is not None:
            mfu = rate * per_sample / peak
            record(f"MFU of the ProLIP step, {how}", mfu, f"{mfu:.3f} of {peak / 1e12:,.1f} TFLOP/s", least=0.4)
        elif how == "compiled":
            kit.write({"what": "MFU", "figure": "the device's peak is not known", "target": ">= 0.4", "met": None})
        kit.write({"samples_per_second": rate})


def step_times(kit: Kit, model: str, batch: int, compile: bool) -> dict[str, list[float]]:
    """Return the seconds of both steps in turn, as `bench_step.main` measures them."""
    from bench.train import step as bench_step
    from training.model import attention_for

    options = argparse.Namespace(
        model=model, batch_size=batch, only=["prolip"], precision="bf16", compile=compile, device=str(kit.device)
    )
    with attention_for("amp_bf16", kit.device):
        steps = bench_step.build_steps(options)
        times = bench_step.measure(steps, 2 if kit.rehearse else 10, kit.device)
    if kit.device.type == "cuda":
        kit.row(f"peak memory of both models, batch {batch}", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    del steps
    gc.collect()
    if kit.device.type == "cuda":
        torch.cuda.empty_cache()
    return times


def write_shards(folder: Path, shards: int, samples: int, distinct: int) -> str:
    """Write shards of 256-pixel JPEGs with captions, and return their address."""
    from bench.train.loader import picture

    files = [picture(256, 256, seed) for seed in range(distinct)]
    for number in range(shards):
        with tarfile.open(folder / f"{number:03d}.tar", "w") as archive:
            for row in range(number * samples, (number + 1) * samples):
                for end, data in (("jpg", files[row % distinct]), ("txt", f"an image, number {row}".encode())):
                    member = tarfile.TarInfo(f"{row:07d}.{end}")
                    member.size = len(data)
                    archive.addfile(member, BytesIO(data))
    return f"{folder}/{{000..{shards - 1:03d}}}.tar"


def loader(kit: Kit) -> None:
    """Compare samples/s of the training loader on all cores, counted as in slurm/measure.py, with the step's."""
    import measure  # of slurm/

    from prolip.data.config import fitting_workers
    from prolip.utils.threads import cores

    shards, samples, distinct = (2, 16, 2) if kit.rehearse else (2 * cores(), 128, 64)
    kit.begin(f"{shards} shards of {samples} JPEGs, 256 x 256 pixels")
    address = write_shards(kit.folder, shards, samples, distinct)
    batch = 8 if kit.rehearse else 512
    # OpenCLIP's own model: images of 224 pixels, and a tokenizer that needs no download
    name = "ProLIP-ViT-test" if kit.rehearse else "ViT-B-16"
    flags = [
        "--train-data",
        address,
        "--model",
        name,
        "--batch-size",
        str(batch),
        "--dataset-resampled",
        "--train-num-samples",
        "1000000",
    ]
    if kit.rehearse:
        flags += ["--workers", "1"]
        measure.WARM, measure.MEASURED = 0.1, 0.3
    workers = 1 if kit.rehearse else fitting_workers(batch, cores())
    kit.begin(f"the loader, batch {batch}, {workers} processes on {cores()} cores")
    os.environ["GPUS"] = "1"
    rate = measure.loader_rate(0, 0, 1, flags)
    kit.row("loader", f"{rate:,.0f} samples/s with {workers} processes on {cores()} cores, {rate / workers:,.0f} each")
    if kit.step_rate:
        ratio = rate / kit.step_rate
        kit.speed(
            "loader / ProLIP step", ratio, f"{ratio:.2f} (the step takes {kit.step_rate:,.0f} samples/s)", least=1.0
        )
    else:
        kit.row("loader / ProLIP step", "not known: the part `step` has left no rate")
