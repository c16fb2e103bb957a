"""Settings that decide themselves: what is decided and why, and that the run does not notice."""

import copy
import io
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from _peaks import write_peaks
from trimtab import OptimizerSettings, PrecisionSettings, Settings, Trainer
from trimtab.core import search_space
from trimtab.core.technique import PASSES
from trimtab.errors import UsageError
from trimtab.hardware.environment import Environment
from trimtab.hardware.peaks import Peaks, Rate
from trimtab.train.autotune import auto_settings
from trimtab.train.autotune.auto_settings import OFF, undecided
from trimtab.train.data.peek import first_batches
from trimtab.train.optim.kernels import use_kernels
from trimtab.train.runtime.torch_settings import running
from trimtab.train.telemetry import progress
from trimtab.train.telemetry.events import Event, Progressed, Remarked
from trimtab.train.telemetry.mfu import _peak, flops_share
from trimtab.train.telemetry.summary import Summary

ALL = Settings(
    threads=1,
    memory_format="auto",
    attention="auto",
    compile="auto",
    precision=PrecisionSettings(autocast="auto", tf32="auto"),
    optimizer=OptimizerSettings(implementation="auto"),
)
STATED = {field: ALL.value(field) for field in OFF}


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Small noisy images, drawn anew each time from torch's generator."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(1, 8, 8) + index % 4, index % 4


def convnet() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(512, 4))
    )


