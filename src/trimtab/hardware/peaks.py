"""Measure the peak rates of this machine: matrix products and memory bandwidth, in short runs through torch.

The best of several runs counts, because other load can only slow a run down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

import psutil

from trimtab.hardware import system
from trimtab.tensors.precision import float32_precision

if TYPE_CHECKING:
    import torch
else:
    from trimtab.tensors import late_torch as torch

Kind = Literal["float32", "bfloat16", "float16", "int8", "memory"]
Run = Callable[[], object]
Product = Callable[[int, "Kind", str], Run]

BUSY = 0.1
"""Share of all CPU time that other processes may use before the rates count as too low."""
_SECONDS = 0.25
"""Seconds that the measurement of one rate may take, without the creation of its matrices."""
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError)
"""Errors of torch for a kernel that the build, the processor or the version lacks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """One peak rate. ``value`` is ``None`` if it could not be measured; ``reason`` then says why."""

    kind: Kind
    """A matrix product with elements of that type, or ``memory`` for bandwidth."""
    device: str
    """``cpu``, ``cuda:0``, ..."""
    threads: int | None
    """Number of threads; ``None`` on a GPU."""
    unit: Literal["GFLOP/s", "GOP/s", "GB/s"]
    """A multiplication and an addition count as two operations; a gigabyte is 10**9 bytes."""
    value: float | None
    reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """The peak rates of one machine."""

    schema: ClassVar[int] = 1

    fingerprint: str
    """Fingerprint of the environment in which the rates were measured."""
    threads: int
    """Number of usable cores."""
    rates: tuple[Rate, ...]
    foreign: float = 0.0
    """Share of all CPU time that other processes and other virtual machines used during the measurement."""
    notes: tuple[str, ...] = ()
    """Problems of measuring or caching, in sentences."""

    def find(self, kind: Kind, device: str = "cpu", threads: int | None = None) -> float | None:
        """The rate in its unit, or ``None`` if not measured. ``threads`` defaults to all usable cores; GPUs ignore it."""
        wanted = (threads or self.threads) if device == "cpu" else None
        return next((r.value for r in self.rates if (r.kind, r.device, r.threads) == (kind, device, wanted)), None)

    def merged(self, other: Peaks) -> Peaks:
        """The higher value of each rate in two measurements of one machine."""
        others = {(rate.kind, rate.device, rate.threads): rate for rate in other.rates}
        rates = (max(rate, others.get((rate.kind, rate.device, rate.threads), rate), key=_value) for rate in self.rates)
        return dataclasses.replace(self, rates=tuple(rates))


def measure(fingerprint: str, threads: int, gpus: int, memory_mb: float) -> Peaks:
    """Measure all rates: with 1 and with ``threads`` threads, and on each GPU. Takes about 3 s without GPUs.

    ``memory_mb`` is the machine's memory; the bandwidth arrays take at most an eighth of it.
    """
    # four times the last-level caches, so that they do not help; at least 192 MB, at most 2 GB or an eighth of the memory
    stream = int(min(max(192e6, 4 * (system.last_level_cache() or 0)), 2e9, memory_mb * 1e6 / 8))
    threads_before, cpu_before = torch.get_num_threads(), _cpu_times()
    rates: list[Rate] = []
    try:
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            rates += [_gemm(kind, "cpu", count) for kind in ("float32", "bfloat16", "int8")]
            rates.append(_bandwidth("cpu", count, stream))
    finally:
        torch.set_num_threads(threads_before)
    foreign = _foreign_share(cpu_before, _cpu_times())
    for index in range(gpus):
        device = f"cuda:{index}"
        rates += [_gemm(kind, device, None) for kind in ("float32", "bfloat16", "float16", "int8")]
        rates.append(_bandwidth(device, None, 2**30))
    return Peaks(fingerprint=fingerprint, threads=threads, rates=tuple(_at_least_one_thread(rates)), foreign=foreign)


def _at_least_one_thread(rates: list[Rate]) -> Iterator[Rate]:
    """Raise the CPU rates of many threads to at least the rate of one thread. Other load can press them below it."""
    single = {rate.kind: rate.value for rate in rates if rate.threads == 1 and rate.value is not None}
    for rate in rates:
        floor = single.get(rate.kind) if rate.device == "cpu" else None
        yield dataclasses.replace(rate, value=max(rate.value, floor)) if rate.value and floor else rate


def _value(rate: Rate) -> float:
    return rate.value or 0.0


def _cpu_times() -> tuple[float, float, float]:
    """CPU time in seconds: total, busy or stolen, and of this process."""
    times = psutil.cpu_times()
    # Linux includes the time of guests in user time.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total, total - times.idle - getattr(times, "iowait", 0.0), time.process_time()


def _foreign_share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    total, busy, own = (late - early for early, late in zip(before, after, strict=True))
    return round(min(max((busy - own) / total, 0.0), 1.0), 3) if total > 0 else 0.0


