"""A data set opens a file for each example."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.checks._script import FILES, edit, joined_sites, matches, reading_lines, share
from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment


@dataclass(frozen=True, kw_only=True)
class SmallFiles(ScriptCheck):
    """A data set opens a file for each example.

    Opening, reading and decoding a small file takes 20 us to some milliseconds, again in every epoch. Written once as one
    array, which ``numpy.load(..., mmap_mode="r")`` maps, an example is a copy of its bytes.
    Source: https://numpy.org/doc/stable/reference/generated/numpy.memmap.html
    """

    least: float = 0.05
    """Share of a step, from which on it is reported."""
    files: float = 0.9
    """Files opened per example that count as one file each."""

    def run(self, subject: ProbeRecord, environment: Environment) -> list[Finding]:
        """The wait for data where about one file per example was opened, or lines of the data set that open or decode files."""
        waits = share(subject, "data")
        opening = [line for line in reading_lines(subject) if matches(line, FILES)]
        lines_share = sum(line.share for line in opening)
        loader = max(subject.loaders, key=lambda loader: loader.opens, default=None)
        opens = 0.0 if loader is None else loader.opens
        many = opens >= self.files
        taken = waits if many else lines_share
        where = opening[0].site if opening else loader.site if loader is not None else None
        if taken < self.least or where is None:
            return []
        what = f"opens {opens:.1f} files for each example" if many else f"opens or decodes files at {joined_sites(opening)}"
        message = (
            f"The data set {what}, and a step waits {waits:.0%} of its time for data. Write the examples once as arrays, and "
            "map them with numpy.load(path, mmap_mode='r')."
        )
        return [
            self.note(
                message,
                evidence={"opens_per_example": opens, "lines_share": lines_share, "wait_share": waits},
                where=where,
                category="data",
                edit=edit(subject, where, "Write all examples once into one array per tensor (numpy.save), and index it here."),
                ceiling=ScriptSettings(without="data"),
                share=taken,
            )
        ]
