"""State dicts of modules with the versions of their layouts, without which some modules take them for old ones."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def copied(module: nn.Module) -> dict[str, Any]:
    """A copy of all that is in the state of ``module``; what one adds there as its extra state need not be a tensor."""
    state = module.state_dict()
    values = {n: v.detach().clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for n, v in state.items()}
    return versioned(values, versions(state))


def versions(state: Mapping[str, Any]) -> dict[str, int]:
    """Of each module that has a part in ``state``, by its name, the version of that part's layout."""
    metadata: Mapping[str, Mapping[str, Any]] = getattr(state, "_metadata", {})
    return {name: found["version"] for name, found in metadata.items() if isinstance(found.get("version"), int)}


def versioned(values: Mapping[str, Any], kept: Mapping[str, int]) -> dict[str, Any]:
    """``values`` as ``Module.load_state_dict`` wants them: with what :func:`versions` gave of the state that they come from."""
    made = collections.OrderedDict(values)
    vars(made)["_metadata"] = {name: {"version": version} for name, version in kept.items()}
    return made
