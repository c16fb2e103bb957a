"""Bad input of every kind, through the command line: each is answered before the first trial, with exactly this sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib
import re
import shlex
import sys

import pytest

from trimtab.cli.main import main
from trimtab.core.limits import Limits
from trimtab.core.measurement import Drop
from trimtab.evaluation.reference import Scores
from trimtab.execution import worker
from trimtab.execution.process import Outcome
from trimtab.execution.trial_runner import TrialRunner
from trimtab.measure.stats import paired_drop
from trimtab.study import ranking

FAULTY = """
import torch, trimtab
from torch import nn

torch.manual_seed(0)
NAN = float("nan")

def top1(output, target):
    return output.argmax(1) == target

def data(n=120):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()

def workload(*, model=lambda: nn.Linear(8, 2), inputs=torch.ones(1, 8), data=data(), score=top1, metric=None, **more):
    evaluation = trimtab.Evaluation(data=data, score=None if metric else score, metric=metric)
    return trimtab.Workload(**{"name": "faulty", "model": model, "inputs": inputs, "evaluation": evaluation} | more)

class Says(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.layer = what, nn.Linear(8, 2)

    def forward(self, x):
        return self.what(self.layer(x))

def raises():
    return {}["weights"]

def wrong_type(): return nn.Linear(8, 2)
def no_inputs(): return trimtab.Workload(model=nn.Linear(8, 2))
def inputs_empty(): return workload(inputs=())
def inputs_nan(): return workload(inputs=torch.full((1, 8), NAN))
def inputs_shape(): return workload(inputs=torch.ones(1, 3))
def inputs_meta(): return workload(inputs=torch.ones(1, 8, device="meta"))
def data_nan(): return workload(data=(torch.full((120, 8), NAN), torch.zeros(120)))
def data_shape(): return workload(data=(torch.ones(120, 3), torch.zeros(120)))
def data_axes(): return workload(data=(torch.ones(120), torch.zeros(120)))
def data_single(): return workload(data=[(row, 0) for row in torch.ones(120, 8)])
def data_length(): return workload(data=(torch.ones(120, 8), torch.zeros(100)))
def data_empty(): return workload(data=[])
def data_few(): return workload(data=data(1))
def data_raises(): return workload(data=(1 / (5 - i) for i in range(10)))
def score_string(): return workload(score=lambda o, t: "good")
def score_none(): return workload(score=lambda o, t: None)
def score_complex(): return workload(score=lambda o, t: (o.argmax(1) == t) + 0j)
def score_scalar(): return workload(score=lambda o, t: (o.argmax(1) == t).float().mean())
def score_length(): return workload(score=lambda o, t: torch.ones(3))
def score_nan(): return workload(score=lambda o, t: o.sum(1) * NAN)
def score_raises(): return workload(score=lambda o, t: o.argmax(9) == t)
def score_constant(): return workload(score=5)
def metric_string(): return workload(metric=lambda o, t: "good")
def metric_nan(): return workload(metric=lambda o, t: NAN)
def metric_many(): return workload(metric=lambda o, t: o)
def neither(): return workload(score=None)
def nothing(): return workload(model=Says(lambda y: None))
def text(): return workload(model=Says(lambda y: "cat"))
def gives_nan(): return workload(model=Says(lambda y: y * NAN))
def model_raises(): return workload(model=Says(lambda y: y[:, 7]))
def model_path(): return workload(model="resnet.pt")
def model_none(): return workload(model=lambda: None)
def model_meta(): return workload(model=nn.Linear(8, 2, device="meta"))
def weights(): return workload(model=nn.Linear(8, 2).state_dict())
def calibration_form(): return workload(calibration=[{"y": torch.ones(2, 8)}])
def calibration_shape(): return workload(calibration=[torch.ones(2, 3)])
def calibration_empty(): return workload(calibration=[])
def name(): return workload(name="my model")
def dynamic(): return workload(dynamic={"input": {7: "batch"}})
def mode(): return workload(mode="predict")
def good(): return workload()
"""


def line(start: str) -> int:
    """Number of the line of the faulty file that starts so."""
    return next(number for number, text in enumerate(FAULTY.splitlines(), 1) if text.startswith(start))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    found = tmp_path_factory.mktemp("bad")
    (found / "faulty.py").write_text(FAULTY)
    (found / "broken.py").write_text("hello {\n")
    (found / "empty.py").write_text("x = 1\n")
    (found / "two.py").write_text("import faulty\na = faulty.good()\nb = faulty.good()\n")
    (found / "notes.txt").write_text("nothing to see here")
    (found / "other").mkdir()
    (found / "other" / "workload.json").write_text(json.dumps({"name": "resnet", "fingerprint": "0123456789abcdef"}))
    (found / "hollow").mkdir()
    (found / "bert").mkdir()
    (found / "bert" / "config.json").write_text("{}")
    (found / "corrupt").mkdir()
    (found / "corrupt" / "manifest.json").write_text('{"schema": 1, "files"')
    return found


def answer(arguments: list[str], folder: pathlib.Path, capsys, monkeypatch) -> tuple[int, str]:
    """Exit code and standard error of a command; its worker processes are real."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["trimtab", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code, capsys.readouterr().err


FORM = "Write file.py, file.py:name, package.module:name, a model file (.pt2, .pt, .onnx) or hf:FOLDER."
TIME, SHARE = "Write it like 4ms, 90s or 10m.", "Write it like 0.5% or 0.005."
HELP = "See: trimtab optimize --help"
LAYER = "weight float32[2, 8], bias float32[2]"
META = "on the meta device, where tensors have no values."
ONE_EACH = "it must return one per example. For a number about the whole set use metric=... instead."
ONE = "it must return one number."
STRUCTURE = "The data's inputs are structured differently from the example inputs: with the example as call 1, argument 0"
CANNOT = "The workload's model function returned"
LOG, BY_HAND = "The traceback is in {log}.", "Call the model with these inputs yourself."
GIVE = "Give the folder that optimize wrote, such as runs/NAME/artifact."
A_MODEL = "give an nn.Module or a function that makes one."

USAGE = [
    (
        "missing.py",
        "There is no file 'missing.py' (looked in {folder}). Check the path, or write a file to start from: trimtab init.",
    ),
    ("notes.txt", f"'notes.txt' is not a workload. {FORM}"),
    ("bert", "'bert' is a folder. For the transformers model in it, write 'hf:bert'."),
    ("no_such_module:workload", "There is no module 'no_such_module' on the path. For a file, write its path with .py."),
    (
        "empty.py",
        "'empty.py' defines no workload. `trimtab init` writes a file to start from; if one of its functions makes one, say "
        "which: empty.py:NAME (it has: nothing).",
    ),
    ("two.py", "'two.py' defines 2 workloads. Name one of them `workload`, or say which: two.py:NAME (they are: a, b)."),
    ("two.py:c", "'two.py:c': the file has no 'c'. It has: a, b."),
    (":wrong_type", "'faulty.py:wrong_type' is a Linear; it must be a trimtab.Workload or a function that returns one."),
    (
        ":inputs_empty",
        "The workload's inputs hold no tensor: they are (). Give what the model is called with, such as inputs=images[:1].",
    ),
    (":inputs_nan", "The workload's inputs hold NaN: 8 of 8 values. Give clean ones."),
    (":inputs_meta", f"The workload's inputs are {META} Give real ones."),
    (":data_nan", "The evaluation data holds NaN: 960 of 960 values. Clean the data first."),
    (":data_axes", "The data's 'input' is float32 with 1 axis, the example's is float32 with 2 axes. Make them alike."),
    (
        ":data_single",
        "The data's 'input' is float32 with 1 axis, the example's is float32 with 2 axes. Give single examples as a Dataset, "
        "or as one pair (inputs, targets): items of anything else are batches.",
    ),
    (":data_length", "The evaluation data has inputs for 120 examples but targets for 100. Give one for each."),
    (":data_empty", "The evaluation data is empty. It must yield (inputs, target) pairs."),
    (":data_few", "The evaluation data holds 1 example, too few to split. Give at least a dozen."),
    (":score_constant", "Evaluation score is 5, which cannot be called. Give a function."),
    (":neither", "An Evaluation takes score=... (per example) or metric=... (whole set); neither was given."),
    (":model_path", f"Workload model is a str; {A_MODEL}"),
    (":weights", f"Workload model is an OrderedDict; {A_MODEL}"),
    (":calibration_form", f"{STRUCTURE} is given in call 1 and missing in call 2. Make them alike."),
    (":calibration_empty", "The calibration data is empty. Give some batches of inputs, or leave calibration=None."),
    (":name", "Workload name 'my model' names a folder; use letters, digits, '.', '_' and '-'."),
    (":dynamic", "dynamic names axis 7 of 'input', which has 2 axes. Axes count from 0: use 0 or 1."),
    (":no_inputs", "Workload 'workload' has no inputs=...; give what the model is called with."),
    (":mode", "Workload mode is 'predict'; it can be 'infer' or 'train'."),
    (":good --latency '4 parsecs'", f"--latency is '4 parsecs': 'parsecs' is not a unit of it. {TIME}"),
    (":good --latency 4", f"--latency is '4': the unit is missing. {TIME}"),
    (":good --latency 0ms", f"--latency is '0ms'; it must be above zero. {TIME}"),
    (":good --size big", "--size is 'big', which is not a positive number with a unit. Write it like 5MB or 1.5GB."),
    (":good --max-drop 150%", f"--max-drop is '150%', more than all there is. {SHARE}"),
    (":good --max-drop=-1%", f"--max-drop is '-1%', which is not a positive number with a unit. {SHARE}"),
    (":good --max-drop 1pp", f"--max-drop is '1pp': 'pp' is not a unit of a share. {SHARE}"),
    (
        ":good --max-drop 2",
        "max_drop is 2, but the score is a share between 0 and 1 ({score} as written) and cannot drop by that much. If 2% was "
        "meant, write --max-drop 2% or max_drop=0.02.",
    ),
    (":good --budget 0s", f"--budget is '0s'; it must be above zero. {TIME}"),
    (":good --budget 1e308h", "--budget is too large to be counted. Give a smaller one, or leave it out."),
    (":good --worker-memory 1e308GB", "--worker-memory is too large to be counted. Give a smaller one, or leave it out."),
    (":good --budget soon", f"--budget is 'soon', which is not a positive number with a unit. {TIME}"),
    (":good --timing 0s", f"--timing is '0s'; it must be above zero. {TIME}"),
    (":good --trials 0", f"Invalid value for '--trials': Input should be greater than or equal to 1. {HELP}"),
    (
        ":good --objective joy",
        f"Invalid value for '--objective': 'joy' is not one of 'latency', 'throughput', 'memory', 'size'. {HELP}",
    ),
    (":good --sampler luck", f"Invalid value for '--sampler': 'luck' is not one of 'ladder', 'tpe'. {HELP}"),
    (":good --lateny 4ms", f"No such option: --lateny (Possible options: --latency, --plain) {HELP}"),
    (":good --out notes.txt", "The run folder notes.txt is a file. Give a folder with --out (in Python, out=...)."),
    (
        ":good --out other",
        "The run folder other was made for another workload (resnet, 0123456789abcdef; this is faulty, {fingerprint}). Use "
        "--out FOLDER (in Python, out=...) for this one, or --fresh (fresh=True) to forget the other.",
    ),
]
WORKLOAD = [
    (
        "broken.py",
        "broken.py could not be run: SyntaxError: '{' was never closed (broken.py, line 1). Try it alone: python broken.py. "
        f"{LOG}",
    ),
    (
        ":raises",
        "'faulty.py:raises' raised while it made the workload: KeyError: 'weights' (faulty.py, line "
        f"{line('    return {}')}). Call it yourself to see why. {LOG}",
    ),
    (
        ":inputs_shape",
        "The model failed on the example inputs: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 8x2) "
        f"(Linear got input float32[1, 3] and has {LAYER}). {BY_HAND} {LOG}",
    ),
    (
        ":data_shape",
        "The model failed on the data: RuntimeError: mat1 and mat2 shapes cannot be multiplied (48x3 and 8x2) "
        f"(Linear got input float32[48, 3] and has {LAYER}). {BY_HAND} {LOG}",
    ),
    (
        ":data_raises",
        "The evaluation data could not be read: ZeroDivisionError: division by zero (faulty.py, line "
        f"{line('def data_raises')}). Go through it yourself once. {LOG}",
    ),
    (":score_string", "Evaluation score returned 'good', a str; it must return a tensor with one score per example."),
    (":score_none", "Evaluation score returned None; it must return a tensor with one score per example."),
    (
        ":score_complex",
        "Evaluation score returned a complex tensor of shape [48]; it must return a tensor with one score per example.",
    ),
    (":score_scalar", f"Evaluation score returned 1 score for a batch of 48; {ONE_EACH}"),
    (":score_length", f"Evaluation score returned 3 scores for a batch of 48; {ONE_EACH}"),
    (
        ":score_nan",
        "Evaluation score returned 48 of 48 scores that are NaN or infinite. Mend the score, or leave out the examples that it "
        "cannot judge.",
    ),
    (
        ":score_raises",
        "Evaluation score raised: IndexError: Dimension out of range (expected to be in range of [-2, 1], but got 9) "
        f"(faulty.py, line {line('def score_raises')}; outputs float32[48, 2], targets int64[48]). Call it yourself with the "
        f"model's output for a batch, and its targets. {LOG}",
    ),
    (":metric_string", f"Evaluation metric returned 'good', a str; {ONE}"),
    (":metric_nan", "Evaluation metric returned nan; it must be a finite number."),
    (":metric_many", f"Evaluation metric returned a tensor of shape [48, 2]; {ONE}"),
    (":nothing", "The model returns no tensor: its output is None. Return what it computes from its forward."),
    (":text", "The model returns no tensor: its output is 'cat'. Return what it computes from its forward."),
    (
        ":gives_nan",
        "The model as written gives NaN: 96 of 96 values of output 0 on batch 0. Mend the model or the data first; nothing can "
        "be held against NaN.",
    ),
    (
        ":model_raises",
        "The model failed on the example inputs: IndexError: index 7 is out of bounds for dimension 1 with size 2 (faulty.py, "
        f"line {line('def model_raises')}; it got y float32[1, 2]). {BY_HAND} {LOG}",
    ),
    (":model_none", f"{CANNOT} None, not an nn.Module. Let it return the model."),
    (":model_meta", f"The model's 'weight' is {META} Load its weights before you hand it over."),
    (
        ":calibration_shape",
        "The model failed on the calibration data: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 8x2) "
        f"(Linear got input float32[2, 3] and has {LAYER}). {BY_HAND} {LOG}",
    ),
]
OTHERS = [
    ("verify nowhere", 2, "artifact", f"There is no artifact folder 'nowhere'. {GIVE}"),
    ("verify hollow", 2, "artifact", f"'hollow' is no artifact: it has no manifest.json. {GIVE}"),
    (
        "verify corrupt",
        2,
        "integrity",
        "corrupt/manifest.json cannot be read: Expecting ':' delimiter: line 1 column 22 (char 21). Copy the artifact again "
        "from where it was made, or make a new one.",
    ),
    ("measure hollow", 2, "artifact", "'hollow' is no artifact: it has no manifest.json. Give the folder that has one."),
    (
        "measure nowhere",
        2,
        "artifact",
        "There is no artifact folder 'nowhere'. A workload is written file.py, file.py:name, package.module:name, a model file "
        "(.pt2, .pt, .onnx) or hf:FOLDER.",
    ),
    ("measure faulty.py:good --time 0s", 2, "usage", f"--time is '0s'; it must be above zero. {TIME}"),
    ("measure faulty.py:good --width 0", 2, "usage", "--width is 0.0; it must be above zero. Write it like 2%."),
    (
        "optimize faulty.py:good --out /proc/nowhere",
        2,
        "storage",
        "The run folder /proc/nowhere cannot be written: No such file or directory; mend that or use --out. What is finished "
        "is kept; the same command goes on from it.",
    ),
    (
        "optimize faulty.py:good --storage nonsense",
        2,
        "storage",
        "The study's storage nonsense cannot be opened: Could not parse SQLAlchemy URL from given URL string. Mend that, or "
        "choose another with --storage. Finished trials are kept, and the same command goes on from them.",
    ),
    (
        "list wishes",
        2,
        "usage",
        "Invalid value for 'KIND': 'wishes' is not one of 'passes', 'backends', 'checks'. See: trimtab list --help",
    ),
    *(
        (
            f"{command} ''",
            2,
            "usage",
            f"Invalid value for {name!r}: it is empty; give a path, such as {example!r}. '.' is the folder this runs in. "
            f"See: trimtab {command.split()[0]} --help",
        )
        for command, name, example in (
            ("verify", "artifact", "runs/model/artifact"),
            ("report", "RUN", "runs/digits"),
            ("optimize faulty.py --out", "--out", "runs/model"),
            ("optimize faulty.py --inputs", "--inputs", "rows.npz"),
        )
    ),
    ("optimise faulty.py", 2, "usage", "No such command 'optimise'. Did you mean 'optimize'? See: trimtab --help"),
]


def optimize(text: str) -> str:
    return f"optimize {text if not text.startswith(':') else 'faulty.py' + text}"


CASES = [
    *((optimize(text), 2, "usage", sentence) for text, sentence in USAGE),
    *((optimize(text), 3, "workload", sentence) for text, sentence in WORKLOAD),
    *OTHERS,
]
IN_A_WORKER = {"broken.py", "faulty.py:raises", "faulty.py:data_nan", "faulty.py:score_string", "faulty.py:model_meta"}
"""These are checked where users have them checked, in a worker process; for the others the same job runs here, for speed."""


def here(runner: TrialRunner, job: dict[str, object], folder: pathlib.Path, **_: object) -> Outcome:
    """The job of a worker, done in this process."""
    assert job["kind"] == "prepare", "it was not answered before the first trial"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stderr(io.StringIO()):  # its log
        result = worker._result(job, folder, folder)
    if "error" in result:
        return Outcome(reason=result["message"], seconds=0.0, error=result["error"])
    return Outcome(reason=None, seconds=0.0, result=result)


@pytest.mark.parametrize(("command", "code", "name", "sentence"), CASES, ids=[case[0] for case in CASES])
def test_bad_input_is_answered_with_a_sentence(
    command: str, code: int, name: str, sentence: str, folder: pathlib.Path, capsys, monkeypatch
) -> None:
    arguments = shlex.split(command)
    if not IN_A_WORKER & set(arguments):
        monkeypatch.setattr(TrialRunner, "run_job", here)
    monkeypatch.setattr(sys, "path", list(sys.path))  # which reading a workload extends
    exact = re.escape(f"error[{name}]: {sentence}\n".replace("{folder}", str(folder)))
    for varying, form in (("{score}", r"0\.\d{4}"), ("{fingerprint}", r"[0-9a-f]{16}"), ("{log}", r"\S+/prepare/log\.txt")):
        exact = exact.replace(re.escape(varying), form)
    found, said = answer(arguments, folder, capsys, monkeypatch)
    assert re.fullmatch(exact, said), said
    assert found == code


def test_a_limit_that_is_far_too_generous_is_doubted_but_allowed() -> None:
    assert ranking.limit_warning(Limits(max_drop=0.5), 0.9, share=True) == (
        "max_drop allows the score to drop by 50% (0.9000 as written). If 0.5% was meant, write --max-drop 0.5% or "
        "max_drop=0.005."
    )
    assert ranking.limit_warning(Limits(max_drop=0.05), 0.9, share=True) is None
    assert ranking.limit_warning(Limits(max_drop=2.0), -14.2, share=False) is None
    assert ranking.limit_warning(Limits(max_drop=0.01), -14.2, share=False) == (
        "max_drop allows the score to drop by 0.01, in its own units (-14.2 as written). If 1% of it was meant, give 0.142."
    )
    assert ranking.limit_warning(Limits(max_drop=0.03), 27.3, share=False) is None, "more than a thousandth of it"
    assert ranking.limit_warning(Limits(max_drop=0), 27.3, share=False) is None
    assert ranking.limit_warning(Limits(max_drop="mlperf-99"), 0.9, share=True) is None


def test_a_limit_that_the_data_cannot_prove_is_told_of_before_the_search() -> None:
    """Among n examples a failure of about 3/n of all need not show, whatever a recipe does with these."""
    right = [1.0] * 100
    least = {"selection": paired_drop([1.0] * 400, [1.0] * 400), "test": paired_drop(right, right)}
    least = {name: dataclasses.replace(found, share=True) for name, found in least.items()}
    assert ranking.unprovable_drop(Limits(max_drop=0.01), 1.0, least) == (
        "With 100 examples of test data no drop below 2.951% can be proven, and the limit is 1.000%: what may lose accuracy is "
        "refused, unless it scores better than the original. About 296 examples would do, or a larger --max-drop."
    )
    found = ranking.unprovable_drop(Limits(), 0.9, least)
    assert found is not None, "without a limit of one's own it is mlperf-99"
    assert "the limit is 0.900%" in found
    assert ranking.unprovable_drop(Limits(max_drop=0.03), 1.0, least) is None
    assert ranking.unprovable_drop(Limits(max_drop=0), 1.0, least) is None, "exact recipes are held to rounding"
    assert ranking.unprovable_drop(Limits(), None, {}) is None


def test_a_limit_that_nothing_can_be_held_against_is_told_of() -> None:
    assert ranking.limit_warning(Limits(), None, share=False) is None
    assert ranking.limit_warning(Limits(max_drop=0.005), None, share=False) == (
        "There are no labels, so max_drop 0.005 cannot be looked at: the outputs of recipes that may lose accuracy are held to "
        "max_error 0.05 instead."
    )
    assert ranking.limit_warning(Limits(max_drop=0), None, share=False) == (
        "There are no labels, so max_drop 0 cannot be looked at: it allows exact recipes only."
    )
    assert ranking.limit_warning(Limits(max_error=0.5), None, share=False) == (
        "max_error allows the outputs to be off by 50% of what they vary by. If 0.5% was meant, write --max-error 0.5% or "
        "max_error=0.005."
    )
    assert ranking.limit_warning(Limits(max_error=100.0), 0.9, share=True) is None, "a score judges"


@pytest.mark.parametrize(
    ("scores", "higher_is_better", "share"),
    [
        ((1.0, 0.0, 1.0), True, True),
        ((1.0, 0.0, 1.0), False, True),
        ((0.0, 0.0), False, False),  # of no error at all nobody knows the unit
        ((0.2, 0.9), True, True),
        ((0.2, 0.9), False, False),
        ((-0.2, -0.9), True, False),
        ((0.5, 21.0), True, False),
    ],
)
def test_only_drops_of_shares_are_shown_in_percent(scores: tuple[float, ...], higher_is_better: bool, share: bool) -> None:
    assert Scores(value=sum(scores) / len(scores), n=len(scores), each=scores).is_share(higher_is_better) is share
    drop = Drop(value=0.0123, low=0.0, upper=0.02, n=3, share=share)
    assert drop.show(drop.value) == ("1.230%" if share else "0.0123")
