"""Write the folder that :mod:`trimtab.testing.reload` reads."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from trimtab._internal.serialization import to_json, write_json
from trimtab.core.backend import Backend, Executable

FILES, INPUTS, OUTPUTS, FACTS = "model", "inputs.safetensors", "outputs.safetensors", "reload.json"


def prepare(folder: pathlib.Path, backend: Backend, executable: Executable, leaves: Sequence[torch.Tensor]) -> None:
    """Write ``folder`` for :mod:`trimtab.testing.reload`.

    The executable is saved with this process's number of threads in its settings, because machine code depends on it.
    """
    (folder / FILES).mkdir(parents=True)
    files = executable.save(folder / FILES)
    written = {str(path.relative_to(folder / FILES)) for path in (folder / FILES).rglob("*") if path.is_file()}
    assert set(files) == written, f"save() names {sorted(files)} but wrote {sorted(written)}."
    settings = to_json(executable.settings) | {"threads": executable.settings.threads or torch.get_num_threads()}
    facts: dict[str, Any] = {
        "class": [type(backend).__module__, type(backend).__qualname__],
        "backend": backend.to_json(),
        "signature": to_json(executable.signature),
        "settings": settings,
    }
    write_json(folder / FACTS, facts)
    save_file({str(i): leaf.contiguous().clone() for i, leaf in enumerate(leaves)}, str(folder / INPUTS))
