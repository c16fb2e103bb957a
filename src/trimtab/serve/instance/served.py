"""A loaded artifact that answers calls with numpy arrays. A batch that its runtime does not take is split and padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from trimtab._internal.user_code import user_code
from trimtab.artifact.manifest import LABELS, Manifest
from trimtab.artifact.padded_batches import batch_of, piece_sizes
from trimtab.core.signature import TensorSpec
from trimtab.errors import IntegrityError
from trimtab.serve.instance.load import Loaded, joinable
from trimtab.serve.instance.wire import Array, arrays_in, codes_of

EXAMPLE_VALUES = 1024
"""Most values of an input of the example that the page shows."""
MOST_CATEGORIES = 256
"""Most distinct values of an integer input that are reported as its categories."""


class Served:
    """A loaded artifact that answers calls with numpy arrays."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.signature = loaded, loaded.manifest.signature
        self._allowed = batch_of(self.signature) if joinable(self.signature) else None
        self._codes = codes_of(self.signature.inputs)

    def check_parity(self) -> None:
        """Replay the test vectors. Raises ``IntegrityError`` if an output is out of its tolerance."""
        parity = self.loaded.parities()
        if not parity.ok:
            raise IntegrityError(f"{self.loaded.path} is not served: {parity.reason} Make one on this machine.")

    def call(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """The outputs.

        Raises:
            WorkloadError: the model failed.
        """
        with user_code("The model failed"):
            if self._allowed is None or len(arrays[0]) in self._allowed:
                return self.loaded.run(arrays)
            rows, start, parts = len(arrays[0]), 0, list[Sequence[Array]]()
            for size in piece_sizes(rows, self._allowed):
                index = np.minimum(np.arange(start, start + size), rows - 1)  # the last row again where there are no more
                parts.append(self.loaded.run([array[index] for array in arrays]))
                start += size
            return [np.concatenate(pieces)[:rows] for pieces in zip(*parts, strict=True)]

    def rows_of_example(self, rows: int) -> list[Array]:
        """The artifact's first test vector, repeated or cut to ``rows`` rows."""
        example = self.loaded.examples[0]
        if self._allowed is None:
            return [array.copy() for array in example]
        return [array[np.arange(rows) % len(array)] for array in example]

    def arrays(self, body: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        """The inputs in a received body, without copies."""
        return arrays_in(body, shapes, self._codes)

    def description(self) -> dict[str, Any]:
        """The description of the model for the front process, as JSON."""
        manifest, signature = self.loaded.manifest, self.signature
        example = self.rows_of_example(1)
        return {
            "inputs": [_described(spec.name, spec) for spec in signature.inputs],
            "outputs": [_described(name, spec) for name, spec in zip(signature.output_names, signature.outputs, strict=True)],
            "dims": {dim.name: (dim.min, dim.max, dim.step) for dim in signature.dims},
            "batch": signature.batch,
            "joinable": self._allowed is not None,
            "platform": f"trimtab_{manifest.recipe['backend']['name']}",
            "threads": self.loaded.threads,
            "example": {
                "shapes": [array.shape for array in example],
                "data": [
                    values_of(array.reshape(-1)[:EXAMPLE_VALUES], spec).tolist()
                    for array, spec in zip(example, signature.inputs, strict=True)
                ],
            },
            "known": self._input_statistics(),
            "card": _card(manifest),
        }

    def _input_statistics(self) -> list[dict[str, Any] | None]:
        """Range, mean and standard deviation of the finite values of each input over all test vectors; the values themselves if
        they are integers or booleans, and few."""
        found = list[dict[str, Any] | None]()
        for index, spec in enumerate(self.signature.inputs):
            joined = np.concatenate([values_of(case[index].reshape(-1), spec) for case in self.loaded.examples])
            whole = joined.astype("f8")
            v = whole[np.isfinite(whole)]
            figures = {"low": v.min, "high": v.max, "mean": v.mean, "std": v.std}
            known: dict[str, Any] | None = {name: float(figure()) for name, figure in figures.items()} if v.size else None
            if known is not None and joined.dtype.kind in "iub" and len(values := np.unique(whole)) <= MOST_CATEGORIES:
                known["values"] = values.tolist()
            found.append(known)
        return found


def values_of(array: Array, spec: TensorSpec) -> Array:
    """The values of an array, whose bits are those of bfloat16 if ``spec`` says so."""
    return (array.astype("u4") << 16).view("f4") if spec.dtype == "bfloat16" else array


def _described(name: str, spec: TensorSpec) -> dict[str, Any]:
    return dataclasses.asdict(spec) | {"name": name}


def _card(manifest: Manifest) -> dict[str, Any]:
    """The facts that the page shows."""
    names = ("speedup", "against_tuned", "baseline_speedup", "latency_ms", "throughput", "baseline_score", "score", "drop")
    evidence = {
        name: manifest.evidence[name] for name in (*names, "size_mb", "peak_mb") if manifest.evidence.get(name) is not None
    }
    limits = {} if manifest.limits is None else dataclasses.asdict(manifest.limits)
    return {
        "workload": manifest.workload,
        "recipe": manifest.recipe_text,
        "created": manifest.created,
        "trimtab": manifest.trimtab,
        "cpu": manifest.environment.cpu,
        "evidence": evidence,
        "labels": {name: LABELS.get(name, name) for name in evidence},
        "limits": {name: value for name, value in limits.items() if value is not None},
        "test_vectors": manifest.golden.cases,
        "tolerance": manifest.golden.tolerance,
        "signature": manifest.signature.describe(),
        "notes": manifest.notes,
        "settings": str(manifest.settings),
    }
