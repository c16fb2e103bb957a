"""Decide the settings that are ``"auto"``, by timing real updates before the run begins.

The alternatives of a field are the passes for training that set it. Each is timed as a :class:`ShadowRun`, in turns with the
best settings so far. It is on only if the lower bound of its speed-up is above 1 and its losses and gradients match.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trimtab.core.candidate import Candidate
from trimtab.core.measurement import Interval
from trimtab.core.settings import Settings
from trimtab.core.technique import PASSES, Pass
from trimtab.errors import TrimtabError
from trimtab.measure.pairs import Progress, compare
from trimtab.tensors.structure import tensors_of
from trimtab.train.autotune.shadow_run import Round, ShadowRun, candidate, seconds_of, why_no_copy, why_too_coarse
from trimtab.train.data.device_prefetch import mover
from trimtab.train.data.peek import first_batches, preserved_random_state
from trimtab.train.engine.compiled_step import MIN_RUN_S, CompiledStep
from trimtab.train.loss.adapter import Batch
from trimtab.train.loss.loss_parity import LOSSY, PERTURBATION, BaselineLosses, gradients_differ, parity, rounding
from trimtab.train.optim.kernels import why_not
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.memory_errors import first_line, out_of_memory

OFF: Mapping[str, Any] = {
    "precision.autocast": None,
    "memory_format": "contiguous",
    "precision.tf32": None,
    "attention": None,
    "optimizer.implementation": None,
    "compile": False,
}
"""Each field that is decided here, with its default. The order is that of the decisions, which build on each
other."""
_COMPILER = ("compiler.mode", "compiler.dynamic", "compiler.options")
"""Fields that are decided together with ``compile``."""
GROUPS = 4
"""Number of updates whose batches are read, because batches may differ in length."""
SECONDS, EARLY_SHARE, SHARE = 5.0, 0.1, 0.03
"""Time limit of all decisions except that on compilation: 5 s or 10% of the run, whichever is less, but at least 3% of the
run."""
MIN_ROUNDS = 16
"""Fewest rounds of each side in a comparison: two turns of four, and as many to warm up."""
MAX_ROUNDS = 64
"""A comparison takes no longer than this many rounds or :data:`SECONDS`, whichever is more."""
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""Errors that torch raises if a technique does not fit a model, an optimizer or a processor."""


class _InterruptedError(Exception):
    """The user ends the run."""


def undecided(settings: Settings) -> list[str]:
    """The fields of :data:`OFF` that are ``"auto"``, in order."""
    return [name for name in OFF if settings.value(name) == "auto"]


def decide(context: RunContext, train: Iterable[Batch], updates: int | None) -> Iterable[Batch]:
    """Replace every ``"auto"`` in the settings of ``context``, with a note on each decision.

    Model, optimizer and random generators are restored. If the user ends the run, undecided fields are off; the resumed run
    decides them.

    Args:
        context: the run; its settings and ``decided`` change.
        train: the loader.
        updates: how many updates the run will make, if that is known.

    Returns:
        The loader to use in place of ``train``, which still has all batches.
    """
    fields = undecided(context.settings)
    if not fields:
        return train
    before = context.settings
    context.settings = before.replaced({name: OFF[name] for name in fields})
    if reason := why_no_copy(context):
        context.note(f"{', '.join(fields)} stay off: {reason}.")
        return train
    batches, train = first_batches(train, GROUPS * before.data.accumulate)
    left: Sequence[str] = ()
    if not context.world.any(not batches):
        with preserved_random_state():
            left = _Decisions(context, batches, updates).make(fields)
            gc.collect()  # compiled code refers to itself, and holds the last copies of model and optimizer
            torch.cuda.empty_cache()  # no effect without a GPU
    values = {name: context.settings.value(name) for name in fields}
    values |= {name: now for name in _COMPILER if (now := context.settings.value(name)) != before.value(name)}
    context.decided |= {name: value for name, value in values.items() if name not in left or value != OFF.get(name)}
    return train


