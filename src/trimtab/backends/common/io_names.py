"""The names of inputs and outputs in the files of ONNX Runtime and OpenVINO."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trimtab.core.signature import Signature


def plain_names(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """``names`` as distinct ASCII identifiers that are not in ``taken``."""
    used, found = set(taken), []
    for name in names:
        plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "tensor"
        plain = f"t_{plain}" if plain[0].isdigit() else plain
        unique, count = plain, 1
        while unique in used:
            count += 1
            unique = f"{plain}_{count}"
        used.add(unique)
        found.append(unique)
    return found


def io_names(signature: Signature) -> tuple[list[str], list[str]]:
    """Identifiers of the inputs and outputs of ``signature``. They depend on it only, so that a loader finds the same ones."""
    inputs = plain_names([spec.name for spec in signature.inputs])
    return inputs, plain_names(signature.output_names, inputs)
