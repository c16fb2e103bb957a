"""What the suites assert with: states before and after, outputs side by side, sentences."""

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
"""The largest error relative to the largest output of exact techniques; the lowest cosine of the others, whose accuracy the
workload's data judges: the suites only see to it that they are the same function."""


INDUCTOR = (
    "freezing",
    "max_autotune",
    "compile_threads",
    "coordinate_descent_tuning",
    "epilogue_fusion",
    "force_fuse_int_mm_with_mul",
)
"""Settings of inductor's process-wide configuration that libraries like to change."""


def model_state(model: nn.Module) -> dict[str, Any]:
    """Everything about ``model`` that a technique could change by accident."""
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
    """Everything in torch that is shared by the whole process."""
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
    """The outputs of the candidate's own model on its example, bit for bit what the model gives."""
    value = call_model(candidate.model, candidate.signature.input_structure, candidate.leaves)
    return [tensor.clone() for tensor in flatten(value, "output")[0]]


def identical(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return len(a) == len(b) and all(x.dtype == y.dtype and _digest(x) == _digest(y) for x, y in zip(a, b, strict=True))


def assert_close(want: Any, got: Any, *, exact: bool, where: str) -> None:
    """Same structure, shapes and dtypes; no new NaN; values as close as ``exact`` asks."""
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
        said = f"{where}: output {i} is off by {error:.3g} where the largest value is {size:.3g}."
        right = error <= EXACT * size + 1e-6 if exact else torch.cosine_similarity(x, y, dim=0).item() >= ROUNDED
        assert right, said


def shape_of(structure: Structure) -> Any:
    """``structure`` without class names: a dataclass comes back from a runtime as a record."""
    return structure.kind, structure.keys, tuple(map(shape_of, structure.items))


def assert_sentence(reason: str | None) -> None:
    """A reason is ``None``, or a sentence that a person can read."""
    if reason is not None:
        assert isinstance(reason, str)
        assert len(reason.split()) >= 4, f"Not a sentence: {reason!r}"
        assert reason[0].isalnum(), f"Not a sentence: {reason!r}"
        assert reason.rstrip()[-1] in ".)" or " or " in reason, f"A sentence ends in a full stop: {reason!r}"


def assert_round_trip(registry: Mapping[str, type[Any]], technique: Technique) -> None:
    """JSON and back gives an equal object, and the text does not depend on anything but the fields."""
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
            with contextlib.suppress(UsageError):  # it may mean something together with others only
                type(technique)(**{name: value})


def assert_documented(technique: Technique) -> None:
    """The class says what it does and where it is from."""
    text = type(technique).__doc__ or ""
    assert "Source:" in text, f"{technique.name}: the class's docstring names no source."


def refusal(action: Callable[[], Any]) -> TrimtabError | None:
    """The error that ``action`` raises on purpose, if it does. Any other exception passes through."""
    try:
        action()
    except TrimtabError as error:
        return error
    return None


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.blake2b(raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b"", digest_size=8).hexdigest()
