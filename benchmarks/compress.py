"""Whether compression pays: six networks, each against itself as written and against the best without compression.

    python benchmarks/compress.py                                    # all six; about an hour
    python benchmarks/compress.py --quick                            # the three small ones, within about eight minutes
    python benchmarks/compress.py --only resnet mobilenet --json benchmarks/results/compress.json

Each network is optimized twice from nothing, without and with ``--compress auto``, within a drop of the score that was fixed
beforehand. Both results are artifacts, confirmed on test data against the model as written. They are then timed in turns, one
example a call, one thread. Where compression finds nothing better, both ship the same form and the ratio is about 1.

Targets: a geometric mean of at least 1.6x over the best without compression; over as written at least 8x on a CPU with VNNI,
5x without. The exit status is 1 if the first is missed, 0 if not. The intervals are 95%; that of a mean takes the networks as
independent.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from trimtab._internal.serialization import write_json
from trimtab.hardware.environment import Environment
from trimtab.measure.host import others

HERE = pathlib.Path(__file__).resolve().parent
DROPS = {"digits": "2%", "recurrent": "2%", "tabular": "3%", "resnet": "2%", "mobilenet": "2%", "minilm": "4%"}
"""Largest drop of the score, by workload: what its test split can decide."""
QUICK = ("digits", "recurrent", "tabular")
PLAIN_S, COMPRESSED_S, TIMED_S = 240.0, 600.0, 20.0
QUICK_PLAIN_S, QUICK_COMPRESSED_S, QUICK_TIMED_S = 45.0, 80.0, 6.0
TARGET, VNNI, NO_VNNI = 1.6, 8.0, 5.0
STEPS = ("prune_channels", "prune_units", "drop_layers", "fake_quant", "student")
"""Passes of compressed forms."""

Ratio = dict[str, float]


def run(*words: str) -> dict[str, Any]:
    """The JSON that a trimtab command prints."""
    ended = subprocess.run([sys.executable, "-m", "trimtab", *words, "--json"], capture_output=True, text=True)
    if not ended.stdout:
        sys.exit(f"trimtab {' '.join(words)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def optimized(name: str, budget_s: float, out: pathlib.Path, *options: str) -> dict[str, Any]:
    """What a search of ``budget_s`` seconds found."""
    reference = f"{HERE / 'compress_workloads.py'}:{name}"
    words = ["--max-drop", DROPS[name], "--budget", f"{budget_s:g}s", "--out", str(out), "--fresh", *options]
    return run("optimize", reference, *words)


def case(name: str, scratch: pathlib.Path, *, quick: bool) -> dict[str, Any]:
    """The figures of one workload."""
    plain_s, compressed_s, timed_s = (
        (QUICK_PLAIN_S, QUICK_COMPRESSED_S, QUICK_TIMED_S) if quick else (PLAIN_S, COMPRESSED_S, TIMED_S)
    )
    plain = optimized(name, plain_s, scratch / f"{name}-plain")
    smaller = optimized(name, compressed_s, scratch / f"{name}-compressed", "--compress", "auto")
    tried = [each for each in smaller["trials"] if each["state"] != "SKIPPED" and any(step in each["recipe"] for step in STEPS)]
    row: dict[str, Any] = {"workload": name, "limit": DROPS[name], "tried": len(tried)}
    for side, found in (("plain", plain), ("compressed", smaller)):
        best = found["best"]
        row[side] = None if best is None else {key: best[key] for key in ("recipe", "speedup", "drop", "size_mb")}
    if plain["artifact"] is None or smaller["artifact"] is None:
        return row | {"ratio": None}
    words = (smaller["artifact"], "--vs", plain["artifact"], "--trust", "--time", f"{timed_s:g}s")
    return row | {"ratio": run("measure", *words)["comparison"]["ratio"]}


def shown(ratio: Ratio | None) -> str:
    """A ratio with its interval."""
    return "not measured" if ratio is None else f"{ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def mean(ratios: Sequence[Ratio]) -> Ratio | None:
    """The geometric mean of independent ratios with its interval; ``None`` without ratios."""
    if not ratios:
        return None
    middle = sum(math.log(each["value"]) for each in ratios) / len(ratios)
    half = math.sqrt(sum((math.log(each["high"] / each["low"]) / 2) ** 2 for each in ratios)) / len(ratios)
    return {"value": math.exp(middle), "low": math.exp(middle - half), "high": math.exp(middle + half)}


def told(row: dict[str, Any]) -> str:
    """One workload in three lines."""
    lines = [f"{row['workload']:10} limit {row['limit']}; compressed over the best without: {shown(row['ratio'])}"]
    for side in ("plain", "compressed"):
        if (found := row[side]) is None:
            lines.append(f"    {side:10} nothing keeps the limits")
            continue
        drop = found["drop"]["upper"]
        lost = "" if drop is None else f", drop at most {drop:.4f}"
        lines.append(f"    {side:10} {shown(found['speedup'])} as written{lost}: {found['recipe']}")
    if (ratio := row["ratio"]) is not None and ratio["low"] <= 1.0:
        tried = (
            f"of {row['tried']} compressed forms" if row["tried"] else "the budget was over before a compressed form was tried"
        )
        lines.append(
            f"    compression does not surely pay here: {tried}"
            + " none is surely faster within the limit" * bool(row["tried"])
        )
    return "\n".join(lines)


def main() -> int:
    """Run the workloads and print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small networks, with short budgets")
    parser.add_argument("--only", nargs="+", choices=sorted(DROPS), help="these networks")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    given = parser.parse_args()
    names, machine, busy = given.only or (QUICK if given.quick else tuple(DROPS)), Environment.capture(), others()
    vnni = any("vnni" in name for name in machine.isa)
    print(f"{machine.cpu}, {'with' if vnni else 'without'} VNNI; others: {busy}", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            rows.append(case(name, pathlib.Path(scratch), quick=given.quick))
            print(told(rows[-1]), flush=True)
    over_plain = mean([row["ratio"] for row in rows if row["ratio"] is not None])
    over_written = mean([row["compressed"]["speedup"] for row in rows if row["compressed"] is not None])
    wanted = VNNI if vnni else NO_VNNI
    print(f"geometric mean over the best without compression: {shown(over_plain)}; target {TARGET}x")
    print(f"geometric mean over as written: {shown(over_written)}; target {wanted:g}x on this CPU")
    if given.json:
        write_json(given.json, {"machine": machine, "vnni": vnni, "others": busy, "rows": rows, "over_plain": over_plain})
    return 0 if over_plain is not None and over_plain["value"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
