"""Values in Markdown: every one is escaped, unless it says that it is Markdown itself."""
from __future__ import annotations

import html
import json
import re

from prolip.utils.console import escaped, plain

#: What has a meaning within a line; an underscore between letters has none.
INLINE = re.compile(r"[\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])")
#: What has a meaning at the beginning of a block.
BLOCK = re.compile(r"^(?:(?=#|=|--|\+\+|[-+](?:\s|$))|(\d+)(?=[.)](?:\s|$)))")
#: What a name between backquotes may not hold.
ODD = re.compile(r"[`|<>\[\]&]")


class Markdown(str):
    """Text that is Markdown, in which the values are escaped."""


def markdown(value: object) -> str:
    """A value as text of one line, with which no heading, table, link, image or HTML begins or ends."""
    if isinstance(value, Markdown):
        return value
    text = INLINE.sub(r"\\\g<0>", html.escape(plain(value).strip(), quote=False))
    return Markdown(BLOCK.sub(r"\1\\", text))


def code(value: object) -> Markdown:
    """A value between backquotes, in a table, too: characters that mean something in Markdown are written as \\xNN."""
    return Markdown(ODD.sub(escaped, plain(value)))


def literal(value: object) -> Markdown:
    """A text in a block of Python."""
    return Markdown(json.dumps(plain(value), ensure_ascii=False))


FILTERS = {"code": code, "literal": literal}
