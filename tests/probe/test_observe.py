"""Scripts in real processes: what a probe sees of them, and what it leaves of them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from trimtab.checks.memory_growth import MemoryGrowth
from trimtab.core.evidence import ProbeRecord
from trimtab.errors import UsageError, WorkloadError
from trimtab.measure.host import OtherLoad
from trimtab.probe.command import Command
from trimtab.probe.observe import observe

SCRIPTS = pathlib.Path(__file__).parent / "scripts"

Watch = Callable[..., ProbeRecord]


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Observe a script once, in a folder of its own, however many tests ask for it."""
    known: dict[str, ProbeRecord] = {}

    def run(name: str) -> ProbeRecord:
        if name not in known:
            folder = tmp_path_factory.mktemp("script")
            (folder / name).write_text((SCRIPTS / name).read_text(encoding="utf-8"), encoding="utf-8")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                known[name] = observe(Command.of(name), steps=12, seconds=120)
            assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == [name], "the script wrote nothing"
        return known[name]

    return run


def line(name: str, text: str) -> str:
    """``train.py:30`` for the line of a script that holds ``text``."""
    lines = (SCRIPTS / name).read_text(encoding="utf-8").splitlines()
    return f"{name}:{next(number for number, found in enumerate(lines, 1) if text in found)}"


def test_a_step_is_split_into_phases_that_add_up(watch: Watch) -> None:
    for name in ("train.py", "gan.py", "by_hand.py", "embed.py"):
        record = watch(name)
        assert sum(record.phases.values()) == pytest.approx(record.step_ms, rel=1e-9)
        assert record.steps >= 5
        assert record.steps == len(record.times_ms)
        assert all(ms > 0 for ms in record.times_ms)
        assert record.start_s > 0
        assert not record.finished
        assert record.operators
        assert record.timeline
        assert record.contained in ("overlay", "guarded")


def test_training_with_an_optimizer(watch: Watch) -> None:
    record = watch("train.py")
    assert (record.anchor, record.anchor_site) == ("optimizer", line("train.py", "torch.optim.Adam"))
    for phase in ("data", "forward", "backward", "optimizer", "zero_grad", "synchronization", "logging", "other"):
        assert record.phases[phase] > 0, phase
    (optimizer,) = record.optimizers
    assert (optimizer.name, optimizer.tensors, optimizer.kernel, optimizer.can_fuse) == ("Adam", 4, "single", True)
    assert (optimizer.steps, optimizer.zero_filled) == (1.0, 1.0)
    assert record.flags == {"anomaly mode": line("train.py", "set_detect_anomaly")}
    assert all(calls[0].startswith("module (train.py:") for calls in (stack.calls for stack in record.stacks))
    assert record.energy
    assert len(record.losses) >= record.steps
    assert "model.pt" in record.writes
    assert record.sources == ("train.py",)


def test_loaders_are_known_by_their_line(watch: Watch) -> None:
    trained, held_out = watch("train.py").loaders
    assert (trained.site, held_out.site) == (line("train.py", "batch_size=32"), line("train.py", "batch_size=160"))
    assert (trained.dataset, trained.examples, trained.batch_size, trained.workers) == ("TensorDataset", 320, 32, 0)
    assert trained.tensors
    assert trained.batch_fetch
    assert not trained.draws
    assert trained.wait_ms > 0
    assert trained.read_ms is not None
    assert trained.batch_bytes == 32 * (64 * 4 + 8)
    assert held_out.batches == 0, "the evaluation is no part of a step"


def test_calls_of_the_script_are_known_by_their_line(watch: Watch) -> None:
    calls = {(call.name, call.site): call for call in watch("train.py").calls}
    assert calls["Tensor.item", line("train.py", "history.append")].calls == 1.0
    assert calls["print", line("train.py", "print(")].calls == 1.0
    assert ("clip_grad_norm_", line("train.py", "clip_grad")) in calls
    assert calls["zero_grad", line("train.py", "zero_grad")].calls == 1.0
    assert calls["torch.save", line("train.py", "torch.save")].calls < 0.5


