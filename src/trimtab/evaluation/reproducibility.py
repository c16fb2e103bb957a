"""Check that every process of a study finds the same workload: weights bit-identical, inputs and data within rounding.

Each worker reads the workload itself. Values drawn without a seed differ between workers, and outputs would be compared with
those for other examples. Data is often computed as it is read and may be rounded otherwise in another process, so data is
compared by a few weighted sums and not by its bytes.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trimtab.data.batches import Batch
from trimtab.errors import WorkloadError
from trimtab.evaluation.prepared_workload import Subject
from trimtab.evaluation.reference import Reference
from trimtab.tensors.structure import leaves_of
from trimtab.tensors.weights import parts, raw

SUMS_FILE = "looks.safetensors"
"""File in the folder of the reference: the sums of inputs and data in the dry run."""
TEST = "test"
"""Folder in that of the reference: the reference on the test data."""
MAX_SUMMED = 1 << 16
"""Maximum values of one tensor that are summed, spread evenly over it: data may be large, and every trial reads it."""
SUMS = 4
"""Number of weighted sums that identify a tensor."""
ALIKE = 1e-5
"""Tolerance between two sums, relative to the sum of all magnitudes; values that are drawn again differ by far more."""
LARGE = 1e30
"""Values beyond this stand for infinity, as in masks, and would dominate the sums."""
SEEDS = "random.seed(0), np.random.seed(0), torch.manual_seed(0)"
OTHER_CALIBRATION = (
    f"The calibration data is not the same in each process, so that another run may quantize otherwise. Seed it: {SEEDS}."
)


def save_sums(folder: pathlib.Path, subject: Subject) -> None:
    """Write the sums of inputs and data into ``folder``, for other processes to compare."""
    splits = subject.splits
    seen = {"inputs": sums_of(subject.candidate.leaves), "selection": _data(splits.selection), "test": _data(splits.test)}
    seen["calibration"] = _calibration(subject)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(seen, folder / SUMS_FILE)


def check_inputs(job: Mapping[str, Any], leaves: Iterable[torch.Tensor]) -> None:
    """Compare the example inputs with those of the dry run.

    Raises:
        WorkloadError: they differ.
    """
    if not _equal_sums(_saved_sums(job)["inputs"], sums_of(leaves)):
        raise WorkloadError(
            "The workload's inputs are others each time that it is read, so that nothing measured of one process holds for "
            f"another. Seed what draws them ({SEEDS}), or load them from a file."
        )


def check_data(job: Mapping[str, Any], subject: Subject) -> None:
    """Compare example inputs and selection data with those of the dry run. Test data may differ between processes: a process
    with other test data runs the original on it (:func:`saved_test_reference`).

    Raises:
        WorkloadError: they differ.
    """
    check_inputs(job, subject.candidate.leaves)
    if not _equal_sums(_saved_sums(job)["selection"], _data(subject.splits.selection)):
        raise WorkloadError(
            "The workload's data is other data each time that it is read, so that outputs would be held against those for "
            f"other examples. Seed what draws or orders it ({SEEDS}), sort what comes out of a set, or load it from a file."
        )


def saved_test_reference(job: Mapping[str, Any], subject: Subject) -> Reference | None:
    """The reference of the dry run on the test data; ``None`` if this process has other test data."""
    alike = _equal_sums(_saved_sums(job)["test"], _data(subject.splits.test))
    return Reference.load(pathlib.Path(job["reference"]) / TEST) if alike else None


def calibration_differs(job: Mapping[str, Any], subject: Subject) -> bool:
    """Whether the calibration data differs from that of the dry run. That is no error, but a reason to note."""
    return not _equal_sums(_saved_sums(job)["calibration"], _calibration(subject))


def sums_of(values: Iterable[Any]) -> torch.Tensor:
    """Weighted sums of ``values``, whatever their size: rows of a sum and its tolerance."""
    rows = [row for leaf in leaves_of(list(values)) for row in _leaf_sums(leaf)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


def fingerprint(subject: Subject, reference: Reference | None = None) -> str:
    """Sixteen hex digits of weights, example inputs and, with ``reference``, outputs and scores, which depend on data."""
    digest = hashlib.blake2b(digest_size=8)
    outputs = () if reference is None else reference.outputs[0]
    _update_digest(digest, (*subject.model.state_dict().items(), *enumerate((*subject.candidate.leaves, *outputs))))
    if (student := subject.candidate.student) is not None:
        digest.update(str(student).encode())
        _update_digest(digest, student.state_dict().items())
    if reference is not None:
        evaluation = subject.workload.evaluation
        gated = None if evaluation is None else evaluation.outputs
        digest.update(repr((reference.scores, gated and tuple(gated))).encode())  # stands for data, labels and the score
    return digest.hexdigest()


def weights_of(model: nn.Module) -> dict[str, str]:
    """Sixteen hexadecimal digits of the model's parameters, and of its buffers, some of which a call may change."""
    found = {}
    for what, items in (("parameters", model.parameters()), ("buffers", model.buffers())):
        digest = hashlib.blake2b(digest_size=8)
        _update_digest(digest, enumerate(items))
        found[what] = digest.hexdigest()
    return found


