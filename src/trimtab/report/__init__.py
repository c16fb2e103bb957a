"""Render a study's record as report, terminal text and comparison. Nothing is measured here."""

from trimtab.report.comparison import side_by_side
from trimtab.report.page import html
from trimtab.report.terminal import text
from trimtab.report.write import save_text, write

__all__ = ["html", "save_text", "side_by_side", "text", "write"]
