"""Settings are measured on a script as it is, kept with their evidence, and applied to later runs."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import subprocess
import sys
import time

import pytest

from trimtab.core.evidence import CallRecord, LoaderRecord, MemoryRecord, ModuleRecord, OptimizerRecord, ProbeRecord
from trimtab.core.measurement import Interval
from trimtab.core.script_settings import LoaderSettings, ScriptSettings
from trimtab.errors import UsageError
from trimtab.measure.host import computed_ns, descendants
from trimtab.probe import serving
from trimtab.probe.candidates import candidates
from trimtab.probe.command import Command
from trimtab.probe.configuration import Conditions, Configuration, Evidence, changed_files, fingerprints
from trimtab.probe.counterfactuals import (
    NO_OVERLAY,
    NO_VALUE,
    OUT_OF_TIME,
    Outcome,
    _Measuring,
    _mixed_every,
    _too_rare,
    compare_losses,
    confirm,
    least_confirm_s,
    measure,
)
from trimtab.probe.loss_runs import verdict
from trimtab.probe.serving import ServedScript, failure
from trimtab.probe.tuning import _choices
from trimtab.report.doctor_words import described

SCRIPT = """\
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
torch.autograd.set_detect_anomaly(True)
model = nn.Sequential(nn.Linear(16, 32), *(layer for _ in range(12) for layer in (nn.Tanh(), nn.Linear(32, 32))))
data = TensorDataset(torch.randn(256, 16), torch.randn(256))
loader = DataLoader(data, batch_size=16, shuffle=True)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(int(sys.argv[1])):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x).mean(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"loss {loss.item():.9f} threads {torch.get_num_threads()} anomaly {torch.is_anomaly_enabled()}")
"""
STEP_LINE = 12


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second for each comparison, however much time there is."""
    for name in ("LEAST_S", "MOST_S"):
        monkeypatch.setattr(f"trimtab.probe.counterfactuals.{name}", 1.0)


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def record(**changes: object) -> ProbeRecord:
    """Of the script above."""
    given: dict[str, object] = {
        **{"command": ("python", "train.py"), "anchor": "optimizer", "anchor_site": f"train.py:{STEP_LINE}", "start_s": 3.0},
        **{"steps": 40, "step_ms": 3.0, "median_ms": 3.0, "probe_ms": 0.0},
    }
    return ProbeRecord(**(given | changes))  # type: ignore[arg-type]


def test_settings_are_timed_in_turns_with_their_losses(script: pathlib.Path) -> None:
    command = Command.of(script, args=["4000"])
    loader = ScriptSettings(loaders={"train.py:11": LoaderSettings(batch_fetch=True)})
    told: list[str] = []
    faster, read = measure(command, record(), [ScriptSettings(debug_off=True), loader], seconds=120, on_progress=told.append)
    assert faster.gain is not None
    assert faster.gain.low <= faster.gain.value <= faster.gain.high
    assert (faster.losses, faster.how, faster.failed) == ("equal", "one process", None)
    assert read.gain is not None
    assert read.how == "fresh processes"
    assert "anomaly mode off" in told


def test_what_the_evidence_puts_first_is_measured_first_and_late_losses_are_compared(script: pathlib.Path) -> None:
    """Which may need processes of its own."""
    command, told = Command.of(script, args=["4000"]), list[str]()
    loader = ScriptSettings(loaders={"train.py:11": LoaderSettings(batch_fetch=True)})
    asked = [loader, ScriptSettings(debug_off=True)]
    late, other = measure(command, record(start_s=29.0), asked, seconds=62, on_progress=told.append)
    assert (late.how, late.losses, late.gain is None) == ("fresh processes", "not compared", False)
    assert told[0] == f"in fresh processes: {described(loader)}"
    faster = dataclasses.replace(late, gain=Interval(2.0, 1.8, 2.2))
    assert compare_losses(command, record(), [faster, other], seconds=60)[0].losses == "equal"
    assert compare_losses(command, record(), [faster], seconds=1) == [faster]


