"""The report of a study: a rendering of what its record holds. It computes nothing but where things stand."""

from trimtab.report.comparison import side_by_side
from trimtab.report.page import html
from trimtab.report.terminal import text
from trimtab.report.write import keep, write

__all__ = ["html", "keep", "side_by_side", "text", "write"]
