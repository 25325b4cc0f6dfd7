"""Both towers as graphs for programs without this code: ONNX, with the extra `export`, or a PyTorch program."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prolip.embedder import evaluating, own_score
from prolip.flops import image_sides
from prolip.gaussian import Gaussian, kind_of
from prolip.loading import load_model
from prolip.uncertainty.openclip import FittedCLIP, PointModel
from prolip.utils.outputs import check_output, replacing_folder

NEEDED = ("onnx", "onnxscript", "onnxruntime")
OUTPUTS = ("mean", "log_var")
FACTS = "prolip.json"  # extra file with `facts` in a PyTorch program
BATCHES = (1, 3, 64)
TOLERANCE = 1e-4
ROUNDING = 10.0  # a graph sums in another order, so it may differ by this many times the model's own rounding


def towers_of(model: nn.Module) -> Any:
    """Return the model with the towers, without the wrapper that adds or removes variances."""
    return model.model if isinstance(model, (PointModel, FittedCLIP)) else model


class Encoder(nn.Module):
    """One tower of a model, (B, ...) -> mean and log_var, (B, D) each, as a plain tuple; TypeError for other models."""

    name: str

    def __init__(self, model: Any):
        super().__init__()
        if not isinstance(model, nn.Module) or not hasattr(model, "encode_image") or not hasattr(model, "encode_text"):
            raise TypeError(f"the model is {kind_of(model)}: give the model of prolip.export.load(name)")
        self.model = model

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        z = getattr(self.model, f"encode_{self.name}")(batch)
        if not isinstance(z, Gaussian):
            raise TypeError(f"encode_{self.name} returns {kind_of(z)}, not a Gaussian. Load it with prolip.export.load")
        return z.mean, z.log_var

    def example(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Return random images, or random ids that are padded from a random position on."""
        if self.name == "image":
            return torch.randn(rows, 3, *image_sides(towers_of(self.model)), generator=generator)
        length, vocabulary, pad = text_input(self.model)
        ids = torch.randint(vocabulary, (rows, length), generator=generator)
        ends = torch.randint(1, length + 1, (rows, 1), generator=generator)
        return torch.where(torch.arange(length) < ends, ids, pad)


class ImageEncoder(Encoder):
    """Normalised images (B, 3, H, W) -> mean and log_var, (B, D) each."""

    name = "image"


class TextEncoder(Encoder):
    """Token ids (B, context) int64 -> mean and log_var, (B, D) each."""

    name = "text"


def text_input(model: nn.Module) -> tuple[int, int, int]:
    """Return context length, vocabulary size and padding of a model's texts."""
    inner = towers_of(model)
    tower = getattr(inner, "text", inner)  # OpenCLIP's first models have the text parts next to the image tower
    vocabulary = max(m.num_embeddings for m in tower.modules() if isinstance(m, nn.Embedding))
    pad = getattr(inner, "pad_token_id", getattr(tower, "pad_id", 0))
    return int(inner.context_length), getattr(inner, "vocab_size", vocabulary), int(pad or 0)


def load(model: str, pretrained: str | None = None) -> nn.Module:
    """Return a model by name as `Embedder.load` does; a `PointModel` if its method has no Gaussians."""
    network = load_model(model, pretrained, None).network.eval()
    return network if isinstance(network, PointModel) or own_score(network)[1] else PointModel(network)


def export_program(encoder: Encoder) -> torch.export.ExportedProgram:
    """Export a tower by `torch.export`, for any number of rows; ValueError unless its model is in float32 on a CPU."""
    kinds = {(p.dtype, p.device.type) for p in encoder.model.parameters()}
    if kinds != {(torch.float32, "cpu")}:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"the model's weights are {found}: export create_model(..., precision='fp32', device='cpu')")
    example, rows = encoder.example(2), torch.export.Dim("batch")  # an example of one row would fix the batch
    try:
        with evaluating(encoder, "cpu"):
            return torch.export.export(encoder, (example,), dynamic_shapes=({0: rows},), strict=False)
    except Exception as error:  # a foreign tower that branches on values
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        remedy = "store embeddings instead with prolip eval tasks --save-features"
        raise ValueError(f"torch.export cannot make a graph of the {encoder.name} tower ({why}): {remedy}") from error


def write_graphs(model: nn.Module, folder: str | Path, format: str, write: Callable[[Any, Path], None]) -> dict:
    """Write both encoders into a folder in one step and keep its other files; return name -> file."""
    names = {encoder: f"{encoder.name}.{format}" for encoder in (ImageEncoder(model), TextEncoder(model))}
    check_output(folder, folder=True, size=sum(p.nbytes for p in model.parameters()))
    with replacing_folder(Path(folder), kept=lambda name: not name.startswith(tuple(names.values()))) as place:
        for encoder, name in names.items():
            write(encoder, place / name)
    return {encoder.name: Path(folder) / name for encoder, name in names.items()}