def test_memory_that_grows_is_traced_to_its_line(watch: Watch) -> None:
    memory = watch("train.py").memory
    assert memory is not None
    assert memory.growth_mb > 1.0, "2 MB are kept in each step"
    assert memory.growth_low_mb > MemoryGrowth.least_mb, "a loaded machine adds memory of its own to a few steps"
    assert memory.rises > 0.9
    assert memory.grows_at == line("train.py", "history.append")
    assert memory.page_faults > 0
    assert memory.lines, "sampled, so which of those that allocate are seen differs from run to run"
    assert all(mb > 0 and site.startswith("train.py:") for site, mb in memory.lines)
    assert all(0 < ms < watch("train.py").step_ms and memory.at_start_mb < mb < 2 * memory.peak_mb for ms, mb in memory.curve)


def test_operators_are_known_by_the_line_that_calls_them(watch: Watch) -> None:
    products = {operator.name: operator for operator in watch("train.py").operators}
    assert (products["aten::addmm"].site, products["aten::addmm"].site_calls) == (line("train.py", "loss_of(model"), 1.0)
    assert products["aten::convolution_backward"].site is None


def test_gradients_that_an_evaluation_records_are_unused(watch: Watch) -> None:
    (module,) = watch("train.py").modules
    assert (module.name, module.convolutions, module.channels_last, module.training) == ("Sequential", 1, 0.0, True)
    assert module.inputs == ("float32[32, 64]",)
    assert module.calls == 1.0
    assert 0 < module.gradients_unused < 0.5
    assert module.unused_ms > 0


def test_of_two_optimizers_the_rarer_one_ends_a_step(watch: Watch) -> None:
    record = watch("gan.py")
    assert record.anchor_site == line("gan.py", "generator_optimizer =")
    critic, generator = record.optimizers
    assert (critic.steps, generator.steps) == (3.0, 1.0)
    assert record.loaders == ()
    assert record.flags == {}, "anomaly mode was turned off"
    assert {module.name for module in record.modules} == {"Linear", "Sequential"}


def test_without_an_optimizer_a_backward_pass_ends_a_step(watch: Watch) -> None:
    record = watch("by_hand.py")
    assert (record.anchor, record.anchor_site) == ("backward", line("by_hand.py", "backward()"))
    assert record.modules[0].recurrent == 1
    assert record.optimizers == ()


def test_a_compiled_model_that_meets_many_sizes_is_compiled_again(watch: Watch) -> None:
    record = watch("compiled.py")
    (again,) = record.recompiles
    assert again.recompiles >= 10
    assert "size mismatch" in again.reason
    assert again.site.startswith("torch/_dynamo/"), "the model's class is torch's"
    (module,) = record.modules
    assert (module.compiled, module.calls) == (True, 1.0)


READS = """
import socket
import torch
from parts.sizes import SIZE

server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(("localhost", server.getsockname()[1])).close()
model = torch.nn.Linear(SIZE, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


@torch.compile(backend="eager")
def loss_of(x):
    y = model(x).square().mean()
    print("traced")
    return y + 1


kept = []
for step in range(400):
    optimizer.zero_grad()
    loss = loss_of(torch.randn(4, SIZE))
    loss.backward()
    optimizer.step()
    kept.append(loss)
    if float(loss) < 0 or bool(loss < 0):
        break
"""


def test_reads_of_a_value_kept_graphs_hosts_own_files_and_graph_breaks_are_known(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "sizes.py").write_text("SIZE = 8\n", encoding="utf-8")
    (tmp_path / "reads.py").write_text(READS, encoding="utf-8")
    record = observe(Command.of("reads.py"), steps=12, seconds=120)
    lines = {text: f"reads.py:{number}" for number, text in enumerate(READS.splitlines(), 1)}
    reads = {call.name: call for call in record.calls if call.site == lines["    if float(loss) < 0 or bool(loss < 0):"]}
    assert (reads["float(tensor)"].calls, reads["bool(tensor)"].calls) == (1.0, 1.0)
    assert record.memory is not None
    assert (record.memory.grows_at, record.memory.graphs_kept) == (lines["    kept.append(loss)"], ("loss",))
    assert record.counters[lines["    kept.append(loss)"]] == "step"
    (host,) = record.network
    assert host.startswith("localhost:")
    assert record.sources == ("parts/sizes.py", "reads.py")
    broken = [each for each in record.recompiles if each.graph_breaks]
    assert [each.site for each in broken] == [lines['    print("traced")']]
    assert record.texts[broken[0].site] == '    print("traced")'
    assert "print" in broken[0].reason
    assert broken[0].ms > 0


