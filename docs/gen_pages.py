"""Pages made from the code: one per pass, backend and check, the command line, the Python API, the errors. A hook of mkdocs.

What such a page says is what the code says: its docstrings, the strings under its fields, and the sentences that its
``why_not_here`` and ``why_not`` can answer. Nothing is written here that could grow old.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import sys
import typing
from collections.abc import Mapping
from typing import Any

from gen_markdown import bullets, default_of, field_docs, markdown, names, table, yes
from gen_reasons import sentences
from gen_reference import api_page, cli_page, errors_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from trimtab.core import search_space
from trimtab.core.backend import BACKENDS, Backend
from trimtab.core.check import CHECKS, Check
from trimtab.core.settings import Settings
from trimtab.core.technique import PASSES, Pass, Technique, install_hint

ROOT = pathlib.Path(__file__).parent.parent
KINDS: dict[str, Mapping[str, Any]] = {"passes": PASSES, "backends": BACKENDS, "checks": CHECKS}
TITLES = {"passes": "Passes", "backends": "Backends", "checks": "Checks"}
INTRODUCTIONS = {
    "passes": "A pass is one technique that rewrites the model, or says how to run it. Each of these pages is made from the "
    "file of its pass.",
    "backends": "A backend is one runtime that compiles and runs the model. Each of these pages is made from the file of its "
    "backend.",
    "checks": "A check reports what is slow or wrong in a script or a model, with its evidence and a remedy. Each of "
    "these pages is made from the file of its check. See [what the checks do not look for](../doctor-checks.md).",
}
COSTS = {"seconds": "some seconds", "minute": "about a minute", "minutes": "several minutes"}
"""In words, what a compilation of a small model takes."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the pages of the passes and backends where the navigation says ``passes/*``."""
    assert config.nav is not None
    for entry in config.nav:
        for title, place in entry.items():
            if isinstance(place, str) and place.endswith("/*"):
                kind = place.removesuffix("/*")
                entry[title] = [f"{kind}/index.md", *(f"{kind}/{name}.md" for name in KINDS[kind])]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show a file of the repository where a page says ``<!-- include PATH -->``, and a picture, once it was taken. Links to
    source files lead to the pages that are made from them."""

    def code(found: re.Match[str]) -> str:
        return f'```python title="{found[1]}"\n{(ROOT / found[1]).read_text(encoding="utf-8")}```'

    def picture(found: re.Match[str]) -> str:
        return f"![{found[2]}]({found[1]})" if (ROOT / "docs" / found[1]).exists() else ""

    markdown = re.sub(r"\[([^\]\n]+)\]\(\.\./src/trimtab/([\w/]+)(?:\.py)?\)", _generated, markdown)
    return re.sub(r"<!-- picture (\S+): ([^\n]+) -->", picture, re.sub(r"<!-- include (\S+) -->", code, markdown))


def _generated(link: re.Match[str]) -> str:
    """``link`` to a source file as one to the generated page: of a technique, of all of a kind, or the entry in the API."""
    text, path = link[1], link[2]
    kind, _, name = path.partition("/")
    if kind in KINDS:
        return f"[{text}]({kind}/{name or 'index'}.md)"
    return f"[{text}](reference/api.md#{text.strip('`').lower()})"


def pages() -> dict[str, str]:
    """Path -> Markdown of every generated page."""
    found = {f"{kind}/{name}.md": technique_page(cls) for kind, known in KINDS.items() for name, cls in known.items()}
    found |= {f"{kind}/index.md": overview(kind) for kind in KINDS}
    found["reference/cli.md"] = cli_page()
    found["reference/api.md"] = api_page()
    found["reference/errors.md"] = errors_page()
    for name in ("CHANGELOG", "CONTRIBUTING"):
        found[f"{name.lower()}.md"] = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    return found


def overview(kind: str) -> str:
    """The table of all passes, of all backends, or of all checks."""
    if kind == "checks":
        about = [[f"[`{name}`]({name}.md)", f"{cls.about}s", summary(cls)] for name, cls in CHECKS.items()]
        return f"# {TITLES[kind]}\n\n{INTRODUCTIONS[kind]}\n\n{table(['name', 'of', 'what it finds'], about)}\n"
    rows = [
        [f"[`{name}`]({name}.md)", *(summary(cls), yes(cls().exact), ", ".join(cls.requires) or "-")]
        for name, cls in KINDS[kind].items()
    ]
    head = ["name", "what it does", "exact by default", "needs the packages"]
    return f"# {TITLES[kind]}\n\n{INTRODUCTIONS[kind]}\n\n{table(head, rows)}\n\n{EXACT}\n"


EXACT = (
    "*Exact* ones must give the original's outputs within floating-point noise, and are held to that. The others are judged by "
    "the workload's accuracy limit. See [how trimtab measures](../measuring.md#accuracy)."
)


def technique_page(cls: type[Technique]) -> str:
    """Everything that the code of one pass or backend says about it."""
    _, body, source = parts(cls)
    fields = field_rows(cls)
    if issubclass(cls, Check):
        said = [[row[0], row[1], row[3]] for row in fields]
        looks = ["## What it looks at", markdown(inspect.getdoc(cls.run) or "")]
        limits = ["## Thresholds", table(["field", "default", "what it says"], said)] if said else []
        out = [f"# {cls.name}", summary(cls), markdown(body), *looks, *limits, "## Source", markdown(source)]
        return "\n\n".join([*out, f"Its code: `{code_of(cls)}`."]) + "\n"
    out = [f"# {cls.name}", summary(cls), "## What it does, and when it pays", markdown(body) if body else "", facts(cls)]
    if fields:
        out += ["## Fields", table(["field", "default", "a search tries", "what it says"], fields)]
    out += ["## When it cannot run", bullets(reasons(cls))]
    out += ["## In a recipe" if "infer" in cls.modes else "## In settings", f"```python\n{example(cls)}\n```"]
    out += ["## Source", markdown(source) or "None is named.", f"Its code: `{code_of(cls)}`."]
    return "\n\n".join(part for part in out if part) + "\n"


def parts(cls: type[Any]) -> tuple[str, str, str]:
    """The docstring as its first sentence, the rest, and the source that it names."""
    text = inspect.getdoc(cls) or ""
    body, _, source = text.partition("Source:")
    paragraph, _, rest = body.partition("\n\n")
    return " ".join(paragraph.split()), rest.strip(), " ".join(source.split())


def summary(cls: type[Any]) -> str:
    """The first paragraph of the docstring."""
    return markdown(parts(cls)[0])


def facts(cls: type[Technique]) -> str:
    """What the class attributes say, as a table."""
    technique = cls()
    rows = [
        ["exact", exactness(cls)],
        ["used for", ", ".join(sorted(cls.modes)).replace("infer", "inference").replace("train", "training")],
    ]
    hints = [f"`{package}` (`{install_hint(package)}`)" for package in cls.requires]
    rows.append(["packages", "; ".join(hints) or "none beyond trimtab's own"])
    rows.append(["data", ", ".join(sorted(needed(cls))) or "none"])
    if isinstance(technique, Pass):
        takers = [f"[`{name}`](../backends/{name}.md)" for name in BACKENDS if cls.sets <= BACKENDS[name].honours]  # type: ignore[attr-defined]
        rows.append(["settings that it changes", names(cls.sets) or "none: it rewrites the model"])  # type: ignore[attr-defined]
        rows.append(["backends that carry it out", ", ".join(takers) or "none: the Trainer does"])
    if isinstance(technique, Backend):
        givers = [f"[`{name}`](../passes/{name}.md)" for name in PASSES if PASSES[name].sets <= technique.honours]
        rows.append(["settings that it carries out", names(technique.honours)])
        rows.append(["passes that it takes", ", ".join(givers)])
        rows.append(["has a graph and kernels of its own", yes(technique.own_graph)])
        rows.append(["compiling a small model takes", COSTS[technique.cost]])
        rows.append(["its files are machine code", "yes: they load with `trust=True` only" if technique.native_code else "no"])
        rows.append(["running its files needs", ", ".join(f"`{name}`" for name in technique.packages)])
    return table(["in short", ""], rows)


def exactness(cls: type[Technique]) -> str:
    """Which values of the fields make it exact."""
    default, others = cls(), search_space.variants(cls())
    if all(other.exact == default.exact for other in others):
        return yes(default.exact)
    inexact = [one for one in (default, *others) if not one.exact]
    return "yes, but for " + ", ".join(f"`{one}`" for one in inexact)


def needed(cls: type[Technique]) -> dict[str, None]:
    """The data that it needs in any of its forms."""
    return {
        f"{data} (for `{one}`)" if not cls().needs else data: None
        for one in (cls(), *search_space.variants(cls()))
        for data in one.needs
    }


def field_rows(cls: type[Any]) -> list[list[str]]:
    """Name, default, values that a search tries, and the string under each field of a dataclass."""
    said, choices = field_docs(cls), cls.choices() if issubclass(cls, Technique) else {}
    rows = []
    for field in dataclasses.fields(cls):
        tried = ", ".join(f"`{value}`" for value in choices.get(field.name, ()))
        rows.append([f"`{field.name}`", default_of(field), tried or "-", markdown(said.get(field.name, ""), flat=True)])
    return rows


def example(cls: type[Technique]) -> str:
    """Python that puts it into a recipe."""
    if issubclass(cls, Backend):
        made = f'Recipe(backend=BACKENDS["{cls.name}"]())'
        return f"from trimtab import BACKENDS, Recipe\n\nrecipe = {made}"
    if "infer" not in cls.modes:
        name = min(typing.cast(Any, cls).sets, key=len)  # the others say how it is done
        group, _, field = name.rpartition(".")
        kind = type(getattr(Settings(), group)) if group else Settings
        value = '"auto"' if "auto" in str(typing.get_type_hints(kind)[field]) else "True"
        if not group:
            return f"from trimtab import Settings\n\nsettings = Settings({name}={value})"
        made = f"settings = Settings({group}={kind.__name__}({field}={value}))"
        return f"from trimtab import {kind.__name__}, Settings\n\n{made}"
    backend = next(name for name in ("eager", *BACKENDS) if typing.cast(Any, cls).sets <= BACKENDS[name].honours)
    made = f'Recipe(passes=(PASSES["{cls.name}"](),), backend=BACKENDS["{backend}"]())'
    return f"from trimtab import BACKENDS, PASSES, Recipe\n\nrecipe = {made}"


def code_of(cls: type[Any]) -> str:
    """The file of a class, from the root of the repository."""
    return pathlib.Path(inspect.getsourcefile(cls) or "").relative_to(ROOT).as_posix()


def reasons(cls: type[Technique]) -> list[str]:
    """The sentences that can be given against it, its packages and its data first."""
    found = [f"{package} is not installed: `{install_hint(package)}`." for package in cls.requires]
    if needed(cls):
        found.append("The workload has no data to take calibration inputs from.")
    if isinstance(cls(), Pass) and typing.cast(Any, cls).sets and "infer" in cls.modes:
        found.append(f"The backend does not carry out {names(typing.cast(Any, cls).sets)}.")
    found += dict.fromkeys(markdown(text) for asked in (cls.why_not_here, cls.why_not) for text in sentences(asked, cls))
    return found or ["Nothing speaks against it beforehand. What only trying can tell ends as a failed trial, with its reason."]


if __name__ == "__main__":
    print(pages()[sys.argv[1]])
