"""What an exception says, whoever made it: it may have no text at all, or more than anybody reads."""

from __future__ import annotations

import re
import traceback

MOST = 4000
"""Characters of a message; what is cut out of a longer one stands in its log."""

LONGEST = 40_000
"""Of a traceback."""

_VOWEL = re.compile(r"[AEFHILMNORSX][A-Z]|(?!one|One)[aeioAEIO]|[Uu]n(?!i)")
"""How a noun begins that is spoken with a vowel first; capitals are spelled."""


def said(error: BaseException) -> str:
    """The text of ``error``; of one that fails to make its text, that it does."""
    return str(traceback.TracebackException(type(error), error, None, compact=True))


def shortened(text: str, most: int = MOST) -> str:
    """``text``, without its middle where it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters more ...] {text[-half:]}"


def counted(number: int, noun: str) -> str:
    """``1 example``, ``2 examples``, ``3 batches``, ``4 axes``."""
    stem = noun[:-2] if noun.endswith("is") else noun
    plural = f"{stem}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def an(noun: str) -> str:
    """``noun`` with its article: ``a Linear``, ``an OrderedDict``, ``an LSTM``."""
    return f"{'an' if _VOWEL.match(noun) else 'a'} {noun}"


def of_type(value: object) -> str:
    """What ``value`` is an instance of: ``an int``; ``None`` is itself."""
    return "None" if value is None else an(type(value).__name__)
