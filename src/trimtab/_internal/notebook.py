"""HTML of objects in notebooks, for ``_repr_html_``. All text is escaped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape


def paragraph(text: str) -> str:
    """A paragraph; empty without text."""
    return f"<p>{escape(text)}</p>" if text else ""


def preformatted(text: str) -> str:
    """Lines in a fixed width."""
    return f"<pre>{escape(text)}</pre>"


def link(path: str | os.PathLike[str] | None, text: str | None = None) -> str:
    """A link to a file or folder, with its path as the text by default; empty without a path."""
    target = "" if path is None else escape(str(path))
    return f'<p><a href="{target}">{target if text is None else escape(text)}</a></p>' if target else ""


def facts(title: str, rows: Mapping[str, object]) -> str:
    """A title above a table of names and values; values that are ``None`` or empty are left out."""
    shown = {name: str(value) for name, value in rows.items() if value is not None and str(value)}
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in shown.items())
    return f"<p>{escape(title)}</p><table>{cells}</table>"