def export_onnx(model: nn.Module, folder: str | Path) -> dict[str, Path]:
    """Write image.onnx and text.onnx into a folder, with `facts` as metadata; return name -> file."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ImportError(f"ONNX needs {', '.join(missing)}: pip install {' '.join(missing)}")

    def write(encoder: Encoder, path: Path) -> None:
        with PlainAttention():
            graph = export_program(encoder)
        names: dict[str, Any] = {"input_names": [encoder.name], "output_names": list(OUTPUTS)}
        program = torch.onnx.export(graph, dynamo=True, verbose=False, **names)
        assert program is not None
        for value in (value for node in program.model.graph for value in node.outputs):
            if value.name in OUTPUTS and not value.is_graph_output():  # such as the mean of a pooling tower
                value.name = f"{value.name}_inside"
        program.model.metadata_props["prolip"] = json.dumps(facts(model))
        program.save(path)

    return write_graphs(model, folder, "onnx", write)


class PlainAttention(TorchFunctionMode):
    """Mode in which attention is its products and softmax, because torch.onnx.export splits a fused one badly."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return torch._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
        return func(*args, **(kwargs or {}))


def export_pt2(model: nn.Module, folder: str | Path) -> dict[str, Path]:
    """Write image.pt2 and text.pt2, which `torch.export.load` reads without this code; return name -> file."""

    def write(encoder: Encoder, path: Path) -> None:
        whole = io.BytesIO()  # PyTorch's own writer ends the process if a disk is full
        torch.export.save(export_program(encoder), whole, extra_files={FACTS: json.dumps(facts(model))})
        path.write_bytes(whole.getbuffer())

    return write_graphs(model, folder, "pt2", write)


def facts(model: Any) -> dict:
    """Return what a caller needs in addition to the graphs: pixels, context, use of variances, and the score."""
    inner = towers_of(model)
    score, probabilistic = own_score(model if isinstance(model, FittedCLIP) else inner)
    length, _, pad = text_input(model)
    found = {"preprocess": getattr(inner.visual, "preprocess_cfg", {}), "context_length": length, "pad_token_id": pad}
    if score.name in ("csd", "mean"):
        found |= {"logit_scale": score.scale, "logit_bias": score.bias}
    return found | {"probabilistic": probabilistic and not isinstance(model, PointModel), "score": score.to_dict()}


def runner(file: Path, name: str) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a written graph as a function of a batch."""
    if file.suffix == ".pt2":
        return torch.export.load(file).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> Sequence[Tensor]:
        try:
            return [torch.from_numpy(out) for out in session.run(OUTPUTS, {name: x.numpy()})]
        except Exception as error:  # onnxruntime's errors have no common class
            why = str(error).strip().splitlines()[0][:200]
            remedy = "export this model with --format pt2 instead"
            raise ValueError(f"onnxruntime cannot run {file} with {len(x)} rows ({why}): {remedy}") from error

    return run


def largest_differences(model: nn.Module, files: dict[str, Path], batches: Sequence[int] = BATCHES) -> dict[str, float]:
    """Return the largest |file - model| / max(1, |model|, ROUNDING r / TOLERANCE) of each tower, both outputs, all
    batches, random inputs. r: largest |model - model in float64| of the output; a narrow kernel of a fit amplifies it.
    """
    found, generator = {}, torch.Generator().manual_seed(0)
    exact = cache(lambda: copy.deepcopy(model).double())  # only made for a large difference
    for encoder in (ImageEncoder(model), TextEncoder(model)):
        run, worst = runner(files[encoder.name], encoder.name), 0.0
        for rows in batches:
            x = encoder.example(rows, generator)
            with evaluating(encoder, "cpu"):
                outputs, expected = run(x), encoder(x)
            for place, (a, b) in enumerate(zip(outputs, expected)):
                apart, size = difference(a, b), b.abs().clamp(min=1)
                if (apart / size).max() > TOLERANCE:
                    with evaluating(twin := type(encoder)(exact()), "cpu"):
                        c = twin(x.double() if x.is_floating_point() else x)[place]
                    size = size.clamp(min=ROUNDING * float(difference(b, c).max()) / TOLERANCE)
                worst = float(torch.maximum(torch.tensor(worst), (apart / size).max()))  # keeps NaN
        found[encoder.name] = worst
    return found


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|, 0 for equal infinities, as the log_var of points."""
    return torch.where(a == b, 0.0, (a - b).abs())


WAYS = {"onnx": export_onnx, "pt2": export_pt2}  # format -> its writer
