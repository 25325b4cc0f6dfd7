"""Uncertainties by other authors, each on frozen embeddings and with one interface: what ours has to beat."""
from prolip.uncertainty.baselines.asymvlm import AsymVLM
from prolip.uncertainty.baselines.base import Baseline
from prolip.uncertainty.baselines.bayesvlm import BayesVLM
from prolip.uncertainty.baselines.empty_text import EmptyText
from prolip.uncertainty.baselines.information_gain import InformationGain
from prolip.uncertainty.baselines.loss_prediction import LossPrediction
from prolip.uncertainty.baselines.mcinfonce import MCInfoNCE
from prolip.uncertainty.baselines.nearest_neighbours import NearestNeighbours
from prolip.uncertainty.baselines.pair_likelihood import PairLikelihood
from prolip.uncertainty.baselines.probvlm import ProbVLM
from prolip.uncertainty.baselines.top_score import TopScore

BASELINES: dict[str, type[Baseline]] = {
    "top score": TopScore,
    "empty text": EmptyText,
    "information gain": InformationGain,
    "loss prediction": LossPrediction,
    "AsymVLM": AsymVLM,
    "ProbVLM": ProbVLM,
    "BayesVLM": BayesVLM,
    "MCInfoNCE": MCInfoNCE,
    "pair likelihood": PairLikelihood,
    "nearest neighbours": NearestNeighbours,
}

__all__ = [
    "BASELINES", "AsymVLM", "Baseline", "BayesVLM", "EmptyText", "InformationGain", "LossPrediction", "MCInfoNCE",
    "NearestNeighbours", "PairLikelihood", "ProbVLM", "TopScore",
]  # fmt: skip
