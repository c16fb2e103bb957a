"""State dicts with the version of each module, without which some modules read them as an older format."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def copied(module: nn.Module) -> dict[str, Any]:
    """A copy of ``module.state_dict()``, including extra state that is no tensor."""
    state = module.state_dict()
    values = {n: v.detach().clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for n, v in state.items()}
    return versioned(values, versions(state))


def versions(state: Mapping[str, Any]) -> dict[str, int]:
    """The version of each module in ``state``, by module name."""
    metadata: Mapping[str, Mapping[str, Any]] = getattr(state, "_metadata", {})
    return {name: found["version"] for name, found in metadata.items() if isinstance(found.get("version"), int)}


def versioned(values: Mapping[str, Any], kept: Mapping[str, int]) -> dict[str, Any]:
    """``values`` as a state dict for ``Module.load_state_dict``, with ``kept``, the :func:`versions` of the original."""
    made = collections.OrderedDict(values)
    vars(made)["_metadata"] = {name: {"version": version} for name, version in kept.items()}
    return made
