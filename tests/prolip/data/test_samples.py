import io
import random

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_tars import members, noisy, png

from prolip.data.augment.crops import RandomCrop
from prolip.data.captions import CaptionSampler, caption_id
from prolip.data.faults import SampleFault
from prolip.data.samples import Decoder, Row, decode_image, preserved_rng, seed_rng


def saved(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


CUT_JPEG = saved(Image.new("RGB", (64, 64)), "JPEG")[:-200]


@pytest.mark.parametrize("data", [b"", b"<html>not found</html>", png()[:60], CUT_JPEG])
def test_broken_and_cut_images_are_faults(data):
    with pytest.raises(SampleFault, match="bad image"):
        decode_image(data)


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
    for change in ({"epoch": 1}, {"occurrence": 1}, {"seed": 1}):
        assert not torch.equal(first.image, decode(members(1), captions=sampler, **change).image)
    assert not torch.equal(first.image, decode({**members(1), "__key__": "other"}, captions=sampler).image)
    drawn = {decode(members(1), epoch=epoch, captions=sampler).text for epoch in range(30)}
    assert drawn == {"word 1 0", "word 1 1", "word 1 2"}


def test_how_captions_are_drawn_does_not_change_the_augmentation():
    one, other = (decode(members(1), captions=CaptionSampler.parse(fields)) for fields in ("txt", "keywords,name"))
    assert torch.equal(one.image, other.image)


def test_global_generators_come_back_as_they_were():
    def numbers():
        return torch.rand(()).item(), random.random(), np.random.random()  # noqa: NPY002

    seed_rng(5)
    wanted = numbers()
    seed_rng(5)
    decode(members(2))
    assert numbers() == wanted


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


@pytest.mark.parametrize("dct_scaled", [False, True])
@pytest.mark.parametrize("data", [b"", b"<html>no</html>", png()[:60], CUT_JPEG, b"\xff\xd8\xff", photo()[:-300]])
def test_files_that_are_cropped_as_they_are_opened_have_the_same_faults(data, dct_scaled):
    with pytest.raises(SampleFault, match="bad image"):
        cropped(data, dct_scaled)


@pytest.mark.parametrize("width, height", [(1, 1), (1, 40), (300, 1)])
def test_slivers_are_stretched_as_by_openclips_crop(width, height):
    assert cropped(photo(width, height)).shape == (3, 16, 16)