def check_weights(job: Mapping[str, Any], model: nn.Module, *what: str) -> None:
    """Compare the digests of the parts ``what`` of the model with those in ``job``.

    Raises:
        WorkloadError: they differ.
    """
    found = weights_of(model)
    if any(job["weights"].get(each) not in (None, found[each]) for each in what):
        raise WorkloadError(
            "The model has other weights each time that it is built, so that nothing measured of one holds for another. Load "
            "saved weights, or draw them from a seed: torch.manual_seed(0) before the model is made."
        )


def _saved_sums(job: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(pathlib.Path(job["reference"]) / SUMS_FILE)


def _data(batches: Iterable[Batch]) -> torch.Tensor:
    return sums_of((batch.inputs, batch.target) for batch in batches)


def _calibration(subject: Subject) -> torch.Tensor:
    return sums_of((args, dict(kwargs)) for args, kwargs in subject.candidate.calibration)


def _equal_sums(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one[:, 0] - other[:, 0]).abs() <= torch.maximum(one[:, 1], other[:, 1])).all())


def _leaf_sums(leaf: Any) -> Iterator[tuple[float, float]]:
    """Sums of a tensor or constant, each with its tolerance; nothing for other values."""
    if isinstance(leaf, float):
        leaf = torch.tensor(leaf, dtype=torch.float64)
    if leaf is None or isinstance(leaf, (bool, int, str)):
        yield float(zlib.crc32(repr(leaf).encode())), 0.0
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.is_quantized or leaf.layout is not torch.strided:
        return
    yield float(zlib.crc32(f"{leaf.dtype} {tuple(leaf.shape)}".encode())), 0.0
    values = leaf.detach().reshape(-1)
    values = values[:: values.numel() // MAX_SUMMED + 1].cpu()
    values = torch.view_as_real(values.resolve_conj()).sum(1) if values.is_complex() else values
    values = values.to(torch.float64).nan_to_num()
    values = torch.where(values.abs() > LARGE, values.sign(), values)
    allowed = ALIKE * float(values.abs().sum())
    yield from ((each, allowed) for each in (_weights()[:, : values.numel()] * values).sum(1).tolist())


@functools.cache
def _weights() -> torch.Tensor:
    """Weights of the sums, equal in every process."""
    return 2 * torch.rand(SUMS, MAX_SUMMED, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 1


def _update_digest(digest: hashlib.blake2b, items: Iterable[tuple[object, Any]]) -> None:
    for name, tensor in items:
        digest.update(str(name).encode())
        if isinstance(tensor, torch.Tensor):
            for part in parts(tensor.detach()):
                digest.update(raw(part).numpy().data)
