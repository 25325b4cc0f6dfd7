"""Probabilistic language-image pre-training: every image and every text is a Gaussian."""
from prolip import losses, measures
from prolip.factory import create_model, create_model_and_transforms, list_models
from prolip.gaussian import Gaussian
from prolip.tokenizer import get_tokenizer

__all__ = [
    "Gaussian", "create_model", "create_model_and_transforms", "get_tokenizer", "list_models", "losses", "measures",
]  # fmt: skip
__version__ = "0.1.0"
