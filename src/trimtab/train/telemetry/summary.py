"""The summary of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trimtab._internal.notebook import preformatted
from trimtab._internal.text import counted
from trimtab.core.settings import Settings
from trimtab.train.runtime.step_clock import PHASES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of :meth:`~trimtab.train.trainer.Trainer.fit`."""

    updates: int
    """Updates made in this call, without those before a resumption."""
    epochs: int
    """Finished epochs, including those before a resumption."""
    seconds: float
    ended: str
    """Why the run ended, in a sentence."""
    loss: float | None
    """Mean loss of the last updates that were logged."""
    best: float | None
    """Best value of the validation metric that early stopping watches."""
    metrics: Mapping[str, float]
    """Metrics of the last validation."""
    restored: str | None = None
    """The metric whose best validation the parameters are restored from; ``None`` if they are those of the last update."""
    examples_per_s: float | None
    peak_mb: float | None
    """Highest memory above the level before the run: of the GPU's allocator where there is one, else of the process."""
    flops_share: float | None
    """Share of the floating-point peak measured on this machine at the precision and thread count of the run. ``None`` if that
    peak is unknown; or if no setting was ``"auto"`` or ``compile``, because counting operations calls the loss."""
    shares: Mapping[str, float]
    """Share of the time of the updates by phase; together 1."""
    skipped: int
    median_ms: float | None = None
    """Median milliseconds of an update: the host's time from one update to the next, without validations."""
    spread_ms: float | None = None
    """Standard deviation of an update's milliseconds."""
    p95_ms: float | None = None
    """95th percentile of an update's milliseconds; ``None`` for fewer than 20 updates."""
    loss_spread: float | None = None
    """Standard deviation of the loss over the last updates that were logged."""
    loss_p95: float | None = None
    """95th percentile of the loss over the last updates that were logged; ``None`` for fewer than 20."""
    resident_mb: float | None = None
    """Resident memory of the process at the end, in MB (10**6 bytes)."""
    allocated_mb: float | None = None
    """Memory of the GPU that tensors take at the end."""
    reserved_mb: float | None = None
    """Memory of the GPU that torch's allocator holds at the end."""
    settings: Settings
    """The settings at the end, with every ``"auto"`` decided."""
    notes: tuple[str, ...] = ()
    """Decisions and remarks, a sentence each."""

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        return f"Summary({counted(self.updates, 'update')} in {self.seconds:.1f} s{loss})"

    def _repr_html_(self) -> str:
        """The lines of ``str()``, for notebooks."""
        return preformatted(str(self))

    def __str__(self) -> str:
        """A few lines for a person."""
        speed = f", {self.examples_per_s:,.0f} examples/s" if self.examples_per_s else ""
        lines = [f"{counted(self.updates, 'update')} in {self.seconds:.1f} s{speed}. {self.ended}"]
        figures = {"loss": self.loss, **{f"validation {name}": value for name, value in self.metrics.items()}}
        lines.append(", ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None))
        if self.restored is not None and self.best is not None:
            lines.append(f"The model has the parameters of the best validation, whose {self.restored} was {self.best:.4g}.")
        shown = [f"{phase} {self.shares[phase]:.0%}" for phase in PHASES if self.shares.get(phase, 0) >= 0.005]
        times = {"median": self.median_ms, "p95": self.p95_ms}
        spread = ", ".join(f"{name} {value:.3g} ms" for name, value in times.items() if value is not None)
        lines.append("Time: " + ", ".join(shown) + (f"; an update: {spread}" if spread else "") if shown else "")
        if self.peak_mb is not None:
            lines.append(f"Peak memory {self.peak_mb:,.0f} MB" + _share(self.flops_share))
        if self.skipped:
            lines.append(f"{counted(self.skipped, 'update')} left out, because the loss or a gradient was not finite.")
        return "\n".join(line for line in [*lines, *self.notes] if line)


def _share(share: float | None) -> str:
    return "" if share is None else f"; {share:.0%} of the floating-point peak measured here"
