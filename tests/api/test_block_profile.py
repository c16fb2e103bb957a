"""Profiles of blocks of one's own code."""

from __future__ import annotations

import pathlib

import pytest
import torch

import trimtab
from trimtab.errors import UsageError


def test_a_block_has_time_operators_memory_and_what_outlives_it() -> None:
    kept = []
    with trimtab.profile(name="products") as p:
        weight = torch.randn(300, 300, requires_grad=True)
        kept.append(weight @ weight)
        gone = torch.zeros(10)
        del gone
    assert p.wall_ms > 0
    assert p.peak_mb >= p.before_mb > 0
    assert "aten::mm" in [one.name for one in p.operators]
    assert sorted((one.shape, one.graph) for one in p.kept) == [((300, 300), False), ((300, 300), True)]
    assert p.leaked_mb == pytest.approx(0.72)
    assert repr(p).startswith("Profile('products': ")
    assert "2 tensors kept" in repr(p)
    assert p.to_json()["schema"] == 1


def test_a_decorated_function_keeps_its_result_and_its_last_profile(tmp_path: pathlib.Path) -> None:
    @trimtab.profile
    def train(steps: int) -> int:
        for _ in range(steps):
            torch.ones(8).sum()
        return steps

    assert train(3) == 3
    found = train.profile  # type: ignore[attr-defined]
    assert found.kept == ()
    assert [one.calls for one in found.operators if one.name == "aten::sum"] == [3]
    page = found.html(tmp_path / "profile.html").read_text(encoding="utf-8")
    assert "aten::sum" in page
    assert "None." in page


def test_an_error_passes_and_is_noted() -> None:
    with pytest.raises(ZeroDivisionError), trimtab.profile(operators=False) as p:
        _ = 1 / 0
    assert (p.error, p.operators) == ("ZeroDivisionError", ())


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(UsageError, match="must be a function"):
        trimtab.profile("train")  # type: ignore[call-overload]
    with trimtab.profile() as p, pytest.raises(UsageError, match="has not ended"):
        _ = p.wall_ms
