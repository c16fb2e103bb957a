"""Whether compression pays: six networks, each against itself as written and against the best without compression.

    python benchmarks/compress.py                          # all six, three to fourteen minutes each on a quiet machine
    python benchmarks/compress.py --only resnet mobilenet  # these; each result is appended to benchmarks/results/compress.jsonl
    python benchmarks/compress.py --only digits --peers    # and the peers, in the same run
    python benchmarks/compress.py --summary                # the means over the latest result of each network, and the targets
    python benchmarks/compress.py --studies 30 --budget 60s

Each network is optimized without compression; the same study then goes on twice for the same time, with ``--compress auto``,
whose trainings may take half of it, and without, within a drop of the score that was fixed beforehand. Both results are
artifacts, confirmed on test data against the model as written, with one thread or, where that was faster, with more. They are
then timed in turns as they are, one example a call.
Where compression finds nothing better, both ship the same form and the ratio is about 1.

``--studies`` makes short studies of the digits with seeds and limits drawn at random, and asks of each result how much it
loses on images that stand in no split: at least nine in ten must keep the bound that their study stated. It goes on where an
earlier run stopped. ``--jobs 2`` makes two at a time, whose searches then try fewer forms.

Targets: a geometric mean of at least 1.6x over the best without compression; over as written at least 8x on a CPU with VNNI,
5x without; no peer at the same score surely faster. ``--summary`` ends with status 1 if one is missed. The intervals are 95%;
that of a mean takes the networks as independent.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from trimtab._internal.serialization import to_json
from trimtab.hardware.environment import Environment
from trimtab.measure.host import other_load

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "compress.jsonl"
DROPS = {"digits": "2%", "recurrent": "2%", "tabular": "3%", "resnet": "2%", "mobilenet": "2%", "minilm": "4%"}
"""Largest drop of the score, by workload: what its test split can decide."""
BUDGETS = {
    "digits": (60, 240),
    "recurrent": (60, 240),
    "tabular": (30, 120),
    "resnet": (100, 340),
    "mobilenet": (100, 340),
    "minilm": (120, 340),
}
"""Seconds of the search without compression, and of what follows with it and, in another folder, without."""
TIMED_S = 12.0
LIMITS = ("1%", "2%", "3%", "4%")
"""Limits of the short studies."""
TARGET, VNNI, NO_VNNI, SHARE = 1.6, 8.0, 5.0, 0.9
STEPS = ("prune_channels", "prune_units", "drop_layers", "fake_quant", "student")
"""Passes of compressed forms."""

Ratio = dict[str, float]
Row = dict[str, Any]


def run(*words: str, **variables: str) -> dict[str, Any]:
    """The JSON that a trimtab command prints."""
    command = [sys.executable, "-m", "trimtab", *words, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    if not ended.stdout:
        raise RuntimeError(f"trimtab {' '.join(words)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def optimized(name: str, drop: str, seconds: float, out: pathlib.Path, *options: str, **variables: str) -> dict[str, Any]:
    """What a search of that many seconds found."""
    words = ["--max-drop", drop, "--budget", f"{seconds:g}s", "--out", str(out), *options]
    return run("optimize", f"{HERE / 'compress_workloads.py'}:{name}", *words, **variables)


def case(name: str, scratch: pathlib.Path, scale: float) -> Row:
    """The figures of one workload. Its artifacts are in ``scratch``: ``NAME-plain/artifact`` and ``NAME/artifact``."""
    plain_s, compressed_s = (scale * seconds for seconds in BUDGETS[name])
    optimized(name, DROPS[name], plain_s, scratch / name)
    kept = scratch / f"{name}-plain"
    shutil.copytree(scratch / name, kept)
    plain = optimized(name, DROPS[name], compressed_s, kept)  # as much time, lest compression get what was not tried yet
    training = ("--compress", "auto", "--train-budget", f"{compressed_s / 2:g}s")
    smaller = optimized(name, DROPS[name], compressed_s, scratch / name, *training)
    tried = [each for each in smaller["trials"] if each["state"] != "SKIPPED" and any(step in each["recipe"] for step in STEPS)]
    row: Row = {"workload": name, "limit": DROPS[name], "tried": len(tried), "ratio": None}
    for side, found in (("plain", plain), ("compressed", smaller)):
        best = found["best"]
        row[side] = None if best is None else {key: best[key] for key in ("recipe", "speedup", "drop", "score", "size_mb")}
    if plain["artifact"] is not None and smaller["artifact"] is not None:
        words = (smaller["artifact"], "--vs", plain["artifact"], "--trust", "--time", f"{scale * TIMED_S:g}s")
        row["ratio"] = run("measure", *words)["comparison"]["ratio"]
    return row


def study(number: int, budget: str, scratch: pathlib.Path) -> Row:
    """One short study of the digits, and what its result loses on images that stand in none of its splits."""
    import compress_workloads as workloads

    import trimtab

    drawn = random.Random(number)
    split, limit = drawn.randrange(1 << 30), drawn.choice(LIMITS)
    out = scratch / f"study-{number}"
    seconds = float(budget.removesuffix("s"))
    found = optimized("split", limit, seconds, out, "--compress", "auto", **{workloads.SPLIT: str(split)})
    row: Row = {"study": number, "limit": limit, "recipe": None, "stated": None, "unseen": None, "kept": True}
    if found["artifact"] is None:
        return row
    executable = trimtab.open_artifact(found["artifact"]).load(trust=True)
    images, labels = workloads.unseen(split)
    model = workloads.handwritten.build()
    right = [float((call(images).argmax(1) == labels).float().mean()) for call in (model, executable)]
    best, lost = found["best"], right[0] - right[1]
    stated = best["drop"]["upper"]
    kept = lost <= (stated or 0.0) + 1e-9
    return row | {"recipe": best["recipe"], "stated": stated, "unseen": lost, "kept": kept, "images": len(images)}


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


def told(row: Row) -> str:
    """One workload in some lines."""
    lines = [f"{row['workload']:10} limit {row['limit']}; compressed over the best without: {shown(row['ratio'])}"]
    for side in ("plain", "compressed"):
        if (found := row[side]) is None:
            lines.append(f"    {side:10} nothing keeps the limits")
            continue
        drop = found["drop"]["upper"]
        lost = "" if drop is None else f", drop at most {drop:.4f}"
        lines.append(f"    {side:10} {shown(found['speedup'])} as written{lost}: {found['recipe']}")
    if (ratio := row["ratio"]) is not None and ratio["low"] <= 1.0:
        tried = f"of {row['tried']} compressed forms none is surely faster within the limit"
        lines.append(
            f"    compression does not surely pay here: {tried if row['tried'] else 'the budget was over before one was tried'}"
        )
    for peer in row.get("peers", ()):
        if peer["reason"] is not None:
            lines.append(f"    {peer['peer']}: {peer['reason']}")
        else:
            lines.append(f"    {peer['peer']}: test score {peer['score']:.4f}; ours is {shown(peer['ratio'])} as fast")
    return "\n".join(lines)


def verdicts(rows: Sequence[Row], vnni: bool) -> Iterator[tuple[bool, str]]:
    """For each target whether it is reached, and a sentence."""
    over_plain = mean([row["ratio"] for row in rows if row["ratio"] is not None])
    over_written = mean([row["compressed"]["speedup"] for row in rows if row["compressed"] is not None])
    missing = [name for name in DROPS if name not in {row["workload"] for row in rows}]
    of = f"of {len(rows)} networks" + (f" (not run: {', '.join(missing)})" if missing else "")
    for found, target, over in (
        (over_plain, TARGET, "the best without compression"),
        (over_written, VNNI if vnni else NO_VNNI, f"as written, on a CPU {'with' if vnni else 'without'} VNNI"),
    ):
        yield (
            found is not None and found["value"] >= target,
            f"geometric mean {of} over {over}: {shown(found)}; target {target:g}x",
        )
    peers = [(row["workload"], peer) for row in rows for peer in row.get("peers", ()) if peer["ratio"] is not None]
    same = [(name, peer) for name, peer in peers if peer["keeps"]]
    slower = [f"{peer['peer']} on {name}" for name, peer in same if peer["ratio"]["high"] < 1.0]
    yield not slower, f"peers within the limit that are surely faster: {', '.join(slower) or 'none'}, of {len(same)} timed"


def append(row: Row, path: pathlib.Path) -> None:
    """Write ``row`` with its conditions as one more line."""
    machine = Environment.capture()
    busy = other_load()
    conditions = {"machine": to_json(machine), "vnni": has_vnni(machine), "others": None if busy is None else str(busy)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, **conditions}) + "\n")


def lines(path: pathlib.Path) -> list[Row]:
    """All results so far, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def has_vnni(machine: Environment) -> bool:
    """Whether the CPU multiplies 8-bit numbers exactly and fast."""
    return any("vnni" in name for name in machine.isa)


