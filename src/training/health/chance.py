"""Whether a run learns: its in-batch R@1 beside chance, and one warning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prolip.measures.chance import is_at_chance
from prolip.methods.base import CANDIDATES


@dataclass
class ChanceWatch:
    """Judges the R@1 of the last CANDIDATES pairs or more, once, when a tenth of the run is over.

    rows: of a rank in a step; ranks; total: steps of the run; seen: the step of the last call.
    """

    rows: int
    ranks: int
    total: int
    seen: int = 0
    steps: int = 0
    found: float = 0.0
    judged: bool = False

    @property
    def candidates(self) -> int:
        """Among how many captions an image's own is to be found."""
        return min(self.rows, CANDIDATES)

    def judge(self, step: int, recall: float) -> str:
        """A warning, or nothing. recall: mean since the last call."""
        taken, self.seen = step - self.seen, step
        if self.judged or self.candidates < 2 or not math.isfinite(recall):
            return ""
        self.steps, self.found = self.steps + taken, self.found + recall * taken
        if self.steps * self.candidates * self.ranks < CANDIDATES:
            return ""
        rate, self.steps, self.found = self.found / self.steps, 0, 0.0
        self.judged = 10 * step >= self.total
        if not self.judged or not is_at_chance(round(rate * CANDIDATES), CANDIDATES, self.candidates):
            return ""
        return (
            f"warning: step {step}: the model is still at chance, its in-batch R@1 is {rate:.1%} where chance is "
            f"{1 / self.candidates:.1%}; likely causes: the bias (--init-logit-bias auto fits it to the batch), the "
            "learning rate (--lr), captions of other images, frozen towers (--lock-image, --lock-text)"
        )
