"""The page at ``/`` in a real browser: the card, the form, live figures, themes, narrow screens and accessibility."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from _serving import Server, write

from trimtab.artifact.artifact import load
from trimtab.core.measurement import Interval

ROWS = np.random.default_rng(0).normal(size=(2, 16)).astype("f4")
Open = Callable[..., Any]
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An artifact with evidence and an awkward name."""
    evidence = {"baseline_speedup": Interval(1.2, 1.1, 1.3), "score": 0.97, "baseline_score": 0.98, "peak_mb": 40.0}
    return write(tmp_path_factory.mktemp("page") / "artifact", evidence=evidence).path


@pytest.fixture(scope="module")
def server(proven: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(log, f"a.net-1={proven}", "--instances", "1", "--threads", "1", "--batch", "8") as running:
        yield running


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[Open]:
    """Opens the page; afterwards, only the server may have been asked for anything, and no error may have shown."""
    complaints, contexts = list[str](), list[Any]()
    home = f"http://127.0.0.1:{server.port}/"

    def go(*, width: int = 1280, scheme: str = "light", refused: bool = False) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: None if refused and "400" in message.text else complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith((home, "data:")) else complaints.append(request.url))
        page.goto(home)
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []


def test_the_form_computes_what_the_artifact_computes(open_page: Open, proven: pathlib.Path) -> None:
    page = open_page()
    page.get_by_label("Shape").fill("2, 16")
    page.get_by_label("Values").fill(str(ROWS.tolist()))
    page.get_by_role("button", name="Compute").click()
    page.locator(".answer table").wait_for()
    heads = page.locator(".answer th").all_inner_texts()
    cells = page.locator(".answer td").all_inner_texts()
    assert heads == ["logits: FP32[2, 4]", "class: INT64[2]"]
    want = load(proven)(torch.from_numpy(ROWS))
    np.testing.assert_allclose(np.array(cells[0].split(), "f4").reshape(2, 4), want["logits"].numpy(), rtol=1e-4)
    assert cells[1].split() == [str(value) for value in want["class"].tolist()]
    assert f"by version {1}" in page.locator(".answer p").inner_text()
    page.get_by_text("The same with curl").click()
    assert re.match(r"curl http://127.0.0.1:\d+/v2/models/a.net-1/infer -d '\{", page.locator(".curl").inner_text())


def test_the_example_is_filled_in_and_few_values_are_repeated(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("button", name="Compute").click()
    page.locator(".answer table").wait_for()
    page.get_by_label("Shape").fill("30 16")
    page.get_by_label("Values").fill("1, 2")
    page.get_by_role("button", name="Compute").click()
    page.get_by_text("logits: FP32[30, 4]").wait_for()
    rows = page.locator(".answer td").first.inner_text().splitlines()
    assert (len(rows), len(set(rows)), rows[-1]) == (21, 2, "...")


def test_what_does_not_fit_is_told(open_page: Open) -> None:
    page = open_page(refused=True)
    for shape, values, sentence in (
        ("1, 15", "1", "400: Input 'x' has the shape [1, 15]; the model takes x: FP32[batch, 16]."),
        ("1, 16", "[1, oops]", "The values are no list of numbers"),
    ):
        page.get_by_label("Shape").fill(shape)
        page.get_by_label("Values").fill(values)
        page.get_by_role("button", name="Compute").click()
        page.get_by_text(sentence).wait_for()
        assert page.locator(".answer.bad").count() == 1


def test_figures_are_live(open_page: Open, server: Server) -> None:
    page = open_page()
    page.wait_for_function("document.querySelector('.total').textContent !== '-'")
    before = page.locator(".total").inner_text()
    for _ in range(20):
        assert server.infer(ROWS.tolist(), model="a.net-1")[0] == 200
    page.wait_for_function("(before) => document.querySelector('.total').textContent !== before", arg=before)
    page.wait_for_function("parseFloat(document.querySelector('.rate').textContent) > 0")
    for name in ("latency", "queue", "compute"):
        assert re.fullmatch(r"[\d.,]+ ms", page.locator(f".tiles .{name}").inner_text())
    assert len(page.locator(".rate-line polyline").get_attribute("points").split()) >= 2


def test_the_card_tells_verdict_ladder_limits_and_signature(open_page: Open) -> None:
    shown = open_page().locator("main").inner_text()
    for words in (
        "2 times as fast as the model as written (95% interval 1.9 to 2.1). Score 0.97, that of the model as written 0.98.",
        "the original, as exported with this artifact\t1.2 (95% interval 1.1 to 1.3)",
        "this artifact\t2 (95% interval 1.9 to 2.1)",
        "max_drop 0.01",
        "x: FP32[batch, 16]",
        "class: INT64[batch]",
        "1 x 1 thread, batches of up to 8 rows",
    ):
        assert words in shown, shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_nothing_overflows_and_everything_can_be_read(open_page: Open, scheme: str, width: int) -> None:
    page = open_page(width=width, scheme=scheme)
    page.get_by_role("button", name="Compute").click()
    page.locator(".answer table").wait_for()
    page.get_by_text("The same with curl").click()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    if (spec := importlib.util.find_spec("axe_playwright_python")) is None or spec.origin is None:
        pytest.skip("axe-playwright-python is not installed: pip install 'trimtab[dev]'")
    page.evaluate((pathlib.Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})")
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []


def test_the_script_of_the_documentation_takes_a_picture(
    browser: Any, server: Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("screenshots", ROOT / "docs" / "screenshots.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "IMAGES", tmp_path)
    monkeypatch.setattr(script, "LOAD_S", 0.2)
    picture = script.shoot_server(browser, f"http://127.0.0.1:{server.port}/", "serving-phone")
    assert picture.read_bytes().startswith(b"\x89PNG")
