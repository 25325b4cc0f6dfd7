"""Probabilistic language-image pre-training: every image and every text is a Gaussian."""
# ruff: noqa: F401  # names for type checkers

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from prolip.utils.moved import Signpost, late

if TYPE_CHECKING:
    from prolip import losses, measures
    from prolip.classifiers import FewShotClassifier, ZeroShotClassifier
    from prolip.data.images import open_image
    from prolip.embedder import Embedder
    from prolip.factory import (
        create_model,
        create_model_and_transforms,
        create_model_from_pretrained,
        list_pretrained,
        tokenize,
    )
    from prolip.fitting.attach import fit_uncertainty
    from prolip.gaussian import Gaussian
    from prolip.hub.sharing import push_to_hub
    from prolip.methods import score_of
    from prolip.models.checkpoint import save_pretrained
    from prolip.models.registry import list_models
    from prolip.models.tokenizer import get_tokenizer
    from prolip.prompts.templates import build_zero_shot_classifier
    from prolip.search.index import SearchIndex

__version__ = "0.1.0"
sys.meta_path.insert(0, Signpost())  # first: a folder with old bytecode would be found as a package

if sys.argv[:1] == ["-m"]:  # Python imports this before it runs one of its modules as a program
    from prolip.utils.moved import refuse

    refuse()

# OpenCLIP takes seconds and 240 MB to import, and Gaussians, measures, losses and metrics do not need it; torch takes
# seconds, before which a program needs its signal handlers and output in place; the readers of files import Pillow
# and libraries for URLs.
PLACES = {
    "losses": "",
    "measures": "",
    "Gaussian": "gaussian",
    "Embedder": "embedder",
    "SearchIndex": "search.index",
    "create_model": "factory",
    "create_model_and_transforms": "factory",
    "list_models": "models.registry",
    "get_tokenizer": "models.tokenizer",
    "create_model_from_pretrained": "factory",
    "fit_uncertainty": "fitting.attach",
    "open_image": "data.images",
    "score_of": "methods",
    "build_zero_shot_classifier": "prompts.templates",
    "list_pretrained": "factory",
    "tokenize": "factory",
    "FewShotClassifier": "classifiers",
    "ZeroShotClassifier": "classifiers",
    "save_pretrained": "models.checkpoint",
    "push_to_hub": "hub.sharing",
}
__getattr__ = late(__name__, PLACES)
__all__ = sorted(PLACES)


def __dir__() -> list[str]:
    """List the names, with those imported late."""
    return sorted({*globals(), *__all__})
