"""Calls whose arguments do not fit end in a sentence with the name that was meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trimtab
from trimtab._internal.validation import checked_call
from trimtab.errors import UsageError

LINEAR = torch.nn.Linear(2, 2).eval()
WORKLOAD = trimtab.Workload(model=LINEAR, inputs=torch.ones(1, 2))
ADAM = torch.optim.Adam


@pytest.mark.parametrize(
    ("function", "values", "given", "sentence"),
    [
        (trimtab.optimize, [WORKLOAD], {"limts": 1},
         "trimtab.optimize has no argument 'limts'. Did you mean 'limits'? It takes: "),
        (trimtab.tune, [WORKLOAD], {"trails": 1}, "trimtab.tune has no argument 'trails'. Did you mean 'trials'? "),
        (trimtab.compare, [WORKLOAD], {"time": 1}, "trimtab.compare has no argument 'time'. "),
        (trimtab.verify, ["x"], {"sped": 1}, "trimtab.verify has no argument 'sped'. Did you mean 'speed'? "),
        (trimtab.load_workload, ["x"], {"shape": 1},
         "trimtab.load_workload has no argument 'shape'. Did you mean 'shapes'? "),
        (trimtab.Limits.parse, [], {"drop": "1%"}, "Limits.parse has no argument 'drop'. Did you mean 'max_drop'? "),
        (trimtab.Workload.capture, [LINEAR, print], {"nam": 1},
         "Workload.capture has no argument 'nam'. Did you mean 'name'? "),
        (trimtab.Trainer, [LINEAR], {"optimiser": ADAM},
         "Trainer has no argument 'optimiser'. Did you mean 'optimizer'? "),
        (trimtab.Trainer(LINEAR, optimizer=ADAM).fit, [[]], {"epoch": 1},
         "Trainer.fit has no argument 'epoch'. Did you mean 'epochs'? "),
        # a field of an argument that is a dataclass
        (trimtab.optimize, [WORKLOAD], {"max_drop": 0.1},
         "max_drop is in Limits: trimtab.optimize(limits=Limits(max_drop=0.1))."),
        (trimtab.Trainer, [LINEAR], {"accumulate": 2},
         "accumulate is in DataSettings: Trainer(settings=Settings(data=DataSettings(accumulate=2)))."),
        (trimtab.Workload, [], {"score": len},
         "score is in Evaluation: Workload(evaluation=Evaluation(score=<built-in function len>))."),
        (trimtab.Workload, [], {"metric": "x" * 99},
         "metric is in Evaluation: Workload(evaluation=Evaluation(metric=...))."),
        # missing, and too many without a name
        (trimtab.optimize, [], {}, "trimtab.optimize has no workload=..., which it needs. It takes: workload, "),
        (trimtab.Trainer, [LINEAR], {}, "Trainer has no optimizer=..., which it needs. It takes: model, "),
        (trimtab.optimize, [WORKLOAD, trimtab.Limits()], {},
         "trimtab.optimize takes 1 argument without a name; 2 were given. Give the others by name, as in "
         "trimtab.optimize(..., limits=...)."),
        (trimtab.optimize, [WORKLOAD], {"workload": WORKLOAD},
         "trimtab.optimize: multiple values for argument 'workload'."),
    ],
)  # fmt: skip
def test_a_call_that_does_not_fit_is_answered_with_the_names(function: Any, values: Any, given: Any, sentence: str) -> None:
    """Nothing runs, and the sentence ends where the list of all names begins or with the right call."""
    with pytest.raises(UsageError) as raised:
        function(*values, **given)
    assert str(raised.value).startswith(sentence)


def test_an_error_inside_a_checked_function_passes_unchanged() -> None:
    """A ``TypeError`` of the function's body is no misfit of its arguments."""

    @checked_call("head")
    def head(values: list[int]) -> int:
        return len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        head([1])
