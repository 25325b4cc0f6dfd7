"""Declared needs of an objective, which the run provides: captions, a teacher, steps, ranks and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from training_runs import words

import prolip
from prolip.methods.base import Method, Needs, Objective, logit_scale_and_bias
from prolip.models.checkpoint import save_pretrained
from prolip.scores import CSDScore
from training.config import build_config
from training.loop import train
from training.main import build_parser, main
from training.parallel import World
from training.run import build


@dataclass(kw_only=True)
class ToyConfig:
    """A method with needs that the others do not have."""

    wanted: int = field(default=1, metadata={"help": "captions"})
    teacher: str | None = field(default=None, metadata={"help": "whom to learn from"})


class ToyObjective(Objective):
    """Images near the means of their texts, and near those of a teacher."""

    statistics = ("scale",)
    details = ("bias",)

    @classmethod
    def needs(cls, config: ToyConfig) -> Needs:
        return Needs(data={"captions": config.wanted}, teacher=config.teacher)

    def embed(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        reps = {"image": self.encode("image", batch["image"]).mean} | logit_scale_and_bias(self.model)
        if "text" in batch:
            reps["text"] = self.encode("text", batch["text"].flatten(0, -2)).mean
        if self.context.teacher is not None:
            reps["wanted"] = self.context.teacher.encode_image(batch["image"]).mean
        return reps

    def terms(self, reps: dict[str, torch.Tensor], batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        image, text = reps["image"], reps.get("text", reps.get("wanted"))
        near = (image.unsqueeze(1) - text.unflatten(0, (len(image), -1))).square().mean()
        return {"loss": near + 0 * (reps["scale"] + reps["bias"]), "scale": reps["scale"], "bias": reps["bias"]}


@pytest.fixture
def toy(monkeypatch):
    own = {"toy": Method(ToyConfig, ToyObjective, CSDScore)}
    monkeypatch.setattr("prolip.methods.further_methods", lambda: own)


def make(tmp_path, **objective):
    config = build_config(
        "toy",
        {
            "model": {"model": "ProLIP-ViT-test"},
            "optim": {"warmup": 0},
            "data": {"batch_size": 8, "workers": 0, "dataset_type": "synthetic", "train_num_samples": 24},
            "run": {"precision": "fp32", "max_steps": 3, "device": "cpu", "seed": 5},
            "objective": objective,
        },
    )
    return build(config, World(), tmp_path / "run", rows=8)


@pytest.mark.parametrize("captions", [1, 3])
def test_captions_are_as_many_as_the_objective_declares(toy, tmp_path, captions):
    run = make(tmp_path, wanted=captions)
    batch = next(iter(run.data.loader))
    assert batch["text"].shape[:-1] == ((8,) if captions == 1 else (8, captions))
    assert run.config.data.captions == captions and "captions" not in run.config.to_dict()["data"]
    assert not {"--captions", "--known-matches", "--teacher-model"} & set(build_parser("toy").flags())
    context = run.trained.objective.context
    assert (context.seed, context.rank, context.world_size, context.total_steps) == (5, 0, 1, 3)
    train(run)
    run.outputs.log.close()


def test_a_teacher_reaches_the_objective_frozen_and_is_no_part_of_it(toy, tmp_path):
    save_pretrained(prolip.create_model("ProLIP-ViT-test"), tmp_path / "teacher")
    run = make(tmp_path, wanted=0, teacher=f"local-dir:{tmp_path / 'teacher'}")
    assert "text" not in next(iter(run.data.loader))
    objective = run.trained.objective
    teacher = objective.context.teacher
    before = [p.clone() for p in teacher.parameters()]
    names = {name for name, _ in objective.named_parameters()} | objective.state_dict().keys()
    assert not teacher.training and all(name.startswith("model.") for name in names)
    train(run)
    run.outputs.log.close()
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))


def test_the_line_of_progress_shows_what_the_objective_wants_shown(toy, tmp_path, capsys):
    assert main(words(tmp_path, "shown", "--method", "toy", "--max-steps", 1, "--warmup", 0)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "samples/s" in line)
    assert " | scale " in line and "bias" not in line
    assert '"bias": -10.0' in (tmp_path / "shown" / "metrics.jsonl").read_text()
