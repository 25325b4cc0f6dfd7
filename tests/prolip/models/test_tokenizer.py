"""Tokenizers from the bundle, a sentencepiece file and a folder; no code in one runs, and long texts cost little."""

import io
import json
import random
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from open_clip.tokenizer import SimpleTokenizer

import prolip
from prolip.loading import openclip_tokenizer
from prolip.models import registry as hub
from prolip.models import tokenizer as module
from prolip.models.checkpoint import save_pretrained
from prolip.models.tokenizer import (
    BPETokenizer,
    FolderTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerNotFoundError,
    get_tokenizer,
)

TINY = Path(__file__).parents[2] / "fixtures" / "released_prolip_tiny"
LINES = """a cat on a sofa\ntwo dogs in the rain\nthe red house\na bird over the sea\npeople at a table\ngreen tree
cat and dog\na house near the sea\nrain over the house\nthe sofa is red\na bird in a green tree"""
SENTENCES = LINES.splitlines()
ALPHABETS = ("abc", "etaoinshrdlu", "abcdefghijklmnopqrstuvwxyz", "的一是在不了有和人", "zéüñ", "-=*_.", "😂🇺🇸", "aab")
T5_LIKE = {"pad_token_id": 1, "special_token_ids": [1], "text_cfg": {"hf_tokenizer_name": "org/absent"}}


def train_pieces(prefix, **options):
    spm = pytest.importorskip("sentencepiece")
    settings = {"hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1, "bos_id": -1, **options}
    spm.SentencePieceTrainer.train(sentence_iterator=iter(SENTENCES * 20), model_prefix=str(prefix), **settings)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A sentencepiece model laid out as SigLIP's: pad 0, end 1, unknown 2, no start."""
    folder = tmp_path_factory.mktemp("pieces")
    train_pieces(folder / "spiece", vocab_size=48, pad_id=0, eos_id=1, unk_id=2)
    return folder / "spiece.model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of tokenizer files as transformers writes it: whole words, with the end token 1 appended."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    vocabulary = {"<unk>": 0, "</s>": 1} | {word: i + 2 for i, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    path = tmp_path_factory.mktemp("words")
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(path)
    return path, vocabulary


def cached(tmp_path, repo, source=None):
    """The snapshot of a repository in a cache of the hub."""
    cache = tmp_path / f"models--{repo.replace('/', '--')}"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots").mkdir()
    return Path(shutil.copytree(source, cache / "snapshots" / "abc")) if source else cache / "snapshots" / "abc"


def test_rows_are_padded_to_int64():
    class Letters(Tokenizer):
        def encode(self, texts, length):
            return [[int(letter) for letter in text] for text in texts]

    tokenizer = Letters(3, 9)
    assert torch.equal(tokenizer(["34", "", "567"]), torch.tensor([[3, 4, 9], [9, 9, 9], [5, 6, 7]]))
    assert tokenizer([]).shape == (0, 3)


def test_small_models_read_with_the_bundled_bpe():
    tokenizer = prolip.get_tokenizer("ProLIP-ViT-XS-16")
    assert isinstance(tokenizer, BPETokenizer)
    ids = tokenizer(["a photo of a cat", "x " * 50])
    assert ids.shape == (2, 12) and ids.dtype == torch.int64
    assert ids[0].tolist() == [49406, 320, 1125, 539, 320, 2368, 49407] + [0] * 5  # OpenAI's published ids
    assert ids[1, -1] == 49407 and (ids[1] != 0).all()
    assert torch.equal(tokenizer("a photo of a cat"), ids[:1])
    assert tokenizer("cat", context_length=5).shape == (1, 5)
    assert prolip.get_tokenizer("ProLIP-ViT-XS-16", context_length=9)("cat").shape == (1, 9)


def test_every_id_of_a_model_has_an_embedding():
    model, tokenizer = prolip.create_model("ProLIP-ViT-test"), prolip.get_tokenizer("ProLIP-ViT-test")
    assert tokenizer.vocab_size <= model.vocab_size and tokenizer.pad_token_id == model.pad_token_id
    assert {tokenizer.sot_token_id, tokenizer.eot_token_id} == set(model.special_token_ids)
    assert model.mask_token_id >= tokenizer.vocab_size  # [MASK] is no word
    assert model.encode_text(tokenizer(["a cat", ""])).mean.isfinite().all()


def test_a_sentencepiece_file_needs_no_other_library(pieces, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=pieces)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    ids = tokenizer(["A cat, on a SOFA!", "a cat on a sofa", "", "bird " * 80])
    assert ids.shape == (4, 64) and ids.dtype == torch.int64
    assert torch.equal(ids[0], ids[1])  # canonicalised, as the configuration says
    body = tokenizer.pieces.encode("a cat on a sofa")
    assert ids[1].tolist() == body + [1] * (64 - len(body))
    assert (ids[2] == 1).all()
    assert ids[3, -1] == 1 and (ids[3, :-1] > 1).all()


def test_a_folder_of_tokenizer_files_is_read_by_transformers(folder):
    path, vocabulary = folder
    tokenizer = prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=str(path))
    assert isinstance(tokenizer, FolderTokenizer)
    ids = tokenizer(["The red HOUSE!", "cat " * 90, ""])
    assert ids.shape == (3, 64)
    assert ids[0].tolist() == [vocabulary[word] for word in ("the", "red", "house")] + [1] * 61
    assert ids[1].tolist() == [vocabulary["cat"]] * 63 + [1]
    assert (ids[2] == 1).all()
    assert tokenizer([]).shape == (0, 64)


@pytest.mark.parametrize("named, same", [(None, True), ({"clean": "whitespace"}, False)])
def test_texts_of_released_models_are_cleaned_as_those_they_were_trained_with(folder, tmp_path, named, same):
    """The published example gives clean="canonicalize" by hand; a configuration that names a cleaning is followed."""
    config = json.loads((TINY / "config.json").read_text())
    config["text_cfg"]["tokenizer_kwargs"] = named
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = prolip.get_tokenizer(f"local-dir:{tmp_path}", tokenizer=folder[0])
    assert isinstance(tokenizer, FolderTokenizer)
    assert torch.equal(tokenizer("The RED house."), tokenizer("the red house")) is same


def test_a_folder_of_tokenizer_files_without_transformers_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=folder[0])


