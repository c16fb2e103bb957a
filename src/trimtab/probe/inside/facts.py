"""Facts about the objects of the script: modules, optimizers, loaders and flags."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset, default_collate

from trimtab.probe.inside import calls, hooks, lines, loaders, reading
from trimtab.probe.inside.boundary import attempt
from trimtab.probe.inside.remedies import process
from trimtab.probe.inside.remedies.loaders import BatchReader, generators, same_state
from trimtab.probe.inside.sites import Place, function_of, is_script_file, site, site_at, text_at

Json = dict[str, Any]

modules: dict[int, tuple[int, Any]] = {}
"""id -> (number, module)."""
parallel: list[Any] = []
"""The modules among ``modules`` that reduce gradients among ranks, such as ``DistributedDataParallel``."""
_inputs: dict[tuple[int, bool], list[str]] = {}
_seen_calls: dict[tuple[int, bool], int] = {}
_layouts: dict[int, list[bool]] = {}
"""Number of a module -> whether each four-dimensional input lay in ``channels_last``."""
_autocast: dict[int, str] = {}
_batches: dict[int, Json] = {}
_counts: Counter[int] = Counter()


def first_tensors(value: Any, most: int = 4) -> list[torch.Tensor]:
    """The first tensors within tuples, lists, mappings and dataclasses, three levels deep."""
    found: list[torch.Tensor] = []

    def walk(thing: Any, depth: int) -> None:
        if len(found) >= most or depth > 3:
            return
        if issubclass(type(thing), torch.Tensor):
            found.append(thing)
        elif isinstance(thing, dict):
            for inner in thing.values():
                walk(inner, depth + 1)
        elif isinstance(thing, tuple | list):
            for inner in thing[:64]:
                walk(inner, depth + 1)
        elif hasattr(thing, "__dataclass_fields__"):
            for inner in vars(thing).values():
                walk(inner, depth + 1)

    walk(value, 0)
    return found


def note_call(module: Any, args: Any, kwargs: Any) -> int:
    """Record facts about a call of a module: of each of the first three, then every sixteenth. Returns the module's number."""
    known = modules.get(id(module))
    if known is None:
        modules[id(module)] = known = (len(modules), module)
        if "require_backward_grad_sync" in module.__dict__:
            parallel.append(module)
            attempt(lambda: module._set_ddp_runtime_logging_sample_rate(1) if module.device_type == "cpu" else None)
    key = known[0], module.training
    _seen_calls[key] = seen = _seen_calls.get(key, 0) + 1
    if seen < 4 or seen % 16 == 0:
        tensors = first_tensors([args, kwargs], most=12)
        _inputs[key] = [_described(tensor) for tensor in tensors]
        _layouts.setdefault(known[0], []).extend(_channels_last(tensor) for tensor in tensors if tensor.dim() == 4)
        device = tensors[0].device.type if tensors else "cpu"
        if torch.is_autocast_enabled(device):
            _autocast[known[0]] = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return known[0]


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def batch_facts(loader: loaders.Loader, batch: Any) -> None:
    """Record facts about a batch: each of the first four, then every eighth."""
    _counts[loader.number] = seen = _counts[loader.number] + 1
    if seen > 4 and seen % 8:
        return
    tensors = first_tensors(batch, most=64)
    found = _batches.setdefault(loader.number, {"bytes": [], "padding": []})
    found["bytes"].append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    found["dtypes"] = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    share = _padding(batch, tensors)
    if share is not None:
        found["padding"].append(share)


def _padding(batch: Any, tensors: list[torch.Tensor]) -> float | None:
    """Share of padding: positions that the attention mask excludes, or trailing positions with the most frequent last value."""
    mask: Any = batch.get("attention_mask") if hasattr(batch, "get") else None
    if issubclass(type(mask), torch.Tensor) and mask.dim() == 2:
        return 1.0 - float((mask != 0).float().mean())
    for tensor in tensors:
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[0] > 1 and tensor.shape[1] > 8:
            value = torch.mode(tensor[:, -1]).values
            trailing = (tensor == value).flip(1).to(torch.uint8).cummin(1).values
            rows = (trailing.sum(1) > 1).float().mean()
            if float(rows) > 0.5:
                return float(trailing.float().mean())
    return None


def note_anomaly_mode() -> None:
    """Record that anomaly mode is on in a backward pass, and the line that set it."""
    calls.flags.setdefault("anomaly mode", calls.anomaly_at[-1] if calls.anomaly_at else "")


