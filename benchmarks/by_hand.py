"""What trimtab picks, against the best that a person gets by calling each runtime by hand, on six models at batch 1 and 16.

Every side runs in a process of its own; two sides take turns, A B B A. By hand, all methods of ``hand_calls.py`` are timed
against the model as written, and the fastest whose outputs stay within the limit is what trimtab's artifact is then timed
against, in fresh processes. The target is 0.95 of by-hand or more on every model.

MiniLM and the digits are held to ``--max-error``, by hand as in trimtab. The models with random weights are not: small errors
grow in them until int8 leaves little of their outputs (0.9 was measured for MobileNetV2), which says nothing about a trained
model. A ratio that was measured while others had more than a tenth of the CPU is marked as noisy, and proves nothing.

    python benchmarks/by_hand.py                                   # everything; about an hour on two quiet cores
    python benchmarks/by_hand.py --models digits,lstm --batch 1 --budget 3m --json benchmarks/results/by_hand.json
    python benchmarks/by_hand.py --only-by-hand --models bert      # without trimtab's search
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

import trimtab
from trimtab._internal.serialization import to_json
from trimtab.core.measurement import Comparison
from trimtab.measure.pairs import DISTURBED, compare
from trimtab.measure.parity import compare_outputs
from trimtab.measure.remote import RemoteRunner, serve
from trimtab.measure.timer import LocalRunner
from trimtab.tensors.structure import unflatten

HERE = pathlib.Path(__file__).resolve().parent
MODELS = ("resnet50", "mobilenet", "bert", "minilm", "lstm", "digits")
TARGET = 0.95
KEY = "BY_HAND_AUTHKEY"
READY_S = 600.0
TRAINED, UNLIMITED = ("minilm", "digits"), 100.0


class SideError(Exception):
    """A side could not be built; the message is the last line that it wrote."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One model at one batch size, and how it is measured."""

    model: str
    batch: int
    threads: int
    seconds: float
    max_error: float
    folder: pathlib.Path

    @contextlib.contextmanager
    def side(self, what: str) -> Iterator[tuple[RemoteRunner, dict[str, Any]]]:
        """A process that holds method ``what``, or the artifact in the folder of that name, ready to be timed; its facts."""
        with tempfile.TemporaryDirectory(prefix="by-hand-") as name:
            folder = pathlib.Path(name)
            command = [sys.executable, __file__, "--serve", what, "--models", self.model, "--batch", str(self.batch)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "TMPDIR": name}
            with (folder / "log.txt").open("wb") as log:
                process = subprocess.Popen(
                    [*command, "--threads", str(self.threads), "--folder", name],
                    stdin=subprocess.PIPE,  # its end tells the side that we are gone
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=name,
                )
            try:
                facts = _facts(process, folder)
                with RemoteRunner(folder / "socket", bytes.fromhex(os.environ[KEY])) as runner:
                    yield runner, facts
            finally:
                process.kill()
                process.communicate()


def _facts(process: subprocess.Popen[bytes], folder: pathlib.Path) -> dict[str, Any]:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "ready.json").exists():
            facts: dict[str, Any] = json.loads((folder / "ready.json").read_text(encoding="utf-8"))
            return facts
        time.sleep(0.05)
    words = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    telling = [word for word in words if "Error" in word] or words or ["it wrote nothing"]
    raise SideError(telling[-1][:200] if process.poll() is not None else "not ready in time")


def hold(what: str, model: str, batch: int, threads: int, folder: pathlib.Path) -> None:
    """Inside a side's process: build it, judge its outputs, and serve its times until killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if pathlib.Path(what).is_dir():
        runner, facts = _artifact(pathlib.Path(what), threads), {}
    else:
        runner, facts = _method(what, model, batch, threads)
    runner.block(3)
    part = folder / "ready.part"
    part.write_text(json.dumps(facts), encoding="utf-8")
    part.rename(folder / "ready.json")
    serve(runner, folder / "socket", bytes.fromhex(os.environ[KEY]))


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def _artifact(path: pathlib.Path, threads: int) -> LocalRunner:
    """The artifact, called as its user calls it: tensors in, tensors out."""
    executable = trimtab.load(path, trust=True)
    leaves = trimtab.open_artifact(path).golden().cases[0].inputs
    args, kwargs = unflatten(executable.signature.input_structure, leaves)
    return LocalRunner(lambda: executable(*args, **kwargs), executable.synchronize)


def _method(what: str, name: str, batch: int, threads: int) -> tuple[LocalRunner, dict[str, Any]]:
    """A method by hand, and how far its outputs are from the model's on data that it was not calibrated with."""
    sys.path.insert(0, str(HERE))
    import hand_calls
    import speed_models

    model, data = speed_models.build(name), speed_models.batches(name, batch, 0)
    held_out = speed_models.batches(name, batch, 1)
    with torch.no_grad():
        reference = [model(*inputs) for inputs in held_out]
    hand = hand_calls.METHODS[what](copy.deepcopy(model), data[0], data, threads)
    exact = what in hand_calls.LOSSLESS
    parity = compare_outputs(reference, [hand.output(inputs) for inputs in held_out], exact=exact)
    return LocalRunner(hand.prepared(data[0])), {"exact": exact, **to_json(parity)}


