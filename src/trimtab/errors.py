"""Every error that trimtab raises on purpose, drawn once.

::

    TrimtabError
    ├── UsageError (ValueError)          the call, option or file is wrong          exit code 2
    │   ├── UnknownNameError             no pass, backend or check of that name     exit code 2
    │   └── InputError                   an executable was called with wrong inputs
    ├── MissingPackageError (ImportError) an optional package is not installed      exit code 2
    ├── WorkloadError                    the user's own model, data or score fails  exit code 3
    ├── CompileError                     a runtime cannot take this model           the trial is FAILED
    ├── MeasurementError                 the other side of a comparison is gone     exit code 2
    ├── StorageError                     the study's storage cannot be used         exit code 2
    └── ArtifactError                    an artifact cannot be used                 exit code 2
        ├── IntegrityError               a file is missing, changed or malformed
        └── UntrustedError               loading would run native code; needs trust=True

Messages are sentences: what happened, the value, the fix. Their text is tested.
"""

from __future__ import annotations

from typing import ClassVar


class TrimtabError(Exception):
    """Base of all errors that trimtab raises on purpose."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 2


class UsageError(TrimtabError, ValueError):
    """The call, the option or the file is wrong; nothing was run."""

    code = "usage"


class UnknownNameError(UsageError):
    """No pass, backend or check of this name; the message lists the known ones."""

    code = "unknown-name"


class InputError(UsageError):
    """An executable was called with inputs that it was not built for."""

    code = "input"


class MissingPackageError(TrimtabError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""

    code = "missing-package"


class WorkloadError(TrimtabError):
    """The user's own model, data or score failed."""

    code = "workload"
    exit_code = 3


class CompileError(TrimtabError):
    """A runtime could not export, convert or compile this model."""

    code = "compile"


class MeasurementError(TrimtabError):
    """The other process of a paired measurement died or does not answer."""

    code = "measurement"


class StorageError(TrimtabError):
    """The storage of a study cannot be opened, read or written."""

    code = "storage"


class ArtifactError(TrimtabError):
    """An artifact folder cannot be used."""

    code = "artifact"


class IntegrityError(ArtifactError):
    """A file of an artifact is missing, changed or malformed."""

    code = "integrity"


class UntrustedError(ArtifactError):
    """Loading this artifact would run native code that it carries."""

    code = "untrusted"
