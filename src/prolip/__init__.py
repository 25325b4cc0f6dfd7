"""Probabilistic language-image pre-training: every image and every text is a Gaussian."""
from prolip.factory import create_model, create_model_and_transforms, list_models
from prolip.gaussian import Gaussian

__all__ = ["Gaussian", "create_model", "create_model_and_transforms", "list_models"]
__version__ = "0.1.0"
