"""Every check of scripts against the suite that plug-ins use: records with the fault, and near misses that stay silent."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import pytest

from trimtab.core.check import CHECKS, Check
from trimtab.core.evidence import (
    CallRecord,
    DistributedRecord,
    LineRecord,
    MemoryRecord,
    OperatorRecord,
    ProbeRecord,
    RecompileRecord,
)
from trimtab.core.script_settings import LoaderSettings, ScriptSettings
from trimtab.hardware.environment import Environment, Gpu
from trimtab.probe.findings import run_checks
from trimtab.testing import ScriptCheckSuite, sound_records

SOUND = sound_records()
TRAINING, INFERENCE, BY_HAND, GPU = (SOUND[name] for name in ("training", "inference", "by_hand", "gpu"))
LOADER, OPTIMIZER, MODULE = TRAINING.loaders[0], TRAINING.optimizers[0], TRAINING.modules[0]
MEMORY = TRAINING.memory or MemoryRecord(peak_mb=0, at_start_mb=0)


def changed(record: ProbeRecord = TRAINING, *, phases: Mapping[str, float] | None = None, **fields: Any) -> ProbeRecord:
    """``record`` with other ``fields``, and other ms in some of its phases."""
    return dataclasses.replace(record, phases={**record.phases, **(phases or {})}, **fields)


def with_loader(record: ProbeRecord = TRAINING, *, wait: float = 40.0, **fields: Any) -> ProbeRecord:
    """``record`` with another loader, for which a step waits ``wait`` ms."""
    loader = dataclasses.replace(LOADER, **{"wait_ms": wait, **fields})
    return changed(record, loaders=(loader,), phases={"data": wait, "forward": max(0.0, 41.0 - wait / 2)})


def with_optimizer(**fields: Any) -> ProbeRecord:
    return changed(optimizers=(dataclasses.replace(OPTIMIZER, **fields),), phases={"zero_grad": fields.pop("zero", 2.0)})


def with_module(record: ProbeRecord = TRAINING, more: Mapping[str, Any] | None = None, **fields: Any) -> ProbeRecord:
    return changed(record, modules=(dataclasses.replace(MODULE, **fields),), **(more or {}))


def with_memory(record: ProbeRecord = TRAINING, **fields: Any) -> ProbeRecord:
    return changed(record, memory=dataclasses.replace(MEMORY, **fields))


def with_lines(*lines: LineRecord, record: ProbeRecord = TRAINING, **fields: Any) -> ProbeRecord:
    texts = {**record.texts, **{line.site: line.text for line in lines}}
    return changed(record, lines=(*record.lines, *lines), texts=texts, **fields)


def line(text: str, share: float, phase: Any = "other", number: int = 50, **fields: Any) -> LineRecord:
    return LineRecord(site=f"train.py:{number}", text=text, phase=phase, share=share, **fields)


def call(name: str, ms: float, calls: float = 1.0) -> CallRecord:
    return CallRecord(name=name, site="train.py:60", calls=calls, ms=ms)


READS = with_loader(workers=0, read_ms=None)
SLOW = (line("image = flip(blur(image))", 0.2, "data", function="__getitem__", runs=32.0),)
LOOP = (line("out[y, x] = image[x, y]", 0.3, "data", function="__getitem__", runs=32.0 * 4096),)
OPENS = (line("with open(self.paths[i], 'rb') as file:", 0.2, "data", function="__getitem__"),)
HAND = (line("x = torch.stack([torch.tensor(rows[i]) for i in places])", 0.3),)
PAIRS = (
    line("distance = (a - b).pow(2).sum().sqrt()", 0.1, function="loss", number=70, runs=32.0),
    line("total = total + distance", 0.05, function="loss", number=71, runs=32.0),
)
COPY = OperatorRecord(name="aten::clone", calls=3.0, ms=6.0, shapes="float32[32, 64, 32, 32]", site="train.py:52")
SOFTMAX = OperatorRecord(name="aten::_softmax", calls=8.0, ms=10.0, shapes="[32, 4, 64, 64]", site="train.py:53")
PRODUCT = OperatorRecord(name="aten::bmm", calls=16.0, ms=10.0, shapes="[128, 64, 64]")
DDP = SOUND["distributed"].distributed or DistributedRecord(ranks=2, rank=0)


def ranks(**fields: Any) -> ProbeRecord:
    return changed(SOUND["distributed"], distributed=dataclasses.replace(DDP, **fields))


def compiled(**fields: Any) -> ProbeRecord:
    return changed(recompiles=(RecompileRecord(site="model.py:7", reason="size of x", **fields),))


FAULTS: dict[str, dict[str, ProbeRecord]] = {
    "data_wait": {"two workers already": with_loader(read_ms=70.0)},
    "one_by_one": {
        "a TensorDataset": with_loader(tensors=True, workers=0, read_ms=None),
        "a data set that takes places, with workers": with_loader(batch_fetch=True, workers=1),
    },
    "workers_few": {"none": READS, "one": with_loader(workers=1, read_ms=90.0), "draws": with_loader(workers=0, draws=True)},
    "workers_for_nothing": {"in memory": with_loader(tensors=True, read_ms=None), "dear": with_loader(wait=4.0, read_ms=0.5)},
    "epoch_start": {
        "not persistent": changed(
            loaders=(dataclasses.replace(LOADER, persistent=False, iterators=4, start_ms=300.0),),
            run_s={"start": 3.0, "steps": 4.0, "epoch start": 1.2},
        )
    },
    "slow_example": {
        "a loop": with_lines(*LOOP, record=READS),
        "lines that workers do not help": with_lines(*SLOW),
        "a loop in a worker": with_loader(workers=1, read_ms=90.0, lines=(dataclasses.replace(LOOP[0], share=0.9),)),
    },
    "small_files": {
        "counted": with_loader(workers=0, opens=1.0),
        "seen": with_lines(*OPENS, record=READS),
    },
    "padding": {"nine of ten": with_loader(wait=1.0, padding=0.9)},
    "data_by_hand": {"stacked": with_lines(*HAND, record=BY_HAND)},
    "copies": {"pageable": changed(GPU, phases={"copy": 9.0}, loaders=(dataclasses.replace(LOADER, pin_memory=False),))},
    "optimizer_loop": {
        "foreach": with_optimizer(kernel="foreach"),
        "single": with_optimizer(kernel="single", can_fuse=False),
    },
    "zero_fill": {"every step": with_optimizer(zero_filled=1.0)},
    "debug_left_on": {
        "anomaly": changed(
            flags={"anomaly mode": "train.py:9"},
            texts={**TRAINING.texts, "train.py:9": "torch.autograd.set_detect_anomaly(True)"},
        ),
        "blocking": changed(GPU, flags={"CUDA_LAUNCH_BLOCKING": ""}),
    },
    "sync_points": {"item": changed(GPU, phases={"synchronization": 12.0}, calls=(call("Tensor.item", 12.0),))},
    "logging": {
        "histograms": changed(phases={"logging": 20.0}, calls=(call("SummaryWriter.add_histogram", 19.0),)),
        "a line": with_lines(line("bar.set_postfix(loss=loss)", 0.1)),
    },
    "layout": {
        "contiguous": with_module(channels_last=0.0),
        "lost on the way": changed(operators=(*TRAINING.operators, COPY), texts={"train.py:52": "        x = x.contiguous()"}),
    },
    "precision": {"float32": with_module(autocast=None), "GPU": with_module(GPU, autocast=None)},
    "float64": {
        "parameters": with_module(dtype="float64"),
        "inputs": with_module(inputs=("float64[32, 8]",)),
        "batches": with_loader(dtypes=("float64", "int64"), wait=10.0),
    },
    "attention_by_hand": {
        "operators": changed(operators=(*TRAINING.operators, SOFTMAX, PRODUCT)),
        "transformers": with_module(attention="eager"),
    },
    "small_operators": {"many": changed(operator_calls=2000.0, small_operators=0.6)},
    "threads": {
        "too many": changed(threads=16, calls=(call("torch.set_num_threads", 0.0, 0.0),)),
        "too few": changed(BY_HAND, threads=1, cpu_share=0.5),
    },
    "page_faults": {
        "many": with_memory(page_faults=60_000.0),
        "huge pages": with_memory(page_faults=60_000.0, huge_pages={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
    },
    "gradients_for_nothing": {
        "inference": with_module(INFERENCE, training=False, gradients_unused=1.0, unused_ms=90.0, unused_site="train.py:38"),
        "validation": with_module(gradients_unused=0.3, unused_ms=90.0),
    },
    "evaluation_share": {"half": changed(run_s={"start": 3.0, "steps": 4.0, "evaluation": 4.0})},
    "saving_share": {
        "in the step": changed(phases={"saving": 20.0}, calls=(call("torch.save", 20.0),)),
        "between": changed(run_s={"start": 3.0, "steps": 4.0, "saving": 1.0}),
    },
    "memory_growth": {"a leak": with_memory(growth_mb=8.19, growth_low_mb=8.18, rises=1.0, grows_at="train.py:41")},
    "fragmentation": {"gaps": with_memory(GPU, reserved_mb=9000.0, allocated_mb=4000.0)},
    "framework": {"a trainer": changed(phases={"other": 30.0})},
    "slow_lines": {"own code": with_lines(line("weights = recompute(model)", 0.2))},
    "metric_every_step": {
        "sklearn": with_lines(line("auc = roc_auc_score(y, p)", 0.2)),
        "function": with_lines(line("x = s(y)", 0.1, function="batch_accuracy")),
    },
    "batch_loop": {
        "a loss": with_lines(*PAIRS),
        "a model": with_module(calls=32.0, forward_ms=1.25),
        "operators": with_lines(
            dataclasses.replace(PAIRS[0], runs=0.0),
            operators=(OperatorRecord(name="aten::sub", calls=64.0, ms=1.0, site="train.py:70", site_calls=32.0),),
        ),
    },
    "accumulation_sync": {"four": ranks(reductions=4.0)},
    "uneven_ranks": {"late": ranks(skew_ms=20.0)},
    "ddp_flags": {"unused": ranks(find_unused=True), "DataParallel": ranks(kind="data_parallel")},
    "recompiles": {"shapes": compiled(recompiles=5, ms=4000.0)},
    "graph_breaks": {"a print": compiled(graph_breaks=2, ms=900.0)},
    "compile_repeated": {"each step": changed(calls=(call("torch.compile", 1.0),))},
    "healthy": SOUND,
}

NEAR: dict[str, dict[str, ProbeRecord]] = {
    "data_wait": {"a closer reason": READS, "little": with_loader(wait=5.0, read_ms=70.0)},
    "one_by_one": {"streams": with_loader(tensors=True, iterable=True), "another class": READS},
    "workers_few": {
        "one core": changed(READS, cores=1),
        "in memory": with_loader(tensors=True, workers=0),
        "quick": with_loader(wait=0.9, workers=0),
    },
    "workers_for_nothing": {"slow to read": with_loader(read_ms=80.0), "none": with_loader(workers=0, read_ms=0.5)},
    "epoch_start": {"persistent": changed(run_s={"steps": 4.0, "epoch start": 1.2})},
    "slow_example": {"what workers hide": with_lines(*SLOW, record=READS), "files": with_lines(*OPENS, record=READS)},
    "small_files": {"one file for all": with_loader(opens=0.01), "logs": with_lines(line("open(log, 'a').write(text)", 0.2))},
    "padding": {"a tenth": with_loader(padding=0.1), "unknown": with_loader(padding=None)},
    "data_by_hand": {"beside a loader": with_lines(*HAND)},
    "copies": {"pinned": changed(GPU, phases={"copy": 9.0}), "a CPU": changed(phases={"copy": 9.0})},
    "optimizer_loop": {"not torch's": with_optimizer(kernel="own"), "little": with_optimizer(kernel="single", ms=0.5)},
    "zero_fill": {"freed": with_optimizer(zero_filled=0.0)},
    "debug_left_on": {},
    "sync_points": {"a CPU": changed(phases={"synchronization": 12.0}, calls=(call("Tensor.item", 12.0),))},
    "logging": {"every hundredth": changed(phases={"logging": 0.5}, calls=(call("print", 0.5, 0.01),))},
    "layout": {
        "no images": with_module(channels_last=0.0, inputs=("float32[32, 100]",)),
        "masks": changed(operators=(*TRAINING.operators, dataclasses.replace(COPY, shapes="[32, 64]"))),
    },
    "precision": {
        "autocast": TRAINING,
        "recurrent": with_module(autocast=None, recurrent=2),
        "no products": with_module(autocast=None, matrix_products=0),
    },
    "float64": {"labels": with_loader(dtypes=("float64",), wait=1.0)},
    "attention_by_hand": {
        "a softmax over classes": changed(
            operators=(*TRAINING.operators, dataclasses.replace(SOFTMAX, shapes="[32, 10]"), PRODUCT)
        ),
        "sdpa too": changed(
            operators=(
                *TRAINING.operators,
                SOFTMAX,
                PRODUCT,
                OperatorRecord(name="aten::scaled_dot_product_attention", calls=4, ms=9.0),
            )
        ),
    },
    "small_operators": {
        "compiled": with_module(compiled=True, more={"operator_calls": 2000.0, "small_operators": 0.6}),
        "few": changed(operator_calls=60.0, small_operators=0.6),
    },
    "threads": {
        "a rank each": SOUND["distributed"],
        "busy": changed(BY_HAND, threads=1, cpu_share=0.9),
        "workers": changed(threads=1, cpu_share=0.5),
        "a GPU": changed(GPU, threads=16),
    },
    "page_faults": {"some": with_memory(page_faults=5000.0)},
    "gradients_for_nothing": {
        "short": with_module(gradients_unused=0.1, unused_ms=90.0, more={"run_s": {"steps": 4.0, "evaluation": 0.01}})
    },
    "evaluation_share": {
        "a tenth": changed(run_s={"steps": 4.0, "evaluation": 0.4}),
        "a closer reason": with_module(gradients_unused=0.3, unused_ms=90.0, more={"run_s": {"steps": 4.0, "evaluation": 4.0}}),
    },
    "saving_share": {"rarely": changed(run_s={"steps": 4.0, "saving": 0.04}, calls=(call("torch.save", 1.0),))},
    "memory_growth": {
        "compiled code": changed(
            memory=dataclasses.replace(MEMORY, growth_mb=1.5, growth_low_mb=1.0, rises=0.95),
            recompiles=(RecompileRecord(site="model.py:7", reason="size of x", recompiles=9),),
        ),
        "a cache that fills": with_memory(growth_mb=2.0, growth_low_mb=1.0, rises=0.3),
        "noise": with_memory(growth_mb=0.06, growth_low_mb=0.01, rises=0.9),
    },
    "fragmentation": {"small": with_memory(GPU, reserved_mb=400.0, allocated_mb=100.0)},
    "framework": {
        "own lines": with_lines(line("weights = recompute(model)", 0.3), phases={"other": 30.0}),
        "no lines": changed(lines=(), phases={"other": 30.0}),
    },
    "slow_lines": {
        "a loss": with_lines(line("loss = F.mse_loss(y, x) + kld", 0.2)),
        "a log": with_lines(line("print(loss)", 0.2)),
        "a loop": with_lines(*PAIRS),
    },
    "metric_every_step": {
        "rarely": with_lines(line("auc = roc_auc_score(y, p)", 0.01)),
        "accumulation": with_lines(line("accumulate(x, mapped)", 0.2)),
    },
    "batch_loop": {
        "another number": with_lines(*(dataclasses.replace(each, runs=20.0) for each in PAIRS)),
        "once": with_lines(*(dataclasses.replace(each, runs=1.0) for each in PAIRS)),
        "one call of many operators": with_lines(
            dataclasses.replace(PAIRS[0], runs=1.0),
            operators=(OperatorRecord(name="aten::sub", calls=64.0, ms=1.0, site="train.py:70", site_calls=64.0),),
        ),
    },
    "accumulation_sync": {"fsdp": ranks(kind="fsdp", reductions=4.0)},
    "uneven_ranks": {"unknown": ranks(skew_ms=None), "busy": changed(ranks(skew_ms=20.0), others_share=0.5)},
    "ddp_flags": {"needed": ranks(find_unused=True, unused_found=True)},
    "recompiles": {"breaks": compiled(graph_breaks=2)},
    "graph_breaks": {"compiled again": compiled(recompiles=2)},
    "compile_repeated": {"once": changed(calls=(call("torch.compile", 1.0, 0.025),))},
    "healthy": {"waits": with_loader(), "waits and logs": changed(phases={"forward": 10.0, "other": 31.0})},
}
MACHINE = dataclasses.replace(
    Environment.capture(),
    isa=("avx2", "avx512_bf16"),
    compiler="g++ 12",
    gpus=(Gpu(name="a GPU", capability="9.0", memory_mb=80_000.0),),
)


def script_checks() -> list[str]:
    return [name for name, cls in CHECKS.items() if cls.about == "script"]


class TestScriptChecks(ScriptCheckSuite):
    @pytest.fixture(params=script_checks())
    def technique(self, request: pytest.FixtureRequest) -> Check:
        self.case = request.param
        return CHECKS[request.param]()

    def faulty(self) -> Mapping[str, ProbeRecord]:
        return FAULTS[self.case]

    def records(self) -> Mapping[str, ProbeRecord]:
        return NEAR[self.case] if self.case == "healthy" else {**super().records(), **NEAR[self.case]}

    def environment(self) -> Environment:
        return MACHINE


def found(record: ProbeRecord, rule: str) -> Any:
    (finding,) = CHECKS[rule]().run(record, MACHINE)
    return finding


def test_every_check_of_scripts_has_faults_and_near_misses() -> None:
    assert set(script_checks()) == set(FAULTS) == set(NEAR)


@pytest.mark.parametrize("name", [name for name in script_checks() if name != "healthy"])
def test_a_fault_is_named_among_all_checks(name: str) -> None:
    for record in FAULTS[name].values():
        findings, failures = run_checks(record, MACHINE)
        assert name in [finding.rule for finding in findings]
        assert "healthy" not in [finding.rule for finding in findings]
        assert failures == []


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_script_is_healthy_and_nothing_else(name: str) -> None:
    findings, failures = run_checks(SOUND[name], MACHINE)
    assert ([finding.rule for finding in findings], failures) == (["healthy"], [])


def test_slow_lines_are_left_out_where_they_run_within_a_step_and_no_other_ceiling_has_them() -> None:
    ran = [line("value = auc(scores)", 0.2, number=50, runs=1.0), line("return roc(scores)", 0.1, "copy", number=51, runs=2.0)]
    others = [line("writer.add_scalar('acc', acc)", 0.1, "logging", number=52, runs=1.0), line("f1.wait()", 0.1, number=53)]
    (metric,) = [each for each in run_checks(with_lines(*ran, *others), MACHINE)[0] if each.rule == "metric_every_step"]
    assert metric.ceiling == ScriptSettings(without="lines", lines=("train.py:50", "train.py:51"))
    uncounted = changed(TRAINING, lines=(), texts={})
    around = line("metrics = trainer.train()", 0.5)
    (metric,) = [each for each in run_checks(with_lines(around, record=uncounted), MACHINE)[0] if "metric" in each.rule]
    assert metric.ceiling == ScriptSettings(without="lines", lines=(around.site,)), "no line was counted"


def test_remedies_are_those_that_the_evidence_asks_for() -> None:
    workers = found(READS, "workers_few")
    assert workers.settings == ScriptSettings(loaders={LOADER.site: LoaderSettings(workers=1, persistent=True)})
    assert workers.ceiling == ScriptSettings(without="data")
    assert workers.edit.replacement == "loader = DataLoader(Photos(), batch_size=32, num_workers=1, persistent_workers=True)"
    fused = found(with_optimizer(kernel="foreach"), "optimizer_loop")
    assert fused.settings == ScriptSettings(optimizer="fused")
    anomaly = found(FAULTS["debug_left_on"]["anomaly"], "debug_left_on")
    assert anomaly.edit.replacement == "torch.autograd.set_detect_anomaly(False)"
    assert anomaly.settings == ScriptSettings(debug_off=True)
    lost = found(FAULTS["layout"]["lost on the way"], "layout")
    assert lost.edit.replacement == "        x = x.contiguous(memory_format=torch.channels_last)"
    unused = found(FAULTS["gradients_for_nothing"]["inference"], "gradients_for_nothing")
    assert unused.edit.replacement == "    with torch.no_grad():\n        loss = criterion(model(x), y)"
    assert found(FAULTS["memory_growth"]["a leak"], "memory_growth").level == "error"
    for reason, settings in (
        ("tensor 'x' size mismatch at index 1. expected 40, actual 48", ScriptSettings(compile_dynamic=True)),
        ("x.size()[0] == 4", ScriptSettings(compile_dynamic=True)),
        ("self.step == 3", None),
    ):
        again = changed(recompiles=(RecompileRecord(site="model.py:7", reason=reason, recompiles=5, ms=4000.0),))
        assert found(again, "recompiles").settings == settings


def test_a_dear_example_comes_before_workers_that_would_only_share_it_out() -> None:
    loader = dataclasses.replace(LOADER, workers=0, wait_ms=90.0, read_ms=90.0)
    dear = changed(READS, loaders=(loader,), phases={"data": 90.0, "forward": 4.0, "backward": 6.0, "other": 0.0}, cores=2)
    for rule, case in {
        "slow_example": with_lines(dataclasses.replace(LOOP[0], share=0.85), record=dear),
        "small_files": changed(dear, loaders=(dataclasses.replace(loader, opens=1.0),)),
    }.items():
        assert [finding.rule for finding in run_checks(case, MACHINE)[0]] == [rule, "workers_few"]
    worker = changed(FAULTS["slow_example"]["a loop in a worker"], cores=2)
    assert [finding.rule for finding in run_checks(worker, MACHINE)[0]] == ["slow_example", "workers_few"]
    assert found(FAULTS["precision"]["float32"], "precision").share is None, "no evidence tells what it would save"


def test_what_a_machine_cannot_do_is_not_advised() -> None:
    bare = dataclasses.replace(MACHINE, isa=("avx2",), compiler=None, gpus=())
    assert CHECKS["precision"]().run(FAULTS["precision"]["float32"], bare) == []
    (finding,) = CHECKS["small_operators"]().run(FAULTS["small_operators"]["many"], bare)
    assert finding.settings is None


def test_a_check_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Check, subject: ProbeRecord, environment: Environment) -> Any:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(CHECKS["padding"], "run", fails)
    findings, failures = run_checks(FAULTS["zero_fill"]["every step"], MACHINE)
    assert "zero_fill" in [finding.rule for finding in findings]
    assert len(failures) == 1
    assert failures[0].startswith("The check padding failed: ZeroDivisionError: division by zero")


def test_the_table_of_checklists_names_every_check_and_says_what_is_declined() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "doctor-checks.md").read_text(encoding="utf-8")
    assert [name for name in script_checks() if f"(../src/trimtab/checks/{name}.py)" not in page] == []
    advice = (
        "in-place",
        "views",
        "activation function, depth",
        "initialisation",
        "`channels_last`",
        "checkpointing",
        "mixed",
        "streams",
    )
    advice += ("cuDNN benchmark", "num_workers", "pin_memory", "prefetch", "data format", "quantization", "fusion")
    assert [word for word in advice if not re.search(rf"^\| [^|]*{re.escape(word)}", page, re.MULTILINE)] == []
