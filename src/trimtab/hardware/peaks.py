"""How fast this machine really multiplies matrices and moves memory: short runs through torch, the best of several.

The best, because a peak is what the machine can do; a busy neighbour only ever makes a run slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

import psutil
import torch

from trimtab.hardware import system
from trimtab.tensors.precision import products_of_float32

Kind = Literal["float32", "bfloat16", "float16", "int8", "memory"]
Run = Callable[[], object]
Product = Callable[[int, "Kind", str], Run]

BUSY = 0.1
"""Share of all CPU time that other processes may take before the rates count as too low."""
_SECONDS = 0.25
"""What one rate may cost, without the making of its matrices."""
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError)
"""What torch raises for a kernel that this build, processor or version has not; a missing operator is an AttributeError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """One peak. ``value`` is ``None`` where it could not be measured, and ``reason`` then says why."""

    kind: Kind
    """A matrix product of that type, or ``memory`` for a stream of reads and writes."""
    device: str
    """``cpu``, ``cuda:0``, ..."""
    threads: int | None
    """Up to this many; ``None`` on a GPU."""
    unit: Literal["GFLOP/s", "GOP/s", "GB/s"]
    """A multiplication with its addition counts as two; gigabytes are 10**9 bytes."""
    value: float | None
    reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """What one machine reached when it was asked for nothing else."""

    schema: ClassVar[int] = 1

    fingerprint: str
    """Of the environment they were measured in."""
    threads: int
    """All usable cores."""
    rates: tuple[Rate, ...]
    foreign: float = 0.0
    """Share of all CPU time that other processes and other virtual machines took meanwhile."""
    notes: tuple[str, ...] = ()
    """What went wrong with measuring or keeping them, in sentences."""

    def find(self, kind: Kind, device: str = "cpu", threads: int | None = None) -> float | None:
        """The rate in its unit, or ``None`` where it was not measured. ``threads`` defaults to all usable ones of a CPU."""
        wanted = (threads or self.threads) if device == "cpu" else None
        return next((r.value for r in self.rates if (r.kind, r.device, r.threads) == (kind, device, wanted)), None)

    def merged(self, other: Peaks) -> Peaks:
        """The better of each rate of two measurements of one machine: whatever was reached once can be reached."""
        others = {(rate.kind, rate.device, rate.threads): rate for rate in other.rates}
        rates = (max(rate, others.get((rate.kind, rate.device, rate.threads), rate), key=_value) for rate in self.rates)
        return dataclasses.replace(self, rates=tuple(rates))


def measure(fingerprint: str, threads: int, gpus: int, memory_mb: float) -> Peaks:
    """All rates of this machine: with one and with ``threads`` threads, and of every GPU. About three seconds without GPUs.

    ``memory_mb`` is what the machine has; the arrays for its bandwidth take at most an eighth of it.
    """
    threads_before, cpu_before = torch.get_num_threads(), _cpu_times()
    rates: list[Rate] = []
    try:
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            rates += [_gemm(kind, "cpu", count) for kind in ("float32", "bfloat16", "int8")]
            rates.append(_bandwidth("cpu", count, _stream_bytes(memory_mb)))
    finally:
        torch.set_num_threads(threads_before)
    foreign = _foreign(cpu_before, _cpu_times())
    for index in range(gpus):
        device = f"cuda:{index}"
        rates += [_gemm(kind, device, None) for kind in ("float32", "bfloat16", "float16", "int8")]
        rates.append(_bandwidth(device, None, 2**30))
    return Peaks(fingerprint=fingerprint, threads=threads, rates=tuple(_raised(rates)), foreign=foreign)


def _raised(rates: list[Rate]) -> Iterator[Rate]:
    """No rate of many threads below that of one, to which a busy neighbour can press it: many may leave all but one idle."""
    single = {rate.kind: rate.value for rate in rates if rate.threads == 1 and rate.value is not None}
    for rate in rates:
        floor = single.get(rate.kind) if rate.device == "cpu" else None
        yield dataclasses.replace(rate, value=max(rate.value, floor)) if rate.value and floor else rate


def _value(rate: Rate) -> float:
    return rate.value or 0.0


def _cpu_times() -> tuple[float, float, float]:
    """Seconds of CPU time: all there was, what of it was busy or stolen, and what this process took."""
    times = psutil.cpu_times()
    # Linux counts the time of guests in user time too.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total, total - times.idle - getattr(times, "iowait", 0.0), time.process_time()


