import torch

from prolip.data.loader import DataConfig, build_loader
from prolip.data.samples import Row
from prolip.data.samples import SyntheticDecoder


def decode(index, seed=0):
    return SyntheticDecoder(16, 12, seed)(Row({"__key__": f"synthetic-{index}", "index": index}, 0), 0)


def test_images_are_normal_noise_and_all_different():
    images = torch.stack([decode(index).image for index in range(80)])
    assert images.shape == (80, 3, 16, 16) and images.dtype == torch.float32
    assert abs(images.mean()) < 0.05 and abs(images.std() - 1) < 0.05
    distances = torch.cdist(images.flatten(1), images.flatten(1)) + 100 * torch.eye(80)
    assert distances.min() > 20  # independent unit noise of 768 values: about 39


def test_texts_are_small_ids_then_padding():
    for index in range(50):
        text = decode(index).text
        length = int((text > 0).sum())
        assert text.shape == (12,) and text.dtype == torch.int64 and 1 <= length <= 12
        assert (text[:length] > 0).all() and (text[:length] < 1000).all() and (text[length:] == 0).all()


def test_as_many_texts_as_are_wanted():
    row = Row({"__key__": "synthetic-3", "index": 3}, 0)
    several, none = (SyntheticDecoder(16, 12, captions=n)(row, 0).text for n in (2, 0))
    assert several.shape == (2, 12) and torch.equal(several[0], decode(3).text) and none == ()


def test_samples_follow_seed_and_number_only():
    assert torch.equal(decode(5).image, decode(5).image) and torch.equal(decode(5).text, decode(5).text)
    assert not torch.equal(decode(5).image, decode(5, seed=1).image)


def test_a_synthetic_loader_needs_neither_files_nor_tokenizer():
    config = DataConfig(dataset_type="synthetic", train_num_samples=20, batch_size=4, workers=0)
    loader = build_loader(config, None, None, image_size=(8, 12), context_length=7, world_size=2, rank=1)
    batches = list(loader)
    assert len(batches) == loader.num_batches == 3
    assert batches[0]["image"].shape == (4, 3, 8, 12) and batches[0]["text"].shape == (4, 7)
    assert batches[0]["key"] == [f"synthetic-{i}" for i in (1, 3, 5, 7)]


def test_a_synthetic_loader_goes_on_where_it_stood():
    config = DataConfig(dataset_type="synthetic", train_num_samples=22, batch_size=4, workers=0)

    def build():
        return build_loader(config, None, None, image_size=8, context_length=7)

    whole, first, second = [batch["key"] for batch in build()], build(), build()
    batches = iter(first)
    assert [next(batches)["key"] for _ in range(3)] == whole[:3]
    second.load_state_dict(first.state_dict())
    assert [batch["key"] for batch in second] == whole[3:]