def test_a_script_that_starts_slowly_is_first_started_once_for_all_that_can_be_switched(script: pathlib.Path) -> None:
    told = list[str]()
    loader = ScriptSettings(loaders={"train.py:11": LoaderSettings(batch_fetch=True)})
    asked = [loader, ScriptSettings(debug_off=True)]
    late, early = measure(Command.of(script, args=["4000"]), record(start_s=31.0), asked, seconds=60, on_progress=told.append)
    assert told[0] == "anomaly mode off"
    assert early.gain is not None
    assert (late.gain, late.failed) == (None, OUT_OF_TIME)


def test_a_block_has_twice_as_many_steps_as_workers_read_ahead(script: pathlib.Path) -> None:
    """Workers deliver in bursts, so that single steps take no time, or that of several."""
    text = SCRIPT.replace("batch_size=16,", "batch_size=16, num_workers=2, prefetch_factor=2, persistent_workers=True,")
    script.write_text(text.replace("optimizer.step()", "optimizer.step()\n        print('step', flush=True)"))
    settings = ScriptSettings()
    with ServedScript(Command.of(script, args=["400"]), record(), settings, seconds=60, in_place=False) as served:
        runner = served.runner(settings)
        runner.block(1)
        runner.block(1)
        steps = [served.process.log(1000).count("step")]
        for _ in range(2):
            times = runner.block(3)
            steps.append(served.process.log(1000).count("step"))
        ahead = 2 * 2
        made = [after - before for before, after in itertools.pairwise(steps)]
        assert made == [2 * ahead + 2 * ahead + 1] * 2, "with the steps after the pause, and the first of an epoch of 16"
    assert len(times) == 3
    assert len(set(times)) == 1, "the mean"


def test_batches_that_workers_read_during_a_pause_make_no_step_faster(script: pathlib.Path) -> None:
    """A block of two steps had a head start, so that a worker that made a script 0.86 times as fast seemed to gain 1.35."""
    read = "return time.sleep(0.004) or super().__getitem__(i)"
    slow = f"import time\nclass Slow(TensorDataset):\n    def __getitem__(self, i): {read}\n"
    text = SCRIPT.replace("data = TensorDataset(", f"{slow}data = Slow(")
    text = text.replace("optimizer.step()", "time.sleep(0.03)\n        optimizer.step()")
    script.write_text(text.replace("batch_size=16,", "batch_size=16, num_workers=1, persistent_workers=True,"))
    settings, seen = ScriptSettings(), record(anchor_site=f"train.py:{STEP_LINE + 3}")
    with ServedScript(Command.of(script, args=["400"]), seen, settings, seconds=60, in_place=False) as served:
        for _ in range(2):
            times = served.runner(settings).block(2)
            assert min(times) >= 60e6, "reading a batch takes 64 ms, and a step without reading 31 ms"


def test_what_a_thread_works_off_during_a_pause_makes_no_step_faster(script: pathlib.Path) -> None:
    """The queue of a TensorBoard writer was empty after each pause: without logging a script seemed to gain 22% less."""
    thread = """
import hashlib, queue, threading, time
waiting, text = queue.Queue(maxsize=10), bytes(100_000)
def write():
    while waiting.get():
        end = time.thread_time() + 0.02
        while time.thread_time() < end: hashlib.sha256(text)
threading.Thread(target=write, daemon=True).start()
"""
    text = SCRIPT.replace("torch.manual_seed(0)", f"{thread}torch.manual_seed(0)", 1)
    script.write_text(text.replace("optimizer.step()", "optimizer.step()\n        for _ in range(9): waiting.put(True)"))
    settings, seen = ScriptSettings(), record(anchor_site=f"train.py:{STEP_LINE + 8}")
    with ServedScript(Command.of(script, args=["400"]), seen, settings, seconds=60, in_place=False) as served:
        runner = served.runner(settings)
        assert runner.threads is None, "samples of one thread say nothing of the writer"
        for _ in range(3):
            times = served.remote.block(2)
            pids = [int(each) for each in os.listdir(f"/proc/{runner.pid}/task")]
            before = computed_ns(pids)
            time.sleep(0.1)
            assert computed_ns(pids) - before < 50e6, "ten that wait are 200 ms"
        assert min(times) >= 120e6, "nine take 180 ms; the first step after a pause handed them over for nothing"