def deep(layers: int = 20) -> nn.Module:
    """So many parameters that an optimizer which goes through them one by one takes most of an update."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def trainer(model: nn.Module, settings: Settings, **more: Any) -> Trainer:
    more = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.AdamW, **more}
    return Trainer(model, settings=settings, **more)


def batches(count: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(size, 4, generator=generator), torch.randint(4, (size,), generator=generator)) for _ in range(count)]


def stop_after(updates: int) -> Any:
    """A callback that ends a run, so that a long one can be stated, which decisions depend on."""

    def callback(trainer: Trainer, event: Event) -> None:
        if isinstance(event, Progressed) and event.update >= updates:
            trainer.stop("Enough.")

    return callback


def brief(model: nn.Module, settings: Settings, data: Any, **more: Any) -> tuple[Trainer, Summary]:
    """A run that would be long, ended after a few updates."""
    made = trainer(model, settings, log_every=1, callbacks=[stop_after(3)], **more)
    return made, made.fit(data, steps=1000)


def note(summary: Summary, beginning: str) -> str:
    found = [text for text in summary.notes if text.startswith(beginning)]
    assert len(found) == 1, summary.notes
    return found[0]


def test_everything_is_decided_and_said() -> None:
    torch.manual_seed(0)
    _, summary = brief(convnet(), ALL, DataLoader(Images(), 16, shuffle=True))
    assert undecided(summary.settings) == []
    for field in OFF:
        assert any(text.startswith(field) for text in summary.notes), field
    assert "calls no" in " ".join(summary.notes) or "this one does not" in note(summary, "attention='flash'")
    if not torch.cuda.is_available():
        told = "precision.tf32=True is off: tf32 needs an NVIDIA GPU, and PyTorch finds none here."
        assert note(summary, "precision.tf32") == told
        assert note(summary, "precision.autocast='float16'").startswith(
            "precision.autocast='float16' is off: float16 pays on GPUs only"
        )


def test_the_run_is_the_same_as_with_the_settings_stated() -> None:
    def run(settings: Settings) -> tuple[list[float], dict[str, torch.Tensor], Settings]:
        torch.manual_seed(0)
        losses: list[float] = []
        data = DataLoader(Images(), 16, shuffle=True, generator=torch.Generator().manual_seed(5))
        made = trainer(convnet(), settings, log_every=1, callbacks=[lambda _, e: seen(e, losses)])
        summary = made.fit(data, epochs=3)
        return losses, made.model.state_dict(), summary.settings

    def seen(event: Event, losses: list[float]) -> None:
        if isinstance(event, Progressed):
            losses.append(event.loss)

    losses, state, decided = run(ALL)
    again, stated, _ = run(decided)
    assert losses == again
    assert len(losses) == 12
    assert all(torch.equal(state[name], stated[name]) for name in state)


def test_what_pays_is_on_with_its_figures() -> None:
    made, summary = brief(deep(), Settings(threads=1, optimizer=OptimizerSettings(implementation="auto")), batches(8))
    texts = [text for text in summary.notes if text.startswith("optimizer")]
    winner = summary.settings.optimizer.implementation
    if winner is None:  # neighbours that have the CPU leave nothing to say
        assert all(" off: " in text or " are off: " in text for text in texts)
        assert made.optimizer.param_groups[0]["fused"] is None
        return
    assert made.optimizer.param_groups[0][winner] is True
    text = next(text for text in texts if " is on: it ran at " in text)
    figures = re.findall(r"\d+\.\d+", text)
    value, low, high = map(float, figures)
    assert 1 <= low <= value <= high


def test_the_implementation_of_several_optimizers_is_decided_for_all() -> None:
    adam = torch.optim.AdamW
    settings = Settings(threads=1, optimizer=OptimizerSettings(implementation="auto"))
    made, summary = brief(deep(), settings, batches(8), optimizer={"0": adam, "1": adam})
    assert "OptimizerDict" not in "".join(summary.notes)
    winner = summary.settings.optimizer.implementation
    for group in made.optimizer.param_groups:
        assert [name for name in ("foreach", "fused") if group[name]] == ([] if winner is None else [winner])
    sides = {"0": adam, "1": torch.optim.Rprop}
    _, summary = brief(deep(), settings, batches(8), optimizer=sides)
    assert note(summary, "optimizer.implementation='fused'").endswith("is off: Rprop has no fused implementation.")


def test_bfloat16_is_declined_by_measurement_where_it_is_emulated() -> None:
    if any("bf16" in name for name in Environment.capture().isa) or torch.cuda.is_available():
        pytest.skip("this machine multiplies bfloat16")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    _, summary = brief(model, Settings(threads=1, precision=PrecisionSettings(autocast="auto")), batches(8, 64))
    assert summary.settings.precision.autocast is None
    text = note(summary, "precision.autocast='bfloat16'")
    assert text.endswith(" here.") or "not surely faster" in text or "too busy" in text


class Cancelling(nn.Module):
    """A thousand and a little, less a thousand: 16 bits keep nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        with torch.no_grad():
            self.layer.bias.fill_(1000.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float() - 1000.0


def test_precision_that_changes_the_loss_is_off() -> None:
    targets = [(x, torch.randn(len(x), 4)) for x, _ in batches(4)]
    model = Cancelling()
    made = trainer(model, Settings(threads=1), loss=nn.MSELoss(), optimizer=torch.optim.SGD)
    decisions = auto_settings._Decisions(made.context, targets, None)
    decisions.make([])
    technique = PASSES["autocast"]()
    text = decisions._time_pass(technique, "precision.autocast", 60.0)[1]
    assert re.fullmatch(r"off: its loss differs by .* of what it was, and 0\.05 is allowed\.", text)


def test_short_runs_are_not_held_up() -> None:
    summary = trainer(deep(), Settings(threads=1, compile="auto", optimizer=OptimizerSettings(implementation="auto"))).fit(
        batches(1), epochs=1
    )
    assert re.search(
        r"optimizer\.implementation is off: measuring it would take .* s, which is too much for a run of",
        note(summary, "optimizer.implementation"),
    )
    assert "too little to pay back what compiling costs" in note(summary, "compile=True")


def test_a_run_of_unknown_length_is_not_compiled() -> None:
    data = DataLoader(TensorDataset(*batches(1, 64)[0]), 8)
    made = trainer(deep(4), Settings(threads=1, compile="auto"))
    summary = made.fit((batch for batch in data), epochs=1)
    assert "how many updates there will be is not known" in note(summary, "compile=True")
    assert summary.updates == 8  # the generator's batches were all used, those that were looked at too


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lock = threading.Lock()


def test_what_cannot_be_copied_is_trained_as_it_is() -> None:
    summary = trainer(
        Locked(),
        Settings(threads=1, precision=PrecisionSettings(autocast="auto"), optimizer=OptimizerSettings(implementation="auto")),
    ).fit(batches(4), epochs=2)
    assert summary.updates == 8
    assert note(summary, "precision.autocast, optimizer.implementation").startswith(
        "precision.autocast, optimizer.implementation cannot be measured and stay off. One of Locked"
    )


def test_an_optimizer_without_kernels_says_so() -> None:
    _, summary = brief(
        deep(4),
        Settings(threads=1, optimizer=OptimizerSettings(implementation="auto")),
        batches(4),
        optimizer=torch.optim.Rprop,
    )
    assert (
        note(summary, "optimizer.implementation='fused'")
        == "optimizer.implementation='fused' is off: Rprop has no fused implementation."
    )


def test_interrupted_while_it_decides() -> None:
    def stop(trainer: Trainer, event: Event) -> None:
        if isinstance(event, Remarked):
            trainer.stop("Ctrl-C.")

    made = trainer(
        deep(),
        Settings(threads=1, precision=PrecisionSettings(autocast="auto"), optimizer=OptimizerSettings(implementation="auto")),
        callbacks=[stop],
    )
    summary = made.fit(batches(4), steps=1000)
    assert (summary.updates, summary.ended) == (0, "Ctrl-C.")
    assert "interrupted before it was measured" in note(summary, "optimizer.implementation")


def test_a_run_that_goes_on_keeps_what_was_decided(tmp_path: pathlib.Path) -> None:
    first, summary = brief(
        deep(), Settings(threads=1, optimizer=OptimizerSettings(implementation="auto")), batches(4), checkpoint=tmp_path
    )
    second = trainer(
        deep(), Settings(threads=1, optimizer=OptimizerSettings(implementation="auto")), checkpoint=tmp_path
    ).resume()
    assert second.settings.optimizer.implementation == summary.settings.optimizer.implementation
    assert second.notes == [
        f"optimizer.implementation={summary.settings.optimizer.implementation!r}: as decided when the run began."
    ]
    assert second.decided == first.decided


def test_the_first_batches_are_not_used_up() -> None:
    stream = iter(batches(5))
    seen, rest = first_batches(stream, 2)
    assert len(seen) == 2
    assert len(list(rest)) == 5
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Images(), 4, shuffle=True, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    seen, same = first_batches(loader, 3)
    assert same is loader
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(seen, itertools.islice(loader, 3), strict=True))