def test_a_saved_model_brings_its_tokenizer(pieces, folder, tmp_path):
    model = prolip.create_model("ProLIP-ViT-test", **T5_LIKE)
    for number, source in enumerate((pieces, folder[0])):
        name = f"local-dir:{tmp_path}/{number}"
        made = prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=source, context_length=12)
        save_pretrained(model, tmp_path / str(number), made)
        again = prolip.get_tokenizer(name, clean="canonicalize")
        assert type(again) is type(made)
        assert torch.equal(again("the red house"), made("the red house"))
        assert torch.equal(prolip.create_model(name).text.cls_emb, model.text.cls_emb)


def test_absent_files_are_said_at_once_with_what_to_give_and_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    start = time.perf_counter()
    with pytest.raises(TokenizerNotFoundError) as caught:
        prolip.get_tokenizer("ProLIP-ViT-B-16", cache_dir=str(tmp_path))
    assert time.perf_counter() - start < 5
    for part in ("hf download timm/ViT-B-16-SigLIP", "--tokenizer <folder>"):
        assert part in str(caught.value)


def test_a_hub_models_own_tokenizer_comes_before_the_one_its_configuration_names(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    snapshot = cached(tmp_path, "org/ours")
    save_pretrained(prolip.create_model("ProLIP-ViT-test", **T5_LIKE), snapshot)
    with pytest.raises(TokenizerNotFoundError, match="tokenizer org/absent"):
        prolip.get_tokenizer("hf-hub:org/ours", cache_dir=str(tmp_path))
    shutil.copytree(folder[0], snapshot, dirs_exist_ok=True)
    assert prolip.get_tokenizer("hf-hub:org/ours", cache_dir=str(tmp_path))("the red house")[0, 3] == 1


def test_links_of_the_hubs_cache_are_followed_and_those_out_of_a_folder_are_not(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "reachable", lambda: pytest.fail("asked for the network"))
    cache = tmp_path / "hub" / "models--timm--ViT-B-16-SigLIP"
    for place in ("refs", "blobs", "snapshots/abc"):
        (cache / place).mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    for number, file in enumerate(sorted(Path(folder[0]).iterdir())):
        shutil.copy(file, cache / "blobs" / str(number))
        (cache / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/{number}")
    assert prolip.get_tokenizer("ProLIP-ViT-B-16", cache_dir=str(tmp_path / "hub"))("the red house")[0, 3] == 1
    (tmp_path / "secret").write_text("{}")
    for name, target in (("vocab.json", tmp_path / "secret"), ("vocab.json", "../../refs/main")):
        own = tmp_path / f"own{len(str(target))}" if target == tmp_path / "secret" else cache / "snapshots" / "abc"
        own.is_dir() or shutil.copytree(folder[0], own)
        (own / name).symlink_to(target)
        with pytest.raises(ValueError, match=f"{own}/{name} is a link to .*, outside {own}: copy the file"):
            prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=str(own))


def test_a_folder_without_a_tokenizer_and_a_file_that_is_none_are_refused(tmp_path):
    with pytest.raises(TokenizerNotFoundError, match="no tokenizer in .*expected one of tokenizer.json"):
        prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=tmp_path)
    pytest.importorskip("sentencepiece")
    (tmp_path / "x.model").write_text("no model")
    with pytest.raises(ValueError, match="x.model is not a sentencepiece model"):
        prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=tmp_path / "x.model")


