"""Helpers of the checks of scripts: shares of a step, classes of lines, and edits of a line."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from trimtab.core.check import ScriptCheck
from trimtab.core.evidence import LineRecord, LoaderRecord, Phase, ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import CodeEdit, ScriptSettings

EVERY = 50
"""Rounds of a loop between two runs of a line that need not run in each."""
FILES = re.compile(
    r"\bopen\(|\.read_(bytes|text|csv|parquet|image|file)\(|\b(np|numpy|torch|json|pickle|h5py|torchaudio)\.load\("
    r"|\b(Image\.open|imread|soundfile\.read|loadtxt|genfromtxt|fromfile)\(|\bdecode_|\.(decode|convert)\("
)
"""Lines that open or decode a file."""
LOGGING = re.compile(
    r"\bprint\(|\btqdm\b|\b(logger|logging|writer|wandb|mlflow)\.\w+\(|\badd_(scalars?|histogram|image|text|figure)\(|set_postfix"
)
"""Lines that write a log."""
LOSSES = re.compile(r"loss|criterion|\bkld?\b", re.IGNORECASE)
"""Lines that compute a loss, which every step needs."""
METRICS = re.compile(
    r"(?<![a-z])(acc|accuracy|auc|auroc|roc|f1|precision_recall|recall|confusion|metrics?|top_?k|scores?|iou|bleu|rouge|perplexity"
    r"|ece)(?![a-z])",
    re.IGNORECASE,
)
"""Lines and functions that compute a metric."""
BATCHES = re.compile(
    r"\b(stack|tensor|as_tensor|from_numpy|cat|randint|randperm|choice|sample|permutation|pad|collate|batch\w*|memmap)\b|"
    + FILES.pattern
)
"""Lines that make a batch."""
FOUR_DIMS = re.compile(r"\[\d+(, \d+){3}\]")
"""The shape of a four-dimensional tensor."""


def step_share(record: ProbeRecord, ms: float) -> float:
    """``ms`` as a share of a step, 0 to 1."""
    return min(1.0, ms / record.step_ms) if record.step_ms > 0 else 0.0


def share(record: ProbeRecord, *phases: Phase) -> float:
    """The share of a step that ``phases`` take, 0 to 1."""
    return step_share(record, sum(record.phases.get(phase, 0.0) for phase in phases))


def run_share(record: ProbeRecord, name: str) -> float:
    """The share of the time after the first step that ``name`` of :attr:`ProbeRecord.run_s` takes, 0 to 1."""
    total = sum(seconds for part, seconds in record.run_s.items() if part != "start")
    return record.run_s.get(name, 0.0) / total if total > 0 else 0.0


def slow_loaders(record: ProbeRecord, least: float) -> list[LoaderRecord]:
    """Loaders that a step waits for during at least the share ``least``, the slowest first."""
    found = [loader for loader in record.loaders if wait_share(record, loader) >= least]
    return sorted(found, key=lambda loader: -wait_share(record, loader))


def wait_share(record: ProbeRecord, loader: LoaderRecord) -> float:
    """The share of a step that waits for ``loader``. A single loader has the whole phase ``data``."""
    if len(record.loaders) == 1:
        return share(record, "data")
    ms = loader.wait_ms * loader.batches / record.steps if record.steps else 0.0
    return min(share(record, "data"), step_share(record, ms))


def lines(record: ProbeRecord, *phases: Phase, least: float = 0.0) -> list[LineRecord]:
    """The lines that take at least the share ``least`` in one of ``phases``, the slowest first."""
    found = [line for line in record.lines if line.phase in phases and line.share >= least]
    return sorted(found, key=lambda line: -line.share)


def reading_lines(record: ProbeRecord, least: float = 0.0) -> list[LineRecord]:
    """The lines that read data during at least the share ``least`` of a step, the slowest first.

    If workers read, these are the lines of the workers, with their share of the wait for the loader.
    """
    found = [] if any(loader.lines for loader in record.loaders) else lines(record, "data")
    for loader in record.loaders:
        waits, batches = wait_share(record, loader), loader.batches / max(record.steps, 1)
        found += [dataclasses.replace(line, share=waits * line.share, runs=batches * line.runs) for line in loader.lines]
    return sorted((line for line in found if line.share >= least), key=lambda line: -line.share)


def matches(line: LineRecord, kind: re.Pattern[str]) -> bool:
    """Whether the text of ``line`` or the name of its function matches ``kind``."""
    return bool(kind.search(line.text) or kind.search(line.function))


def joined_sites(found: Iterable[LineRecord], most: int = 3) -> str:
    """The first ``most`` lines with their shares as text: ``train.py:12 (31%) and train.py:14 (8%)``."""
    sites = [f"{line.site} ({line.share:.0%})" for line in found][:most]
    return " and ".join([", ".join(sites[:-1]), sites[-1]] if len(sites) > 1 else sites)


def slow_between(
    check: ScriptCheck,
    record: ProbeRecord,
    slow: list[LineRecord],
    message: str,
    *,
    least: float,
    category: Literal["data", "step", "run"],
    advice: str,
) -> list[Finding]:
    """The finding that the lines ``slow``, the slowest first, take at least the share ``least`` of a step. In ``message``,
    ``{taken}`` stands for that share and ``{listed}`` for the lines."""
    taken = sum(line.share for line in slow)
    if not slow or taken < least:
        return []
    counted = any(line.runs for line in record.lines)
    own = [line for line in slow if line.phase in ("other", "data", "copy") and (line.runs or not counted)]
    left_out = tuple(dict.fromkeys(line.site for line in own))  # not: a call around all steps, or what other ceilings leave out
    return [
        check.note(
            message.format(taken=f"{taken:.0%}", listed=joined_sites(slow)),
            evidence={"lines_share": taken, "first_share": slow[0].share},
            where=slow[0].site,
            category=category,
            edit=edit(record, slow[0].site, advice),
            ceiling=ScriptSettings(without="lines", lines=left_out) if left_out else None,
            share=taken,
        )
    ]


def batch_size(record: ProbeRecord) -> int | None:
    """Examples per batch: of the loader with the most batches, else the first size of a module's inputs."""
    known = [(loader.batches, loader.batch_size) for loader in record.loaders if loader.batches and loader.batch_size]
    if known:
        return max(known)[1]
    first = [re.search(r"\[(\d+)", shape) for module in record.modules for shape in module.inputs[:1]]
    return max((int(found[1]) for found in first if found), default=None)


