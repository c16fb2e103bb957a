"""Whether a search keeps its budget and its word: beside busy neighbours, with slow data, and an hour later.

    python benchmarks/practical.py --keep runs/practical                       # everything; about eight hours on two cores
    python benchmarks/practical.py --keep runs/practical --parts A --models digits --neighbours 2 --runs 1
    python benchmarks/practical.py --keep runs/practical --parts E --quick     # the shortest piece, two minutes
    python benchmarks/practical.py --keep runs/practical --parts ""            # only the verdicts on what was measured so far

Each piece adds its rows to ``rows.json`` in the folder ``--keep``, so that the parts can be run one after the other. At the end
each line of targets is printed with what was measured for it so far. Run it where nothing else runs: neighbours are made here.
They multiply matrices with two threads each, for 0.4 s on average, with naps of 30 ms between.

A  Searches of 90 s for the digits and an EfficientNet, five times each with 0, 1 and 2 neighbours. Every run ends within 1.2
   times its budget, and in four of five what ships has at least 0.9 times the speed of a reference, timed without neighbours.
   The reference is what a search of 240 s without neighbours finds: with one thread for a run that others left one thread, else
   with all. It is made once and kept.
B  Searches of 120 s where the data takes 20 s to read, and where the weights take 20 s to load: at most two readings, and at
   least six recipes.
C  Twelve models are studied for 3 minutes each.
R  The twelve are timed again an hour after their study: the interval holds the new ratio in ten of them, and the median
   distance is within 5%. ``--after 5m`` times them sooner.
D  ``make demo`` (120 s), ten times with 0 and with 2 neighbours. Without: a figure in every headline, and no interval wider
   than 30%. With: within 1.2 times the budget, and with a winner.
E  The ratio of two models of one thread each, with 0, 1 and 2 neighbours: within 3% of that without neighbours.

The exit status is 1 if a target is missed by what was measured so far, 0 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trimtab._internal.serialization import write_json
from trimtab._internal.units import seconds
from trimtab.hardware.environment import Environment
from trimtab.measure.host import other_load

HERE = pathlib.Path(__file__).resolve().parent
DIGITS = str(HERE.parent / "examples" / "digits.py")
SEARCHED = {"digits": DIGITS, "efficientnet": f"{HERE / 'practical_workloads.py'}:efficientnet"}
SLOW = {name: f"{HERE / 'practical_workloads.py'}:{name}" for name in ("slow_data", "slow_weights")}
NETWORKS = ("digits", "lstm", "mobilenet", "minilm", "resnet50", "bert")
TWELVE = {f"{name}_{batch}": f"{HERE / 'speed_models.py'}:{name}_{batch}" for name in NETWORKS for batch in (1, 16)}
BUDGETS = {"A": 90.0, "B": 120.0, "C": 180.0, "D": 120.0}
REFERENCE_S, AGAIN_S, HOUR_S = 240.0, 20.0, 3600.0
OVER, NEAR, ENOUGH = 1.2, 0.9, 0.8
READINGS, RECIPES = 2, 6
HELD, MEDIAN, WIDTH, RATIO = 10 / 12, 0.05, 0.3, 0.03
RUNS = {"A": 5, "D": 10, "E": 3}

Row = dict[str, Any]


def neighbour() -> None:
    """Use the CPUs until killed."""
    import torch

    torch.set_num_threads(2)
    a = torch.randn(512, 512)
    while True:
        end = time.monotonic() + random.uniform(0.2, 0.6)
        while time.monotonic() < end:
            a = (a @ a).tanh()
        time.sleep(0.03)


class Neighbours:
    """A context with ``count`` busy neighbours."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> None:
        self._running = [subprocess.Popen([sys.executable, __file__, "--neighbour"]) for _ in range(self._count)]
        time.sleep(5.0 if self._count else 0.0)  # until all of them compute

    def __exit__(self, *error: object) -> None:
        for each in self._running:
            each.kill()
            each.wait()


