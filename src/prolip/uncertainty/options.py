"""Settings of a fit of variances; without torch, so that the command line starts at once."""

from __future__ import annotations

from dataclasses import dataclass

from prolip.utils.fields import option
from prolip.utils.flags import check_range

MOST_ROWS = 2**22  # rows of a bank, or centres, of a model


@dataclass(kw_only=True)
class FitOptions:
    """Sizes of the fit of variances."""

    fit_samples: int = option(100_000, "samples read again after training to fit the variances; 0: no fit")
    bank: int = option(2048, "texts to compare an image with for its variance; each takes 4 bytes per dimension")
    centres: int = option(2048, "texts with stored variances; other texts' variances come from their tokens")
    novelty_centres: int = option(512, "classes of known images and texts for novelty, the distance from them; 0: none")
    readings: int = option(2048, "training images to store, to estimate the ambiguity of new ones; 0: none")
    changed_images: int = option(
        400, "training images to embed also under strong changes, to fit the doubt about unfamiliar ones; 0: none"
    )

    def __post_init__(self) -> None:
        check_range(self, "fit_samples", "changed_images")
        check_range(self, "bank", least=32, most=MOST_ROWS)
        check_range(self, "centres", "novelty_centres", "readings", most=MOST_ROWS)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("bank", "centres", "novelty_centres", "readings")}
