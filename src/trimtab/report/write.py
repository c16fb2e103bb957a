"""Write the report to a file."""

from __future__ import annotations

import pathlib

from trimtab._internal.serialization import write_text
from trimtab.errors import UsageError
from trimtab.report.page import html
from trimtab.study.record import Record, report_name


def write(run_folder: pathlib.Path, out: pathlib.Path | None = None) -> pathlib.Path:
    """Render the study in ``run_folder`` into ``out``, by default ``NAME-report.html`` in that folder. Returns the file.

    Raises:
        UsageError: there is no study, or the file cannot be written.
        StorageError: the study's record is damaged or of another version.
    """
    record = Record.read(run_folder)
    target = run_folder / report_name(record.workload) if out is None else out
    return save_text(html(record, run_folder), target)


def save_text(text: str, target: pathlib.Path) -> pathlib.Path:
    """Write ``text`` to ``target`` atomically.

    Raises:
        UsageError: it cannot be written there.
    """
    try:
        write_text(target, text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"The report cannot be written to {target}: {reason}. Name a file in a folder that exists.") from error
    return target
