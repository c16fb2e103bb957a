"""Outputs that their caller may write to."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def owned(outputs: T) -> T:
    """``outputs``, in whatever the model nests them, with copies of those tensors that their caller could not change.

    A tensor that was made in inference mode refuses to be changed in place outside of it, as post-processing such as
    ``boxes[:, 2:] += boxes[:, :2]`` does. A copy that is made outside does not, so call this there; where the caller is in
    inference mode too, everything can be changed and nothing is copied. Containers keep their class: tuples are made anew,
    the others filled in place.
    """
    if torch.is_inference_mode_enabled():
        return outputs
    found: T = _owned(outputs)
    return found


def _owned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, tuple):
        items = [_owned(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        value[:] = [_owned(item) for item in value]
    elif isinstance(value, MutableMapping):
        for key in list(value):  # an item may be called items, and the outputs of transformers refuse update()
            value[key] = _owned(value[key])
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            object.__setattr__(value, field.name, _owned(getattr(value, field.name)))  # it may be frozen
    return value
