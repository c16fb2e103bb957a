"""Jobs of worker processes in a study of inference. A job gets its description and folder, and returns a JSON result."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trimtab._internal.serialization import dumps, from_json, to_json, write_json
from trimtab._internal.user_code import BY_HAND, user_code
from trimtab.artifact.artifact import open_artifact, write_artifact
from trimtab.artifact.test_vectors import Golden
from trimtab.core import search_space
from trimtab.core.backend import BACKENDS, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.check import CHECKS
from trimtab.core.dynamic_dims import resized
from trimtab.core.finding import Finding
from trimtab.core.measurement import Comparison
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, technique_from_json
from trimtab.core.trial import Trial
from trimtab.core.workload import Workload, as_call
from trimtab.data import leakage
from trimtab.data.training_data import cached_only
from trimtab.errors import ArtifactError, StorageError, TrimtabError
from trimtab.evaluation import reproducibility
from trimtab.evaluation.baseline_export import baseline_speedup
from trimtab.evaluation.code_fingerprint import code_of
from trimtab.evaluation.confirm import Confirmation, confirm, judge, load, time_start
from trimtab.evaluation.evaluate import (
    MODEL,
    TORCH_THREADS,
    Plan,
    apply_passes,
    build,
    concurrent_requests,
    evaluate,
    files_complete,
    load_saved,
    one_call,
    rows,
    runner_for,
    save,
    stage,
)
from trimtab.evaluation.explain import explain
from trimtab.evaluation.materialized import materialize, materialized
from trimtab.evaluation.prepared_workload import Subject, fresh_inputs, prepare, refuse_nan, within_stated
from trimtab.evaluation.reference import Reference, least_drop, reference_of
from trimtab.execution.preloaded_imports import ignored_thread_settings, record_imports
from trimtab.execution.workload_transfer import authkey
from trimtab.hardware.environment import Environment, measured_peaks
from trimtab.importers.load import load_workload
from trimtab.measure.memory import PeakMemory
from trimtab.measure.remote import RemoteRunner, serve
from trimtab.measure.timer import Runner
from trimtab.tensors.structure import cloned, flatten, unflatten
from trimtab.tensors.weights import weight_bytes, weights

READY, EXAMPLE = "ready.json", "example.safetensors"
"""Files: a server is ready, and what it serves; the example inputs, in the folder of the reference."""
SLOW_START_S = 2.0
EXPORT = ("torch.export._trace", "torch._export.serde.serialize", "trimtab.backends.common.exported_program")
"""Modules that nearly every recipe imports to be built, saved or read, which takes a second."""

Job = Mapping[str, Any]


_preloaded: dict[str, Workload] = {}
"""Workloads that the server has read from which this process was forked, by their source."""


def read_workload(source: Mapping[str, Any]) -> Workload:
    """The workload that ``source`` names: a reference to a file or module, or a pickle that trimtab wrote.

    From now on ``sys.argv`` is that of a script without arguments, because the user's code may read it at any time.
    """
    if (known := _preloaded.get(dumps(source))) is not None:
        return known
    sys.argv[:] = [source.get("reference", "workload")]
    if "pickle" in source:
        # modules beside the user's script come before installed ones of the same name, as in the script itself
        sys.path[:] = dict.fromkeys([*source.get("path", ()), *sys.path])
        with open(source["pickle"], "rb") as file:
            found: Workload = cloudpickle.load(file)
        return found
    return load_workload(source["reference"])


def preload(source: Mapping[str, Any], weights_known: Mapping[str, str]) -> None:
    """Read the workload in a server, so that processes forked from it need not.

    Raises:
        WorkloadError: the file failed, or the model that it holds has other weights than in the dry run, as if a computation
            depends on the number of threads.
    """
    workload = read_workload(source)
    if isinstance(workload.model, nn.Module):
        reproducibility.check_weights({"weights": weights_known}, workload.model, "parameters", "buffers")
    _preloaded[dumps(source)] = workload


def prepared(job: Job) -> Subject:
    """The workload as the dry run prepared it. What the dry run could not write to disk is prepared again and compared. A job
    without a dry run prepares the workload, and writes it for the next one.

    Raises:
        WorkloadError: inputs, data or weights differ from those of the dry run.
    """
    workload = read_workload(job["workload"])
    limit_threads(job)
    folder, scratch = pathlib.Path(job["prepared"]), pathlib.Path(job["scratch"]) if "scratch" in job else None
    subject = materialized(workload, folder, scratch)
    if subject is None:
        subject = prepare(workload, scratch, compress=_compresses(job))
        if "reference" in job:
            reproducibility.check_data(job, subject)
        else:
            materialize(subject, folder)
    if job.get("kind") != "train":  # what is tried, confirmed and shipped is what one job trained
        training = cached_only(subject.candidate.training)
        subject = dataclasses.replace(subject, candidate=dataclasses.replace(subject.candidate, training=training))
    if (limit := job.get("thread_limit")) is None:
        return subject
    return dataclasses.replace(subject, candidate=subject.candidate.with_settings({"threads": limit}))


def _compresses(job: Job) -> bool:
    return bool(job.get("compress"))


def limit_threads(job: Job) -> None:
    """Keep torch to the number of threads that the study may use on a busy machine."""
    if (limit := job.get("thread_limit")) is not None:
        torch.set_num_threads(min(limit, torch.get_num_threads()))


def prepare_job(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """Check the workload with a dry run, compute its reference, and find which recipes cannot be tried."""
    with record_imports(folder, also=EXPORT) as files:
        begun = time.monotonic()
        workload = read_workload(job["workload"])
        threads = torch.get_num_threads()
        limit_threads(job)
        subject = prepare(workload, compress=_compresses(job))
        reading_s = time.monotonic() - begun
        weights_found = reproducibility.weights_of(subject.model)
        reproducibility.save_sums(pathlib.Path(job["reference"]), subject)  # before a score writes to its targets
        reread_notes = materialize(subject, pathlib.Path(job["prepared"]), reading_s)
        call = within_stated(build(Recipe.from_json(job["recipe"]), subject.candidate)[0], subject)
        evaluation = subject.workload.evaluation
        duplicates = leakage.check(subject.splits, evaluation)
        reference = reference_of(call, subject.splits.selection, evaluation)
        parts = {"selection": (reference, subject.splits.selection)}
        if subject.splits.test is not subject.splits.selection:  # otherwise the test data would fail only after the search
            parts["test"] = (reference_of(call, subject.splits.test, evaluation), subject.splits.test)
        for args, kwargs in subject.candidate.calibration[:1]:
            with user_code("The model failed on the calibration data", BY_HAND):
                call(*args, **kwargs)
        refuse_nan(subject.candidate)
        found = {} if evaluation is None else {name: least_drop(evaluation, *part) for name, part in parts.items()}
    reference.save(pathlib.Path(job["reference"]))
    parts.get("test", parts["selection"])[0].save(pathlib.Path(job["reference"]) / reproducibility.TEST)
    torch.set_num_threads(threads)
    example = {str(i): leaf.contiguous().clone() for i, leaf in enumerate(subject.candidate.leaves)}
    save_file(example, pathlib.Path(job["reference"]) / EXAMPLE)
    findings, failures = _findings(subject)
    failures += [why for registry in (PASSES, BACKENDS, CHECKS) for why in registry.broken.values()]
    quick = [technique for technique in search_space.techniques(compress=_compresses(job)) if not technique.tries]
    blocked = {dumps(t, indent=None): reason for t in quick if (reason := t.blocked(subject.candidate))}
    return {
        "name": subject.workload.name,
        "fingerprint": reproducibility.fingerprint(subject, reference),
        "identity": reproducibility.fingerprint(subject),
        "code": code_of(subject.model, files),
        "weights": weights_found,
        "score": None if reference.scores is None else reference.scores.value,
        "n": None if reference.scores is None else reference.scores.n,
        "blocked": blocked,
        "notes": [
            *subject.notes,
            *reread_notes,
            *duplicates,
            *_few_threads(threads),
            *(finding.message for finding in findings),
            *failures,
        ],
        "findings": to_json(findings),
        "inputs": subject.candidate.describe(),
        "threads": threads,
        "reading_s": reading_s,
        "splits": subject.splits.examples(),
        "share": _is_share(subject, reference),
        "least": to_json({name: lost for name, lost in found.items() if lost is not None}),
        "convolves": _convolves(subject),
    }


def serve_job(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """Build a recipe, or load it from its ``files``, and let other processes time it, until killed."""
    if "artifact" in job:
        return serve_artifact(job, folder)
    begun = time.monotonic()
    subject = prepared(job)
    candidate = fresh_inputs(subject) if job["fresh"] else subject.candidate
    executable, candidate = load(Recipe.from_json(job["recipe"]), pathlib.Path(job.get("files", folder)), candidate)
    runner = runner_for(executable, candidate, subject, job["objective"])
    facts = {
        "sizes": [list(leaf.shape) for leaf in candidate.leaves],
        "examples": rows(subject.candidate.leaves, executable.signature),
        "load_s": time.monotonic() - begun,
    }
    write_json(folder / READY, facts)
    serve(runner, job["address"], authkey())
    return {}


def serve_artifact(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """Let other processes time an artifact on its first test vector, until killed."""
    artifact = open_artifact(job["artifact"])
    limit_threads(artifact.manifest.evidence)  # as in the record that this timing is held against
    original = artifact.load_baseline() if job["baseline"] else None
    executable = artifact.load(trust=job["trust"]) if original is None else original
    runner: Runner
    leaves = artifact.golden().cases[0].inputs
    examples = rows(leaves, executable.signature)
    if job["objective"] == "throughput":
        runner = concurrent_requests(executable, _at_batch_size(leaves, executable), examples)
    else:
        args, kwargs = unflatten(executable.signature.input_structure, [leaf.clone() for leaf in leaves])
        runner = one_call(executable, args, kwargs)
    runner.block(1)
    write_json(folder / READY, {"sizes": [list(leaf.shape) for leaf in leaves], "examples": examples})
    serve(runner, job["address"], authkey())
    return {}


def _at_batch_size(leaves: Sequence[torch.Tensor], executable: Executable) -> list[torch.Tensor]:
    """``leaves`` repeated or cut to the batch size of the executable, if that is not the example's."""
    size, name = executable.settings.data.batch, executable.signature.batch
    if not isinstance(size, int) or name is None:
        return list(leaves)
    return [resized(leaf, spec.shape, name, size) for leaf, spec in zip(leaves, executable.signature.inputs, strict=True)]