def test_a_thread_that_only_waits_leaves_samples_of_one_thread(script: pathlib.Path) -> None:
    """As the one of a progress bar does."""
    waits = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    script.write_text(SCRIPT.replace("torch.manual_seed(0)", f"{waits}\ntorch.manual_seed(0)", 1))
    settings, seen = ScriptSettings(), record(anchor_site=f"train.py:{STEP_LINE + 1}")
    with ServedScript(Command.of(script, args=["400"]), seen, settings, seconds=60, in_place=False) as served:
        assert served.runner(settings).threads == 1


def test_workers_have_read_ahead_before_the_other_side_has_its_turn(script: pathlib.Path) -> None:
    """They took the CPUs of the script as written, which seemed slower."""
    slow = "class Slow(TensorDataset):\n    def __getitem__(self, i): return super().__getitem__(sum(range(100_000)) and i)\n"
    text = SCRIPT.replace("data = TensorDataset(", f"{slow}data = Slow(")
    script.write_text(text.replace("batch_size=16,", "batch_size=16, num_workers=2, persistent_workers=True,"))
    settings, seen = ScriptSettings(), record(anchor_site=f"train.py:{STEP_LINE + 2}")
    with ServedScript(Command.of(script, args=["400"]), seen, settings, seconds=60, in_place=False) as served:
        served.runner(settings).block(1)
        pids = descendants({served.process.pid})
        before = computed_ns(pids)
        time.sleep(0.1)
        assert computed_ns(pids) - before < 20e6, "two workers that read compute for up to 0.2 s"
    assert before > 100e6


def test_what_changes_evaluations_is_timed_with_them_on_both_sides(script: pathlib.Path) -> None:
    evaluation = """
        optimizer.zero_grad()
        if (steps := globals().get("steps", 0) + 1) % 4 == 0:
            model.eval()
            for inputs, _ in DataLoader(ConcatDataset([data] * 10), batch_size=16):
                model(inputs)
            model.train()
"""
    text = SCRIPT.replace("import DataLoader,", "import ConcatDataset, DataLoader,")
    script.write_text(text.replace("        optimizer.zero_grad()\n", evaluation.lstrip("\n")))
    seen = record(anchor_site=f"train.py:{STEP_LINE}", evaluation_every=4.0, run_s={"evaluation": 2.0})
    (left_out,) = measure(Command.of(script, args=["4000"]), seen, [ScriptSettings(without="evaluation")], seconds=60)
    assert left_out.gain is not None
    assert left_out.gain.value > 1.3, "it was 1 as long as the script as written was timed without its evaluations"


def test_lines_are_left_out_in_a_copy_of_the_script(script: pathlib.Path) -> None:
    """The line computes for 20 ms in each step of a few; the head of a loop has no value that could be used again."""
    slow = "        total = sum(range(1_000_000 + epoch))\n        for _ in range(2):\n            pass\n"
    text = SCRIPT.replace("        optimizer.step()\n", f"        optimizer.step()\n{slow}")
    script.write_text(text)
    line = text.splitlines().index("        total = sum(range(1_000_000 + epoch))") + 1
    slow_line, head, elsewhere = (
        ScriptSettings(without="lines", lines=(site,)) for site in (f"train.py:{line}", f"train.py:{line + 1}", "absent.py:1")
    )
    both = dataclasses.replace(slow_line, lines=(*slow_line.lines, *head.lines))
    asked = [slow_line, head, ScriptSettings(debug_off=True), elsewhere, both]
    seen = record(anchor_site=f"train.py:{STEP_LINE}")
    alone, other, anomaly, absent, joint = measure(Command.of(script, args=["4000"]), seen, asked, seconds=60)
    assert script.read_text() == text
    assert (other.failed, absent.failed) == (NO_VALUE, NO_VALUE)
    assert anomaly.gain is not None
    for found in (alone, joint):
        assert found.gain is not None, found.failed
        assert found.gain.value > 1.3, "the line takes most of a step"
        assert found.losses == "not compared"
    seen = dataclasses.replace(seen, contained="in place")
    (in_place,) = measure(Command.of(script, args=["4000"]), seen, [slow_line], seconds=60, in_place=True)
    assert in_place.failed == NO_OVERLAY


