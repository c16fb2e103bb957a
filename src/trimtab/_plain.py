"""Text of unknown origin, made fit to be printed."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` without the codes that colour a terminal and without other control characters, except line ends and tabs."""
    return _CONTROL.sub("", text.replace("\r\n", "\n"))