def trial_job(job: Job, folder: pathlib.Path) -> Any:
    """Evaluate one recipe.

    Raises:
        WorkloadError: inputs or data differ from those of the dry run.
    """
    with stage("the workload"):
        subject = prepared(job)
    reference = Reference.load(pathlib.Path(job["reference"]))
    baseline = RemoteRunner(job["address"], authkey())
    plan, recipe = from_json(Plan, job["plan"]), Recipe.from_json(job["recipe"])
    calibrated = any("calibration" in step.needs for step in (*recipe.passes, recipe.backend))
    otherwise = calibrated and reproducibility.calibration_differs(job, subject)
    found = evaluate(recipe, subject, reference, baseline, plan=plan, folder=folder)
    if otherwise:
        found = dataclasses.replace(found, notes=(*found.notes, reproducibility.OTHER_CALIBRATION))
    return to_json(found)


def baseline_job(job: Job, folder: pathlib.Path) -> dict[str, float | None]:
    """Build the original as its user does, and call it. Returns peak memory, and the seconds to the first answer if the
    workload builds the model.

    Raises:
        WorkloadError: its weights or inputs differ from the search's, which would show only at the end of the search.
    """
    workload = read_workload(job["workload"])
    args, kwargs = as_call(workload.inputs)
    leaves = flatten(cloned((args, kwargs)), "the example inputs")[0]  # copies, because the model may write to them
    at_hand = isinstance(workload.model, nn.Module)
    limit_threads(job)
    begun = time.perf_counter()
    with PeakMemory() as peak, user_code("The model failed on the example inputs"), torch.no_grad():
        model = workload.build_model()
        model.eval()  # not chained, because not every train() of a user's model returns the model
        model(*args, **kwargs)
        cold = time.perf_counter() - begun
        for _ in range(_more_calls(cold)):
            model(*args, **kwargs)
    reproducibility.check_weights(job, model, "parameters")
    reproducibility.check_inputs(job, leaves)
    weighs = weight_bytes(model) / 1e6 if at_hand else 0.0
    return {"cold_s": None if at_hand else cold, "peak_mb": peak.result.host_mb + weighs}


