"""``trimtab env`` and ``trimtab list``."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import trimtab
from trimtab._internal.serialization import dumps, to_json
from trimtab.cli._lazy import lazy_import
from trimtab.cli._progress import waiting
from trimtab.errors import UsageError

INDENT = "  "
NARROWEST = 20
"""The least width of a description, in columns."""
_USES = {"infer": "inference", "train": "training"}
_MARKUP = re.compile(r"(?::[a-z]+:)?`+~?([^`]+)`+")
"""Markup in docstrings, which a terminal does not render."""

if TYPE_CHECKING:
    from trimtab.hardware.environment import Environment
    from trimtab.hardware.peaks import Peaks


def env_command(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure the peaks again.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """What this machine can do, and what is installed.

    The first time it measures peaks, which takes some seconds.

    \b
    Examples:
      trimtab env
      trimtab env --refresh --json
    """
    with waiting("looking at this machine, and measuring its peaks if they are not known yet"):
        environment = trimtab.Environment.capture()
        peaks = lazy_import("hardware.environment").measured_peaks(environment, refresh=refresh)
    if json:
        missing = {item.package: item.command for item in lazy_import("hardware.environment").OPTIONAL if not item.installed}
        typer.echo(
            dumps({"environment": environment, "fingerprint": environment.fingerprint, "peaks": peaks, "missing": missing})
        )
        return 0
    console = Console(highlight=False)
    console.print(_machine_table(environment))
    console.print(_peaks_table(peaks))
    for note in peaks.notes:
        console.print(f"note: {note}", markup=False, emoji=False)
    console.print(_packages_table(environment))
    return 0


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row of plain text: the name of a compiler may contain rich's markup."""
    table.add_row(*map(Text, cells))


def _machine_table(found: Environment) -> Table:
    table = _table("machine", "")
    quota = "" if found.cpu_quota is None else f", quota {found.cpu_quota:g}"
    _add(table, "cpu", f"{found.cpu} ({found.machine})")
    _add(
        table, "cores", f"{found.usable_cores} usable of {found.logical_cores} logical, {found.physical_cores} physical{quota}"
    )
    _add(table, "instruction sets", ", ".join(found.isa) or "none that matters")
    limit = "" if found.memory_limit_mb is None else f", limited to {found.memory_limit_mb / 1e3:.1f} GB"
    _add(table, "memory", f"{found.memory_mb / 1e3:.1f} GB{limit}")
    _add(table, "gpus", "; ".join(map(str, found.gpus)) or "none")
    _add(table, "system", f"{found.os}, Python {found.python}")
    _add(table, "c++ compiler", found.compiler or "none; torch.compile and AOTInductor need one (apt-get install g++)")
    _add(table, "fingerprint", found.fingerprint)
    return table


def _peaks_table(peaks: Peaks) -> Table:
    table = _table("measured peak", "", "")
    for rate in peaks.rates:
        where = (
            rate.device if rate.threads is None else f"{rate.device}, {rate.threads} thread{'s' if rate.threads > 1 else ''}"
        )
        value = f"{rate.value:.1f} {rate.unit}" if rate.value is not None else f"not measured: {rate.reason}"
        _add(table, rate.kind, where, value)
    return table


def _packages_table(found: Environment) -> Table:
    table = _table("package", "version", "what it would bring")
    for name, number in found.versions.items():
        _add(table, name, number, "")
    for item in lazy_import("hardware.environment").OPTIONAL:
        if not item.installed:
            _add(table, item.package, "not installed", f"{item.brings} {item.command}")
    return table


def list_command(
    kind: Annotated[Literal["passes", "backends", "checks"], typer.Argument(help="passes, backends or checks", metavar="KIND")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """What there is, and why one cannot run here.

    \b
    Examples:
      trimtab list backends
      trimtab list passes --json
    """
    with waiting(f"looking for {kind}"):
        home = {"passes": "core.technique", "backends": "core.backend", "checks": "core.check"}[kind]
        registry = getattr(lazy_import(home), kind.upper())
        with lazy_import("backends.common.process_lock").quiet(stream=False):  # some packages print on import
            rows = [_row(cls, lazy_import("core.technique")) for cls in registry.values()]
    for note in registry.broken.values():
        typer.echo(f"note: {note}", err=True)
    if json:
        typer.echo(dumps(rows))
        return 0
    if not rows:
        typer.echo(f"There are no {kind} yet.")
        return 0
    console = Console(highlight=False)
    for row in rows:
        _print_row(console, row)
    return 0


def _print_row(console: Console, row: dict[str, Any]) -> None:
    """Print a technique in a few lines; the columns of a table would be too narrow."""
    uses = f"{row['about']}s" if "about" in row else ", ".join(_USES[mode] for mode in row["modes"])
    head = [uses, *(["may lose accuracy"] if row["exact"] is False else [])]
    console.print(Text.assemble((row["name"], "bold"), f": {'; '.join(head)}"))
    fields = [f"{name}={'|'.join(map(str, values))}" for name, values in dict(row["fields"]).items()]
    for line in (row["summary"], ", ".join(fields), _availability(row)):
        if line:
            words = textwrap.fill(line, max(console.width, NARROWEST) - len(INDENT), break_on_hyphens=False)
            console.print(Text(textwrap.indent(words, INDENT)))


def _row(cls: Any, contracts: Any) -> dict[str, Any]:
    technique, package = cls(), contracts.missing_package(cls.requires)
    if package:
        why_not = f"{package} is not installed: {contracts.install_hint(package)}"
    else:
        why_not = contracts.broken_package(cls.requires) or technique.blocked_here()
    return {
        "name": cls.name,
        "summary": _MARKUP.sub(r"\1", (inspect.getdoc(cls) or "").splitlines()[0]),
        **({"about": cls.about} if hasattr(cls, "about") else {"modes": sorted(cls.modes)}),
        "exact": technique.exact,
        "fields": {name: [to_json(v) for v in values] for name, values in cls.choices().items()},
        "why_not": why_not,
        "not_here": {} if why_not else _not_here(technique),
    }


def _not_here(technique: Any) -> dict[str, str]:
    """Field values with which ``technique`` cannot run here, such as ``kernel=cudnn``, and why."""
    found = {}
    for name, values in technique.choices().items():
        for value in values:
            with contextlib.suppress(UsageError):  # an invalid combination of fields
                found[f"{name}={value}"] = dataclasses.replace(technique, **{name: value}).blocked_here()
    return {way: reason for way, reason in found.items() if reason is not None}


def _availability(row: dict[str, Any]) -> str:
    """Words that say whether a technique can run here; fields with one reason are listed together."""
    but = " ".join(dict.fromkeys(row["not_here"].values()))
    return row["why_not"] or (f"can run, but: {but}" if but else "can run")
