"""Tokenizers, texts -> token ids (N, context) int64, by a model's name, a local folder or a local file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from open_clip.factory import parse_model_name
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer, get_clean_fn
from torch import Tensor

from prolip.gaussian import kind_of
from prolip.models.config import TextRules, TokenizerRules, check, check_keys
from prolip.models.diagnose import FOLDER_NAMES, SENTENCEPIECE_NAMES
from prolip.models.registry import HubFileNotFoundError, get_model_config, hub_files
from prolip.utils.documents import shown
from prolip.utils.links import check_links

ALL_NAMES = (*FOLDER_NAMES, *SENTENCEPIECE_NAMES)
#: Characters read per token (length of the longest piece of the bundled encoding), and minimum characters of a text.
LETTERS_PER_TOKEN, LEAST_LETTERS = 32, 8192
#: Options of the bundled encoding; `bpe_path` only in Python, because a configuration must not name a file.
BPE_OPTIONS = ("clean", "reduction_mask", "additional_special_tokens", "bpe_path")


class TokenizerNotFoundError(FileNotFoundError):
    """Missing tokenizer files on this machine."""


def checked(texts: Any, length: Any, own: int) -> tuple[list[str], int]:
    """Return one or several texts as a list shortened by `cut`, and the context, given or `own`."""
    if length:
        check(TextRules, {"context_length": length})
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise TypeError(f"expected texts as a str or a list of str, got {kind_of(texts)}")
    every = [texts] if isinstance(texts, str) else list(texts)
    for number, text in enumerate(every):
        if not isinstance(text, str):
            raise TypeError(f"expected texts[{number}] as a str, got {kind_of(text)}")
    return cut(every, length or own), length or own


def cut(texts: Iterable[str], length: int) -> list[str]:
    """Cut texts to the beginning that becomes `length` ids: cleaning and encoding take time per character."""
    letters = max(LEAST_LETTERS, LETTERS_PER_TOKEN * length)
    return [text if len(text) <= letters else text.lstrip()[:letters] for text in texts]


class Tokenizer:
    """Tokenizer that cuts texts, cleans them (with an OpenCLIP function), encodes, cuts to the context, and pads."""

    vocab_size: int
    all_special_ids: list[int]  # ids without text

    def __init__(self, context_length: int, pad_token_id: int, clean: str = "whitespace"):
        check(TokenizerRules, {"clean": clean}, "tokenizer_kwargs")
        self.context_length, self.pad_token_id = context_length, pad_token_id
        self._clean = get_clean_fn(clean)

    def encode(self, texts: list[str], length: int) -> list[list[int]]:
        """Return at most `length` ids per cleaned text, including the end token."""
        raise NotImplementedError

    def __call__(self, texts: str | Iterable[str], context_length: int | None = None) -> Tensor:
        """Tokenise one or several texts to (N, context) int64."""
        cleaned, length = checked(texts, context_length, self.context_length)
        rows = self.encode([self._clean(text) for text in cleaned], length)
        padded = [row + [self.pad_token_id] * (length - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64).reshape(-1, length)


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a sentencepiece `.model` file, as SigLIP's: pieces, then the end token."""

    def __init__(self, path: str | os.PathLike, context_length: int, pad_token_id: int, clean: str = "canonicalize"):
        super().__init__(context_length, pad_token_id, clean)
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ImportError(f"{path} needs sentencepiece: pip install sentencepiece") from error
        self.path = Path(path)
        try:
            self.pieces = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {first_line(error)}") from error
        self.vocab_size, self.eos_token_id = self.pieces.vocab_size(), self.pieces.eos_id()
        odd = (self.pieces.is_control, self.pieces.is_unknown, self.pieces.is_unused)
        self.all_special_ids = [i for i in range(self.vocab_size) if any(is_kind(i) for is_kind in odd)]
        if self.eos_token_id < 0:
            raise ValueError(f"{path} has no end token: train it with eos_id >= 0")

    def encode(self, texts: list[str], length: int) -> list[list[int]]:
        return [row[: length - 1] + [self.eos_token_id] for row in self.pieces.encode(texts)]

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        target = Path(folder) / SENTENCEPIECE_NAMES[0]
        if not (target.exists() and target.samefile(self.path)):
            shutil.copyfile(self.path, target)


