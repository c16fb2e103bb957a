"""Evaluate one recipe: apply passes, compile, parity, first timing, score, measure, save; the result is a Trial."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
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
from trimtab._internal.text import MAX_TRACEBACK, error_text, message_line, shortened
from trimtab._internal.user_code import save_errors
from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.core.backend import Executable
from trimtab.core.candidate import Candidate
from trimtab.core.dynamic_dims import BATCHES
from trimtab.core.limits import Limits
from trimtab.core.measurement import SLOW_PAIRS, Comparison, Interval, Measurement
from trimtab.core.network import MOST_LAYERS, describe_network
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim, Signature
from trimtab.core.trial import State, Trial
from trimtab.errors import CompileError, InputError, MissingPackageError
from trimtab.evaluation.fidelity import embedding_note, output_parity, write_mismatch
from trimtab.evaluation.prepared_workload import Subject
from trimtab.evaluation.reference import Reference, drop, predict, score
from trimtab.hardware import system
from trimtab.measure.pairs import MIN_QUADS, compare
from trimtab.measure.stats import summarize
from trimtab.measure.timer import LocalRunner, Runner
from trimtab.passes.common.sensitivity import known_sensitivities, sensitivity_note
from trimtab.tensors.structure import flatten

Objective = Literal["latency", "throughput", "memory", "size"]

TORCH_THREADS = torch.get_num_threads()
"""torch's own number of threads, read before the workload's file can change it."""
REQUESTS = 8
"""Independent requests in one timed call if throughput is the objective."""
UNSAVED = "unsaved.json"
"""File in a trial's folder: the trial before its files were saved, in case saving crashes the process."""
TABLE_S = 20.0
"""Maximum expected seconds of a table of sensitivities that only the report shows."""
SINGLES = 20
SINGLES_S = 5.0
"""Seconds of unpaired single calls, which give the latency if throughput is the objective."""
MODEL, BUILT = "model", "built.json"
"""In a trial's folder: the runtime's files, and the signature and settings that they were built for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a trial is judged and measured. Times are in seconds."""

    objective: Objective = "latency"
    limits: Limits = Limits()
    quick_s: float = 1.2
    """Duration of the first, short timing."""
    seconds: float = 6.0
    """Maximum duration of the paired timing that counts."""
    width: float = 0.03
    """Relative width of the ratio's interval at which sampling stops."""
    min_quads: int = MIN_QUADS
    """Minimum number of quads of the timing in one start of a confirmation."""
    floor: float = 0.0
    """Stop a recipe whose speed-up is surely below this after the first timing."""
    best: float = 0.0
    """Keep the first timing of a recipe whose speed-up is surely below this: it cannot win."""
    brief: bool = False
    """Keep the first timing of every recipe, so that more of them are tried."""
    over: float = 1.0
    """Training: the speed-up that a recipe must surely exceed, that of what it is added to."""
    again_s: float = 0.0
    """Training: maximum duration of a second timing, if the first leaves open whether the recipe exceeds :attr:`over`."""


def evaluate(
    recipe: Recipe, subject: Subject, reference: Reference, baseline: Runner, *, plan: Plan, folder: pathlib.Path
) -> Trial:
    """Evaluate ``recipe`` in this process and save its files in ``folder / "model"``. Errors of the recipe end in the trial.

    ``baseline`` is the model as written, in a process of its own. Process-wide settings such as torch's threads are changed, so
    the process must end afterwards.
    """
    return as_trial(recipe, lambda figures: _pipeline(recipe, subject, reference, baseline, plan, folder, figures))


def as_trial(recipe: Recipe, pipeline: Callable[[dict[str, Any]], tuple[State, str | None]]) -> Trial:
    """The trial of ``recipe``: ``pipeline`` writes its figures into the mapping that it gets, and returns state and reason.

    Every exception of ``pipeline`` becomes the trial's state, except a full disk, after which the recipe can be tried again.
    """
    started = time.perf_counter()
    figures: dict[str, Any] = {}
    try:
        state, reason = pipeline(figures)
    except MissingPackageError as error:  # installed, but broken
        state, reason = State.SKIPPED, str(error)
    except Exception as error:  # the one boundary that turns whatever a trial does into its state
        if out_of_space(error):
            raise
        state, reason = State.FAILED, describe(error)
        figures["traceback"] = shortened(traceback.format_exc(), MAX_TRACEBACK)
    figures.pop("cannot_ship", None)
    return Trial(recipe=recipe, state=state, reason=reason, seconds=time.perf_counter() - started, **figures)


