"""How a model runs, apart from what the model is."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch.nn.attention import SDPBackend

from trimtab._internal.serialization import type_hints
from trimtab._internal.validation import by_name, fits, options
from trimtab.errors import UsageError

MOST_THREADS = 1024
"""More than this is a mistake, or an artifact that wants to exhaust whoever loads it."""


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run, apart from what the model is. ``None`` leaves the runtime's, or the user's, own choice.

    The first five fields matter to inference and training alike, the others to training only. Where a field takes ``"auto"``,
    the Trainer measures the alternatives on the first batches and keeps what pays on this machine.
    """

    threads: int | None = None
    """Intra-operator threads."""
    autocast: Literal["bfloat16", "float16", "auto"] | None = None
    """Mixed precision through :class:`torch.autocast`."""
    memory_format: Literal["contiguous", "channels_last", "auto"] = "contiguous"
    """Layout of 4-D activations and weights."""
    batch: int | Literal["auto"] | None = None
    """Examples per call where the objective is throughput; in training, per micro-batch: larger batches are taken apart."""
    keep_memory: bool = False
    """Whether the C library keeps freed memory for the next call, from then on and for the whole process."""
    device: str = "cpu"
    """Where the model is trained: ``"cuda"`` for a GPU; what is on a GPU already is not taken off it."""
    cuda_allocator: str | None = None
    """Options of torch's allocator for GPUs, as ``PYTORCH_CUDA_ALLOC_CONF`` takes them, such as ``"expandable_segments:True"``,
    with which memory is not left in pieces where the lengths of batches differ; from then on and for the whole process."""
    accumulate: int = 1
    """Batches of the loader per update of the parameters."""
    scale_lr: Literal["linear", "sqrt"] | None = None
    """How the learning rate, chosen for updates from one batch of the loader, follows the batches that an update has, over
    ``accumulate`` and all processes: times their number, or times its square root."""
    exact_batchnorm: bool = False
    """Whether BatchNorm sees all of an update's batches: they then run as one, and ``activation_mb`` bounds the memory."""
    joined: bool = False
    """Whether an update's batches run as one wherever shapes and memory allow; BatchNorm then sees all of them."""
    clip_norm: float | None = None
    """Largest norm of the gradient of all parameters, clipped once per update."""
    compile: bool | Literal["auto"] = False
    """Whether the model runs through :func:`torch.compile`; ``auto`` weighs what compiling costs against the steps left."""
    optimizer: Literal["loop", "foreach", "fused", "auto"] | None = None
    """Which of torch's implementations of the optimizer runs the update."""
    attention: Literal["flash", "efficient", "cudnn", "math", "auto"] | None = None
    """Which implementation scaled dot-product attention uses, wherever that takes its inputs."""
    tf32: bool | Literal["auto"] | None = None
    """Whether float32 products may be rounded to TensorFloat-32 on GPUs that have it; by default torch rounds convolutions."""
    cudnn_benchmark: bool = False
    """Whether cuDNN times its algorithms for each new shape."""
    activation_mb: float | None = None
    """Most memory that a micro-batch may take above parameters, gradients and the optimizer's state, in MB (10**6 bytes).
    Modules are chosen, by measurement on the first batch, whose activations are computed again in the backward pass."""
    segments: int | None = None
    """Parts into which the model's longest ``nn.Sequential`` is divided, each of which is computed again in the backward pass:
    a fixed alternative to ``activation_mb``."""
    nonfinite: Literal["raise", "skip", "stop", "ignore"] = "raise"
    """What a loss or gradient that is not finite leads to: an error, an update left out, the end of the run, or nothing:
    then nobody looks, which saves reading every gradient."""
    communication: Literal["float16", "bfloat16", "powersgd"] | None = None
    """How gradients are compressed between processes."""
    bucket_mb: float | None = None
    """Most gradients that cross between processes at once, in MiB; ``None`` stands for 25."""
    sharding: Literal["replicate", "shard", "hybrid"] = "replicate"
    """Whether every process holds the whole model, a share of it (FSDP2), or a share within its host."""
    adjust: bool = False
    """Whether the workers of a ``Loader`` and the micro-batch are tuned while the run goes on, where its updates slow down."""

    def __post_init__(self) -> None:
        for name, hint in type_hints(Settings).items():
            if not fits(hint, value := getattr(self, name)):
                raise UsageError(f"Settings {name} is {value!r}; it can be {options(hint)}.")
        for name in ("threads", "accumulate", "batch", "clip_norm", "activation_mb", "bucket_mb", "segments"):
            if isinstance(value := getattr(self, name), (int, float)) and not value > 0:
                raise UsageError(f"Settings {name} is {value}; it must be above zero.")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise UsageError(f"Settings threads is {self.threads}; at most {MOST_THREADS} are started.")
        if self.segments is not None and self.activation_mb is not None:
            raise UsageError("segments and activation_mb both say what is computed again. Give one of them.")
        if self.exact_batchnorm and self.batch is not None:
            raise UsageError(
                f"exact_batchnorm runs the batches of an update as one, which batch={self.batch!r} would take apart. Leave one "
                "out; activation_mb bounds the memory."
            )


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Names in settings -> torch's."""