def per_example(runs: float, size: int) -> bool:
    """Whether ``runs`` is a multiple of ``size``, up to rounding: something ran equally often for each example."""
    return runs >= 0.98 * size and abs(runs / size - round(runs / size)) < 0.02


def on_gpu(record: ProbeRecord) -> bool:
    """Whether the model lies on a CUDA device."""
    return record.device.startswith("cuda")


def edit(record: ProbeRecord, site: str | None, advice: str, **arguments: dict[str, str]) -> CodeEdit | None:
    """An edit of the line at ``site``, if that is known. ``arguments`` are passed to :func:`with_arguments`, such as
    ``DataLoader={"num_workers": "2"}``. Without them, or if the new text cannot be derived, the edit is advice."""
    if not site:
        return None
    new = record.texts.get(site) if arguments else None
    for function, given in arguments.items():
        new = None if new is None else with_arguments(new, function, given)
    return CodeEdit(site=site, advice=advice, replacement=None if new == record.texts.get(site) else new)


def edit_rarely(record: ProbeRecord, site: str | None, function: str | None, advice: str) -> CodeEdit | None:
    """An edit after which the statement at ``site`` runs in every :data:`EVERY`-th round of its loop only. It is advice if the
    line is not a call of ``function`` on its own, which may do other things too, or if no variable counts the loop."""
    if not site:
        return None
    text, counter = record.texts.get(site, ""), record.counters.get(site)
    tree, indent = _parsed(text.strip()), text[: len(text) - len(text.lstrip())]
    only = tree.body[0].value if tree is not None and isinstance(tree.body[0], ast.Expr) else None
    called = only.func if isinstance(only, ast.Call) else None
    alone = function is not None and function == getattr(called, "id", getattr(called, "attr", None))
    new = f"{indent}if {counter} % {EVERY} == 0:\n{indent}    {text.strip()}" if alone and counter else None
    return CodeEdit(site=site, advice=advice, replacement=new)


def with_arguments(text: str, function: str, given: dict[str, str]) -> str | None:
    """The line ``text`` with other arguments in its call of ``function``.

    ``given`` has Python source by the name of a keyword; the name ``""`` stands for the first positional argument. ``None`` if
    the line is no whole statement, calls ``function`` not exactly once, or hands over ``**`` arguments.
    """
    for name, value in given.items():
        indent = text[: len(text) - len(text.lstrip())]
        body = text.strip()
        call = _call(body, function)
        if call is None or any(keyword.arg is None for keyword in call.keywords):
            return None
        raw = body.encode()
        old = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
        if name == "":
            if len(call.args) != 1 or isinstance(call.args[0], ast.Starred):
                return None
            old = call.args[0]
        if old is not None:
            new = raw[: old.col_offset] + value.encode() + raw[old.end_col_offset :]
        else:
            end = (call.end_col_offset or 0) - 1
            head = raw[:end].rstrip()
            comma = b"" if head.endswith(b"(") else b" " if head.endswith(b",") else b", "
            new = head + comma + f"{name}={value}".encode() + raw[end:]
        text = indent + new.decode()
    return text


def under_no_grad(text: str) -> str | None:
    """The statement on the line ``text`` within ``torch.no_grad()``; ``None`` if the line is no whole simple statement."""
    body = text.strip()
    tree = _parsed(body)
    if tree is None or not isinstance(tree.body[0], ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
        return None
    indent = text[: len(text) - len(text.lstrip())]
    return f"{indent}with torch.no_grad():\n{indent}    {body}"


def detached(text: str, names: Sequence[str]) -> str | None:
    """The line ``text`` with ``.detach()`` after each of ``names`` that it adds to a variable or appends to a container, also
    within a dict, list or tuple; ``None`` if it does neither."""
    indent, raw = text[: len(text) - len(text.lstrip())], text.strip().encode()
    tree = _parsed(text.strip())
    statement = None if tree is None else tree.body[0]
    kept: list[ast.expr] = []
    if isinstance(statement, ast.AugAssign):
        kept = [statement.value]
    elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call) and len(call.args) == 1:
        first = call.args[0] if getattr(call.func, "attr", None) in ("append", "appendleft") else None
        kept = first.values if isinstance(first, ast.Dict) else getattr(first, "elts", [first] if first else [])
    ends = [node.end_col_offset or 0 for node in kept if isinstance(node, ast.Name) and node.id in names]
    for end in sorted(ends, reverse=True):
        raw = raw[:end] + b".detach()" + raw[end:]
    return indent + raw.decode() if ends else None


def _parsed(body: str) -> ast.Module | None:
    """The tree of one line, the head of a compound statement included."""
    for whole in (body, f"{body}\n    pass"):
        try:
            tree = ast.parse(whole)
        except (SyntaxError, ValueError):
            continue
        return tree if len(tree.body) == 1 else None
    return None


def _call(body: str, function: str) -> ast.Call | None:
    tree = _parsed(body)
    if tree is None:
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [call for call in calls if function == getattr(call.func, "id", getattr(call.func, "attr", None))]
    return found[0] if len(found) == 1 else None
