"""Settings that decide themselves: what is ``"auto"`` is measured on real updates before the run begins.

The alternatives are the passes for training that set the field in question. Each, as a double of the run, takes turns with
the best so far, and is on only if the lower end of its speed-up is above 1 and its losses are those of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from trimtab.hardware.environment import Environment
from trimtab.measure.pairs import Progress, compare
from trimtab.tensors.structure import tensors_of
from trimtab.train.autotune.shadow_run import ShadowRun, Watched, candidate, rounded, seconds_of, why_not_alone
from trimtab.train.data.device_prefetch import mover
from trimtab.train.data.peek import first_batches, kept_random
from trimtab.train.engine.compiled_step import WORTH_S, CompiledStep, first_line
from trimtab.train.loss.adapter import Batch
from trimtab.train.loss.loss_parity import MARGIN, SHAKE, rounding
from trimtab.train.optim.kernels import why_not
from trimtab.train.run_context import RunContext
from trimtab.train.runtime import gradient_parity
from trimtab.train.runtime.cudnn_thread import thread_for
from trimtab.train.runtime.memory_errors import out_of_memory

OFF: Mapping[str, Any] = {
    "precision.autocast": None,
    "memory_format": "contiguous",
    "precision.tf32": None,
    "cudnn_benchmark": False,
    "attention": None,
    "optimizer.implementation": None,
    "compile": False,
}
"""What each field is where nothing pays, in the order in which they are decided: what others build on comes first."""
GROUPS = 4
"""Updates whose batches are looked at, because lengths may differ."""
SECONDS, EARLY_SHARE, SHARE = 5.0, 0.1, 0.03
"""All decisions but that on compilation take 5 s or a tenth of the run, whichever is less, or 3% of it if that is more."""
FEWEST_ROUNDS = 16
"""How often each side makes its updates at least: twice four times, and before that until they are steady."""
MOST_ROUNDS = 64
"""So many are enough, or :data:`SECONDS` of them, however long the run."""
EXACT, LOSSY = 1e-3, 0.05
"""How far losses may be from those of the run as it is, relative to them; and, where rounded, targets from themselves, relative
to what they vary by."""
GRADIENT = 0.02
"""How far the gradient of a parameter may be from that of the run as it is, relative to it, whatever rounding explains."""
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""What torch raises where a technique does not fit a model, an optimizer or a processor; trimtab's own errors come beside."""