def _pipeline(
    recipe: Recipe,
    subject: Subject,
    reference: Reference,
    baseline: Runner,
    plan: Plan,
    folder: pathlib.Path,
    figures: dict[str, Any],
) -> tuple[State, str | None]:
    full, evaluation, batches = subject.candidate.signature, subject.workload.evaluation, subject.splits.selection
    if reason := recipe.why_not(subject.candidate):
        return State.SKIPPED, reason

    candidate = apply_passes(recipe, subject.candidate)
    figures["network"] = describe_network(candidate.model, subject.model) if recipe.compresses else None
    executable, figures["cold_s"] = build(recipe, candidate)
    notes = (*candidate.notes, *embedding_note(recipe, candidate, subject.model), *_notes(executable, full))
    figures |= {"dims": tuple(d.name for d in executable.signature.dims), "notes": notes}
    stated = subject.candidate.all_sizes
    if stated and (short := _missing_dims(executable, full)):
        return State.FAILED, f"{recipe.backend.name} {short}"

    with stage("outputs on the selection data"), _explain_refused_sizes(executable, full):
        outputs = predict(PaddedExecutable(executable, full), batches, evaluation)
    exact, most = recipe.exact, plan.limits.max_error
    figures["parity"] = output_parity(reference, outputs, full, evaluation, exact=exact, max_error=most)
    if not figures["parity"].ok:
        figures |= _with_sensitivity(figures, recipe, subject.candidate)
        return State.MISMATCH, figures["parity"].reason
    if reason := write_mismatch(executable, subject.model, candidate, exact=exact, max_error=most):
        return State.MISMATCH, reason

    runner = runner_for(executable, candidate, subject, plan.objective)
    begun = time.perf_counter()
    with stage("first timing"):
        first = compare(runner, baseline, width=2 * plan.width, seconds=plan.quick_s, min_quads=4, pids=own_pids(baseline))
    # a longer timing would have as few pairs
    slow = first.pairs <= SLOW_PAIRS and time.perf_counter() - begun >= plan.seconds
    behind = first.ratio.high < plan.best
    figures |= timing_figures(first, executable, candidate, subject, plan.objective)
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
            figures |= _with_sensitivity(figures, recipe, subject.candidate)
            return State.STOPPED, (
                f"Rule 'accuracy': the score drops by {lost.show(lost.value)} (at least {lost.show(lost.low)}); the limit is "
                f"{lost.show(limit)}."
            )

    final = first
    if not (slow or behind or plan.brief):
        with stage("timing"):
            final = compare(runner, baseline, width=plan.width, seconds=plan.seconds, pids=own_pids(baseline))
        figures |= timing_figures(final, executable, candidate, subject, plan.objective)
    figures["notes"] += () if final.doubt is None else (final.doubt,)
    figures["sensitivity"] = _reported_sensitivity(recipe, subject.candidate)
    folder.mkdir(parents=True, exist_ok=True)
    so_far = {name: value for name, value in figures.items() if name != "traceback"}
    write_json(folder / UNSAVED, Trial(recipe=recipe, state=State.COMPLETE, **so_far))
    with stage("saving"):
        figures |= save(executable, folder)
    figures["dims"] = tuple(d.name for d in executable.signature.dims)  # saved files may keep fewer dimensions
    figures["notes"] += tuple(note for note in _notes(executable, full) if note not in figures["notes"])
    if stated and "size_mb" in figures and (short := _missing_dims(executable, full)):
        del figures["size_mb"]
        (folder / BUILT).unlink()
        figures["cannot_ship"] = f"It cannot ship: what it saves {short}"
    executable.close()
    return State.COMPLETE, figures.get("cannot_ship")


def _sensitivity(candidate: Candidate, most_s: float = math.inf) -> tuple[tuple[str, float], ...]:
    """The first layers of the table, most sensitive first; empty if none can be measured, or not within ``most_s``."""
    with stage("sensitivity of each layer"):
        return tuple(known_sensitivities(candidate, most_s).items())[:MOST_LAYERS]


def _reported_sensitivity(recipe: Recipe, candidate: Candidate) -> tuple[tuple[str, float], ...]:
    """The table for the report of a compression, if it is a matter of seconds."""
    return _sensitivity(candidate, TABLE_S) if recipe.quantizes and candidate.training else ()


