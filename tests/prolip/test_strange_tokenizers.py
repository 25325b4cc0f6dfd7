"""Tokenizers and texts of strangers: no code of a folder runs, damaged files end in a line, long texts cost little."""

import io
import json
import random
import sys
import time
import types
from unittest.mock import patch

import open_clip
import pytest
import torch
from open_clip.tokenizer import SimpleTokenizer

import prolip
from prolip.loading import FOREIGN_CODE, openclip_tokenizer
from prolip.models import tokenizer as module
from prolip.models.tokenizer import BPETokenizer, cut

ALPHABETS = ("abc", "etaoinshrdlu", "abcdefghijklmnopqrstuvwxyz", "的一是在不了有和人", "zéüñ", "-=*_.", "😂🇺🇸", "aab")


@pytest.fixture(scope="module")
def theirs():
    return SimpleTokenizer()


# --- texts
def random_text(rng, size):
    """Words of several alphabets, some of them long, with entities, broken encodings and runs of blanks."""
    parts = []
    while sum(map(len, parts)) < size:
        word = "".join(rng.choices(rng.choice(ALPHABETS), k=rng.choice([1, 3, 8, 8, 8, 70, 150])))
        others = [f"{word}'s", "&amp;", "Ã©tÃ©", "  \n ", "12", "<end_of_text>"]
        parts.append(rng.choice([word, word.upper(), *others]) + " ")
    return "".join(parts)[:size]


def test_texts_below_the_cut_have_openclips_ids_and_longer_ones_those_of_their_beginning(theirs):
    ours = BPETokenizer(77)
    for seed in range(60):
        rng = random.Random(f"text {seed}")
        text = random_text(rng, rng.choice([0, 5, 80, 400, 2000]))
        assert torch.equal(ours(text), theirs(text)), text
    letters = module.LEAST_LETTERS
    for seed in range(4):  # ordinary words: the ids of the whole text, though a part of it is read
        text = " ".join(random.Random(seed).choices(["cat", "a photo of", "Zürich", "12:30", "&amp;"], k=6000))
        assert len(text) > letters
        assert torch.equal(ours(text), theirs(text[:3000])) and torch.equal(ours(text), ours(text[:letters]))
    assert ours("x", context_length=1).tolist() == theirs("x", context_length=1).tolist()


def test_the_cut_leaves_enough_letters_for_every_id(theirs):
    assert max(map(len, theirs.encoder)) <= module.LETTERS_PER_TOKEN
    texts = ["a" * 50_000, " " * 50_000 + "b" * 10_000, "short"]
    assert [len(text) for text in cut(texts, 77)] == [8192, 8192, 5]
    assert [len(text) for text in cut(texts, 1000)] == [32_000, 10_000, 5] and cut(texts, 77)[1][0] == "b"


@pytest.mark.parametrize("letters", ["abcdefghijklmnopqrstuvwxyz", "z", "的一是", "a\u0301\u0316", "&amp;", "- "])
def test_a_caption_of_a_million_letters_costs_no_more_than_one_of_ten_thousand(letters):
    """100,000 letters took minutes. What is counted is the letters that cleaning and merging are given."""
    text = "".join(random.Random(0).choices(letters, k=1_000_000))
    ours = BPETokenizer(77)
    seen = []
    ours.clean_fn = lambda part, clean=ours.clean_fn: (seen.append(len(part)), clean(part))[1]
    start = time.perf_counter()
    ids = ours([text])
    assert time.perf_counter() - start < 10  # a second at most; hours before
    assert ids.shape == (1, 77) and seen == [8192]


def test_all_kinds_of_tokenizers_and_openclips_models_read_cut_texts(monkeypatch):
    seen = []

    class Counting(module.Tokenizer):
        def encode(self, texts, length):
            seen.extend(map(len, texts))
            return [[1] for _ in texts]

    Counting(64, 0)(["y" * 100_000])
    assert seen == [8192]
    tokenize = openclip_tokenizer("ViT-B-32", None)
    texts = ["a photo of a cat", "Zürich, 12:30", "w" * 300]
    assert torch.equal(tokenize(texts), open_clip.get_tokenizer("ViT-B-32")(texts))
    start = time.perf_counter()
    tokenize(["".join(random.Random(1).choices("abcdefghij", k=100_000))])
    assert time.perf_counter() - start < 10


# --- folders
def custom_folder(folder):
    """A tokenizer whose folder asks for its own code to be run, which would leave a file behind."""
    (folder / "code.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\nclass Mine(PreTrainedTokenizerFast):\n    pass\n"
    )
    auto = {"AutoTokenizer": ["code.Mine", "code.Mine"], "AutoConfig": "code.Mine"}
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_text(json.dumps({"auto_map": auto, "tokenizer_class": "Mine", "model_type": "mine"}))
    return folder


