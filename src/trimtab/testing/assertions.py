"""Assertions and state snapshots for the suites."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import nn

from trimtab._internal.serialization import dumps
from trimtab.core.candidate import Candidate, call_model
from trimtab.core.technique import Technique, technique_from_json
from trimtab.errors import TrimtabError, UsageError
from trimtab.tensors.structure import Structure, flatten

EXACT, ROUNDED = 1e-3, 0.9
"""Largest error of exact techniques, relative to the largest output; smallest cosine similarity of lossy ones. For these the
suites only check that the function is roughly the same; a workload's data judges their accuracy."""


INDUCTOR = (
    "freezing",
    "max_autotune",
    "compile_threads",
    "coordinate_descent_tuning",
    "epilogue_fusion",
    "force_fuse_int_mm_with_mul",
)
"""Options of inductor's global configuration that libraries tend to change."""


def model_state(model: nn.Module) -> dict[str, Any]:
    """All properties of ``model`` that a technique could change by mistake."""
    return {
        "classes": [(name, type(module).__qualname__, id(module)) for name, module in model.named_modules()],
        "training": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "patched": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "grads": [parameter.requires_grad for parameter in model.parameters()],
        "storage": [(name, t.data_ptr(), t.stride()) for name, t in model.state_dict().items()],
        "bytes": {name: _digest(t) for name, t in model.state_dict().items()},
    }


def global_state() -> dict[str, Any]:
    """torch's process-wide state."""
    state = {
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "mkldnn": torch.backends.mkldnn.enabled,
        "precision": torch.get_float32_matmul_precision(),
        "random": _digest(torch.get_rng_state()),
    }
    shared = inductor.get_config_copy()
    return state | {f"inductor.{name}": shared[name] for name in INDUCTOR}


def outputs_of(candidate: Candidate) -> list[torch.Tensor]:
    """The exact outputs of the candidate's model on its example."""
    value = call_model(candidate.model, candidate.signature.input_structure, candidate.leaves)
    return [tensor.clone() for tensor in flatten(value, "output")[0]]


def identical(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are bit-identical."""
    return len(a) == len(b) and all(x.dtype == y.dtype and _digest(x) == _digest(y) for x, y in zip(a, b, strict=True))


def assert_close(want: Any, got: Any, *, exact: bool, where: str) -> None:
    """Assert equal structure, shapes and dtypes, no new NaN, and values within the tolerance for ``exact``."""
    (wants, structure), (gots, found) = flatten(want, "output"), flatten(got, "output")
    assert shape_of(structure) == shape_of(found), f"{where}: the output is structured as {found}, not as {structure}."
    for i, (a, b) in enumerate(zip(wants, gots, strict=True)):
        assert a.shape == b.shape, f"{where}: output {i} is {list(b.shape)}, not {list(a.shape)}."
        assert a.dtype == b.dtype or not exact, f"{where}: output {i} is {b.dtype}, not {a.dtype}."
        if not a.dtype.is_floating_point:
            assert not exact or (a == b).all(), f"{where}: output {i} has other integers."
            continue
        assert torch.isfinite(b).all(), f"{where}: output {i} has NaN or infinity."
        x, y = a.detach().double().flatten(), b.detach().double().flatten()
        error, size = (x - y).abs().max().item(), x.abs().max().item()
        message = f"{where}: output {i} is off by {error:.3g} where the largest value is {size:.3g}."
        right = error <= EXACT * size + 1e-6 if exact else torch.cosine_similarity(x, y, dim=0).item() >= ROUNDED
        assert right, message


def assert_same_form(want: Any, got: Any, *, where: str) -> None:
    """Assert equal structure, shapes and dtypes, and finite values."""
    (wants, structure), (gots, found) = flatten(want, "output"), flatten(got, "output")
    assert shape_of(structure) == shape_of(found), f"{where}: the output is structured as {found}, not as {structure}."
    for i, (a, b) in enumerate(zip(wants, gots, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{where}: output {i} is {b.dtype} {list(b.shape)}."
        assert not b.is_floating_point() or torch.isfinite(b).all(), f"{where}: output {i} has NaN or infinity."


def shape_of(structure: Structure) -> Any:
    """``structure`` without class names, because runtimes return a dataclass as a record."""
    return structure.kind, structure.keys, tuple(map(shape_of, structure.items))


def assert_sentence(reason: str | None) -> None:
    """Assert that ``reason`` is ``None`` or a readable sentence."""
    if reason is not None:
        assert isinstance(reason, str)
        assert len(reason.split()) >= 4, f"Not a sentence: {reason!r}"
        assert reason[0].isalnum(), f"Not a sentence: {reason!r}"
        assert reason.rstrip()[-1] in ".)" or " or " in reason, f"A sentence ends in a full stop: {reason!r}"


def assert_round_trip(registry: Mapping[str, type[Any]], technique: Technique) -> None:
    """Assert that JSON restores an equal object, and that its text depends on the fields only."""
    data = technique.to_json()
    again = technique_from_json({technique.name: type(technique)}, data)
    assert again == technique
    assert type(again) is type(technique)
    assert dumps(again, indent=None) == dumps(technique, indent=None)
    assert hash(again) == hash(technique)
    assert str(technique).startswith(technique.name)
    for name, values in type(technique).choices().items():
        assert len(set(map(repr, values))) == len(values), f"{technique.name}.{name} offers a value twice."
        for value in values:
            with contextlib.suppress(UsageError):  # the value may be valid only together with others
                type(technique)(**{name: value})


def assert_documented(technique: Technique) -> None:
    """Assert that the class's docstring names a source."""
    text = type(technique).__doc__ or ""
    assert "Source:" in text, f"{technique.name}: the class's docstring names no source."


def refusal(action: Callable[[], Any]) -> TrimtabError | None:
    """The :class:`TrimtabError` that ``action`` raises, or ``None``. Other exceptions pass through."""
    try:
        action()
    except TrimtabError as error:
        return error
    return None


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.blake2b(raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b"", digest_size=8).hexdigest()
