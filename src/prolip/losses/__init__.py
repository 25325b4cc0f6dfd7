"""Losses as pure functions: PPCL and similar losses over all pairs of all ranks, inclusion and VIB of single inputs.

`ppcl` and `sigmoid_loss` take similarities that factor; `tiled_loss_over_ranks` takes any score and any loss of the
whole block of similarities, such as `matching_loss` and `triplet_loss`.
"""

from prolip.losses.autograd import both_ways, transpose_over_ranks, world_size
from prolip.losses.contrastive import ppcl, ppcl_over_ranks, sigmoid_loss, sigmoid_loss_over_ranks
from prolip.losses.functional import inclusion_loss, matching_loss, pseudo_labels, softmax_loss, triplet_loss, vib
from prolip.losses.pairs import Factors, csd_factors, mean_factors, wasserstein2_factors
from prolip.losses.positives import Matches
from prolip.losses.tiled import dot_products, log_match_odds, tiled_loss_over_ranks, uniformity_over_ranks

__all__ = ["Factors", "Matches", "both_ways", "csd_factors", "dot_products", "inclusion_loss", "log_match_odds"]
__all__ += ["matching_loss", "mean_factors", "ppcl", "ppcl_over_ranks", "pseudo_labels", "sigmoid_loss", "softmax_loss"]
__all__ += ["sigmoid_loss_over_ranks", "tiled_loss_over_ranks", "transpose_over_ranks", "triplet_loss"]
__all__ += ["uniformity_over_ranks", "vib", "wasserstein2_factors", "world_size"]
