"""The backend contract: a backend compiles a candidate into an executable, which is called like the model."""

from __future__ import annotations

import abc
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trimtab._internal.notebook import facts
from trimtab._internal.registry import Registry
from trimtab.core.measurement import OperatorTime
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.core.technique import Technique
from trimtab.errors import CompileError, UsageError
from trimtab.hardware.system import affinity
from trimtab.tensors.structure import rebuilder

if TYPE_CHECKING:
    import torch

    from trimtab.core.candidate import Candidate
else:
    from trimtab.tensors import late_torch as torch


class Executable(abc.ABC):
    """A compiled or loaded model, called like the original.

    It holds its runtime's resources until :meth:`close`. It is not thread-safe: one call at a time. Outputs belong to the
    caller; later calls do not overwrite them. Each call checks its inputs against :attr:`signature`, because several runtimes
    return wrong numbers for inputs that they were not built for. After a fork, the child process has none of the runtime's
    threads; a call in the child raises an error unless the executable runs on one thread.
    """

    own_threads: ClassVar[bool] = False
    """Whether the runtime has its own thread pool, independent of torch's number of threads. Its default is all cores."""
    _forks: ClassVar[int] = 0
    """Number of forks between this process and the first one."""

    def __init__(self, signature: Signature, settings: Settings) -> None:
        self._forks_at_creation = Executable._forks
        self.signature = signature
        self._rebuild = rebuilder(signature.output_structure)
        self.settings = settings
        self.notes: list[str] = []
        """Messages of the runtime that explain its speed, such as operators without a native kernel or frozen dimensions."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.signature.describe()})"

    def _repr_html_(self) -> str:
        """The class above a table of inputs, outputs, threads and notes, for notebooks."""
        rows = {
            "takes": self.signature.describe(),
            "gives": ", ".join(map(str, self.signature.outputs)),
            "threads": self.settings.threads,
            "notes": " ".join(self.notes),
        }
        return facts(type(self).__name__, rows)

    @abc.abstractmethod
    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the model on tensors that were already checked.

        ``leaves`` and the returned outputs are in the order of the signature. Inputs that ``signature.writes`` names are
        modified as the model modifies them; all others stay unchanged. A recipe whose executable does not do so is refused.
        """

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
        """The outputs of several independent requests. Throughput measures this method; runtimes may overlap requests here."""
        return [self.run(leaves) for leaves in requests]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Inputs and outputs have the structure of the original's.

        Raises:
            InputError: the inputs do not fit the signature.
            UsageError: this process was forked after the executable was made.
        """
        if self._forks_at_creation != Executable._forks:
            self._refuse_after_fork()
        return self._rebuild(self.run(self.signature.accept(args, kwargs)))

    def _refuse_after_fork(self) -> None:
        """Raise an error after a fork: the child process has none of the runtime's threads, so a call would hang."""
        threads = (self.settings.threads or affinity()) if self.own_threads else torch.get_num_threads()
        if self.settings.threads != 1 and threads > 1:
            raise UsageError(
                "This model was loaded before its process was forked, and the threads of its runtime were left behind: it "
                "would hang, or run on one thread. Load it in each process and not before, or load it with threads=1."
            )

    def operator_times(self, leaves: Sequence[torch.Tensor], repeats: int) -> list[OperatorTime] | None:
        """Time per operator, from the runtime's own profiler. ``None`` if torch runs the operators, because torch's profiler
        sees them. Slow: the runtime may be started once more."""
        return None

    def instances(self, n: int) -> list[Executable]:
        """``n`` executables of this model, this one among them, for as many threads that call it at the same time. They share
        its weights and close with it.

        Raises:
            UsageError: ``n`` is below 1, or the runtime takes one call at a time.
        """
        if n < 1:
            raise UsageError(f"instances({n!r}): at least one is needed, this one.")
        return [self, *[self._new_instance() for _ in range(n - 1)]]

    def _new_instance(self) -> Executable:
        """Another executable of the same loaded model."""
        raise UsageError(
            f"A {type(self).__name__} takes one call at a time in a process. Load the artifact in several processes, as "
            "trimtab serve does."
        )

    def synchronize(self) -> None:  # noqa: B027 - on the CPU there is nothing to wait for
        """Wait until all started work is done."""

    def close(self) -> None:  # noqa: B027 - most runtimes free their resources with the object
        """Free the runtime's resources. The executable cannot be called afterwards."""

    def save(self, folder: pathlib.Path) -> list[str]:
        """Write the files that :meth:`Backend.load` needs into ``folder``, without pickles, and return their names.

        Raises:
            CompileError: this executable cannot be saved; the message gives the reason.
        """
        raise CompileError(f"A {type(self).__name__} has no form that stands alone.")


def _count_fork() -> None:
    Executable._forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Backend(Technique):
    """One runtime: Candidate -> Executable.

    :meth:`compile` and :meth:`load` import the runtime; this module imports on every machine.
    """

    honours: ClassVar[frozenset[str]] = frozenset({"threads"})
    """Names of the :class:`Settings` fields that this backend applies."""
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    """Distributions that the saved files need at run time, besides numpy and safetensors."""
    overlap: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields that affect concurrent requests only, and so throughput only."""
    own_graph: ClassVar[bool] = False
    """Whether the runtime optimizes a graph of its own (folds, chooses layouts, quantizes). The ladder then tries no rewrites
    of the model's graph or weights."""
    native_code: ClassVar[bool] = False
    """Whether the saved files are machine code. Such files cannot be loaded safely from an untrusted source."""
    tells_fallbacks: ClassVar[bool] = False
    """Whether the notes of its executables name every operator without a native kernel, so that no note means there is none."""
    cost: ClassVar[Literal["seconds", "minute", "minutes"]] = "seconds"
    """Compile time for a small model. Cheap backends are tried first."""

    @abc.abstractmethod
    def compile(self, candidate: Candidate) -> Executable:
        """Build an executable for ``candidate``. The candidate's model is not modified.

        Dynamic dimensions that the runtime does not support are frozen in the executable's signature, to the example's sizes.

        Raises:
            CompileError: the runtime cannot compile this model; the message contains the runtime's error.
        """

    @abc.abstractmethod
    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Load the executable that :meth:`Executable.save` wrote into ``folder``. Needs no unpickling and not the model's
        class.

        Raises:
            ArtifactError: the files were not written by this backend.
        """

    @abc.abstractmethod
    def script(self) -> str:
        """Python source of ``load(folder, threads)``, at most 24 lines, for the artifact's ``run.py``. It may import the
        runtime only.

        ``load`` returns a callable from a list of inputs to a list of outputs. Both are numpy arrays; they are tensors if
        ``torch`` is among :attr:`packages`, because numpy has no bfloat16. Inputs in ``signature.writes`` are modified in
        place, or their new values follow the outputs."""

    @property
    def arithmetic(self) -> str:
        """The data type of the matrix products. It selects the peak rate that a measured speed is compared with."""
        return "float32"


BACKENDS: Registry[Backend] = Registry("backend", "trimtab.backends", Backend)  # type: ignore[type-abstract]
