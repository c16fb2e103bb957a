"""Every error that trimtab raises on purpose, drawn once.

::

    TrimtabError
    ├── UsageError (ValueError)          the call, option or file is wrong          exit code 2
    │   ├── UnknownNameError             no pass, backend or check of that name     exit code 2
    │   └── InputError                   an executable was called with wrong inputs
    ├── MissingPackageError (ImportError) an optional package is missing or broken  exit code 2
    ├── WorkloadError                    the user's own model, data or score fails  exit code 3
    │   ├── NonFiniteError               a loss or gradient of a training            exit code 3
    │   └── PeerError                    another process of the training failed      exit code 3
    ├── CompileError                     a runtime cannot take this model           the trial is FAILED
    ├── MeasurementError                 the other side of a comparison is gone     exit code 2
    ├── StorageError                     the study's storage cannot be used         exit code 2
    └── ArtifactError                    an artifact cannot be used                 exit code 2
        ├── IntegrityError               a file is missing, changed or malformed
        └── UntrustedError               loading would run native code; needs trust=True

Messages are sentences: what happened, the value, the fix. Their text is tested. The command line prints them as
``error[code]: sentence``; codes are stable, and :func:`table` lists them. The docstring of each class has two paragraphs, which
are also the table's: what it means, and what to do.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import ClassVar

BUG, EXIT_BUG = "bug", 70
"""Code and exit code of the command line for an exception that nobody foresaw (``EX_SOFTWARE`` of sysexits.h)."""


class TrimtabError(Exception):
    """Base of all errors that trimtab raises on purpose; it is never raised itself.

    Catch it to catch them all.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 2


class UsageError(TrimtabError, ValueError):
    """The call, the option or the file is wrong; nothing was run.

    Correct what the message names, as it says.
    """

    code = "usage"


class UnknownNameError(UsageError):
    """No pass, backend or check of this name; the message lists the known ones.

    Use one of those, or install the package that brings the one you mean.
    """

    code = "unknown-name"


class InputError(UsageError):
    """An executable was called with inputs that it was not built for.

    Call it with the shapes and dtypes that the message states, or state the sizes that vary with ``Workload(dynamic=...)`` and
    optimize again.
    """

    code = "input"


class MissingPackageError(TrimtabError, ImportError):
    """An optional package is not installed, or is but cannot be imported.

    Install what the message names.
    """

    code = "missing-package"


class WorkloadError(TrimtabError):
    """The user's own model, data or score failed.

    Mend it at the place that the message names; the workload's log holds the traceback.
    """

    code = "workload"
    exit_code = 3


class NonFiniteError(WorkloadError):
    """A loss or a gradient was not finite in training.

    Lower the learning rate, clip the gradient with ``OptimizerSettings(clip_norm=1.0)``, or leave such updates out with
    ``OptimizerSettings(nonfinite="skip")``; the last checkpoint is from before.
    """

    code = "non-finite"


class PeerError(WorkloadError):
    """Another process of the same training failed, and this one cannot go on without it.

    Read what that process said, which the message names by its rank: its own error is the cause.
    """

    code = "peer"


class CompileError(TrimtabError):
    """A runtime could not export, convert or compile this model.

    In a study nothing has to be done: the trial is FAILED with this reason, and the others go on. To use this very runtime,
    rewrite the part of the model that the message names.
    """

    code = "compile"


class MeasurementError(TrimtabError):
    """The other process of a paired measurement died or does not answer.

    Read its last words in the message; where it was killed for want of memory, make the batch smaller or free some memory.
    """

    code = "measurement"


class StorageError(TrimtabError):
    """The storage of a study cannot be opened, read or written.

    Make the folder or database that the message names usable, or choose another with ``--out`` or ``--storage``; what is
    finished is kept.
    """

    code = "storage"


class ArtifactError(TrimtabError):
    """An artifact folder cannot be used.

    Give the folder that ``trimtab optimize`` wrote, the one with ``manifest.json`` in it.
    """

    code = "artifact"


class IntegrityError(ArtifactError):
    """A file of an artifact is missing, changed or malformed.

    Copy the artifact again from where it was made, and do not edit its files.
    """

    code = "integrity"


class UntrustedError(ArtifactError):
    """Loading this artifact would run native code that it carries.

    If you know who made it, allow it with ``--trust`` or ``trust=True``.
    """

    code = "untrusted"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of the table of errors. ``name`` is the class, ``None`` for what the command line says about a bug of ours."""

    code: str
    name: str | None
    meaning: str
    remedy: str
    exit_code: int


def table() -> list[Entry]:
    """Every error code with its class, what it means, what to do and the command line's exit code, as the tree has them."""
    bug = Entry(
        BUG,
        None,
        "trimtab itself failed in a way that nobody foresaw; your model is not to blame.",
        "Report it with the file that the message names, which holds the traceback. TRIMTAB_DEBUG=1 prints it at once.",
        EXIT_BUG,
    )
    return [_entry(kind) for kind in _below(TrimtabError)] + [bug]


def _below(kind: type[TrimtabError]) -> list[type[TrimtabError]]:
    """The classes below ``kind``, depth first, in the order in which they are defined; a plug-in's own are left out."""
    own = [below for below in kind.__subclasses__() if below.__module__ == __name__]
    return [found for below in own for found in (below, *_below(below))]


def _entry(kind: type[TrimtabError]) -> Entry:
    meaning, _, remedy = (inspect.getdoc(kind) or "").partition("\n\n")
    return Entry(kind.code, kind.__name__, " ".join(meaning.split()), " ".join(remedy.split()), kind.exit_code)
