"""Records of scripts in which nothing is wrong; tests make faulty ones from them with :func:`dataclasses.replace`."""

from __future__ import annotations

import dataclasses

from trimtab.core.evidence import (
    CallRecord,
    DistributedRecord,
    LineRecord,
    LoaderRecord,
    MemoryRecord,
    ModuleRecord,
    OperatorRecord,
    OptimizerRecord,
    ProbeRecord,
)


def sound_records() -> dict[str, ProbeRecord]:
    """By name: ``training`` (a CNN on two cores), ``inference``, ``by_hand`` (no loader), ``gpu`` and ``distributed``."""
    training = _training()
    return {
        "training": training,
        "inference": _inference(training),
        "by_hand": dataclasses.replace(training, loaders=(), phases={**training.phases, "data": 0.0, "other": 2.0}),
        "gpu": _gpu(training),
        "distributed": _distributed(training),
    }


PHASES = {
    "data": 1.0,
    "copy": 0.0,
    "forward": 40.0,
    "backward": 54.0,
    "optimizer": 3.0,
    "zero_grad": 0.1,
    "synchronization": 0.1,
    "communication": 0.0,
    "logging": 0.3,
    "saving": 0.0,
    "other": 1.5,
}
TEXTS = {
    "train.py:20": "loader = DataLoader(Photos(), batch_size=32, num_workers=2, persistent_workers=True)",
    "train.py:25": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
    "train.py:38": "    loss = criterion(model(x), y)",
    "train.py:39": "    loss.backward()",
    "train.py:40": "    optimizer.step()",
    "train.py:41": "    seen += len(x)",
    "train.py:43": "    print(loss.item())",
}


def _training() -> ProbeRecord:
    return ProbeRecord(
        command=("train.py", "--epochs", "1"),
        anchor="optimizer",
        anchor_site="train.py:40",
        start_s=3.0,
        steps=40,
        step_ms=100.0,
        median_ms=99.0,
        probe_ms=0.3,
        times_ms=(99.0, 101.0) * 20,
        phases=PHASES,
        run_s={"start": 3.0, "steps": 4.0, "epoch start": 0.02, "evaluation": 0.3, "saving": 0.0},
        lines=(
            LineRecord(site="train.py:38", text="    loss = criterion(model(x), y)", phase="forward", share=0.4),
            LineRecord(site="train.py:39", text="    loss.backward()", phase="backward", share=0.54),
            LineRecord(site="train.py:41", text="    seen += len(x)", phase="other", share=0.01, runs=1.0),
        ),
        loaders=(
            LoaderRecord(
                site="train.py:20",
                dataset="Photos",
                examples=5000,
                batch_size=32,
                workers=2,
                persistent=True,
                pin_memory=True,
                batches=40,
                iterators=1,
                wait_ms=1.0,
                read_ms=20.0,
                batch_bytes=393216,
                dtypes=("float32", "int64"),
                padding=0.0,
            ),
        ),
        optimizers=(
            OptimizerRecord(
                site="train.py:25", name="AdamW", tensors=60, elements=10**7, kernel="fused", can_fuse=True, ms=3.0
            ),
        ),
        modules=(
            ModuleRecord(
                name="Net",
                parameters=10**7,
                inputs=("float32[32, 3, 64, 64]",),
                convolutions=20,
                channels_last=1.0,
                inputs_channels_last=1.0,
                matrix_products=21,
                autocast="bfloat16",
                forward_ms=40.0,
            ),
        ),
        calls=(
            CallRecord(name="print", site="train.py:43", calls=0.02, ms=0.3),
            CallRecord(name="Tensor.item", site="train.py:43", calls=0.02, ms=0.1),
        ),
        operators=(
            OperatorRecord(name="aten::mkldnn_convolution", calls=20.0, ms=60.0, shapes="[32, 64, 32, 32]"),
            OperatorRecord(name="aten::copy_", calls=2.0, ms=0.1, shapes="[32]"),
        ),
        operator_calls=400.0,
        small_operators=0.05,
        memory=MemoryRecord(peak_mb=900.0, at_start_mb=600.0, growth_mb=0.01, rises=0.3, page_faults=500.0),
        threads=2,
        cores=2,
        cpu_share=0.95,
        texts=TEXTS,
    )


def _inference(training: ProbeRecord) -> ProbeRecord:
    module = dataclasses.replace(training.modules[0], name="Encoder", training=False, inputs=("int64[32, 20]",), convolutions=0)
    return dataclasses.replace(
        training,
        anchor="batch",
        anchor_site="train.py:20",
        phases={"data": 1.0, "forward": 98.0, "other": 1.0},
        run_s={"start": 3.0, "steps": 4.0},
        lines=(LineRecord(site="train.py:38", text="    loss = criterion(model(x), y)", phase="forward", share=0.98),),
        optimizers=(),
        modules=(module,),
    )


def _gpu(training: ProbeRecord) -> ProbeRecord:
    memory = dataclasses.replace(
        training.memory or MemoryRecord(peak_mb=0, at_start_mb=0), reserved_mb=4000.0, allocated_mb=3800.0
    )
    return dataclasses.replace(training, device="cuda:0", gpu_share=0.95, memory=memory)


def _distributed(training: ProbeRecord) -> ProbeRecord:
    ranks = DistributedRecord(ranks=2, rank=0, kind="ddp", reductions=1.0, skew_ms=1.0)
    return dataclasses.replace(
        training, threads=1, cpu_share=0.9, distributed=ranks, phases={**training.phases, "forward": 38.0, "communication": 2.0}
    )
