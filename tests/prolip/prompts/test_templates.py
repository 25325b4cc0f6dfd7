"""Classes as mixtures of prompts."""

import pytest
import torch
from embedding import similarity_scores
from torch import nn

from prolip.gaussian import Gaussian
from prolip.prompts import templates as zero_shot


class Letters(nn.Module):
    """Encodes a text as the histogram of its ids: two prompts can be told apart and averaged by hand."""

    def encode_text(self, ids):
        counts = torch.stack([(ids == i).sum(1) for i in range(97, 103)], 1).float()
        return Gaussian(nn.functional.normalize(counts + 1e-3, dim=-1), -counts)


def tokenize(texts):
    return torch.tensor([[ord(c) for c in text.ljust(10)[:10]] for text in texts])


def test_a_class_averages_means_and_variances_over_prompts_and_names():
    model = Letters()
    got = zero_shot.class_gaussians(model, tokenize, [["a"], ["b", "c"]], templates=("{}", "d{}"), normalise=False)
    one = model.encode_text(tokenize(["a", "da"]))
    two = model.encode_text(tokenize(["b", "db", "c", "dc"]))
    torch.testing.assert_close(got.mean, torch.stack([one.mean.mean(0), two.mean.mean(0)]))
    torch.testing.assert_close(got.var, torch.stack([one.var.mean(0), two.var.mean(0)]))
    unit = zero_shot.class_gaussians(model, tokenize, [["a"], ["b", "c"]], templates=("{}", "d{}"))
    torch.testing.assert_close(unit.mean.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(unit.mean, nn.functional.normalize(got.mean, dim=1))


def test_braces_in_a_name_are_kept_as_they_are():
    model = Letters()
    got = zero_shot.class_gaussians(model, tokenize, [["a{b}"]], templates=("c {}",))
    torch.testing.assert_close(got.log_var, model.encode_text(tokenize(["c a{b}"])).log_var)


def test_csd_prefers_the_more_certain_of_two_equally_near_classes():
    mean = nn.functional.normalize(torch.ones(1, 4), dim=-1)
    image = Gaussian(mean, torch.full((1, 4), -9.0))
    classes = Gaussian(mean.repeat(2, 1), torch.tensor([[0.0] * 4, [-3.0] * 4]))
    assert similarity_scores(image, classes).argmax().item() == 1


def test_bad_templates_and_classes_are_refused():
    with pytest.raises(ValueError, match="no place for the class"):
        zero_shot.class_gaussians(Letters(), tokenize, [["a"]], templates=("a picture",))
    for classes in (["cat"], [[]]):
        with pytest.raises(ValueError, match="give a list with at least one name"):
            zero_shot.class_gaussians(Letters(), tokenize, classes, ("a {}",))
