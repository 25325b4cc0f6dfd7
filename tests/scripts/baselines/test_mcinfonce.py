"""The loss against a loop, and concentrations against those of data made as the method supposes."""

from __future__ import annotations

import torch
from ambiguous_pairs import points
from scipy.stats import spearmanr

from prolip.embeddings import Pairs
from studies.uncertainty.baselines import MCInfoNCE
from studies.uncertainty.baselines.mcinfonce import mc_infonce
from studies.uncertainty.baselines.sphere import power_spherical_sample


def test_loss_is_minus_the_log_of_the_mean_probability_over_draws_both_ways():
    image, text = (torch.stack([points(4, 3, seed=s + k, dtype=torch.float64) for s in range(5)]) for k in (0, 9))
    total = 0.0
    for i in range(4):
        for own, other in ((image, text), (text, image)):
            shares = [(6 * other[s] @ own[s, i]).softmax(0)[i] for s in range(5)]
            total -= torch.stack(shares).mean().log() / 8
    torch.testing.assert_close(mc_infonce(image, text, torch.tensor(6.0, dtype=torch.float64)), total)


def test_it_finds_the_concentrations_of_both_sides_of_data_made_as_it_supposes(small):
    """Latent points, z' around z, and of each an observation whose concentration hangs on where it lies."""
    torch.manual_seed(0)

    def concentration(z: torch.Tensor, axis: int) -> torch.Tensor:
        return 15 * torch.where(z[:, axis] > 0, 1.0, 40.0)

    z = points(3000, 16)
    partner = power_spherical_sample(z, torch.full((3000,), 60.0), 1)[0]
    image = power_spherical_sample(z, concentration(z, 0), 1)[0]
    text = power_spherical_sample(partner, concentration(partner, 1), 1)[0]
    fitted, new = MCInfoNCE.fit(Pairs.in_rows(image, text, 60.0)), points(500, 16, seed=5)
    assert spearmanr(fitted.image(new), new[:, 0] > 0)[0] > 0.5
    assert spearmanr(fitted.text(new), new[:, 1] > 0)[0] > 0.5
    assert fitted.image(new).median() < 1 / 15  # more certain than the sharpest prior of a flat one
