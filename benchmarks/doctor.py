"""What ``trimtab doctor``, ``tune`` and ``run`` find and gain on scripts whose cause of slowness is known.

    python benchmarks/doctor.py                                    # all of examples/scripts; half an hour on two quiet cores
    python benchmarks/doctor.py --each 4m --rounds 4               # narrower intervals
    python benchmarks/doctor.py --only gpt_chars,ring_gan --json doctor.jsonl
    python benchmarks/doctor.py --json doctor.jsonl                # goes on with what the file lacks, or has as failed
    python benchmarks/doctor.py --json doctor.jsonl --only ""      # measures nothing, prints the table and the targets

``examples/scripts/causes.toml`` says what was planted in each script; ``by_hand/NAME.diff`` removes it. Per script ``trimtab
doctor --json`` and ``trimtab tune --json`` run with three tenths of ``--each`` as their budget. Then the script as written, its
edit by hand and ``trimtab run`` make the same steps in fresh processes. One process runs at a time, for a quarter of a second;
the others are stopped. A process is timed from the first to the last line that it prints, so that start-up does not count.
Rounds of two runs go on while ``--each`` lasts, up to ``--rounds``. The interval is Student's t on the logarithms of the ratios
of quarters of the runs. Where ``tune`` keeps nothing, the script runs as written and is not timed again.

Printed per script: the check that is named first, the gain that it predicts (for advice, its measured ceiling) against that of
the edit, the time that ``trimtab run`` saves as a share of what the edit saves, the losses that ``tune`` compared and how far
the numbers that the script prints differ under ``trimtab run``. For scripts whose cause cannot be removed from outside, the
measured gain of the patch that ``trimtab doctor --write`` makes; for scripts with nothing wrong, every gain that is claimed.

Targets: the cause is named first in 15 of 17, a prediction is within 10% of the edit in 90%, no gain is claimed for a sound
script, ``run`` saves 80% of what the edit saves in 7 of 8 scripts whose cause can be removed from outside, the losses stay
under ``run``, and no script gets slower than 0.98. Shares are applied to the scripts that were measured. The exit status is 1
if a target is missed, 0 if not. ``--json`` appends one line per script as soon as it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

from trimtab._internal.serialization import from_json, to_json
from trimtab._internal.units import seconds
from trimtab.core.diagnosis import LOSSES_STAY
from trimtab.core.measurement import Interval
from trimtab.hardware.environment import Environment
from trimtab.measure.host import Host, foreign, other_load
from trimtab.measure.quantiles import t_quantile

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent / "examples" / "scripts"
NAMED, NEAR, PREDICTED, OF_HAND, SAVED, SLOWEST = 15 / 17, 0.10, 0.9, 7 / 8, 0.8, 0.98
CLAIM = 1.05
"""Speed-up from which on a gain counts as claimed for a script with nothing wrong."""
TOOL = 0.3
"""Share of the time of a script for ``doctor``, and for ``tune``."""
TURN_S = 0.25
"""Seconds that a side runs at a time."""
PARTS = 4
"""Parts of a run that are compared."""
DISTURBED, SAME = 0.1, 1e-2
"""Foreign CPU share above which a row is marked, and relative difference up to which printed numbers are the same."""
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


def read_scripts() -> dict[str, Script]:
    """All scripts of ``causes.toml``, by name."""
    table = tomllib.loads((SCRIPTS / "causes.toml").read_text(encoding="utf-8"))["script"]
    return {row["name"]: from_json(Script, row) for row in table}


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

    def command(self) -> list[str]:
        """The words of the command line."""
        return [*self.prefix, *self.script.command, *(["--"] if self.dashes else []), *self.script.arguments()]


class Run:
    """A fresh process of a side, with its children. It is stopped by a signal whenever another side has its turn."""

    def __init__(self, side: Side) -> None:
        self._side, self._log = side, tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by end)
        self._lock, self._ran, self._resumed = threading.Lock(), 0.0, time.perf_counter()
        self._lines: list[str] = []
        self._times: list[float] = []
        """Seconds that the process had run when it printed each line."""
        self._process = subprocess.Popen(
            side.command(), cwd=side.folder, env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._signal(signal.SIGSTOP)

    @property
    def progress(self) -> tuple[int, float]:
        """Lines printed, and seconds run."""
        return len(self._lines), self._ran

    def turn(self) -> bool:
        """Run for :data:`TURN_S`; returns whether the process goes on."""
        with self._lock:
            self._resumed = time.perf_counter()
        self._signal(signal.SIGCONT)
        try:
            self._process.wait(TURN_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGSTOP)
            with self._lock:
                self._ran += time.perf_counter() - self._resumed
            return True
        return False

    def seconds(self) -> list[float]:
        """Seconds that the process ran between the first and the last line that the script printed, in :data:`PARTS` parts.

        Every script prints a line every some steps, so start-up does not count; the lines end the same steps on all sides.
        """
        words = " ".join(self._side.command())
        self._reader.join()
        if code := self._process.wait():
            self._log.seek(0)
            raise RunError(f"{words} ended with {code}: {self._log.read()[-600:]}")
        self._side.printed = "".join(self._lines)
        if len(self._times) < 2:
            raise RunError(f"{words} printed {len(self._times)} lines: {self._side.printed}")
        last = len(self._times) - 1
        ends = [self._times[i * last // min(PARTS, last)] for i in range(min(PARTS, last) + 1)]
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def end(self) -> None:
        """Kill the process and its children."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            now = time.perf_counter()
            with self._lock:
                self._times.append(self._ran + now - self._resumed)
            self._lines.append(line)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def interleaved(sides: Sequence[Side]) -> list[list[float]]:
    """The seconds of a fresh process of each side. They run in turns of :data:`TURN_S`, one at a time; the side whose script is
    least far has the next turn, so that a machine that changes its speed disturbs all sides alike."""
    with contextlib.ExitStack() as stack:
        runs = list[Run]()
        for side in sides:
            runs.append(Run(side))
            stack.callback(runs[-1].end)
        going = list(runs)
        while going:
            run = min(going, key=lambda each: each.progress)
            if not run.turn():
                going.remove(run)
        return [run.seconds() for run in runs]


