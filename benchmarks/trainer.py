"""The Trainer against loops that do the same work: bare ones by hand, Accelerate's and Lightning's.

Two sides take turns in one process, A B B A, an update at a time; a ratio above 1 means that the Trainer is faster. From one
process to the next it moves by 2%, with where memory lies, so each comparison is made in several of them, and its interval
holds for yet another one. Memory that is freed stays with each process, for both sides (``memory.keep_freed`` does
that): without it the loop by hand takes 500 to 1900 page faults an update from one start to the next, and between 13.5 and 16.7
ms for its convolutions, which says nothing about loops.

``bare`` is the shortest loop there is: forward, backward, optimizer; the Trainer has the same settings there, which is
``nonfinite="ignore"``. ``guarded`` also looks at the norm of the gradient and refuses to go on from a loss that is no number,
as the Trainer does by default, and against the others too. Targets: 1/1.03 of either loop at least, where an update takes 5 ms
or more, and 0.95 from 1 ms on; at least as fast as Accelerate and Lightning everywhere, and 1.4 times Lightning on the tiny
model. ``epochs`` is the Trainer itself in epochs of one batch, for what an epoch costs beside its updates.

``--examples`` measures the scripts of ``examples/trainer/`` in place of these models, each against its own loop by hand: the
mean update, with what epochs cost beside their updates. It ends with 1 if a target is surely missed. All twelve take 8 minutes.

The rivals are needed for this only, and are left out with a sentence where they are missing:

    pip install --target rivals --no-deps accelerate pytorch-lightning lightning-utilities torchmetrics
    PYTHONPATH=rivals python benchmarks/trainer.py
    PYTHONPATH=rivals python benchmarks/trainer.py --starts 24 --models cnn,transformer --rivals accelerate
    PYTHONPATH=rivals python benchmarks/trainer.py --quick --models tiny
    python benchmarks/trainer.py --examples
    python benchmarks/trainer.py --examples --models gan,unet --starts 5
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import inspect
import itertools
import json
import logging
import multiprocessing
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab import Environment, OptimizerSettings, Settings, Trainer
from trimtab._internal.serialization import to_json
from trimtab.core.measurement import Comparison
from trimtab.hardware.system import keep_freed_memory
from trimtab.measure.pairs import compare
from trimtab.measure.pooled import pooled
from trimtab.measure.timer import LocalRunner, Runner, Sample, SampledRunner, gc_disabled, pace

Data = list[tuple[torch.Tensor, torch.Tensor]]
Build = Callable[[], tuple[nn.Module, Data]]
BATCHES, CLASSES = 64, 10
ENDLESS = 10**9
SCRIPT = "hand"
"""The rival of a script of ``examples/trainer/``: its own loop."""
TARGETS = {"bare": 1 / 1.03, "guarded": 1 / 1.03, SCRIPT: 1.0, "accelerate": 1.0, "lightning": 1.0}
TINY_LIGHTNING = 1.4
BY_HAND = ("bare", "guarded")
SHORT_EPOCH, EPOCHS, EPOCH_US = 8, "epochs", 200
"""Updates of an epoch of the model ``short``; the rival of the tiny model that shows what an epoch costs beside its updates;
how many microseconds that may be."""
LONG_MS, BRIEF_MS, BRIEF = 5.0, 1.0, 0.95
"""The targets against the loops by hand are for updates of at least 5 ms; from 1 ms on it is 0.95. A script passes unless its
interval is wholly below."""
EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples" / "trainer"
NO_SCRIPTS = ("material", "bert")
"""What is no script there; and the one that compiles, which says nothing about loops."""


def batches(size: int, *shape: int) -> Data:
    """Random images or rows with random labels."""
    torch.manual_seed(1)
    return [(torch.randn(size, *shape), torch.randint(CLASSES, (size,))) for _ in range(BATCHES)]


def tiny() -> tuple[nn.Module, Data]:
    """Two layers on rows of a table: an update is next to nothing, so all that is seen is the loop."""
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, CLASSES)), batches(32, 30)


def layers(width: int, inputs: int) -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))


def small() -> tuple[nn.Module, Data]:
    """Three layers, an update of some 1 ms."""
    return layers(256, 128), batches(64, 128)


def medium() -> tuple[nn.Module, Data]:
    """Three layers, an update of some 3 ms."""
    return layers(512, 256), batches(64, 256)


def short() -> tuple[nn.Module, Data]:
    """The updates of some 3 ms in epochs of eight: what an epoch costs beside its updates is an eighth of that in each."""
    return layers(512, 256), batches(64, 256)[:SHORT_EPOCH]


def mlp() -> tuple[nn.Module, Data]:
    """Three layers of a thousand."""
    return layers(1024, 256), batches(64, 256)


def cnn() -> tuple[nn.Module, Data]:
    """Convolutions with BatchNorm."""
    blocks: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)), batches(16, 3, 24, 24)


class Encoder(nn.Module):
    """A small transformer over vectors, its outputs averaged."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(96, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors (batch, length, 96) to logits."""
        logits: torch.Tensor = self.head(self.encoder(x).mean(1))
        return logits


