"""Structures of outputs: fields called as methods are, named results of torch, and classes that are found again."""

from __future__ import annotations

import collections
import collections.abc
import copy
import dataclasses
import json
import math
import pathlib
import pickle
import types
from typing import Any

import pytest
import torch
from torch import nn

from _backends import needs_compiler
from trimtab._internal.serialization import dumps, from_json
from trimtab.backends.common.owned_outputs import owned
from trimtab.backends.eager import Eager
from trimtab.backends.inductor import Inductor
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import Backend
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim, Signature
from trimtab.tensors.structure import Record, Structure, flatten, leaves_of, map_tensors, opened, tensors_of, unflatten

BATCH = {"x": {0: Dim("batch")}}


@dataclasses.dataclass
class ActorCritic:
    values: torch.Tensor
    items: torch.Tensor
    class_name: torch.Tensor
    keys: int = 3
    _private: str = "p"


class Best(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.topk(3), {"max": x.max(1)}


def actor_critic(*tensors: torch.Tensor) -> Record:
    found = flatten(ActorCritic(*tensors))
    return unflatten(found[1], found[0])


def test_a_field_may_be_called_as_a_method_of_dict_is() -> None:
    tensors = [torch.full((2,), float(i)) for i in range(3)]
    record = actor_critic(*tensors)
    assert isinstance(record, Record)
    for found in (record, copy.copy(record), pickle.loads(pickle.dumps(record))):  # noqa: S301
        assert [found.values.tolist(), found.items.tolist(), found.class_name.tolist()] == [[0, 0], [1, 1], [2, 2]]
        assert (found.keys, found._private, found[3], found["keys"]) == (3, "p", 3, 3)
        assert [*found] == ["values", "items", "class_name", "keys", "_private"]
        assert found.to_tuple()[1].tolist() == [1, 1]
        assert flatten(found)[1] == flatten(ActorCritic(*tensors))[1]
    with pytest.raises(AttributeError, match="The output has no 'logits'; it has values, items"):
        _ = record.logits
    found = opened(record)
    assert found is not None
    assert found.rebuild(found.items).values is tensors[0]


class Wrapped(collections.abc.MutableMapping[str, Any]):
    """A mapping whose shallow copies share its items."""

    def __init__(self, items: Any) -> None:
        self.inner = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __setitem__(self, key: str, item: Any) -> None:
        self.inner[key] = item

    def __delitem__(self, key: str) -> None:
        del self.inner[key]

    def __iter__(self) -> Any:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


@pytest.mark.parametrize("kind", [dict, collections.UserDict, collections.OrderedDict, Wrapped, types.MappingProxyType])
def test_containers_are_rebuilt_in_their_class_and_the_original_stays(kind: Any) -> None:
    given = kind({"x": torch.ones(2), "pair": (torch.ones(1), ["a"])})
    found = map_tensors(given, lambda tensor: tensor + 1)
    assert type(found) is kind
    assert [tensor.tolist() for tensor in tensors_of(found)] == [[2, 2], [2]]
    assert [tensor.tolist() for tensor in tensors_of(given)] == [[1, 1], [1]]
    assert leaves_of(found)[-1] == "a"


def test_what_is_made_in_inference_mode_is_copied_under_any_name() -> None:
    with torch.inference_mode():
        record = actor_critic(*(torch.ones(2) for _ in range(3)))
    found = owned(record)
    assert found.items.add_(1).tolist() == found.items.tolist() == [2, 2]


@pytest.mark.parametrize(
    "backend", [Eager(), TorchScript(), pytest.param(Inductor(mode="default"), marks=needs_compiler)], ids=str
)
def test_named_results_of_torch_keep_their_names(backend: Backend, tmp_path: pathlib.Path) -> None:
    x = torch.randn(4, 5)
    subject = Candidate.of(Best(), (x,), dynamic=BATCH)
    assert [spec.name for spec in subject.signature.outputs] == [
        *("output.0.values", "output.0.indices", "output.1.max.values", "output.1.max.indices"),
    ]
    executable = backend.compile(subject)
    executable.save(tmp_path)
    for each in (executable, backend.load(tmp_path, executable.signature, executable.settings)):
        found = each(x)
        assert torch.equal(found[0].indices, x.topk(3).indices)
        assert torch.equal(found[1]["max"].values, x.max(1).values)
    found = opened(x.max(1))
    assert found is not None
    assert torch.equal(found.rebuild(iter(found.items)).indices, found.items[1])


def test_source_finds_named_results_by_place() -> None:
    class Decided(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            best = x.topk(2)
            return best if bool(x.sum() > 0) else (-x).topk(2)

    subject = Candidate.of(Decided(), (torch.ones(4, 5),))
    executable = TorchScript().compile(subject)
    assert any("from source" in note for note in executable.notes)
    x = -torch.rand(4, 5)
    assert torch.equal(executable(x).values, (-x).topk(2).values)


def test_the_class_of_a_named_tuple_is_made_once() -> None:
    structure = Structure("namedtuple", ("values", "indices"), (Structure("tensor"), Structure("tensor")), "topk")
    leaves = [torch.zeros(1), torch.zeros(1)]
    assert type(unflatten(structure, leaves)) is type(unflatten(from_json(Structure, json.loads(dumps(structure))), leaves))


class Filled(nn.Module):
    def forward(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        return x.masked_fill(x < 0, fill)


class Decides(nn.Module):
    def forward(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        if bool(x.sum() > 1e9):
            x = x + 1
        return x.masked_fill(x < 0, fill)


@pytest.mark.parametrize("model", [Filled, Decides], ids=["traced", "scripted"])
def test_a_constant_that_is_not_finite_is_kept_by_files(model: type[nn.Module], tmp_path: pathlib.Path) -> None:
    candidate = Candidate.of(model().eval(), (torch.tensor([[1.0, -1.0]]), -math.inf))
    executable = TorchScript().compile(candidate)
    executable.save(tmp_path)
    signature = from_json(Signature, json.loads(dumps(candidate.signature)))
    loaded = TorchScript().load(tmp_path, signature, executable.settings)
    assert loaded(torch.tensor([[-2.0, 3.0]]), -math.inf).tolist() == [[-math.inf, 3.0]]
