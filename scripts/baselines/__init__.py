"""Uncertainties by other authors, each on frozen embeddings and with one interface: what ours has to beat."""

from baselines.asymvlm import AsymVLM
from baselines.base import Baseline
from baselines.bayesvlm import BayesVLM
from baselines.empty_text import EmptyText
from baselines.information_gain import InformationGain
from baselines.loss_prediction import LossPrediction
from baselines.mcinfonce import MCInfoNCE
from baselines.nearest_neighbours import NearestNeighbours
from baselines.pair_likelihood import PairLikelihood
from baselines.probvlm import ProbVLM
from baselines.top_score import TopScore

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
    "BASELINES",
    "AsymVLM",
    "Baseline",
    "BayesVLM",
    "EmptyText",
    "InformationGain",
    "LossPrediction",
    "MCInfoNCE",
    "NearestNeighbours",
    "PairLikelihood",
    "ProbVLM",
    "TopScore",
]
