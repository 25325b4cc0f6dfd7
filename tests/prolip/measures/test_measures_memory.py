"""What the measures over all pairs hold in memory: never a tensor of all pairs times the width."""

import pytest
import torch
from peak_elements import PeakElements
from test_measures_pairwise import TILED, gaussian

from prolip import measures
from prolip.gaussian import Gaussian


@pytest.mark.parametrize("name", measures.MEASURES)
@pytest.mark.parametrize("training", [False, True])
def test_no_tensor_of_all_pairs_times_width_exists_in_either_pass(name, training):
    """B1 * B2 * D = 1,179,648 elements: neither a product form nor tiles of 4,096 elements come near."""
    b1, b2, d, tile = 96, 128, 96, 4096
    p, q = (Gaussian(*(x.requires_grad_(training) for x in gaussian(b, d, dtype=torch.float32))) for b in (b1, b2))
    options = {"max_elements": tile} if name in TILED else {}
    with PeakElements() as count:
        value = measures.MEASURES[name].pairwise(p, q, **options)
        kept = count.live
        if training:
            value.sum().backward()
    matrices, inputs = b1 * b2, 2 * (b1 + b2) * d
    assert kept <= 2 * matrices + inputs  # between the passes
    assert count.peak <= 4 * matrices + 3 * inputs + 24 * tile < b1 * b2 * d / 3


@pytest.mark.parametrize("name", TILED)
def test_the_memory_count_notices_an_untiled_measure(name):
    """The counterpart of the test above: with a workspace for everything the count passes B1 * B2 * D."""
    p, q = (Gaussian(*(x.requires_grad_() for x in gaussian(b, 96, dtype=torch.float32))) for b in (96, 128))
    with PeakElements() as count:
        measures.MEASURES[name].pairwise(p, q, max_elements=2**30).sum().backward()
    assert count.peak > 2 * 96 * 128 * 96


@pytest.mark.parametrize("exact", [False, True])
def test_match_probability_keeps_no_distances_of_all_samples(exact):
    """B1 * B2 * J^2 = 147,456 distances: tiled in both passes, the samples themselves (J (B1 + B2) D) are kept."""
    p, q = (Gaussian(*(x.requires_grad_() for x in gaussian(b, 8, dtype=torch.float32))) for b in (48, 48))
    peaks = []
    for max_elements in (2048, 2**30):
        with PeakElements() as count:
            measures.pairwise_log_match_probability(p, q, 3.0, 2.0, 8, None, exact, max_elements).sum().backward()
        peaks.append(count.peak)
    assert peaks[0] < 48 * 48 * 64 / 2
    assert peaks[1] > 2 * 48 * 48 * 64