def run(*words: str, **environment: str) -> tuple[dict[str, Any], float]:
    """The JSON that a trimtab command prints, and the seconds that it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "trimtab", *words, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if not ended.stdout:
        sys.exit(f"trimtab {' '.join(words)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return json.loads(ended.stdout), time.monotonic() - began


def search(reference: str, budget_s: float, out: pathlib.Path, *more: str, **environment: str) -> tuple[Row, pathlib.Path]:
    """A search as a person runs it: the facts for its row, and the folder of what it ships."""
    words = ["optimize", reference, "--budget", f"{budget_s:g}s", "--out", str(out), "--fresh", *more]
    found, took = run(*words, **environment)
    row = {"seconds": took, "budget": budget_s, "status": found["status"], "recipes": len(found["trials"])}
    row |= {key: (found["best"] or {}).get(key) for key in ("recipe", "speedup")}
    return row, pathlib.Path(found["artifact"] or out / "artifact")


def threads_of(artifact: pathlib.Path) -> int | None:
    """The number of threads to which the search kept the artifact and the original; ``None`` if it did not."""
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    limit: int | None = manifest["evidence"].get("thread_limit")
    return limit


def speed(artifact: pathlib.Path, rival: str, time_s: float = 8.0, **environment: str) -> float:
    """How many times faster ``artifact`` is than ``rival``."""
    words = ["measure", str(artifact), "--vs", rival, "--trust", "--time", f"{time_s:g}s"]
    return float(run(*words, **environment)[0]["comparison"]["ratio"]["value"])


def reference(name: str, threads: int | None, options: argparse.Namespace) -> pathlib.Path:
    """What a long search without neighbours ships with that number of threads; searched for once."""
    out: pathlib.Path = options.keep / f"reference-{name}-{threads or 'all'}"
    if not (out / "artifact" / "manifest.json").exists():
        given = {} if threads is None else {"THREADS": str(threads)}
        search(f"{HERE / 'practical_workloads.py'}:{name}", options.budget or REFERENCE_S, out, **given)
    return out / "artifact"


def part_a(options: argparse.Namespace) -> Iterator[Row]:
    """Searches beside neighbours."""
    for name in chosen(SEARCHED, options):
        for count in options.neighbours:
            for _ in range(options.runs or RUNS["A"]):
                with Neighbours(count):
                    row, artifact = search(SEARCHED[name], options.budget or BUDGETS["A"], options.keep / f"{name}-search")
                limit = threads_of(artifact)
                row["of_reference"] = speed(artifact, str(reference(name, limit, options)))
                yield {"model": name, "neighbours": count, "threads": limit} | row


def part_b(options: argparse.Namespace) -> Iterator[Row]:
    """Searches on workloads that take long to read."""
    for name in chosen(SLOW, options):
        with tempfile.TemporaryDirectory() as scratch:
            log = pathlib.Path(scratch) / "readings.txt"
            row, _ = search(SLOW[name], options.budget or BUDGETS["B"], options.keep / name, READINGS=str(log))
            yield {"model": name, "readings": len(log.read_text(encoding="utf-8").split())} | row


def part_c(options: argparse.Namespace) -> Iterator[Row]:
    """Studies that part R times again."""
    for name in chosen(TWELVE, options):
        limits = () if name.startswith(("digits", "minilm")) else ("--max-error", "100")  # random weights: see by_hand.py
        row, artifact = search(TWELVE[name], options.budget or BUDGETS["C"], options.keep / name, *limits)
        yield {"model": name, "artifact": str(artifact), "at": time.time()} | row


def part_r(options: argparse.Namespace) -> Iterator[Row]:
    """The studies of part C, timed again."""
    for row in latest(options.rows, "C"):
        if row["model"] not in chosen(TWELVE, options):
            continue
        if (age := time.time() - row["at"]) < options.after:
            print(f"R  {row['model']} was studied {age / 60:.0f} min ago; timed again after {options.after / 60:.0f} min.")
            continue
        ratio = speed(pathlib.Path(row["artifact"]), TWELVE[row["model"]], AGAIN_S)
        yield {"model": row["model"], "ratio": ratio, "speedup": row["speedup"], "minutes": age / 60}


def part_d(options: argparse.Namespace) -> Iterator[Row]:
    """``make demo``."""
    for count in [each for each in options.neighbours if each != 1]:
        for _ in range(options.runs or RUNS["D"]):
            with Neighbours(count):
                row, _ = search(DIGITS, options.budget or BUDGETS["D"], options.keep / "demo", "--max-drop", "2%")
            yield {"neighbours": count} | row


def part_e(options: argparse.Namespace) -> Iterator[Row]:
    """One ratio of one thread, beside neighbours."""
    artifact = reference("digits", 1, options)
    for _ in range(options.runs or RUNS["E"]):
        for count in options.neighbours:
            with Neighbours(count):
                yield {"neighbours": count, "ratio": speed(artifact, DIGITS, OMP_NUM_THREADS="1")}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "A": part_a,
    "B": part_b,
    "C": part_c,
    "R": part_r,
    "D": part_d,
    "E": part_e,
}


def chosen(models: dict[str, str], options: argparse.Namespace) -> list[str]:
    """Those of ``models`` that were asked for."""
    return [name for name in models if options.models is None or name in options.models]


def latest(rows: Sequence[Row], part: str) -> list[Row]:
    """The last row of each model."""
    return list({row["model"]: row for row in rows if row["part"] == part}.values())


def verdicts(rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """Whether each target is met by the rows so far, and the figures."""
    for key in dict.fromkeys((row["model"], row["neighbours"]) for row in rows if row["part"] == "A"):
        found = [row for row in rows if row["part"] == "A" and (row["model"], row["neighbours"]) == key]
        near = sum(row["of_reference"] >= NEAR for row in found)
        name = f"A  {key[0]}, {key[1]} neighbours"
        yield in_time(name, found)
        yield near >= ENOUGH * len(found), f"{name}: within 10% of the reference in {near} of {len(found)}; four of five wanted"
    for row in latest(rows, "B"):
        good = row["readings"] <= READINGS and row["recipes"] >= RECIPES
        figures = f"{row['readings']} readings, {row['recipes']} recipes in {row['seconds']:.0f} s"
        yield good, f"B  {row['model']}: {figures}; at most {READINGS}, at least {RECIPES} wanted"
    if again := [row for row in latest(rows, "R") if row["speedup"] is not None]:
        held = sum(row["speedup"]["low"] <= row["ratio"] <= row["speedup"]["high"] for row in again)
        off = statistics.median(abs(row["ratio"] / row["speedup"]["value"] - 1) for row in again)
        yield (
            held >= HELD * len(again),
            f"R  the interval holds the later ratio in {held} of {len(again)}; ten of twelve wanted",
        )
        yield off <= MEDIAN, f"R  median distance of the later ratio {off:.1%}; at most {MEDIAN:.0%} wanted"
    demos = [row for row in rows if row["part"] == "D"]
    if quiet := [row for row in demos if not row["neighbours"]]:
        spans = [row["speedup"] for row in quiet if row["status"] == "improved" and row["speedup"]]
        widest = max(((each["high"] - each["low"]) / each["value"] for each in spans), default=0.0)
        yield len(spans) == len(quiet), f"D  demo, quiet: a figure in {len(spans)} of {len(quiet)} headlines; all wanted"
        yield bool(spans) and widest <= WIDTH, f"D  demo, quiet: widest interval {widest:.0%}; at most {WIDTH:.0%} wanted"
    if busy := [row for row in demos if row["neighbours"]]:
        won = sum(row["status"] == "improved" for row in busy)
        yield in_time("D  demo, 2 neighbours", busy)
        yield won == len(busy), f"D  demo, 2 neighbours: a winner in {won} of {len(busy)}; all wanted"
    ratios = {count: [row["ratio"] for row in rows if row["part"] == "E" and row["neighbours"] == count] for count in (0, 1, 2)}
    for count in (1, 2):
        if ratios[0] and ratios[count]:
            off = statistics.median(ratios[count]) / statistics.median(ratios[0]) - 1
            yield (
                abs(off) <= RATIO,
                f"E  one thread, {count} neighbours: {off:+.1%} of the quiet ratio; within {RATIO:.0%} wanted",
            )


def in_time(name: str, rows: Sequence[Row]) -> tuple[bool, str]:
    """Whether every run of ``rows`` ended in time."""
    kept, longest = sum(row["seconds"] <= OVER * row["budget"] for row in rows), max(row["seconds"] for row in rows)
    figures = f"within {OVER} times the budget of {rows[0]['budget']:.0f} s in {kept} of {len(rows)}, longest {longest:.0f} s"
    return kept == len(rows), f"{name}: {figures}; all wanted"


def shown(row: Row) -> str:
    """A row as a line."""
    figures = {key: value for key, value in row.items() if value is not None and key not in ("artifact", "at", "conditions")}
    if "speedup" in figures:
        figures["speedup"] = "{value:.2f}x ({low:.2f} to {high:.2f})".format(**figures["speedup"])
    return ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items())


def main() -> int:
    """Run the chosen pieces and print a verdict on each line of targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=pathlib.Path, default=pathlib.Path("runs/practical"), help="folder for rows and studies")
    parser.add_argument("--parts", default="ABCDRE", help="which parts to run")
    parser.add_argument("--models", type=lambda text: text.split(","), help="which models of A, B, C and R")
    parser.add_argument("--neighbours", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1, 2], help="0,1,2")
    parser.add_argument("--runs", type=int, help="runs of each in A, D and E")
    parser.add_argument("--quick", action="store_true", help="one run of each")
    parser.add_argument("--budget", type=lambda text: seconds(text, "--budget"), help="another budget, to try a piece")
    parser.add_argument("--after", type=lambda text: seconds(text, "--after"), default=HOUR_S, help="age of a study for part R")
    parser.add_argument("--neighbour", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.neighbour:
        neighbour()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts names {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if options.models and (unknown := set(options.models) - {*SEARCHED, *SLOW, *TWELVE}):
        parser.error(f"--models names {', '.join(sorted(unknown))}; known are {', '.join([*SEARCHED, *SLOW, *TWELVE])}")
    options.runs = 1 if options.quick else options.runs
    options.keep = options.keep.absolute()
    options.keep.mkdir(parents=True, exist_ok=True)
    file = options.keep / "rows.json"
    options.rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    environment = Environment.capture()
    for part in options.parts:
        conditions = f"{environment.cpu}, {environment.usable_cores} CPUs; {other_load()}"
        print(f"{part}  {conditions}", flush=True)
        for row in PARTS[part](options):
            options.rows.append({"part": part, **row, "conditions": conditions})
            write_json(file, options.rows)
            print(f"{part}  {shown(row)}", flush=True)
    found = list(verdicts(options.rows))
    for good, line in found:
        print(f"{'met   ' if good else 'MISSED'} {line}")
    return 0 if all(good for good, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
