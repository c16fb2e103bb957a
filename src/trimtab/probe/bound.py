"""The resource that limits a step: data, CPU, memory bandwidth, compute or Python."""

from __future__ import annotations

from trimtab.core.diagnosis import Bound
from trimtab.core.evidence import ProbeRecord
from trimtab.hardware.peaks import Peaks
from trimtab.measure.roofline import Dtype, Roofline, roofline

PHASE_SHARE = 0.35
"""A phase other than computing limits a step from this share of it on."""
SMALL_SHARE = 0.5
"""Python and torch's dispatch limit a step if operators below 10 us take this share of the operators' time."""
ROOF_SHARE = 0.25
"""Compute or memory bandwidth limits a step that reaches this share of the roofline."""
BUSY_SHARE = 0.1
"""Share of the CPU time in other processes from which on the sentence mentions them."""
BOUNDS = {"compute": "compute", "memory": "memory bandwidth"}
COMPUTING = ("forward", "backward", "optimizer", "zero_grad")


def bound(record: ProbeRecord, peaks: Peaks | None = None) -> Bound:
    """The resource that limits a step of ``record``. ``peaks`` give a roofline that separates compute from memory bandwidth."""
    shares = {name: ms / record.step_ms for name, ms in record.phases.items() if record.step_ms > 0}
    roof = _roofline(record, peaks)
    share = None if roof is None else round(roof.share, 4)
    if not shares:
        return Bound(kind="not known", sentence="No step was split into phases.")
    if (data := shares.get("data", 0.0)) >= PHASE_SHARE:
        return Bound(kind="data", sentence=f"{data:.0%} of a step waits for data.", share=share)
    if (wait := shares.get("communication", 0.0)) >= PHASE_SHARE:
        return Bound(kind="communication", sentence=f"{wait:.0%} of a step waits for other processes.", share=share)
    own = sum(ms for name, ms in shares.items() if name not in (*COMPUTING, "data", "copy", "communication", "synchronization"))
    if own >= PHASE_SHARE:
        sentence = f"{own:.0%} of a step is Python: the script's own lines, logging and saving, outside of the model."
        return Bound(kind="Python", sentence=sentence, share=share)
    if record.small_operators >= SMALL_SHARE:
        sentence = (
            f"{record.small_operators:.0%} of the operators' time is in those below 10 µs ({record.operator_calls:,.0f} a "
            "step): Python and torch's dispatch limit them."
        )
        return Bound(kind="Python", sentence=sentence, share=share)
    computing = sum(shares.get(name, 0.0) for name in COMPUTING)
    head = f"{computing:.0%} of a step computes"
    if roof is not None and roof.share >= ROOF_SHARE:
        kind = BOUNDS[roof.bound]
        of = f"{roof.achieved:,.3g} GFLOP/s, {roof.share:.0%} of what {kind} allows here"
        return Bound(kind=kind, sentence=f"{head}: {of}.", share=share)  # type: ignore[arg-type]
    if record.device != "cpu" and record.gpu_share is not None:
        kind = "compute" if record.gpu_share >= 1 - PHASE_SHARE else "CPU"
        return Bound(kind=kind, sentence=f"{head}; the GPU computes in {record.gpu_share:.0%} of it.")  # type: ignore[arg-type]
    busy = f"; the process uses {record.cpu_share:.0%} of {record.cores} cores" if record.cpu_share else ""
    busy += f", others use {record.others_share:.0%}" if record.others_share >= BUSY_SHARE else ""
    reach = "Operations and bytes are not known, so there is no roofline."
    if roof is not None:
        reach = f"It reaches {roof.share:.0%} of what {BOUNDS[roof.bound]} allows here."
    return Bound(kind="CPU", sentence=f"{head}{busy}. {reach}", share=share)


def _roofline(record: ProbeRecord, peaks: Peaks | None) -> Roofline | None:
    """The computing phases on the roofline; ``None`` if operations, bytes or peaks are not known."""
    flops, gbytes = sum(one.flops for one in record.operators), sum(one.gbytes for one in record.operators)
    seconds = sum(record.phases.get(name, 0.0) for name in COMPUTING) / 1e3
    if peaks is None or not flops or not gbytes or not seconds:
        return None
    known: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "float16"}
    dtype = known.get(max(record.modules, key=lambda m: m.parameters).dtype if record.modules else "", "float32")
    device = "cuda:0" if record.device == "cuda" else record.device
    return roofline(flops, gbytes * 1e9, seconds, peaks, dtype=dtype, device=device, threads=record.threads)
