"""Zero- and few-shot classifiers as scikit-learn estimators that refuse answers which are probably wrong."""

from prolip.classifiers.few_shot import FewShotClassifier
from prolip.classifiers.zero_shot import ZeroShotClassifier

__all__ = ["FewShotClassifier", "ZeroShotClassifier"]
