"""Traces in nats, bits and counts, and shares in words."""

from __future__ import annotations

import math

import pytest
import torch

from prolip.uncertainty.units import Units, in_words

UNITS = Units(unit=0.1, images=2000, texts=500)


def test_a_text_true_of_n_images_says_log_of_all_over_n():
    trace = 0.1 * torch.tensor([1.0, 20.0, 2000.0]).log()
    torch.testing.assert_close(UNITS.nats(trace).exp(), torch.tensor([1.0, 20.0, 2000.0]))
    torch.testing.assert_close(UNITS.share(trace), torch.tensor([1 / 2000, 0.01, 1.0]))
    torch.testing.assert_close(UNITS.matches(trace, among=300), torch.tensor([0.15, 3.0, 300.0]))
    torch.testing.assert_close(
        UNITS.information(trace), torch.tensor([math.log(2000), math.log(100), 0.0]), atol=1e-5, rtol=1e-5
    )
    assert UNITS.information(trace[:1], bits=True).item() == pytest.approx(math.log2(2000), rel=1e-5)
    assert UNITS.share(trace[:1], of="texts").item() == pytest.approx(1 / 500, rel=1e-5)
    assert UNITS.information(trace[:1], of="texts").item() == pytest.approx(math.log(500), rel=1e-5)
    assert UNITS.information(trace[:1], of="texts", bits=True).item() == pytest.approx(math.log2(500), rel=1e-5)
    assert UNITS.matches(trace[:1], among=100, of="texts").item() == pytest.approx(100 / 500, rel=1e-5)


def test_share_and_trace_undo_each_other_and_nothing_fits_more_than_all():
    share = torch.tensor([1e-3, 0.2, 1.0])
    torch.testing.assert_close(UNITS.share(UNITS.trace(share, "texts"), "texts"), share)
    assert UNITS.share(torch.tensor(5.0)).item() == 1.0 and UNITS.information(torch.tensor(5.0)).item() == 0.0
    with pytest.raises(ValueError, match="'words'"):
        UNITS.share(share, of="words")


def test_the_code_length_of_an_answer_is_the_information_of_its_share_of_the_odds():
    cosine = torch.tensor([[0.9, 0.8, 0.1], [0.0, 0.0, 0.0], [1.0, -1.0, -1.0]], dtype=torch.float64)
    odds = [[math.exp(20 * x) for x in row] for row in cosine.tolist()]
    expected = [[-math.log(x / sum(row)) for x in row] for row in odds]
    torch.testing.assert_close(UNITS.code_length(cosine), torch.tensor(expected, dtype=torch.float64))
    cold = UNITS._replace(unit=1e-4).code_length(cosine.float())  # logits of 20,000
    assert cold.isfinite().all() and cold.amin() >= 0


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (1.0, "nearly all"),
        (0.67, "about 2 in 3"),
        (0.5, "about 1 in 2"),
        (1 / 12, "about 1 in 12"),
        (0.91, "nearly all"),
        (0.89, "about 4 in 5"),
        (0.3, "about 1 in 3"),
        (1 / 274, "about 1 in 270"),
        (1 / 12_345, "about 1 in 12,000"),
        (0.0, "none"),
        (0.29, "about 1 in 3"),
    ],
)
def test_a_share_in_words(share, words):
    assert in_words(share) == words


def test_what_is_no_share_is_refused():
    with pytest.raises(ValueError, match="1.5"):
        in_words(1.5)