def in_turns(written: Side, rivals: Sequence[Side], rounds: int, until: float) -> list[Interval]:
    """How many times as fast each of ``rivals`` is as ``written``: two interleaved runs in a round, and at least one round."""
    times: dict[int, list[float]] = {id(side): [] for side in (written, *rivals)}
    for done in range(rounds):
        begun = time.monotonic()
        for order in (1, -1):
            sides = [written, *rivals][::order]
            for side, parts in zip(sides, interleaved(sides), strict=True):
                times[id(side)] += parts
        if done + 1 < rounds and 2 * time.monotonic() - begun > until:
            break
    return [_ratio(times[id(written)], times[id(side)]) for side in rivals]


def _ratio(written: Sequence[float], rival: Sequence[float]) -> Interval:
    """How many times as fast the rival is, from the seconds of the same parts of both."""
    value = math.log(sum(written) / sum(rival))
    logs = [math.log(a / b) for a, b in zip(written, rival, strict=True)]
    half = t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(value), math.exp(value - half), math.exp(value + half))


def drift(first: str, second: str) -> float | None:
    """Largest relative difference of the numbers with a fraction in two outputs; ``None`` if there are none or not as many."""
    left, right = ([float(number) for number in NUMBER.findall(text)] for text in (first, second))
    if not left or len(left) != len(right):
        return None
    return max(abs(a - b) / max(abs(a), abs(b), 1e-3) for a, b in zip(left, right, strict=True))


def trimtab(command: str, script: Script, folder: pathlib.Path, budget_s: float, *more: str) -> dict[str, Any]:
    """The JSON that ``trimtab doctor`` or ``trimtab tune`` prints for the script with its own defaults."""
    words = [sys.executable, "-m", "trimtab", command, "--json", "--budget", f"{budget_s:g}s", *more, *script.command]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    try:
        found: dict[str, Any] = json.loads(ended.stdout)
    except json.JSONDecodeError:
        raise RunError(f"{' '.join(words[2:])} ended with {ended.returncode}: {ended.stderr[-600:]}") from None
    return found