def _with_sensitivity(figures: Mapping[str, Any], recipe: Recipe, candidate: Candidate) -> dict[str, Any]:
    """The figures of a recipe that lost too much, with the layers that lose most in 8 bits if it quantizes."""
    if not recipe.quantizes:
        return {}
    table = figures.get("sensitivity") or _sensitivity(candidate)
    note = sensitivity_note(dict(table))
    return {"sensitivity": table, "notes": (*figures["notes"], *(() if note is None else (note,)))}


@contextlib.contextmanager
def _explain_refused_sizes(executable: Executable, full: Signature) -> Iterator[None]:
    """Add to the error for a refused size the reason why the executable could not keep that size dynamic."""
    try:
        yield
    except InputError as error:
        if len(executable.signature.dims) < len(full.dims):
            error.args = (" ".join((str(error), *executable.notes)),)
        raise


def _missing_dims(executable: Executable, full: Signature) -> str | None:
    """The dynamic dimensions of the workload that the executable does not keep, in a sentence without its subject."""
    kept = {dim.name: dim for dim in executable.signature.dims}
    if gone := [dim.name for dim in full.dims if dim.name not in kept]:
        return f"keeps the example's {' and '.join(map(repr, gone))} only, and the workload states other sizes."
    for dim, most in _bounded(executable, full):
        return f"keeps {dim.name!r} up to {most} only, and the workload states {dim.bounds}."
    return None


def _notes(executable: Executable, full: Signature) -> tuple[str, ...]:
    """Notes of the executable, and the sizes that it takes."""
    return (*executable.notes, *(f"Takes {dim.name} up to {most} only." for dim, most in _bounded(executable, full)))


def _bounded(executable: Executable, full: Signature) -> list[tuple[Dim, int]]:
    """Dimensions that the executable keeps up to a bound only, with that bound, if the model takes larger sizes."""
    most = {dim.name: dim.max for dim in executable.signature.dims}
    return [(dim, found) for dim in full.dims if (found := most.get(dim.name)) is not None and found != dim.max]


@contextlib.contextmanager
def stage(words: str) -> Iterator[None]:
    """Print to the trial's log how long the block took."""
    begun = time.perf_counter()
    yield
    try:  # the workload may have replaced or closed sys.stdout
        print(f"{words}: {time.perf_counter() - begun:.2f} s", flush=True, file=sys.__stdout__)
    except (OSError, ValueError) as error:
        if out_of_space(error):
            raise


def apply_passes(recipe: Recipe, candidate: Candidate) -> Candidate:
    """``candidate`` after the passes of ``recipe``, in order. Sets the threads and the allocator of this process as they ask.

    If the workload gives torch fewer threads than its default, other runtimes get as many, unless a pass sets another number.

    Raises:
        CompileError: a pass cannot be applied to what the ones before it made.
    """
    if recipe.backend.own_graph and (threads := torch.get_num_threads()) < TORCH_THREADS:
        candidate = candidate.with_settings({"threads": threads})  # the runtime's own threads would take every core
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


def build(recipe: Recipe, candidate: Candidate) -> tuple[Executable, float]:
    """Compile and call once; returns the executable and the seconds of both."""
    args, kwargs = candidate.own_inputs()
    begun = time.perf_counter()
    with stage(f"backend {recipe.backend}, with its first call"):
        executable = recipe.backend.compile(candidate)
        executable(*args, **kwargs)
        executable.synchronize()
    return executable, time.perf_counter() - begun


def runner_for(executable: Executable, candidate: Candidate, subject: Subject, objective: Objective) -> Runner:
    """The runner that is timed: one call on the example; for throughput, concurrent requests, in time per example batch."""
    if objective != "throughput":
        return one_call(executable, *candidate.own_inputs())
    return concurrent_requests(executable, candidate.own_leaves(), rows(subject.candidate.leaves, executable.signature))


