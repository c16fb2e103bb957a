"""What an exception says, whoever made it: it may have no text at all, or more than anybody reads."""

from __future__ import annotations

import traceback

MOST = 4000
"""Characters of a message; what is cut out of a longer one stands in its log."""

LONGEST = 40_000
"""Of a traceback."""


def said(error: BaseException) -> str:
    """The text of ``error``; of one that fails to make its text, that it does."""
    return str(traceback.TracebackException(type(error), error, None, compact=True))


def shortened(text: str, most: int = MOST) -> str:
    """``text``, without its middle where it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters more ...] {text[-half:]}"