@dataclasses.dataclass
class Row:
    """What was found for one model at one batch size."""

    model: str
    batch: int
    methods: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    lossless: str | None = None
    by_hand: str | None = None
    recipe: str | None = None
    status: str | None = None
    search_s: float | None = None
    against_hand: Comparison | None = None
    against_written: Comparison | None = None
    problem: str | None = None

    @property
    def noisy(self) -> bool:
        """Whether a comparison that the row shows had to make do with a machine that others used."""
        shown = [found for found in (self.against_hand, self.against_written) if found is not None]
        hand = self.methods.get(self.by_hand or "", {})
        shares = [found.foreign + found.stolen for found in shown] + [hand.get("foreign", 0.0) + hand.get("stolen", 0.0)]
        return max(shares) > DISTURBED

    def line(self) -> str:
        """The row of the table."""
        hand = self.methods.get(self.by_hand or "", {})
        written = next((m["rival_ms"] for m in self.methods.values() if "rival_ms" in m), None)
        cells = [
            f"{self.model}_{self.batch}",
            "-" if written is None else f"{written:.3g} ms",
            "-" if not hand else f"{self.by_hand} {hand['speedup']['value']:.2f}x",
            "-" if self.lossless is None else f"{self.lossless} {self.methods[self.lossless]['speedup']['value']:.2f}x",
            "-" if self.against_written is None else f"{self.against_written.ratio.value:.2f}x",
            "-" if self.against_hand is None else str(self.against_hand.ratio),
            ("(noisy) " if self.noisy else "") + (self.recipe or self.problem or ""),
        ]
        widths = (13, 10, 26, 22, 8, 22, 0)
        return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


HEAD = f"{'model':<13} {'eager':<10} {'by hand, best':<26} {'lossless':<22} {'trimtab':<8} {'trimtab / by hand':<22} recipe"


def by_hand(job: Job, methods: list[str]) -> Row:
    """Every method by hand against the model as written, one after the other."""
    row = Row(job.model, job.batch)
    with job.side("as_written") as (written, _):
        for method in methods:
            row.methods[method] = found = _against(job, method, written)
            speed = f"{found['speedup']['value']:.2f}x" if "speedup" in found else "-"
            error = "" if found.get("centred_error") is None else f", error {found['centred_error']:.2%}"
            print(f"  {job.model}_{job.batch} {method}: {speed}{error} {found.get('reason') or ''}", flush=True)
    sound = {m: f["speedup"]["value"] for m, f in row.methods.items() if f.get("ok") and "speedup" in f}
    exact = {m: speed for m, speed in sound.items() if row.methods[m]["exact"]}
    within = {m: speed for m, speed in sound.items() if (row.methods[m]["centred_error"] or 0) <= job.max_error}
    row.lossless = max(exact, key=exact.__getitem__, default=None)
    row.by_hand = max(within, key=within.__getitem__, default=None)
    return row


def _against(job: Job, method: str, written: RemoteRunner) -> dict[str, Any]:
    try:
        with job.side(method) as (runner, facts):
            found = compare(runner, written, seconds=job.seconds)
    except (SideError, trimtab.TrimtabError) as error:
        return {"reason": f"failed: {error}"}
    figures = {"speedup": to_json(found.ratio), "ms": found.candidate.median, "rival_ms": found.rival.median}
    return {**facts, **figures, "noise": found.noise, "foreign": found.foreign, "stolen": found.stolen}


