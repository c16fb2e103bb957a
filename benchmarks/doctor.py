"""What ``trimtab doctor``, ``tune`` and ``run`` find and gain on scripts whose cause of slowness is known.

    python benchmarks/doctor.py                                    # all of examples/scripts; about two hours on two quiet cores
    python benchmarks/doctor.py --set "held out" --json benchmarks/results/doctor.json
    python benchmarks/doctor.py --scripts gpt_chars,ring_gan --quick
    python benchmarks/doctor.py --only-by-hand                     # without trimtab: what the edits by hand bring

``examples/scripts/causes.toml`` says what was planted in each script; ``by_hand/NAME.diff`` removes it. Two sides
make the same steps in turns, A B B A, in fresh processes, and are timed from the first to the last line that the script prints,
so that start-up does not count. The interval is Student's t on the logarithms of the pairs' ratios.

Per script: the edit by hand against the script as written; the check that ``trimtab doctor --json`` names first, and the gain
that it predicts (for advice, its measured ceiling) against that of the edit; for scripts with nothing wrong, every gain that is
claimed; ``trimtab tune`` and then ``trimtab run``, against the script as written, as a share of the time that the edit saves;
and how far the numbers that the script prints differ under ``trimtab run``.

Targets: the cause is named first in 15 of 17, a prediction is within 10% of the edit in 90%, no gain is claimed for a sound
script, ``run`` saves 80% of what the edit saves in 7 of 8 scripts whose cause can be removed from outside, and no script gets
slower than 0.98. Shares are applied to the scripts that were measured. The exit status is 1 if a target is missed, 0 if not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from typing import Any

from trimtab._internal.serialization import to_json, write_json
from trimtab.core.diagnosis import LOSSES_STAY
from trimtab.core.measurement import Interval
from trimtab.hardware.environment import Environment
from trimtab.measure.host import Host, foreign, others
from trimtab.measure.quantiles import t_quantile

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent / "examples" / "scripts"
NAMED, NEAR, PREDICTED, OF_HAND, SAVED, SLOWEST = 15 / 17, 0.10, 0.9, 7 / 8, 0.8, 0.98
DISTURBED = 0.1
NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?")


class RunError(Exception):
    """A command failed; the message holds the end of what it wrote."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A script of ``causes.toml``."""

    name: str
    command: tuple[str, ...]
    set: str
    checks: tuple[str, ...]
    outside: bool
    count: str
    steps: int
    cause: str = ""

    def arguments(self) -> list[str]:
        """What makes the script end after ``steps`` steps."""
        return [f"{self.count}{self.steps}"] if self.count.endswith("=") else [self.count, str(self.steps)]

    def copied(self, folder: pathlib.Path, edited: bool = False) -> pathlib.Path:
        """``folder`` with a copy of all scripts, of this one with the edit by hand."""
        shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__", "runs", "by_hand", "causes.toml"))
        if edited:
            command = ["git", "apply", str(SCRIPTS / "by_hand" / f"{self.name}.diff")]
            subprocess.run(command, cwd=folder, check=True, env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)})
        return folder


def read_scripts() -> list[Script]:
    """All scripts of ``causes.toml``."""
    table = tomllib.loads((SCRIPTS / "causes.toml").read_text(encoding="utf-8"))["script"]
    return [Script(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}) for row in table]


@dataclasses.dataclass
class Side:
    """A command that runs a script, in a folder of its own."""

    script: Script
    folder: pathlib.Path
    prefix: Sequence[str] = (sys.executable,)
    dashes: bool = False
    """Whether ``--`` stands before the script's arguments."""
    printed: str = ""
    """By the last run."""

    def seconds(self) -> float:
        """Wall-clock time of a fresh process between the first and the last line that the script prints.

        Every script prints a line every some steps, so start-up does not count; the lines end the same steps on all sides.
        """
        dashes = ["--"] if self.dashes else []
        command = [*self.prefix, *self.script.command, *dashes, *self.script.arguments()]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            assert process.stdout is not None
            lines, times = [], []
            for line in process.stdout:
                times.append(time.perf_counter())
                lines.append(line)
            if process.wait():
                log.seek(0)
                raise RunError(f"{' '.join(command)} ended with {process.returncode}: {log.read()[-600:]}")
        self.printed = "".join(lines)
        if len(times) < 2:
            raise RunError(f"{' '.join(command)} printed {len(times)} lines: {self.printed}")
        return times[-1] - times[0]


def against(side: Side, rival: Side, rounds: int) -> Interval:
    """How many times as fast ``side`` is as ``rival``: ``rounds`` of A B B A in fresh processes."""
    logs = []
    for _ in range(rounds):
        first, second = rival.seconds(), side.seconds()
        third, fourth = side.seconds(), rival.seconds()
        logs += [math.log(first / second), math.log(fourth / third)]
    half = t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.fmean(logs)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def drift(first: str, second: str) -> float | None:
    """Largest relative difference of the numbers with a fraction in two outputs; ``None`` if there are none or not as many."""
    left, right = ([float(number) for number in NUMBER.findall(text)] for text in (first, second))
    if not left or len(left) != len(right):
        return None
    return max(abs(a - b) / max(abs(a), abs(b), 1e-3) for a, b in zip(left, right, strict=True))


