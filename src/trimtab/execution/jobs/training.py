"""Jobs of worker processes in a study of a training; the counterpart of
:mod:`trimtab.execution.jobs.inference`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from trimtab._internal.serialization import dumps, from_json, to_json, write_json
from trimtab.core import search_space
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES
from trimtab.evaluation.code_fingerprint import code_of
from trimtab.evaluation.evaluate import Plan, stage
from trimtab.evaluation.training.timer import Updates
from trimtab.evaluation.training.trial import confirm, try_recipe
from trimtab.evaluation.training.workload import TrainingSubject, prepared
from trimtab.execution.jobs.inference import READY, Job, read_workload
from trimtab.execution.preloaded_imports import record_imports
from trimtab.execution.workload_transfer import authkey
from trimtab.measure.memory import PeakMemory
from trimtab.measure.remote import RemoteRunner, serve
from trimtab.tensors.structure import tensors_of
from trimtab.tensors.weights import raw
from trimtab.train.checkpoint.checkpoints import SPARSE
from trimtab.train.data.device_prefetch import storage_tensors
from trimtab.train.loss.loss_parity import BaselineLosses, late

LOSSES = "losses.json"
OTHER = 1
"""Added to the workload's seed for the confirmation."""


def prepare_job(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """Train as written for some updates, measure how much rounding alone changes the losses, and find what cannot be tried."""
    with record_imports(folder) as files:
        subject = prepared(read_workload(job["workload"]), job["updates"])
        reference = subject.reference(seed=subject.workload.seed)
        if reference.draws:
            reference = dataclasses.replace(reference, still=subject.reference_still(seed=subject.workload.seed))
    write_json(folder / LOSSES, reference)
    steps = search_space.training()
    return {
        "name": subject.workload.name,
        "fingerprint": _fingerprint(subject, reference),
        "identity": _fingerprint(subject),
        "code": code_of(subject.trainer(subject.settings, subject.workload.seed).model, files),
        "score": reference.final,
        "n": len(reference.losses),
        "blocked": {dumps(t, indent=None): reason for t in steps if (reason := subject.blocked(t))},
        "notes": [*subject.notes, *_meaning(subject, reference), *PASSES.broken.values()],
        "inputs": f"{subject.examples:g} examples per update",
        "threads": subject.settings.threads or torch.get_num_threads(),
        "splits": {},
    }


def serve_job(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """Train under the settings of a recipe when another process asks for updates, until killed."""
    subject = prepared(read_workload(job["workload"]), 1)
    seed = subject.workload.seed + (OTHER if job["fresh"] else 0)
    with PeakMemory() as peak:
        runner = Updates(subject, subject.settings_of(Recipe.from_json(job["recipe"])), seed=seed)
        runner.block(2)
    used = peak.result
    write_json(folder / READY, {"cold_s": runner.first_s, "peak_mb": used.device_mb or used.host_mb})
    serve(runner, job["address"], authkey())
    return {}


def trial_job(job: Job, folder: pathlib.Path) -> Any:
    """Evaluate one recipe."""
    with stage("the workload"):
        subject = prepared(read_workload(job["workload"]), job["updates"])
    reference = from_json(BaselineLosses, json.loads(pathlib.Path(job["losses"]).read_text(encoding="utf-8")))
    baseline = RemoteRunner(job["address"], authkey())
    plan = from_json(Plan, job["plan"])
    return to_json(try_recipe(Recipe.from_json(job["recipe"]), subject, reference, baseline, plan=plan))


def confirm_job(job: Job, folder: pathlib.Path) -> Any:
    """Judge and time the winner again."""
    workload = read_workload(job["workload"])
    seed = workload.seed + OTHER
    subject = prepared(workload, job["updates"], seed=seed)
    baseline = RemoteRunner(job["rivals"]["as_written"], authkey(), connect_s=job["seconds"])
    plan, recipe = from_json(Plan, job["plan"]), Recipe.from_json(job["recipe"])
    return to_json(confirm(recipe, subject, baseline, plan=plan, seed=seed, must_win=job["must_win"]))


def settings_job(job: Job, folder: pathlib.Path) -> Any:
    """The settings of a recipe."""
    subject = prepared(read_workload(job["workload"]), 1)
    return to_json(subject.settings_of(Recipe.from_json(job["recipe"])))


def _meaning(subject: TrainingSubject, reference: BaselineLosses) -> list[str]:
    """Notes on the meaning of the figures where reports use the words of inference."""
    known = [(t, abs(loss)) for t, loss in zip(reference.tolerance, reference.losses, strict=True) if math.isfinite(t + loss)]
    rounding = max((t / size for t, size in known if size), default=0.0)
    return [
        "One call is one update of the parameters, with the wait for its data; every recipe has the same examples per update.",
        f"The loss at the end is the mean over the last {len(late(reference.losses))} of {subject.updates} updates.",
        f"Exact recipes were held to the losses as written within what rounding explains here: {rounding:.1g} of them at most.",
    ]


def _fingerprint(subject: TrainingSubject, reference: BaselineLosses | None = None) -> str:
    """Sixteen hex digits that identify the study: first parameters, batches, optimizer, settings, and the losses as written on
    this machine."""
    trainer = subject.trainer(subject.settings, subject.workload.seed)
    digest = hashlib.blake2b(digest_size=8)
    digest.update(
        f"{dumps(to_json(subject.settings))} {type(trainer.optimizer).__name__} {trainer.optimizer.defaults}".encode()
    )
    if reference is not None:
        digest.update(" ".join(f"{loss:.3g}" for loss in reference.losses[:8]).encode())
    for tensor in tensors_of([trainer.model.state_dict(), list(subject.batches)]):  # a state may hold more than tensors
        if tensor.layout in SPARSE:
            digest.update(f"{tuple(tensor.shape)} {tensor.layout}".encode())
        for part in storage_tensors(tensor):
            digest.update(raw(part).numpy().tobytes())
    return digest.hexdigest()


JOBS: dict[str, Callable[[Job, pathlib.Path], Any]] = {
    "prepare": prepare_job,
    "serve": serve_job,
    "trial": trial_job,
    "confirm": confirm_job,
    "settings": settings_job,
}
