"""Classes as mixtures of prompts."""

import pytest
import torch
from embedding import similarity_scores
from torch import nn

from prolip.gaussian import Gaussian
from prolip.prompts import templates as zero_shot


class Letters(nn.Module):
    """Encoder of a text as the histogram of its ids: prompts differ and can be averaged by hand."""

    def encode_text(self, ids):
        counts = torch.stack([(ids == i).sum(1) for i in range(97, 103)], 1).float()
        return Gaussian(nn.functional.normalize(counts + 1e-3, dim=-1), -counts)


def tokenize(texts):
    return torch.tensor([[ord(c) for c in text.ljust(10)[:10]] for text in texts])


def test_a_class_averages_means_and_variances_over_prompts_and_names():
    model = Letters()
    got = zero_shot.build_zero_shot_classifier(model, tokenize, ["a", ["b", "c"], ["a{b}"]], templates=("{}", "d{c}"))
    for row, texts in enumerate((["a", "da"], ["b", "db", "c", "dc"], ["a{b}", "da{b}"])):  # braces in names stay
        z = model.encode_text(tokenize(texts))
        torch.testing.assert_close(got.mean[row], nn.functional.normalize(z.mean.mean(0), dim=0))
        torch.testing.assert_close(got.var[row], z.var.mean(0))
    wrong = [(["a"], templates) for templates in (("an image",), (), "{}")]
    for classes, templates in (*wrong, ([[]], ("a {}",)), ([], ("{}",)), ("a", ("{}",))):
        with pytest.raises(ValueError, match="for the class: add one|give at least one"):
            zero_shot.build_zero_shot_classifier(model, tokenize, classes, templates)


def test_csd_prefers_the_more_certain_of_two_equally_near_classes():
    mean = nn.functional.normalize(torch.ones(1, 4), dim=-1)
    image = Gaussian(mean, torch.full((1, 4), -9.0))
    classes = Gaussian(mean.repeat(2, 1), torch.tensor([[0.0] * 4, [-3.0] * 4]))
    assert similarity_scores(image, classes).argmax().item() == 1
