"""Calls of the script that are phases of their own: reading a tensor's values, copying, logging, saving, communication."""

from __future__ import annotations

import builtins
import functools
import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from threading import get_ident
from typing import Any

import torch

from trimtab.probe.inside import clock
from trimtab.probe.inside.hooks import is_compiling, replace
from trimtab.probe.inside.plan import MAIN
from trimtab.probe.inside.sites import caller, here

_INNER_PHASES = frozenset({clock.OPTIMIZER, clock.BACKWARD, clock.DATA, clock.PROBE, clock.SYNC})
"""Phases that include the time to read a value, such as the step counts that torch's optimizers read."""

saved: list[str] = []
"""Files that ``torch.save`` was called with."""
flags: dict[str, str] = {}
"""Switch -> line of the script that set it."""
anomaly_at: list[str] = []
"""Lines that turned anomaly mode on or off."""


def timed(name: str, phase: int, outer: frozenset[int] = frozenset()) -> Callable[[Any], Callable[..., Any]]:
    """A factory for :func:`replace`. It times calls as ``phase``, unless the current phase is one of ``outer``."""

    def make(original: Any) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != MAIN or clock.current() in outer:
                return original(*args, **kwargs)
            depth = clock.enter(phase)
            try:
                return original(*args, **kwargs)
            finally:
                ns = clock.switch(clock.PROBE, depth)
                clock.add(("call", name, caller(sys._getframe(1))), ns)
                clock.leave()

        return counted

    return make


_WRITERS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "torch.utils.tensorboard.writer": (
        ("SummaryWriter", ("add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure", "add_text")),
        ("SummaryWriter", ("add_graph", "add_embedding", "add_pr_curve", "add_hparams", "add_video", "add_audio", "flush")),
    ),
    "tensorboardX.writer": (
        ("SummaryWriter", ("add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure", "add_text")),
    ),
    "wandb": (("", ("log", "watch")),),
    "wandb.sdk.wandb_run": (("Run", ("log",)),),
    "mlflow": (("", ("log_metric", "log_metrics", "log_param", "log_params", "log_artifact")),),
    "tqdm.std": (("tqdm", ("update", "refresh", "set_postfix", "set_postfix_str", "set_description")),),
    "matplotlib.figure": (("Figure", ("savefig",)),),
}
"""Module -> (class, or nothing for the module itself; its functions that log)."""


def _watch_writer(name: str, module: Any) -> None:
    for owner, functions in _WRITERS[name]:
        target = getattr(module, owner, None) if owner else module
        for function in functions:
            shown = f"{owner or name}.{function}"
            if target is not None and function in vars(target):
                replace(target, function, timed(shown, clock.LOGGING, frozenset({clock.LOGGING})))


class _Imports:
    """A finder that watches a module's functions as soon as it is imported."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _WRITERS or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = next((found for finder in sys.meta_path if (found := finder.find_spec(name, path, target))), None)
        finally:
            self._busy.discard(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _watch_writer(name, module)

        loader.exec_module = exec_module
        return spec


def _noting_site(name: str) -> Callable[[Any], Callable[..., Any]]:
    """A factory for :func:`replace`. It records the calling line as the one that set the flag ``name``."""

    def make(original: Any) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if "/torch/" not in sys._getframe(1).f_code.co_filename:  # torch.compile sets some flags itself
                flags.setdefault(name, here())
            return original(*args, **kwargs)

        return noting

    return make


def _noting_anomaly_site(original: Any) -> Callable[..., Any]:
    """Record the calling line. Whether anomaly mode is on is checked in backward passes."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        anomaly_at.append(here())
        return original(*args, **kwargs)

    return noting


@functools.cache
def watch() -> None:
    """Replace the functions for the rest of the process."""
    for name in ("item", "cpu", "numpy", "tolist"):
        replace(torch.Tensor, name, timed(f"Tensor.{name}", clock.SYNC, _INNER_PHASES))
    for name in ("float", "int", "bool"):
        replace(torch.Tensor, f"__{name}__", timed(f"{name}(tensor)", clock.SYNC, _INNER_PHASES))
    for name in ("__repr__", "__format__"):
        replace(torch.Tensor, name, timed("print of a tensor", clock.SYNC, _INNER_PHASES))
    replace(torch.cuda, "synchronize", timed("torch.cuda.synchronize", clock.SYNC, _INNER_PHASES))
    inner = frozenset({clock.FORWARD, clock.OPTIMIZER, clock.BACKWARD, clock.DATA, clock.PROBE, clock.SYNC, clock.COPY})
    replace(torch.Tensor, "to", timed("Tensor.to", clock.COPY, inner))
    replace(torch.Tensor, "cuda", timed("Tensor.cuda", clock.COPY, inner))
    replace(builtins, "print", timed("print", clock.LOGGING, frozenset({clock.LOGGING})))
    replace(logging.Logger, "handle", timed("logging", clock.LOGGING, frozenset({clock.LOGGING})))
    for name in _WRITERS:
        if name in sys.modules:
            _watch_writer(name, sys.modules[name])
    sys.meta_path.insert(0, _Imports())
    distributed: Any = torch.distributed
    if distributed.is_available():
        for name in ("all_reduce", "all_gather", "broadcast", "reduce", "barrier", "all_gather_into_tensor", "reduce_scatter"):
            replace(distributed, name, timed(f"torch.distributed.{name}", clock.COMMUNICATION))

    def saving(original: Any) -> Callable[..., Any]:
        made = timed("torch.save", clock.SAVING)(original)

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, str) or hasattr(f, "__fspath__"):
                saved.append(str(f))
            return made(obj, f, *args, **kwargs)

        return save

    replace(torch, "save", saving)
    replace(torch, "compile", timed("torch.compile", clock.OTHER))
    replace(torch, "use_deterministic_algorithms", _noting_site("deterministic algorithms"))
    replace(torch, "set_num_threads", _noting_site("torch.set_num_threads"))
    for owner in (torch.autograd.set_detect_anomaly, torch.autograd.detect_anomaly):
        replace(owner, "__init__", _noting_anomaly_site)
    replace(torch.autograd.profiler.profile, "__init__", _noting_site("profiler"))
    replace(torch.profiler.profile, "__init__", _noting_site("profiler"))
