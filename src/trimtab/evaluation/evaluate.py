"""One recipe, evaluated: apply -> compile -> parity -> first timing -> score -> measure -> save -> Trial. One straight line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from trimtab._internal.files import out_of_space
from trimtab._internal.serialization import from_json, write_json
from trimtab._internal.text import LONGEST, said, shortened
from trimtab._internal.user_code import writing
from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.core.backend import Executable
from trimtab.core.candidate import Candidate
from trimtab.core.dynamic_dims import BATCHES
from trimtab.core.measurement import SLOW_PAIRS, Comparison, Interval, Measurement
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim, Signature
from trimtab.core.trial import State, Trial
from trimtab.core.workload import Limits
from trimtab.errors import CompileError, InputError, MissingPackageError
from trimtab.evaluation.fidelity import faithful, writes_otherwise
from trimtab.evaluation.prepared_workload import Subject
from trimtab.evaluation.reference import Reference, drop, predict, score
from trimtab.hardware import system
from trimtab.measure.pairs import compare
from trimtab.measure.stats import summarize
from trimtab.measure.timer import LocalRunner, Runner
from trimtab.tensors.structure import flatten

Objective = Literal["latency", "throughput", "memory", "size"]

TORCH_THREADS = torch.get_num_threads()
"""Threads that torch has by itself; what a workload's file asks it for comes later."""
REQUESTS = 8
"""Independent requests in one timed call where throughput is the objective."""
UNSAVED = "unsaved.json"
"""In a trial's folder: the trial as it was before its files were written, should the writing crash the process."""
SINGLES = 20
SINGLES_S = 5.0
"""Unpaired single calls that give the latency where throughput is the objective; slow ones are fewer, to take so long."""
MODEL, BUILT = "model", "built.json"
"""In a trial's folder: the runtime's files, and the signature and settings that they were built for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a trial is judged and measured."""

    objective: Objective = "latency"
    limits: Limits = Limits()
    quick_s: float = 1.2
    """Time of the first, cheap timing."""
    seconds: float = 6.0
    """Most time for the paired timing that counts."""
    width: float = 0.03
    """Width of the ratio's interval, relative to it, at which sampling stops."""
    floor: float = 0.0
    """A recipe whose speed-up is surely below this after the first timing is stopped."""
    best: float = 0.0
    """One whose speed-up is surely below this keeps its first timing: a longer one would only say so more precisely."""


def evaluate(
    recipe: Recipe, subject: Subject, reference: Reference, rival: Runner, *, plan: Plan, folder: pathlib.Path
) -> Trial:
    """Evaluate ``recipe`` in this process and keep its files in ``folder / "model"``. Never raises what a recipe did wrong.

    ``rival`` is the model as written, in a process of its own. Settings that are global to a process, such as torch's threads,
    are changed: run it in a process that ends afterwards.
    """
    return ended(recipe, lambda figures: _line(recipe, subject, reference, rival, plan, folder, figures))


def ended(recipe: Recipe, line: Callable[[dict[str, Any]], tuple[State, str | None]]) -> Trial:
    """The trial that ``line`` makes of ``recipe``: it writes its figures into the mapping that it gets, and says how it ended.

    Never raises what ``line`` does wrong, but that a disk is full: no recipe did that, and it deserves another try.
    """
    started = time.perf_counter()
    figures: dict[str, Any] = {}
    try:
        state, reason = line(figures)
    except MissingPackageError as error:  # installed, as far as anybody could see, and broken
        state, reason = State.SKIPPED, str(error)
    except Exception as error:  # the one boundary that turns whatever a trial does into its state
        if out_of_space(error):
            raise
        state, reason = State.FAILED, describe(error)
        figures["traceback"] = shortened(traceback.format_exc(), LONGEST)
    figures.pop("cannot_ship", None)
    return Trial(recipe=recipe, state=state, reason=reason, seconds=time.perf_counter() - started, **figures)