def probe_job(job: Job, folder: pathlib.Path) -> dict[str, float]:
    """Load saved files as a deployment would: seconds to the first answer, and peak memory above the idle interpreter."""
    recipe = Recipe.from_json(job["recipe"])
    tensors = load_file(job["inputs"])
    inputs = [tensors[str(i)] for i in range(len(tensors))]
    begun = time.perf_counter()
    with PeakMemory() as peak:
        executable = load_saved(recipe, pathlib.Path(job["files"]))
        executable.run(inputs)
        executable.synchronize()
        cold = time.perf_counter() - begun
        for _ in range(_more_calls(cold)):
            executable.run(inputs)
            executable.synchronize()
    return {"cold_s": cold, "peak_mb": peak.result.host_mb}


def against_job(job: Job, folder: pathlib.Path) -> Any:
    """Time the saved files of a recipe against another recipe's server."""
    subject, plan = prepared(job), from_json(Plan, job["plan"])
    executable, candidate = load(Recipe.from_json(job["recipe"]), pathlib.Path(job["files"]), subject.candidate)
    runner = runner_for(executable, candidate, subject, plan.objective)
    rival = RemoteRunner(job["address"], authkey(), connect_s=job["seconds"])
    return to_json(time_start(runner, rival, plan))


def start_job(job: Job, folder: pathlib.Path) -> Any:
    """Time the saved files of a recipe against each rival, all freshly started; the first start also judges its outputs."""
    subject, plan = prepared(job), from_json(Plan, job["plan"])
    recipe, source, rivals = _to_confirm(job, subject)
    executable, candidate = load(recipe, source, fresh_inputs(subject))
    begun = time.perf_counter()
    known = reproducibility.saved_test_reference(job, subject) if job["judges"] else None
    judged = judge(recipe, executable, candidate, subject, plan, known) if job["judges"] else None
    result = {"judged": to_json(judged), "judging_s": time.perf_counter() - begun, "comparisons": {}}
    if judged is None or judged.ok:
        runner = runner_for(executable, candidate, subject, plan.objective)
        result["comparisons"] = {name: to_json(time_start(runner, rival, plan)) for name, rival in rivals.items()}
    return result