def _gemm(kind: Kind, device: str, threads: int | None) -> Rate:
    unit: Literal["GFLOP/s", "GOP/s"] = "GOP/s" if kind == "int8" else "GFLOP/s"
    makers: tuple[Product, ...] = _INT8 if kind == "int8" else (_float_product,)
    reasons = []
    for make in makers:
        try:
            with torch.inference_mode(), float32_precision(tf32=False), _quiet():
                value = _best_over_sizes(make, kind, device)
            return Rate(kind=kind, device=device, threads=threads, unit=unit, value=value)
        except _FAILURES as error:
            reasons.append(str(error).partition("\n")[0][:200])
    reason = f"torch cannot multiply {kind} matrices on {device}: {reasons[0 if device == 'cpu' else -1]}"
    return Rate(kind=kind, device=device, threads=threads, unit=unit, value=None, reason=reason)


def _bandwidth(device: str, threads: int | None, size: int) -> Rate:
    """The triad ``c = a + 2 b`` over arrays of ``size`` bytes in total, counted as two reads and one write."""
    try:
        with torch.inference_mode():
            count = size // 12
            a, b, c = (torch.full((count,), value, dtype=torch.float32, device=device) for value in (1.0, 2.0, 0.0))
            seconds = _shortest_run(lambda: torch.add(a, b, alpha=2.0, out=c), device)
        return Rate(kind="memory", device=device, threads=threads, unit="GB/s", value=12 * count / seconds / 1e9)
    except RuntimeError as error:
        reason = f"the arrays do not fit in memory: {str(error).partition(chr(10))[0][:200]}"
        return Rate(kind="memory", device=device, threads=threads, unit="GB/s", value=None, reason=reason)


def _best_over_sizes(make: Product, kind: Kind, device: str) -> float:
    """The best rate, in 10**9 operations per second, over square matrices of growing size."""
    best = 0.0
    for size in _SIZES:
        run = make(size, kind, device)
        run()
        seconds = min(_timed(run, device) for _ in range(3))
        best = max(best, 2e-9 * size**3 / seconds)
        # The next size takes about eight times as long; stop before it exceeds the time limit.
        if 8 * seconds > _SECONDS / 2:
            break
    return max(best, 2e-9 * size**3 / _shortest_run(run, device))


def _shortest_run(run: Run, device: str) -> float:
    """The shortest run in seconds, of at least three runs and of as many as fit in :data:`_SECONDS`."""
    end = time.perf_counter() + _SECONDS
    run()
    times = [_timed(run, device)]
    while len(times) < 3 or time.perf_counter() < end:
        times.append(_timed(run, device))
    return min(times)


def _timed(run: Run, device: str) -> float:
    if device != "cpu":
        return _timed_on_gpu(run, device)
    start = time.perf_counter_ns()
    run()
    return max(time.perf_counter_ns() - start, 1) * 1e-9


def _timed_on_gpu(run: Run, device: str) -> float:
    """Seconds between two CUDA events around the run. A run before it hides the launch overhead of Python."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        run()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(max(start.elapsed_time(end), 1e-6)) * 1e-3


def _float_product(size: int, kind: Kind, device: str) -> Run:
    dtype = getattr(torch, kind)
    a, b = (_random_floats(size, device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _onednn_product(size: int, kind: Kind, device: str) -> Run:
    """The kernel of PyTorch's own int8 linear layers on x86: unsigned activations, signed weights."""
    if device != "cpu":
        raise RuntimeError("oneDNN computes on CPUs only")
    weight = _random_int8(size, device)
    x = _random_int8(size, device).view(torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [size, size])
    scales, zeros = torch.full((size,), 0.01), torch.zeros(size, dtype=torch.int64)
    linear = torch.ops.onednn.qlinear_pointwise
    return lambda: linear(x, 0.01, 0, packed, scales, zeros, None, 1.0, 0, torch.uint8, "none", [], "")


def _quantized_product(size: int, kind: Kind, device: str) -> Run:
    """The kernel of torch's default quantization engine; on ARM it is not oneDNN."""
    if device != "cpu":
        raise RuntimeError("the quantization engines compute on CPUs only")
    x = torch.quantize_per_tensor(_random_floats(size, device), 0.02, 128, torch.quint8)
    weight = torch.quantize_per_tensor(_random_floats(size, device), 0.02, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    return lambda: torch.ops.quantized.linear(x, packed, 1.0, 0)


def _int_mm(size: int, kind: Kind, device: str) -> Run:
    a, b = _random_int8(size, device), _random_int8(size, device)
    return lambda: torch._int_mm(a, b)


_INT8 = (_onednn_product, _quantized_product, _int_mm)


def _random_floats(size: int, device: str) -> torch.Tensor:
    """Random values, because zeros draw less power. A private generator leaves the user's random state unchanged."""
    return torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0))


def _random_int8(size: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(-100, 100, (size, size), dtype=torch.int8, device=device, generator=generator)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning that quantized tensors are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
