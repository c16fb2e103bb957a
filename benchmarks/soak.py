"""`trimtab serve` under load for a long time: does its memory grow, does it fail a request?

    make soak                                                # 20 minutes
    python benchmarks/soak.py --time 4m --json soak.json

Serves an MLP of 2 million parameters with one instance. Finds the highest rate of an open loop (requests come at random times
and do not wait for answers) that keeps a p99 of 50 ms, then offers 70% of it in stretches of 15 s. Memory is what the processes
of the server share with no other process; its growth is the slope of a line through the stretches after the first fifth, times
the whole time. Targets: growth below 2%, no request that fails. The exit status is 1 if a target is missed.

A virtual machine may stand still. If the client itself sends a request late by a quarter of a second or more, the requests of
that time arrive at once, and a queue of 256 refuses some with 503. The refusals of such a stretch are counted apart, and the
line may have a step there, because the memory of the full queue stays with the process. With too few other stretches the growth
is not a number, which misses the target.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import numpy as np
import psutil
from serving import free_port, prepare, serving

from trimtab._internal.serialization import write_json
from trimtab._internal.units import seconds
from trimtab.hardware.environment import Environment
from trimtab.measure.host import other_load
from trimtab.serve.load_test import STALL_S, load_test

SHARE, STRETCH_S, P99_S, GROWTH = 0.7, 15.0, 0.05, 0.02
"""Share of the capacity that is offered, seconds of a stretch, p99 of the capacity, and largest growth of the memory."""


def memory_mb(process: psutil.Process) -> float:
    """Memory of a process and its children that they share with no other process, in MB."""
    return sum(one.memory_full_info().uss for one in (process, *process.children(recursive=True))) / 1e6


def memory_growth(rows: Sequence[Mapping[str, float]], whole: float) -> float:
    """The slope of a line through the memory after the first fifth of the time, times the time ``whole``, as a share of the
    memory; the line has a step where the machine stood still. Not a number if too few other stretches are left for a slope."""
    settled = [row for row in rows if row["s"] >= whole / 5] if len(rows) > 4 else rows
    steps = [[float(row["s"] >= stood["s"]) for row in settled] for stood in settled[1:] if stood["latest_s"] >= STALL_S]
    columns = [[row["s"] for row in settled], [1.0] * len(settled), *steps]
    if len(settled) < len(columns) + bool(steps):
        return float("nan")
    slope = np.linalg.lstsq(np.array(columns).T, np.array([row["mb"] for row in settled]), rcond=None)[0][0]
    return float(slope) * whole / settled[0]["mb"]


def main() -> int:
    """Serve, load, and print a verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", default="20m", help="how long, such as 4m")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    given = parser.parse_args()
    whole, environment = seconds(given.time, "--time"), Environment.capture()
    print(f"{environment.cpu}, {environment.usable_cores} CPUs; others use {other_load()}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        prepare("mlp", folder)
        address = f"http://127.0.0.1:{(port := free_port())}"
        words = [sys.executable, "-m", "trimtab", "serve", f"mlp={folder / 'artifact'}", "--instances", "1", "--threads", "1"]
        want = json.loads((folder / "want.json").read_text())
        with serving(
            [*words, "--port", str(port), "--no-grpc"],
            f"{address}/v2/models/mlp/infer",
            folder / "trimtab.json",
            want,
            folder / "log",
        ) as process:
            most = load_test(address, p99_s=P99_S, seconds=3.0)
            if most is None:
                sys.exit("The server keeps no rate.")
            rate, rows = SHARE * most.rate, list[dict[str, float]]()
            print(f"capacity {most.rate:,.0f} requests/s at a p99 of {P99_S * 1e3:.0f} ms; offered {rate:,.0f}/s", flush=True)
            start = time.monotonic()
            while (now := time.monotonic() - start) < whole:
                found = load_test(address, rate=rate, seconds=min(STRETCH_S, max(whole - now, 1.0)))
                assert found is not None
                row = {"s": time.monotonic() - start, "mb": memory_mb(process), "sent": found.sent, "ok": found.ok}
                row |= {"latest_s": found.latest_s, "refused": found.errors.get("503", 0) * (found.latest_s >= STALL_S)}
                rows.append(row | {"p50_ms": found.quantiles[0].ms, "p99_ms": found.quantiles[1].ms})
                line = "  {s:6.0f} s  {mb:7.1f} MB  {ok:,.0f} of {sent:,.0f}  p50 {p50_ms:.2f} ms  p99 {p99_ms:.2f} ms"
                print(line.format(**rows[-1]), flush=True)
    stood, refused = [row for row in rows if row["latest_s"] >= STALL_S], sum(row["refused"] for row in rows)
    growth, failed = memory_growth(rows, whole), sum(row["sent"] - row["ok"] for row in rows) - refused
    print(f"memory grew by {growth:.2%} (at most {GROWTH:.0%}); {failed:.0f} of {sum(row['sent'] for row in rows):,.0f} failed")
    if stood:
        longest = max(row["latest_s"] for row in stood)
        print(f"the machine stood still in {len(stood)} stretches, for up to {longest:.2f} s; {refused:.0f} were refused there")
    if given.json:
        write_json(given.json, {"rate": rate, "growth": growth, "failed": failed, "refused": refused, "stretches": rows})
    return int(not growth < GROWTH or failed > 0)


if __name__ == "__main__":
    sys.exit(main())