def _line(
    recipe: Recipe,
    subject: Subject,
    reference: Reference,
    rival: Runner,
    plan: Plan,
    folder: pathlib.Path,
    figures: dict[str, Any],
) -> tuple[State, str | None]:
    full, evaluation, batches = subject.candidate.signature, subject.workload.evaluation, subject.splits.selection
    if reason := recipe.why_not(subject.candidate):
        return State.SKIPPED, reason

    candidate = apply_passes(recipe, subject.candidate)
    executable, figures["cold_s"] = start(recipe, candidate)
    figures |= {"dims": tuple(d.name for d in executable.signature.dims), "notes": _notes(executable, full)}
    stated = subject.workload.dynamic is not None
    if stated and (short := _falls_short(executable, full)):
        return State.FAILED, f"{recipe.backend.name} {short}"

    with stage("outputs on the selection data"), _told_why(executable, full):
        outputs = predict(PaddedExecutable(executable, full), batches, evaluation)
    exact, most = recipe.exact, plan.limits.max_error
    figures["parity"] = faithful(reference, outputs, full, evaluation, exact=exact, max_error=most)
    if not figures["parity"].ok:
        return State.MISMATCH, figures["parity"].reason
    if reason := writes_otherwise(executable, subject.model, candidate, exact=exact, max_error=most):
        return State.MISMATCH, reason

    runner = runner_for(executable, candidate, subject, plan.objective)
    begun = time.perf_counter()
    with stage("first timing"):
        first = compare(runner, rival, width=2 * plan.width, seconds=plan.quick_s, min_quads=4, pids=ours(rival))
    # the longer timing would end with as few pairs
    slow = first.pairs <= SLOW_PAIRS and time.perf_counter() - begun >= plan.seconds
    behind = first.ratio.high < plan.best
    figures |= timing(first, executable, candidate, subject, plan.objective)
    if (ratio := first.ratio).high < plan.floor:
        return State.STOPPED, (
            f"Rule 'hopeless': after a first timing it reaches {ratio.multiple()} of the model as written, surely below "
            f"{plan.floor:.2f}, which is what it would need to come near the best so far."
        )

    if evaluation is not None:
        with stage("score"):
            scores = score(evaluation, outputs, batches)
            assert reference.scores is not None
            limit = plan.limits.drop_limit(reference.scores.value)
            lost = drop(evaluation, reference, scores, outputs, batches, limit)
        figures |= {"score": scores.value, "drop": lost}
        if lost.decided is False:
            return State.STOPPED, (
                f"Rule 'accuracy': the score drops by {lost.show(lost.value)} (at least {lost.show(lost.low)}); the limit is "
                f"{lost.show(limit)}."
            )

    final = first
    if not slow and not behind:
        with stage("timing"):
            final = compare(runner, rival, width=plan.width, seconds=plan.seconds, pids=ours(rival))
        figures |= timing(final, executable, candidate, subject, plan.objective)
    figures["notes"] += () if final.doubt is None else (final.doubt,)
    folder.mkdir(parents=True, exist_ok=True)
    so_far = {name: value for name, value in figures.items() if name != "traceback"}
    write_json(folder / UNSAVED, Trial(recipe=recipe, state=State.COMPLETE, **so_far))
    with stage("saving"):
        figures |= save(executable, folder)
    figures["dims"] = tuple(d.name for d in executable.signature.dims)  # fewer than before where what is saved keeps fewer
    figures["notes"] += tuple(note for note in _notes(executable, full) if note not in figures["notes"])
    if stated and "size_mb" in figures and (short := _falls_short(executable, full)):
        del figures["size_mb"]
        (folder / BUILT).unlink()
        figures["cannot_ship"] = f"It cannot ship: what it saves {short}"
    executable.close()
    return State.COMPLETE, figures.get("cannot_ship")


@contextlib.contextmanager
def _told_why(executable: Executable, full: Signature) -> Iterator[None]:
    """A block in which a size that the executable refuses, because it could not keep it free, is told with why it could not."""
    try:
        yield
    except InputError as error:
        if len(executable.signature.dims) < len(full.dims):
            error.args = (" ".join((str(error), *executable.notes)),)
        raise


def _falls_short(executable: Executable, full: Signature) -> str | None:
    """What the executable does not keep of the dynamic dimensions that the workload states: a sentence without its subject."""
    kept = {dim.name: dim for dim in executable.signature.dims}
    if gone := [dim.name for dim in full.dims if dim.name not in kept]:
        return f"keeps the example's {' and '.join(map(repr, gone))} only, and the workload states other sizes."
    for dim, most in _bounded(executable, full):
        return f"keeps {dim.name!r} up to {most} only, and the workload states {dim.bounds}."
    return None


