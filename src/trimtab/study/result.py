"""The result of a study: what ships, the ladder, and their JSON form."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from trimtab._internal.notebook import link, paragraph, preformatted
from trimtab._internal.serialization import to_json
from trimtab.artifact.artifact import Artifact
from trimtab.core.measurement import UNRELIABLE, Interval
from trimtab.core.trial import State, Trial
from trimtab.evaluation.confirm import Confirmation
from trimtab.evaluation.explain import Explanation
from trimtab.hardware.peaks import Peaks
from trimtab.measure.energy import Energy
from trimtab.study import ranking, waterfall
from trimtab.study.energy import energy
from trimtab.study.record import KEPT_SPEEDUP, Record, Rung, is_kept_original, without_repeats
from trimtab.study.study import Study

ARTIFACT = "artifact"
"""Folder of the artifact in the run folder."""
TRIED = "tried"
"""Key in the storage: recipes that any run of the study has confirmed, and which so have seen the test data."""
NOTE = "note of the user"
"""Key in the storage: the user's own note on the study."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """What ships: the confirmed winner, or the original if nothing beat it."""

    trial: Trial
    """The trial of the search."""
    confirmation: Confirmation
    """The confirmation, on the test data."""
    artifact: Artifact | None
    """``None`` without a standalone form, for example of a training."""


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The four rungs, from the model as written to the best; ``str()`` gives a table."""

    rungs: tuple[Mapping[str, Any], ...]
    share: bool = False
    """Whether the score is a share, whose drop is shown in percent."""
    examples: tuple[int, ...] = ()
    """Examples per call of each rung, if the rungs differ in it."""
    before: float | None = None
    """Score of the original on the test data, if the score of the best is on them."""

    def __str__(self) -> str:
        speeds = speed_ups(self.rungs)
        lines = [f"{'rung':<11} {speeds[0]} {'latency':>10} {'score':>8} {'drop (up to)':>18}  recipe"]
        lines += [_line(rung, times, self.share) for rung, times in zip(self.rungs, speeds[1:], strict=True)]
        if len(set(self.examples)) > 1:
            many = ", ".join(map(str, self.examples))
            lines.append(f"A latency is that of one call alone; examples a call, from the top: {many}.")
        if self.before is not None:
            lines.append(f"The score of best is on the test data, where the original scores {self.before:.4f}.")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a study."""

    schema: ClassVar[int] = 1

    study: Study
    status: ranking.Status
    """``improved``, ``kept_original`` or ``limits_not_met``."""
    sentence: str
    """The outcome in words."""
    best: Best | None
    """The winner, or the original; ``None`` if nothing keeps the limits."""
    seconds: float
    """Duration of this run, without earlier runs of the study."""
    peaks: Peaks | None = None
    """The measured peaks of this machine; ``None`` without explanations."""
    explanations: Mapping[str, Explanation] = dataclasses.field(default_factory=dict)
    """Where the time of a call goes, for ``as_written`` and ``best``."""
    report: pathlib.Path | None = None
    """The HTML report; ``None`` if it could not be written."""

    def __str__(self) -> str:
        return f"{self.sentence}\n\n{self.ladder()}"

    def __repr__(self) -> str:
        return f"Result({self.status}: {self.sentence})"

    def _repr_html_(self) -> str:
        """The sentence, the ladder and a link to the report, for notebooks."""
        return paragraph(self.sentence) + preformatted(str(self.ladder())) + link(self.report, "report")

    @property
    def trials(self) -> list[Trial]:
        """All finished trials."""
        return self.study.trials

    def ladder(self) -> Ladder:
        """The ladder: as written, tuned, lossless, best."""
        options, trials, ships = self.study.options, self.study.trials, self._ships
        exact = [t for t in ranking.ranked(trials, options.limits, options.objective) if t.recipe.exact]
        found: dict[ranking.Rung, Trial | None] = {
            "as_written": next((t for t in trials if t.recipe == self.study.baseline), None),
            "tuned": self.study.to_beat,
            "lossless": exact[0] if exact else None,
            "best": None if ships is None else ships.trial,
        }
        shown = {rung: trial for rung, trial in found.items() if trial is not None}
        rungs = tuple(self._entry(trial, rung) for rung, trial in shown.items())
        given = [trial.latency_ms.conditions.get("examples") for trial in shown.values() if trial.latency_ms is not None]
        examples = tuple(number for number in given if isinstance(number, int))
        complete = len(examples) == len(shown)
        before = None if ships is None else ships.confirmation.before
        before = None if before == self.study.prepared.score else before
        return Ladder(rungs, share=self.study.prepared.share, examples=examples if complete else (), before=before)

    @property
    def _ships(self) -> Best | None:
        """The best if it was confirmed."""
        return self.best if self.best is not None and self.best.confirmation.ok else None

    @property
    def kept(self) -> bool:
        """Whether the original itself ships, whose speed-up over the model as written is 1 by definition."""
        ships = self._ships
        if ships is None or self.status != "kept_original":
            return False
        recipe, ratio = ships.trial.recipe, ships.confirmation.speedup
        same = recipe.backend.name == "eager" and not recipe.passes and (ratio is None or ratio.low <= 1 <= ratio.high)
        return recipe == self.study.baseline or same

    def _entry(self, trial: Trial, rung: ranking.Rung | None = None) -> dict[str, Any]:
        """``trial`` in the JSON output, as the given rung or as the best, with the figures of the confirmation if it ships.

        The model as written, and an original that is kept, get the latency that the confirmation measured in turns with what
        ships, if it was timed: a latency of another minute does not fit the confirmed speed-up.
        """
        confirmed = self.best.confirmation if self.best is not None and rung in (None, "best") else self._confirmation_of(trial)
        entry = ranking.entry(trial, self.study.options.limits, rung=rung, confirmed=confirmed)
        ships, original = self._ships, self.study.baseline
        if ships is None:
            return entry
        kept, found = self.kept and trial.recipe == ships.trial.recipe, ships.confirmation.comparison
        if kept:
            entry["speedup"] = {"value": 1.0, "low": 1.0, "high": 1.0}
        if self.study.options.objective == "throughput" or not (kept or trial.recipe == original):
            return entry
        searched = next((each.latency_ms for each in self.study.trials if each.recipe == original), None)
        if (written := searched if found is None else found.rival) is not None:
            entry["latency_ms"] = {"median": written.median, "p90": written.p90}
        return entry

    def _confirmation_of(self, trial: Trial) -> Confirmation | None:
        """The confirmation of ``trial`` if it ships and is not the model as written, which figures are relative to; else
        ``None``."""
        if self.best is None or self.kept or trial.recipe != self.best.trial.recipe or trial.recipe == self.study.baseline:
            return None
        return self.best.confirmation if self.best.confirmation.speedup is not None else None

    def all_notes(self) -> list[str]:
        """Notes on assumptions, events of the study and load on the machine, in sentences."""
        return without_repeats(self.sentence, [*self.study.prepared.notes, *self.study.notes, *busy(self.study.record())])

    def steps(self) -> tuple[waterfall.Step, ...]:
        """Gain of each step of the recipe that ships, from the trials of the search; empty if the original ships."""
        if (ships := self._ships) is None or self.kept:
            return ()
        training, to_beat = self.study.task.mode == "train", self.study.to_beat
        return waterfall.steps(
            self.study.trials,
            ships.trial.recipe,
            baseline=self.study.baseline,
            tuned=None if training or to_beat is None else to_beat.recipe,
            objective=self.study.options.objective,
        )

    def to_json(self) -> dict[str, Any]:
        """The result as ``trimtab optimize --json`` prints it."""
        study, best = self.study, self.best
        limits = study.options.limits
        return {
            "schema": self.schema,
            "workload": study.prepared.name,
            "status": self.status,
            "environment": to_json(study.environment),
            "conditions": self._conditions(),
            "ladder": list(self.ladder().rungs),
            "trials": [ranking.entry(trial, limits) for trial in study.trials],
            "best": None if best is None else self._entry(best.trial),
            "steps": to_json(self.steps()),
            "note": self.study.storage.get(NOTE),
            "untried": list(study.record().untried),
            "artifact": None if best is None or best.artifact is None else str(best.artifact.path),
            "report": None if self.report is None else str(self.report),
            "seconds": self.seconds,
        }

    def record(self) -> Record:
        """The record of the study with its result."""
        best, known = self.best, self.study.record()
        found = dataclasses.replace(
            known,
            status=self.status,
            sentence=self.sentence,
            seconds=self.seconds,
            ladder=cast(tuple[Rung, ...], self.ladder().rungs),
            peaks=self.peaks,
            explanations=self.explanations,
            tried=tuple(self.study.storage.get(TRIED) or ()),
            notes=tuple(without_repeats(self.sentence, [*known.notes, *busy(known)])),
            steps=self.steps(),
            note=self.study.storage.get(NOTE),
            energy=self._energy(),
        )
        if best is None:
            return found
        files = {} if best.artifact is None else {name: f.sha256 for name, f in best.artifact.manifest.files.items()}
        return dataclasses.replace(
            found,
            best=best.trial.recipe.hash,
            confirmation=best.confirmation,
            artifact=None if best.artifact is None else ARTIFACT,
            files=files,
        )

    def _energy(self) -> Energy | None:
        """Energy of a call of what ships, or why it is unknown; ``None`` if nothing ships or it was not timed."""
        best = self.best
        if best is None or best.artifact is None or (found := best.confirmation.comparison) is None:
            return None
        return energy(self.study, str(best.artifact.path), (found.candidate.median / 1e3, found.rival.median / 1e3))

    def _conditions(self) -> dict[str, Any]:
        study = self.study
        comparison = self.best.confirmation.comparison if self.best is not None else None
        return {
            "objective": study.options.objective,
            "sampler": study.options.sampler,
            "limits": to_json(study.options.limits),
            "inputs": study.prepared.inputs,
            "threads": study.prepared.threads,
            "pairs": None if comparison is None else comparison.pairs,
            "noise": None if comparison is None else comparison.noise,
            "foreign_cpu": None if comparison is None else comparison.foreign,
            "stolen_cpu": None if comparison is None else comparison.stolen,
            "verdict": self.sentence,
            "notes": self.all_notes(),
        }