def _foreign(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    total, busy, own = (late - early for early, late in zip(before, after, strict=True))
    return round(min(max((busy - own) / total, 0.0), 1.0), 3) if total > 0 else 0.0


def _gemm(kind: Kind, device: str, threads: int | None) -> Rate:
    unit: Literal["GFLOP/s", "GOP/s"] = "GOP/s" if kind == "int8" else "GFLOP/s"
    makers: tuple[Product, ...] = _INT8 if kind == "int8" else (_float_product,)
    reasons = []
    for make in makers:
        try:
            with torch.inference_mode(), products_of_float32(tf32=False), _quiet():
                value = _growing(make, kind, device)
            return Rate(kind=kind, device=device, threads=threads, unit=unit, value=value)
        except _FAILURES as error:
            reasons.append(str(error).partition("\n")[0][:200])
    reason = f"torch cannot multiply {kind} matrices on {device}: {reasons[0 if device == 'cpu' else -1]}"
    return Rate(kind=kind, device=device, threads=threads, unit=unit, value=None, reason=reason)


def _bandwidth(device: str, threads: int | None, size: int) -> Rate:
    """A triad ``c = a + 2 b`` over arrays of ``size`` bytes in all, counted as two reads and a write."""
    try:
        with torch.inference_mode():
            count = size // 12
            a, b, c = (torch.full((count,), value, dtype=torch.float32, device=device) for value in (1.0, 2.0, 0.0))
            seconds = _best(lambda: torch.add(a, b, alpha=2.0, out=c), device)
        return Rate(kind="memory", device=device, threads=threads, unit="GB/s", value=12 * count / seconds / 1e9)
    except RuntimeError as error:
        reason = f"the arrays do not fit in memory: {str(error).partition(chr(10))[0][:200]}"
        return Rate(kind="memory", device=device, threads=threads, unit="GB/s", value=None, reason=reason)


def _stream_bytes(memory_mb: float) -> int:
    """Four times the last-level caches, so that they cannot help; at least 192 MB, at most an eighth of the memory."""
    return int(min(max(192e6, 4 * (system.last_level_cache() or 0)), 2e9, memory_mb * 1e6 / 8))


def _growing(make: Product, kind: Kind, device: str) -> float:
    """The best rate in 10**9 operations per second over growing square matrices, until one takes long enough."""
    best = 0.0
    for size in _SIZES:
        run = make(size, kind, device)
        run()
        seconds = min(_timed(run, device) for _ in range(3))
        best = max(best, 2e-9 * size**3 / seconds)
        # The next size takes about eight times as long: a kernel that is slow here must not take seconds there.
        if 8 * seconds > _SECONDS / 2:
            break
    return max(best, 2e-9 * size**3 / _best(run, device))


def _best(run: Run, device: str) -> float:
    """The shortest of at least three runs, in seconds, for as long as a rate may take."""
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
    """Seconds between two events around the run, behind another one, so that the launch from Python does not count."""
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
    a, b = (_noise(size, device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _onednn_product(size: int, kind: Kind, device: str) -> Run:
    """The kernel of PyTorch's own int8 linear layers on x86: unsigned activations, signed weights."""
    if device != "cpu":
        raise RuntimeError("oneDNN computes on CPUs only")
    weight = _bytes(size, device)
    x = _bytes(size, device).view(torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [size, size])
    scales, zeros = torch.full((size,), 0.01), torch.zeros(size, dtype=torch.int64)
    linear = torch.ops.onednn.qlinear_pointwise
    return lambda: linear(x, 0.01, 0, packed, scales, zeros, None, 1.0, 0, torch.uint8, "none", [], "")


def _quantized_product(size: int, kind: Kind, device: str) -> Run:
    """The kernel of torch's default quantization engine, which on arm is not oneDNN's."""
    if device != "cpu":
        raise RuntimeError("the quantization engines compute on CPUs only")
    x = torch.quantize_per_tensor(_noise(size, device), 0.02, 128, torch.quint8)
    weight = torch.quantize_per_tensor(_noise(size, device), 0.02, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    return lambda: torch.ops.quantized.linear(x, packed, 1.0, 0)


def _int_mm(size: int, kind: Kind, device: str) -> Run:
    a, b = _bytes(size, device), _bytes(size, device)
    return lambda: torch._int_mm(a, b)


_INT8 = (_onednn_product, _quantized_product, _int_mm)


def _noise(size: int, device: str) -> torch.Tensor:
    """Random values, since zeros draw less power; from a generator of our own, since the user's seed is the user's."""
    return torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(0))


def _bytes(size: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(-100, 100, (size, size), dtype=torch.int8, device=device, generator=generator)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that its quantized tensors are old; they are only the handle to the kernel here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
