"""Backends compile a candidate into an executable; executables are called like the model."""

from __future__ import annotations

import abc
import os
import pathlib
import typing
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch

from trimtab._internal.registry import Registry
from trimtab.core.candidate import Candidate
from trimtab.core.measurement import OperatorTime
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.errors import CompileError, UsageError
from trimtab.hardware.system import affinity
from trimtab.tensors.structure import unflatten

if typing.TYPE_CHECKING:
    pass
from trimtab.core.technique import Technique


class Executable(abc.ABC):
    """A model that is ready to run, called exactly like the original.

    It owns its runtime's resources until :meth:`close`. It may be called from one thread at a time. Outputs belong to the
    caller: a later call does not overwrite them, and they can be changed in place. A call checks its inputs against
    :attr:`signature` first, because several runtimes answer a question they were not built for with wrong numbers instead of
    an error. A process that was forked after it was made has none of its threads, and is refused unless it has but one.
    """

    own_threads: ClassVar[bool] = False
    """Whether its runtime starts threads of its own, whatever torch's number: as many as there are cores unless it is told."""
    _forks: ClassVar[int] = 0
    """How many forks lie between this process and the first of its family."""

    def __init__(self, signature: Signature, settings: Settings) -> None:
        self._made = Executable._forks
        self.signature = signature
        self._bare = signature.output_structure.kind == "tensor"
        self.settings = settings
        self.notes: list[str] = []
        """What the runtime said that explains its speed: operators it could not run natively, dimensions it could not keep."""

    @abc.abstractmethod
    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The output tensors for input tensors that were checked already, both in the order of the signature.

        The inputs that ``signature.writes`` names are written to as the model does; the others stay as they are. A recipe whose
        executable does otherwise is refused.
        """

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
        """The outputs of several independent requests; what throughput times. Runtimes that can overlap requests do it here."""
        return [self.run(leaves) for leaves in requests]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on inputs given as to the original; outputs have the original's structure.

        Raises:
            InputError: the inputs do not fit the signature.
            UsageError: this process was forked from the one in which it was made.
        """
        if self._made != Executable._forks:
            self._refuse_threads_of_another()
        outputs = self.run(self.signature.accept(args, kwargs))
        return outputs[0] if self._bare else unflatten(self.signature.output_structure, outputs)

    def _refuse_threads_of_another(self) -> None:
        """A forked process has none of the threads that its runtime started; it would wait for them, or do without."""
        threads = (self.settings.threads or affinity()) if self.own_threads else torch.get_num_threads()
        if self.settings.threads != 1 and threads > 1:
            raise UsageError(
                "This model was loaded before its process was forked, and the threads of its runtime were left behind: it "
                "would hang, or run on one thread. Load it in each process and not before, or load it with threads=1."
            )

    def operator_times(self, leaves: Sequence[torch.Tensor], repeats: int) -> list[OperatorTime] | None:
        """Where the time of a call goes, as the runtime's own profiler tells; ``None`` where torch runs the operators and its
        profiler sees them. Slow, and not for timing: the runtime may have to be started once more."""
        return None

    def synchronize(self) -> None:  # noqa: B027 - a runtime that computes on the CPU has nothing to wait for
        """Return when all work that was started is done."""

    def close(self) -> None:  # noqa: B027 - most runtimes free their resources with the object
        """Give the runtime's resources back; the executable cannot be called any more."""

    def save(self, folder: pathlib.Path) -> list[str]:
        """Write into ``folder`` what :meth:`Backend.load` needs, without pickles, and return the names of the files.

        Raises:
            CompileError: this executable has no form that stands alone; the message says why.
        """
        raise CompileError(f"A {type(self).__name__} has no form that stands alone.")


def _count_fork() -> None:
    Executable._forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Backend(Technique):
    """One runtime: Candidate -> Executable.

    The runtime is imported inside :meth:`compile` and :meth:`load` only, so that this file imports on every machine.
    """

    honours: ClassVar[frozenset[str]] = frozenset({"threads"})
    """Names of the :class:`Settings` fields that this backend carries out."""
    overlap: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields that only matter to several requests at once, and so to throughput."""
    own_graph: ClassVar[bool] = False
    """Whether it has a graph and kernels of its own, and folds, lays out and quantizes by itself; rewrites of the model and
    its weights are then not worth a ladder's time."""
    native_code: ClassVar[bool] = False
    """Whether its files are machine code, which nothing can make safe to load from a stranger."""
    tells_fallbacks: ClassVar[bool] = False
    """Whether the notes of its executables name every operator that it could not run natively, so that none named means that
    there is none."""
    cost: ClassVar[Literal["seconds", "minute", "minutes"]] = "seconds"
    """What a compilation costs on a small model; cheap ones are tried first."""

    @abc.abstractmethod
    def compile(self, candidate: Candidate) -> Executable:
        """Build an executable for ``candidate``, whose model stays as it was.

        Dynamic dimensions that the runtime cannot keep are frozen to the example's sizes in the executable's signature.

        Raises:
            CompileError: the runtime cannot take this model; the message carries the runtime's own words.
        """

    @abc.abstractmethod
    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """The executable whose :meth:`Executable.save` wrote ``folder``. Never unpickles, never needs the model's class.

        Raises:
            ArtifactError: the files are not what this backend writes.
        """

    @abc.abstractmethod
    def script(self) -> str:
        """Python source of a function ``load(folder, threads)`` that returns a callable from a list of inputs to a list of
        outputs, using only the runtime. They are numpy arrays, or tensors where ``torch`` is among :attr:`packages`, since
        numpy has no bfloat16. Where the model writes to inputs (``signature.writes``), the callable writes to them too, or
        gives their new values after its outputs. The source becomes part of the artifact's ``run.py``; at most 24 lines."""

    @property
    def arithmetic(self) -> str:
        """The type that products are computed in, which says what peak of the machine they are held against."""
        return "float32"

    @property
    def packages(self) -> tuple[str, ...]:
        """Distributions that the saved files need at run time, beside numpy and safetensors."""
        return ("torch",)


BACKENDS: Registry[Backend] = Registry("backend", "trimtab.backends", Backend)  # type: ignore[type-abstract]
