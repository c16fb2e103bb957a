"""The peers of ``compress.py``, each used as its own documentation says, on the workloads of ``compress_workloads.py``.

Torch-Pruning removes a uniform half of the channels and is fine-tuned with labels; the result runs in ONNX Runtime. NNCF
quantizes with accuracy control on the selection data; the result runs in OpenVINO. Neural Compressor tunes the precision
itself; torch.compile runs the result, as it documents. Every form is scored on the test data and timed in turns with our
artifact, in this process, with one thread and one example a call.
"""

from __future__ import annotations

import importlib.util
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import compress_workloads as workloads
import material
import torch
from torch import nn
from torch._inductor import config as inductor

import trimtab
from trimtab.core.workload import as_call
from trimtab.measure.pairs import compare
from trimtab.measure.timer import LocalRunner

TIMED_S, EPOCHS, RATE = 8.0, 64, 5e-3
"""Seconds of a timing; epochs of the fine-tuning, about 800 updates of 64 examples; its largest learning rate."""
KEPT = 0.5
"""Share of the channels that Torch-Pruning keeps."""

Call = Callable[..., Any]


def peers(name: str, limit: float, artifact: pathlib.Path, scale: float) -> list[dict[str, Any]]:
    """For each peer its test score, whether that keeps the ``limit``, and how much faster the artifact is; or why not."""
    workload = getattr(workloads, name)()
    args, _ = as_call(workload.inputs)
    loaded = trimtab.open_artifact(artifact)
    ours = loaded.load(trust=True)
    leaves = [leaf.clone() for leaf in loaded.golden().cases[0].inputs]
    wanted = judged(workload, workload.build_model().eval())
    rows = []
    for peer, make in {"Torch-Pruning": torch_pruning, "NNCF": nncf_control, "Neural Compressor": neural_compressor}.items():
        row: dict[str, Any] = {"peer": peer, "score": None, "keeps": False, "ratio": None, "reason": None}
        try:
            call = make(workload, limit)
            row["score"] = judged(workload, call)
            row["keeps"] = wanted - row["score"] <= limit
            runners = [LocalRunner(lambda: ours.run(leaves)), LocalRunner(lambda call=call: call(*args))]  # type: ignore[misc]
            ratio = compare(*runners, width=0.02, seconds=scale * TIMED_S).ratio
            row["ratio"] = {"value": ratio.value, "low": ratio.low, "high": ratio.high}
        except Exception as error:  # noqa: BLE001 - whatever a peer's code does is its result
            row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        rows.append(row)
    inductor.freezing = False  # Neural Compressor's form is compiled by now
    return rows


def judged(workload: trimtab.Workload, call: Call) -> float:
    """The score of ``call`` on the test data, one example a call."""
    evaluation = workload.evaluation
    assert evaluation is not None
    data: Any = evaluation.data if evaluation.test is None else evaluation.test
    with torch.no_grad():
        if evaluation.metric is not None:
            assert evaluation.run is not None
            found = [evaluation.run(call, inputs) for inputs, _ in data]
            return float(evaluation.metric(torch.cat(found), torch.cat([target for _, target in data])))
        assert evaluation.score is not None
        inputs, targets = data
        outputs = torch.cat([call(one) for one in inputs.split(1)])
        return float(torch.as_tensor(evaluation.score(outputs, targets)).float().mean())


