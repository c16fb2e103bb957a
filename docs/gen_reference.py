"""The reference: the command line, the Python API, the errors."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

import typer.main
from gen_markdown import default_of, field_docs, indented, markdown, table

import trimtab
from trimtab import errors, train
from trimtab.api import profile, tune
from trimtab.artifact import artifact
from trimtab.cli.main import app
from trimtab.core import diagnosis, evidence, measurement, script_settings
from trimtab.core.backend import BACKENDS
from trimtab.core.check import CHECKS
from trimtab.core.technique import PASSES
from trimtab.study import result
from trimtab.train.distributed import launch, tensor_parallel
from trimtab.train.optim import schedules
from trimtab.train.telemetry import events, summary


def cli_page() -> str:
    """Every command with its arguments and options."""
    root: Any = typer.main.get_command(app)
    out = ["# Command line", markdown(console(inspect.cleandoc(root.help or ""))), EXITS]
    with root.make_context("trimtab", [], resilient_parsing=True) as context:
        for name in root.list_commands(context):
            command = root.get_command(context, name)
            out += [f"## trimtab {name}", markdown(console(inspect.cleandoc(command.help or "")))]
            out.append(f"```text\ntrimtab {name} {' '.join(command.collect_usage_pieces(context))}\n```")
            out.append(table(["", "value", "default", "what it says"], [option(p) for p in command.params]))
    return "\n\n".join(out) + "\n"


EXITS = (
    "Exit codes: 0 done, 1 limits not met or not verified, 2 wrong use, 3 the workload itself fails, 70 a bug in trimtab, 130 "
    "interrupted. See [errors](errors.md). `trimtab --version` prints versions; `trimtab --install-completion` makes the shell "
    "complete commands and options."
)


def console(text: str) -> str:
    """The help of a command with its examples as code."""
    text = re.sub(r"^Examples?: *$", "", text.replace("\b\n", ""), flags=re.MULTILINE)
    return re.sub(r"^(?:Examples?: | *)(trimtab .+)$", r"- `\1`", text, flags=re.MULTILINE)


def option(parameter: Any) -> list[str]:
    """The row of one argument or option: how it is written, its value, its default, its help."""
    argument = parameter.param_type_name == "argument"
    spelling = parameter.name.upper() if argument else " ".join([*parameter.opts, *parameter.secondary_opts])
    default = (
        "*required*"
        if parameter.required
        else "-"
        if parameter.default is None or parameter.default is False
        else f"`{parameter.default}`"
    )
    shown = "flag" if getattr(parameter, "is_flag", False) else kind(parameter.type_descriptor.annotation)
    return [f"`{spelling}`", shown, default, markdown(parameter.help or "", flat=True)]


def kind(hint: Any) -> str:
    """What a value may be, for people."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    if args := [arg for arg in typing.get_args(hint) if arg is not type(None)]:
        return ", ".join(map(kind, args))
    return {"str": "text", "int": "number", "float": "number", "Path": "path"}.get(getattr(hint, "__name__", ""), str(hint))


def api_page() -> str:
    """Every public name, in the order of ``trimtab.__all__``, those of ``trimtab.train``, and what else people meet."""
    out = [
        "# Python API",
        "Imported as `from trimtab import NAME`, and `import trimtab` alone loads none of it. What only trainings need comes "
        "next, and is imported as `from trimtab.train import NAME`. At the end stands what these return, and what is imported "
        "from further modules, which are named there.",
    ]
    public = [(trimtab, name) for name in trimtab.__all__] + [(train, name) for name in train.__all__]
    for module, name in public + [(module, name) for module, names in FURTHER.items() for name in names]:
        value = getattr(module, name)
        out += [f"## {name}", f"*In `{module.__name__}`.*" if module in FURTHER else ""]
        if name in ("PASSES", "BACKENDS", "CHECKS"):
            out.append(registry(name))
        elif inspect.isclass(value):
            out += class_entry(name, value)
        else:
            out += [f"```text\n{name}{signature(value)}\n```", markdown(inspect.getdoc(value) or "")]
    return "\n\n".join(out) + "\n"