@dataclasses.dataclass(kw_only=True)
class Claim:
    """A finding of ``trimtab doctor``."""

    rule: str
    where: str | None
    gain: Interval | None
    losses: str
    most: Interval | None


@dataclasses.dataclass(kw_only=True)
class Row:
    """What was found for one script."""

    script: Script
    conditions: dict[str, Any] = dataclasses.field(default_factory=dict)
    hand: Interval | None = None
    """Speed of the edit by hand over that of the script as written."""
    findings: list[Claim] = dataclasses.field(default_factory=list)
    score: int | None = None
    patch: str | None = None
    """Gain of the patch of ``doctor --write``, or why there is none."""
    kept: dict[str, Any] | None = None
    """Settings that ``tune`` kept; ``None`` if it did not run."""
    losses: str | None = None
    """As ``tune`` compared them with the settings together."""
    tuned: Interval | None = None
    """Speed of ``trimtab run`` over that of the script as written."""
    drift: float | None = None
    foreign: float | None = None
    seconds: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def named(self) -> Claim | None:
        """The first finding, unless it says that nothing is wrong."""
        return self.findings[0] if self.findings and self.findings[0].rule != "healthy" else None

    @property
    def right(self) -> bool:
        """Whether the planted cause is named first."""
        return self.named is not None and self.named.rule in self.script.checks

    @property
    def predicted(self) -> Interval | None:
        """Of the first finding: its gain, else the measured ceiling of its advice."""
        return None if self.named is None else self.named.gain or self.named.most

    @property
    def off(self) -> float | None:
        """Relative error of the prediction, where the cause was named first and has one."""
        if self.hand is None or self.predicted is None or not self.right:
            return None
        return self.predicted.value / self.hand.value - 1

    @property
    def claimed(self) -> list[str]:
        """Gains that are claimed for a script with nothing wrong. What changes the losses is another training, and no claim."""
        same = [f for f in self.findings if f.gain and f.losses in LOSSES_STAY]
        sure = [f"{f.rule} {f.gain.value:.2f}x" for f in same if f.gain and f.gain.low > 1 and f.gain.value >= CLAIM]
        return [] if self.script.checks else [*sure, *(["tune"] if self.tuned and self.tuned.value >= CLAIM else [])]

    @property
    def saved(self) -> float | None:
        """The time that ``trimtab run`` saves as a share of what the edit by hand saves."""
        if self.hand is None or self.kept is None or self.hand.value <= 1:
            return None
        return (1 - 1 / self.tuned.value) / (1 - 1 / self.hand.value) if self.tuned else 0.0

    @property
    def parity(self) -> bool | None:
        """Whether the losses stayed under ``trimtab run``; ``None`` if it did not run, or runs as written."""
        if self.tuned is None:
            return None
        return self.losses in LOSSES_STAY and (self.drift is None or self.drift <= SAME)

    def line(self) -> str:
        """The row of the table."""

        def ratio(found: Interval | None) -> str:
            return "-" if found is None else f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})"

        mark = "" if self.score is None or not self.script.checks else "yes " if self.right else "NO "
        ceiling = "at most " if self.named is not None and self.named.gain is None and self.named.most is not None else ""
        patch = [f"patch {self.patch}"] if self.patch else []
        cells = [
            self.script.name,
            self.script.cause[:37] or "nothing wrong",
            ratio(self.hand),
            mark + (self.named.rule if self.named else "-"),
            ceiling + ratio(self.predicted),
            "-" if self.off is None else f"{self.off:+.0%}",
            "as written" if self.kept is not None and not self.kept else ratio(self.tuned),
            "-" if self.saved is None else f"{self.saved:.0%}",
            f"{self.losses or '-'}{'' if self.drift is None else f', {self.drift:.0e}'}",
            ("(noisy) " if (self.foreign or 0) > DISTURBED else "") + "; ".join([*self.claimed, *patch, *self.problems])[:200],
        ]
        return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


