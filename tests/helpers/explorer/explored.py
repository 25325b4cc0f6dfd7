"""Captions that would run scripts, and the explorer of a command line."""

from __future__ import annotations

from prolip.cli import explore
from prolip.cli.command import parser_of
from prolip.explorer.app import App

#: What a caption must not do.
HOSTILE = ("<script>window.ran = 1</script>", '<img src=x onerror="window.ran = 2">', '"><svg onload=window.ran=3>')


def make_app(words: list[str]) -> App:
    """Return the app of `prolip explore` with these words."""
    return explore.make_app(parser_of(explore.explore).parse_strictly(words))
