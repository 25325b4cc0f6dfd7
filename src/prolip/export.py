"""Both towers for programs without PyTorch: python -m prolip.export local-dir:runs/demo/model runs/demo/onnx

Each becomes a graph of its own with a dynamic batch, whose outputs are `mean` and `log_var`. The command needs the
extra `export`; what it wrote is run in onnxruntime beside the model, and the largest difference printed. docs/export.md
has more.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from prolip.evaluation.model import evaluating
from prolip.models.prolip import ProLIP
from prolip.models.weights.checkpoint import CheckpointError
from prolip.utils import console
from prolip.utils.outputs import check_output

NEEDED = ("onnx", "onnxscript", "onnxruntime")
OUTPUTS = ("mean", "log_var")
BATCHES = (1, 3, 64)
TOLERANCE = 1e-4


class ImageEncoder(nn.Module):
    """Normalised images (B, 3, H, W) -> mean and log_var, (B, D) each, as a plain tuple."""

    name = "image"

    def __init__(self, model: ProLIP):
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = self.model.encode_image(image)
        return mean, log_var

    def example(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Random images."""
        return torch.randn(rows, 3, *self.model.visual.image_size, generator=generator)


class TextEncoder(nn.Module):
    """Token ids (B, context) int64 -> mean and log_var, (B, D) each, as a plain tuple."""

    name = "text"

    def __init__(self, model: ProLIP):
        super().__init__()
        self.model = model

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = self.model.encode_text(text)
        return mean, log_var

    def example(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Random ids, padded from a random place on."""
        length, pad = self.model.context_length, self.model.pad_token_id
        ids = torch.randint(self.model.vocab_size, (rows, length), generator=generator)
        ends = torch.randint(1, length + 1, (rows, 1), generator=generator)
        return torch.where(torch.arange(length) < ends, ids, pad)


def export_program(encoder: ImageEncoder | TextEncoder) -> torch.export.ExportedProgram:
    """A tower by `torch.export`, for any number of rows. Raises ValueError unless its model is in float32 on a CPU."""
    kinds = {(p.dtype, p.device.type) for p in encoder.model.parameters()}
    if kinds != {(torch.float32, "cpu")}:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"the model's weights are {found}: export create_model(..., precision='fp32', device='cpu')")
    example, rows = encoder.example(2), torch.export.Dim("batch")  # an example of one row would fix the batch
    with evaluating(encoder, "cpu"):
        return torch.export.export(encoder, (example,), dynamic_shapes=({0: rows},), strict=False)


def export_onnx(model: ProLIP, folder: str | Path) -> dict[str, Path]:
    """Write image.onnx and text.onnx into a folder, with what their inputs go through as metadata; name -> file.

    Raises ImportError where the extra `export` is not installed, ValueError where the folder cannot be written.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ImportError(f"ONNX needs {', '.join(missing)}: pip install {' '.join(missing)}")
    check_output(folder, folder=True)
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = {}
    for encoder in (ImageEncoder(model), TextEncoder(model)):
        program = torch.onnx.export(
            export_program(encoder), dynamo=True, verbose=False, input_names=[encoder.name], output_names=list(OUTPUTS)
        )
        assert program is not None
        program.model.metadata_props["prolip"] = json.dumps(facts(model))
        files[encoder.name] = Path(folder) / f"{encoder.name}.onnx"
        program.save(files[encoder.name])
    return files


def facts(model: ProLIP) -> dict:
    """What a caller needs beside the graphs: pixels, context, and the logit's scale and bias."""
    return {
        "preprocess": getattr(model.visual, "preprocess_cfg", {}),
        "context_length": model.context_length, "pad_token_id": model.pad_token_id,
        "logit_scale": model.logit_scale.exp().item(), "logit_bias": model.logit_bias.item(),
    }  # fmt: skip


def largest_differences(model: ProLIP, files: dict[str, Path], batches: Sequence[int] = BATCHES) -> dict[str, float]:
    """Largest |onnxruntime - model| of each tower over both outputs and all batches, on random inputs."""
    import onnxruntime

    found, generator = {}, torch.Generator().manual_seed(0)
    for encoder in (ImageEncoder(model), TextEncoder(model)):
        session = onnxruntime.InferenceSession(files[encoder.name], providers=["CPUExecutionProvider"])
        worst = 0.0
        for rows in batches:
            x = encoder.example(rows, generator)
            outputs = session.run(OUTPUTS, {encoder.name: x.numpy()})
            with evaluating(encoder, "cpu"):
                wanted = encoder(x)
            gaps = [(torch.from_numpy(a) - b).abs().max() for a, b in zip(outputs, wanted)]
            worst = float(torch.stack([torch.tensor(worst), *gaps]).max())  # NaN stays, too
        found[encoder.name] = worst
    return found


def main(args: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m prolip.export", description="Write both towers as ONNX.")
    parser.add_argument("model", help="local-dir:<folder> or hf-hub:<org/name>, or a name for --pretrained")
    parser.add_argument("folder", help="where image.onnx and text.onnx go")
    parser.add_argument("--pretrained", help="weights for a name; 'random' for untrained ones")
    options = parser.parse_args(args)
    from prolip.evaluation.loading import RANDOM, check_weights
    from prolip.factory import create_model

    random = options.pretrained == RANDOM
    try:
        if random:
            check_weights(options.model, RANDOM, ours=True)  # not where a model has weights of its own
        model = create_model(options.model, None if random else options.pretrained, require_pretrained=not random)
        files = export_onnx(model, options.folder)
    except (ValueError, OSError, ImportError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differences = largest_differences(model, files)
    for name, worst in differences.items():
        print(f"{files[name]}: at most {worst:.1e} from the model, batches of {', '.join(map(str, BATCHES))}")
    if all(worst <= TOLERANCE for worst in differences.values()):
        return 0
    print(f"error: the graphs differ from the model by more than {TOLERANCE:g}: do not use them", file=sys.stderr)
    return 1


if __name__ == "__main__":
    console.command(main)
