"""Find data-dependent control flow in Python: a trace keeps one branch and drops the others."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.backends.common.exported_program import EXPORT_ERRORS
from trimtab.backends.common.process_lock import quiet
from trimtab.core.candidate import Candidate
from trimtab.errors import CompileError

READS = frozenset(
    {
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__"),
        *("__dlpack__", "item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
    }
)
"""Names of functions that convert tensor values to Python values. torch's tracer does not warn about all of them."""

WRAPPER_FILES = frozenset({torch.overrides.__file__, torch._tensor.__file__, __file__})
"""Files whose frames lie between the model's line and the mode that observes it."""

Location = tuple[str, int]


def refuse_decisions(candidate: Candidate, leaves: Sequence[torch.Tensor]) -> None:
    """Raise :class:`CompileError`, with file and line, if a trace of the model on ``leaves`` would drop a branch.

    A decision is a read of a value that was computed from the inputs, which happens both in a plain run and under the tracer.
    The plain run alone is not enough, because models skip checks under the tracer. The tracer alone is not enough either: sizes
    are tensors there, and it does not warn about every read. Reads of sizes count if the size depends on values, such as the
    number of detected boxes; a plain run reads no tensor for them.
    """
    if (location := first_decision(candidate, leaves)) is not None:
        path, line = location
        raise CompileError(
            f"the model decides in Python on values of its tensors ({path}:{line}); a trace keeps one path. Decide "
            "with torch.where, or outside of the model."
        )


def first_decision(candidate: Candidate, leaves: Sequence[torch.Tensor]) -> Location | None:
    """File and line of the first decision; ``None`` if there is none."""
    own, others = ([leaf.clone() for leaf in leaves] for _ in range(2))
    try:
        with torch.no_grad(), quiet():
            with _DependencyTracker(own) as tracker, _ReadRecorder(tracker) as plain:
                candidate.flat(copied=False)(*own)
            if not plain.locations and not tracker.dynamic_operations:
                return None
            with _DependencyTracker(others) as traced_tracker, _TracedReadRecorder(traced_tracker) as traced:
                torch.jit.trace(candidate.flat(), tuple(others), check_trace=False)  # type: ignore[no-untyped-call]
    except EXPORT_ERRORS:
        return None  # the actual trace will raise the error again
    return next(iter([*traced.size_reads, *(location for location in plain.locations if location in traced.locations)]), None)


class _DependencyTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages of all tensors computed from ``leaves``. Reads of weights are not decisions on data."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # a weak reference keeps the storage's id from being reused, without keeping its memory
        self._storages: dict[int, StorageWeakRef] = {}
        self._add(leaves)
        self.dynamic_operations = 0
        """Number of operations so far whose output size depends on values computed from the leaves."""

    def is_derived(self, values: Any) -> bool:
        """Whether a tensor in ``values`` was computed from the leaves."""
        return any(ref is None or ref.cdata in self._storages for ref in _storages(values))

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self.is_derived((args, kwargs)):
            self._add(found)
            self.dynamic_operations += _has_dynamic_output_shape(func, args)
            if func._schema.is_mutable:  # type: ignore[attr-defined]
                self._add((args, kwargs))
        return found

    def _add(self, values: Any) -> None:
        self._storages |= {ref.cdata: ref for ref in _storages(values) if ref is not None}


class _ReadRecorder(TorchFunctionMode):
    """Records where Python reads tensor values: of any tensor, or only of those computed from the leaves of ``tracker``."""

    def __init__(self, tracker: _DependencyTracker | None) -> None:
        super().__init__()
        self._tracker = tracker
        self.locations: list[Location] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in READS and (self._tracker is None or self._tracker.is_derived((args, kwargs))):
            self.locations.append(_location())
        return func(*args, **kwargs)


class _TracedReadRecorder(_ReadRecorder):
    """Records all reads under the tracer in ``locations``, and reads of data-dependent sizes in ``size_reads``."""

    def __init__(self, tracker: _DependencyTracker) -> None:
        super().__init__(None)
        self.size_reads: list[Location] = []
        self._size_tracker = tracker
        self._size_tensors: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = self._size_tracker.dynamic_operations
        depends = any(id(tensor) in self._size_tensors for tensor in _tensors((args, kwargs or {})))
        if depends and getattr(func, "__name__", "") in READS:
            self.size_reads.append(_location())
        found = super().__torch_function__(func, types, args, kwargs)
        if depends or self._size_tracker.dynamic_operations > before:
            self._size_tensors |= {id(tensor): tensor for tensor in _tensors(found)}
        return found


def _has_dynamic_output_shape(func: Any, args: Sequence[Any]) -> bool:
    """Whether the output size of ``func`` depends on values. For indexing this is the case with masks only."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    masks = (torch.bool, torch.uint8)
    return func.overloadpacket is not torch.ops.aten.index or any(index.dtype in masks for index in _tensors(args[1]))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``values``, including the size tensors inside of a ``torch.Size`` under the tracer."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch.Size):
            yield from _tensors(list(leaf))


def _storages(values: Any) -> Iterator[StorageWeakRef | None]:
    """The storage of every tensor in ``values``; ``None`` for tensors without one."""
    for tensor in _tensors(values):
        try:
            yield StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError):
            yield None


def _location() -> Location:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in WRAPPER_FILES:
        frame = frame.f_back
    path, here = pathlib.Path(frame.f_code.co_filename), pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path), frame.f_lineno
