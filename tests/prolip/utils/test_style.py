"""The colours of a figure differ for every kind of colour vision, and in grey print."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from prolip.utils.style import BAD, GOOD, IMAGE, LEVEL_COLOURS, LOOKS, TEXT, percent, styled, write

#: What is left of linear light without one sort of cones (Machado et al. 2009, severity 1).
VISION = {
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
#: CIELAB (D65): of the sRGB matrix, and of its white.
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
WHITE = XYZ.sum(1)
#: Distance that two patches of a plot have to have; the six of Okabe and Ito's that lines take come to 16.
APART = 15


def lab(colour, vision):
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x = XYZ @ (np.array(vision) @ linear).clip(0, 1) / WHITE
    f = np.where(x > (6 / 29) ** 3, np.cbrt(x), x / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(a, b, vision):
    return float(np.linalg.norm(lab(a, VISION[vision]) - lab(b, VISION[vision])))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(
    "colours", [[look[0] for look in LOOKS], [*LEVEL_COLOURS.values()], [IMAGE, TEXT], [GOOD, BAD]]
)
def test_any_two_colours_are_apart(colours, vision):
    assert min(distance(a, b, vision) for a, b in combinations(colours, 2)) > APART


def test_shares_are_called_what_they_are():
    axis = Figure().subplots().yaxis
    axis.axes.set_ylim(0, 0.18)
    percent(axis)
    names = [axis.get_major_formatter()(x) for x in (0.0, -1e-17, 0.025, 0.1, 0.6 + 0.1, 1.0, 0.001)]
    assert names == ["0%", "0%", "2.5%", "10%", "70%", "100%", "0.1%"]


@pytest.mark.parametrize(("vector", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure_is_written_as_pixels_and_as_vectors(tmp_path, vector, start):
    @styled
    def draw():
        figure = Figure()
        figure.subplots().plot([1, 2])
        return figure

    png, other = write(draw(), tmp_path / "new" / "folder", "name", vector)
    assert png.read_bytes()[:4] == b"\x89PNG" and other.read_bytes().startswith(start)
    assert [png.name, other.name] == ["name.png", f"name.{vector}"]