def test_in_inference_a_batch_is_a_step(watch: Watch) -> None:
    record = watch("embed.py")
    assert (record.anchor, record.anchor_site) == ("batch", line("embed.py", "DataLoader(Texts"))
    (loader,) = record.loaders
    assert (loader.workers, loader.batch_size, loader.draws) == (1, 4, True)
    assert loader.padding == pytest.approx(0.75)
    assert loader.read_ms is not None
    assert {each.site: each.runs for each in loader.lines}[line("embed.py", "mask[:8]")] == 4.0, "of one batch, in the worker"
    (module,) = record.modules
    assert not module.training
    assert module.gradients_unused == 1.0
    assert sum(call.calls for call in record.calls if call.name == "Tensor.tolist") == pytest.approx(4.0, abs=0.5)


ANSWERS = """
import torch


class Twice(torch.nn.Sequential):
    def __call__(self, x):
        return super().__call__(2 * x)


torch.nn.Identity()(torch.ones(1))
model = Twice(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)).eval()
x = torch.randn(256, 64)
with torch.no_grad():
    right = model.forward(2 * x)
    while True:
        if not torch.equal(model(x), right):
            raise ValueError("called twice")
"""


def test_calls_of_a_model_without_a_loader_are_steps(tmp_path: pathlib.Path) -> None:
    """Also where a class calls its module itself, and where something else was called before the model was made."""
    (tmp_path / "answer.py").write_text(ANSWERS, encoding="utf-8")
    record = observe(Command.of(tmp_path / "answer.py"), steps=12, seconds=120)
    assert (record.anchor, record.anchor_site) == ("forward", "Twice")
    (module,) = record.modules
    assert (module.training, module.calls, module.gradients_unused) == (False, 1.0, 0.0)
    assert record.phases["forward"] > 0


def test_one_rank_of_a_launcher_reports(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["torchrun", "--nproc_per_node", "2", str(SCRIPTS / "ranks.py")]
    record = observe(Command.of(launcher=words), steps=8, seconds=120)
    assert record.anchor_site == line("ranks.py", "torch.optim.SGD")
    assert record.distributed is not None
    assert (record.distributed.ranks, record.distributed.rank, record.distributed.kind) == (2, 0, "ddp")
    assert record.distributed.reductions == 1.0
    assert record.distributed.waits_ms is not None
    assert 0 < record.distributed.waits_ms < record.step_ms
    assert record.phases["communication"] == pytest.approx(record.distributed.waits_ms, rel=0.01)
    assert sum(record.phases.values()) == pytest.approx(record.step_ms, rel=1e-9)
    assert record.distributed.skew_ms is not None
    assert record.distributed.skew_ms > 0


def test_a_script_that_ends_early_was_seen_to_its_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (SCRIPTS / "train.py").read_text(encoding="utf-8").replace("set_num_threads(1)", "set_num_threads(2)")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr("trimtab.probe.observe.other_load", lambda: OtherLoad(0.9, 2))
    record = observe(Command.of("train.py", args=["--epochs", "1"]), steps=1000, seconds=120, in_place=True)
    assert record.threads == 2
    assert "the script was watched with one thread in place of 2" in record.notes[-1]
    assert record.finished
    assert record.exit_code == 0
    assert 1 <= record.steps < 10
    assert record.contained == "in place"
    assert (tmp_path / "model.pt").exists()


def test_a_script_that_fails_is_told_with_its_traceback() -> None:
    with pytest.raises(WorkloadError, match=r"failing.py ended with exit code 1 before a step(.|\n)*no data in ./data"):
        observe(Command.of(SCRIPTS / "failing.py"), seconds=120)


def test_without_a_step_the_reasons_are_told(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plain.py").write_text("print('nothing to do')\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"no step of plain.py was seen(.|\n)*python -I(.|\n)*nothing to do"):
        observe(Command.of(tmp_path / "plain.py"), seconds=60)
    with pytest.raises(UsageError, match="at least one step"):
        observe(Command.of(tmp_path / "plain.py"), steps=0)