def _notes(executable: Executable, full: Signature) -> tuple[str, ...]:
    """What there is to say about the executable, and how far it takes sizes."""
    return (*executable.notes, *(f"Takes {dim.name} up to {most} only." for dim, most in _bounded(executable, full)))


def _bounded(executable: Executable, full: Signature) -> list[tuple[Dim, int]]:
    """The dynamic dimensions of the model that the executable keeps up to a size that the model goes beyond, and that size."""
    most = {dim.name: dim.max for dim in executable.signature.dims}
    return [(dim, found) for dim in full.dims if (found := most.get(dim.name)) is not None and found != dim.max]


@contextlib.contextmanager
def stage(words: str) -> Iterator[None]:
    """Says in the trial's log how long a part of it took."""
    begun = time.perf_counter()
    yield
    try:  # a workload may have put one of its own in the place of sys.stdout, or have closed it
        print(f"{words}: {time.perf_counter() - begun:.2f} s", flush=True, file=sys.__stdout__)
    except (OSError, ValueError) as error:
        if out_of_space(error):
            raise


def apply_passes(recipe: Recipe, candidate: Candidate) -> Candidate:
    """``candidate`` after the passes of ``recipe``, in order; this process now has the threads and allocator that they ask for.

    Where the workload gives torch fewer threads than it has by itself, other runtimes get no more, unless a pass says so.

    Raises:
        CompileError: a pass cannot be applied to what the ones before it made.
    """
    if recipe.backend.own_graph and (threads := torch.get_num_threads()) < TORCH_THREADS:
        candidate = candidate.with_settings({"threads": threads})  # it has threads of its own, and would take every core
    for step in recipe.passes:
        if reason := step.blocked(candidate):
            raise CompileError(reason)
        with stage(f"pass {step}"):
            candidate = step.apply(candidate)
    _prepare_process(candidate.settings)
    return candidate


def _prepare_process(settings: Settings) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.memory.keep_freed:
        system.keep_freed_memory()


def start(recipe: Recipe, candidate: Candidate) -> tuple[Executable, float]:
    """Compile and call once; gives the executable and the seconds of both."""
    args, kwargs = candidate.own_inputs()
    begun = time.perf_counter()
    with stage(f"backend {recipe.backend}, with its first call"):
        executable = recipe.backend.compile(candidate)
        executable(*args, **kwargs)
        executable.synchronize()
    return executable, time.perf_counter() - begun


def runner_for(executable: Executable, candidate: Candidate, subject: Subject, objective: Objective) -> Runner:
    """What is timed: one call on the example, or several requests at once where throughput counts, per example batch."""
    if objective != "throughput":
        return one_call(executable, *candidate.own_inputs())
    return together(executable, candidate.own_leaves(), rows(subject.candidate.leaves, executable.signature))


