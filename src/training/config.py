"""Settings of a run: keyword-only dataclasses, validated on creation. A saved config can start the run again."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from prolip.data.augment.affine import AugmentConfig
from prolip.data.loader import DataConfig
from prolip.data.reading.named import KINDS
from prolip.methods import find_method
from prolip.random import VERSIONS
from prolip.utils.documents import read_json, read_yaml
from prolip.utils.fields import AUTO, option
from prolip.utils.flags import FlagError, build, check_alone, check_range, did_you_mean, flag_of
from prolip.utils.messages import appearance_of
from prolip.utils.secrecy import hide, redacted, tag
from training.model_options import ModelConfig

DEFAULT_EPOCHS, LEAST_STEPS = 32, 300
#: Section -> derived setting -> the setting that determines it.
DERIVED = {"data": {f.name: f.metadata["follows"] for f in dataclasses.fields(DataConfig) if "follows" in f.metadata}}
#: Settings of one invocation, not of the run: the saved config omits them.
INVOCATION = ("resume", "overwrite", "traceback", "renewed_addresses")
#: Section and setting of a config that an earlier version saved -> the setting's name today.
RENAMED = {("run", "output_dir"): "output"}
DROPPED = {("model", "init_uncertainty")}  # settings of earlier versions that no longer exist
REDACTED = "redacted"  # key of a saved config: hashes of the settings that it holds without their secrets
SHARE = r"\d+(\.\d+)?%"  # pattern of a share of the run's steps
Precision = Literal["fp32", "amp_bf16", "amp_fp16"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimiser, learning-rate schedule, clipping, averaging. `auto`: the paper's value (B.1), or for fine-tuning."""

    opt: str = option("adamw", "optimiser, a name of timm: adamw, adamp, muon, lamb, lion, sgd, ...")
    lr: float = option(AUTO, "peak learning rate; auto: 5e-4, from trained weights 1.5e-4 x 192/D", also=AUTO)
    beta1: float = option(0.9, "decay of the first moment")
    beta2: float = option(AUTO, "decay of the second moment; auto: 0.95, from trained weights 0.98", also=AUTO)
    eps: float = option(1e-8, "added to the root of the second moment")
    momentum: float | None = option(None, "momentum of optimisers that have one (sgd, muon)")
    wd: float = option(0.2, "weight decay of matrices; biases, norms, scalars, tokens and positions have none")
    warmup: int = option("5%", "linear warm-up, in steps or as a share of all steps", also=SHARE)
    lr_scheduler: Literal["cosine", "const", "wsd", "step"] = option("cosine", "learning rate after the warm-up")
    lr_min_ratio: float = option(0.0, "last learning rate of cosine and wsd, as a share of --lr")
    decay_fraction: float = option(0.2, "share of all steps in which wsd decays")
    lr_milestones: tuple[float, ...] = option((), "points at which step lowers the learning rate, shares of all steps")
    lr_step_factor: float = option(0.1, "factor of the learning rate at each --lr-milestones")
    layer_decay: float | None = option(None, "learning-rate decay per block: --lr * this ** (depth from the end)")
    image_lr_mult: float = option(1.0, "learning rate of the image backbone, as a multiple of --lr; heads have --lr")
    text_lr_mult: float = option(1.0, "learning rate of the text backbone, as a multiple of --lr; heads have --lr")
    image_freeze_epochs: float = option(0.0, "freeze the image backbone for the first N epochs (fractions allowed)")
    text_freeze_epochs: float = option(0.0, "freeze the text backbone for the first N epochs (fractions allowed)")
    unfreeze_warmup_epochs: float = option(0.0, "linear warm-up of a backbone after its freeze, in epochs")
    logit_lr_mult: float = option(1.0, "learning rate of logit scale and bias, as a multiple of --lr")
    grad_clip_norm: float | None = option(AUTO, "largest gradient norm; auto: 1 from trained weights", also=AUTO)
    ema_decay: float | None = option(None, "average the weights with this decay (warmed up); saved as model_ema")
    swa_epochs: int = option(0, "average the weights at the ends of the last N epochs (SWA); saved as model_swa")

    def __post_init__(self) -> None:
        from timm.optim import list_optimizers  # slow, and --help does not need it

        known = [str(name) for name in list_optimizers()]
        if self.opt.lower() not in known:
            remedy = did_you_mean(self.opt.lower(), known, "timm.optim.list_optimizers() lists all names")
            raise FlagError(f"--opt {self.opt} is not an optimiser of timm: {remedy}")
        check_range(self, "lr", "eps", above=True)
        tower = "; --lock-image and --lock-text freeze a tower"
        check_range(self, "image_lr_mult", "text_lr_mult", above=True, remedy=tower)
        epochs = ("image_freeze_epochs", "text_freeze_epochs", "unfreeze_warmup_epochs", "swa_epochs")
        check_range(self, "wd", "logit_lr_mult", "warmup", *epochs)
        if isinstance(self.warmup, str) and float(self.warmup.removesuffix("%")) >= 100:
            raise FlagError(f"--warmup {self.warmup}: give a share below 100%, such as 5%, or steps")
        check_range(self, "beta1", "beta2", "lr_min_ratio", "momentum", "ema_decay", most=1, below=True)
        check_range(self, "layer_decay", "decay_fraction", "lr_step_factor", most=1, above=True)
        check_range(self, "grad_clip_norm", above=True, remedy="; remove it for no clipping")
        if (self.lr_scheduler == "step") != bool(self.lr_milestones):
            raise FlagError("--lr-scheduler step and --lr-milestones need each other: give both (0.6) or neither")
        if [*self.lr_milestones] != sorted({x for x in self.lr_milestones if 0 < x < 1}):
            given = " ".join(map(str, self.lr_milestones))
            raise FlagError(f"--lr-milestones {given}: give increasing shares of the run below 1, such as 0.6 0.8")
        if self.unfreeze_warmup_epochs and not (self.image_freeze_epochs or self.text_freeze_epochs):
            remedy = "give --image-freeze-epochs or --text-freeze-epochs, or --warmup for the whole model"
            raise FlagError(f"--unfreeze-warmup-epochs needs a frozen backbone: {remedy}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, precision, output folder and checkpoints of a run."""

    name: str | None = option(None, "name of the run's folder; default: model, method and start time")
    output: str = option("runs", "folder of all runs")
    epochs: int | None = option(None, f"length in epochs; default: {DEFAULT_EPOCHS}, more if below {LEAST_STEPS} steps")
    max_steps: int | None = option(None, "length of the run in optimiser steps, instead of --epochs")
    max_samples: int | None = option(None, "length of the run in samples seen, instead of --epochs")
    global_batch_size: int | None = option(None, "samples per step over all ranks, instead of --batch-size per rank")
    accum_freq: int = option(1, "micro-batches per step: equals one large batch; costs a second forward pass")
    precision: Precision = option("amp_bf16", "arithmetic of the towers; losses are fp32")
    fsdp: bool = option(False, "shard parameters, gradients and optimiser state over the ranks, instead of DDP")
    device: Literal["auto", "cuda", "cpu"] = option("auto", "accelerator; auto: CUDA if available")
    seed: int = option(0, "seed of initialisation, data order, augmentation and masked views")
    draws: Literal[1, 2] = option(VERSIONS[-1], "version of the random numbers; --resume keeps the checkpoint's")
    deterministic: bool = option(False, "use deterministic algorithms where torch has them")
    resume: str | None = option(None, "checkpoint (file or URL), latest (of --name), or auto (latest if there is one)")
    overwrite: bool = option(False, "delete the run in the folder and start again")
    renewed_addresses: bool = option(False, "accept a new login, signature or command in addresses on resume")
    save_frequency: int = option(0, "save every N epochs; 0: never by epochs")
    save_every_steps: int | None = option(None, "also save every N steps")
    save_every_samples: int | None = option(None, "also save every N samples")
    save_every_minutes: float | None = option(15.0, "also save every N minutes; none: never by time")
    keep_checkpoints: int = option(2, "keep the N newest checkpoints; 0: keep all")
    keep_every_steps: int = option(0, "also keep one checkpoint every N steps")
    checkpoint_dir: str | None = option(None, "folder or URL (s3://...) of checkpoints; default: in the run folder")
    ledger: bool = option(False, "write the sample keys of every step to ledger/ in the run folder")
    max_nonfinite: int = option(0, "skip at most N steps with non-finite loss, then abort")
    log_every_n_steps: int | None = option(None, "log every N steps; default: a tenth of the run, at most 100")
    log_every_seconds: float | None = option(10.0, "also log every N seconds; none: never by time")
    stall_seconds: float = option(600.0, "print the stacks of a rank without a step for N seconds; 0: never")
    peak_tflops: float | None = option(None, "bf16 peak of a device in TFLOP/s, for MFU; default: by its name")
    profile: int = option(0, "trace N steps of rank 0 after the first eight, in profile/ of the run folder")
    report: bool = option(True, "write report.html at the end; takes a few seconds of one core")
    wandb_project: str | None = option(None, "also log to this project of Weights & Biases (pip install wandb)")
    traceback: bool = option(False, "show the traceback of an error")

    def __post_init__(self) -> None:
        lengths = ("epochs", "max_steps", "max_samples")
        check_alone(self, lengths, "one length")
        cadences = ("log_every_n_steps", "save_every_steps", "save_every_samples")
        check_range(self, "accum_freq", "global_batch_size", *lengths, *cadences, least=1)
        kept = ("save_frequency", "keep_checkpoints", "keep_every_steps")
        check_range(self, *kept, "max_nonfinite", "profile", "stall_seconds")
        check_range(self, "seed", most=2**63, below=True)
        check_range(self, "peak_tflops", above=True)
        if self.fsdp and self.precision == "amp_fp16":
            raise FlagError("--fsdp does not support amp_fp16 (no loss scaling): use --precision amp_bf16 or fp32")
        if self.wandb_project and importlib.util.find_spec("wandb") is None:
            raise FlagError("--wandb-project needs wandb, which is missing: pip install wandb, or remove the flag")
        check_range(self, "save_every_minutes", "log_every_seconds", above=True, remedy=", or none")
        if self.keep_every_steps and not self.keep_checkpoints:
            raise FlagError("--keep-every-steps without --keep-checkpoints: give how many of the newest to keep")
        if self.name is not None and (not self.name or Path(self.name).name != self.name or self.name in (".", "..")):
            raise FlagError(f"--name {self.name!r} is not a folder name: give its parent folder as --output")
        if self.resume in ("latest", "auto") and self.name is None:
            raise FlagError(f"--resume {self.resume} without --name: give the name of the run to resume")
        if self.resume and self.overwrite:
            raise FlagError("--resume continues a run and --overwrite deletes it: give one of them")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Evaluations during and after the run, and the metric of the best model."""

    val_data: tuple[str, ...] = option(
        (),
        "test sets, KIND:ADDRESS or a recognised address: csv:FILE, images:FOLDER, shards:TARS, wds:FOLDER, "
        "coco:JSON,IMAGES, ...; emoji:TARS: the emoji corpus's evaluations",
    )
    val_names: str | None = option(None, "shards whose names are added to the gallery of the drawings of emoji:")
    val_select: str | None = option(None, "concepts to evaluate, as in --select; default: all")
    imagenet_val: str | None = option(None, "ImageNet's validation images, a folder per class: imagenet/acc1")
    coco_test: str | None = option(None, "JSON,IMAGES: Karpathy's file and COCO's image folder: coco/i2t/R@1")
    val_split: str | None = option(None, "split of --val-data with splits, instead of test; a number: share held out")
    val_frequency: int = option(0, "also evaluate every N epochs; 0: only at the end")
    val_every_steps: int | None = option(None, "also evaluate every N steps")
    val_batch_size: int = option(256, "images per rank and forward pass")
    val_precision: Precision = option("fp32", "arithmetic of evaluations; fp32 gives the metrics of prolip eval")
    best_metric: str | None = option(None, "save the model with the highest such metric to best/: imagenet/acc1")
    best_lowest: bool = option(False, "save the model with the lowest --best-metric instead")

    def __post_init__(self) -> None:
        for name in ("val_names", "val_select"):
            if getattr(self, name) and not self.emoji:
                raise FlagError(f"{flag_of(name)} without --val-data emoji:TARS: give the shards to evaluate on")
        if self.val_split and not self.val_data:
            raise FlagError("--val-split without --val-data: give --val-data (--coco-test always uses the test split)")
        if self.coco_test is not None and len(list(filter(None, self.coco_test.split(",")))) != 2:
            raise FlagError(f"--coco-test {self.coco_test!r}: give JSON,IMAGES: Karpathy's file and the image folder")
        if self.best_lowest and not self.best_metric:
            raise FlagError("--best-lowest without --best-metric: name the metric, such as imagenet/acc1")
        check_range(self, "val_frequency")
        check_range(self, "val_batch_size", "val_every_steps", least=1)

    @property
    def emoji(self) -> list[str]:
        """The shards of the emoji corpus among --val-data."""
        return [source.partition(":")[2] for source in self.val_data if source.startswith("emoji:")]

    @property
    def specs(self) -> dict[str, tuple[str, str]]:
        """Address of each test set except the corpus -> (prefix of its metrics, "" for its own name; its flag)."""
        named = {"imagenet": ("--imagenet-val", self.imagenet_val), "coco": ("--coco-test", self.coco_test)}
        chosen = {f"{word}:{place}": (word, f"{flag} {place}") for word, (flag, place) in named.items() if place}
        own = (source for source in self.val_data if not source.startswith("emoji:"))
        return chosen | {source: ("", f"--val-data {source}") for source in own}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a whole run: the method's name, and one dataclass per section."""

    method: str
    model: ModelConfig
    data: DataConfig
    augment: AugmentConfig
    optim: OptimConfig
    run: RunConfig
    val: ValidationConfig
    objective: Any

    def __post_init__(self) -> None:
        fields = dataclasses.fields(AugmentConfig)
        given = [f.name for f in fields if getattr(self.augment, f.name) != f.default and "always" not in f.metadata]
        if given and not self.model.device_augment:
            flags = ", ".join(map(flag_of, given))
            raise FlagError(f"{flags} without --device-augment: add it, or augment with --aug-cfg instead")
        in_workers = self.model.openclip_transform or self.model.aug_cfg.get("use_timm") or self.data.synthetic
        for name in ("cutout", "erase_prob"):
            if getattr(self.augment, name) and in_workers and not self.model.device_augment:
                remedy = "remove it, or remove --openclip-transform, use_timm and synthetic data"
                raise FlagError(f"{flag_of(name)} needs images that the device normalises: {remedy}")
        if any(self.augment.token_shares) and self.data.captions == 0:
            raise FlagError("this method reads no texts: remove --text-mask, --text-random and --text-delete")
        for name in ("val_frequency", "val_every_steps", "best_metric"):
            if getattr(self.val, name) and not self.evaluates:
                remedy = "give --val-data, --imagenet-val, --coco-test or --split"
                raise FlagError(f"{flag_of(name)} without a test set: {remedy}")

    @property
    def evaluates(self) -> bool:
        return bool(self.val.emoji or self.val.specs or self.data.split is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, as saved in config.json, enough to start the run again. REDACTED holds a salted hash of
        each setting with an address that may hold a secret.
        """
        values = dataclasses.asdict(self)
        for section, names in (DERIVED | {"run": INVOCATION}).items():
            for name in names:
                del values[section][name]
        if self.run.global_batch_size is not None:
            del values["data"]["batch_size"]
        values = json.loads(json.dumps(values))
        shown, hashes = redacted(values), {}
        for section, settings in values.items():
            for name, value in settings.items() if isinstance(settings, dict) else ():
                if value != shown[section][name]:
                    hashes[f"{section}.{name}"] = tag(json.dumps(value))
        return shown | ({REDACTED: hashes} if hashes else {})


def section_types(method: str | None) -> dict[str, type]:
    """Return section name -> dataclass of a method: the fields of Config. None: sections that all methods have."""
    types = get_type_hints(Config)
    try:
        types["objective"] = find_method(method).config if method else None
    except ValueError as error:
        raise FlagError(f"--{error}") from error
    for name in ("method", *(() if method else ("objective",))):
        del types[name]
    return types


def build_config(method: str, values: dict[str, dict[str, Any]]) -> Config:
    """Build the whole config from section -> setting -> value."""
    types, values = section_types(method), renewed(values)
    for section, settings in values.items():
        if section not in types:
            raise FlagError(f"a config has no section {section!r}: use method, {', '.join(types)}")
        for name, source in DERIVED.get(section, {}).items():
            if name in settings:
                raise FlagError(f"{section}.{name} follows from {source} and cannot be set: set {source}")
    hide(values)
    parts = {name: build(kind, name, values.get(name, {})) for name, kind in types.items() if name != "data"}
    data = dict(values.get("data", {}))
    if parts["run"].global_batch_size is not None:
        if "batch_size" in data:
            raise FlagError("--global-batch-size and --batch-size contradict each other: give one of them")
        data["batch_size"] = data.get("workers") or 1  # placeholder until `rows_per_rank` knows the ranks
    data |= {"seed": parts["run"].seed, **find_method(method).objective.needs(parts["objective"]).data}
    return Config(method=method, data=build(DataConfig, "data", data), **parts)


def renewed(values: dict[str, Any]) -> dict[str, Any]:
    """Return saved settings under their current names; earlier, val_data was the emoji corpus, val_tasks the others."""
    values = dict(values)
    for section, settings in values.items():
        if isinstance(settings, dict):
            found = {name: value for name, value in settings.items() if (section, name) not in DROPPED}
            values[section] = {RENAMED.get((section, name), name): value for name, value in found.items()}
    val = values.get("val")
    if isinstance(val, dict) and {"val_data", "val_tasks"} & val.keys():
        given, tasks = val.get("val_data") or [], val.pop("val_tasks", None) or []
        if isinstance(given, str):
            given = [given if given.partition(":")[0] in KINDS else f"emoji:{given}"]
        val["val_data"] = [*given, *tasks] if isinstance(given, list | tuple) else given
    return values


def read_config_file(path: str) -> dict[str, Any]:
    """Read a saved config.json or a YAML file: {"method": ..., section: {setting: value}}."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise FlagError(f"--config {path} does not exist")
    try:
        values = read_yaml(file) if file.suffix in (".yaml", ".yml") else read_json(file)
    except (OSError, ValueError) as error:
        raise FlagError(f"--config {path} cannot be read, it is {appearance_of(file).what}: {error}") from None
    hide(values)
    if isinstance(values, dict) and {"model_cfg", "embed_dim"} & values.keys():
        raise FlagError(f"--config {path} is a model's config: give RUN/config.json, or --model local-dir:FOLDER")
    if not isinstance(values, dict) or not all(isinstance(v, (dict, str)[k == "method"]) for k, v in values.items()):
        raise FlagError(f'--config {path}: give {{"method": ..., "model": {{...}}, "data": {{...}}, ...}}')
    return renewed(values)


def changed(config: Config, section: str, **values: Any) -> Config:
    """Return the config with new values in one section."""
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