def test_a_line_without_which_the_script_fails_is_the_only_one_that_is_not_measured(script: pathlib.Path) -> None:
    """Both are measured in one copy of the script, until it fails."""
    lines = "        rows = list(range(epoch + 1))\n        rows.remove(epoch)\n        total = sum(range(1_000_000))\n"
    text = SCRIPT.replace("        optimizer.step()\n", f"        optimizer.step()\n{lines}")
    script.write_text(text)
    needed = text.splitlines().index("        rows = list(range(epoch + 1))") + 1
    asked = [ScriptSettings(without="lines", lines=(f"train.py:{line}",)) for line in (needed, needed + 2)]
    failing, slow = measure(Command.of(script, args=["4000"]), record(anchor_site=f"train.py:{STEP_LINE}"), asked, seconds=120)
    assert "ValueError: list.remove(x): x not in list (train.py:" in (failing.failed or "")
    assert slow.gain is not None, slow.failed
    assert slow.gain.value > 1.3


def test_a_step_that_never_ends_without_its_line_is_given_up(script: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the line is the step of an environment, which says when an episode is over."""
    monkeypatch.setattr(serving, "NEXT_STEP_S", 3.0)
    loop = "        left = 3\n        while left:\n            left = max(0, left - 1)\n"
    text = SCRIPT.replace("        optimizer.step()\n", f"        optimizer.step()\n{loop}")
    script.write_text(text)
    line = text.splitlines().index("            left = max(0, left - 1)") + 1
    asked = [ScriptSettings(without="lines", lines=(f"train.py:{line}",)), ScriptSettings(debug_off=True)]
    begun = time.monotonic()
    endless, other = measure(Command.of(script, args=["4000"]), record(anchor_site=f"train.py:{STEP_LINE}"), asked, seconds=300)
    assert endless.failed == "Without these lines no step ended within 3 s."
    assert other.gain is not None
    assert time.monotonic() - begun < 120, "a limit for a hang, no measurement of speed"


def test_evaluations_that_are_too_rare_for_the_time_are_not_measured() -> None:
    settings, seen = ScriptSettings(no_grad=True), record(evaluation_every=199.5)
    assert (_mixed_every(settings, seen), _mixed_every(ScriptSettings(), seen)) == (200, 0)
    assert _too_rare(200, settings, seen, 5.0) is None
    assert (
        _too_rare(200, settings, seen, 2.0)
        == "One of 200 steps has an evaluation, too few to measure it in 2 s; give more with --budget."
    )


def test_a_block_holds_as_many_steps_as_there_are_from_save_to_save() -> None:
    """Of blocks of one step, with a save in every second, the mean of the logarithms gave 1.33 where saving took a third."""
    settings = ScriptSettings(without="saving")
    calls = [
        CallRecord(name="torch.save", site=f"train.py:{row}", calls=n, ms=ms)
        for row, n, ms in ((7, 0.02, 0.1), (9, 0.489, 9.0))
    ]
    seen = record(calls=tuple(calls), run_s={"saving": 0.4})
    assert _mixed_every(settings, seen) == 2
    assert _mixed_every(settings, record()) == 1
    assert (
        _too_rare(200, settings, seen, 2.0) == "One of 200 steps saves, too few to measure it in 2 s; give more with --budget."
    )


def test_a_confirmation_needs_two_starts_and_the_losses() -> None:
    command = Command.of(__file__)
    seen = (record(start_s=start, step_ms=ms, cores=2) for start, ms in ((1.0, 1.0), (7.0, 400.0)))
    short, slow = (least_confirm_s(command, each) for each in seen)
    assert short == pytest.approx(2 * 1.0 + 1.0 + 2 * (1.0 + 24 * 0.001), rel=0.01)
    assert slow == pytest.approx(2 * 7.0 + 1.0 + 2 * (7.0 + 24 * 0.4), rel=0.01)


def test_time_is_kept_for_the_losses_of_what_is_surely_faster() -> None:
    measuring = _Measuring(Command.of(__file__), record(start_s=10.0), 100.0, False, None)
    sure = Outcome(settings=ScriptSettings(optimizer="fused"), gain=Interval(1.5, 1.4, 1.6))
    unsure = dataclasses.replace(sure, gain=Interval(1.5, 0.9, 2.5))
    measuring.seconds = 15.0
    assert measuring._has_time(2.0, {0: unsure})
    assert not measuring._has_time(2.0, {0: sure}), "its losses take 20 s"
    assert measuring._has_time(2.0, {0: dataclasses.replace(sure, losses="equal")})
    assert not measuring._has_time(2.0, {}, starts=2)


def test_a_script_that_crashes_with_settings_goes_on_with_the_next(script: pathlib.Path) -> None:
    text = SCRIPT.replace(
        "    for x, y in loader:\n",
        "    for x, y in loader:\n        if not torch.is_anomaly_enabled(): raise ValueError('no anomaly mode')\n",
    )
    script.write_text(text)
    command, asked = Command.of(script, args=["4000"]), [ScriptSettings(debug_off=True), ScriptSettings(set_to_none=True)]
    crash, other = measure(command, record(), asked, seconds=60)
    assert crash.failed is not None
    assert crash.failed.startswith("ValueError: no anomaly mode")
    assert "train.py:15" in crash.failed
    assert other.gain is not None


def test_what_pays_is_confirmed_written_and_applied(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    command = Command.of(script, args=["4000"])
    settings = ScriptSettings(debug_off=True)
    confirmed = confirm(command, record(), settings, seconds=12)
    assert confirmed.gain is not None
    assert confirmed.losses == "equal"
    again = confirm(command, record(start_s=30.0), settings, seconds=12, losses="within rounding")
    assert (again.gain is not None, again.losses) == (True, "within rounding"), "as was known, and not compared again"
    configuration = configured(command, settings)
    configuration.write(tmp_path / "trimtab.toml")
    assert Configuration.read(tmp_path / "trimtab.toml") == configuration
    with pytest.raises(UsageError, match="--overwrite"):
        configuration.write(tmp_path / "trimtab.toml")

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-m", "trimtab", "run", *words]
        return subprocess.run(
            arguments, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **variables}
        )

    applied, plain = run(str(script), "--", "2"), run(str(script), "--", "2", TRIMTAB="off")
    assert (applied.returncode, applied.stderr) == (0, "")
    assert applied.stdout.endswith("anomaly False\n")
    assert plain.stdout == applied.stdout.replace("anomaly False", "anomaly True")
    script.write_text(SCRIPT + "raise SystemExit(7)\n")
    changed = run(str(script), "--", "2")
    assert changed.returncode == 7
    assert "train.py has changed" in changed.stderr
    assert changed.stdout == plain.stdout


def configured(command: Command, settings: ScriptSettings) -> Configuration:
    return Configuration(
        name=command.name,
        command=("python", "train.py"),
        files=fingerprints(command),
        settings=settings,
        conditions=Conditions.here(),
        evidence=Evidence(speedup=(1.5, 1.4, 1.6), losses="equal", steps=24, step_ms=3.0),
    )


def test_the_file_holds_settings_of_loaders(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    loaders = {"train.py:11": LoaderSettings(workers=0, batch_fetch=True), "data/a b.py:3": LoaderSettings(persistent=False)}
    settings = ScriptSettings(loaders=loaders, environment={"OMP_NUM_THREADS": "2"}, optimizer="fused")
    written = configured(Command.of(script), settings)
    written.write(tmp_path / "other.toml")
    assert Configuration.read(tmp_path / "other.toml") == written
    assert list(written.files) == ["train.py"]
    script.unlink()
    command = Command((sys.executable,), script, tmp_path, "train.py")
    assert written.differences(command) == ["train.py is gone"]
    other = Command((sys.executable,), tmp_path / "finetune.py", tmp_path, "finetune.py")
    assert written.differences(other) == ["the settings are those of train.py and not of finetune.py"]


def test_settings_hold_for_the_files_that_a_script_imports(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "data.py").write_text("SIZE = 3\n")
    command = Command.of(script)
    known = fingerprints(command, ["data.py", "train.py"])
    assert changed_files(command, known) == []
    (tmp_path / "data.py").write_text("SIZE = 4\n")
    assert changed_files(command, known) == ["data.py has changed"]


def test_losses_are_judged_by_what_rounding_explains() -> None:
    written, perturbed = [1.0, 0.9, 0.8, 0.7], [1.0, 0.900001, 0.800001, 0.700002]
    assert verdict(written, perturbed, written) == "equal"
    assert verdict(written, perturbed, [1.0, 0.90001, 0.8, 0.7]) == "within rounding"
    assert verdict(written, perturbed, [1.0, 0.9, 0.81, 0.7]) == "different"
    assert verdict(written, [2.0, 0.1, 3.0, 0.2], [1.0, 0.5, 0.8, 0.7]) == "not compared", "chaos decides nothing"
    assert verdict(written[:2], perturbed, written) == "not compared"


def test_a_failure_is_told_in_a_sentence() -> None:
    log = 'Traceback (most recent call last):\n  File "/a/train.py", line 7, in <module>\n    f()\nRuntimeError: no primitive\n'
    assert failure(log, 1) == "RuntimeError: no primitive (train.py:7)."
    crash = (
        'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "/a/train.py", line 9 in f\n'
    )
    assert failure(crash + "Extension modules: numpy (total: 1)", -11) == "Fatal Python error: Segmentation fault (train.py:9)."
    assert failure("epoch 3\n", -9) == "The script ended with killed by signal 9: epoch 3"


def test_candidates_fit_what_was_seen() -> None:
    assert [described(each) for each in candidates(record())] == []
    loader = LoaderRecord(site="train.py:3", dataset="Images", batch_size=8, batches=40, wait_ms=1.0, padding=0.1)
    seen = record(
        loaders=(loader,),
        optimizers=(OptimizerRecord(site="a:1", name="Adam", tensors=9, elements=99, kernel="single", can_fuse=True),),
        modules=(ModuleRecord(name="Net", parameters=9, gradients_unused=0.5, convolutions=2, compiled=True),),
        memory=MemoryRecord(peak_mb=1, at_start_mb=1, page_faults=2000, huge_pages={"NAME": "value"}),
        cores=2,
        threads=2,
    )
    assert [described(each) for each in candidates(seen)] == [
        "no gradients in evaluation mode", "padding cut off", "channels_last layout", "fused optimizer",
        "NAME=value", "freed memory kept in the process", "1 worker, kept over epochs (train.py:3)",
        "1 thread, 1 worker, kept over epochs (train.py:3)", "1 thread",
    ]  # fmt: skip
    assert all("worker" not in described(each) for each in candidates(record(loaders=(loader,), cores=1)))


def test_settings_that_pay_are_merged_one_for_each_loader() -> None:
    def outcome(value: float, settings: ScriptSettings, losses: str = "equal") -> Outcome:
        return Outcome(settings=settings, gain=Interval(value, value - 0.01, value + 0.01), losses=losses)  # type: ignore[arg-type]

    one = ScriptSettings(loaders={"a:1": LoaderSettings(workers=0, batch_fetch=True)})
    two = ScriptSettings(loaders={"a:1": LoaderSettings(workers=2)})
    fused = ScriptSettings(optimizer="fused")
    lossy = ScriptSettings(no_grad=True)
    merged, alone = _choices([outcome(2, one), outcome(1.5, two), outcome(1.2, fused), outcome(3, lossy, "different")])
    assert merged == ScriptSettings(optimizer="fused", loaders={"a:1": LoaderSettings(workers=0, batch_fetch=True)})
    assert alone == one
    assert _choices([outcome(1.0, fused)]) == []
    likely = Outcome(settings=fused, gain=Interval(1.2, 0.9, 1.5), losses="equal")
    assert _choices([likely]) == [fused], "the confirmation decides"
