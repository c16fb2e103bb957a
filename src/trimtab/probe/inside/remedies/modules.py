"""Apply settings around the calls of outermost modules: no gradients, trimmed padding, memory format, types, compilation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from trimtab.probe.inside.remedies import padding
from trimtab.probe.inside.roots import around_calls

Call = Callable[..., Any]
NAMES = ("no_grad", "trim_padding", "channels_last", "autocast", "compile", "float32")
_active: dict[str, Any] = {}
_changed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that have been converted to the memory format and type of the settings."""
_compiled: weakref.WeakKeyDictionary[nn.Module, Call] = weakref.WeakKeyDictionary()
_installed = False


def switch(settings: Mapping[str, Any]) -> None:
    """Apply the settings in :data:`NAMES`. Parameters are converted at the next call of their module."""
    global _installed
    wanted = {name: settings[name] for name in NAMES if settings.get(name)}
    for name in ("channels_last", "float32"):
        if name in _active and name not in wanted:
            for module in list(_changed):
                _convert(module, name, back=True)
    if any(wanted.get(name) != _active.get(name) for name in ("channels_last", "float32")):
        _changed.clear()
    _active.clear()
    _active.update(wanted)
    if wanted and not _installed:
        _installed = True
        around_calls(around)


def around(module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an outermost ``module`` with the settings applied. ``call`` takes the arguments of the module."""
    if not _active:
        return call(*args, **kwargs)
    if module not in _changed and ("channels_last" in _active or "float32" in _active):
        _changed.add(module)
        for name in ("channels_last", "float32"):
            if name in _active:
                _convert(module, name)
    if _active.get("compile") and not hasattr(module, "_orig_mod") and not isinstance(module, torch.jit.ScriptModule):
        if module not in _compiled:
            # a lambda with a weak reference: the compiled function must not keep the module alive
            _compiled[module] = torch.compile(_call_of(weakref.ref(module)))
        call = _compiled[module]
    restore = None
    if "trim_padding" in _active:
        args, kwargs, restore = padding.trimmed(module, args, kwargs)
    if "channels_last" in _active:
        args, kwargs = _mapped(_to_channels_last, args, kwargs)
    if narrowed := ("float32" in _active and module in _DOUBLES):
        args, kwargs = _mapped(_narrow, args, kwargs)
    free = "no_grad" in _active and not module.training and torch.is_grad_enabled() and not _inputs_require_grad(args, kwargs)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not free):
        if "autocast" in _active:
            device = next((p.device.type for p in module.parameters()), "cpu")
            with torch.autocast(device, getattr(torch, _active["autocast"])):
                output = call(*args, **kwargs)
            output = _pytree.tree_map(_wide, output)
        else:
            output = call(*args, **kwargs)
        if narrowed:
            output = _pytree.tree_map(_double, output)
        return output if restore is None else restore(output)


def _call_of(module: weakref.ref[nn.Module]) -> Call:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module()._call_impl(*args, **kwargs)  # type: ignore[union-attr]

    return call


def _mapped(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _pytree.tree_map(change, args), _pytree.tree_map(change, kwargs)


def _inputs_require_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an input requires a gradient: it may flow back through the call, as in a perceptual loss."""
    leaves = _pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _to_channels_last(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if plain else value


def _cast(to: torch.dtype, *dtypes: torch.dtype) -> Callable[[Any], Any]:
    return lambda value: value.to(to) if isinstance(value, torch.Tensor) and value.dtype in dtypes else value


_narrow, _wide = _cast(torch.float32, torch.float64), _cast(torch.float32, torch.bfloat16, torch.float16)
_double = _cast(torch.float64, torch.float32)
"""Outputs are converted back to the type of the script."""

_DOUBLES: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose parameters are float64 as written."""


def _convert(module: nn.Module, name: str, back: bool = False) -> None:
    """Convert parameters, buffers and the state of their optimizers in place."""
    if name == "channels_last":
        layout = torch.contiguous_format if back else torch.channels_last
        module.to(memory_format=layout)  # type: ignore[call-overload]
    else:
        if back and module not in _DOUBLES:
            return
        if not back:
            if not any(p.dtype == torch.float64 for p in module.parameters()):
                return
            _DOUBLES.add(module)
        module.double() if back else module.float()
    for optimizer in [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                    state[key] = torch.empty_like(parameter.detach()).copy_(value)
