"""Zero- and few-shot classifiers as scikit-learn's estimators, which refuse where they would be wrong too often."""

from prolip.classifiers.few_shot import FewShotClassifier
from prolip.classifiers.zero_shot import ZeroShotClassifier

__all__ = ["FewShotClassifier", "ZeroShotClassifier"]