def test_ids_that_the_model_has_no_embedding_for_are_refused():
    with pytest.raises(ValueError, match="has 49408 ids, but ProLIP-ViT-B-16 has 32100 embeddings: use"):
        prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer="bpe")


def test_an_end_token_that_would_be_masked_like_a_word_is_refused(pieces):
    with pytest.raises(ValueError, match="ends texts with 1, .*special_token_ids"):
        prolip.get_tokenizer("ProLIP-ViT-test", tokenizer=pieces)


def test_padding_that_the_model_would_take_for_words_is_refused(tmp_path):
    save_pretrained(prolip.create_model("ProLIP-ViT-test", pad_token_id=7), tmp_path)
    with pytest.raises(ValueError, match="bpe pads with 0, but local-dir:.* expects 7: change prolip_cfg.pad_token_id"):
        prolip.get_tokenizer(f"local-dir:{tmp_path}")


def test_a_folder_with_both_kinds_of_files_is_read_by_transformers_where_it_is_there(
    pieces, folder, tmp_path, monkeypatch
):
    shutil.copytree(folder[0], tmp_path, dirs_exist_ok=True)
    shutil.copy(pieces, tmp_path)
    assert isinstance(prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=tmp_path), FolderTokenizer)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert isinstance(prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=tmp_path), SentencePieceTokenizer)


@pytest.mark.parametrize(
    "texts, reported",
    [
        (None, "expected texts as a str or a list of str, got a NoneType"),
        (3, "or a list of str, got a int"),
        (b"a cat", "got a bytes"),
        ([None], r"expected texts\[0\] as a str, got a NoneType"),
        (["a", float("nan")], r"texts\[1\] as a str, got a float"),
        ([b"a"], r"expected texts\[0\] as a str, got a bytes"),
        ([["a"]], r"texts\[0\] as a str, got a list of str"),
        (torch.ones(2, 3), r"texts\[0\] as a str, got a Tensor \(3,\)"),
        (Path("a"), "got a PosixPath"),
    ],
)
def test_what_is_no_text_is_refused(texts, reported):
    with pytest.raises(TypeError, match=reported):
        get_tokenizer("ProLIP-ViT-test")(texts)


@pytest.mark.parametrize("name", [None, "", 3, Path("runs/demo/model")])
def test_a_name_that_is_none_says_what_to_give(name):
    with pytest.raises(ValueError, match=r"model_name is .*: give one of list_models\(\), local-dir:"):
        get_tokenizer(name)


@pytest.fixture(scope="module")
def theirs():
    return SimpleTokenizer()


# --- texts and folders of other people ---
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


@pytest.mark.parametrize("letters", ["的一是", "&amp;", "- "])
def test_of_a_caption_of_a_million_letters_8192_are_cleaned_and_merged(letters):
    """100,000 letters took minutes."""
    ours, seen = BPETokenizer(77), []
    ours.clean_fn = lambda part, clean=ours.clean_fn: (seen.append(len(part)), clean(part))[1]
    ids = ours(["".join(random.Random(0).choices(letters, k=1_000_000))])
    assert ids.shape == (1, 77) and seen == [8192]


def custom_folder(folder):
    """Write a tokenizer whose folder requests to run its own code, which would write a file."""
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


def test_options_of_a_configuration_reach_no_file_and_no_code(tmp_path):
    config = json.loads((module.Path(module.__file__).parent / "configs" / "ProLIP-ViT-test.json").read_text())
    for options in ({"trust_remote_code": True}, {"bpe_path": "/dev/zero"}, {"additional_special_tokens": ["(a+)+$"]}):
        config["text_cfg"]["tokenizer_kwargs"] = options
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"(?=.*{next(iter(options))}).*text_cfg.tokenizer_kwargs"):
            prolip.get_tokenizer(f"local-dir:{tmp_path}")
    with pytest.raises(ValueError, match="unknown key 'reduction_mask' in tokenizer_kwargs of the tokenizer"):
        prolip.get_tokenizer("ProLIP-ViT-B-16", tokenizer=str(tmp_path / "config.json"), reduction_mask="simple")
    with pytest.raises(ValueError, match="context_length is -3: it should be greater than or equal to 1"):
        prolip.get_tokenizer("ProLIP-ViT-test", context_length=-3)
