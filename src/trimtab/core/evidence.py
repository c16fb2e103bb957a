"""Observations of a running script: frozen records that :mod:`trimtab.probe` fills and that checks read.

Durations are in milliseconds per step unless the name says otherwise; ``site`` is ``train.py:35``, relative to the folder of
the script where the file lies in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

Phase = Literal[
    "forward",
    "backward",
    "optimizer",
    "zero_grad",
    "data",
    "copy",
    "synchronization",
    "communication",
    "logging",
    "saving",
    "other",
]
"""Exclusive phases of a step, in the order in which they are listed. ``data``: waiting for the loader; ``synchronization``:
``.item()``, ``.cpu()``, ``.numpy()``, ``.tolist()`` and printing of tensors; ``other``: the script's own lines."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineRecord:
    """A line of the script by the share of samples of the main thread that were in it, or below it."""

    site: str
    text: str
    phase: Phase
    share: float
    """Share of the time of a step, 0 to 1."""
    function: str = ""
    """Name of the function that the line is in, such as ``__getitem__``; empty at the top of the script."""
    runs: float = 0.0
    """Times that the line ran per step, counted over a step of its own; 0 if it was not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRecord:
    """Lines of the script that called each other, by the share of samples of the main thread in which they were seen."""

    calls: tuple[str, ...]
    """``main (train.py:35)``, the outermost first."""
    share: float
    """Share of the time of a step, 0 to 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderRecord:
    """A ``DataLoader`` that handed out batches."""

    site: str
    """Where it was made."""
    dataset: str
    """Class of the data set."""
    iterable: bool = False
    tensors: bool = False
    """Whether the data set is a ``TensorDataset``, or a ``Subset`` of one, with torch's own collate function."""
    batch_fetch: bool = False
    """Whether ``dataset[places]`` gave, bit for bit and without a draw of random numbers, what collating single items gives."""
    examples: int | None = None
    """Length of the data set."""
    batch_size: int | None = None
    workers: int = 0
    persistent: bool = False
    prefetch: int | None = None
    pin_memory: bool = False
    batches: int = 0
    """Batches handed out during steps."""
    iterators: int = 0
    """Number of iterators that were made, one per epoch."""
    start_ms: float = 0.0
    """Median time to make an iterator and its workers, of one epoch."""
    wait_ms: float = 0.0
    """Mean wait for a batch."""
    read_ms: float | None = None
    """Mean time of reading and collating a batch in the process that does it, where that was seen."""
    batch_bytes: int = 0
    dtypes: tuple[str, ...] = ()
    """Types of the batch's tensors, such as ``float64``."""
    padding: float | None = None
    """Share of the positions of a batch that its attention mask, or its padding value, excludes."""
    draws: bool = False
    """Whether reading moved the random generators of Python, numpy or torch: other workers would change the examples."""
    opens: float = 0.0
    """Files opened for reading per example, in the process that reads where that was seen; see ``sys.addaudithook``."""
    lines: tuple[LineRecord, ...] = ()
    """Lines of the script by their share of the time in which workers read, and how often they ran for one batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """An optimizer that made steps."""

    site: str
    name: str
    """Class, such as ``AdamW``."""
    tensors: int
    elements: int
    kernel: Literal["fused", "foreach", "single", "own"]
    """torch's implementation under the present flags; ``own`` for an optimizer that is not torch's."""
    can_fuse: bool = False
    ms: float = 0.0
    """Milliseconds of one ``step()``."""
    steps: float = 1.0
    """``step()`` calls per step of the record."""
    zero_filled: float = 0.0
    """``zero_grad(set_to_none=False)`` calls per step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleRecord:
    """An outermost module that the script calls."""

    name: str
    """Name of the class."""
    parameters: int
    dtype: str = "float32"
    """Type of its parameters; of most of them if they differ."""
    inputs: tuple[str, ...] = ()
    """Shapes and types of the tensors of its last call, such as ``float32[32, 3, 64, 64]``."""
    convolutions: int = 0
    """Two-dimensional convolutions, whose layout in memory matters."""
    channels_last: float = 0.0
    """Share of these convolutions whose weight lies in ``channels_last``."""
    inputs_channels_last: float = 0.0
    """Share of its four-dimensional inputs that lie in ``channels_last``, over the calls that were seen."""
    matrix_products: int = 0
    """Linear layers, convolutions, attention and recurrent layers."""
    recurrent: int = 0
    attention: str | None = None
    """``sdpa``, ``eager`` or another implementation of a transformers model."""
    compiled: bool = False
    training: bool = True
    """Mode of its calls during steps."""
    calls: float = 1.0
    """Calls per step."""
    forward_ms: float = 0.0
    """Milliseconds of one call."""
    gradients_unused: float = 0.0
    """Share of its calls that recorded a graph which no backward pass used."""
    unused_ms: float = 0.0
    """Milliseconds of these calls per step, or per evaluation where there are no steps."""
    unused_site: str | None = None
    """The line of the script that made most of these calls, if all calls from it are among them."""
    autocast: str | None = None
    """Type of the autocast that its calls run under, such as ``bfloat16``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallRecord:
    """Calls of one function from one line of the script."""

    name: str
    """``Tensor.item``, ``print``, ``SummaryWriter.add_scalar``, ``torch.save``, ``clip_grad_norm_``, ``torch.compile``, ..."""
    site: str
    calls: float
    """Calls per step."""
    ms: float
    """Milliseconds per step, all calls together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorRecord:
    """An operator of torch over the profiled steps."""

    name: str
    calls: float
    """Calls per step."""
    ms: float
    """Milliseconds per step, without the operators that it calls."""
    shapes: str = ""
    flops: float = 0.0
    """Floating-point operations per step; 0 if unknown."""
    gbytes: float = 0.0
    """GB (10**9 bytes) read and written per step; 0 if unknown."""
    site: str | None = None
    """The line of the script from which most of its calls come; ``None`` for calls in backward passes, or if not seen."""
    site_calls: float = 0.0
    """Calls from that line per step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecompileRecord:
    """Recompilations of a function by ``torch.compile`` after the warm-up, or a graph break."""

    site: str
    """The function that was compiled again; the line at which a graph ends."""
    reason: str
    recompiles: int = 0
    graph_breaks: int = 0
    ms: float = 0.0
    """Milliseconds of its compilations; with the first graph break those of all compilations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Memory of the process over the steps, in MB (10**6 bytes)."""

    peak_mb: float
    at_start_mb: float
    """Memory before the first step."""
    growth_mb: float = 0.0
    """Slope per step, after the warm-up."""
    growth_low_mb: float = 0.0
    """Lower bound of its 95% interval."""
    rises: float = 0.0
    """Share of the steps that left more memory held: at least a quarter of the mean growth."""
    page_faults: float = 0.0
    """Minor page faults per step."""
    huge_pages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The environment variable with which the C library asks for huge pages, where it does not yet; see
    :func:`trimtab.hardware.system.huge_pages_variable`."""
    grows_at: str | None = None
    """The line whose objects hold the growth, where it was found."""
    graphs_kept: tuple[str, ...] = ()
    """Names in that line that are tensors with a graph."""
    lines: tuple[tuple[str, float], ...] = ()
    """Lines of the script by the MB of memory that were added while they ran, over all steps; the largest first."""
    curve: tuple[tuple[float, float], ...] = ()
    """(ms since the begin of a step, MB) over one step, a mean over the steps that were sampled."""
    reserved_mb: float | None = None
    """The most that torch's allocator has reserved on the GPU."""
    allocated_mb: float | None = None
    """The most of them that tensors had."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedRecord:
    """Distributed training, as one rank observed it."""

    ranks: int
    rank: int
    kind: Literal["ddp", "fsdp", "data_parallel", "none"] = "none"
    reductions: float = 0.0
    """All-reduce rounds per update; above 1 under gradient accumulation without ``no_sync``."""
    find_unused: bool = False
    unused_found: bool = False
    """Whether there were parameters without a gradient."""
    waits_ms: float | None = None
    """Median milliseconds of a backward pass on the CPU in which it computes nothing and gradients are exchanged."""
    skew_ms: float | None = None
    """Median delay from the first to the last rank of this machine at the start of a backward pass that reduces gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanRecord:
    """A part of one step on the timeline."""

    phase: Phase
    start_ms: float
    ms: float
    depth: int = 0
    name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeRecord:
    """All observations of one run of a script.

    A step is one update of the parameters; for scripts without updates, one backward pass, one batch of the loader, or one call
    of the model, as :attr:`anchor` says. Steps with an evaluation or the start of an epoch are counted separately.
    """

    schema: ClassVar[int] = 1

    command: tuple[str, ...]
    anchor: Literal["optimizer", "backward", "batch", "forward"]
    anchor_site: str
    start_s: float
    """Seconds from the start of the process to its first step."""
    steps: int
    """Steps that were measured."""
    step_ms: float
    """Mean time of a step, without what the probe itself costs."""
    median_ms: float
    probe_ms: float
    """Cost of the probe per step; no other figure includes it."""
    times_ms: tuple[float, ...] = ()
    """Times of the measured steps, in order."""
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """:data:`Phase` -> ms per step. They add up to :attr:`step_ms`."""
    run_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the whole run that was watched: ``start``, ``steps``, ``epoch start``, ``evaluation``, ``saving``."""
    evaluation_every: float = 0.0
    """Steps per step with an evaluation; 0 if none was seen, or most steps have one."""
    finished: bool = False
    """Whether the script ended by itself before enough steps were seen."""
    exit_code: int | None = None

    lines: tuple[LineRecord, ...] = ()
    stacks: tuple[StackRecord, ...] = ()
    """The most frequent ones first."""
    loaders: tuple[LoaderRecord, ...] = ()
    optimizers: tuple[OptimizerRecord, ...] = ()
    modules: tuple[ModuleRecord, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    operators: tuple[OperatorRecord, ...] = ()
    """The slowest first; of a run of their own under torch's profiler, whose figures are shares and not times of an undisturbed
    step."""
    operator_calls: float = 0.0
    """Operators per step."""
    small_operators: float = 0.0
    """Share of the operators' time in those below 10 microseconds."""
    recompiles: tuple[RecompileRecord, ...] = ()
    memory: MemoryRecord | None = None
    distributed: DistributedRecord | None = None
    timeline: tuple[SpanRecord, ...] = ()
    """The spans of one step of median length."""

    threads: int = 1
    """torch's threads within an operator, as the script has them."""
    cores: int = 1
    """Cores that the process may use."""
    cpu_share: float = 0.0
    """CPU time of the process over wall time and :attr:`cores`, 0 to 1."""
    others_share: float = 0.0
    """CPU time of other processes over wall time and :attr:`cores`, 0 to 1."""
    gpu_share: float | None = None
    """Share of the time in which the GPUs computed, as NVML counts it, 0 to 1; ``None`` without one, or if not seen."""
    energy_j: float | None = None
    """Joules per step, if the machine counts energy."""
    energy: str = ""
    """The devices that were counted, with all that ran on them; or why none was."""
    device: str = "cpu"
    """Device of the model's parameters."""
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Debugging switches that were on: ``anomaly mode``, ``deterministic algorithms``, ``profiler``, or an environment
    variable, with the line that set it where that was seen."""
    losses: tuple[float, ...] = ()
    """Losses at each backward pass; without any, the mean absolute value of the model's first output per step."""

    writes: tuple[str, ...] = ()
    """Files that the script wrote, changed or removed; paths as it named them."""
    network: tuple[str, ...] = ()
    """``host:port`` of connections."""
    children: tuple[str, ...] = ()
    """Commands of processes that it started."""
    contained: Literal["overlay", "guarded", "in place"] = "overlay"
    """Where the writes went; see :mod:`trimtab.probe.containment`."""
    sources: tuple[str, ...] = ()
    """Files of the script's own code that its process had imported, the script itself among them; relative to the script's
    folder where they lie in it."""
    notes: tuple[str, ...] = ()
    """What could not be seen, and why, as sentences."""
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The text of each line that a ``site`` of this record names, with its indentation and without its newline. Edits are
    derived from it."""
    counters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Site -> variable that counts the innermost loop around the line, where it is a loop over ``range`` or ``enumerate``."""