FURTHER: dict[ModuleType, tuple[str, ...]] = {
    result: ("Result", "Best", "Ladder"),
    tune: ("Tuned", "TrainingLadder"),
    artifact: ("Verification",),
    measurement: ("Comparison",),
    summary: ("Summary",),
    schedules: ("cosine", "linear", "one_cycle"),
    events: ("Progressed", "Validated", "Saved", "Adjusted", "Remarked", "Ended", "JsonLines", "TensorBoard"),
    launch: ("join",),
    tensor_parallel: ("mesh", "split_layers"),
    diagnosis: ("Diagnosis", "Score", "Together", "Patch", "Bound"),
    profile: ("Profile", "KeptTensor"),
    script_settings: ("ScriptSettings", "LoaderSettings", "CodeEdit"),
    evidence: (
        "ProbeRecord",
        "LineRecord",
        "LoaderRecord",
        "OptimizerRecord",
        "ModuleRecord",
        "CallRecord",
        "OperatorRecord",
        "RecompileRecord",
        "MemoryRecord",
        "DistributedRecord",
        "SpanRecord",
    ),
}


def registry(name: str) -> str:
    """What a registry holds."""
    known: dict[str, Any] = {"PASSES": PASSES, "BACKENDS": BACKENDS, "CHECKS": CHECKS}
    held = ", ".join(f"`{key}`" for key in known[name]) or "none yet"
    return f"A mapping from name to class, plug-ins of installed packages included. Here: {held}."


def class_entry(name: str, cls: type[Any]) -> list[str]:
    """A class: its docstring, its fields or values, and its public methods."""
    out = [markdown(inspect.getdoc(cls) or "")]
    said = field_docs(cls)
    if dataclasses.is_dataclass(cls) and dataclasses.fields(cls):
        rows = [
            [f"`{f.name}`", f"`{annotation(f.type)}`", default_of(f), markdown(said.get(f.name, ""), flat=True)]
            for f in dataclasses.fields(cls)
        ]
        out.append(table(["field", "type", "default", "what it says"], rows))
    members = [m for m in vars(cls) if not m.startswith("_")]
    for member in members:
        static = inspect.getattr_static(cls, member)
        if isinstance(static, property):
            out.append(f"**`{name}.{member}`** (property): {markdown(inspect.getdoc(static) or '')}")
        elif isinstance(static, (classmethod, staticmethod)) or inspect.isfunction(static):
            function = getattr(cls, member)
            out.append(f"**`{name}.{member}{signature(function)}`**\n\n{indented(markdown(inspect.getdoc(function) or ''))}")
    return out


def signature(function: Callable[..., Any]) -> str:
    """The signature as the source writes it, without the module names of annotations."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    kept = [p for p in found.parameters.values() if p.name != "self"]
    return str(found.replace(parameters=kept)).replace("'", "")


def annotation(hint: Any) -> str:
    """A type as the source writes it, fit for a cell of a table."""
    return (hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))).replace("|", "\\|")


def errors_page() -> str:
    """Every error that is raised on purpose: code, class, meaning, what to do, exit code."""
    rows = [
        [
            f"`{e.code}`",
            f"`{e.name}`" if e.name else "-",
            markdown(e.meaning, flat=True),
            markdown(e.remedy, flat=True),
            str(e.exit_code),
        ]
        for e in errors.table()
    ]
    return f"# Errors\n\n{ERRORS}\n\n{table(['code', 'class', 'what happened', 'what to do', 'exit code'], rows)}\n"


ERRORS = (
    "Every error that trimtab raises on purpose is a sentence: what happened, the value, the fix. The command line prints it "
    "as `error[code]: sentence` and ends with the exit code. In Python all of them are kinds of `TrimtabError`; the classes "
    "are in `trimtab.errors`."
)