def transformer() -> tuple[nn.Module, Data]:
    """Attention and its layers."""
    return Encoder(), batches(16, 32, 96)


MODELS: dict[str, Build] = {
    "tiny": tiny,
    "small": small,
    "medium": medium,
    "short": short,
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
}


def made(build: Build) -> tuple[nn.Module, Data, torch.optim.Optimizer]:
    """A model from the same seed for each side, with its data and its optimizer."""
    torch.manual_seed(0)
    model, data = build()
    return model, data, optimizer_of(model.parameters())


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The same for all sides."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def runner_of(updates: Iterator[object]) -> SampledRunner:
    """A runner whose call is one of ``updates``; those of one thread are timed while it does not wait for a CPU."""
    return LocalRunner(lambda: next(updates), threads=torch.get_num_threads())


def trainer(build: Build, settings: Settings) -> Runner:
    """Ours."""
    model, data, _ = made(build)
    run = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=optimizer_of, settings=settings, progress=False)
    updates = run.updates(data, steps=ENDLESS)
    return runner_of(updates)


def bare(build: Build, *, guarded: bool = False) -> Runner:
    """By hand."""
    model, data, optimizer = made(build)
    loss_of, parameters = nn.CrossEntropyLoss(), list(model.parameters())

    def updates() -> Iterator[None]:
        model.train()
        while True:
            for inputs, targets in data:
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                if guarded:
                    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
                    assert torch.isfinite(loss + norm)
                optimizer.step()
                yield

    return runner_of(updates())


def guarded(build: Build) -> Runner:
    """By hand, with a look at the gradient."""
    return bare(build, guarded=True)


def accelerate(build: Build) -> Runner:
    """As Accelerate's own examples have it."""
    model, data, optimizer = made(build)
    helper = importlib.import_module("accelerate").Accelerator(cpu=True)
    model, optimizer = helper.prepare(model, optimizer)
    loss_of = nn.CrossEntropyLoss()

    def updates() -> Iterator[None]:
        model.train()
        while True:
            for inputs, targets in data:
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                helper.backward(loss)
                optimizer.step()
                yield

    return runner_of(updates())


def one_batch(build: Build) -> Runner:
    """Ours in epochs of one batch: what it takes longer than in long ones is what an epoch costs beside its updates."""
    model, data = build()
    return trainer(lambda: (model, data[:1]), Settings())


