"""The report in a real browser: charts, table, dialog, theme, narrow screens, print, accessibility, and no network at all."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from _studies import broken, explanation, recipes, record, with_logs
from trimtab.report import write
from trimtab.study.record import Record
from trimtab.study.samplers.ladder import as_written

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'trimtab[dev]'")

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium-headless-shell")

BOTH_THEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        as_root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=as_root)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a report from the disk; afterwards, nothing may have been asked of a network and no error may have shown."""
    complaints: list[str] = []
    contexts = []

    def go(path: pathlib.Path, *, width: int = 1280, scheme: str = "light", **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The report of an ordinary study."""
    found = record(24, failed=2)
    return write(with_logs(found, tmp_path_factory.mktemp("run"), {23: "the last words of the broken trial"}))


def made(found: Record, folder: pathlib.Path) -> pathlib.Path:
    return write(with_logs(found, folder))


def shown(page: Any) -> list[int]:
    """The rows that are to be seen, in their order."""
    return page.eval_on_selector_all("#trials-table tbody tr:not([hidden])", "rows => rows.map(row => Number(row.dataset.row))")


def column(page: Any, name: str) -> list[str]:
    """The keys of a column as they stand."""
    script = """(name) => {
      const headings = [...document.querySelectorAll("#trials-table thead th")];
      const place = headings.findIndex(each => each.textContent.trim() === name);
      return [...document.querySelectorAll("#trials-table tbody tr:not([hidden])")].map(row => row.cells[place].dataset.key);
    }"""
    return page.evaluate(script, name)


@BOTH_THEMES
def test_charts_are_drawn_in_the_colours_of_the_theme(report: pathlib.Path, open_page: Open, scheme: str) -> None:
    page = open_page(report, scheme=scheme)
    assert page.locator("#chart-ladder .bars .point > path").count() == 4
    assert page.locator("#chart-ladder .annotation-text").all_text_contents()[-1] == "3.91x (3.80 to 4.03)"
    assert page.locator("#chart-pareto .scatterlayer .points path").count() >= 22
    assert "limit 2.00%" in page.locator("#chart-pareto .annotation-text").all_text_contents()
    assert page.locator("#chart-roofline .scatterlayer .lines path").count() == 2
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(19, 22, 26)")
    drawn = page.evaluate("getComputedStyle(document.querySelector('#chart-ladder .main-svg')).backgroundColor")
    assert drawn == paper


def test_the_button_changes_the_theme_and_the_charts_with_it(report: pathlib.Path, open_page: Open) -> None:
    page = open_page(report)
    before = page.evaluate("getComputedStyle(document.querySelector('#chart-ladder .main-svg')).backgroundColor")
    page.get_by_role("button", name="Dark", exact=True).click()
    after = page.evaluate("getComputedStyle(document.querySelector('#chart-ladder .main-svg')).backgroundColor")
    assert (before, after) == ("rgb(255, 255, 255)", "rgb(19, 22, 26)")
    page.get_by_role("button", name="Light", exact=True).click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_the_table_sorts_by_keyboard_and_what_is_unknown_stays_last(report: pathlib.Path, open_page: Open) -> None:
    page = open_page(report)
    heading = page.locator("#trials-table thead th", has_text="speed-up")
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    keys = column(page, "speed-up")
    assert heading.get_attribute("aria-sort") == "descending"
    assert keys[-2:] == ["", ""]
    assert [float(key) for key in keys[:-2]] == sorted(map(float, keys[:-2]), reverse=True)
    page.keyboard.press("Enter")
    keys = column(page, "speed-up")
    assert heading.get_attribute("aria-sort") == "ascending"
    assert keys[-2:] == ["", ""]
    assert [float(key) for key in keys[:-2]] == sorted(map(float, keys[:-2]))
    page.locator("#trials-table thead th", has_text="recipe").locator("button").click()
    names = page.locator("#trials-table tbody th button").all_text_contents()
    assert names == sorted(names)
    assert page.locator("#trials-table thead th[aria-sort]").count() == 1


def test_the_table_filters(report: pathlib.Path, open_page: Open) -> None:
    page = open_page(report)
    assert len(shown(page)) == 24
    page.get_by_label("Runtime").select_option("torchscript")
    torchscript = len(shown(page))
    assert 0 < torchscript < 24
    assert page.locator("#shown").text_content() == f"{torchscript} of 24 trials are shown."
    page.get_by_role("button", name="Show all").click()
    sync_api.expect(page.locator("#shown")).to_have_text("All 24 trials are shown.")  # which needs no eval
    page.get_by_label("Search").fill("int8 no kernel")
    assert 0 < len(shown(page)) <= 2
    page.get_by_label("Search").fill("")
    page.get_by_label("State").select_option("FAILED")
    assert len(shown(page)) == 2
    page.get_by_label("within the limits only").check()
    assert shown(page) == []


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("width", [1280, 1920])
def test_a_desktop_shows_why_the_others_lost_without_scrolling(
    labels: bool, width: int, tmp_path: pathlib.Path, open_page: Open
) -> None:
    page = open_page(made(record(24, failed=2, labels=labels), tmp_path), width=width)
    right = "each => each.getBoundingClientRect().right"
    reason = page.locator("#trials-table thead th", has_text="reason")
    assert reason.evaluate(right) <= page.locator(".scroll", has=page.locator("#trials-table")).evaluate(right)
    assert all(float(key) > 0 for key in column(page, "took"))  # what is minor stands behind it, below its headings


def test_a_trial_opens_by_keyboard_shows_its_log_and_gives_the_focus_back(report: pathlib.Path, open_page: Open) -> None:
    page = open_page(report)
    button = page.locator("#trials-table tbody tr[data-state=FAILED] button").last
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    assert dialog.is_visible()
    text = dialog.inner_text()
    assert "the last words of the broken trial" in text
    assert "RuntimeError: no kernel" in text
    assert "onnxruntime has no kernel for this operator." in text
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert button.evaluate("each => each === document.activeElement")


def test_a_log_that_is_empty_is_not_said_to_be_missing(tmp_path: pathlib.Path, open_page: Open) -> None:
    found = record(4, failed=0)
    trials = tuple(dataclasses.replace(each, log=None) if each.number == 1 else each for each in found.trials)
    with_logs(found, tmp_path, {0: "\n"})
    dataclasses.replace(found, trials=trials).write(tmp_path)
    page = open_page(write(tmp_path))
    said = {0: f"Its log is empty: {found.trials[0].log}", 1: "No log of it lies in the run folder.", 2: "trial 2 says hello"}
    for number, words in said.items():
        place = f'#trials-table tbody tr:has(td[data-key="{number}"]:first-child) button'
        page.locator(place).click()
        assert words in page.get_by_role("dialog").inner_text()
        page.keyboard.press("Escape")


def test_a_point_of_the_front_tells_on_hover_and_opens_on_click(report: pathlib.Path, open_page: Open) -> None:
    page = open_page(report)
    chart = page.locator("#chart-pareto")
    chart.scroll_into_view_if_needed()
    where = chart.locator(".scatterlayer .trace .points path").first.bounding_box()
    page.mouse.move(where["x"] + where["width"] / 2, where["y"] + where["height"] / 2)
    page.wait_for_selector("#chart-pareto .hoverlayer .hovertext")
    told = page.locator("#chart-pareto .hoverlayer .hovertext").first.text_content()
    assert "drop" in told
    assert " to " in told
    page.mouse.click(where["x"] + where["width"] / 2, where["y"] + where["height"] / 2)
    page.wait_for_selector("dialog[open]")
    assert "says hello" in page.get_by_role("dialog").inner_text()


def test_operators_of_next_to_no_time_fit_a_phone(tmp_path: pathlib.Path, open_page: Open) -> None:
    shares = [("aten::mm", 1, 200.0), ("aten::_transformer_encoder_layer_fwd", 1, 0.07), ("aten::view", 1, 0.0002)]
    found = record(4)
    of_all = {name: explanation(as_written(), shares, ms=200.0) for name in found.explanations}
    page = open_page(made(dataclasses.replace(found, explanations=of_all), tmp_path), width=360)
    assert "below 0.1%" in page.locator(".ops").first.inner_text()
    assert "below 0.001 ms" in page.locator(".ops").first.inner_text().replace("\n", " ")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    wider = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent)"
    assert page.eval_on_selector_all(".ops td", wider) == []


@BOTH_THEMES
def test_steps_the_best_and_how_to_use_it_are_readable_on_a_phone(report: pathlib.Path, open_page: Open, scheme: str) -> None:
    page = open_page(report, width=360, scheme=scheme)
    cut = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent)"
    assert page.eval_on_selector_all(".asked, .use pre, .steps, .steps td, .beside, .beside td", cut) == []
    names = page.eval_on_selector_all(
        ".steps tr:nth-child(2) td", "all => all.map(e => getComputedStyle(e, '::before').content)"
    )
    assert "interval" in names[1]
    assert "gain" in names[2]
    ink, paper = (
        page.evaluate(f"getComputedStyle(document.querySelector('.use pre')).{each}") for each in ("color", "backgroundColor")
    )
    light = ("rgb(22, 25, 29)", "rgb(244, 246, 248)")
    assert (ink, paper) == (light if scheme == "light" else ("rgb(236, 239, 242)", "rgb(28, 33, 38)"))


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
def test_a_phone_never_scrolls_sideways(labels: bool, tmp_path: pathlib.Path, open_page: Open) -> None:
    found = dataclasses.replace(record(24, labels=labels), workload="a" * 90, sentence="word " * 40 + "x" * 300)
    page = open_page(made(found, tmp_path), width=360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert all(width <= 360 for width in page.eval_on_selector_all(".main-svg", "all => all.map(each => each.clientWidth)"))
    page.locator("#trials-table tbody button").first.click()
    box = page.get_by_role("dialog").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_axe_finds_nothing(report: pathlib.Path, open_page: Open, scheme: str, width: int) -> None:
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-playwright-python is not installed: pip install 'trimtab[dev]'")
    page = open_page(report, scheme=scheme, width=width)
    page.evaluate((pathlib.Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    page.locator("summary").first.click()

    def violations() -> list[str]:
        found = page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})")
        return [f"{each['id']}: {node['html'][:200]}" for each in found["violations"] for node in each["nodes"]]

    assert violations() == []
    page.locator("#trials-table tbody button").first.click()
    assert violations() == []


def test_hostile_text_stays_text(tmp_path: pathlib.Path, open_page: Open) -> None:
    attack = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>"
    found = record(8)
    worst = broken(7, recipes(8)[7], attack, traceback=attack)
    found = dataclasses.replace(
        found,
        workload=attack,
        sentence=attack,
        command=attack,
        notes=(attack,),
        trials=(*found.trials[:7], dataclasses.replace(worst, notes=(attack,))),
        files={attack: attack},
        environment=dataclasses.replace(found.environment, cpu=attack, versions={attack: attack}),
        prepared=dataclasses.replace(found.prepared, inputs=attack, splits={attack: 3}),
    )
    folder = with_logs(found, tmp_path, {7: attack})
    page = open_page(write(folder))
    assert attack in page.locator("h1").text_content()
    page.locator("#trials-table tbody tr[data-state=FAILED] button").click()
    dialog = page.get_by_role("dialog").text_content()
    assert dialog.count(attack) >= 4  # reason, notes, traceback, log
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0


def test_the_policy_refuses_scripts_and_the_network(report: pathlib.Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    page.evaluate(
        """async () => {
          window.refused = [];
          document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "window.pwned = 1";
          document.body.append(script);
          new Image().src = "http://127.0.0.1:9/image";
          await fetch("http://127.0.0.1:9/fetch").catch(() => null);
          await new Promise((resolve) => setTimeout(resolve, 50));
        }"""
    )
    assert page.evaluate("window.pwned") is None
    assert {"script-src-elem", "img-src", "connect-src"} <= set(page.evaluate("window.refused"))
    page.close()


def test_it_prints_light_whole_and_without_controls(report: pathlib.Path, open_page: Open) -> None:
    page = open_page(report, scheme="dark")
    pdf = page.pdf(prefer_css_page_size=True, print_background=True)
    assert pdf.startswith(b"%PDF")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 695, "height": 1000})  # what an A4 page is wide between its margins
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 695
    steps = page.locator("details > :not(summary)").first
    assert steps.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not steps.is_visible()
    assert not page.locator("#controls").is_visible()
    assert not page.locator("#theme").is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.querySelector('#chart-ladder .main-svg').clientWidth") == 680
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 22, 26)"


def test_a_filtered_table_is_printed_whole_and_stays_filtered_on_the_screen(report: pathlib.Path, open_page: Open) -> None:
    page = open_page(report)
    page.get_by_label("Runtime").select_option("torchscript")
    filtered = shown(page)
    assert 0 < len(filtered) < 24
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len(shown(page)) == 24
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert shown(page) == filtered


@BOTH_THEMES
def test_beaten_points_are_opaque_and_paler_than_the_front(report: pathlib.Path, open_page: Open, scheme: str) -> None:
    page = open_page(report, scheme=scheme)
    looks = page.eval_on_selector_all(
        "#chart-pareto .scatterlayer .points path", "all => all.map(each => [each.style.fill, each.style.opacity])"
    )
    fills = {fill for fill, _ in looks}
    assert {opacity for _, opacity in looks} <= {"", "1"}
    full, blend = ("rgb(27, 122, 61)", "rgb(175, 208, 187)") if scheme == "light" else ("rgb(107, 212, 143)", "rgb(50, 88, 67)")
    assert {full, blend} <= fills, fills  # OpenVINO's colour, and 35% of it on paper


def test_without_scripts_everything_but_the_charts_is_there(report: pathlib.Path, open_page: Open) -> None:
    page = open_page(report, java_script_enabled=False)
    assert page.locator("#trials-table tbody tr").count() == 24
    assert page.locator("h2").all_text_contents()[:3] == ["The ladder", "Speed against accuracy", "Every trial"]
    assert not page.locator("#controls").is_visible()


@pytest.mark.parametrize(
    ("options", "said", "charts"),
    [
        ({"count": 0, "status": None}, "No trial has ended yet.", set()),
        ({"count": 5, "status": None, "failed": 0}, "it is still running, or it was cut off", {"pareto"}),
        ({"count": 1, "failed": 0, "status": "kept_original"}, "the original ships", {"ladder", "pareto", "roofline"}),
        ({"count": 4, "failed": 4, "status": "limits_not_met"}, "No trial has both", set()),
        ({"count": 9, "explained": False}, "Where the time goes was not measured.", {"ladder", "pareto"}),
    ],
    ids=["empty", "running", "one trial", "no success", "not explained"],
)
def test_studies_of_every_kind_render(
    options: dict[str, Any], said: str, charts: set[str], tmp_path: pathlib.Path, open_page: Open
) -> None:
    page = open_page(made(record(**options), tmp_path))
    assert said in page.locator("main").inner_text()
    found = page.eval_on_selector_all(".chart:has(.main-svg)", "all => all.map(each => each.id.replace('chart-', ''))")
    assert set(found) == charts


def test_two_hundred_trials_with_megabytes_of_logs(tmp_path: pathlib.Path, open_page: Open) -> None:
    logs = {number: f"line of trial {number} <&>\x1b[31m é\n" * 40_000 + "the end" for number in (197, 198, 199)}
    path = write(with_logs(record(200, failed=3), tmp_path, logs))
    assert path.stat().st_size < 6_000_000
    page = open_page(path)
    assert len(shown(page)) == 200
    page.locator("#trials-table tbody tr[data-state=FAILED] button").first.click()
    log = page.get_by_role("dialog").locator("pre").last.text_content()
    assert log.endswith("the end")
    assert "<&> é" in log
