"""Profile a block of one's own code: time, operators, memory, and tensors that outlive it."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import pathlib
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, ParamSpec, Self, TypeVar, overload

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from trimtab._internal.serialization import fields_to_json
from trimtab.core.measurement import OperatorTime, operator_shares
from trimtab.errors import UsageError
from trimtab.measure.memory import PeakMemory, rss_mb
from trimtab.measure.profile import quiet
from trimtab.report import formatting as words
from trimtab.report.doctor_page import profile_html
from trimtab.report.write import save_text

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """Tensors of one shape that were made in a block and are alive after it."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    count: int
    mb: float
    """Memory of all of them, in MB (10**6 bytes). Storage that tensors share is counted for each."""
    graph: bool
    """Whether they hold a graph of autograd, which keeps further tensors alive: ``losses.append(loss)``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """The cost of one run of a block. Memory is that of the process in MB (10**6 bytes)."""

    schema: ClassVar[int] = 1

    name: str
    wall_ms: float
    cpu_ms: float
    """CPU time of the process, all threads together."""
    before_mb: float
    peak_mb: float
    """Highest memory in the block."""
    after_mb: float
    device_peak_mb: float | None = None
    """Peak of torch's CUDA allocator above its level before; ``None`` without one."""
    operators: tuple[OperatorTime, ...] = ()
    """The slowest first. torch's profiler costs about a microsecond per operator, which :attr:`wall_ms` includes."""
    kept: tuple[KeptTensor, ...] = ()
    """Tensors that were made in the block and outlive it, the largest first: results, or a leak."""
    error: str | None = None
    """Class of the exception that ended the block."""

    @property
    def leaked_mb(self) -> float:
        """MB of :attr:`kept`."""
        return sum(one.mb for one in self.kept)

    def __repr__(self) -> str:
        slowest = f", {self.operators[0].name} {self.operators[0].share:.0%}" if self.operators else ""
        count = sum(one.count for one in self.kept)
        kept = f", {words.count(count, 'tensor')} kept ({words.megabytes(self.leaked_mb)})" if count else ""
        peak = f"peak {words.megabytes(self.peak_mb)} (+{words.megabytes(max(self.peak_mb - self.before_mb, 0.0))})"
        failed = f", ended by {self.error}" if self.error else ""
        return f"Profile({self.name!r}: {words.milliseconds(self.wall_ms)}{slowest}, {peak}{kept}{failed})"

    def facts(self) -> list[tuple[str, str]]:
        """Names and values for a table."""
        found = [
            ("time", words.milliseconds(self.wall_ms)),
            ("CPU time", words.milliseconds(self.cpu_ms)),
            ("memory before, peak, after", ", ".join(words.all_megabytes([self.before_mb, self.peak_mb, self.after_mb]))),
        ]
        if self.device_peak_mb is not None:
            found.append(("peak on the GPU", words.megabytes(self.device_peak_mb)))
        return [*found, ("ended by", self.error)] if self.error else found

    def kept_lines(self) -> list[str]:
        """A sentence for each entry of :attr:`kept`."""
        return [
            f"{words.count(one.count, 'tensor')} {one.dtype}{list(one.shape)} on {one.device}, {words.megabytes(one.mb)}"
            + ("; each holds a graph of autograd" if one.graph else "")
            for one in self.kept
        ]

    def to_json(self) -> dict[str, Any]:
        """The profile as a JSON object."""
        return fields_to_json(self)

    def html(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write the profile to ``path`` as one page that needs no network. Returns the file.

        Raises:
            UsageError: it cannot be written.
        """
        return save_text(profile_html(self), pathlib.Path(path))


class Profiling:
    """The context that :func:`profile` returns. After its block, the attributes of :class:`Profile` are its own."""

    def __init__(self, name: str, operators: bool) -> None:
        self._name = name
        self._operators = operators
        self._result: Profile | None = None

    @property
    def result(self) -> Profile:
        """The profile of the block.

        Raises:
            UsageError: the block has not ended.
        """
        if self._result is None:
            raise UsageError("The block of trimtab.profile() has not ended, so it has no figures yet. Read them after it.")
        return self._result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result, name)

    def __repr__(self) -> str:
        return f"Profiling({self._name!r}, not ended)" if self._result is None else repr(self._result)

    def __enter__(self) -> Self:
        self._memory = PeakMemory()
        self._memory.__enter__()
        self._known = {id(one): weakref.ref(one) for one in _tensors()}
        self._before = rss_mb()
        self._profiler = torch_profile(activities=_activities()) if self._operators else None
        if self._profiler is not None:
            with quiet():
                self._profiler.__enter__()  # type: ignore[no-untyped-call]
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        operators = []
        if self._profiler is not None:
            with quiet():
                self._profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            operators = _operator_times(self._profiler)
        self._memory.__exit__(None, None, None)
        peak = self._memory.result
        gc.collect()
        after = rss_mb()
        self._result = Profile(
            name=self._name,
            wall_ms=wall * 1e3,
            cpu_ms=cpu * 1e3,
            before_mb=round(self._before, 3),
            peak_mb=round(max(peak.idle_mb + peak.host_mb, self._before, after), 3),
            after_mb=round(after, 3),
            device_peak_mb=peak.device_mb,
            operators=tuple(operators),
            kept=_surviving_tensors(self._known),
            error=None if kind is None else kind.__name__,
        )
        self._known = {}


@overload
def profile(function: Callable[P, T]) -> Callable[P, T]: ...
@overload
def profile(function: None = None, *, name: str = "block", operators: bool = True) -> Profiling: ...
def profile(function: Any = None, *, name: str = "block", operators: bool = True) -> Any:
    """Profile a block, ``with trimtab.profile() as p:``, or each call of a function, ``@trimtab.profile``.

    The figures are those of :class:`~trimtab.api.profile.Profile`: time, operators, memory before, at the peak and after, and
    tensors that were made in the block and outlive it. Memory is that of the whole process: two profiled blocks must not
    overlap.

    Args:
        function: the decorated function. Its attribute ``profile`` is the profile of its last call.
        name: of the block, for ``repr`` and the page.
        operators: whether torch's profiler records operators, at about a microsecond each.

    Raises:
        UsageError: ``function`` cannot be called.

    Example:

        >>> import torch, trimtab
        >>> with trimtab.profile(name="products") as p:
        ...     x = torch.randn(256, 256)
        ...     y = x @ x
        >>> p.operators[0].name
        'aten::mm'
        >>> sum(one.count for one in p.kept)  # x and y outlive the block
        2
    """
    if function is None:
        return Profiling(name, operators)
    if not callable(function):
        raise UsageError(
            f"trimtab.profile({function!r}): what is decorated must be a function. For a block: with trimtab.profile() as p:"
        )

    @functools.wraps(function)
    def profiled(*args: Any, **kwargs: Any) -> Any:
        with Profiling(getattr(function, "__qualname__", "function"), operators) as found:
            try:
                return function(*args, **kwargs)
            finally:
                profiled.profile = found  # type: ignore[attr-defined]

    return profiled


def _activities() -> list[ProfilerActivity]:
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]


def _operator_times(profiler: Any) -> list[OperatorTime]:
    events = [event for event in profiler.key_averages() if event.device_type.name == "CPU"]
    on_gpu = any(event.self_device_time_total > 0 for event in events)
    rows = ((e.key, e.count, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3) for e in events)
    return operator_shares(rows, 1)


def _tensors() -> list[torch.Tensor]:
    """The tensors that Python holds. ``type`` and not ``isinstance``, which wakes lazy proxies."""
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


def _surviving_tensors(known: dict[int, weakref.ref[torch.Tensor]]) -> tuple[KeptTensor, ...]:
    """The tensors that are alive now and not in ``known``, by shape, type and device."""
    groups: dict[tuple[tuple[int, ...], str, str, bool], int] = {}
    bytes_: dict[tuple[tuple[int, ...], str, str, bool], int] = {}
    for one in _tensors():
        seen = known.get(id(one))
        if seen is not None and seen() is one:
            continue
        key = (tuple(one.shape), str(one.dtype).removeprefix("torch."), str(one.device), one.grad_fn is not None)
        groups[key] = groups.get(key, 0) + 1
        bytes_[key] = bytes_.get(key, 0) + one.numel() * one.element_size()
    found = [
        KeptTensor(
            shape=shape, dtype=dtype, device=device, count=count, mb=bytes_[shape, dtype, device, graph] / 1e6, graph=graph
        )
        for (shape, dtype, device, graph), count in groups.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.mb, one.shape)))