_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES", "PYTHONDEVMODE")
_HARMLESS = ("", "0", "OFF", "off")


def flags() -> dict[str, str]:
    """Debugging switches that were on, and the line that set each."""
    found = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name, "") not in _HARMLESS}
    if "anomaly mode" in calls.flags:
        found["anomaly mode"] = calls.flags["anomaly mode"]
    if torch.are_deterministic_algorithms_enabled():
        found["deterministic algorithms"] = calls.flags.get("deterministic algorithms", "")
    if "profiler" in calls.flags:
        found["profiler"] = calls.flags["profiler"]
    return found


def cpu_usage() -> tuple[int, float, float]:
    """Busy clock ticks of all processors, CPU seconds of this process and its children, and the time in seconds."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0.0, time.monotonic()
    times = os.times()
    return sum(ticks) - ticks[3] - ticks[4], times.user + times.system + _children_s(), time.monotonic()


def _children_s() -> float:
    """CPU seconds of the running child processes, such as loader workers."""
    found, parent = 0, os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", encoding="ascii") as file:
                words = file.read().rpartition(")")[2].split()
                found += int(words[11]) + int(words[12]) if int(words[1]) == parent else 0
    return found / float(os.sysconf("SC_CLK_TCK"))


def cpu_usage_since(before: tuple[int, float, float] | None) -> dict[str, float]:
    """CPU seconds since ``before`` of all processes and of this one, and the wall time in seconds."""
    if before is None or not before[0]:
        return {}
    now = cpu_usage()
    return {
        "all_s": (now[0] - before[0]) / os.sysconf("SC_CLK_TCK"),
        "own_s": now[1] - before[1],
        "wall_s": max(now[2] - before[2], 1e-6),
    }


def tally_as_json(tally: dict[tuple[Any, ...], list[int]]) -> list[Any]:
    """A tally as pairs of key and counts, with sites in place of places."""
    return [[[site(word) if isinstance(word, Place) else word for word in key], found] for key, found in tally.items()]


def samples_as_json(first: int, last: int) -> list[Any]:
    """Samples as [ns, site, text, phase, function, resident bytes, growth in bytes, number of the stack]."""
    found = []
    for ns, stack, phase, held, grown in lines.samples:
        if first <= ns <= last:
            inner = stack[0] if stack else None
            what = ("", "", "") if inner is None else (site(inner), text_at(inner).strip(), function_of(inner))
            found.append([ns, what[0], what[1], phase, what[2], held, grown, _stacks.setdefault(stack, len(_stacks))])
    return found


_stacks: dict[tuple[Place, ...], int] = {}


def stacks() -> list[list[str]]:
    """The stacks of the samples, by number. A frame reads ``main (train.py:35)``; the outermost comes first."""
    return [[f"{function_of(place) or 'module'} ({site(place)})" for place in reversed(stack)] for stack in _stacks]


def collect(since: float) -> Json:
    """Facts about all objects of the run; ``since`` is the ``time.time()`` at the end of the warm-up."""
    threads, utils = process.threads(), sys.modules.get("torch._dynamo.utils")
    metrics = utils.get_compilation_metrics() if utils else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = {
        "threads": threads,
        "cores": cores,
        "flags": flags(),
        "modules": [_module(number, module) for number, module in modules.values()],
        "optimizers": [_optimizer(entry) for entry in hooks.optimizers],
        "loaders": [_loader(entry) for entry in loaders.loaders],
        "device": device(),
        "gpu_memory": gpu_memory(),
        "distributed": _distributed(),
        "called": {name: calls.flags[name] for name in ("torch.set_num_threads",) if name in calls.flags},
        "graph_breaks": _graph_breaks(),
        "compile_s": sum(getattr(each, "entire_frame_compile_time_s", None) or 0.0 for each in metrics),
        "compilations": _compilations(metrics, since),
    }
    return found


def device() -> str:
    """Device type of the first parameter."""
    return next((str(p.device.type) for _, m in modules.values() for p in m.parameters()), "cpu")


def gpu_memory() -> Json:
    """MB (10**6 bytes) that torch's allocator has reserved on the current GPU, and the most that tensors had of them."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {
        "reserved_mb": torch.cuda.max_memory_reserved() / 1e6,
        "allocated_mb": torch.cuda.max_memory_allocated() / 1e6,
    }