def confirm_job(job: Job, folder: pathlib.Path) -> Any:
    """Measure the winner again in fresh processes, score it on the test data, and write the artifact if it is confirmed."""
    subject = prepared(job)
    recipe, source, rivals = _to_confirm(job, subject)
    plan, asked = from_json(Plan, job["plan"]), {name: job[name] for name in ("must_win", "costs")}
    asked["judged"] = job["judged"] and from_json(Confirmation, job["judged"])
    asked["reference"] = None if asked["judged"] else reproducibility.saved_test_reference(job, subject)
    earlier = {name: [from_json(Comparison, each) for each in starts] for name, starts in job["earlier"].items()}
    seen = [from_json(Comparison, each) for each in job["seen"]]
    found, executable = confirm(recipe, source, subject, rivals, plan=plan, earlier=earlier, seen=seen, **asked)
    if found.ok and files_complete(source):
        ship(job, source, subject, executable, found)
    return to_json(found)


def _to_confirm(job: Job, subject: Subject) -> tuple[Recipe, pathlib.Path, dict[str, RemoteRunner]]:
    """The recipe, its files and its rivals. Raises :class:`WorkloadError` if the workload is not that of the search."""
    reproducibility.check_weights(job, subject.model, "parameters", "buffers")
    recipe, source = Recipe.from_json(job["recipe"]), pathlib.Path(job["files"])
    rivals = {name: RemoteRunner(address, authkey(), connect_s=job["seconds"]) for name, address in job["rivals"].items()}
    if job["ships"] and not files_complete(source):  # deleted, damaged, or the study's storage is elsewhere
        save(build(recipe, apply_passes(recipe, subject.candidate))[0], source)
    return recipe, source, rivals


def explain_job(job: Job, folder: pathlib.Path) -> Any:
    """Profile recipes one after the other, and compare them with this machine's roofline."""
    peaks = measured_peaks(Environment.capture())  # before the user's file may change how torch computes
    subject = prepared(job)
    threads = torch.get_num_threads()
    found = {}
    for name, asked in job["recipes"].items():
        torch.set_num_threads(threads)  # a recipe may have changed it
        files = None if asked["files"] is None else pathlib.Path(asked["files"])
        found[name] = explain(Recipe.from_json(asked["recipe"]), files, subject, peaks, seconds=asked["seconds"])
    return {"peaks": to_json(peaks), "explanations": to_json(found)}