class FolderTokenizer(Tokenizer):
    """Tokenizer of a folder of files, read by OpenCLIP's HFTokenizer: its special tokens, our padding."""

    def __init__(self, folder: Path, context_length: int, pad_token_id: int, clean="whitespace", strip_sep_token=False):
        super().__init__(context_length, pad_token_id, clean)
        self.tokenizer = read_folder(folder).tokenizer
        self.eos_token_id = self.tokenizer.eos_token_id
        self.all_special_ids = list(self.tokenizer.all_special_ids)
        ids = self.tokenizer.get_vocab().values()
        self.vocab_size = max(len(self.tokenizer), 1 + max(ids))  # files may omit ids
        self.stripped: int | None = self.tokenizer.sep_token_id if strip_sep_token else None

    def encode(self, texts: list[str], length: int) -> list[list[int]]:
        rows = self.tokenizer(texts, truncation=True, max_length=length, padding=False)["input_ids"] if texts else []
        return [[0 if one == self.stripped else one for one in row] for row in rows]  # as in OpenCLIP's CLIPA

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        self.tokenizer.save_pretrained(str(folder))


def read_folder(folder: Path, **options: Any) -> HFTokenizer:
    """Read OpenCLIP's tokenizer from a folder without running its code. ValueError for other files."""
    check_links(folder)
    if find_spec("transformers") is None:
        raise ImportError(f"{folder} needs transformers: pip install transformers")
    try:
        made = HFTokenizer(str(folder), local_files_only=True, trust_remote_code=False, **options)
        made.tokenizer(["a"], truncation=True, max_length=made.context_length)
        max(made.tokenizer.get_vocab().values())
        return made
    except Exception as error:  # damaged files raise errors of any kind
        raise ValueError(f"transformers cannot read a tokenizer from {folder}: {first_line(error)}") from error


class BPETokenizer(SimpleTokenizer):
    """Byte-pair encoding bundled with OpenCLIP, without files: start, pieces, end; padded with 0."""

    pad_token_id = 0

    def __init__(self, context_length: int, **kwargs: Any):
        super().__init__(context_length=context_length, **kwargs)
        self.eos_token_id = self.eot_token_id
        # absent from lower-case texts: PCME++'s released code masks CLIP's words with it
        self.unseen_id = None if kwargs.get("clean") == "whitespace" else self.encoder["M"]

    def __call__(self, texts: str | list[str], context_length: int | None = None) -> Tensor:
        """Tokenise one or several texts to (N, context) int64, equal to OpenCLIP for texts that `cut` does not cut."""
        return super().__call__(*checked(texts, context_length, self.context_length))