def with_trimtab(job: Job, row: Row, budget: str) -> None:
    """Let trimtab search, then time its artifact against the best by hand and against the model as written."""
    reference = f"{HERE / 'speed_models.py'}:{job.model}_{job.batch}"
    out = job.folder / f"{job.model}_{job.batch}"
    result = trimtab.optimize(reference, limits=trimtab.Limits(max_error=job.max_error), budget=budget, out=out)
    row.status, row.search_s = result.status, result.seconds
    if result.best is None or result.best.artifact is None:
        row.problem = f"no artifact: {result.sentence}"
        return
    row.recipe = str(result.best.trial.recipe)
    with job.side(str(result.best.artifact.path.resolve())) as (ours, _):
        if row.by_hand is not None:
            with job.side(row.by_hand) as (theirs, _):
                row.against_hand = compare(ours, theirs, seconds=2 * job.seconds, width=0.02)
        with job.side("as_written") as (written, _):
            row.against_written = compare(ours, written, seconds=job.seconds)


def summary(rows: list[Row]) -> str:
    """The table, the geometric means and whether the target is met."""
    lines = [HEAD, *(row.line() for row in rows)]
    ratios = {f"{r.model}_{r.batch}": r.against_hand.ratio.value for r in rows if r.against_hand is not None}
    if noisy := [f"{row.model}_{row.batch}" for row in rows if row.noisy]:
        lines.append(f"others used the CPU while {', '.join(noisy)} was measured; these figures prove nothing, measure again")
    if ratios:
        missed = [name for name, ratio in ratios.items() if ratio < TARGET]
        verdict = f"missed on {', '.join(missed)}" if missed else "met on all that were measured"
        lines.append(f"trimtab / by hand: geometric mean {_geomean(ratios.values()):.3f}; the target of {TARGET} is {verdict}")
    speeds = [row.against_written.ratio.value for row in rows if row.against_written is not None]
    if speeds:
        lines.append(f"trimtab / as written: geometric mean {_geomean(speeds):.2f}")
    hands = [row.methods[row.by_hand]["speedup"]["value"] for row in rows if row.by_hand is not None]
    if hands:
        lines.append(f"by hand / as written: geometric mean {_geomean(hands):.2f}")
    return "\n".join(lines)


def _geomean(values: Any) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usable = trimtab.Environment.capture().usable_cores
    parser.add_argument("--models", default=",".join(MODELS), help="some of " + ", ".join(MODELS))
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--methods", default="", help="by hand; all if not said")
    parser.add_argument("--threads", type=int, default=usable, help="of every side by hand [usable cores]")
    parser.add_argument("--seconds", type=float, default=8.0, help="most time for one comparison")
    parser.add_argument("--max-error", type=float, default=0.10, help="largest centred error of a trained model")
    parser.add_argument("--budget", default="5m", help="of each of trimtab's searches")
    parser.add_argument("--only-by-hand", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/by_hand"), help="where studies are kept")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; 1 if a ratio misses the target."""
    asked = options()
    if asked.serve:
        hold(asked.serve, asked.models, int(asked.batch), asked.threads, asked.folder)
        return 0
    os.environ.setdefault(KEY, secrets.token_hex(32))
    sys.path.insert(0, str(HERE))
    import hand_calls

    environment = trimtab.Environment.capture()
    methods = asked.methods.split(",") if asked.methods else [m for m in hand_calls.METHODS if m != "as_written"]
    print(f"{environment.cpu}, {asked.threads} threads by hand, at most {asked.seconds:.0f} s a comparison, {environment.os}")
    print(", ".join(f"{name} {version}" for name, version in environment.versions.items()), flush=True)
    rows: list[Row] = []
    for name in asked.models.split(","):
        for batch in map(int, asked.batch.split(",")):
            max_error = asked.max_error if name in TRAINED else UNLIMITED
            job = Job(name, batch, asked.threads, asked.seconds, max_error, asked.folder)
            rows.append(by_hand(job, methods))
            if not asked.only_by_hand:
                try:
                    with_trimtab(job, rows[-1], asked.budget)
                except (SideError, trimtab.TrimtabError) as error:
                    rows[-1].problem = f"failed: {error}"
            print(rows[-1].line(), flush=True)
            if asked.json:
                asked.json.parent.mkdir(parents=True, exist_ok=True)
                found = {"environment": to_json(environment), "threads": asked.threads, "max_error": asked.max_error}
                asked.json.write_text(json.dumps({**found, "rows": to_json(rows)}, indent=1) + "\n", encoding="utf-8")
    print()
    print(summary(rows))
    return int(any(r.against_hand is not None and r.against_hand.ratio.value < TARGET for r in rows))


if __name__ == "__main__":
    sys.exit(main())
