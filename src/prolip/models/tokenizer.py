"""get_tokenizer: texts -> token ids (N, context) int64, from a model's name, a local folder or a local file."""

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
#: Letters per token that are read, as many as the longest piece of the bundled encoding; and least letters of a text.
LETTERS_PER_TOKEN, LEAST_LETTERS = 32, 8192
#: Options of the bundled encoding; `bpe_path` in Python alone, as no configuration should name a file.
BPE_OPTIONS = ("clean", "reduction_mask", "additional_special_tokens", "bpe_path")


class TokenizerNotFoundError(FileNotFoundError):
    """The files of a tokenizer are not on this machine."""


def checked(texts: Any, length: Any, own: int) -> tuple[list[str], int]:
    """One text or several as a list that `cut` shortened, and the context, the given one or `own`."""
    if length:
        check(TextRules, {"context_length": length})
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise TypeError(f"texts are {kind_of(texts)}, want a str or a list of them")
    every = [texts] if isinstance(texts, str) else list(texts)
    for number, text in enumerate(every):
        if not isinstance(text, str):
            raise TypeError(f"texts[{number}] is {kind_of(text)}, want a str")
    return cut(every, length or own), length or own


def cut(texts: Iterable[str], length: int) -> list[str]:
    """The beginnings of texts that become `length` ids: cleaning and encoding take time for each letter."""
    letters = max(LEAST_LETTERS, LETTERS_PER_TOKEN * length)
    return [text if len(text) <= letters else text.lstrip()[:letters] for text in texts]


