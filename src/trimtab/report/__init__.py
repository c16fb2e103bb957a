"""The report of a study: a rendering of what its record holds. It computes nothing but where things stand."""

from trimtab.report._page import html
from trimtab.report._sides import side_by_side
from trimtab.report._text import text
from trimtab.report._write import keep, write

__all__ = ["html", "keep", "side_by_side", "text", "write"]
