"""The documentation is true: it builds without a warning, its links lead somewhere, and what it shows is run.

How a block of code is meant stands in an HTML comment before it, which readers do not see:

- ``<!-- save -->``: Python, or any other text, that is written to the file that its title names.
- ``<!-- run -->``: commands that are run; ``<!-- run with: --trials 3 -->`` adds options that make them quick.
- ``<!-- do not run -->``: Python that is only parsed.
- ``<!-- include tests/plugin/suites.py -->``: no block, but a file of the repository, which has tests of its own.
- ``<!-- goes on from start.md -->``: the page is run behind another one, in its folder.
- ``<!-- said -->``: sentences of ours; each piece of them between dots stands in the source.

Python without a comment is run, all of a page in one program and in the order of the page; commands without one are parsed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import typer.main
from _pytest.mark import ParameterSet

import trimtab
from trimtab import errors
from trimtab.cli.main import app
from trimtab.core.backend import BACKENDS
from trimtab.core.technique import PASSES

ROOT = pathlib.Path(__file__).parent.parent
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "trimtab"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
PATH = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
FENCE = re.compile(r"(?:<!-- ([^\n]*?) -->\n+)?^```(\w+)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code on a page."""

    mark: str
    language: str
    title: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines after a prompt, those that end in a backslash joined with the next."""
        return re.findall(r"^\$ (.*)$", self.text.replace("\\\n", " "), re.MULTILINE)


def blocks(page: pathlib.Path) -> list[Block]:
    """The blocks of a page, in order."""
    found = []
    for mark, language, rest, text in FENCE.findall(page.read_text(encoding="utf-8")):
        title = re.search(r'title="([^"]+)"', rest)
        found.append(Block(mark, language, title[1] if title else "", text))
    return found


def name(page: pathlib.Path) -> str:
    """``start.md``, for the name of a test."""
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix()


# --- the site


class Html(HTMLParser):
    """The anchors of a page, where it links to, and what a browser would load with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect ids, links and resources."""
        found = {key: value or "" for key, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(found.get("href", ""))
        self.loads += [found["src"]] if tag in ("script", "img", "iframe", "source") and "src" in found else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The site, built as `make docs` builds it; a warning is an error."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def html(site: pathlib.Path) -> dict[str, Html]:
    """Every page of the site, parsed."""
    return {path.relative_to(site).as_posix(): Html(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_links_lead_somewhere(site: pathlib.Path, html: dict[str, Html]) -> None:
    broken = []
    for page, found in html.items():
        if page == "404.html":  # its links are written for the root of a server
            continue
        for link in found.links:
            address, anchor = urldefrag(unquote(link))
            if urlsplit(link).scheme:
                parts = urlsplit(link)
                broken += [] if parts.scheme == "https" and "." in parts.netloc else [f"{page}: {link}"]
                continue
            target = ((site / page).parent / address).resolve() if address else site / page
            target = target / "index.html" if target.is_dir() else target
            known = html.get(target.relative_to(site.resolve()).as_posix()) if target.is_relative_to(site.resolve()) else None
            if not target.is_file() or (anchor and known is not None and anchor not in known.anchors):
                broken.append(f"{page}: {link}")
    assert broken == []


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / f"{page}.md" for page in ("CHANGELOG", "CONTRIBUTING"))], ids=name)
def test_links_lead_to_files_of_the_repository(page: pathlib.Path) -> None:
    """So that the pages can be read without a build. The build leads those to source files to the pages made from them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [urldefrag(link)[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not urlsplit(link).scheme]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_pages_load_nothing_from_elsewhere(html: dict[str, Html]) -> None:
    assert {load for found in html.values() for load in found.loads if urlsplit(load).netloc} == set()


def test_every_technique_has_a_page_that_says_when_it_pays(html: dict[str, Html], site: pathlib.Path) -> None:
    for kind, registry in (("passes", PASSES), ("backends", BACKENDS)):
        for key, cls in registry.items():
            assert f"{kind}/{key}.html" in html
            text = re.sub(r"<[^>]+>", "", (site / kind / f"{key}.html").read_text(encoding="utf-8"))
            assert "When it cannot run" in text
            assert re.search(r"\b[Pp]ays?\b", cls.__doc__ or ""), f"the docstring of {key} does not say when it pays"
            assert "Source:" in (cls.__doc__ or "")


def test_reference_is_whole(html: dict[str, Html], site: pathlib.Path) -> None:
    text = {page: (site / f"reference/{page}.html").read_text(encoding="utf-8") for page in ("cli", "api", "errors")}
    assert {public.lower() for public in trimtab.__all__} <= html["reference/api.html"].anchors
    assert {"result", "tuned", "summary", "cosine", "jsonlines", "join"} <= html["reference/api.html"].anchors
    assert [row.code for row in errors.table() if f"<code>{row.code}</code>" not in text["errors"]] == []
    for command, options in command_line().items():
        assert f"trimtab-{command}" in html["reference/cli.html"].anchors
        assert [option for option in options if f"{option}" not in text["cli"]] == []


def command_line() -> dict[str, list[str]]:
    """The options of every command."""
    root = typer.main.get_command(app)
    with root.make_context("trimtab", [], resilient_parsing=True) as context:
        commands = {key: root.get_command(context, key) for key in root.list_commands(context)}  # type: ignore[attr-defined]
    return {key: [o for p in found.params if p.param_type_name == "option" for o in p.opts] for key, found in commands.items()}


# --- what the pages show


COMMANDS = [(name(page), line) for page in PAGES for b in blocks(page) if b.language == "console" for line in b.commands]


@pytest.mark.parametrize(("page", "line"), [c for c in COMMANDS if c[1].startswith("trimtab ")])
def test_commands_parse(page: str, line: str) -> None:
    root = typer.main.get_command(app)
    _, *arguments = shlex.split(line, comments=True)
    with root.make_context("trimtab", [], resilient_parsing=True) as context:
        key, command, rest = root.resolve_command(context, arguments)  # type: ignore[attr-defined]
        assert command is not None
        assert command.make_context(key, list(rest), parent=context).params is not None


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_nobody_is_sent_to_an_index_for_it(page: pathlib.Path) -> None:
    assert not re.search(r"pip install \S*trimtab", page.read_text(encoding="utf-8"))  # it is on none; ".[all]" is the clone's


def test_the_first_page_leads_to_every_other() -> None:
    links = set(re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert {name(page) for page in PAGES if page.is_relative_to(DOCS)} - {"index.md"} <= links


def program(page: pathlib.Path) -> Iterator[str]:
    """The page as one Python program, in the order of the page."""
    for block in blocks(page):
        if block.mark == "save":
            assert block.title, f"{page}: a block that is saved needs a title"
            yield f"pathlib.Path({block.title!r}).write_text({block.text!r}, encoding='utf-8')"
        elif block.language == "console" and block.mark.startswith("run"):
            options = block.mark.partition("with: ")[2]
            for line in block.commands:
                yield f"subprocess.run({f'{line} {options}'!r}, shell=True, check=True)"
        elif block.language == "python" and block.mark != "do not run":
            yield block.text


def runs() -> dict[str, list[str]]:
    """The programs to run: those of single pages, and of pages that go on from one another."""
    found: dict[str, list[str]] = {}
    later = {page: re.search(r"<!-- goes on from (\S+) -->", page.read_text(encoding="utf-8")) for page in PAGES}
    for page in sorted((page for page in PAGES if page.is_relative_to(DOCS)), key=lambda page: later[page] is not None):
        first = later[page]
        if lines := list(program(page)):
            found.setdefault(first[1] if first else name(page), []).extend(lines)
    return found


def marked(page: str, lines: list[str]) -> ParameterSet:
    """The parameters of a page, marked as slow where a study is run."""
    return pytest.param(page, lines, marks=[pytest.mark.slow] if any("trimtab optimize" in line for line in lines) else [])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "lines"), [marked(*item) for item in runs().items()], ids=runs())
