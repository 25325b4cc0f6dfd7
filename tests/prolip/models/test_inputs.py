"""Generated inputs to the API: each case gives the right result or one line with a remedy, and none is silent.

A case is a call with one thing wrong, or unusual and right. It passes if the call raises a TypeError or ValueError that
was raised in prolip's own files, in one line with the input, the expected input and a remedy; or if it returns the same
as the plain form of the call, with a warning if the values cannot be normalised pixels.
"""

import random
import re
import traceback
import warnings
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

import prolip
from prolip import measures
from prolip.gaussian import Gaussian, concatenate, mixture
from prolip.losses import inclusion_loss, ppcl, ppcl_over_ranks, vib

NAMES = """bhattacharyya csd_distance csd_similarity elk inclusion_test inclusion_test_per_dim js kl log_inclusion
mean_cosine wasserstein2"""
PAIRED = tuple(NAMES.split())
# Their samples are drawn in the dtype of what is given.
RANDOM = ("log_match_probability", "match_probability", "pairwise_log_match_probability", "pairwise_match_probability")
PAIRWISE = tuple(f"pairwise_{name}" for name in PAIRED if name != "inclusion_test_per_dim")
REFUSED, RIGHT, WARNED = "refused", "right", "warned"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return prolip.create_model("ProLIP-ViT-test").eval()


