"""Baselines: uncertainties by other authors, on frozen embeddings, with one interface."""

from studies.uncertainty.baselines.asymvlm import AsymVLM
from studies.uncertainty.baselines.base import Baseline
from studies.uncertainty.baselines.bayesvlm import BayesVLM
from studies.uncertainty.baselines.closed_form import EmptyText, InformationGain, NearestNeighbours, TopScore
from studies.uncertainty.baselines.loss_prediction import LossPrediction
from studies.uncertainty.baselines.mcinfonce import MCInfoNCE
from studies.uncertainty.baselines.pair_likelihood import PairLikelihood
from studies.uncertainty.baselines.probvlm import ProbVLM

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