def test_searches_for_inference_leave_passes_for_training_alone() -> None:
    training = {name for name in PASSES if "infer" not in PASSES[name].modes}
    assert {"compile", "optimizer", "attention", "tf32", "cudnn_benchmark"} <= training
    assert {technique.name for technique in search_space.techniques()}.isdisjoint(training)
    assert {step.name for exact in (True, False) for step in search_space.passes(exact=exact)}.isdisjoint(training)


def test_kernels_of_an_optimizer_can_change_between_updates() -> None:
    def run(kernels: list[Any]) -> torch.Tensor:
        model = deep(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for kind in kernels:
            use_kernels(optimizer, kind)
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    torch.testing.assert_close(run(["loop", "foreach", "fused", "loop"]), run(["loop"] * 4), rtol=1e-5, atol=1e-6)
    with pytest.raises(
        UsageError, match=r"Rprop has no fused implementation\. Leave OptimizerSettings\(implementation=\.\.\.\) out\."
    ):
        use_kernels(torch.optim.Rprop(deep(1).parameters()), "fused")


def flags() -> list[object]:
    return [
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.is_grad_enabled(),
    ]


def broken(model: nn.Module, batch: Any) -> torch.Tensor:
    raise RuntimeError("no")


def test_torch_is_as_it_was_after_a_run() -> None:
    before = flags()
    settings = Settings(threads=1, cudnn_benchmark=True, attention="math", precision=PrecisionSettings(tf32=True))
    with running(settings):
        assert flags() != before
    trainer(deep(2), settings).fit(batches(2), epochs=1)
    assert flags() == before
    with pytest.raises(Exception, match="no"):
        trainer(deep(2), settings, loss=broken).fit(batches(2), epochs=1)
    assert flags() == before
    with pytest.raises(Exception, match="no"):
        trainer(deep(2), ALL, loss=broken).fit(batches(2), epochs=1)
    assert flags() == before


def test_the_peak_of_a_gpu_without_a_number_is_that_of_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    made = Trainer(
        nn.Linear(4, 1),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        settings=Settings(precision=PrecisionSettings(autocast="bfloat16")),
    )
    rates = tuple(
        Rate(kind="bfloat16", device=f"cuda:{index}", threads=None, unit="GFLOP/s", value=100.0 + index) for index in (0, 1)
    )
    for device, value in (("cuda", 101.0), ("cuda:0", 100.0)):
        made.context.device = torch.device(device)
        assert _peak(made, Peaks(fingerprint="", threads=1, rates=rates)) == value


def test_the_share_of_the_peak_counts_forward_and_backward(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    made = trainer(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)), Settings(threads=1))
    before = copy.deepcopy(made.model.state_dict())
    assert flops_share(made.context, batches(1), 1e6) == (None, None)  # no peak was ever measured
    write_peaks(tmp_path, 10.0)
    # forward 2 x (4 x 16 + 16 x 4); backward as much again for the weights, and 2 x 16 x 4 for the activations between
    per_example = 2 * (64 + 64) + 2 * (64 + 64) + 2 * 64
    assert flops_share(made.context, batches(1), 1e6)[0] == pytest.approx(per_example * 1e6 / 10e9)
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert made.fit(batches(4), epochs=1).flops_share is None  # counting would call the loss, which nothing has asked for
    made = trainer(made.model, Settings(threads=1, optimizer=OptimizerSettings(implementation="auto")))
    summary = made.fit(batches(4), epochs=1)
    assert summary.flops_share is not None
    assert summary.flops_share > 0
    assert "of the floating-point peak measured here" in str(summary)
    assert math.isclose(sum(summary.shares.values()), 1.0, abs_tol=1e-6)