def one_call(executable: Executable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LocalRunner:
    """Runner of one call. The call may write to its inputs."""
    before = _input_restorer(executable.signature, flatten((tuple(args), dict(kwargs)), "inputs")[0])
    return LocalRunner(
        lambda: executable(*args, **kwargs), executable.synchronize, before, threads=torch.get_num_threads(),
        parallel=not executable.own_threads,
    )  # fmt: skip


def concurrent_requests(executable: Executable, leaves: Sequence[torch.Tensor], examples: int) -> Runner:
    """Runner of concurrent requests with ``leaves``, whose time is that of ``examples`` examples."""
    requests, before = [leaves] * REQUESTS, None
    if executable.signature.writes:  # each request needs its own inputs
        requests = [[leaf.clone() for leaf in leaves] for _ in requests]
        before = _input_restorer(executable.signature, *requests)
    runner = LocalRunner(lambda: executable.run_many(requests), executable.synchronize, before)
    return Scaled(runner, examples / (rows(leaves, executable.signature) * REQUESTS))


def _input_restorer(signature: Signature, *requests: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """A function that restores the inputs that a call writes to, so that every call computes the same. Normalising in place
    again and again would end in zeros, infinities or denormal numbers, each with another speed."""
    pairs = [(leaves[i], leaves[i].clone()) for leaves in requests for i in signature.written]

    def restore() -> None:
        with torch.no_grad():
            for leaf, before in pairs:
                leaf.copy_(before)

    return restore if pairs else None


def own_pids(rival: Runner) -> set[int]:
    """Processes that count as ours: this one, the study that started it, and the rival."""
    return {os.getpid(), os.getppid(), rival.pid}


class Scaled:
    """A runner whose times are per unit of work, so that calls of different sizes can be compared."""

    def __init__(self, runner: Runner, factor: float) -> None:
        self._runner, self._factor = runner, factor
        self.pid = runner.pid

    def block(self, calls: int) -> list[int]:
        """Scaled nanoseconds of each call."""
        return [round(ns * self._factor) for ns in self._runner.block(calls)]

    def pace(self) -> int:
        """Nanoseconds of the fixed piece of work on this core; see :func:`trimtab.measure.timer.pace`."""
        return self._runner.pace()


def rows(leaves: Sequence[torch.Tensor], signature: Signature) -> int:
    """Examples per call: the size of the batch dimension, else of the first axis of the first input; 1 if that axis counts no
    examples."""
    lead = signature.inputs[0].shape[:1] if signature.inputs and not signature.batched else ()
    for spec, leaf in zip(signature.inputs, leaves, strict=True):
        for name, size in zip(spec.shape, leaf.shape, strict=False):
            if isinstance(name, str) and name.lower() in BATCHES and name not in lead:
                return size
    return leaves[0].shape[0] if leaves and leaves[0].dim() and signature.batched else 1


def timing_figures(
    found: Comparison, executable: Executable, candidate: Candidate, subject: Subject, objective: Objective
) -> dict[str, Any]:
    """The figures of a trial that come from a comparison."""
    figures: dict[str, Any] = {"comparison": found, "speedup": found.ratio, "latency_ms": found.candidate}
    if objective == "throughput":
        figures["throughput"] = per_second(found.candidate, rows(subject.candidate.leaves, subject.candidate.signature))
        alone = _single_calls(runner_for(executable, candidate, subject, "latency"))
        figures["latency_ms"] = summarize(
            alone, unit="ms", conditions={"examples": rows(candidate.leaves, candidate.signature), "unpaired": True}
        )
    return figures


def _single_calls(runner: Runner) -> list[int]:
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
    """Write the executable's files and signature. Returns their size, or the reason why it cannot be saved."""
    model = folder / MODEL
    shutil.rmtree(model, ignore_errors=True)  # files of a damaged earlier save
    model.mkdir(parents=True, exist_ok=True)
    try:
        with save_errors():
            files = executable.save(model)
    except CompileError as error:
        if out_of_space(error):
            raise
        return {"cannot_ship": f"It cannot ship: {error}"}
    sizes = {name: (model / name).stat().st_size for name in files}
    write_json(folder / BUILT, {"signature": executable.signature, "settings": executable.settings, "sizes": sizes})
    return {"size_mb": sum(sizes.values()) / 1e6}


def files_complete(folder: pathlib.Path) -> bool:
    """Whether the files that :func:`save` wrote into ``folder`` are complete and unchanged."""
    try:
        sizes = json.loads((folder / BUILT).read_text(encoding="utf-8"))["sizes"]
        return all((folder / MODEL / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def load_saved(recipe: Recipe, folder: pathlib.Path) -> Executable:
    """The executable saved in ``folder``. Sets torch's threads to the number that it was built for."""
    built = json.loads((folder / BUILT).read_text(encoding="utf-8"))
    settings = from_json(Settings, built["settings"])
    _prepare_process(settings)
    return recipe.backend.load(folder / MODEL, from_json(Signature, built["signature"]), settings)


def describe(error: BaseException) -> str:
    """An exception in one sentence."""
    text = shortened(message_line(error)) if error_text(error).strip() else "no message"
    return text if isinstance(error, (CompileError, InputError)) else f"{type(error).__name__}: {text}"