class Again:
    """Batches as a loader: Lightning takes a list for as many loaders."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.data)


class Lightning:
    """Lightning's Trainer with everything off that can be: each block is a call of its ``fit``, timed from batch to batch."""

    def __init__(self, build: Build) -> None:
        self.pid = os.getpid()
        self._library = importlib.import_module("pytorch_lightning")
        for name in ("pytorch_lightning", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.ERROR)
        model, self._data, optimizer = made(build)
        self._module = self._wrapped(model, optimizer)

    def block(self, calls: int) -> list[int]:
        """Nanoseconds of each of ``calls`` updates; the first two warm up."""
        marks: list[int] = []

        class Marks(self._library.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, *arguments: Any) -> None:
                marks.append(time.perf_counter_ns())

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = self._library.Trainer(
                max_steps=calls + 2,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[Marks()],
            )
            run.fit(self._module, Again(self._data))
        return [b - a for a, b in itertools.pairwise(marks[1:])]

    def pace(self) -> int:
        """How fast the core is now."""
        return pace()

    def _wrapped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        loss_of = nn.CrossEntropyLoss()

        class Module(self._library.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                inputs, targets = batch
                loss: torch.Tensor = loss_of(self.model(inputs), targets)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return optimizer

        return Module()


class WholeEpochs:
    """A runner whose times are means over whole epochs: a median of updates would not see what an epoch costs beside them."""

    def __init__(self, runner: Runner, updates: int) -> None:
        self.pid, self.threads = os.getpid(), runner.threads if isinstance(runner, SampledRunner) else None
        self._runner, self._updates = runner, updates

    def block(self, calls: int) -> list[int]:
        """The mean update in nanoseconds, ``calls`` times."""
        made = self._whole(calls)
        return [sum(self._runner.block(made)) // made] * calls

    def samples(self, count: int, calls: int) -> list[Sample]:
        """Samples of whole epochs."""
        assert isinstance(self._runner, SampledRunner)
        return self._runner.samples(count, self._whole(calls))

    def _whole(self, calls: int) -> int:
        return -(-calls // self._updates) * self._updates

    def pace(self) -> int:
        """How fast the core is now."""
        return pace()


class Script:
    """A script of ``examples/trainer/``, with the Trainer or by hand: each block is a run of its own, timed by its steps."""

    def __init__(self, name: str, *, by_hand: bool) -> None:
        self.pid = os.getpid()
        self._example, self._by_hand = importlib.import_module(name), by_hand
        self._steps = len(self._trainer().context.objective.optimizers)

    def block(self, calls: int) -> list[int]:
        """The mean update of ``calls`` in nanoseconds, ``calls`` times; the first two warm up."""
        ends: list[int] = []
        hook = register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter_ns()))
        try:
            torch.manual_seed(0)
            with gc_disabled():
                self._run(calls + 2)
        finally:
            hook.remove()
        made = ends[self._steps - 1 :: self._steps]
        return [(made[-1] - made[1]) // calls] * calls

    def pace(self) -> int:
        """How fast the core is now."""
        return pace()

    def _run(self, updates: int) -> None:
        if self._by_hand:
            self._example.by_hand(updates)
            return
        made = self._trainer()
        plays = bool(inspect.signature(self._example.loader).parameters)
        made.fit(self._example.loader(*([made.model] if plays else [])), steps=updates)

    def _trainer(self) -> Trainer:
        """The Trainer of the script. Like the loops by hand it does not check gradients, and does not validate."""
        made: Trainer = self._example.trainer(progress=False)
        made.context.metrics = {}
        made.context.settings = made.settings.replaced({"optimizer.nonfinite": "ignore"})
        return made


RIVALS: dict[str, Callable[[Build], Runner]] = {
    "bare": bare,
    "guarded": guarded,
    "accelerate": accelerate,
    "lightning": Lightning,
    EPOCHS: one_batch,
}


def target(model: str, rival: str, update_ms: float) -> float | None:
    """What the ratio must be at least; ``None`` where nothing is promised."""
    if rival == EPOCHS:
        return None
    if rival == "lightning" and model == "tiny":
        return TINY_LIGHTNING
    if rival in (*BY_HAND, SCRIPT) and update_ms < LONG_MS:
        return BRIEF if update_ms >= BRIEF_MS else None
    return TARGETS.get(rival)


def verdict(wanted: float | None, found: Comparison) -> str:
    """Whether the target ``wanted`` is surely met, or surely missed; empty where there is none."""
    if wanted is None:
        return ""
    return "met" if found.ratio.low >= wanted else "NOT met" if found.ratio.high < wanted else "not decided"


def line(model: str, rival: str, found: Comparison) -> str:
    """One comparison for a person."""
    ours, theirs = found.candidate.median, found.rival.median
    if rival == EPOCHS:
        low, middle, high = (1e3 * ours * (ratio - 1) for ratio in (found.ratio.low, found.ratio.value, found.ratio.high))
        cost = f"{middle:.0f} us ({low:.0f} to {high:.0f})"
        return f"{model:15} an epoch costs {cost} beside its updates, target {EPOCH_US} at most"
    wanted = target(model, rival, theirs)
    judged = "" if wanted is None else f", target {wanted:.2f}: {verdict(wanted, found)}"
    noise = f"; others had {found.foreign + found.stolen:.0%} of the CPU" if found.foreign + found.stolen > 0.1 else ""
    return (
        f"{model:15} against {rival:10} {found.ratio!s:24} {1e3 * ours:8.1f} us, theirs {1e3 * theirs:8.1f} us, "
        f"{1e3 * (ours - theirs):+7.1f} us{judged}{noise}"
    )


def once(model: str, rival: str, threads: int, seconds: float, quads: int) -> Comparison | str:
    """One comparison, in the process that this is called in; or why there is none."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    ours: Runner
    if rival == SCRIPT:
        sys.path.insert(0, str(EXAMPLES))
        ours, other = Script(model, by_hand=False), Script(model, by_hand=True)
    else:
        try:
            other = RIVALS[rival](MODELS[model])
        except ImportError as error:
            return f"left out: {error}. The first lines of this file say how to install it."
        settings = Settings(optimizer=OptimizerSettings(nonfinite="ignore")) if rival == "bare" else Settings()
        ours = trainer(MODELS[model], settings)
        if model == "short":
            ours, other = (WholeEpochs(side, SHORT_EPOCH) for side in (ours, other))
    return compare(ours, other, seconds=seconds, width=0.01, min_quads=quads, process_noise=0.0)


def in_processes(starts: int, *asked: Any) -> Comparison | str:
    """What :func:`once` finds in ``starts`` processes, one after the other, as one comparison."""
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
        found = list(pool.map(once, *([value] * starts for value in asked)))
    reason = next((each for each in found if isinstance(each, str)), None)
    return reason or pooled([each for each in found if isinstance(each, Comparison)])


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", action="store_true", help="the scripts of examples/trainer/ against their loops by hand")
    parser.add_argument("--models", help="names with commas between them; by default all, of the scripts with --examples")
    parser.add_argument("--rivals", default=",".join(RIVALS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each comparison in each process")
    parser.add_argument("--starts", type=int, help="processes for each comparison; by default 7, and 3 with --examples")
    parser.add_argument("--quick", action="store_true", help="two of a second each: shows that it runs, and proves nothing")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    scripts = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in NO_SCRIPTS)
    asked.models = asked.models.split(",") if asked.models else scripts if asked.examples else list(MODELS)
    asked.rivals = [SCRIPT] if asked.examples else asked.rivals.split(",")
    asked.starts = 2 if asked.quick else asked.starts or (3 if asked.examples else 7)
    return asked


def main() -> int:
    """Measure what is asked for, print it, and write it where told; 1 if a script surely misses its target."""
    asked = arguments()
    seconds, quads = (1.0, 4) if asked.quick else (asked.seconds, 6)
    here = Environment.capture()
    print(f"{here.cpu}, {asked.threads} threads, torch {torch.__version__}, {asked.starts} processes for each comparison")
    print(f"{'mean' if asked.examples else 'median'} update, and ratio with its 95% interval")
    rows, missed = [], []
    for model in asked.models:
        for rival in asked.rivals:
            if rival == EPOCHS and model != "tiny":
                continue
            found = in_processes(asked.starts, model, rival, asked.threads, seconds, quads)
            if isinstance(found, str):
                print(f"{model:15} against {rival:10} {found}")
                continue
            print(line(model, rival, found), flush=True)
            rows.append({"model": model, "against": rival, **to_json(found)})
            if rival == SCRIPT and verdict(target(model, rival, found.rival.median), found) == "NOT met":
                missed.append(model)
    if asked.json:
        facts = {"environment": to_json(here), "threads": asked.threads, "rows": rows}
        asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if asked.examples:
        print(f"surely missed: {', '.join(missed)}" if missed else "passed: no script surely misses its target")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