WIDTHS = (19, 38, 18, 26, 26, 6, 18, 6, 22, 0)
COLUMNS = ("script", "planted", "edit by hand", "named first", "predicted", "off", "tune + run", "of it", "losses, printed", "")
HEAD = " ".join(f"{name:<{width}}" for name, width in zip(COLUMNS, WIDTHS, strict=True)).rstrip()


def measure(script: Script, asked: argparse.Namespace, scratch: pathlib.Path) -> Row:
    """Everything about one script, within about ``asked.each`` seconds."""
    begun, host, row = time.monotonic(), Host({os.getpid()}), Row(script=script)
    before, children_s = host.snapshot(), ended_children_s()
    written, rivals = Side(script, script.copied(scratch / "written")), list[Side]()
    try:
        if not asked.only_by_hand:
            folder = script.copied(scratch / "doctor")
            patch = [] if script.outside or not script.checks else ["--write", str(scratch / "patch.diff")]
            diagnosed(row, trimtab("doctor", script, folder, TOOL * asked.each, *patch))
        if not asked.only_by_hand and not asked.without_tune:
            folder = script.copied(scratch / "tuned")
            found = trimtab("tune", script, folder, TOOL * asked.each)
            row.kept = {name: value for name, value in found["kept"].items() if value not in (None, False, {}, [])}
            row.losses = found["confirmed"]["losses"] if found["confirmed"] and row.kept else None
            rivals += [Side(script, folder, (sys.executable, "-m", "trimtab", "run"), dashes=True)] if row.kept else []
        if script.checks:
            rivals.append(Side(script, script.copied(scratch / "edited", edited=True)))
        ratios = in_turns(written, rivals, asked.rounds, begun + asked.each) if rivals else []
        if script.checks:
            row.hand = ratios.pop()
        if ratios:
            row.tuned, row.drift = ratios[0], drift(written.printed, rivals[0].printed)
    except RunError as error:
        row.problems.append(" ".join(str(error).split()))
    elapsed_s, after = time.monotonic() - begun, host.snapshot()
    if (share := foreign(before, after)) is not None and after is not None:
        row.foreign = max(0.0, share - (ended_children_s() - children_s) / (elapsed_s * after.cpus))
    row.seconds = round(elapsed_s, 1)
    return row


def ended_children_s() -> float:
    """CPU time of the processes that ended, which a snapshot of the running ones does not hold."""
    times = os.times()
    return times.children_user + times.children_system


def diagnosed(row: Row, found: dict[str, Any]) -> None:
    """Fill in what ``trimtab doctor`` found."""
    names = [field.name for field in dataclasses.fields(Claim)]
    row.findings = [from_json(Claim, {name: finding[name] for name in names}) for finding in found["findings"]]
    row.score = found["score"]["total"]
    if (patch := found["patch"]) is not None:
        gain = patch["gain"]
        row.patch = f"{gain['value']:.2f}x, losses {patch['losses']}" if gain else patch["reason"]