def test_what_a_page_shows_is_run(page: str, lines: list[str], tmp_path: pathlib.Path) -> None:
    # what stands under the guard of a script takes minutes
    script = "\n".join(["import pathlib", "import subprocess", "__name__ = 'page'", *lines])
    (tmp_path / "page.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "PATH": PATH, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_that_is_not_run_parses(page: pathlib.Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            assert ast.parse(textwrap.dedent(block.text)) is not None


def test_recipes_on_the_generated_pages_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of passes and backends show recipes, or settings of trainings, which can be made and are carried out."""
    monkeypatch.syspath_prepend(DOCS)
    shown = "\n".join(importlib.import_module("gen_pages").pages().values())
    python = [text for _, language, _, text in FENCE.findall(shown) if language == "python"]
    recipes = [text for text in python if "Recipe(" in text]
    settings = [text for text in python if "Settings(" in text]
    inference = [name for name, cls in PASSES.items() if "infer" in cls.modes]
    assert len(recipes) == len(inference) + len(BACKENDS)
    assert len(settings) == len(PASSES) - len(inference)
    scope: dict[str, Any] = {}
    for text in recipes:
        exec(compile(text, "page", "exec"), scope)  # noqa: S102 - what our own pages show
        assert all(step.sets <= scope["recipe"].backend.honours for step in scope["recipe"].passes)
    for text in settings:
        exec(compile(text, "page", "exec"), scope)  # noqa: S102 - what our own pages show
        assert scope["settings"] != trimtab.Settings()


def test_the_run_that_is_shown_was_a_real_one() -> None:
    """What the README and the page about results show are lines of what ``make cast`` has written."""
    cast = (DOCS / "cast.txt").read_text(encoding="utf-8").splitlines()
    for page in (ROOT / "README.md", DOCS / "report.md"):
        shown = next(block.text for block in blocks(page) if "\nas_written " in block.text)
        lines = [line for line in shown.splitlines() if line and line != "..." and not line.startswith("$ ")]
        assert len(lines) >= 6
        assert [line for line in lines if line not in cast] == []


MODELS = {
    "ResNet-50": "resnet50",
    "MobileNetV2": "mobilenet",
    "BERT-base": "bert",
    "MiniLM": "minilm",
    "LSTM, 2 x 256": "lstm",
    "digits CNN": "digits",
}


def test_tables_of_figures_are_those_that_a_benchmark_wrote() -> None:
    """Each table of the README is that of the results named above it: times, ratios and their intervals."""
    rows, found = 0, {}
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if named := re.search(r"`(benchmarks/results/\w+\.json)`", line):
            measured = json.loads((ROOT / named[1]).read_text(encoding="utf-8"))["rows"]
            found = {(row["model"], str(row["batch"])): row for row in measured}
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or cells[0] not in MODELS:
            continue
        rows += 1
        row = found[MODELS[cells[0]], cells[1]]
        written, hand = row["against_written"], row["against_hand"]["ratio"]
        number, unit = cells[2].split()
        ms = float(number) * {"ms": 1, "s": 1000}[unit]
        assert ms == pytest.approx(written["rival"]["median"], rel=0.005), line
        assert numbers(cells[3]) == [f"{written['ratio'][name]:.1f}" for name in ("value", "low", "high")], line
        assert numbers(cells[4]) == [f"{hand[name]:.2f}" for name in ("value", "low", "high")], line
        assert ("noisy" in line) == (written["foreign"] > 0.2), line
    assert rows >= len(MODELS)


def numbers(text: str) -> list[str]:
    """The numbers in a cell, as they are written."""
    return re.findall(r"\d+\.\d+", text)


def source_texts() -> str:
    """All texts of the source in one string, what is filled in left out."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(inspect.cleandoc(node.value))
    return "\n".join(found)


def test_sentences_that_are_quoted_are_ours() -> None:
    texts = source_texts()
    said = [line for page in PAGES for b in blocks(page) if b.mark == "said" for line in b.text.splitlines() if line]
    assert said
    pieces = [piece.strip() for line in said for piece in line.split("...") if piece.strip()]
    assert [piece for piece in pieces if piece not in texts] == []