def _module(number: int, module: Any) -> Json:
    parts = list(module.modules())
    parameters = list(module.parameters())
    types = Counter(str(p.dtype).removeprefix("torch.") for p in parameters)
    convolutions = [part for part in parts if isinstance(part, nn.Conv2d)]
    last = [c.weight.dim() == 4 and _channels_last(c.weight) for c in convolutions]
    products = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.RNNBase)
    inner = getattr(module, "module", module)
    config = getattr(inner, "config", None)
    name = type(module).__name__
    compiled = name == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    if name == "OptimizedModule":
        name = type(module._orig_mod).__name__
    return {
        "number": number,
        "name": name,
        "parameters": sum(p.numel() for p in parameters),
        "dtype": types.most_common(1)[0][0] if types else "float32",
        "inputs": _inputs.get((number, True)) or _inputs.get((number, False), []),
        "convolutions": len(convolutions),
        "channels_last": sum(last) / len(last) if last else 0.0,
        "matrix_products": sum(isinstance(part, products) for part in parts),
        "recurrent": sum(isinstance(part, nn.RNNBase | nn.RNNCellBase) for part in parts),
        "attention": getattr(config, "_attn_implementation", None),
        "compiled": bool(compiled),
        "inputs_channels_last": sum(layouts) / len(layouts) if (layouts := _layouts.get(number)) else 0.0,
        "autocast": _autocast.get(number),
    }


def _channels_last(weight: torch.Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}


def _optimizer(entry: hooks.Optimizer) -> Json:
    optimizer = entry.ref()
    found: Json = {"number": entry.number, "site": entry.site, "name": entry.name, "tensors": 0, "elements": 0}
    if optimizer is None or not getattr(optimizer, "param_groups", None):
        return found | {"kernel": "own", "can_fuse": False}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    group = optimizer.param_groups[0]
    if not type(optimizer).__module__.startswith("torch.optim"):
        kernel = "own"
    elif group.get("fused"):
        kernel = "fused"
    elif group.get("foreach") or (group.get("foreach", True) is None and all(p.is_cuda for p in parameters)):
        kernel = "foreach"
    else:
        kernel = "single"
    can_fuse = (
        kernel in ("foreach", "single")
        and entry.name in _FUSED
        and "fused" in group
        and not group.get("differentiable")
        and all(
            p.is_floating_point() and not p.is_sparse and p.device.type in ("cpu", "cuda", "mps", "xpu") for p in parameters
        )
        and not any(p.grad is not None and p.grad.is_sparse for p in parameters)
    )
    return found | {
        "tensors": len(parameters),
        "elements": sum(p.numel() for p in parameters),
        "kernel": kernel,
        "can_fuse": can_fuse,
    }


_known_loaders: dict[int, tuple[Json, Any, Any]] = {}
"""Number of a loader -> facts, data set, collate function. Stored because a loader may be deleted before its iterator."""


def note_loader(entry: loaders.Loader) -> None:
    """Store the arguments of a loader when it makes an iterator."""
    loader = entry.ref()
    if loader is None or entry.number in _known_loaders:
        return
    dataset = loader.dataset
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    inner = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    facts = {
        "iterable": iterable,
        "tensors": isinstance(inner, TensorDataset) and loader.collate_fn is default_collate,
        "examples": None if iterable or not hasattr(dataset, "__len__") else len(dataset),
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "workers": loader.num_workers,
        "persistent": loader.persistent_workers,
        "prefetch": loader.prefetch_factor,
        "pin_memory": loader.pin_memory,
        "batch_fetch": False,
        "draws": False,
    }
    batched = not iterable and loader.batch_sampler is not None
    _known_loaders[entry.number] = (facts, dataset if batched else None, loader.collate_fn)


_rereads: dict[int, Json] = {}


def _loader(entry: loaders.Loader) -> Json:
    found: Json = {"number": entry.number, "site": entry.site, "dataset": entry.dataset, "dataset_id": entry.dataset_id}
    facts, dataset, collate = _known_loaders.get(entry.number, ({}, None, None))
    found |= facts | _batches.get(entry.number, {})
    opened, examples = reading.opens.get(entry.dataset_id, (0, 0))
    found["opens"] = opened / examples if examples else 0.0
    if dataset is not None and _counts[entry.number]:
        if entry.number not in _rereads:
            _rereads[entry.number] = _reading(dataset, collate, reading.places.get(id(dataset)))
        found |= _rereads[entry.number]
    return found


