"""Published rows of the 38 tasks, and whether their printed averages follow from them.

The paper's rows are transcribed from ProLIP (Chun et al., ICLR 2025) Table C.1, the aggregates from Tables 1 and C.2;
OpenCLIP's from docs/openclip_results.csv of mlfoundations/open_clip (commit f862f86cd92123615a8695ce8bcb6ecc066af452).
All values are percent.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prolip.evaluation.suites.datacomp.tasks import AGGREGATES, BY_NAME, COUNTED, aggregate

TABLE_1, TABLE_C1, TABLE_C2 = "ProLIP Table 1", "ProLIP Table C.1", "ProLIP Table C.2"
OPENCLIP = "OpenCLIP docs/openclip_results.csv"

#: The columns as Table C.1's header has them; `COUNTED` is in the same order.
HEADER = tuple(task.name for task in COUNTED)

_PAIRS = ("Flickr", "MSCOCO", "iWildCam", "Camelyon17", "FMoW", "WinoGAViL", "Dollar Street", "GeoDE")
#: The order of two rows: under the header iWildCam would be 82% and Flickr 67%; so ViT-L's retrieval follows.
PAIRS_FIRST = (*HEADER[:30], *_PAIRS)

_RECALL = ("Caltech-101", "FGVC Aircraft", "Oxford Flowers-102", "Oxford-IIIT Pet")
_GROUPED = ("Camelyon17", "Flickr", "MSCOCO", *_RECALL, "WinoGAViL", "iWildCam", "FMoW", "Dollar Street", "GeoDE")
#: The order of the 12.8B row: accuracies first, then retrieval, per-class recalls, the rest; under the header ImageNet
#: would be 66.66, so it is 74.56 as in Table 1, and all five averages follow.
BY_METRIC = (*(name for name in HEADER if name not in _GROUPED), *_GROUPED)

#: The columns of OpenCLIP's file.
IMAGENET_FIRST = (
    "ImageNet 1k", *(name for name in HEADER[:30] if name != "ImageNet 1k"), "Flickr", "MSCOCO", "WinoGAViL",
    "iWildCam", "Camelyon17", "FMoW", "Dollar Street", "GeoDE",
)  # fmt: skip


#: A printed figure: percent, the unit of its last digit, where it is printed.
Reading = tuple[float, float, str]


@dataclass(frozen=True)
class PublishedRow:
    """One model as printed.

    values: task key -> percent; printed: aggregate -> how it is printed, in one place or two; unit: of the values' last
    digit; note: what a reader should know of the reading.
    """

    model: str
    seen: str
    values: Mapping[str, float]
    printed: Mapping[str, tuple[Reading, ...]]
    unit: float
    source: str
    note: str = ""

    @property
    def label(self) -> str:
        """Model and samples seen."""
        return f"{self.model}, {self.seen}" if self.seen else self.model


class Check(NamedTuple):
    """One printed average against the mean of the row's own values.

    slack: how far rounding of the entries and of the average can move it, 0.5 unit each; explained: it does.
    """

    aggregate: str
    printed: float
    recomputed: float
    slack: float
    source: str

    @property
    def explained(self) -> bool:
        """Whether rounding explains the difference."""
        return abs(self.recomputed - self.printed) <= self.slack + 1e-9


def reproduce(row: PublishedRow) -> list[Check]:
    """Every printed average of a row, recomputed from its values."""
    means = aggregate(row.values)
    return [
        Check(name, value, means[name].value, 0.5 * (unit + row.unit), source)
        for name, readings in row.printed.items()
        for value, unit, source in readings
    ]


def published_report(rows: Sequence[PublishedRow]) -> str:
    """What follows and what does not, one line per average that does not and one per row where all do."""
    lines = []
    for row in rows:
        checks = reproduce(row)
        failed = [check for check in checks if not check.explained]
        if not failed:
            lines.append(f"{row.label}: all {len(checks)} printed averages follow from its 38 values")
        lines += [
            f"{row.label}: {check.aggregate} is printed as {check.printed} ({check.source}), its values give "
            f"{check.recomputed:.2f}; rounding explains {check.slack:.3f} at most"
            for check in failed
        ]
    return "\n".join(lines)


def _values(order: Sequence[str], text: str, factor: float = 1.0) -> dict[str, float]:
    """Percentages in a known order."""
    numbers = [float(number) for number in text.replace(",", " ").split()]
    if len(numbers) != len(order):
        raise ValueError(f"got {len(numbers)} values, wanted {len(order)}")
    return {BY_NAME[name].key: round(factor * value, 4) for name, value in zip(order, numbers)}


def _paper(  # a row of the paper: five aggregates to one decimal, and the average of C.1 to two
    model: str, seen: str, table: str, aggregates: str, average: float, values: str, order: Sequence[str] = HEADER,
    note: str = "",
) -> PublishedRow:  # fmt: skip
    five = [float(number) for number in aggregates.split()]
    printed: dict[str, tuple[Reading, ...]] = {name: ((value, 0.1, table),) for name, value in zip(AGGREGATES, five)}
    printed["Average"] += ((average, 0.01, TABLE_C1),)
    return PublishedRow(model, seen, _values(order, values), printed, 0.01, TABLE_C1, note)


def _openclip(model: str, pretrained: str, average: float, values: str) -> PublishedRow:
    printed = {"Average": ((round(100 * average, 2), 0.01, OPENCLIP),)}
    return PublishedRow(f"OpenCLIP {model}", pretrained, _values(IMAGENET_FIRST, values, 100), printed, 0.01, OPENCLIP)


PAPER: tuple[PublishedRow, ...] = (
    _paper(
        "CLIP ViT-B/16", "1.28B", TABLE_1, "67.2 55.1 56.9 53.4 57.1", 57.12,
        "91.75 94.34 77.85 18.01 15.79 15.63 60.43 45.09 20.77 86.55 50.27 67.24 55.70 58.95 30.73 53.70 76.35 30.80"
        " 72.96 55.39 69.67 88.57 81.38 56.67 50.08 58.57 83.09 96.78 66.43 59.68 11.16 56.03 10.57 71.09 45.49 43.46"
        " 56.43 86.97",
    ),
    _paper(
        "SigLIP ViT-B/16", "1.28B", TABLE_1, "67.4 55.4 55.7 53.4 56.7", 56.72,
        "92.77 94.17 78.25 20.11 15.87 15.18 60.90 39.15 21.01 85.96 40.71 67.37 55.93 59.67 30.80 54.25 76.41 18.00"
        " 73.17 55.60 68.62 88.31 81.46 56.66 49.20 55.62 83.82 96.23 67.60 61.70 10.07 63.84 11.69 71.76 45.47 43.09"
        " 57.48 87.56",
    ),
    _paper(
        "ProLIP ViT-B/16", "1.28B", TABLE_1, "67.6 55.0 57.1 53.4 57.3", 56.90,
        "92.68 94.58 77.73 27.64 17.30 15.54 60.80 39.07 26.46 85.33 46.17 67.84 56.85 60.03 27.28 54.50 76.74 36.99"
        " 70.37 53.36 74.04 90.05 80.91 54.05 49.70 54.70 86.49 96.31 66.60 59.00 70.45 45.65 10.42 44.96 9.53 40.46"
        " 55.84 85.68", PAIRS_FIRST,
        "the last eight values are not in the header's order; Table 1 and Table C.1 are of two different evaluations",
    ),
    _paper(
        "ProLIP ViT-B/16 (AdamP)", "1.28B", TABLE_C2, "67.4 55.3 59.1 54.0 57.8", 57.77,
        "93.10 94.42 77.57 27.86 21.50 15.13 62.39 54.30 23.90 85.37 42.10 67.37 55.99 59.64 30.29 54.95 76.54 32.35"
        " 77.15 54.25 71.44 89.22 80.36 50.70 50.25 57.83 86.01 96.34 65.73 63.81 9.12 49.23 12.26 72.32 45.83 43.76"
        " 58.18 86.56",
    ),
    _paper(
        "ProLIP ViT-L/16 (fine-tuned SigLIP)", "1.28B", TABLE_C2, "79.4 68.6 64.0 61.3 65.9", 65.93,
        "94.58 98.28 87.79 23.31 16.27 26.56 70.53 71.26 49.91 94.20 52.76 79.40 70.28 72.77 67.67 33.45 92.26 19.97"
        " 85.05 75.37 83.24 95.27 81.13 58.07 57.66 71.59 93.72 99.02 73.97 66.53 82.26 55.76 16.23 66.76 18.24 45.86"
        " 67.06 91.15", PAIRS_FIRST, "the last eight values are not in the header's order",
    ),
    _paper(
        "ProLIP ViT-B/16", "12.8B", TABLE_1, "74.6 63.0 63.7 59.6 63.3", 63.31,
        "96.42 83.25 29.78 15.13 21.29 66.91 60.89 91.03 52.79 74.56 63.65 66.66 50.25 45.40 86.00 32.21 84.47 65.80"
        " 81.74 61.41 54.31 68.27 91.33 97.91 71.35 72.77 57.85 79.97 53.18 93.61 38.02 78.37 93.45 45.56 12.64 15.12"
        " 62.27 90.31", BY_METRIC, "the values are grouped by metric, not in the header's order",
    ),
)  # fmt: skip

OPENCLIP_ROWS: tuple[PublishedRow, ...] = (
    _openclip(
        "ViT-B-16", "datacomp_xl_s13b_b90k", 0.6147,
        "0.7349,0.9380,0.9624,0.8212,0.3267,0.2461,0.2215,0.5793,0.5883,0.2970,0.9047,0.5523,0.6044,0.6598,0.4840,"
        "0.4285,0.8362,0.2883,0.7649,0.6350,0.7701,0.9254,0.8178,0.6002,0.5162,0.6535,0.8883,0.9811,0.7051,0.6272,"
        "0.7633,0.4880,0.4832,0.1181,0.4799,0.1504,0.6168,0.8990",
    ),
    _openclip(
        "ViT-B-16", "datacomp_l_s1b_b8k", 0.5372,
        "0.6310,0.8969,0.9381,0.7540,0.2314,0.2513,0.1434,0.4691,0.5011,0.1001,0.8311,0.4343,0.4976,0.5521,0.2545,"
        "0.4955,0.7177,0.4008,0.5400,0.5298,0.6261,0.8352,0.8089,0.4973,0.5294,0.5273,0.7718,0.9576,0.6431,0.4595,"
        "0.6428,0.4045,0.4465,0.0729,0.5000,0.0976,0.5748,0.8493",
    ),
    _openclip(
        "ViT-B-16", "openai", 0.5626,
        "0.6834,0.8901,0.9077,0.6695,0.2123,0.2231,0.2282,0.4495,0.5594,0.2421,0.8872,0.4339,0.4824,0.6188,0.4995,"
        "0.4230,0.7770,0.2644,0.5135,0.5531,0.6907,0.8886,0.7831,0.5072,0.6068,0.5822,0.6477,0.9825,0.6435,0.5190,"
        "0.7218,0.4275,0.4316,0.1099,0.6808,0.1888,0.5876,0.8614",
    ),
    _openclip(
        "ViT-B-16", "laion2b_s34b_b88k", 0.5866,
        "0.7023,0.9287,0.9494,0.7684,0.2149,0.2455,0.2029,0.5633,0.5346,0.2695,0.8663,0.4826,0.5608,0.6228,0.3823,"
        "0.4625,0.8061,0.1730,0.6577,0.5598,0.7084,0.9048,0.7886,0.5639,0.5969,0.6275,0.8848,0.9786,0.7085,0.5002,"
        "0.7807,0.5087,0.4601,0.1217,0.6249,0.1211,0.5841,0.8735",
    ),
    _openclip(
        "ViT-B-16-SigLIP", "webli", 0.6232,
        "0.7604,0.9518,0.9234,0.7223,0.2373,0.2409,0.1594,0.6468,0.4428,0.4377,0.9162,0.5164,0.6792,0.6893,0.4541,"
        "0.3815,0.9030,0.4093,0.8354,0.5509,0.8549,0.9420,0.7212,0.5953,0.5244,0.6454,0.9081,0.9821,0.7001,0.5586,"
        "0.8189,0.5676,0.5738,0.1309,0.6045,0.1265,0.6589,0.9106",
    ),
    _openclip(
        "ViT-L-14", "datacomp_xl_s13b_b90k", 0.6627,
        "0.7921,0.9465,0.9824,0.8736,0.3555,0.2443,0.3157,0.6649,0.7124,0.4750,0.9452,0.5853,0.6795,0.7205,0.6959,"
        "0.3255,0.9083,0.2785,0.8661,0.7425,0.8262,0.9506,0.8247,0.5118,0.6101,0.6941,0.9305,0.9925,0.7427,0.6769,"
        "0.8119,0.5451,0.4666,0.1614,0.5089,0.2403,0.6624,0.9152",
    ),
    _openclip(
        "ViT-L-16-SigLIP-256", "webli", 0.6557,
        "0.8045,0.9593,0.9619,0.8191,0.4065,0.2150,0.2141,0.7027,0.5598,0.5259,0.9463,0.6115,0.7209,0.7376,0.6213,"
        "0.3265,0.9396,0.1983,0.8499,0.6526,0.8827,0.9604,0.7409,0.5458,0.6172,0.6817,0.9386,0.9911,0.7253,0.5211,"
        "0.8542,0.6154,0.5748,0.1796,0.5757,0.1296,0.6904,0.9173",
    ),
)  # fmt: skip

PUBLISHED: tuple[PublishedRow, ...] = (*PAPER, *OPENCLIP_ROWS)
#: Without a choice: the paper's rows, and the CLIP of the same size, data and length of training.
DEFAULT = (*PAPER, OPENCLIP_ROWS[0])


def find_published(names: Sequence[str] | None) -> tuple[PublishedRow, ...]:
    """`DEFAULT` without names; otherwise all rows whose label has one of the names in it, whatever the case.

    "all" and "none" are names too. Raises ValueError for a name that fits no row.
    """
    if not names:
        return DEFAULT
    if "none" in names:
        return ()
    chosen: list[PublishedRow] = []
    for name in names:
        fitting = [row for row in PUBLISHED if name == "all" or name.lower() in row.label.lower()]
        if not fitting:
            raise ValueError(f"no published row is called {name!r}: there are {'; '.join(r.label for r in PUBLISHED)}")
        chosen += [row for row in fitting if row not in chosen]
    return tuple(chosen)