def trimtab(command: str, script: Script, folder: pathlib.Path, budget_s: float) -> dict[str, Any]:
    """The JSON that ``trimtab doctor`` or ``trimtab tune`` prints for the script with its own defaults."""
    words = [sys.executable, "-m", "trimtab", command, "--json", "--budget", f"{budget_s:g}s", *script.command]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    try:
        found: dict[str, Any] = json.loads(ended.stdout)
    except json.JSONDecodeError:
        raise RunError(f"{' '.join(words[2:])} ended with {ended.returncode}: {ended.stderr[-600:]}") from None
    return found


@dataclasses.dataclass
class Row:
    """What was found for one script."""

    script: Script
    hand: Interval | None = None
    """Speed of the edit by hand over that of the script as written."""
    named: str | None = None
    """The check of the first finding."""
    where: str | None = None
    predicted: Interval | None = None
    """Of the first finding: its gain, else the measured ceiling of its advice."""
    ceiling: bool = False
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    score: int | None = None
    tuned: Interval | None = None
    """Speed of ``trimtab run`` over that of the script as written."""
    settings: Any = None
    drift: float | None = None
    foreign: float | None = None
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether the planted cause is named first."""
        return self.named in self.script.checks

    @property
    def off(self) -> float | None:
        """Relative error of the prediction, where the cause was named first and has one."""
        if self.hand is None or self.predicted is None or not self.right:
            return None
        return self.predicted.value / self.hand.value - 1

    @property
    def claimed(self) -> list[str]:
        """Gains that are claimed for a script with nothing wrong. What changes the losses is another training, and no claim."""
        same = [f for f in self.findings if f["gain"] and f["losses"] in LOSSES_STAY]
        sure = [f for f in same if f["gain"]["low"] > 1 and f["gain"]["value"] >= 1.05]
        return [f"{f['rule']} {f['gain']['value']:.2f}x" for f in sure if not self.script.checks]

    @property
    def saved(self) -> float | None:
        """The time that ``trimtab run`` saves as a share of what the edit by hand saves."""
        if self.hand is None or self.tuned is None or self.hand.value <= 1:
            return None
        return (1 - 1 / self.tuned.value) / (1 - 1 / self.hand.value)

    def line(self) -> str:
        """The row of the table."""

        def ratio(found: Interval | None) -> str:
            return "-" if found is None else f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})"

        mark = "" if self.named is None or not self.script.checks else "yes " if self.right else "NO "
        cells = [
            self.script.name,
            self.script.cause[:37] or "nothing wrong",
            ratio(self.hand),
            mark + (self.named or "-"),
            ("at most " if self.ceiling else "") + ratio(self.predicted),
            "-" if self.off is None else f"{self.off:+.0%}",
            ratio(self.tuned),
            "-" if self.saved is None else f"{self.saved:.0%}",
            "-" if self.drift is None else f"{self.drift:.0e}",
            ("(noisy) " if (self.foreign or 0) > DISTURBED else "") + "; ".join([*self.claimed, *self.problems])[:200],
        ]
        return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


WIDTHS = (19, 38, 18, 26, 26, 6, 18, 6, 7, 0)
COLUMNS = ("script", "planted", "edit by hand", "named first", "predicted", "off", "tune + run", "of it", "losses", "")
HEAD = " ".join(f"{name:<{width}}" for name, width in zip(COLUMNS, WIDTHS, strict=True)).rstrip()


def measure(script: Script, asked: argparse.Namespace, scratch: pathlib.Path) -> Row:
    """Everything about one script."""
    row, rounds = Row(script), 1 if asked.quick else asked.rounds
    host = Host({os.getpid()})
    before = host.snapshot()
    written = Side(script, script.copied(scratch / "written"))
    try:
        if script.checks and not asked.without_by_hand:
            row.hand = against(Side(script, script.copied(scratch / "edited", edited=True)), written, rounds)
        if not asked.only_by_hand:
            diagnosed(row, trimtab("doctor", script, script.copied(scratch / "doctor"), asked.budget))
        if not asked.only_by_hand and not asked.without_tune:
            tuned(row, written, scratch / "tuned", asked.budget, rounds)
    except RunError as error:
        row.problems.append(str(error))
    row.foreign = foreign(before, host.snapshot())
    return row


def diagnosed(row: Row, found: dict[str, Any]) -> None:
    """Fill in what ``trimtab doctor`` found."""
    row.findings, row.score = found["findings"], found["score"]["total"]
    if row.findings:
        first = row.findings[0]
        row.named, row.where, row.ceiling = first["rule"], first["where"], first["gain"] is None and first["most"] is not None
        gain = first["gain"] or first["most"]
        row.predicted = None if gain is None else Interval(**gain)


def tuned(row: Row, written: Side, folder: pathlib.Path, budget_s: float, rounds: int) -> None:
    """Let ``trimtab tune`` search, then time ``trimtab run`` against the script as written."""
    row.settings = trimtab("tune", row.script, row.script.copied(folder), budget_s).get("settings")
    side = Side(row.script, folder, (sys.executable, "-m", "trimtab", "run"), dashes=True)
    row.tuned = against(side, written, rounds)
    row.drift = drift(written.printed, side.printed)


def summary(rows: list[Row]) -> tuple[list[str], bool]:
    """Sentences about each target, and whether all of them are met."""
    lines, good = [], True

    def target(name: str, count: int, of: int, share: float, names: list[str]) -> None:
        nonlocal good
        met = count >= math.floor(share * of + 1e-9)
        good &= met
        if of:
            lines.append(f"{name}: {count} of {of}{'' if met else ', MISSED'}{'; not ' + ', '.join(names) if names else ''}")

    planted = [row for row in rows if row.script.checks and row.score is not None]
    wrong = [f"{row.script.name} ({row.named or 'nothing'})" for row in planted if not row.right]
    target("cause named first", len(planted) - len(wrong), len(planted), NAMED, wrong)
    told = [row for row in planted if row.off is not None]
    far = [f"{row.script.name} ({row.off:+.0%})" for row in told if row.off is not None and abs(row.off) > NEAR]
    target(f"prediction within {NEAR:.0%}", len(told) - len(far), len(told), PREDICTED, far)
    sound = [row for row in rows if not row.script.checks and row.score is not None]
    false = [f"{row.script.name} ({', '.join(row.claimed)})" for row in sound if row.claimed]
    target("no gain claimed for a sound script", len(sound) - len(false), len(sound), 1.0, false)
    outside = [row for row in rows if row.script.outside and row.saved is not None]
    short = [f"{row.script.name} ({row.saved:.0%})" for row in outside if row.saved is not None and row.saved < SAVED]
    target(f"tune + run save {SAVED:.0%} of what the edit saves", len(outside) - len(short), len(outside), OF_HAND, short)
    timed = [row for row in rows if row.tuned is not None]
    slower = [f"{row.script.name} ({row.tuned.value:.2f})" for row in timed if row.tuned and row.tuned.high < SLOWEST]
    target(f"not slower than {SLOWEST}", len(timed) - len(slower), len(timed), 1.0, slower)
    if failed := [row.script.name for row in rows if row.problems]:
        lines.append(f"failed: {', '.join(failed)}")
    return lines, good and not failed


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", default="", help="some of them, by name, with commas between")
    parser.add_argument("--set", choices=("development", "held out"), help="one of the two sets")
    parser.add_argument("--rounds", type=int, default=2, help="of A B B A for each comparison")
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for each doctor and each tune")
    parser.add_argument("--only-by-hand", action="store_true", help="without trimtab")
    parser.add_argument("--without-by-hand", action="store_true", help="without the edits by hand")
    parser.add_argument("--without-tune", action="store_true", help="doctor only")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; 1 if a target is missed."""
    asked, environment, busy = options(), Environment.capture(), others()
    names = asked.scripts.split(",") if asked.scripts else [script.name for script in read_scripts()]
    scripts = {script.name: script for script in read_scripts()}
    if unknown := set(names) - set(scripts):
        sys.exit(f"no such script: {', '.join(sorted(unknown))}; there are {', '.join(scripts)}")
    print(f"{environment.cpu}, {environment.usable_cores} CPUs, {environment.os}; {busy}")
    print(", ".join(f"{name} {version}" for name, version in environment.versions.items()))
    rounds = 1 if asked.quick else asked.rounds
    print(f"{rounds} x A B B A in fresh processes, {asked.budget:g} s a doctor and a tune, load {os.getloadavg()[0]:.1f}")
    print(HEAD, flush=True)
    rows: list[Row] = []
    for script in (scripts[name] for name in names):
        if asked.set in (None, script.set):
            with tempfile.TemporaryDirectory(prefix="doctor-") as scratch:
                rows.append(measure(script, asked, pathlib.Path(scratch)))
            print(rows[-1].line(), flush=True)
            if asked.json:
                derived = ("right", "off", "claimed", "saved")
                figures = [to_json(row) | {name: getattr(row, name) for name in derived} for row in rows]
                conditions = {"rounds": rounds, "budget_s": asked.budget, "environment": to_json(environment)}
                asked.json.parent.mkdir(parents=True, exist_ok=True)
                write_json(asked.json, conditions | {"rows": figures})
    lines, good = summary(rows)
    print("\n" + "\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
