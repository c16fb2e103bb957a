"""Which calls a signature accepts, and that a call which was accepted makes no other call pass."""

import pytest
import torch
from torch import nn

from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim
from trimtab.errors import InputError


class Sum(nn.Module):
    def forward(self, a, b):
        return a + b


def signature():
    dynamic = {"a": {0: Dim("batch", max=4)}, "b": {0: Dim("batch", max=4)}}
    return Candidate.of(Sum(), (torch.rand(2, 3), torch.rand(2, 3)), dynamic=dynamic).signature


WRONG = {
    "fewer": (torch.rand(2, 3),),
    "none": (),
    "more": (torch.rand(2, 3),) * 3,
    "dtype": (torch.rand(2, 3), torch.rand(2, 3).double()),
    "shape": (torch.rand(2, 3), torch.rand(2, 4)),
    "sizes that differ": (torch.rand(2, 3), torch.rand(4, 3)),
    "beyond the bounds": (torch.rand(5, 3), torch.rand(5, 3)),
    "an array": (torch.rand(2, 3), torch.rand(2, 3).numpy()),
    "a number": (torch.rand(2, 3), 1.0),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_refused_before_and_after_a_right_one(wrong):
    checked = signature()
    right = (torch.rand(2, 3), torch.rand(2, 3))
    for _ in range(2):
        with pytest.raises(InputError):
            checked.accept(wrong, {})
        assert checked.accept(right, {}) is right


def test_sizes_may_differ_from_call_to_call():
    checked = signature()
    for size in (2, 4, 2, 1, 1):
        pair = (torch.rand(size, 3), torch.rand(size, 3))
        for args, kwargs in ((pair, {}), (pair[:1], {"b": pair[1]}), ((), {"b": pair[1], "a": pair[0]})):
            assert all(one is other for one, other in zip(checked.accept(args, kwargs), pair, strict=True))