def judge(call, wanted=None, warning=None):
    """Return the outcome of a case; AssertionError for a foreign error, a wrong result, or silence."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            with torch.no_grad():
                got = call()
        except (TypeError, ValueError) as error:
            ours = traceback.extract_tb(error.__traceback__)[-1].filename
            assert "/prolip/" in ours and "/tests/" not in ours, f"{error!r} comes from {ours}"
            text = str(error)
            assert "\n" not in text and re.search(r": |\. [A-Z]", text) and 20 < len(text) < 330, text
            assert wanted is None, f"refused what is right: {text}"
            return REFUSED
    texts = [str(w.message) for w in seen]
    assert bool(warning) == bool(texts) and all(warning in text for text in texts), texts
    assert wanted is not None, f"silent: {got}"
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    return WARNED if warning else RIGHT


# --- Gaussians where losses, measures and mixtures take them ----------------------------------------------------------
def gaussian(seed, rows=3, dim=4):
    generator = torch.Generator().manual_seed(seed)
    return Gaussian(*(torch.randn(rows, dim, generator=generator) for _ in range(2)))


def no_gaussians(z):
    """Return inputs that are not Gaussians, next to any other argument."""
    mean, log_var = z
    every = [mean, mean.numpy(), (mean, log_var), [mean, log_var], (mean, log_var, mean), [z, z], [], None, "z", 3.0]
    every += [z.select, mean.tolist(), {"mean": mean, "log_var": log_var}, Image.new("RGB", (2, 2)), Gaussian(z, z)]
    every += [Gaussian(mean.numpy(), log_var.numpy()), Gaussian(mean, None), Gaussian(mean.tolist(), log_var)]
    every += [Gaussian(mean, 0.0), Gaussian(mean.long(), log_var), Gaussian(mean, log_var > 0)]
    every += [Gaussian(mean + 0j, log_var), Gaussian(mean, log_var[:, :1]), Gaussian(mean, log_var[:1])]
    every += [Gaussian(mean[0, 0], log_var[0, 0]), Gaussian(mean.to("meta"), log_var)]
    every += [Gaussian(mean, log_var.to("meta"))]
    return every


def strangers(z):
    """Gaussians that cannot be compared with one like z."""
    return [z.to("meta"), Gaussian(z.mean[:, :3], z.log_var[:, :3]), Gaussian(*(torch.zeros(3, 1) for _ in range(2)))]


FORMS = [torch.Tensor.double, torch.nn.Parameter, lambda x: x, lambda x: x.t().contiguous().t()]


def unusual(rng, z):
    """The same Gaussian, its tensors of another kind, dtype or layout."""
    return Gaussian(*(rng.choice(FORMS)(x) for x in z))


#: Everything that takes two Gaussians, by name.
TWO = {name: getattr(measures, name) for name in (*PAIRED, *PAIRWISE)}
TWO |= {f"MEASURES[{name}]": measure.pairwise_scores for name, measure in measures.MEASURES.items()}
TWO |= {one.__name__: partial(one, scale=10.0, bias=-10.0) for one in (ppcl, ppcl_over_ranks)}
TWO |= {"inclusion_loss": inclusion_loss}
TWO |= {name: partial(getattr(measures, name), scale=2.0, bias=1.0) for name in RANDOM}
ONE = {"vib": vib, "mixture": lambda z: torch.cat(mixture(z)), "concatenate": lambda z: torch.cat(concatenate([z]))}


def gaussian_case(seed, model):
    """One wrong or unusual Gaussian in one place of one function."""
    rng = random.Random(f"gaussian {seed}")
    names = [*TWO, *ONE]
    name, z, w = names[seed % len(names)], gaussian(seed), gaussian(seed + 1)
    function, wrong = {**TWO, **ONE}[name], no_gaussians(z) + (strangers(z) if name in TWO else [])
    first = rng.random() < 0.5

    def arguments(z):
        return (z,) if name in ONE else (z, w) if first else (w, z)

    if rng.random() < 0.7 or name in RANDOM:
        spoilt = rng.choice(wrong)
        return judge(lambda: function(*arguments(spoilt)))
    same = unusual(rng, z)
    return judge(lambda: function(*arguments(same)).float(), function(*arguments(z)))


# --- images and texts where the model takes them ----------------------------------------------------------------------
def wrong_images(rng, x):
    """Calls of encode_image that cannot be right; x (B, 3, 32, 32) floats."""
    pixels = (x.sigmoid() * 255).to(torch.uint8)
    hole = x.clone()
    hole[rng.randrange(len(x)), 1, 2, 3] = rng.choice([float("nan"), float("inf"), -float("inf")])
    dtypes = [torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.complex64]
    several = [Image.new("RGB", (32, 32))] * len(x)
    values = [pixels.to(rng.choice(dtypes)), hole, x.to("meta"), x.numpy(), pixels.numpy(), several, several[0]]
    values += [list(x), None, "picture.png", 3, x[0], x[:, :1], x.permute(0, 2, 3, 1), torch.cat([x, x[:, :1]], 1)]
    values += [x[..., :31], x[None], x.flatten(1), pixels[:, 0], pixels.to("meta"), pixels.permute(0, 2, 3, 1)]
    return (rng.choice(values),)


def wrong_keep(rng, x):
    """Calls of encode_image with patches to keep that cannot be kept."""
    keep = torch.rand(len(x), 16).argsort(1)[:, :5]
    values = [keep.float(), keep.int(), keep.tolist(), keep[0], keep[None], torch.cat([keep, keep]), keep + 16]
    values += [keep - 16, keep.numpy(), slice(0, 5)]
    return x, rng.choice(values)


def image_case(seed, model):
    """One batch of images, wrong, unusual, or never normalised."""
    rng = random.Random(f"image {seed}")
    x = torch.randn(rng.randint(1, 4), 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    kind = rng.randrange(6)
    if kind < 3:
        spoilt = wrong_keep(rng, x) if kind == 2 else wrong_images(rng, x)
        if kind == 0 and isinstance(spoilt[0], torch.Tensor):
            return judge(lambda: model(spoilt[0]).image)
        return judge(lambda: model.encode_image(*spoilt))
    raw = (x.sigmoid() * 255).to(torch.uint8)
    normalised = (raw / 255 - model.pixel_mean) / model.pixel_std
    if kind == 3:
        return judge(lambda: model.encode_image(raw), encode(model, normalised))
    if kind == 4:
        raw = raw.to(rng.choice([torch.float32, torch.float16, torch.float64]))
        return judge(lambda: model.encode_image(raw), encode(model, raw.float()), "images have values beyond 20")
    low = x.half()
    forms = [low, low.double(), low.float().requires_grad_(), x[:0], x[:1]]
    form = rng.choice([*forms, low.float().to(memory_format=torch.channels_last)])
    return judge(lambda: model.encode_image(form), encode(model, form.float()))


def wrong_texts(rng, ids):
    """Return inputs that are not token ids of the model; ids (B, 12) int64."""
    outside = ids.clone()
    outside[rng.randrange(len(ids)), 3] = rng.choice([-1, 49409, 1 << 40, -(1 << 40)])
    casts = [ids.to(dtype) for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16, torch.complex64)]
    others = [outside, *casts, ids.to("meta"), ids.numpy(), ids.tolist(), "a cat", ["a cat", "a dog"], ("a cat",), None]
    others += [ids[0], ids[None], ids[:, :0], torch.cat([ids, ids], 1), {"input_ids": ids}, torch.randn(2, 3, 32, 32)]
    return rng.choice(others)


def text_case(seed, model):
    """One batch of token ids, wrong or unusual."""
    rng = random.Random(f"text {seed}")
    ids = torch.randint(49409, (rng.randint(1, 4), 12), generator=torch.Generator().manual_seed(seed))
    if rng.random() < 0.7:
        spoilt = wrong_texts(rng, ids)
        through = rng.choice([model.encode_text, lambda text: model(text=text).text])
        return judge(lambda: through(spoilt)) if spoilt is not None else judge(lambda: model.encode_text(None))
    form = rng.choice([ids.int(), ids.t().contiguous().t(), ids[:0], ids[:1], ids[:, :7], ids])
    return judge(lambda: model.encode_text(form), model.encode_text(form.long().contiguous()))


def encode(model, x):
    """Encode float32 images with the image tower, without checks."""
    with torch.no_grad():
        return model.visual(x)


CASES = {"gaussian": gaussian_case, "image": image_case, "text": text_case}


@pytest.mark.parametrize("kind", CASES)
def test_each_input_is_right_or_refused_with_a_remedy(model, kind):
    verdicts = Counter(CASES[kind](seed, model) for seed in range(160))
    assert verdicts[REFUSED] > 40 and verdicts[RIGHT] > 15 and (kind != "image" or verdicts[WARNED] > 8)


@pytest.mark.parametrize("value", [torch.ones(2), None, "3", [1.0], {"scale": 1}, np.ones(3)])
@pytest.mark.parametrize("place", ["scale", "bias"])
def test_a_scale_that_is_no_number_is_refused_by_its_name(value, place):
    z = gaussian(0)
    for function in (ppcl, measures.match_probability, measures.pairwise_log_match_probability):
        call = {"scale": 2.0, "bias": 1.0} | {place: value}
        with pytest.raises((TypeError, ValueError), match=f"^{place} must be one number, got .*: give a number"):
            function(z, z, **call)


def test_in_training_mode_values_are_looked_at_once_and_in_evaluation_mode_always():
    """Each look at a device's values stops the host; `test_loop.py` has a whole step without one."""
    model = prolip.create_model("ProLIP-ViT-test").train()
    raw, ids = torch.full((1, 3, 32, 32), 128.0), torch.zeros(1, 12, dtype=torch.int64)

    def warned():
        with warnings.catch_warnings(record=True) as seen, torch.no_grad():
            warnings.simplefilter("always")
            model.encode_image(raw)
        return len(seen)

    assert [warned(), warned(), warned()] == [1, 0, 0]
    model.eval()
    assert [warned(), warned()] == [1, 1]
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("default")  # what people have: one line, however many batches
        for _ in range(3):
            model.encode_image(raw)
    assert len(seen) == 1 and seen[0].filename == __file__
    model.train().encode_text(ids)
    assert model._checked == {"image", "text"}


def test_values_that_cannot_be_looked_at_are_let_through(model):
    image = torch.randn(2, 3, 32, 32)
    with torch.device("meta"):
        assert prolip.create_model("ProLIP-ViT-test", device="meta").eval().encode_image(image.to("meta")).mean.is_meta
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert model.encode_image(fake.from_tensor(image)).mean.shape == (2, 32)
    compiled = torch.compile(model.encode_text, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2, 12, dtype=torch.int64)).mean.shape == (2, 32)