def busy(record: Record) -> list[str]:
    """Sentences if the machine was too busy, or the time too short, for many trials."""
    timed = [t.comparison for t in record.trials if t.comparison is not None and t.state is State.COMPLETE]
    poor = [found for found in timed if found.doubt]
    if len(poor) <= len(timed) / 4:
        return []
    few = sum(found.few for found in poor)
    fresh, longer = record.options
    causes = (
        (len(poor) - few, "The machine was too busy to measure well", f"Run it again with {fresh} when it is quiet."),
        (few, "Few pairs were measured in the time for them", f"Give it more: {longer}, and a longer budget if it has one."),
    )
    return [
        f"{why}: {count} of {len(timed)} ratios are known to no better than {UNRELIABLE:.0%}. {way_out}"
        for count, why, way_out in causes
        if count
    ]


def speed_ups(rungs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table column of speed-ups with its head, padded to one width."""
    column = ["speed-up", *map(_times, rungs)]
    width = max(22, *map(len, column))
    return [f"{each:<{width}}" for each in column]


def _times(rung: Mapping[str, Any]) -> str:
    found = rung["speedup"]
    if found["value"] is None:
        return "-"
    return KEPT_SPEEDUP if is_kept_original(rung) else Interval(**found).times()


def _line(rung: Mapping[str, Any], times: str, share: bool) -> str:
    latency, drop = rung["latency_ms"]["median"], rung["drop"]
    ms = "-" if latency is None else f"{latency:.3g} ms"
    score = "-" if rung["score"]["value"] is None else f"{rung['score']['value']:.4f}"
    shown = {name: "-" if value is None else f"{value:.2%}" if share else f"{value:.3g}" for name, value in drop.items()}
    lost = "-" if drop["value"] is None else f"{shown['value']} ({shown['upper']})"
    return f"{rung['rung']:<11} {times} {ms:>10} {score:>8} {lost:>18}  {rung['recipe']}"