class Shipped(Executable):
    """A loaded executable that saves the files it was loaded from."""

    def __init__(self, executable: Executable, files: pathlib.Path, notes: Sequence[str]) -> None:
        super().__init__(executable.signature, executable.settings)
        self.notes = list(dict.fromkeys((*notes, *executable.notes)))
        self._executable = executable
        self._files = files

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The outputs of the loaded executable."""
        return self._executable.run(leaves)

    def save(self, folder: pathlib.Path) -> list[str]:
        """Copy the files that were measured."""
        shutil.copytree(self._files, folder, dirs_exist_ok=True)
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def ship(job: Job, source: pathlib.Path, subject: Subject, executable: Executable, found: Confirmation) -> None:
    """Write the artifact from the confirmed files.

    Raises:
        StorageError: it cannot be written, which says nothing about the recipe.
    """
    trial, plan = from_json(Trial, job["trial"]), from_json(Plan, job["plan"])
    original = technique_from_json(BACKENDS, {"name": "eager", "grad_mode": "no_grad"})
    figures = {"objective": plan.objective, "size_mb": trial.size_mb, "trial": job["trial"]}
    if found.comparison is not None:  # the conditions of the timing
        figures["inputs"] = subject.candidate.describe()
        if job.get("thread_limit") is not None:
            figures["thread_limit"] = job["thread_limit"]
    if found.recipe == Recipe(backend=original):
        figures["baseline_speedup"] = to_json(found.speedup)
    elif not executable.settings.memory.keep_freed:  # this process cannot undo it; the original lacks it
        torch.set_num_threads(job["threads"])
        exported_speedup = baseline_speedup(subject, original, found.comparison, plan=plan, folder=source)
        figures["baseline_speedup"] = to_json(exported_speedup)
    smaller = _compressed(found.recipe, subject)
    try:
        write_artifact(
            job["artifact"],
            executable=Shipped(executable, source / MODEL, trial.notes),
            recipe=found.recipe,
            workload_name=subject.workload.name,
            golden=Golden.of(smaller, executable.signature, [fresh_inputs(subject).leaves]),
            evidence=to_json(found) | figures,
            environment=Environment.from_json(job["environment"]),
            limits=plan.limits,
            baseline=original.compile(subject.candidate),
            baseline_backend=original,
            module=original.compile(smaller) if found.recipe.compresses else None,
        )
    except ArtifactError as error:
        raise StorageError(str(error)) from error


def _compressed(recipe: Recipe, subject: Subject) -> Candidate:
    """The network that the recipe compresses the model to; the model as written if it does not.

    Test vectors are its outputs. Those of the original differ from a smaller network's by so much that a damaged file could
    pass.
    """
    candidate = subject.candidate
    for step in recipe.passes:
        candidate = step.apply(candidate) if step.compresses else candidate
    return candidate


def _is_share(subject: Subject, reference: Reference) -> bool:
    evaluation = subject.workload.evaluation
    return evaluation is not None and reference.scores is not None and reference.scores.is_share(evaluation.higher_is_better)


def _findings(subject: Subject) -> tuple[list[Finding], list[str]]:
    """Findings of all checks on the workload as written, and a note for each check that failed, such as a plug-in's."""
    environment, findings, failures = Environment.capture(), list[Finding](), list[str]()
    for name, cls in CHECKS.items():
        try:
            with user_code(f"The check {name} failed"):
                check = cls()
                if check.about == "model" and "infer" in check.modes and check.blocked(subject.candidate) is None:
                    findings += check.run(subject, environment)
        except TrimtabError as error:
            failures.append(str(error))
    return findings, failures


def _few_threads(threads: int) -> list[str]:
    """A note if the workload's file gives torch fewer ``threads`` than its default, or tries to."""
    if threads >= TORCH_THREADS:
        return ignored_thread_settings(threads)
    return [
        f"The workload gives torch {threads} of {TORCH_THREADS} threads. Other runtimes get as many, unless a recipe says more."
    ]


def _convolves(subject: Subject) -> bool:
    sizes = [(weight.dim() > 2, weight.numel()) for weight in weights(subject.model)]
    return 2 * sum(size for kernel, size in sizes if kernel) > sum(size for _, size in sizes)


def _more_calls(cold_s: float) -> int:
    """The number of calls after the first until memory has settled; one if calls are slow."""
    return 2 if cold_s < SLOW_START_S else 1


JOBS: dict[str, Callable[[Job, pathlib.Path], Any]] = {
    "prepare": prepare_job,
    "serve": serve_job,
    "trial": trial_job,
    "baseline": baseline_job,
    "probe": probe_job,
    "against": against_job,
    "start": start_job,
    "confirm": confirm_job,
    "explain": explain_job,
}