def first_line(error: Exception) -> str:
    """Return the first line of another library's error."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def get_tokenizer(
    model_name: str = "ProLIP-ViT-S-16",
    context_length: int | None = None,
    cache_dir: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    **kwargs: Any,
) -> Tokenizer | BPETokenizer:
    """Return the tokenizer of a model: a callable, texts -> (N, context) int64.

    model_name: as in `create_model`. tokenizer: replaces the configuration's: a folder of tokenizer files, a
    sentencepiece `.model` file, a hub name `org/name`, or `bpe`. kwargs: of the tokenizer: clean="canonicalize".
    """
    config, _ = get_model_config(model_name, cache_dir)
    text = config["text_cfg"]
    options = {**(text.get("tokenizer_kwargs") or {}), **kwargs}
    check(TokenizerRules, {key: value for key, value in kwargs.items() if key != "bpe_path"}, "tokenizer_kwargs")
    if context_length is not None:
        check(TextRules, {"context_length": context_length})
    options["context_length"] = context_length or text.get("context_length", 77)
    source, (schema, place) = tokenizer, parse_model_name(model_name)
    if source is None and schema == "local-dir" and any((Path(place) / name).is_file() for name in ALL_NAMES):
        source = place
    if source is None and schema == "hf-hub":
        with suppress(HubFileNotFoundError):
            source = hub_files(place, ALL_NAMES, cache_dir=cache_dir)
    source = str(source or text.get("hf_tokenizer_name") or "bpe")
    known = BPE_OPTIONS if source == "bpe" else ("clean", "strip_sep_token")
    check_keys(options, ("context_length", *known), f"tokenizer_kwargs of the tokenizer {shown(source)}")
    if source == "bpe":
        made: Any = BPETokenizer(**{"clean": "lower", **options})
    else:
        made = read(local(source, model_name, cache_dir), pad_token_id=config["prolip_cfg"]["pad_token_id"], **options)
    check_ids(made, source, model_name, config)
    return made


def local(source: str, model_name: str, cache_dir: str | None = None) -> Path:
    """Return a local path to a tokenizer: the given one, or the folder of a hub name's files."""
    path, repo = Path(source).expanduser(), source.removeprefix("hf-hub:")
    if path.is_file() or path.is_dir():
        return path
    if repo.count("/") != 1 or repo.startswith((".", "/", "~")):
        remedy = "a folder of tokenizer files, a sentencepiece .model file, a hub name org/name, or 'bpe'"
        raise TokenizerNotFoundError(f"no tokenizer at {source}: give {remedy}")
    try:
        return hub_files(repo, ALL_NAMES, cache_dir=cache_dir)
    except HubFileNotFoundError as error:
        raise TokenizerNotFoundError(
            f"{model_name} needs the tokenizer {repo}, whose files are not on this machine. On a machine with a"
            f" network, run `hf download {repo} tokenizer.json tokenizer_config.json --local-dir <folder>`, copy the"
            f" folder here and give --tokenizer <folder>; in Python get_tokenizer({model_name!r}, tokenizer=<folder>)."
            f" ({error})"
        ) from error


def read(path: Path, **options: Any) -> Tokenizer:
    """Read the tokenizer of a sentencepiece file or a folder."""
    if path.is_file():
        return SentencePieceTokenizer(path, **options)
    check_links(path)
    pieces = [path / name for name in SENTENCEPIECE_NAMES if (path / name).is_file()]
    whole = any((path / name).is_file() for name in FOLDER_NAMES)
    if pieces and not (whole and find_spec("transformers")):
        return SentencePieceTokenizer(pieces[0], **options)
    if whole:
        return FolderTokenizer(path, **options)
    raise TokenizerNotFoundError(f"no tokenizer in {path}: expected one of {', '.join(ALL_NAMES)}")


def check_ids(made: Any, source: str, model_name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError for ids without an embedding, and for a padding or end token unknown to the model."""
    vocabulary, own = config["text_cfg"].get("vocab_size", 49408), config.get("prolip_cfg")
    if made.vocab_size > vocabulary:
        found = f"the tokenizer {source} has {made.vocab_size} ids, but {model_name} has {vocabulary} embeddings"
        remedy = f"use the model's own tokenizer, or a model with text_cfg.vocab_size of at least {made.vocab_size}"
        raise ValueError(f"{found}: {remedy}")
    if own is None:
        return
    pad, end, special = own["pad_token_id"], made.eos_token_id, own["special_token_ids"]
    if made.pad_token_id != pad:
        found = f"the tokenizer {source} pads with {made.pad_token_id}, but {model_name} expects {pad}"
        raise ValueError(f"{found}: change prolip_cfg.pad_token_id")
    if own["mask_token_id"] is not None and end is not None and end not in (*special, pad):
        found = f"the tokenizer {source} ends texts with {end}, which {model_name} would mask like a word"
        raise ValueError(f"{found}: add it to prolip_cfg.special_token_ids (now {special})")
