"""Settings of a fit of variances, without torch, so that flags start at once."""

from __future__ import annotations

from dataclasses import dataclass

from prolip.utils.fields import option
from prolip.utils.flags import check_range

MOST_ROWS = 2**22  # rows of a bank, or centres, that a model may hold


@dataclass(kw_only=True)
class FitOptions:
    """Sizes of the fit of variances."""

    fit_samples: int = option(100_000, "samples that are read once more at the end, to fit the variances; 0: no fit")
    bank: int = option(2048, "texts that an image is compared with for its variance; 4 bytes per dimension of each")
    centres: int = option(2048, "texts whose variances are kept one by one; of others their tokens speak")
    novelty_centres: int = option(512, "classes of images and texts that a new one may be far from; 0: no novelty")
    readings: int = option(2048, "training images that are kept to say how ambiguous a new one is; 0: none")
    changed_images: int = option(
        400, "training images that are embedded under strong changes, too, to fit the doubt of unfamiliar ones; 0: none"
    )

    def __post_init__(self) -> None:
        check_range(self, "fit_samples", "changed_images")
        check_range(self, "bank", least=32, most=MOST_ROWS)
        check_range(self, "centres", "novelty_centres", "readings", most=MOST_ROWS)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("bank", "centres", "novelty_centres", "readings")}
