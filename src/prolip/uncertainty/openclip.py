"""An OpenCLIP model with fitted variances: its unchanged towers, with a Gaussian for every embedding."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from prolip.gaussian import Gaussian, as_points
from prolip.scores import Score, TrueMatchScore
from prolip.uncertainty.heads import Parts, VarianceHead
from prolip.uncertainty.novelty import Novelty, Widths
from prolip.uncertainty.readings import Readings, ambiguity_of
from prolip.utils.outputs import replacing

FILE = "uncertainty.safetensors"  # the file next to OpenCLIP's own configuration and weights


class PointModel(nn.Module):
    """A deterministic OpenCLIP model whose embeddings are points: Gaussians with unit means and log_var = -inf."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def encode_image(self, image: Tensor) -> Gaussian:
        return as_points(self.model.encode_image(image))  # type: ignore[operator]

    def encode_text(self, text: Tensor) -> Gaussian:
        return as_points(self.model.encode_text(text))  # type: ignore[operator]


class FittedCLIP(nn.Module):
    """An OpenCLIP model whose unit means get variances from two heads, with the score of the same fit."""

    def __init__(  # noqa: PLR0913, PLR0917 (its parts, in the order of `Fitted`)
        self,
        model: nn.Module,
        image: VarianceHead,
        text: VarianceHead,
        score: Score,
        novelty: Novelty | None = None,  # none for a tower without blocks
        text_novelty: Novelty | None = None,
        readings: Readings | None = None,  # none in an older model
    ):
        super().__init__()
        self.model, self.image, self.text, self.score = model, image, text, score
        self.novelty, self.text_novelty, self.readings = novelty, text_novelty, readings
        image.rows.fill_(getattr(score, "texts", 0))
        text.rows.fill_(getattr(score, "images", 0))

    def encode_image(self, image: Tensor, normalize: bool = True) -> Gaussian:
        return self._gaussian(self.model.encode_image(image), self.image, normalize)  # type: ignore[operator]

    def encode_text(self, text: Tensor, normalize: bool = True) -> Gaussian:
        return self._gaussian(self.model.encode_text(text), self.text, normalize, text)  # type: ignore[operator]

    def ambiguity(self, image: Tensor) -> Tensor:
        """Return nats of ambiguity of pixels (B, 3, H, W), (B,)."""
        return ambiguity_of(self, image)

    @staticmethod
    def _gaussian(features: Tensor, head: VarianceHead, normalize: bool, ids: Tensor | None = None) -> Gaussian:
        unit = F.normalize(features.float(), dim=-1)
        return Gaussian(unit if normalize else features.float(), head.log_var(unit, ids).contiguous())

    def save(self, folder: str | os.PathLike) -> Path:
        """Write the heads, the score and novelty into a folder of the OpenCLIP model."""
        path = Path(folder) / FILE
        parts = {side: asdict(head.ambiguity.parts) for side, head in (("image", self.image), ("text", self.text))}
        written: dict[str, nn.Module] = {"image": self.image, "text": self.text}
        for name, novelty in (("novelty", self.novelty), ("text_novelty", self.text_novelty)):
            if novelty is not None:
                parts[name], written[name] = asdict(novelty.widths), novelty
        if self.readings is not None:
            parts["readings"], written["readings"] = self.readings.sizes, self.readings
        states = {part: module.state_dict() for part, module in written.items()}
        tensors = {f"{part}.{name}": x.contiguous() for part, state in states.items() for name, x in state.items()}
        facts = {"parts": json.dumps(parts), "score": json.dumps(self.score.to_dict())}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata=facts)
        return path


def has_variances(folder: str | os.PathLike) -> bool:
    """Return True if a folder with an OpenCLIP model has fitted variances."""
    return (Path(folder) / FILE).is_file()


def with_variances(model: nn.Module, folder: str | os.PathLike) -> FittedCLIP:
    """Return the model of a folder with its fitted variances. ValueError for a file without them."""
    path = Path(folder) / FILE
    try:
        with safe_open(path, framework="pt") as file:
            facts = {name: json.loads(text) for name, text in (file.metadata() or {}).items() if name != "format"}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        made: dict[str, nn.Module] = {side: VarianceHead(Parts(**facts["parts"][side])) for side in ("image", "text")}
        for name in {"novelty", "text_novelty"} & facts["parts"].keys():  # older files have none
            made[name] = Novelty(Widths(**facts["parts"][name]))
        if "readings" in facts["parts"]:
            made["readings"] = Readings(**facts["parts"]["readings"])
        for part, module in made.items():
            own = {name.partition(".")[2]: x for name, x in tensors.items() if name.startswith(f"{part}.")}
            module.load_state_dict(own)
        settings = {name: value for name, value in facts["score"].items() if name != "name"}
        return FittedCLIP(model, score=TrueMatchScore(**settings), **made)  # type: ignore[arg-type]
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        again = "fit them again with prolip uncertainty"
        raise ValueError(f"{path} is not a file of fitted variances ({error}): {again}") from error