def examples(workload: trimtab.Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """The labelled examples that the network was trained on."""
    data: Any = workload.training.data  # type: ignore[union-attr]
    pairs = list(data() if callable(data) else data)
    if not isinstance(pairs[0][1], torch.Tensor) or pairs[0][1].shape[0] != pairs[0][0].shape[0]:
        raise LookupError("its fine-tuning needs labels, and this workload has none")
    inputs, targets = zip(*pairs, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def torch_pruning(workload: trimtab.Workload, limit: float) -> Call:
    """Uniform ratios by group magnitude, then fine-tuning; https://github.com/VainF/Torch-Pruning."""
    import torch_pruning as tp

    model, loss = workload.build_model(), workload.training.loss  # type: ignore[union-attr]
    args, _ = as_call(workload.inputs)
    inputs, targets = examples(workload)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    pruner = tp.pruner.BasePruner(
        model.eval(),
        args,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=1 - KEPT,
        ignored_layers=[last],
        round_to=8,
        **{name: {} for name in ("num_heads", "in_channel_groups", "out_channel_groups")},
    )
    with torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        pruner.step()
        material.fit(model, inputs, targets, loss, epochs=EPOCHS, rate=RATE)
    return in_onnxruntime(model.eval(), args)


def in_onnxruntime(model: nn.Module, args: tuple[Any, ...]) -> Call:
    """``model`` in ONNX Runtime with one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/model.onnx"
        torch.onnx.export(model, args, path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})[0])

    return call


def nncf_control(workload: trimtab.Workload, limit: float) -> Call:
    """``quantize_with_accuracy_control``; https://docs.openvino.ai/2026/openvino-workflow/model-optimization-guide."""
    import nncf
    import openvino

    model, (args, _) = workload.build_model().eval(), as_call(workload.inputs)
    evaluation = workload.evaluation
    assert evaluation is not None
    data: Any = evaluation.data
    whole = evaluation.metric is not None
    items = list(data) if whole else [(one, target) for one, target in zip(*(part.split(1) for part in data), strict=True)]
    core = openvino.Core()
    config = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}

    def run_in(compiled: Any) -> Call:
        def call(*tensors: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(compiled([tensor.numpy() for tensor in tensors])[0])

        return call

    def validate(compiled: Any, some: Any) -> tuple[float, None]:
        call, chosen = run_in(compiled), list(some)
        if whole:
            found = [evaluation.run(call, inputs) for inputs, _ in chosen]  # type: ignore[misc]
            return float(evaluation.metric(torch.cat(found), torch.cat([target for _, target in chosen]))), None  # type: ignore[misc]
        right = [evaluation.score(call(inputs), target) for inputs, target in chosen]  # type: ignore[misc]
        return float(torch.cat([torch.as_tensor(each) for each in right]).float().mean()), None

    def inputs_of(item: Any) -> Any:
        return item[0] if whole else (item[0],)

    quantized = nncf.quantize_with_accuracy_control(
        openvino.convert_model(model, example_input=args),
        calibration_dataset=nncf.Dataset(items[:300], lambda item: [tensor.numpy() for tensor in inputs_of(item)]),
        validation_dataset=nncf.Dataset(items, lambda item: item),
        validation_fn=validate,
        max_drop=limit,
        drop_type=nncf.DropType.ABSOLUTE,
    )
    return run_in(core.compile_model(quantized, "CPU", config))


def neural_compressor(workload: trimtab.Workload, limit: float) -> Call:
    """``autotune`` of static int8, exported before and compiled after it;
    https://intel.github.io/neural-compressor/latest/docs/source/3x/PT_StaticQuant.html."""
    if importlib.util.find_spec("neural_compressor") is None:
        raise ModuleNotFoundError("not installed here: pip install neural-compressor-pt")
    from neural_compressor.torch.export import export
    from neural_compressor.torch.quantization import StaticQuantConfig, TuningConfig, autotune

    model, (args, _) = workload.build_model().eval(), as_call(workload.inputs)
    calibration: Any = workload.calibration
    calls = [(one,) for one in calibration[:256].split(1)] if isinstance(calibration, torch.Tensor) else calibration
    several = tuple(torch.cat([each, each]) for each in args)  # torch.export takes a batch of one for a constant
    axes = tuple(dict.fromkeys(range(2) if len(args) > 1 else (0,), torch.export.Dim.AUTO) for _ in args)

    def run_over(model: Call) -> None:
        for inputs in calls:
            model(*inputs)

    found = autotune(
        model=export(model, several, dynamic_shapes=axes),
        tune_config=TuningConfig(config_set=[StaticQuantConfig.get_config_set_for_tuning()], tolerable_loss=limit),
        eval_fn=lambda model: judged(workload, model),
        run_fn=run_over,
        example_inputs=several,
    )
    if found is None:
        raise RuntimeError(f"no form within a loss of {limit:.0%}")
    inductor.freezing = True
    return torch.no_grad()(torch.compile(found))