def test_lines_of_text_where_there_is_no_terminal() -> None:
    for wanted, terminal in ((True, False), (None, False), (False, True)):
        file = io.StringIO()
        made = trainer(deep(2), Settings(threads=1), log_every=2)
        console = Console(file=file, force_terminal=terminal, width=200)
        made.context.fit.planned = 6
        with progress.shown(made.context, wanted, console):
            made.note("Something to know.")
            made._stop = None
            made.context.emit(figures(2))
        text = file.getvalue()
        assert ("note: Something to know." in text) == bool(wanted)
        assert ("update 0 of 6 · loss 0.5 · 8 examples/s" in text) == bool(wanted)
        assert made.context.watchers == []


def figures(update: int) -> Progressed:
    shares = {"forward": 0.6, "backward": 0.35, "optimizer": 0.05}
    return Progressed(
        update=update,
        epoch=0,
        updates=6,
        loss=0.5,
        norm=1.0,
        rate=0.1,
        examples_per_s=8.0,
        step_ms=1.0,
        skipped=0,
        shares=shares,
    )


def test_a_live_line_in_a_terminal() -> None:
    file = io.StringIO()
    made = trainer(deep(2), Settings(threads=1))
    made.context.fit.planned = 6
    with progress.shown(made.context, None, Console(file=file, force_terminal=True, width=200)):
        made.position.update = 4
        made.context.emit(figures(4))
        made.context.fit.epochs, made.position.epoch, made.position.batch = 5, 4, 1
        view = made.context.watchers[0]
        assert str(view.line()).startswith("epoch 5 of 5 · ")  # type: ignore[attr-defined]
        made.position.epoch, made.position.batch = 5, 0  # complete, as a run that is resumed after its last epoch
        assert str(view.line()).startswith("epoch 5 of 5 · ")  # type: ignore[attr-defined]
    assert "epoch 5 of 5 · update 4 of 6 · loss 0.5 · 8 examples/s · forward 60%, backward 35%" in file.getvalue()


def test_what_is_printed_beside_a_live_line_goes_into_the_file_that_standard_output_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, made = io.StringIO(), trainer(deep(2), Settings(threads=1))
    with progress.shown(made.context, None, Console(file=file, force_terminal=True, width=200)):
        print("mine")
    assert capsys.readouterr().out == "mine\n"
    assert "mine" not in file.getvalue()


SCRIPT = """
import sys
import torch
from torch import nn
from trimtab import Settings, Trainer
from trimtab.hardware.peaks import Peaks, Rate

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
data = [(torch.randn(n, 4), torch.randint(4, (n,))) for n in (8, 8, 8, 6)]
losses = []
def seen(trainer, event):
    if type(event).__name__ == "Progressed":
        losses.append(event.loss)
settings = Settings(threads=1, compile=sys.argv[1] == "compiled")
made = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, settings=settings, log_every=1, callbacks=[seen])
summary = made.fit(data, epochs=2)
import json
print(json.dumps({"losses": losses, "notes": summary.notes, "buffers": model[1].running_mean.tolist(),
                  "batches": int(model[1].num_batches_tracked)}))
"""


def in_a_process(*arguments: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def no_compiler(tmp_path: pathlib.Path) -> dict[str, str]:
    compiler = tmp_path / "broken-g++"
    compiler.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    return {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_is_trained_as_it_is(no_compiler: dict[str, str]) -> None:
    compiled, plain = in_a_process("compiled", **no_compiler), in_a_process("plain")
    assert compiled["losses"] == plain["losses"]  # nothing of the failed attempt is left, not in BatchNorm either
    assert compiled["buffers"] == plain["buffers"]
    assert compiled["batches"] == 8
    assert len(compiled["notes"]) == 1
    assert compiled["notes"][0].startswith("compile is off: the model cannot be compiled. ")


@pytest.mark.slow
def test_a_compiled_model_learns_the_same_and_tells_what_was_compiled_again() -> None:
    compiled, plain = in_a_process("compiled"), in_a_process("plain")
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert compiled["batches"] == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_everything_is_decided_on_a_gpu() -> None:
    settings = Settings().replaced(STATED | {"device": "cuda"})
    made = trainer(convnet(), settings, log_every=1, callbacks=[stop_after(3)])
    summary = made.fit(DataLoader(Images(), 16), steps=20_000)
    assert undecided(summary.settings) == []
    assert not any("fails" in text for text in summary.notes), summary.notes
