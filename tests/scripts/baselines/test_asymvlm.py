"""The logit against scipy's density, and concentrations against those that the images were drawn with."""

from __future__ import annotations

import torch
from ambiguous_pairs import points
from scipy.stats import spearmanr, vonmises_fisher

from prolip.embeddings import Pairs
from studies.uncertainty.baselines import AsymVLM
from studies.uncertainty.baselines.asymvlm import log_density
from studies.uncertainty.baselines.sphere import power_spherical_sample


def test_the_logit_is_the_log_density_of_the_image_under_the_text():
    image, kappa = points(4, 8, dtype=torch.float64), torch.tensor([0.5, 20.0, 300.0], dtype=torch.float64)
    mean = points(3, 8, seed=1, dtype=torch.float64)
    densities = [vonmises_fisher(m.numpy(), float(k)) for m, k in zip(mean, kappa)]
    wanted = torch.stack([torch.from_numpy(density.logpdf(image.numpy())) for density in densities], 1)
    torch.testing.assert_close(log_density(image, kappa.unsqueeze(1) * mean), wanted, rtol=1e-6, atol=1e-6)


def test_texts_whose_images_scatter_more_get_less_concentration(small):
    torch.manual_seed(0)
    text, new = points(500, 36), points(300, 36, seed=5)
    kappa = 35 * torch.where(text[:, 0] > 0, 1.0, 20.0)  # seen from where a text lies
    image = power_spherical_sample(text, kappa, 4).flatten(0, 1)
    rows = {"image_of": torch.arange(2000), "text_of": torch.arange(500).repeat(4)}
    fitted = AsymVLM.fit(Pairs(image=image, text=text, scale=20.0, **rows))
    assert spearmanr(fitted.text(new), new[:, 0] > 0)[0] > 0.4