def summary(rows: list[Row]) -> tuple[list[str], bool]:
    """Sentences about each target, and whether all of them are met."""
    lines, good = [], True

    def target(name: str, share: float, of: list[Row], met: Callable[[Row], bool], shown: Callable[[Row], object]) -> None:
        nonlocal good
        short, needed = [row for row in of if not met(row)], math.floor(share * len(of) + 1e-9)
        passed = len(of) - len(short) >= needed
        good &= passed
        if of:
            others_ = "; not " + ", ".join(f"{row.script.name} ({shown(row)})" for row in short) if short else ""
            verdict = "PASS" if passed else "MISSED"
            lines.append(f"{verdict:<7} {name}: {len(of) - len(short)} of {len(of)}, target {needed}{others_}")

    seen = [row for row in rows if row.score is not None]
    for kind in ("development", "held out"):
        planted = [row for row in seen if row.script.checks and row.script.set == kind]
        target(f"cause named first, {kind}", NAMED, planted, lambda r: r.right, lambda r: r.named.rule if r.named else "-")
    near = [row for row in seen if row.off is not None]
    target(f"prediction within {NEAR:.0%}", PREDICTED, near, lambda r: abs(r.off or 0) <= NEAR, lambda r: f"{r.off:+.0%}")
    sound = [row for row in seen if not row.script.checks]
    target("no gain claimed for a sound script", 1.0, sound, lambda r: not r.claimed, lambda r: ", ".join(r.claimed))
    outside = [row for row in rows if row.script.outside and row.saved is not None]
    save = f"tune + run save {SAVED:.0%} of what the edit saves"
    target(save, OF_HAND, outside, lambda r: (r.saved or 0) >= SAVED, lambda r: f"{r.saved:.0%}")
    inside = [row for row in seen if row.script.checks and not row.script.outside]
    told = [row.script.name for row in inside if row.patch]
    lines += (
        [f"        a patch for {len(told)} of {len(inside)} whose cause needs an edit: {', '.join(told)}"] if inside else []
    )
    timed = [row for row in rows if row.tuned is not None]
    target("losses stay under run", 1.0, timed, lambda r: r.parity is True, lambda r: f"{r.losses}, {r.drift}")
    target(
        f"not slower than {SLOWEST}", 1.0, timed, lambda r: not r.tuned or r.tuned.high >= SLOWEST, lambda r: r.tuned
    )  # fmt: skip
    if failed := [row.script.name for row in rows if row.problems]:
        lines.append(f"FAILED  {', '.join(failed)}")
    return lines, good and not failed


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="some of the scripts, by name, with commas between; empty: none")
    parser.add_argument("--set", choices=("development", "held out"), help="one of the two sets")
    parser.add_argument("--each", default="90s", type=lambda text: seconds(text, "--each"), help="time for a script [90s]")
    parser.add_argument("--rounds", type=int, default=3, help="of turns, at most; one is always made [3]")
    parser.add_argument("--only-by-hand", action="store_true", help="without trimtab: what the edits by hand bring")
    parser.add_argument("--without-tune", action="store_true", help="doctor only")
    parser.add_argument("--json", type=pathlib.Path, help="append figures here, and leave out scripts that are there")
    return parser.parse_args()


def known(path: pathlib.Path | None) -> list[Row]:
    """The rows in ``path``, of each script the last."""
    text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
    rows = [from_json(Row, json.loads(line)) for line in text.splitlines()]
    return list({row.script.name: row for row in rows}.values())


def main() -> int:
    """Measure what was asked for; 1 if a target is missed."""
    asked, environment, scripts = options(), Environment.capture(), read_scripts()
    names = list(scripts) if asked.only is None else [name for name in asked.only.split(",") if name]
    if unknown := set(names) - set(scripts):
        sys.exit(f"no such script: {', '.join(sorted(unknown))}; there are {', '.join(scripts)}")
    rows = known(asked.json)
    done = {row.script.name for row in rows if not row.problems} if asked.only is None else set()
    here = f"{environment.cpu}, {environment.usable_cores} CPUs, {environment.os}"
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    print(f"{here}; {other_load()}; load {os.getloadavg()[0]:.1f}\n{versions}")
    print(f"{asked.each:g} s a script, up to {asked.rounds} rounds of turns in fresh processes\n{HEAD}", flush=True)
    for row in rows:
        print(row.line(), flush=True)
    for script in (scripts[name] for name in names if name not in done):
        if asked.set not in (None, script.set):
            continue
        busy = str(other_load())
        with tempfile.TemporaryDirectory(prefix="doctor-") as scratch:
            row = measure(script, asked, pathlib.Path(scratch))
        row.conditions = {"machine": here, "torch": environment.versions.get("torch"), "each_s": asked.each, "busy": busy}
        rows = [*(each for each in rows if each.script.name != script.name), row]
        print(row.line(), flush=True)
        with asked.json.open("a", encoding="utf-8") if asked.json else contextlib.nullcontext(None) as file:
            if file is not None:
                file.write(json.dumps(to_json(row)) + "\n")
    lines, good = summary(rows)
    print("\n" + "\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