def _reading(dataset: Any, collate: Any, places: list[Any] | None) -> Json:
    """Read a batch again, to find out whether reading draws random numbers and whether the data set can read whole batches."""

    def one_by_one() -> Any:
        return collate([dataset[place] for place in chosen])

    chosen, failed = attempt(lambda: [int(place) for place in (places or range(min(8, len(dataset))))][:16])
    before = generators()
    if failed is not None or attempt(one_by_one)[1] is not None:
        return {}
    draws = not same_state(before, generators())
    reader, failed = attempt(BatchReader, dataset)
    fits = failed is None and collate is default_collate and not draws and attempt(reader.read, chosen, one_by_one)[1] is None
    return {"draws": draws, "batch_fetch": fits and reader.trusted is not False}


def reduces_gradients() -> bool:
    """Whether the backward pass that begins now reduces gradients among ranks."""
    return ranks() > 1 and any(module.require_backward_grad_sync for module in parallel)


def ranks() -> int:
    distributed: Any = torch.distributed
    return int(distributed.get_world_size()) if distributed.is_available() and distributed.is_initialized() else 0


def _distributed() -> Json | None:
    names = [type(module).__name__ for _, module in modules.values()]
    kind = "ddp" if "DistributedDataParallel" in names else "data_parallel" if "DataParallel" in names else "none"
    kind = "fsdp" if any(name.startswith(("FullySharded", "FSDP")) for name in names) else kind
    wrapped = [module for _, module in modules.values() if type(module).__name__ == "DistributedDataParallel"]
    distributed: Any = torch.distributed
    if not ranks() and kind == "none":
        return None
    return {
        "ranks": max(1, ranks()),
        "rank": distributed.get_rank() if ranks() else 0,
        "kind": kind,
        "find_unused": any(bool(module.find_unused_parameters) for module in wrapped),
        "unused_found": any(p.requires_grad and p.grad is None for module in wrapped for p in module.parameters()),
        "waits_ms": statistics.median(_waits_ms) if _waits_ms else None,
    }


_waits_ms: list[float] = []


def note_waits() -> None:
    """Record how long the last backward pass only exchanged gradients, as ``DistributedDataParallel`` itself timed it; on a GPU
    its timers are of the device, and are not read. Of several such modules a backward pass reduces one."""
    found = []
    for module in parallel:
        data, _ = attempt(lambda module=module: module._get_ddp_logging_data() if module.device_type == "cpu" else {})
        spent, hidden = (data or {}).get("backward_comm_time"), (data or {}).get("backward_compute_comm_overlap_time")
        if spent is not None and hidden is not None:
            found.append(max(0, spent - hidden) / 1e6)
    if found:
        _waits_ms.append(sum(found) / len(found))


def _compilations(metrics: list[Any], since: float) -> list[Json]:
    """Compilations after ``since``, in seconds of ``time.time()``, by function."""
    found: dict[str, Json] = {}
    for each in metrics:
        started = (getattr(each, "start_time_us", None) or 0) / 1e6 or getattr(each, "start_time", None) or 0.0
        if started < since or not getattr(each, "co_filename", None):
            continue
        where = site_at(each.co_filename, each.co_firstlineno)
        entry = found.setdefault(where, {"recompiles": 0, "reason": "", "seconds": 0.0})
        entry["recompiles"] += 1
        entry["reason"] = getattr(each, "recompile_reason", None) or entry["reason"]
        entry["seconds"] += getattr(each, "entire_frame_compile_time_s", None) or 0.0
    return [{"site": where, **entry} for where, entry in found.items()]


def forbids_dispatch_mode() -> bool:
    """Whether operators cannot be counted by a dispatch mode: code is compiled, or autograd hooks reduce gradients."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return bool(ranks() or (utils is not None and utils.counters.get("frames")))


def _graph_breaks() -> list[Json]:
    """The lines at which compiled functions break into graphs, with the first reason at each."""
    graphs: Any = sys.modules.get("torch._dynamo.output_graph")
    found: dict[str, Json] = {}
    for each in getattr(graphs, "graph_break_reasons", ()):
        frames = [frame for frame in each.user_stack if is_script_file(frame.filename)] or list(each.user_stack)
        where = site_at(frames[-1].filename, frames[-1].lineno) if frames else ""
        found.setdefault(where, {"site": where, "reason": str(each.reason)})
    return list(found.values())