def summary(path: pathlib.Path) -> int:
    """Print the latest result of each network and study, and the targets; returns the exit status."""
    found = lines(path)
    rows = list({row["workload"]: row for row in found if "workload" in row}.values())
    studies = list({row["study"]: row for row in found if "study" in row}.values())
    for row in rows:
        print(f"{told(row)}\n    {row['machine']['cpu']}; others: {row['others']}")
    judged = list(verdicts(rows, rows[-1]["vnni"])) if rows else []
    if studies:
        kept = sum(row["kept"] for row in studies)
        judged.append(
            (kept >= SHARE * len(studies), f"{kept} of {len(studies)} short studies kept their bound on unseen images")
        )
    for reached, words in judged:
        print(f"{'reached' if reached else 'MISSED '}  {words}")
    return 0 if judged and all(reached for reached, _ in judged) else 1


def main() -> int:
    """Run the workloads, or what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(DROPS), help="these networks")
    parser.add_argument("--peers", action="store_true", help="the peers too, each as its own documentation says")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all times, for a busy machine")
    parser.add_argument("--studies", type=int, metavar="N", help="short studies of the digits instead of the networks")
    parser.add_argument("--jobs", type=int, default=1, help="short studies at a time")
    parser.add_argument("--budget", default="60s", help="of a short study")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help=f"results are appended here [{RESULTS.name}]")
    parser.add_argument("--summary", action="store_true", help="print means and targets of the results so far, and run nothing")
    given = parser.parse_args()
    if given.summary:
        return summary(given.results)
    machine = Environment.capture()
    print(f"{machine.cpu}, {'with' if has_vnni(machine) else 'without'} VNNI; others: {other_load()}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        scratch = pathlib.Path(place)
        if given.studies:
            done = {row["study"] for row in lines(given.results) if "study" in row}
            todo = [number for number in range(given.studies) if number not in done]
            with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
                studies = [pool.submit(study, number, given.budget, scratch) for number in todo]
                for each in concurrent.futures.as_completed(studies):
                    row = each.result() | {"jobs": given.jobs}
                    print(json.dumps(row), flush=True)
                    append(row, given.results)
        for name in () if given.studies else given.only or DROPS:
            row = case(name, scratch, given.scale)
            if given.peers:
                from compress_peers import peers

                row["peers"] = peers(name, float(DROPS[name].rstrip("%")) / 100, scratch / name / "artifact", given.scale)
            print(told(row), flush=True)
            append(row, given.results)
    return summary(given.results)


if __name__ == "__main__":
    sys.exit(main())
