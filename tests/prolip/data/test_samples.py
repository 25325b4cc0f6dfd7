"""A sample as bytes, or generated: its image and captions by seed, epoch, key and occurrence, and its faults."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_tars import members, noisy, png, saved

from prolip.data.augment.crops import RandomCrop
from prolip.data.captions import CaptionSampler, caption_id
from prolip.data.faults import SampleFault
from prolip.data.loader import DataConfig, build_loader
from prolip.data.samples import Decoder, Row, SyntheticDecoder, decode_image, preserved_rng, seed_rng

CUT_JPEG = saved(Image.new("RGB", (64, 64)), "JPEG")[:-200]


def decode(raw, epoch=0, occurrence=0, **settings):
    with preserved_rng():
        return Decoder(noisy, **settings)(Row({"__key__": "k", **raw}, occurrence), epoch)


@pytest.mark.parametrize(
    ("change", "sampling", "kind"),
    [
        ({"png": None}, "txt", "missing image"),
        ({"txt": None}, "txt", "missing text"),
        ({"txt": b"\xff\xfe"}, "txt", "bad text"),
        ({"txt": b" \n"}, "txt", "no caption"),
        ({"json": None}, "name", "missing json"),
        ({"json": b"{"}, "name", "bad json"),
        ({"json": b"[1]"}, "name", "bad json"),
        ({"json": b"[" * 100_000}, "name", "bad json"),
        ({"txt": b"\xff"}, "txt,name", "bad text"),
        ({"txt": None, "json": None}, "txt,name", "no caption"),
        ({"json": b'{"name": []}'}, "name", "no caption"),
        ({"png": b"no image"}, "txt", "bad image"),
    ],
)
def test_each_thing_wrong_with_a_sample_has_its_kind(change, sampling, kind):
    raw = {name: data for name, data in {**members(1), **change}.items() if data is not None}
    with pytest.raises(SampleFault) as fault:
        decode(raw, captions=CaptionSampler.parse(sampling))
    assert fault.value.kind == kind


@pytest.mark.parametrize(("absent", "captions"), [("txt", {"name 1"}), ("json", {"caption 1"})])
def test_a_sample_may_lack_the_text_or_the_json_where_captions_come_from_both(absent, captions):
    raw = {name: data for name, data in members(1).items() if name != absent}
    assert {decode(raw, epoch, captions=CaptionSampler.parse("txt,name")).text for epoch in range(9)} == captions
    both = {decode(members(1), epoch, captions=CaptionSampler.parse("txt,name")).text for epoch in range(9)}
    assert both == {"caption 1", "name 1"}


def test_a_transform_that_fails_is_a_fault_that_says_why():
    def narrow(image):
        raise ZeroDivisionError("no width left")

    with pytest.raises(SampleFault, match="failed transform: .*ZeroDivisionError: no width left"):
        Decoder(narrow)(Row({"__key__": "k", **members(0)}, 0), 0)


def test_augmentation_and_caption_follow_seed_epoch_key_and_occurrence_only():
    sampler = CaptionSampler.parse("keywords")
    first = decode(members(1), captions=sampler)
    seed_rng(99)
    again = decode(members(1), captions=sampler)
    assert torch.equal(first.image, again.image) and first.text == again.text
    assert torch.equal(first.image, decode(members(1), captions=CaptionSampler.parse("name,txt")).image)
    for change in ({"epoch": 1}, {"occurrence": 1}, {"seed": 1}):
        assert not torch.equal(first.image, decode(members(1), captions=sampler, **change).image)
    assert not torch.equal(first.image, decode({**members(1), "__key__": "other"}, captions=sampler).image)
    drawn = {decode(members(1), epoch=epoch, captions=sampler).text for epoch in range(30)}
    assert drawn == {"word 1 0", "word 1 1", "word 1 2"}


def test_ids_tell_the_drawn_caption_and_all_captions():
    example = decode(members(1), captions=CaptionSampler.parse("name,keywords"), with_ids=True)
    assert example.ids == tuple(map(caption_id, ("name 1", "word 1 0", "word 1 1", "word 1 2")))
    assert example.drawn_id == caption_id(example.text)


def photo(width=60, height=50):
    noise = np.random.default_rng(0).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    return saved(Image.fromarray(noise).resize((width, height)), "JPEG")


def cropped(data, dct_scaled=False, seed=0, epoch=0, occurrence=0, key="k"):
    crop = RandomCrop((16, 16), (0.5, 1.0), dct_scaled)
    row = Row({"__key__": key, "jpg": data, "txt": b"a caption"}, occurrence)
    return Decoder(crop, seed=seed)(row, epoch).image  # without preserved_rng: nothing global is drawn from


@pytest.mark.parametrize("dct_scaled", [False, True])
def test_boxes_follow_seed_epoch_key_and_occurrence_and_leave_the_global_generators_alone(dct_scaled):
    seed_rng(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = cropped(photo(), dct_scaled)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    seed_rng(8)
    assert first.dtype == torch.uint8 and torch.equal(first, cropped(photo(), dct_scaled))
    for change in ({"seed": 1}, {"epoch": 1}, {"occurrence": 1}, {"key": "l"}):
        assert not torch.equal(first, cropped(photo(), dct_scaled, **change))
    for data in (b"", b"<html>no</html>", png()[:60], CUT_JPEG, b"\xff\xd8\xff", photo()[:-300]):
        for decoder in (decode_image, lambda data: cropped(data, dct_scaled)):
            with pytest.raises(SampleFault, match="bad image"):
                decoder(data)
    for width, height in ((1, 1), (1, 40), (300, 1)):  # slivers are stretched, as by OpenCLIP's crop
        assert cropped(photo(width, height), dct_scaled).shape == (3, 16, 16)


# --- generated -------------------------------------------------------------------------------------------------------
def generated(index, seed=0, captions=1):
    return SyntheticDecoder(16, 12, seed, captions)(Row({"__key__": "k", "index": index}, 0), 0)


def test_synthetic_samples_are_normal_noise_and_small_ids_by_seed_and_number():
    images = torch.stack([generated(index).image for index in range(80)])
    assert images.shape == (80, 3, 16, 16) and images.dtype == torch.float32
    assert abs(images.mean()) < 0.05 and abs(images.std() - 1) < 0.05
    distances = torch.cdist(images.flatten(1), images.flatten(1)) + 100 * torch.eye(80)
    assert distances.min() > 20  # independent unit noise of 768 values: about 39
    for index in range(50):
        text = generated(index).text
        length = int((text > 0).sum())
        assert text.shape == (12,) and text.dtype == torch.int64 and 1 <= length <= 12
        assert (text[:length] > 0).all() and (text[:length] < 1000).all() and (text[length:] == 0).all()
    assert torch.equal(generated(5).image, images[5]) and not torch.equal(generated(5, seed=1).image, images[5])
    several, none = (generated(3, captions=count).text for count in (2, 0))
    assert several.shape == (2, 12) and torch.equal(several[0], generated(3).text) and none == ()


def test_a_synthetic_loader_needs_neither_files_nor_tokenizer_and_goes_on_where_it_stood():
    config = DataConfig(dataset_type="synthetic", train_num_samples=22, batch_size=4, workers=0)

    def build(**place):
        return build_loader(config, None, None, image_size=(8, 12), context_length=7, **place)

    batches = list(build(world_size=2, rank=1))
    assert len(batches) == 3 and batches[0]["key"] == [f"synthetic-{i}" for i in (1, 3, 5, 7)]
    assert batches[0]["image"].shape == (4, 3, 8, 12) and batches[0]["text"].shape == (4, 7)
    whole, first, second = [batch["key"] for batch in build()], build(), build()
    begun = iter(first)
    assert [next(begun)["key"] for _ in range(3)] == whole[:3]
    second.load_state_dict(first.state_dict())
    assert [batch["key"] for batch in second] == whole[3:]