def one_call(executable: Executable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LocalRunner:
    """One call with inputs that nobody else needs, as it may write to them."""
    before = _restored(executable.signature, flatten((tuple(args), dict(kwargs)), "inputs")[0])
    return LocalRunner(lambda: executable(*args, **kwargs), executable.synchronize, before)


def together(executable: Executable, leaves: Sequence[torch.Tensor], examples: int) -> Runner:
    """Several requests with ``leaves`` at once, whose time is that of ``examples`` examples."""
    requests, before = [leaves] * REQUESTS, None
    if executable.signature.writes:  # each to its own
        requests = [[leaf.clone() for leaf in leaves] for _ in requests]
        before = _restored(executable.signature, *requests)
    runner = LocalRunner(lambda: executable.run_many(requests), executable.synchronize, before)
    return Scaled(runner, examples / (rows(leaves, executable.signature) * REQUESTS))


def _restored(signature: Signature, *requests: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """What gives the inputs that a call writes to the values that they have now, so that every call does the same: what is
    normalised in place again and again ends in zeros, infinities or denormal numbers, each at a speed of its own."""
    pairs = [(leaves[i], leaves[i].clone()) for leaves in requests for i in signature.written]

    def restore() -> None:
        with torch.no_grad():
            for leaf, before in pairs:
                leaf.copy_(before)

    return restore if pairs else None


def ours(rival: Runner) -> set[int]:
    """The processes whose CPU time is not a neighbour's: this one, the study that started it and watches it, the rival."""
    return {os.getpid(), os.getppid(), rival.pid}


class Scaled:
    """A runner whose times are per unit of work, so that calls of different size compare."""

    def __init__(self, runner: Runner, factor: float) -> None:
        self._runner, self._factor = runner, factor
        self.pid = runner.pid

    def block(self, calls: int) -> list[int]:
        """Scaled nanoseconds of each call."""
        return [round(ns * self._factor) for ns in self._runner.block(calls)]

    def pace(self) -> int:
        """How fast the core is now."""
        return self._runner.pace()


def rows(leaves: Sequence[torch.Tensor], signature: Signature) -> int:
    """Examples per call: the size of the dimension that is named for them, else of the leading axis of the first input, or 1
    where that counts none."""
    lead = signature.inputs[0].shape[:1] if signature.inputs and not signature.batched else ()
    for spec, leaf in zip(signature.inputs, leaves, strict=True):
        for name, size in zip(spec.shape, leaf.shape, strict=False):
            if isinstance(name, str) and name.lower() in BATCHES and name not in lead:
                return size
    return leaves[0].shape[0] if leaves and leaves[0].dim() and signature.batched else 1


def timing(
    found: Comparison, executable: Executable, candidate: Candidate, subject: Subject, objective: Objective
) -> dict[str, Any]:
    """The figures of a trial that a comparison gives."""
    figures: dict[str, Any] = {"comparison": found, "speedup": found.ratio, "latency_ms": found.candidate}
    if objective == "throughput":
        figures["throughput"] = per_second(found.candidate, rows(subject.candidate.leaves, subject.candidate.signature))
        alone = _singles(runner_for(executable, candidate, subject, "latency"))
        figures["latency_ms"] = summarize(
            alone, unit="ms", conditions={"examples": rows(candidate.leaves, candidate.signature), "unpaired": True}
        )
    return figures


def _singles(runner: Runner) -> list[int]:
    first = runner.block(1)
    return first + runner.block(max(2, min(SINGLES, int(SINGLES_S * 1e9 / max(first[0], 1)))) - 1)


def per_second(latency: Measurement, examples: float) -> Measurement:
    """Examples per second from milliseconds per call of ``examples``."""
    low, high = (1e3 * examples / bound for bound in (latency.interval.high, latency.interval.low))
    median = 1e3 * examples / latency.median
    return Measurement(
        unit="examples/s", n=latency.n, median=median, interval=Interval(median, low, high), conditions=latency.conditions
    )


def save(executable: Executable, folder: pathlib.Path) -> dict[str, Any]:
    """Write the executable's files and signature; its size, or why it has no form that stands alone."""
    model = folder / MODEL
    shutil.rmtree(model, ignore_errors=True)  # what is left of one that was damaged
    model.mkdir(parents=True, exist_ok=True)
    try:
        with writing():
            files = executable.save(model)
    except CompileError as error:
        if out_of_space(error):
            raise
        return {"cannot_ship": f"It cannot ship: {error}"}
    sizes = {name: (model / name).stat().st_size for name in files}
    write_json(folder / BUILT, {"signature": executable.signature, "settings": executable.settings, "sizes": sizes})
    return {"size_mb": sum(sizes.values()) / 1e6}


def whole(folder: pathlib.Path) -> bool:
    """Whether what :func:`save` wrote into ``folder`` is there as it was: disks fill up and lose power, and people tidy."""
    try:
        sizes = json.loads((folder / BUILT).read_text(encoding="utf-8"))["sizes"]
        return all((folder / MODEL / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def load_saved(recipe: Recipe, folder: pathlib.Path) -> Executable:
    """The executable that a trial saved in ``folder``, with torch's threads set as it was built for."""
    built = json.loads((folder / BUILT).read_text(encoding="utf-8"))
    settings = from_json(Settings, built["settings"])
    _prepare_process(settings)
    return recipe.backend.load(folder / MODEL, from_json(Signature, built["signature"]), settings)


def describe(error: BaseException) -> str:
    """An exception in one sentence."""
    text = next((line.strip() for line in said(error).splitlines() if line.strip()), "no message")
    text = shortened(text)
    return text if isinstance(error, (CompileError, InputError)) else f"{type(error).__name__}: {text}"
