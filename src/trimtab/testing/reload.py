"""Load and run saved executables in a process without the model's class.

``python -m trimtab.testing.reload FOLDER...``: each folder contains ``reload.json`` (backend, class, signature, settings),
``inputs.safetensors`` and the saved files in ``model/``. The outputs are written to ``outputs.safetensors``.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
from collections.abc import Sequence

import torch
from safetensors.torch import load_file, save_file

from trimtab._internal.serialization import from_json
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.core.technique import technique_from_json
from trimtab.testing.exchange import FACTS, FILES, INPUTS, OUTPUTS


def main(folders: Sequence[str]) -> None:
    """Load and run the executable of each folder."""
    for folder in map(pathlib.Path, folders):
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        module, name = facts["class"]
        cls = getattr(importlib.import_module(module), name)
        backend = technique_from_json({cls.name: cls}, facts["backend"])
        settings = from_json(Settings, facts["settings"])
        torch.set_num_threads(settings.threads or 1)
        executable = backend.load(folder / FILES, from_json(Signature, facts["signature"]), settings)
        inputs = load_file(str(folder / INPUTS))
        outputs = executable.run([inputs[str(i)] for i in range(len(inputs))])
        save_file({str(i): tensor.contiguous().clone() for i, tensor in enumerate(outputs)}, str(folder / OUTPUTS))
        executable.close()


if __name__ == "__main__":
    main(sys.argv[1:])