@pytest.mark.parametrize(
    "made_by",
    [
        lambda folder: prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=str(folder)),
        lambda folder: openclip_tokenizer("ViT-B-16-SigLIP", str(folder)),
    ],
)
def test_code_in_a_tokenizers_folder_never_runs_and_nobody_is_asked(tmp_path, monkeypatch, made_by):
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 5))
    with pytest.raises(ValueError, match="transformers cannot read a tokenizer from") as caught:
        made_by(custom_folder(tmp_path))
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()


def test_a_text_tower_of_transformers_does_not_ask_either(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with patch(FOREIGN_CODE, 0), pytest.raises(ValueError):
        transformers.AutoConfig.from_pretrained(custom_folder(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_transformers_is_told_not_to_trust(tmp_path, monkeypatch):
    """With a stand-in, so that it is tested where transformers is not installed, too."""
    asked = {}

    class AutoTokenizer:
        eos_token_id, all_special_ids = 1, [1]

        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            asked.update(kwargs)
            return cls()

        def get_vocab(self):
            return {"a": 0, "</s>": 9}

        def __len__(self):
            return 2

        def __call__(self, texts, **kwargs):
            return {"input_ids": [[0] for _ in texts]}

    stand_in = types.SimpleNamespace(AutoTokenizer=AutoTokenizer, __spec__="stand-in")
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    (tmp_path / "tokenizer.json").write_text("{}")
    made = prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=str(tmp_path))
    assert asked == {"cache_dir": None, "local_files_only": True, "trust_remote_code": False}
    assert made.vocab_size == 10  # its highest id, of which the model needs an embedding


def test_options_of_a_configuration_reach_no_file_and_no_code(tmp_path):
    config = json.loads((module.Path(module.__file__).parent / "configs" / "ProLIP-ViT-test.json").read_text())
    for options in ({"trust_remote_code": True}, {"bpe_path": "/dev/zero"}, {"additional_special_tokens": ["(a+)+$"]}):
        config["text_cfg"]["tokenizer_kwargs"] = options
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"(?=.*{next(iter(options))}).*text_cfg.tokenizer_kwargs"):
            prolip.get_tokenizer(f"local-dir:{tmp_path}")
    with pytest.raises(ValueError, match="unknown key 'reduction_mask' in tokenizer_kwargs of the tokenizer"):
        prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=str(tmp_path / "config.json"), reduction_mask="simple")
    with pytest.raises(ValueError, match="context_length is -3: it should be at least 1"):
        prolip.get_tokenizer("ProLIP-ViT-test", context_length=-3)


def damaged_folder(folder, seed):
    """A folder or a file that might be a tokenizer's, and is none."""
    rng = random.Random(f"tokenizer {seed}")
    parts = [
        "{}",
        "[]",
        "null",
        "{",
        "",
        "[" * 50_000,
        "\x00" * 100,
        '{"model": {}}',
        '{"tokenizer_class": 3}',
        '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        '{"tokenizer_class": "os.system"}',
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 1e400}, "unk_token": 3}}',
        '{"model_max_length": "x"}',
        '{"eos_token": {"content": 5}}',
        '{"auto_map": 7}',
        '{"model": {"type": "Unigram", "vocab": [[1]]}}',
    ]
    names = ["tokenizer.json", "tokenizer_config.json", "spiece.model", "config.json"]
    for name in rng.sample(names, rng.randint(1, 4)):
        (folder / name).write_text(rng.choice(parts))
    return folder


def refuse_folder(folder, seed):
    folder.mkdir()
    with pytest.raises((ValueError, OSError)) as caught:
        prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=str(damaged_folder(folder, seed)))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_damaged_tokenizers_are_refused_in_a_line(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("sentencepiece")
    for seed in range(40):
        refuse_folder(tmp_path / str(seed), seed)


@pytest.mark.slow
def test_three_hundred_damaged_tokenizers(tmp_path):
    pytest.importorskip("transformers")
    for seed in range(1000, 1300):
        refuse_folder(tmp_path / str(seed), seed)


def test_a_huge_tokenizer_file_is_not_read(tmp_path):
    pytest.importorskip("sentencepiece")
    for name in ("tokenizer.json", "spiece.model"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(module.FILE_BYTES + 1)  # a sparse file
        with pytest.raises(ValueError, match=f"{name} has 134,217,729 bytes, a tokenizer's file at most"):
            prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=str(tmp_path if "json" in name else tmp_path / name))
        (tmp_path / name).unlink()
