"""What watching a script costs: the time of a step with the hooks of ``trimtab doctor`` over that without them.

    python benchmarks/watching.py                                  # a step of 5 ms; a minute on two quiet cores
    python benchmarks/watching.py --step 10ms --quads 300

The script is a training as people write it: a ``DataLoader``, a loss, a backward pass, ``zero_grad``, an optimizer and
``loss.item()`` on every step, with a model whose width makes a step take ``--step``. It is watched, and switches the hooks and
the sampling thread off and on again in turns of 16 steps, A B B A, so that a busy machine disturbs both sides alike. Switching
on wakes the sampling thread once more than a run does; shorter turns would count that as much as its own samples. Each turn is
timed by the CPU time of the whole process, and of all quads those count that took least time in total, a half,
because other processes make both sides slower. What stays while the hooks are off is a comparison in each replaced function,
about 2 us in a step. The interval is Student's t on the logarithms of the ratios of those quads. The last line says whether
the target of 2% is met; the exit status is 1 if the overhead is surely above it.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys
import tempfile

from trimtab._internal.units import seconds
from trimtab.measure.host import other_load
from trimtab.measure.quantiles import t_quantile
from trimtab.probe.command import Command
from trimtab.probe.observe import observe

LIMIT = 0.02
TURN = 16
"""Steps of a turn."""
SCRIPT = """
import json, pathlib, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out, step_ms, quads, turn = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])


def watching(on):
    from trimtab.probe.inside import calls, hooks, lines, loaders, roots
    for module in (calls, hooks, loaders, roots):
        module.MAIN = threading.get_ident() if on else 0
    if on:
        lines.sampling.set()
    else:
        lines.sampling.clear()


def network(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def fitting():
    # the width with which a step takes about step_ms of CPU time
    width = 256
    for _ in range(4):
        model = network(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        times = []
        for _ in range(20):
            began = time.process_time()
            optimizer.zero_grad()
            loss_of(model(torch.randn(64, 64)), torch.randint(10, (64,))).backward()
            optimizer.step()
            times.append(time.process_time() - began)
        width = max(64, round(width * (step_ms / 1e3 / sorted(times)[5]) ** 0.6))
    return width


torch.manual_seed(0)
torch.set_num_threads(1)
loss_of = nn.CrossEntropyLoss()
watching(False)
model = network(fitting())
watching(True)
examples = TensorDataset(torch.randn(61 * 64, 64), torch.randint(0, 10, (61 * 64,)))  # epochs begin on both sides
loader = DataLoader(examples, batch_size=64, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
sides = [True] * 2 + [side for _ in range(quads) for side in (False, True, True, False)]
turns, steps, total, began = [], 0, 0.0, time.process_time()
while len(turns) < len(sides):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
        steps += 1
        if steps % turn == 0:
            turns.append(time.process_time() - began)
            if len(turns) == len(sides):
                break
            watching(sides[len(turns)])
            began = time.process_time()
out.write_text(json.dumps([1e3 * seconds / turn for seconds in turns[2:]]))
"""


def main() -> int:
    """Measure, print, and return 1 if the overhead is surely above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", default="5ms", help="CPU time of a step, about")
    parser.add_argument("--quads", type=int, default=150, help=f"A B B A, of {TURN} steps each")
    asked = parser.parse_args()
    busy = other_load()
    with tempfile.TemporaryDirectory(prefix="watching-") as name:
        script, out = pathlib.Path(name, "train.py"), pathlib.Path(name, "turns.json")
        script.write_text(SCRIPT, encoding="utf-8")
        command = Command.of(script, args=[str(out), f"{1e3 * seconds(asked.step, '--step'):g}", str(asked.quads), str(TURN)])
        observe(command, steps=100 + 5 * TURN * asked.quads, seconds=600, in_place=True)
        turns = json.loads(out.read_text(encoding="utf-8"))
    every = sorted((turns[place : place + 4] for place in range(0, len(turns), 4)), key=sum)
    quads = every[: max(4, len(every) // 2)]
    logs = [math.log((second + third) / (first + fourth)) for first, second, third, fourth in quads]
    half = t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.fmean(logs)
    low, value, high = (math.exp(x) - 1 for x in (mean - half, mean, mean + half))
    plain = statistics.median((first + fourth) / 2 for first, _, _, fourth in quads)
    print(f"{busy}; {len(quads)} of {len(every)} x A B B A, {TURN} steps each")
    verdict = "PASS" if value <= LIMIT else "MISSED" if low > LIMIT else "NOT SURE"
    interval = f"{value:+.2%} ({low:+.2%} to {high:+.2%})"
    print(f"a step of {plain:.2f} ms CPU takes {interval} when it is watched, {1e3 * value * plain:.0f} us")
    print(f"{verdict}: at most {LIMIT:.0%} of a step")
    return int(low > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