class _InterruptedError(Exception):
    """The user wants the run to end."""


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What came of one technique."""

    text: str
    """``on`` or ``off``, and why."""
    better: ShadowRun | None = None
    """Where it pays."""


def undecided(settings: Settings) -> list[str]:
    """The fields that are ``"auto"`` and decided here, in order."""
    return [name for name in OFF if settings.value(name) == "auto"]


def decide(context: RunContext, train: Iterable[Batch], updates: int | None) -> Iterable[Batch]:
    """Replace every ``"auto"`` in the trainer's settings, and note why; the run of ``updates`` begins as if nothing had been.

    Returns the loader to use, which still has all of its batches. Interrupted, it leaves off what it has not decided, which a
    run that goes on from there decides.
    """
    fields = undecided(context.settings)
    if not fields:
        return train
    before = context.settings
    context.settings = before.replaced({name: OFF[name] for name in fields})
    if reason := why_not_alone(context):
        context.note(f"{', '.join(fields)} stay off: {reason}.")
        return train
    batches, train = first_batches(train, GROUPS * before.data.accumulate)
    left: set[str] = set()
    if not context.world.any(not batches):
        with kept_random():
            decisions = _Decisions(context, batches, updates)
            where = thread_for(context.device, "cudnn_benchmark" in fields)  # the convolutions of the run are yet to be chosen
            where(lambda: decisions.make(fields))
            left = {name for name in fields if context.world.any(name in decisions.interrupted)}
            del decisions, where  # and with it the last copies of the model and the optimizer, whose memory the run may need
            gc.collect()  # what was compiled refers to itself
            torch.cuda.empty_cache()  # does nothing where there is no GPU
    values = {name: context.settings.value(name) for name in fields}
    context.decided |= {name: value for name, value in values.items() if name not in left or value != OFF[name]}
    return train


class _Decisions:
    """One after the other, each on top of those before.

    Args:
        batches: what updates are made of.
        updates: how many the run will make, where that is known.
    """

    def __init__(self, context: RunContext, batches: Sequence[Batch], updates: int | None) -> None:
        self.context, self.batches = context, batches
        self.updates = None if updates is None else updates - context.position.update
        self.best: ShadowRun | None = None
        self.candidate: Candidate | None = None
        self.interrupted: set[str] = set()
        """Fields of which something was not measured because the run was to end."""
        self.step_s = self.round_s = 0.0
        """Seconds of an update of the run as it is, and of one from each group of the batches."""

    def make(self, fields: Sequence[str]) -> None:
        """Decide ``fields``; what fails, fails with a note."""
        context, failure = self.context, None
        try:
            self.candidate = candidate(context, context.settings, self.batches[0])
            self.best = ShadowRun(context, context.settings, self.batches)
            self._settle(self.best)
            options = self._options(fields)
        except (TrimtabError, *_FAILURES) as error:
            failure = first_line(error)
        if context.world.any(failure is not None):
            self.context.note(f"{', '.join(fields)} cannot be measured and stay off. {failure or 'Another process failed.'}")
            return
        tried = sum(reason is None for name, found in options.items() for _, reason in found if name != "compile")
        seconds = min(self._seconds() / max(tried, 1), max(SECONDS, MOST_ROUNDS * self.round_s))
        for index, name in enumerate(fields):
            options |= self._options_anew(fields[index:])
            told: dict[str, list[str]] = {}
            for technique, reason in options[name]:
                what, text = self._decided(technique, reason, seconds)
                told.setdefault(text, []).append(what)
            for text, whats in told.items():
                shown = name if len(told) == 1 < len(whats) else ", ".join(whats)
                context.note(f"{shown} {'is' if shown == name or len(whats) == 1 else 'are'} {text}")

    def _options(self, fields: Sequence[str]) -> dict[str, list[tuple[Pass, str | None]]]:
        """The techniques for each field, and why one of them cannot pay."""
        return {name: [(technique, self._against_trying(technique)) for technique in _techniques(name)] for name in fields}

    def _options_anew(self, fields: Sequence[str]) -> dict[str, list[tuple[Pass, str | None]]]:
        """Those of ``fields`` where the precision is another one by now: some kernels take 16 bits only."""
        assert self.candidate is not None
        precision = self.context.settings.precision.autocast
        if precision == self.candidate.settings.precision.autocast:
            return {}
        self.candidate = self.candidate.with_settings({"precision.autocast": precision})
        return self._options(fields)

    def _against_trying(self, technique: Pass) -> str | None:
        """Why ``technique`` cannot pay, as far as that is known beforehand."""
        assert self.candidate is not None
        field, value = self._set_by(technique)
        if value == "float16" and self.context.device.type == "cpu":
            return "float16 pays on GPUs only; bfloat16 is the one that some CPUs multiply."
        if value == "float16" and self.context.world.size > 1 and self.context.settings.distributed.communication == "powersgd":
            return "what communication leaves out for later updates would be in units of a scale that changes."
        if field == "optimizer.implementation" and (reason := why_not(self.context.optimizer, value)):
            return reason
        if field == "compile" and self.updates is None:
            return "how many updates there will be is not known, so nothing says whether compiling would be paid back."
        if field == "compile" and self.updates is not None and (left := self.updates * self.step_s) < WORTH_S:
            return f"the {self.updates} updates take about {left:.0f} s, too little to pay back what compiling costs."
        return technique.blocked(self.candidate)

    def _set_by(self, technique: Pass) -> tuple[str, Any]:
        """The field that ``technique`` sets, and its value."""
        assert self.candidate is not None
        (field,) = technique.sets
        return field, technique.apply(self.candidate).settings.value(field)

    def _decided(self, technique: Pass, reason: str | None, seconds: float) -> tuple[str, str]:
        """Have ``technique`` from now on if it pays in every process; what it is called, and what came of it."""
        field, value = self._set_by(technique)
        verdict = _Verdict(f"off: {reason}")
        if reason is None:
            try:
                verdict = self._verdict(technique, field, value, seconds)
            except _InterruptedError:
                self.interrupted.add(field)
                verdict = _Verdict("off: the run was interrupted before it was measured.")
            except (TrimtabError, *_FAILURES) as error:
                memory = out_of_memory(error)
                verdict = _Verdict(f"off: {'there is no memory to try it.' if memory else f'it fails. {first_line(error)}'}")
        if not self.context.world.any(verdict.better is None):  # each process asks exactly once
            assert verdict.better is not None
            self.best, self.context.settings = verdict.better, verdict.better.settings
        elif verdict.better is not None:
            verdict = _Verdict("off: it does not pay in every process.")
        if self.context.settings.memory.activation_mb is not None or self.context.settings.memory.segments is not None:
            gc.collect()  # what is recomputed refers to itself
        return f"{field}={value!r}", verdict.text

    def _settle(self, double: ShadowRun) -> None:
        """Find out how long an update of ``double`` takes; where that is long, the batches of a single one must do."""
        accumulate, batches, move = self.context.settings.data.accumulate, self.batches, mover(self.context.device)
        # On a GPU they lie there beforehand: a run has them copied while it computes.
        self.batches = double.feed.batches = [move(batch) for batch in batches[:accumulate]]
        _, self.step_s = seconds_of(double)
        self.round_s, groups = self.step_s, -(-len(batches) // accumulate)
        alike = len({tuple(tensor.shape for tensor in tensors_of(batch)) for batch in batches}) == 1
        if alike or groups * self.step_s > SECONDS / 40 or FEWEST_ROUNDS * self.step_s > self._seconds():
            return
        self.batches = double.feed.batches = [move(batch) for batch in batches]
        _, self.round_s = seconds_of(double)
        self.step_s = self.round_s / groups

    def _seconds(self) -> float:
        """What all comparisons together may take."""
        if self.updates is None:
            return SECONDS
        run_s = self.updates * self.step_s
        return max(min(SECONDS, EARLY_SHARE * run_s), SHARE * run_s)

    def _verdict(self, technique: Pass, field: str, value: Any, seconds: float) -> _Verdict:
        """Whether ``technique``, which sets ``field`` to ``value``, pays; takes ``seconds`` or less."""
        if self.context.ending:
            raise _InterruptedError
        if field != "compile" and (needed := FEWEST_ROUNDS * self.round_s) > seconds:
            run = "this run" if self.updates is None else f"a run of about {self.updates * self.step_s:.0f} s"
            return _Verdict(f"off: measuring it would take {needed:.1f} s, which is too much for {run}.")
        other = ShadowRun(self.context, self.context.settings.replaced({field: value}), self.batches)
        first_s, later_s = seconds_of(other)
        if isinstance(other.step, CompiledStep) and other.step.failure is not None:
            return _Verdict(f"off: the model cannot be compiled. {other.step.failure}")
        if difference := self._difference(other, exact=technique.exact):
            return _Verdict(f"off: {difference}")
        ratio = self._ratio(other, max(seconds, SHARE * first_s))
        if reason := self._against(field, ratio, first_s - later_s):
            return _Verdict(f"off: {reason}")
        return _Verdict(f"on: it ran at {_times(ratio)}.{self._paid(field, ratio, first_s - later_s)}", other)

    def _difference(self, other: ShadowRun, *, exact: bool) -> str | None:
        """How the losses and gradients of ``other`` differ from those of the best so far on the same batches, if they do."""
        assert self.best is not None
        bound = EXACT if exact else LOSSY
        other.take_buffers(self.best)
        want, got = self.best.watched(), other.watched()
        if not all(update.finite or update.overflowed for update in got.updates):
            return "its gradient is not finite."
        if not exact and (coarse := rounded(other.model, other.step.objective, other.settings, self.batches[0], LOSSY)):
            return coarse[0].lower() + coarse[1:]
        with contextlib.ExitStack() as still:
            if _apart(want, got) > bound:  # random numbers may fall differently, as those of dropout do in another layout
                still.enter_context(self.best.still())
                still.enter_context(other.still())
                other.take_buffers(self.best)
                want, got = self.best.watched(), other.watched()
                if (apart := _apart(want, got)) > bound:
                    return f"its loss differs by {apart:.2g} of what it was, and {bound:g} is allowed."
            if not exact or (apart := gradient_parity.apart(want.gradient, got.gradient)) <= GRADIENT:
                return None
            with self.best.shaken(max(SHAKE, rounding(other.model, other.settings))):
                bound = max(GRADIENT, MARGIN * gradient_parity.apart(want.gradient, self.best.watched().gradient))
        return None if apart <= bound else f"its gradient differs by {apart:.2g} of what it was, and {bound:.2g} is allowed."

    def _ratio(self, other: ShadowRun, seconds: float) -> Interval:
        """How many times faster ``other`` is than the best so far."""
        assert self.best is not None

        def go_on(progress: Progress) -> None:
            if self.context.ending:
                raise _InterruptedError

        return compare(other.runner, self.best.runner, width=0.06, seconds=seconds, min_quads=4, on_progress=go_on).ratio

    def _against(self, field: str, ratio: Interval, compile_s: float) -> str | None:
        """Why something that runs at ``ratio`` is not worth having; ``None`` if it is."""
        if ratio.doubtful:
            return "the machine was too busy to tell."
        if ratio.high < 1:
            native = field != "precision.autocast" or self.context.device.type != "cpu" or _native_bfloat16()
            return f"it ran at {_times(ratio)} here" + ("." if native else "; this CPU has no native bfloat16.")
        if ratio.low <= 1:
            return f"it ran at {_times(ratio)}, which is not surely faster."
        if field == "compile" and self.updates is not None and (saved := self._saved(ratio)) <= compile_s:
            return f"it ran at {_times(ratio)}, but compiling takes {compile_s:.1f} s and saves {saved:.1f} s of the run."
        return None

    def _saved(self, ratio: Interval) -> float:
        """Seconds of the run that ``ratio`` surely saves."""
        assert self.updates is not None
        return self.updates * self.step_s * (1 - 1 / ratio.low)

    def _paid(self, field: str, ratio: Interval, compile_s: float) -> str:
        if field != "compile" or self.updates is None:
            return ""
        needed = math.ceil(compile_s / (self.step_s * (1 - 1 / ratio.low)))
        return f" Compiling takes {compile_s:.1f} s, which {needed} of the {self.updates} updates pay back."


def _techniques(field: str) -> Iterator[Pass]:
    """Every pass for training that sets ``field`` alone, with each combination of its choices."""
    for name in PASSES:
        cls = PASSES[name]
        if "train" in cls.modes and cls.sets == {field}:
            choices = cls.choices()
            for values in itertools.product(*choices.values()):
                yield cls(**dict(zip(choices, values, strict=True)))


def _apart(want: Watched, got: Watched) -> float:
    """The largest difference of their losses, relative to the first."""
    pairs = [(float(a.loss), float(b.loss)) for a, b in zip(want.updates, got.updates, strict=True)]
    return max((abs(b - a) / max(abs(a), 1e-6) if math.isfinite(b) else math.inf for a, b in pairs), default=0.0)


def _times(ratio: Interval) -> str:
    return f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def _native_bfloat16() -> bool:
    return any("bf16" in name for name in Environment.capture().isa)
