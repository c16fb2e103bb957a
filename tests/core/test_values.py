"""The ground floors: JSON, units, registry, nested values, recipes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab._internal import units
from trimtab._internal.serialization import dumps, from_json, to_json, write_json
from trimtab.core.backend import BACKENDS
from trimtab.core.check import CHECKS
from trimtab.core.measurement import Drop, Interval
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, Pass, technique_from_json
from trimtab.core.trial import State, Trial
from trimtab.errors import UnknownNameError, UsageError
from trimtab.tensors.structure import Record, flatten, names, unflatten


@dataclasses.dataclass(frozen=True)
class Inner:
    value: float
    kind: Literal["a", "b"] = "a"


@dataclasses.dataclass(frozen=True)
class Outer:
    schema: ClassVar[int] = 3
    name: str
    items: tuple[Inner, ...] = ()
    by_name: dict[str, Inner | None] = dataclasses.field(default_factory=dict)


def test_json_round_trip_carries_the_schema() -> None:
    outer = Outer("x", (Inner(1.5), Inner(2.0, "b")), {"k": None, "l": Inner(3.0)})
    data = json.loads(dumps(outer))
    assert data["schema"] == 3
    assert from_json(Outer, data) == outer


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"schema": 4, "name": "x"}, "Outer: schema 4 cannot be read by this version, which reads 3."),
        ({"schema": 3}, "Outer: field 'name' is missing."),
        ({"schema": 3, "name": "x", "extra": 1}, "Outer: unknown field 'extra'; known are name, items, by_name."),
        ({"schema": 3, "name": 5}, "Outer.name: expected str, got 5."),
        ({"schema": 3, "name": "x", "items": [{"value": 1, "kind": "c"}]}, "Inner.kind: 'c' is not one of 'a', 'b'."),
        ([1], "Outer: expected an object, got list."),
    ],
)
def test_json_refuses_what_it_did_not_write(data: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_json(Outer, data)
    assert str(caught.value) == message


def test_json_has_no_nan() -> None:
    assert math.isnan(from_json(Interval, json.loads(dumps(Interval(1.0, 0.5, math.inf)))).high)
    assert json.loads(dumps({"a": math.nan, "b": math.inf, "c": 1.0})) == {"a": None, "b": None, "c": 1.0}


def test_constants_that_are_not_finite_come_back_as_they_were() -> None:
    leaves, structure = flatten({"fill": -math.inf, "top": math.inf, "none": float("nan"), "some": 0.5, "word": "inf"})
    assert leaves == []
    again = from_json(type(structure), json.loads(dumps(structure)))
    assert again == structure == flatten(unflatten(again, []))[1]
    assert again != flatten({"fill": -math.inf, "top": math.inf, "none": None, "some": 0.5, "word": "inf"})[1]
    for wrong in ({"float": "1e999"}, {"float": []}, {"int": "inf"}, {}):
        with pytest.raises(UsageError, match="Structure.value: .* is no number"):
            from_json(type(structure), {"kind": "constant", "value": wrong})


def test_write_json_leaves_the_old_file_when_it_fails(tmp_path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_file_s_name_that_is_no_utf_8_comes_back_from_json(tmp_path) -> None:
    name = os.fsdecode(b"mod\xe9l \\udce9 \xc3\xa9.py")
    write_json(tmp_path / "x.json", {"a": name})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": name}


@pytest.mark.parametrize(
    ("value", "upper", "score", "short", "loss", "short_loss"),
    [
        (
            *(0.012, 0.03),
            *("drops by 1.20% (at most 3.00%)", "drop 1.20% (up to 3.00%)"),
            *("ends up 0.012 higher (at most 0.03)", "rise 0.012 (up to 0.03)"),
        ),
        (
            *(-0.0, 0.02),
            *("does not change (drops by 2.00% at most)", "drop 0.00% (up to 2.00%)"),
            *("does not change (ends up 0.02 higher at most)", "rise 0 (up to 0.02)"),
        ),
        (
            *(-0.011, 0.021),
            *("improves by 1.10% (drops by 2.10% at most)", "gain 1.10% (drop up to 2.10%)"),
            *("ends up 0.011 lower (ends up 0.021 higher at most)", "fall 0.011 (rise up to 0.021)"),
        ),
        (
            *(-0.03, -0.01),
            *("improves by 3.00% (at least 1.00%)", "gain 3.00% (at least 1.00%)"),
            *("ends up 0.03 lower (at least 0.01)", "fall 0.03 (at least 0.01)"),
        ),
    ],
)
def test_a_negative_drop_is_called_an_improvement(
    value: float, upper: float, score: str, short: str, loss: str, short_loss: str
) -> None:
    drop = Drop(value=value, low=value - 0.01, upper=upper, n=100, share=True)
    assert (f"{drop.change(2)} ({drop.bound(2)})", drop.short(2)) == (score, short)
    rise = dataclasses.replace(drop, share=False, of="loss")
    assert (f"{rise.change(2)} ({rise.bound(2)})", rise.short(2)) == (loss, short_loss)


def test_trial_round_trips_through_json() -> None:
    recipe = Recipe(passes=(PASSES["channels_last"](),), backend=BACKENDS["eager"]())
    drop = Drop(value=0.01, low=0.0, upper=0.02, n=100, limit=0.03, decided=True)
    trial = Trial(recipe=recipe, state=State.COMPLETE, speedup=Interval(2.0, 1.9, 2.1), drop=drop, dims=("batch",))
    assert from_json(Trial, json.loads(dumps(trial))) == trial


@pytest.mark.parametrize(
    ("function", "text", "value"),
    [
        (units.seconds, "4ms", 0.004),
        (units.seconds, "10m", 600.0),
        (units.seconds, "1.5 h", 5400.0),
        (units.megabytes, "5MB", 5.0),
        (units.megabytes, "1GiB", 1073.741824),
        (units.fraction, "0.5%", 0.005),
        (units.fraction, "0.02", 0.02),
    ],
)
def test_units(function, text: str, value: float) -> None:
    assert function(text, "--x") == pytest.approx(value)


@pytest.mark.parametrize(
    ("function", "text", "message"),
    [
        (units.seconds, "4", "--x is '4': the unit is missing. Write it like 4ms, 90s or 10m."),
        (units.seconds, "4MB", "--x is '4MB': 'MB' is not a unit of it. Write it like 4ms, 90s or 10m."),
        (units.megabytes, "big", "--x is 'big', which is not a positive number with a unit. Write it like 5MB or 1.5GB."),
        (units.fraction, "1ms", "--x is '1ms': 'ms' is not a unit of a share. Write it like 0.5% or 0.005."),
        (units.seconds, "-4ms", "--x is '-4ms', which is not a positive number with a unit. Write it like 4ms, 90s or 10m."),
    ],
)
def test_wrong_units_say_what_was_expected(function, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        function(text, "--x")
    assert str(caught.value) == message


class Point(NamedTuple):
    x: torch.Tensor
    y: str


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: tuple[torch.Tensor, torch.Tensor]
    loss: None = None


def test_tree_keeps_the_structure() -> None:
    tensors = [torch.tensor(float(i)) for i in range(6)]
    value = (tensors[0], [tensors[1], 3, None], {"k": Point(tensors[2], "s")}, Output(tensors[3], (tensors[4], tensors[5])))
    leaves, structure = flatten(value)
    assert [int(t) for t in leaves] == list(range(6))
    again = unflatten(structure, leaves)
    assert again[1] == [tensors[1], 3, None]
    assert again[2]["k"].y == "s"
    assert again[2]["k"].x is tensors[2]
    assert isinstance(again[3], Record)
    assert again[3].logits is again[3]["logits"] is again[3][0] is tensors[3]
    assert flatten(again[3])[1].keys == ("logits", "extra", "loss")
    assert from_json(type(structure), json.loads(dumps(structure))) == structure
    assert names(structure, "v") == ["v.0", "v.1.0", "v.2.k.x", "v.3.logits", "v.3.extra.0", "v.3.extra.1"]


@given(
    st.recursive(st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
)
def test_tree_round_trips_any_nesting(value: object) -> None:
    leaves, structure = flatten(value)
    assert leaves == []
    assert unflatten(structure, leaves) == value


def test_tree_names_what_cannot_cross() -> None:
    with pytest.raises(UsageError, match=r"inputs\[0\]\['x'\] is a .*set, which cannot cross to another runtime"):
        flatten(({"x": {1, 2}},), "inputs")
    with pytest.raises(UsageError, match=r"is a numpy.ndarray, which cannot cross to another runtime. Make it a tensor: torch"):
        flatten((np.zeros(2),), "inputs")


def test_a_cache_of_transformers_is_left_out_by_its_own_setting() -> None:
    kind = type("DynamicCache", (), {"__module__": "transformers.cache_utils"})
    told = r"output\['past'\] is a transformers\.cache_utils\.DynamicCache.*Give use_cache=False beside"
    with pytest.raises(UsageError, match=told):
        flatten({"past": kind()}, "output")


def test_registry_lists_names_without_importing_and_knows_what_exists() -> None:
    assert {"channels_last"} <= set(PASSES)
    assert {"eager"} <= set(BACKENDS)
    assert list(PASSES) == sorted(PASSES)
    with pytest.raises(UnknownNameError) as caught:
        PASSES["chanels_last"]
    assert str(caught.value) == f"There is no pass 'chanels_last'. Known are: {', '.join(PASSES)}."
    assert isinstance(len(CHECKS), int)


def test_techniques_come_back_from_json_and_refuse_what_they_do_not_take() -> None:
    backend = technique_from_json(BACKENDS, {"name": "eager", "grad_mode": "no_grad"})
    assert str(backend) == "eager(grad_mode=no_grad)"
    assert to_json(backend) == {"name": "eager", "grad_mode": "no_grad"}
    with pytest.raises(UsageError, match=r"Eager.grad_mode: 'on' is not one of 'inference', 'no_grad'"):
        technique_from_json(BACKENDS, {"name": "eager", "grad_mode": "on"})
    with pytest.raises(UsageError, match="eager: grad_mode is 'on'; it can be 'inference', 'no_grad'"):
        BACKENDS["eager"](grad_mode="on")  # type: ignore[call-arg]


def test_recipe_hash_order_and_duplicates() -> None:
    eager, step = BACKENDS["eager"](), PASSES["channels_last"]()
    recipe = Recipe(passes=(step,), backend=eager)
    assert Recipe.from_json(json.loads(dumps(recipe))) == recipe
    assert recipe.hash == Recipe.from_json(recipe.to_json()).hash != Recipe(backend=eager).hash
    assert str(recipe) == "channels_last + eager"
    with pytest.raises(UsageError, match="has the pass 'channels_last' twice"):
        Recipe(passes=(step, step), backend=eager)
    assert isinstance(step, Pass)