class Tokenizer:
    """Texts -> ids: cut, clean (in one of OpenCLIP's ways), encode, cut to the context with the end token last, pad."""

    vocab_size: int
    all_special_ids: list[int]  # ids without text

    def __init__(self, context_length: int, pad_token_id: int, clean: str = "whitespace"):
        check(TokenizerRules, {"clean": clean}, "tokenizer_kwargs")
        self.context_length, self.pad_token_id = context_length, pad_token_id
        self._clean = get_clean_fn(clean)

    def encode(self, texts: list[str], length: int) -> list[list[int]]:
        """At most `length` ids per cleaned text, the end token among them."""
        raise NotImplementedError

    def __call__(self, texts: str | Iterable[str], context_length: int | None = None) -> Tensor:
        """One text or several -> (N, context) int64."""
        cleaned, length = checked(texts, context_length, self.context_length)
        rows = self.encode([self._clean(text) for text in cleaned], length)
        padded = [row + [self.pad_token_id] * (length - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64).reshape(-1, length)


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model` file, as SigLIP's: pieces, then the end token."""

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
            raise ValueError(f"{path} is no sentencepiece model: {first_line(error)}") from error
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
    """A folder of tokenizer files, read by OpenCLIP's HFTokenizer: its special tokens, our padding."""

    def __init__(self, folder: Path, context_length: int, pad_token_id: int, clean="whitespace", strip_sep_token=False):
        super().__init__(context_length, pad_token_id, clean)
        self.tokenizer = read_folder(folder).tokenizer
        self.eos_token_id = self.tokenizer.eos_token_id
        self.all_special_ids = list(self.tokenizer.all_special_ids)
        ids = self.tokenizer.get_vocab().values()
        self.vocab_size = max(len(self.tokenizer), 1 + max(ids))  # files may leave out ids
        self.stripped: int | None = self.tokenizer.sep_token_id if strip_sep_token else None

    def encode(self, texts: list[str], length: int) -> list[list[int]]:
        rows = self.tokenizer(texts, truncation=True, max_length=length, padding=False)["input_ids"] if texts else []
        return [[0 if one == self.stripped else one for one in row] for row in rows]  # as OpenCLIP's CLIPA has it

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        self.tokenizer.save_pretrained(str(folder))


def read_folder(folder: Path, **options: Any) -> HFTokenizer:
    """OpenCLIP's tokenizer of a folder of files, whose code is not run. ValueError for files that are none."""
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
    """The byte-pair encoding bundled with OpenCLIP, which needs no file: start, pieces, end; padded with 0."""

    pad_token_id = 0

    def __init__(self, context_length: int, **kwargs: Any):
        super().__init__(context_length=context_length, **kwargs)
        self.eos_token_id = self.eot_token_id
        # absent from texts in small letters: PCME++'s released code masks CLIP's words with it
        self.unseen_id = None if kwargs.get("clean") == "whitespace" else self.encoder["M"]

    def __call__(self, texts: str | list[str], context_length: int | None = None) -> Tensor:
        """One text or several -> (N, context) int64, as OpenCLIP's for texts that `cut` leaves whole."""
        return super().__call__(*checked(texts, context_length, self.context_length))


def first_line(error: Exception) -> str:
    """The first line of another library's error."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def get_tokenizer(
    model_name: str = "ProLIP-ViT-S-16",
    context_length: int | None = None,
    cache_dir: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    **kwargs: Any,
) -> Tokenizer | BPETokenizer:
    """The tokenizer of a model: a callable, texts -> (N, context) int64.

    model_name: as `create_model`'s. tokenizer: instead of the one that the configuration names, a folder of tokenizer
    files, a sentencepiece `.model` file, a hub name `org/name`, or `bpe`. kwargs: of the tokenizer, such as
    clean="canonicalize".
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
    """A local path to a tokenizer: the given one, or the folder of a hub name's files."""
    path, repo = Path(source).expanduser(), source.removeprefix("hf-hub:")
    if path.is_file() or path.is_dir():
        return path
    if repo.count("/") != 1 or repo.startswith((".", "/", "~")):
        wanted = "a folder of tokenizer files, a sentencepiece .model file, a hub name org/name, or 'bpe'"
        raise TokenizerNotFoundError(f"no tokenizer at {source}: give {wanted}")
    try:
        return hub_files(repo, ALL_NAMES, cache_dir=cache_dir)
    except HubFileNotFoundError as error:
        raise TokenizerNotFoundError(
            f"{model_name} needs the tokenizer {repo}, whose files are not on this machine. Where there is a network,"
            f" run `hf download {repo} tokenizer.json tokenizer_config.json --local-dir <folder>`, copy the folder here"
            f" and give --tokenizer <folder>; in Python get_tokenizer({model_name!r}, tokenizer=<folder>). ({error})"
        ) from error


def read(path: Path, **options: Any) -> Tokenizer:
    """The tokenizer of a sentencepiece file or a folder."""
    if path.is_file():
        return SentencePieceTokenizer(path, **options)
    check_links(path)
    pieces = [path / name for name in SENTENCEPIECE_NAMES if (path / name).is_file()]
    whole = any((path / name).is_file() for name in FOLDER_NAMES)
    if pieces and not (whole and find_spec("transformers")):
        return SentencePieceTokenizer(pieces[0], **options)
    if whole:
        return FolderTokenizer(path, **options)
    raise TokenizerNotFoundError(f"no tokenizer in {path}: want one of {', '.join(ALL_NAMES)}")


def check_ids(made: Any, source: str, model_name: str, config: Mapping[str, Any]) -> None:
    """ValueError for ids without an embedding, and for a padding or end token that the model does not know."""
    vocabulary, own = config["text_cfg"].get("vocab_size", 49408), config.get("prolip_cfg")
    if made.vocab_size > vocabulary:
        found = f"the tokenizer {source} has ids up to {made.vocab_size - 1}, {model_name} has {vocabulary} embeddings"
        remedy = f"choose the model's own tokenizer, or a model whose text_cfg.vocab_size is {made.vocab_size} or more"
        raise ValueError(f"{found}: {remedy}")
    if own is None:
        return
    pad, end, special = own["pad_token_id"], made.eos_token_id, own["special_token_ids"]
    if made.pad_token_id != pad:
        found = f"the tokenizer {source} pads with {made.pad_token_id}, {model_name} expects {pad}"
        raise ValueError(f"{found}: change prolip_cfg.pad_token_id")
    if own["mask_token_id"] is not None and end is not None and end not in (*special, pad):
        found = f"the tokenizer {source} ends texts with {end}, which {model_name} would mask like a word"
        raise ValueError(f"{found}: add it to prolip_cfg.special_token_ids (now {special})")
