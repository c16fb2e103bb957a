"""Scripts that make the steps of a workload, to be watched like any other script."""

from __future__ import annotations

import pathlib
import pprint
import re
from collections.abc import Mapping
from typing import Any

import cloudpickle

from trimtab.core.candidate import MODEL_ERRORS
from trimtab.core.workload import Workload
from trimtab.errors import UsageError
from trimtab.execution.workload_transfer import workload_source

_HEAD = '''\
"""The steps of a workload, written by trimtab doctor."""

import torch

from trimtab.execution.jobs.inference import read_workload
{imports}
workload = read_workload({source})
torch.manual_seed(workload.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = workload.build_model().to(device)
'''
_TRAINING = """
model.train()
training = workload.training
loss_of = LossAdapter(training.loss)
optimizer = training.optimizer([one for one in model.parameters() if one.requires_grad])
data = training.data() if callable(training.data) else training.data

while True:
    seen = 0
    for batch in data:
        batch = map_tensors(batch, lambda tensor: tensor.to(device))
        optimizer.zero_grad()
        loss, _ = loss_of(model, batch, weighed=False)
        loss.backward()
        optimizer.step()
        seen += 1
    if not seen:
        break
"""
_CALLS = """
model.eval()
args, kwargs = map_tensors(as_call(workload.inputs), lambda tensor: tensor.to(device))

with torch.no_grad():
    while True:
        model(*args, **kwargs)
"""
_BATCHES = """
model.eval()
with open({loader}, "rb") as file:
    loader = cloudpickle.load(file)

with torch.no_grad():
    while True:
        seen = 0
        for batch in loader:
            inputs = batch[0] if is_pair(batch) else batch
            call(model, map_tensors(inputs, lambda tensor: tensor.to(device)))
            seen += 1
        if not seen:
            break
"""
_IMPORTS = {
    "training": "from trimtab.tensors.structure import map_tensors\nfrom trimtab.train.loss.adapter import LossAdapter\n",
    "calls": "from trimtab.core.workload import as_call\nfrom trimtab.tensors.structure import map_tensors\n",
    "batches": (
        "import cloudpickle\n\nfrom trimtab.tensors.structure import map_tensors\n"
        "from trimtab.train.loss.adapter import call, is_pair\n"
    ),
}


def script_of(workload: Workload, folder: pathlib.Path, *, reference: str | None = None, loader: Any = None) -> pathlib.Path:
    """Write a script into ``folder`` that trains ``workload``, or calls its model, until it is stopped. Returns the script.

    Args:
        workload: with ``mode="train"`` its training is made, in plain PyTorch; otherwise the model is called on its inputs.
        folder: an empty folder, which must last as long as the script runs.
        reference: of the workload, if it has one; otherwise the script reads a pickle in ``folder``.
        loader: batches for a model that is called, in place of the workload's inputs.

    Raises:
        UsageError: the workload or the loader cannot be handed to another process.
    """
    source: Mapping[str, Any] = workload_source(reference if reference is not None else workload, folder)
    if workload.mode == "train":
        kind, body = "training", _TRAINING
    elif loader is None:
        kind, body = "calls", _CALLS
    else:
        kind, body = "batches", _BATCHES.format(loader=repr(str(_pickle_loader(loader, folder))))
    text = _HEAD.format(imports=_IMPORTS[kind], source=pprint.pformat(dict(source), width=100)) + body
    path = folder / (re.sub(r"\W", "_", workload.name) + "_steps.py")
    path.write_text(text, encoding="utf-8")
    return path


def _pickle_loader(loader: Any, folder: pathlib.Path) -> pathlib.Path:
    path = folder / "loader.pkl"
    try:
        path.write_bytes(cloudpickle.dumps(loader))
    except MODEL_ERRORS as error:
        reason = " ".join(str(error).split()).rstrip(".!")
        raise UsageError(
            f"The loader cannot be handed to another process: {reason}. Put model and loader into a script and run "
            "trimtab doctor SCRIPT."
        ) from error
    return path