class _Decisions:
    """Decides one field after the other; each decision builds on those before it.

    Args:
        batches: from which updates are made.
        updates: how many the run will make, if that is known.
    """

    def __init__(self, context: RunContext, batches: Sequence[Batch], updates: int | None) -> None:
        self.context, self.batches, self.all_batches = context, batches, batches
        self.updates = None if updates is None else updates - context.position.update
        self.best: ShadowRun | None = None
        self.candidate: Candidate | None = None
        self.interrupted: set[str] = set()
        """Fields that are not decided because the user ended the run."""
        self.compile_s = 0.0
        """Seconds in which the best run so far was compiled; 0 if it is not compiled."""
        self.last_timed = 0.0, 1.0
        """Seconds in which the run timed last was compiled, and its speed-up."""
        self.mixed_sizes = False
        """Whether rounds have batches of several sizes in any process."""
        self.step_s = self.round_s = 0.0
        """Seconds of an update of the best run so far, and of a round, which has one update from each group of batches."""

    def make(self, fields: Sequence[str]) -> Sequence[str]:
        """Decide ``fields``, and note why. Returns those that an interruption left open; all processes get the same."""
        context, failure = self.context, None
        try:
            self.candidate = candidate(context, context.settings, self.batches[0])
            self.best = ShadowRun(context, context.settings, self.batches)
            self._measure_update(self.best)
            options = self._options(fields)
        except (TrimtabError, *_FAILURES) as error:
            failure = f"{first_line(error)}."
        if context.world.any(failure is not None):
            context.note(f"{', '.join(fields)} cannot be measured and stay off. {failure or 'Another process failed.'}")
            return ()
        tried = sum(reason is None for name, found in options.items() for _, reason in found if name != "compile")
        seconds = min(self._time_budget() / max(tried, 1), max(SECONDS, MAX_ROUNDS * self.round_s))
        precision = context.settings.precision.autocast
        for index, name in enumerate(fields):
            if name == "compile":
                self._use_all_sizes()
            if name == "compile" or precision != context.settings.precision.autocast:  # some kernels take 16 bits only
                precision = context.settings.precision.autocast
                options |= self._options(fields[index:])
            results: dict[str, list[str]] = {}
            for technique, reason in options[name]:
                option, result = self._decide(technique, reason, seconds)
                results.setdefault(result, []).append(option)
            for result, found in results.items():
                shown = [name] if len(results) == 1 < len(found) else found
                context.note(f"{', '.join(shown)} {'is' if len(shown) == 1 else 'are'} {result}")
        return [name for name in fields if context.world.any(name in self.interrupted)]

    def _options(self, fields: Sequence[str]) -> dict[str, list[tuple[Pass, str | None]]]:
        """The passes for each field, each with the reason why it need not be timed now, or ``None``."""
        assert self.candidate is not None
        self.candidate = self.candidate.with_settings({"precision.autocast": self.context.settings.precision.autocast})
        fitting = {name: [each for each in _techniques(name) if self._fits(each)] for name in fields}
        return {name: [(each, self._why_not_timed(each)) for each in found] for name, found in fitting.items()}

    def _fits(self, technique: Pass) -> bool:
        """Whether ``technique`` can be of use: code for all sizes only if sizes differ, other kernels only on a GPU.

        A compiler setting that the user has given is not replaced.
        """
        asked, compiler = self._changes(technique), self.context.settings.compiler
        sizes = asked.get("compiler.dynamic") and not (self.mixed_sizes and compiler.dynamic is None)
        given = compiler.mode is not None or compiler.options is not None
        kernels = asked.keys() & {"compiler.mode", "compiler.options"} and (given or self.context.device.type == "cpu")
        return not (sizes or kernels)

    def _why_not_timed(self, technique: Pass) -> str | None:
        """Why ``technique`` need not be timed, as a clause or a sentence; ``None`` if it must be."""
        assert self.candidate is not None
        field, value = self._field_and_value(technique)
        if value == "float16" and self.context.device.type == "cpu":
            return "float16 pays on GPUs only; bfloat16 is the one that some CPUs multiply."
        if value == "float16" and self.context.world.size > 1 and self.context.settings.distributed.communication == "powersgd":
            return "what communication leaves out for later updates would be in units of a scale that changes."
        if field == "optimizer.implementation" and (reason := why_not(self.context.optimizer, value)):
            return reason
        if field == "compile" and self.updates is None:
            return "how many updates there will be is not known, so nothing says whether compiling would be paid back."
        if field == "compile" and self.updates is not None and (left := self.updates * self.step_s) < MIN_RUN_S:
            return f"the {self.updates} updates take about {left:.0f} s, too little to pay back what compiling costs."
        return technique.blocked(self.candidate)

    def _field_and_value(self, technique: Pass) -> tuple[str, Any]:
        """The field that ``technique`` sets, and the value that it sets."""
        assert self.candidate is not None
        (field,) = technique.sets & OFF.keys()
        return field, technique.apply(self.candidate).settings.value(field)

    def _option(self, technique: Pass) -> str:
        """The option that ``technique`` stands for, such as ``optimizer.implementation='fused'``."""
        return " with ".join(f"{name}={value!r}" for name, value in self._changes(technique).items())

    def _changes(self, technique: Pass) -> dict[str, Any]:
        """The settings that ``technique`` changes: the field that it decides, and others with a non-default value."""
        assert self.candidate is not None
        field, value = self._field_and_value(technique)
        made, default = technique.apply(self.candidate).settings, Settings()
        more = {name: made.value(name) for name in sorted(technique.sets - {field})}
        return {field: value} | {name: value for name, value in more.items() if value != default.value(name)}

    def _decide(self, technique: Pass, reason: str | None, seconds: float) -> tuple[str, str]:
        """Time ``technique``, and keep it if it pays in every process.

        Returns:
            The option, such as ``optimizer='fused'``, and the result: ``on: ...`` or ``off: ...``, with the reason.
        """
        field, _ = self._field_and_value(technique)
        faster, result = None, f"off: {reason}"
        if reason is None:
            try:
                faster, result = self._time_pass(technique, field, seconds)
            except _InterruptedError:
                self.interrupted.add(field)
                result = "off: the run was interrupted before it was measured."
            except (TrimtabError, *_FAILURES) as error:
                result = (
                    "off: there is no memory to try it." if out_of_memory(error) else f"off: it fails. {first_line(error)}."
                )
        if not self.context.world.any(faster is None):  # exactly one exchange per process
            assert faster is not None
            self.best, self.context.settings = faster, faster.settings
            compile_s, speedup = self.last_timed
            self.step_s, self.round_s = self.step_s / speedup, self.round_s / speedup
            self.compile_s = compile_s if field == "compile" else self.compile_s
        elif faster is not None:
            result = "off: it does not pay in every process."
        if self.context.settings.memory.activation_mb is not None:
            gc.collect()  # recomputed modules are in reference cycles
        return self._option(technique), result

    def _measure_update(self, run: ShadowRun) -> None:
        """Measure the seconds of an update; a round has one update where batches are alike or updates slow, else several."""
        accumulate, batches, move = self.context.settings.data.accumulate, self.batches, mover(self.context.device)
        # On a GPU the batches are moved beforehand: a run copies them while it computes.
        self.batches = run.feed.batches = [move(batch) for batch in batches[:accumulate]]
        _, self.step_s = seconds_of(run)
        self.round_s, groups = self.step_s, -(-len(batches) // accumulate)
        alike = len(shapes(batches)) == 1
        if alike or groups * self.step_s > SECONDS / 40 or MIN_ROUNDS * self.step_s > self._time_budget():
            return
        self.batches = run.feed.batches = [move(batch) for batch in batches]
        _, self.round_s = seconds_of(run)
        self.step_s = self.round_s / groups

    def _use_all_sizes(self) -> None:
        """Make rounds from all batches that were read if they differ in size, because code is compiled for each size.

        This is left out if the minimum of rounds would take too large a share of the run. All processes decide alike.
        """
        assert self.best is not None
        world, groups = self.context.world, -(-len(self.all_batches) // self.context.settings.data.accumulate)
        differ = world.any(len(shapes(self.all_batches)) > 1)
        if world.any(self.updates is None or MIN_ROUNDS * groups > EARLY_SHARE * self.updates) or not differ:
            return
        self.mixed_sizes, move = True, mover(self.context.device)
        if len(self.batches) < len(self.all_batches):
            with contextlib.suppress(torch.OutOfMemoryError):  # then the first size alone is judged
                self.batches = self.best.feed.batches = [move(batch) for batch in self.all_batches]
                self.round_s = groups * self.step_s

    def _time_budget(self) -> float:
        """Most seconds for all comparisons."""
        if self.updates is None:
            return SECONDS
        run_s = self.updates * self.step_s
        return max(min(SECONDS, EARLY_SHARE * run_s), SHARE * run_s)

    def _time_pass(self, technique: Pass, field: str, seconds: float) -> tuple[ShadowRun | None, str]:
        """Time ``technique``, which decides ``field``, for at most ``seconds``.

        Returns:
            The shadow run if it pays, else ``None``; and the result: ``on: ...`` or ``off: ...``, with the reason.

        Raises:
            _InterruptedError: the user ends the run.
        """
        if self.context.ending:
            raise _InterruptedError
        if field != "compile" and (needed := MIN_ROUNDS * self.round_s) > seconds:
            length = "this run" if self.updates is None else f"a run of about {self.updates * self.step_s:.0f} s"
            return None, f"off: measuring it would take {needed:.1f} s, which is too much for {length}."
        other = ShadowRun(self.context, self.context.settings.replaced(self._changes(technique)), self.batches)
        first_s, later_s = seconds_of(other)
        if isinstance(other.step, CompiledStep) and other.step.failure is not None:
            return None, f"off: the model cannot be compiled. {other.step.failure}"
        if difference := self._difference(other, exact=technique.exact):
            return None, f"off: {difference[0].lower()}{difference[1:]}"
        ratio = self._ratio(other, max(seconds, SHARE * first_s))
        times = f"it ran at {ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"
        if ratio.doubtful:
            return None, "off: the machine was too busy to tell."
        self.last_timed = first_s - later_s, ratio.value
        if field == "compile" and self.updates is not None:
            result = self._pays_back(ratio, times, first_s - later_s)
        elif ratio.low > 1:
            result = f"on: {times}."
        else:
            result = _not_faster(ratio, times)
        return other if result.startswith("on") else None, result

    def _pays_back(self, ratio: Interval, times: str, compile_s: float) -> str:
        """Whether a run that is compiled in ``compile_s`` seconds costs less than the best run so far, compilation included:
        ``on: ...`` or ``off: ...``, with the reason. ``ratio`` is its speed-up, and ``times`` that in words."""
        assert self.updates is not None
        saved_s, before = self.step_s * (1 - 1 / ratio.low), self.compile_s
        saved = self.updates * saved_s
        if before > 0:  # the best run so far is compiled too
            result = "on" if saved + before > compile_s else "off"
            return f"{result}: {times}, and compiling takes {compile_s:.1f} s instead of {before:.1f} s."
        if ratio.low <= 1:
            return _not_faster(ratio, times)
        if saved <= compile_s:
            return f"off: {times}, but compiling takes {compile_s:.1f} s and saves {saved:.1f} s of the run."
        after = math.ceil(compile_s / saved_s)
        return f"on: {times}. Compiling takes {compile_s:.1f} s, which {after} of the {self.updates} updates pay back."

    def _difference(self, other: ShadowRun, *, exact: bool) -> str | None:
        """Why the losses or gradients of ``other`` do not match those of the best run so far, in a sentence.

        Losses that differ are compared again without dropout, whose random numbers fall differently in another layout.
        """
        assert self.best is not None
        if not exact and (coarse := why_too_coarse(other.model, other.step.objective, other.settings, self.batches[0], LOSSY)):
            return coarse
        with contextlib.ExitStack() as blocks:
            if self._losses_differ(want := self._rounds(other, exact), exact=exact):
                blocks.enter_context(self.best.without_dropout())
                blocks.enter_context(other.without_dropout())
                want = self._rounds(other, exact)
                if reason := self._losses_differ(want, exact=exact):
                    return reason
        first, noisy, found = want
        if not all(update.finite or update.overflowed for update in found.updates):
            return "Its gradient is not finite."
        return gradients_differ(first.gradient, noisy.gradient, found.gradient) if exact else None

    def _rounds(self, other: ShadowRun, exact: bool) -> tuple[Round, Round, Round]:
        """A round of the best run so far, one from parameters with noise of the size of rounding, and one of ``other``."""
        assert self.best is not None
        first = noisy = self.best.reset_round()
        if exact:
            with self.best.with_noise(max(PERTURBATION, rounding(other.model, other.settings))):
                noisy = self.best.reset_round()
        return first, noisy, other.reset_round()

    @staticmethod
    def _losses_differ(rounds: tuple[Round, Round, Round], *, exact: bool) -> str | None:
        first, noisy, found = rounds
        result = parity(BaselineLosses.of(first.losses, [noisy.losses]), found.losses, exact=exact)
        if result.reason is None and not exact and (difference := result.max_relative or 0.0) > LOSSY:
            return f"Its loss differs by {difference:.2g} of what it was, and {LOSSY:g} is allowed."
        return result.reason

    def _ratio(self, other: ShadowRun, seconds: float) -> Interval:
        """The speed-up of ``other`` over the best run so far.

        Raises:
            _InterruptedError: the user ends the run meanwhile.
        """
        assert self.best is not None

        def check(progress: Progress) -> None:
            if self.context.ending:
                raise _InterruptedError

        return compare(
            other.runner, self.best.runner, width=0.06, seconds=seconds, min_quads=4, on_progress=check, keep_slowed=True
        ).ratio


def _not_faster(ratio: Interval, times: str) -> str:
    return f"off: {times}{' here.' if ratio.high < 1 else ', which is not surely faster.'}"


def shapes(batches: Iterable[Batch]) -> set[tuple[torch.Size, ...]]:
    """The shapes of the tensors of each of ``batches``."""
    return {tuple(tensor.shape for tensor in tensors_of(batch)) for batch in batches}


def _techniques(field: str) -> Iterator[Pass]:
    """Every pass for training that sets ``field`` alone, with each combination of its choices."""
    for name in PASSES:
        cls = PASSES[name]
        if "train" in cls.modes and cls.sets & OFF.keys() == {field}:
            choices = cls.choices()
            for values in itertools.product(*choices.values()):
                yield cls(**dict(zip(choices, values, strict=True)))
